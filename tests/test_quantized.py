"""Matrices of 8 and 4 bits: what they are rounded to, folders, devices that have none, and images drawn with them."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lantern_hpu import LanternPipeline, cli
from lantern_hpu.backends.base import DevicePlan
from lantern_hpu.backends.cpu import native
from lantern_hpu.backends.cpu.backend import CPUBackend
from lantern_hpu.commands.convert import convert
from lantern_hpu.decode import memory
from lantern_hpu.decode.spec import Spec
from lantern_hpu.errors import OptionError, WeightsError
from lantern_hpu.files import sha256
from lantern_hpu.loading import write_folder as write_converted
from lantern_hpu.models.files.load import open_model, target_of
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.model import ImageModel, Placement
from lantern_hpu.ops.quantized import (
    QuantizedLinear,
    dequantized,
    quantized,
    quantized_layer,
    replace_layers,
)
from lantern_hpu.tree import DraftTree
from lantern_hpu.zoo.find import find_parts
from lantern_lab.stretch import stretch_model
from lantern_lab.train.drafter_training import begin
from tests.marks import mostly_slow
from tests.tiny import tiny_models

FAMILIES = (
    *("llamagen-c2i", "llamagen-t2i-256", "anole", "janus-pro", "emu3", "glm-image", "simplear"),
    *("mammothmoda2", "lumina-mgpt-2.0"),
)


def test_numbers_are_the_nearest_of_their_row() -> None:
    torch.manual_seed(0)
    weight = torch.randn(2100, 40) * torch.logspace(-6, 4, 2100)[:, None]  # more than one part
    weight[7] = 0
    numbers, scale = quantized(weight)
    assert numbers.dtype == torch.int8 and scale.dtype == torch.float32
    assert numbers.abs().amax(1)[scale > 0].eq(127).all() and not numbers[7].any()
    error = (dequantized(numbers, scale, torch.float32) - weight).abs()
    assert bool((error <= 0.5001 * scale[:, None]).all())


@pytest.mark.parametrize("group", [32, 64, 128])
def test_numbers_of_4_bits_are_the_nearest_of_their_group(group: int) -> None:
    """A group of zeros, and one on a side of 0, are among them; the twin unpacks them one by one."""
    torch.manual_seed(0)
    weight = torch.randn(1030, 256) * torch.logspace(-6, 4, 1030)[:, None]  # more than one part
    weight[7], weight[8, :group] = 0, weight[8, :group].abs() + 1
    numbers, scale, zero = quantized(weight, group)
    assert (numbers.dtype, scale.dtype, zero.dtype) == (torch.uint8, torch.float32, torch.uint8)
    assert zero.amax() <= 15 and not scale[7].any()
    twin = torch.empty_like(weight)
    for column in range(256):
        nibble = (numbers[:, column // 2] >> 4 * (column % 2)) % 16
        place = column // group
        twin[:, column] = scale[:, place] * (nibble.float() - zero[:, place].float())
    found = dequantized(numbers, scale, torch.float32, zero)
    assert torch.equal(found, twin)
    assert torch.equal(dequantized(numbers, scale, torch.bfloat16, zero), twin.bfloat16())
    steps = scale.repeat_interleave(group, 1)
    assert bool(((found - weight).abs() <= 1.0001 * steps).all())  # the ends, half a step inside
    assert bool(((found - weight).abs() <= 0.5001 * steps).float().mean() > 0.97)


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_numbers_that_are_none_are_refused(odd: float, group: int) -> None:
    weight = torch.ones(3, 32)
    weight[1, 1] = odd
    with pytest.raises(WeightsError, match="not finite"):
        quantized(weight, group)


@pytest.mark.parametrize(
    ("inputs", "form", "group"),
    [(256, "int8", 0), (256, "int4", 128), (192, "int4", 64), (96, "int4", 32), (80, "int4", 0)],
)
def test_a_layer_has_the_largest_group_that_divides_it(inputs: int, form: str, group: int) -> None:
    """One that none divides has 8 bits; its product is that of its numbers."""
    torch.manual_seed(0)
    plain = nn.Linear(inputs, 6)
    layer = quantized_layer(plain, form)
    assert (layer.group, layer.bits) == (group, 4 if group else 8)
    x = torch.randn(3, inputs)
    weight = layer.dequantized(torch.float32)
    assert torch.equal(layer(x), nn.functional.linear(x, weight, plain.bias))
    assert torch.equal(layer.dequantized(torch.float32, torch.tensor([4, 1])), weight[[4, 1]])


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> ImageModel:
    return open_model(find_parts(str(folder))).load(Placement(dtype, **how))


def small_layers(module: nn.Module) -> dict[str, QuantizedLinear]:
    return {n: m for n, m in module.named_modules() if isinstance(m, QuantizedLinear)}


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "llamagen-t2i-256", "mammothmoda2"))
def test_a_folder_holds_what_loading_rounds_to(
    public: Path, tmp_path: Path, family: str, form: str
) -> None:
    """All layers and the head, and no embedding; with the bytes that a plan says."""
    converted = tmp_path / "small"
    text = public / family / "text"
    given = PartOverrides(text=str(text)) if text.exists() else PartOverrides()
    write_converted(str(public / family), converted, "auto", given, form)
    there, here = loaded(converted), loaded(public / family, quantize=form)
    assert there.quantize == here.quantize == form
    mine, theirs = there.target.state_dict(), here.target.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    plain = loaded(public / family)
    linears = {n for n, m in plain.target.named_modules() if isinstance(m, nn.Linear)}
    embeds = {n for n in linears if n.startswith("embed")}
    assert small_layers(there.target).keys() == linears - embeds
    assert there.fingerprint == here.fingerprint == plain.fingerprint


@pytest.fixture(scope="module")
def small(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder with int8 matrices."""
    folder = tmp_path_factory.mktemp("int8") / "small"
    assert "target" in convert(str(model), folder, "auto", PartOverrides(), "int8")
    return folder


def test_a_folder_draws_the_images_of_its_model(model: Path, small: Path) -> None:
    """By its drafter, too; and the images say so."""
    drawn: list[Any] = []
    for folder, quantize in ((model, "int8"), (small, None)):
        pipeline = LanternPipeline.from_pretrained(str(folder), quantize=quantize)
        result = pipeline(["a red cat"] * 2, seed=3, method="eagle", output_type="tokens")
        assert result.config["quantize"] == "int8"
        drawn.append(result.tokens)
        pipeline.close()
    assert np.array_equal(drawn[0], drawn[1])
    sizes = [(folder / "target.safetensors").stat().st_size for folder in (small, model)]
    assert 2 * sizes[0] < 1.2 * sizes[1]


def test_what_reads_plain_matrices_refuses_quantised_ones(small: Path) -> None:
    """Training a drafter, widening a model, and measuring what int8 costs."""
    with pytest.raises(OptionError, match="its matrices are int8"):
        begin(loaded(small), finetune=False, seed=0)
    opened = open_model(find_parts(str(small)))
    with pytest.raises(OptionError, match="its matrices are int8"):
        stretch_model(opened, "llamagen-b", opened.config.target, None, None)
    command = ["fidelity", "--model", str(small), "--quantize", "int8", "--method", "ar"]
    assert cli.main(command) == 2


def filled(leaf: str, value: float) -> Callable[[Any], object]:
    """Puts a number into the first row of the head's tensor."""
    return lambda stored: stored[f"target.head.{leaf}"][:1].fill_(value)


def as_floats(stored: Any) -> None:
    stored["target.head.weight"] = stored["target.head.weight"].float()


INT8 = {"format": "int8", "version": 1}
# What a folder says of its matrices, a change of its tensors, and the complaint
REFUSED: dict[str, tuple[Any, Callable[[Any], object], str]] = {
    "another version": (INT8 | {"version": 2}, len, "int8 of version 2"),
    "another format": (INT8 | {"format": "int2"}, len, "int2 of version 1"),
    "no version": ("int8", len, "int8 of version None"),
    "nothing": (None, len, "holds torch.int8|unknown"),
    "no scales": (INT8, lambda stored: stored.pop("target.head.scale"), r"head\.weight holds"),
    "floats": (INT8, as_floats, r"head\.weight holds"),
    # Kernels differ in what they make of these
    "-128": (INT8, filled("weight", -128), r"target\.head\.weight holds numbers"),
    "a scale of NaN": (INT8, filled("scale", math.nan), r"target\.head\.scale holds numbers"),
    "an infinite scale": (INT8, filled("scale", math.inf), r"target\.head\.scale holds numbers"),
    "a negative scale": (INT8, filled("scale", -1.0), r"target\.head\.scale holds numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_this_version_does_not_write_is_refused(
    case: str, small: Path, tmp_path: Path
) -> None:
    """Its checksums are right."""
    described, change, complaint = REFUSED[case]
    folder = Path(shutil.copytree(small, tmp_path / "small"))
    file = folder / "target.safetensors"
    stored = load_file(file)
    change(stored)
    save_file(stored, file)
    about = json.loads((folder / "model.json").read_text()) | {"quantized": described}
    about["files"][file.name] = sha256(file)
    (folder / "model.json").write_text(json.dumps(about))
    with pytest.raises(WeightsError, match=complaint):
        loaded(folder)


def test_formats_that_a_folder_cannot_have_are_refused(
    model: Path, small: Path, tmp_path: Path
) -> None:
    """Matrices of few bits would stay as they are; there are none of 2."""
    command = ["models", "convert", str(small), str(tmp_path / "again"), "--dtype"]
    assert cli.main([*command, "bfloat16"]) == 2 and not (tmp_path / "again").exists()
    assert cli.main([*command, "auto", "--quantize", "int4"]) == 2
    assert cli.main([*command, "auto"]) == 0
    with pytest.raises(OptionError, match="are int8 already"):
        LanternPipeline.from_pretrained(str(small), quantize="int4")
    with pytest.raises(OptionError, match="int8, int4"):
        convert(str(model), tmp_path / "small", "auto", PartOverrides(), "int2")


# ------------------------------------------------------------------------------- GPTQ's layout

AUTOROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
GPTQ = {"quant_method": "gptq", "desc_act": False}
VERSION_2 = GPTQ | {"checkpoint_format": "gptq_v2"}
BLOCKS, INNER = r"^model\.language_model\.layers\.", "vision_language_encoder"
# A family's folder, where its weights are there, which matrices are quantised, and what config.json says of that
LAYOUTS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "all blocks": ("glm-image", INNER, BLOCKS, AUTOROUND),
    "a part of qkv": ("glm-image", INNER, rf"{BLOCKS}.*\.(q|k|o|down)_proj", VERSION_2),
    "emu3": ("emu3", "", r"layers\.\d+\.(self_attn|mlp\.[gu])", VERSION_2),
    "emu3-authors": ("emu3-authors", "", r"layers\.\d+\.self_attn", AUTOROUND),
    "janus": ("janus-pro-hub", "", rf"{BLOCKS}.*([qkvo]|gate|up)_proj|generation_head\.proj", GPTQ),
}


State = dict[str, torch.Tensor]


def in_nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """Whole numbers [n, m] of 4 bits, eight of a row in one int32 [n, m / 8]."""
    values = numbers.numpy().astype(np.uint32).reshape(len(numbers), -1, 8)
    shifted = values << np.arange(0, 32, 4, dtype=np.uint32)
    return torch.from_numpy(np.bitwise_or.reduce(shifted, -1).astype(np.uint32).view(np.int32))


def in_gptq(state: State, name: str, stated: dict[str, Any]) -> torch.Tensor:
    """Put random numbers in GPTQ's layout in the place of a matrix. -> what they stand for, float32"""
    generator = torch.Generator().manual_seed(len(name))
    matrix = state.pop(name)
    rows, columns = matrix.shape
    group = stated["group_size"]
    less = int(stated.get("checkpoint_format") != "gptq_v2")
    numbers = torch.randint(16, (rows, columns), generator=generator)
    zeros = torch.randint(less, 16 + less, (rows, columns // group), generator=generator)
    size = matrix.float().std() / 8
    scales = (torch.randn(zeros.shape, generator=generator) * size).half()  # AutoRound's may be < 0
    stem = name.removesuffix("weight")
    state[f"{stem}qweight"] = in_nibbles(numbers).T.contiguous()
    state[f"{stem}qzeros"] = in_nibbles((zeros - less).T.contiguous()).contiguous()
    state[f"{stem}scales"] = scales.T.contiguous()
    if stated["quant_method"] == "gptq":
        state[f"{stem}g_idx"] = torch.arange(columns, dtype=torch.int32) // group
    steps = scales.float().repeat_interleave(group, 1)
    return steps * (numbers - zeros.repeat_interleave(group, 1))


def write_gptq(layout: str, public: Path, folder: Path) -> tuple[Path, Path]:
    """A family's folder in GPTQ's layout, and one with the numbers that it stands for."""
    family, inner, quantised, stated = LAYOUTS[layout]
    stated = stated | {"bits": 4, "group_size": 32}
    packed, plain = (
        Path(shutil.copytree(public / family, folder / name)) for name in ("packed", "plain")
    )
    for file in sorted((packed / inner).glob("*.safetensors")):
        small, floats = load_file(file), load_file(file)
        for name in [*small]:
            if re.search(rf"{quantised}.*weight$", name) and small[name].dim() == 2:
                floats[name] = in_gptq(small, name, stated)
        save_file(small, file, metadata={"format": "pt"})
        save_file(floats, plain / inner / file.name, metadata={"format": "pt"})
    (packed / inner / "model.safetensors.index.json").unlink(missing_ok=True)
    about = packed / inner / "config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"quantization_config": stated}))
    return packed, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, "all blocks", "a part of qkv"))
def test_a_folder_in_gptqs_layout_is_its_dequantised_numbers(
    layout: str, dtype: torch.dtype, public: Path, tmp_path: Path
) -> None:
    """To the bit, and so are those of our own folder of it; a layer that it has partly as floats is one of floats."""
    packed, plain = write_gptq(layout, public, tmp_path)
    wanted = loaded(plain, dtype).target.state_dict()
    written = tmp_path / "ours"
    write_converted(str(packed), written, "auto")
    for folder in (packed, written):
        found = loaded(folder, dtype)
        layers = small_layers(found.target)
        assert found.quantize == "int4"
        assert layers and {layer.group for layer in layers.values()} == {32}
        assert ("layers.0.attention.qkv" in layers) == (layout != "a part of qkv")
        assert "head" not in layers
        renewed = small_layers(target_of(found, wanted)[0])  # with a trainer's weights
        assert {n: layer.group for n, layer in renewed.items()} == dict.fromkeys(layers, 32)
        DevicePlan(NoSmallMatrices(), dtype).keep_quantized(found.stepping, "int4")
        mine = found.target.state_dict()
        assert mine.keys() == wanted.keys()
        assert all(torch.equal(mine[name], wanted[name]) for name in mine)


CHANGED = "model.language_model.layers.1.mlp.down_proj."


def reordered(state: State, name: str) -> None:
    state[f"{name}g_idx"] = state[f"{name}g_idx"].flip(0)


def eight_bits(state: State, name: str) -> None:
    state[f"{name}qweight"] = state[f"{name}qweight"].repeat(2, 1)
    del state[f"{name}g_idx"]


# What `quantization_config` says instead, a change of the tensors of a matrix, and the complaint
UNREAD: dict[str, tuple[dict[str, Any], Callable[[Any, str], object], str]] = {
    "8 bits": ({"bits": 8}, lambda *_: 0, "bits is 8, where 4 is read"),
    "whole rows": ({"group_size": -1}, lambda *_: 0, "group_size is -1, where 128 or 64 or 32"),
    "Marlin's": ({"checkpoint_format": "marlin"}, lambda *_: 0, "checkpoint_format is marlin"),
    "AWQ's": ({"packing_format": "auto_round:auto_awq"}, lambda *_: 0, "packing_format is auto_r"),
    "another method": ({"quant_method": "awq"}, lambda *_: 0, "is quantised by awq"),
    "inputs out of order": ({}, reordered, "g_idx is not in order"),
    "other sizes": ({}, eight_bits, r"mlp\.down_proj\.weight \[64, 96\] for \[64, 48\]"),
    "no zeros": ({}, lambda state, name: state.pop(f"{name}qzeros"), "no groups of 4 bits"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_other_kinds_of_gptqs_layout_are_refused(case: str, public: Path, tmp_path: Path) -> None:
    """In a sentence."""
    stated, change, complaint = UNREAD[case]
    packed, _ = write_gptq(
        "all blocks" if "packing_format" in stated else "a part of qkv", public, tmp_path
    )
    about = packed / INNER / "config.json"
    for file in (packed / INNER).glob("*.safetensors"):
        state = load_file(file)
        if any(CHANGED in name for name in state):
            change(state, CHANGED)
        save_file(state, file)
    config = json.loads(about.read_text())
    config["quantization_config"] |= stated
    about.write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=complaint):
        loaded(packed)


class NoSmallMatrices(CPUBackend):
    name = "other"
    quantized: tuple[str, ...] = ()


def test_a_device_without_them_has_the_same_numbers_in_its_format(model: Path) -> None:
    """And says so in a line."""
    found = loaded(model, quantize="int8")
    layers = small_layers(found.target)
    kept = {name: layer.dequantized(torch.float32) for name, layer in layers.items()}
    note = DevicePlan(NoSmallMatrices(), torch.float32).keep_quantized(found.stepping, "int8")
    assert note == "other keeps no int8 matrices: it draws with the same numbers in float32"
    for module in found.stepping:
        assert not small_layers(module)
    for name, weight in kept.items():
        layer = found.target.get_submodule(name)
        assert type(layer) is nn.Linear and torch.equal(layer.weight, weight)


needs_native = pytest.mark.skipif(native.open_library()[0] is None, reason="no native decoder")


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_image_does_not_depend_on_its_batch(model: Path, dtype: str) -> None:
    """Trees, windows, prefill and relaxation."""
    how: dict[str, Any] = {"quantize": "int8", "dtype": dtype, "layout": "native"}
    pipe = LanternPipeline.from_pretrained(str(model), **how)
    for method in ("eagle@deep_7", "eagle2", "scd@4", "sjd-pac@2:2x1", "lantern++@broad_7"):
        asked: dict[str, Any] = {"method": method, "output_type": "tokens"}
        together = pipe(["a red cat", "an apple", "blue"], seed=5, **asked).tokens
        alone = pipe("an apple", seed=6, **asked).tokens
        assert together[1].tolist() == alone[0].tolist(), method
    pipe.close()


@needs_native
def test_packed_matrices_take_the_bytes_of_a_plan() -> None:
    """Of the embedded model, to 1 %."""
    pipe = LanternPipeline.from_pretrained(
        "builtin", quantize="int8", dtype="bfloat16", pictures=False
    )
    model, spec = pipe.model, Spec(1, True, DraftTree.root_only())
    said = dict(memory.weights(model.config, memory.Setup(spec, "bfloat16", quantize="int8")))
    target = [model.target, *model.condition.parts().values()]
    for parts, count in (
        (target, said["target weights"]),
        ([model.drafter], said["drafter weights"]),
    ):
        held = 0
        for part in (part for part in parts if part is not None):
            held += sum(x.nbytes for x in (*part.parameters(), *part.buffers()))
        assert abs(held - count) < 0.01 * count
    pipe.close()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_decoder_takes_the_activations_of_its_model(dtype: torch.dtype) -> None:
    """Also a drafter's alone, whose block begins without a norm."""
    target, drafter = (module.to(dtype) for module in tiny_models())
    replace_layers(drafter, nn.Linear, quantized_layer)
    native.pack_model([target, drafter])
    small = native.INTEGERS if dtype == torch.bfloat16 else native.INTEGERS_FLOAT32
    assert target.decoder.format < native.INTEGERS
    formats = {drafter.decoder.format, cast(Any, drafter.fc).format}
    assert formats == {small}


@needs_native
@pytest.mark.parametrize(("layout", "mixed"), [("all blocks", False), ("a part of qkv", True)])
def test_layers_of_floats_and_of_integers_are_not_called_together(
    layout: str, mixed: bool, public: Path, tmp_path: Path
) -> None:
    packed, _ = write_gptq(layout, public, tmp_path)
    assert ("some are not" in native.why_unsupported(loaded(packed).stepping)) == mixed
