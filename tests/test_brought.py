"""What people bring from other programs: quantised copies, adapters, folders of trainers, and saved codes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lantern_hpu import LanternPipeline
from lantern_hpu.commands import generate, pixels, plan
from lantern_hpu.errors import DeviceError, OptionError, WeightsError
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.zoo.find import find_parts
from tests.tiny import tiny_config

State = dict[str, Tensor]
Draw = Callable[..., int | str]
Change = Callable[[State, str], None]
JANUS = "janus-pro"
ENDING = len("weight")


@pytest.fixture(scope="module")
def weights(public: Path) -> State:
    held: State = torch.load(public / JANUS / "pytorch_model.bin", weights_only=True)
    return held


@pytest.fixture
def bare(public: Path, tmp_path: Path) -> Path:
    """A model's folder without its weights."""
    unlike = shutil.ignore_patterns("pytorch_model.bin")
    return Path(shutil.copytree(public / JANUS, tmp_path / "model", ignore=unlike))


def projections(state: State) -> list[str]:
    inside = [name for name in state if name.startswith("language_model.model.layers")]
    return [name for name in inside if name.endswith("proj.weight")]


def store(state: State, file: Path) -> None:
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, file)


def configured(folder: Path, **more: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))


# ------------------------------------------------------------------------------------ quantised copies


def packed(state: State, name: str, ending: str, *others: str) -> None:
    """Whole numbers of a few weights each in place of a tensor, and what it takes to unpack them."""
    rows = len(state.pop(name))
    state[name[:-ENDING] + ending] = torch.zeros(rows, 4, dtype=torch.int32)
    for other in others:
        state[name[:-ENDING] + other] = torch.ones(rows, 1)


def scaled(state: State, name: str, dtype: torch.dtype, *others: str) -> None:
    rows = len(state[name])
    state[name] = torch.zeros(state[name].shape, dtype=dtype)
    for other in others:
        state[name[:-ENDING] + other] = torch.ones(rows)


def bitsandbytes4(state: State, name: str) -> None:
    state[name] = torch.zeros((state[name].numel() + 1) // 2, 1, dtype=torch.uint8)
    for part in ("absmax", "quant_map", "quant_state.bitsandbytes__nf4"):
        state[f"{name}.{part}"] = torch.zeros(16)


FP8 = torch.float8_e4m3fn
COPIES: dict[str, tuple[Change, object, str]] = {
    "bitsandbytes 4 bit": (bitsandbytes4, {"quant_method": "bitsandbytes"}, "bitsandbytes"),
    "bitsandbytes 8 bit": (lambda s, n: scaled(s, n, torch.int8, "SCB"), None, "bitsandbytes"),
    "GPTQ": (lambda s, n: packed(s, n, "qweight", "qzeros", "scales", "g_idx"), None, "GPTQ"),
    "AWQ": (lambda s, n: packed(s, n, "qweight", "qzeros", "scales"), None, "AWQ"),
    "AWQ, said so": (
        lambda s, n: packed(s, n, "qweight", "scales"),
        {"quant_method": "awq-marlin"},
        "awq-marlin",
    ),
    "HQQ": (lambda s, n: packed(s, n, "W_q", "scale", "zero"), None, "HQQ"),
    "EXL2": (lambda s, n: packed(s, n, "q_weight", "q_scale"), None, "EXL2"),
    "quanto": (lambda s, n: packed(s, n, "weight._data", "weight._scale"), None, "quanto"),
    "compressed-tensors": (
        lambda s, n: packed(s, n, "weight_packed", "weight_scale", "weight_shape"),
        {"quant_method": "compressed-tensors"},
        "compressed-tensors",
    ),
    "FP8": (lambda s, n: scaled(s, n, FP8, "weight_scale"), None, "FP8"),
    "FP8 in blocks": (lambda s, n: scaled(s, n, FP8, "weight_scale_inv"), None, "FP8"),
    "MLX": (
        lambda s, n: packed(s, n, "weight", "scales", "biases"),
        {"group_size": 64, "bits": 4},
        "MLX",
    ),
    "a config.json of another kind": (lambda s, n: packed(s, n, "W_q"), ["hqq"], "HQQ"),
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_quantised_copy_is_refused_by_what_quantised_it(
    kind: str, bare: Path, weights: State
) -> None:
    change, stated, by = COPIES[kind]
    state = dict(weights)
    for name in projections(state):
        change(state, name)
    store(state, bare / "model.safetensors")
    if stated is not None:
        configured(bare, quantization_config=stated)
    with pytest.raises(WeightsError, match=f"is quantised by {by}") as refused:
        open_model(find_parts(str(bare)))
    assert "bfloat16" in str(refused.value)


def test_a_quantised_copy_is_refused_in_pieces_and_as_one_file(bare: Path, weights: State) -> None:
    state = dict(weights)
    for name in projections(state):
        bitsandbytes4(state, name)
    half = len(state) // 2
    for i, names in enumerate((list(state)[:half], list(state)[half:])):
        store(
            {name: state[name] for name in names}, bare / f"model-0000{i + 1}-of-00002.safetensors"
        )
    torch.save(state, bare / "janus.pt")
    for given in (bare / "model-00001-of-00002.safetensors", bare / "janus.pt"):
        with pytest.raises(WeightsError, match="is quantised by bitsandbytes"):
            open_model(find_parts(str(given)))


def test_weights_of_a_quantised_copy_that_are_whole_again_are_read(
    bare: Path, weights: State
) -> None:
    """Tensors decide: programs that undo it leave the words in config.json."""
    store(weights, bare / "model.safetensors")
    configured(bare, quantization_config={"quant_method": "bitsandbytes"})
    assert open_model(find_parts(str(bare))).config.target.dim == 32


def test_models_for_llama_cpp_are_named(bare: Path, public: Path) -> None:
    file = bare / "janus-pro-1b-Q4_K_M.gguf"
    file.write_bytes(b"GGUF" + bytes(200))
    for model, drafter in (
        (bare, None),
        (file, None),
        (public / JANUS, str(file)),
        (public / JANUS, str(bare)),
    ):
        with pytest.raises(WeightsError, match=r"gguf is quantised by llama.cpp"):
            open_model(find_parts(str(model), PartOverrides(drafter)))


def test_every_surface_says_that_a_copy_is_quantised(
    bare: Path, weights: State, capsys: pytest.CaptureFixture[str]
) -> None:
    state = dict(weights)
    for name in projections(state):
        bitsandbytes4(state, name)
    store(state, bare / "model.safetensors")
    assert generate.main(["--model", str(bare), "--prompt", "x", "--output", str(bare / "x")]) == 2
    assert plan.main([str(bare), "--memory", "24GB"]) == 2
    assert capsys.readouterr().err.count("is quantised by bitsandbytes") == 2
    with pytest.raises(WeightsError, match="is quantised by bitsandbytes"):
        LanternPipeline.from_pretrained(str(bare), device="cpu")


# ------------------------------------------------------------------------------------ adapters


def lora(state: State, inside: str = "") -> State:
    made = {}
    for name in projections(state):
        for part, shape in (("A", (4, state[name].shape[1])), ("B", (len(state[name]), 4))):
            made[f"base_model.model.{name[: -ENDING - 1]}.lora_{part}{inside}.weight"] = (
                torch.zeros(shape)
            )
    return made


def adapter(folder: Path, state: State, name: str = "adapter_model.safetensors") -> None:
    about = {"peft_type": "LORA", "base_model_name_or_path": "deepseek-ai/Janus-Pro-1B", "r": 4}
    store(state, folder / name)
    (folder / "adapter_config.json").write_text(json.dumps(about))


def test_an_adapter_is_no_model_and_its_base_is_named(tmp_path: Path, weights: State) -> None:
    adapter(tmp_path, lora(weights))
    for given in (tmp_path, tmp_path / "adapter_model.safetensors"):
        with pytest.raises(WeightsError, match=r"LoRA adapter of deepseek-ai/Janus") as refused:
            open_model(find_parts(str(given)))
        assert "merge it" in str(refused.value)


@pytest.mark.parametrize("of_now", [True, False])
def test_a_model_with_an_adapter_that_is_not_merged_is_refused(
    of_now: bool, bare: Path, weights: State
) -> None:
    """Newer versions of PEFT call the weights that it changes `base_layer`."""
    state = lora(weights, ".default")
    for name, tensor in weights.items():
        inner = of_now and name in projections(weights)
        put = name[:-ENDING] + "base_layer.weight" if inner else name
        state[f"base_model.model.{put}"] = tensor
    store(state, bare / "model.safetensors")
    with pytest.raises(WeightsError, match="not merged"):
        open_model(find_parts(str(bare)))


def test_an_adapter_next_to_weights_is_left_out_with_a_note(
    bare: Path, public: Path, weights: State
) -> None:
    adapter(bare, lora(weights))
    shutil.copy(public / JANUS / "pytorch_model.bin", bare)
    assert any("LoRA adapter" in note for note in open_model(find_parts(str(bare))).notes)


# ------------------------------------------------------------------------------------ folders of trainers

TRAINERS = {
    "Trainer": ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "training_args.bin"),
    "Trainer on several devices": ("optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"),
    "accelerate": ("optimizer.bin", "scheduler.bin", "sampler.bin"),
    "accelerate with two optimizers": ("optimizer.bin", "optimizer_1.bin", "random_states_0.pkl"),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_weights_of_a_trainers_folder_are_read(trainer: str, public: Path, bare: Path) -> None:
    for name in TRAINERS[trainer]:
        torch.save({"state": {}, "last_epoch": 3}, bare / name)
    with pytest.raises(WeightsError, match="is not a model"):
        find_parts(str(bare))
    shutil.copy(public / JANUS / "pytorch_model.bin", bare)
    assert open_model(find_parts(str(bare))).config.target.dim == 32


# ------------------------------------------------------------------------------------ codes of other programs

SIDE = tiny_config().grid[0]
CODES = (
    16 + np.arange(SIDE * SIDE, dtype=np.int64)[None] % 16
)  # of one picture, up to the last of 32
GRID = CODES.reshape(SIDE, SIDE)
IMAGE = torch.from_numpy(CODES)
NO_PICTURE = "of another model"

SAVED: dict[
    str, tuple[str, Any, int | str]
] = {  # file, content, and how many pictures or what is said
    "LlamaGen's of a caption": ("t2i.npy", CODES, 1),
    "LlamaGen's of a class, by crops": ("c2i.npy", CODES[None].repeat(10, 1), 10),
    "one row": ("row.npy", CODES[0], 1),
    "a grid": ("grid.npy", GRID, 1),
    "grids": ("grids.npy", GRID[None].repeat(3, 0), 3),
    "grids by crops": ("crops.npy", GRID[None, None].repeat(2, 0), 2),
    "bytes": ("bytes.npy", CODES.astype(np.uint8), 1),
    "savez without a name": ("arr.npz", {"arr_0": CODES}, 1),
    "savez of another name": ("named.npz", {"codes": GRID, "label": np.asarray([3])}, 1),
    "safetensors": ("t.safetensors", {"tokens": IMAGE}, 1),
    "safetensors of another name": ("c.safetensors", {"x": IMAGE.int(), "y": IMAGE.float()}, 1),
    "too few": ("few.npy", CODES[:, :-1], NO_PICTURE),
    "pictures of another size": ("small.npy", CODES.reshape(2, -1), NO_PICTURE),
    "crops of another size": ("crops.npy", CODES.reshape(1, 2, -1), "expected a row of"),
    "below the codes": ("below.npy", CODES - 17, "its codes from 0 to 31"),
    "more than 63 bits": ("large.npy", CODES.astype(np.uint64) + 2**63, "its codes from 0 to 31"),
    "fractions": ("half.npy", CODES / 2, "of float64"),
    "truths": ("bool.npy", CODES > 3, "of bool"),
    "nothing": ("none.npy", CODES[:0], "expected a row of"),
    "weights": ("w.safetensors", {"weight": torch.ones(2, 2)}, "it has none"),
    "objects": ("objects.npy", np.asarray([{}, {}]), "cannot read tokens"),
    "another ending": ("tokens.txt", b"1 2 3", "cannot read tokens"),
    "beyond the codes": ("beyond.npy", CODES + 1, "its codes from 0 to 31"),
    "two that fit": ("two.npz", {"a": CODES, "b": CODES}, "a [1, "),
    "a file of torch.save": ("tokens.pt", {"codes": CODES}, "numpy.save('tokens.npy', tokens)"),
}


def save(file: Path, content: Any) -> Path:
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif file.suffix == ".npy":
        np.save(file, content)
    elif file.suffix == ".npz":
        np.savez(file, **content)
    elif file.suffix == ".safetensors":
        save_file(content, file)
    else:
        torch.save(content, file)
    return file


@pytest.fixture
def pictures(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Draw:
    """How many pictures `pixels` makes of a file, or its error."""

    def draw(path: Path, name: str | Path = model) -> int | str:
        out = tmp_path / "out"
        code = pixels.main([str(path), "--model", str(name), "--output", f"{out}/", "--force"])
        said = capsys.readouterr().err
        made = len(list(out.glob("*.png")))
        assert "Traceback" not in said and (code == 0) == bool(made)
        return made if code == 0 else said

    return draw


@pytest.mark.parametrize("kind", SAVED)
def test_codes_become_pictures_or_an_error_about_them(
    kind: str, pictures: Draw, tmp_path: Path
) -> None:
    name, content, wanted = SAVED[kind]
    seen = pictures(save(tmp_path / name, content))
    assert seen == wanted if isinstance(wanted, int) else wanted in str(seen)


def test_a_folder_of_codes_is_read_in_the_order_of_its_numbers(
    model: Path, pictures: Draw, tmp_path: Path
) -> None:
    folder, whole = tmp_path / "codes", tmp_path / "all.npy"
    folder.mkdir()
    rows = [np.roll(CODES, i) for i in range(12)]
    for i, row in enumerate(rows):
        save(folder / f"{i}.npy", row)
    (folder / "log.txt").write_text("done")
    assert pictures(folder) == 12
    seen = [file.read_bytes() for file in sorted((tmp_path / "out").glob("*.png"))]
    assert pictures(save(whole, np.concatenate(rows))) == 12
    assert seen == [file.read_bytes() for file in sorted((tmp_path / "out").glob("*.png"))]
    shutil.rmtree(tmp_path / "out")
    save(folder / "7.npy", CODES[:, 1:])
    assert "7.npy are of another model" in str(pictures(folder))
    for file in folder.glob("*.npy"):
        file.unlink()
    assert "holds no tokens" in str(pictures(folder))


def test_codes_of_a_model_whose_rows_are_closed_come_without_what_closes_them(
    public: Path, pictures: Draw, tmp_path: Path
) -> None:
    """As Emu3's own tools save them."""
    config = open_model(find_parts(str(public / "emu3"))).config.target
    codes = torch.randint(0, config.codes, config.grid)
    assert config.row_ends
    closed = np.pad(codes.numpy(), ((0, 0), (0, 1)), constant_values=config.vocab_size - 1)
    made = set()
    for content in (codes[None].numpy(), codes.flatten().numpy(), closed):
        assert pictures(save(tmp_path / "emu3.npy", content), public / "emu3") == 1
        made.add(next((tmp_path / "out").glob("*.png")).read_bytes())
    assert len(made) == 1


# ------------------------------------------------------------------------------------ processes and cards


@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_draws_with_one_thread_and_says_use_spawn_with_more(
    threads: int, pipeline: LanternPipeline
) -> None:
    """Where it would wait for ever: threads are not forked."""
    whole = pipeline("red cat", method="ar").tokens
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = f"drew {np.array_equal(pipeline('red cat', method='ar').tokens, whole)}"
        except DeviceError as error:
            said = str(error)
        os.write(writer, said.encode())
        os._exit(0)
    torch.set_num_threads(before)
    os.waitpid(child, 0)
    seen = os.read(reader, 1000).decode()
    assert ("use spawn" in seen) if threads > 1 else (seen == "drew True"), seen


@pytest.mark.parametrize(
    ("device", "hint"),
    [
        ("hpu:3", "HABANA_VISIBLE_MODULES=3, and device='hpu'"),
        ("cuda:1", "CUDA_VISIBLE_DEVICES=1, and device='cuda'"),
        ("cpu:1", "device='cpu'"),
    ],
)
def test_a_card_by_its_number_is_chosen_by_its_own_variable(device: str, hint: str) -> None:
    with pytest.raises(OptionError) as refused:
        LanternPipeline.from_pretrained("builtin", device=device)
    assert str(refused.value).endswith(f"try: {hint}")
