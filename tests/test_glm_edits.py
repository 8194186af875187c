"""GLM-Image with pictures to draw from: equal to transformers' and diffusers' own classes on small random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lantern_hpu.commands import generate, pixels
from lantern_hpu.core import Request, Sampling, SourcePicture
from lantern_hpu.decode.memory import Setup, weights
from lantern_hpu.errors import OptionError
from lantern_hpu.models.config import DrafterConfig
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.model import ImageModel, Placement
from lantern_hpu.models.pictures import GlmImageReader, bilinear_rows
from lantern_hpu.models.text.frames import check_sources, reads_pictures
from lantern_hpu.models.transformer import Drafter, Rotary
from lantern_hpu.ops.buffers import additive_mask, prefix_mask
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.zoo.find import find_parts
from tests import test_glm_image
from tests.emulated import emulated, rules
from tests.marks import mostly_slow
from tests.published import p_value, reference_order
from tests.test_glm_image import (
    GREEDY,
    PROMPTS,
    opened,
    pipeline_of,
    reference,
)
from tests.test_sources import painted

pytest.importorskip("transformers.models.glm_image")

METHODS = ("jacobi", "scd@8", "sjd-pac@8")


@pytest.fixture(scope="session")
def folder(public: Path) -> Path:
    return public / "glm-image"


SOURCES: dict[int, tuple[SourcePicture, ...]] = {
    0: (),
    1: (painted(64, 96),),
    2: (painted(128, 64), painted(96, 160)),
}


def reader_of(model: ImageModel) -> GlmImageReader:
    assert isinstance(model.condition.reader, GlmImageReader)
    return model.condition.reader


def inputs_of(
    processor: Any,
    model: ImageModel,
    prompts: Sequence[str],
    sources: Sequence[Sequence[SourcePicture]],
    grid: tuple[int, int],
) -> Any:
    """What transformers' processor makes of prompts with what our reader sees of their sources."""
    prepared = reader_of(model).prepared
    pictures = [[prepared(source) for source in own] for own in sources]
    return test_glm_image.inputs_of(processor, prompts, grid, pictures)


def their_codes(theirs: Any, inputs: Any, own: Sequence[Sequence[SourcePicture]]) -> Tensor:
    """Codes of all sources, in one row."""
    per = [len(one) for one in own]
    grids, at = [], 0
    for count in per:
        grids.append(inputs["image_grid_thw"][at : at + count])
        at += count + 1
    features = theirs.get_image_features(inputs["pixel_values"], torch.cat(grids)).pooler_output
    codes: Tensor = theirs.get_image_tokens(features)
    return codes


# ------------------------------------------------------------------------------------ what is read


@pytest.mark.parametrize(
    "size",
    [(64, 64), (20, 20), (50, 200), (300, 90), (100, 131), (512, 512), (700, 2000), (1024, 300)],
    ids=str,
)
def test_patches_are_those_of_transformers(folder: Path, size: tuple[int, int]) -> None:
    """A source of any size becomes one that their processor halves, and no more; sides stay within the limits."""
    reader = reader_of(opened(folder))
    _, processor = reference(folder)
    source = painted(*size)
    picture = reader.prepared(source)
    height, width = reader.size(source)
    assert picture.size == (width, height) and {height % 32, width % 32} == {0}
    assert min(height, width) >= 64 and max(height, width) <= 512
    assert abs(np.log(height / width) - np.log(size[0] / size[1])) < 0.3
    made = processor.image_processor(picture, return_tensors="pt")
    assert made["image_grid_thw"].tolist() == [[1, *reader.grid(source)]]
    half = picture.resize((width // 2, height // 2), Image.Resampling.BICUBIC)
    rows, columns = reader.grid(source)
    mine = reader.pixels(half)[0].reshape(3, rows, 16, columns, 16).permute(1, 3, 0, 2, 4)
    torch.testing.assert_close(mine.flatten(0, 1).flatten(1), made["pixel_values"].flatten(1))


@pytest.mark.parametrize("size", [(64, 96), (128, 64), (96, 320), (480, 512)], ids=str)
def test_codes_are_those_of_transformers(folder: Path, size: tuple[int, int]) -> None:
    """In float32 and in float64, from the published weights; positions are sampled from the table as theirs."""
    model, (theirs, processor) = opened(folder), reference(folder)
    source = painted(*size)
    reader = reader_of(model)
    inputs = inputs_of(processor, model, ["dog"], [[source]], (3, 4))
    with torch.no_grad():
        want = their_codes(theirs, inputs, [[source]])
        pixels = reader.pixels(
            reader.prepared(source).resize((size[1] // 2, size[0] // 2), Image.Resampling.BICUBIC)
        )
        grids = inputs["image_grid_thw"][:1]
        features = theirs.get_image_features(inputs["pixel_values"], grids).pooler_output[0]
    codes = reader.codes(source)
    assert codes.shape == reader.grid(source)
    assert torch.equal(codes.flatten(), want)
    assert len(want.unique()) > 2
    tower = reader.loaded()
    sides = [bilinear_rows(n, reader.config.side) for n in reader.grid(source)]
    with torch.no_grad():
        z = tower(pixels, *sides)
        their_z = theirs.model.vqmodel.quant_conv(features.reshape(1, -1, *codes.shape))
    torch.testing.assert_close(z, their_z[0].permute(1, 2, 0), atol=1e-4, rtol=1e-4)


def test_a_source_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(open_model(find_parts(str(folder))).load(Placement()))
    assert reader.tower is None  # its weights wait for a first source
    real, read = reader.encode, []

    def counted(picture: Image.Image) -> Tensor:
        read.append(picture.size)
        return real(picture)

    monkeypatch.setattr(reader, "encode", counted)
    for source in (painted(64, 96), painted(64, 96), painted(64, 96, 1)):
        reader.codes(source)
    assert len(read) == 2


# ----------------------------------------------------------------------------------- the prompt


@pytest.mark.parametrize("count", SOURCES)
def test_prompts_and_places_are_those_of_transformers(folder: Path, count: int) -> None:
    """Tokens with the codes in place, and the axes of prompt and picture."""
    model, (theirs, processor) = opened(folder), reference(folder)
    grid, sources = (3, 4), SOURCES[count]
    request = Request("dog", sources=sources, size=(96, 128))
    config = model.sizes([request])
    assert config.sourced == bool(count) and config.grid == grid
    condition = model.condition.sized(config)
    prefix = condition.rows([request], False)
    inputs = inputs_of(processor, model, ["dog"], [sources], grid)
    length = int(prefix.valid.sum())
    ids = inputs["input_ids"].clone()
    assert ids.shape[1] == length == condition.length(request)
    if count:
        ids[ids == theirs.config.image_token_id] = their_codes(theirs, inputs, [sources])
    assert prefix.tokens[0, -length:].tolist() == ids[0].tolist()
    first, _ = theirs.model.get_rope_index(
        inputs["input_ids"], inputs["image_grid_thw"], inputs["images_per_sample"]
    )
    drawn = theirs.model._cached_decode_position_ids[0, :, : config.tokens]  # [3, N]
    rotary = Rotary(config, config.prefix + config.tokens)
    places = torch.arange(config.prefix, config.prefix + config.tokens)
    span = config.prefix - prefix.pads
    assert rotary.axes is not None
    mine = rotary.axes[:, places] - (config.prefix - span)
    assert torch.equal(mine, drawn.int())
    if count:
        assert prefix.axes is not None
        assert torch.equal(prefix.axes[0, :, -length:], first[:, 0].int())
        assert span < length  # codes share positions
    else:
        assert prefix.axes is None and span == length


def my_logits(model: ImageModel, requests: Sequence[Request], tokens: Tensor) -> Tensor:
    """Of each of these tokens [B, N], in one pass without a cache: [B, N, V]."""
    config = model.sizes(requests)
    prefix = model.condition.sized(config).rows(requests, False)
    x = torch.cat([prefix.embeddings, model.target.embed(tokens[:, :-1])], 1)
    valid = torch.cat([prefix.valid, torch.ones_like(tokens[:, :-1], dtype=torch.bool)], 1)
    length = x.shape[1]
    mask = prefix_mask(valid, torch.ones(length, length, dtype=torch.bool).tril())
    rotary = Rotary(config, length)
    if prefix.axes is None:
        rope = rotary(torch.arange(length).expand(len(x), -1), prefix.pads)
    else:
        behind = torch.arange(config.prefix, length).expand(len(x), -1)
        rope = torch.cat([rotary.at(prefix.axes), rotary(behind, prefix.pads)], 1)
    hidden = model.target(x, rope, additive_mask(mask, x.dtype))
    return model.target.head(hidden[:, config.prefix - 1 :])


def their_logits(
    theirs: Any, inputs: Any, own: Sequence[Sequence[SourcePicture]], tokens: Tensor
) -> Tensor:
    """Of each of these tokens [B, N], over whole sequences and with transformers' own positions: [B, N, V]."""
    ids = inputs["input_ids"].clone()
    ids[ids == theirs.config.image_token_id] = their_codes(theirs, inputs, own)
    first, _ = theirs.model.get_rope_index(
        inputs["input_ids"],
        inputs["image_grid_thw"],
        inputs["images_per_sample"],
        inputs["attention_mask"],
    )
    drawn = theirs.model._cached_decode_position_ids[:, :, : tokens.shape[1] - 1]
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(tokens[:, :-1])], 1)
    out = theirs.model.language_model(
        input_ids=torch.cat([ids, tokens[:, :-1]], 1),
        attention_mask=mask,
        position_ids=torch.cat([first, drawn.movedim(1, 0)], 2),
        use_cache=False,
    )
    logits: Tensor = theirs.lm_head(out[0][:, ids.shape[1] - 1 :])
    return logits


@pytest.mark.parametrize("count", [1, 2])
def test_logits_are_those_of_transformers(folder: Path, count: int) -> None:
    """Of every token, of prompts of unequal lengths with sources of unequal sizes in one batch."""
    model, (theirs, processor) = opened(folder), reference(folder)
    grid = (3, 5)
    own = [SOURCES[count], tuple(painted(96 + 32 * i, 64, 7) for i in range(count)), SOURCES[count]]
    requests = [Request(p, sources=s, size=(96, 160)) for p, s in zip(PROMPTS, own, strict=True)]
    inputs = inputs_of(processor, model, PROMPTS, own, grid)
    tokens = torch.randint(64, (len(PROMPTS), 15), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = their_logits(theirs, inputs, own, tokens)
        got = my_logits(model, requests, tokens)
    assert want.std() > 0.5
    torch.testing.assert_close(got[..., :64], want[..., :64], atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------ drawing


def drawn(
    pipeline: LanternPipeline,
    own: Sequence[Sequence[SourcePicture]],
    method: str = "ar",
    sampling: Sampling = GREEDY,
    batch: int | None = None,
    size: tuple[int, int] = (96, 160),
) -> Any:
    setting = pipeline.resolve(method)
    requests = [
        Request(PROMPTS[i % 3], i, sampling, setting.relaxation, None, size, tuple(sources))
        for i, sources in enumerate(own)
    ]
    return pipeline.draw(requests, setting, batch, decode=False)


@pytest.mark.parametrize("count", mostly_slow([1, 2], 2))
def test_greedy_pictures_are_those_of_transformers(folder: Path, count: int) -> None:
    """To the last token, with pixels given to their `generate`; every method draws what `ar` draws."""
    pipeline, (theirs, processor) = pipeline_of(folder), reference(folder)
    sources = SOURCES[count]
    inputs = inputs_of(processor, pipeline.model, PROMPTS[:1], [sources], (3, 5))
    want = theirs.generate(
        **inputs,
        max_new_tokens=15,
        do_sample=False,
        suppress_tokens=list(range(64, theirs.config.text_config.vision_vocab_size)),
    )[:, inputs["input_ids"].shape[1] :]
    result = drawn(pipeline, [sources])
    assert torch.equal(torch.from_numpy(result.tokens), want)
    assert result.tokens.shape == (1, 15) and result.preview_tokens == 0
    assert len(want.unique()) > 2
    for method in METHODS:
        assert (drawn(pipeline, [sources], method).tokens == result.tokens).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "sjd-pac@8"])
def test_edits_are_distributed_as_transformers_draws_them(folder: Path, method: str) -> None:
    pipeline, (theirs, processor) = pipeline_of(folder), reference(folder)
    sampling, grid = Sampling(1.0, 2.0, 10, 0.8), (3, 5)
    own = [(painted(64 + 32 * (i % 3), 96, i),) for i in range(40)]
    tokens = torch.from_numpy(drawn(pipeline, own, method, sampling).tokens)
    prompts = [PROMPTS[i % 3] for i in range(len(own))]
    with torch.no_grad():
        inputs = inputs_of(processor, pipeline.model, prompts, own, grid)
        logits = their_logits(theirs, inputs, own, tokens)[..., : pipeline.model.codes]
    probs = reference_order(logits.flatten(0, 1), sampling)
    assert p_value(probs, tokens.flatten()) > 1e-3


@pytest.mark.slow
def test_a_drafter_that_never_saw_a_picture_costs_no_exactness(folder: Path) -> None:
    """One of random weights: greedy tokens are those of `ar`, as trees are drafted too."""
    pipeline = LanternPipeline.from_pretrained(
        str(folder), device="cpu", dtype="float32", pictures=False
    )
    want = drawn(pipeline, [SOURCES[2], SOURCES[1]]).tokens
    torch.manual_seed(0)
    drafter = Drafter(pipeline.model.target.config, DrafterConfig()).requires_grad_(False).eval()
    model = pipeline.model
    model.drafter, model.config = drafter, replace(model.config, drafter=DrafterConfig())
    for method in ("eagle", "eagle2"):
        got = drawn(pipeline, [SOURCES[2], SOURCES[1]], method)
        assert (got.tokens == want).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "scd@8"])
def test_an_image_does_not_depend_on_its_batch(folder: Path, method: str) -> None:
    """One by one, all at once, through fewer slots, and in another order; sources of unequal sizes and numbers."""
    pipeline, sampling = pipeline_of(folder), pipeline_of(folder).model.sampling
    own = [SOURCES[1], SOURCES[2], (painted(160, 96, 2),)]
    together = drawn(pipeline, own, method, sampling).tokens
    assert (drawn(pipeline, own, method, sampling, batch=2).tokens == together).all()
    setting = pipeline.resolve(method)
    for i, sources in enumerate(own):
        request = Request(PROMPTS[i], i, sampling, setting.relaxation, None, (96, 160), sources)
        alone = pipeline.draw([request], setting, decode=False)
        assert (alone.tokens == together[i : i + 1]).all()


@pytest.mark.slow
def test_text_prompts_draw_the_same_after_an_edit(folder: Path) -> None:
    """A model that read pictures draws from words as one that never did."""
    fresh = LanternPipeline.from_pretrained(
        str(folder), device="cpu", dtype="float32", pictures=False
    )
    before = drawn(fresh, [()]).tokens
    drawn(fresh, [SOURCES[1]])
    assert (drawn(fresh, [()]).tokens == before).all()
    assert before.shape[1] > 15  # with a preview


@pytest.mark.parametrize(
    ("device", "graphs", "method"),
    mostly_slow(
        [("cpu", "strict", "scd@8"), ("hpu", "hpu_graph", "scd@8"), ("hpu", "compile", "ar")]
    ),
)
def test_the_same_is_drawn_on_every_device(
    folder: Path, device: str, graphs: str, method: str
) -> None:
    own = [SOURCES[1], SOURCES[2]]
    sampling = pipeline_of(folder).model.sampling
    want = drawn(pipeline_of(folder), own, method, sampling).tokens
    if device == "cpu":
        pipeline = LanternPipeline.from_pretrained(
            str(folder), device="cpu", dtype="float32", graphs=graphs, pictures=False
        )
        got = drawn(pipeline, own, method, sampling)
        assert got.graph["recompiles_after_warmup"] == 0
    else:
        with emulated(folder, graphs, device=device, pictures=False) as (pipeline, card):
            got = drawn(pipeline, own, method, sampling)
            assert got.graph["recompiles_after_warmup"] == 0
            assert card.counts.fallbacks.total() == 0 and not rules(card, "error", "warn")
    assert (got.tokens == want).all()


# ------------------------------------------------------------------------------------- pixels


@cache
def whole(folder: Path) -> LanternPipeline:
    pipeline = LanternPipeline.from_pretrained(str(folder), device="cpu", dtype="float32")
    assert pipeline.diffusion is not None
    pipeline.diffusion.options = {"num_inference_steps": 2}
    return pipeline


@pytest.mark.parametrize("count", mostly_slow([1, 2], 2))
def test_pictures_are_those_of_diffusers(folder: Path, count: int) -> None:
    """Its pipeline, called with the same codes and what the model saw of the sources."""
    pytest.importorskip("diffusers")
    pipeline, sources = whole(folder), SOURCES[count]
    reader = reader_of(pipeline.model)
    pictures = [source.picture for source in sources]
    result = pipeline("a red apple", image=pictures, seed=4, method="ar", height=96, width=64)
    assert pipeline.diffusion is not None

    def doubled(codes: Tensor) -> Tensor:
        return codes.repeat_interleave(2, 0).repeat_interleave(2, 1).flatten()

    codes = [reader.codes(source) for source in sources]
    want = pipeline.diffusion.pipe(
        prompt="a red apple",
        image=[reader.prepared(source) for source in sources],
        height=96,
        width=64,
        num_inference_steps=2,
        prior_token_ids=doubled(torch.from_numpy(result.tokens).view(3, 2))[None],
        prior_token_image_ids=[torch.cat([doubled(one) for one in codes])],
        source_image_grid_thw=[torch.tensor([[1, 2 * len(c), 2 * len(c[0])] for c in codes])],
        generator=torch.Generator().manual_seed(4),
    ).images[0]
    assert result.images[0].tobytes() == want.tobytes()
    without = pipeline("a red apple", seed=4, method="ar", height=96, width=64)
    assert without.images[0].tobytes() != want.tobytes()


def test_sources_of_any_size_have_a_cell_for_each_code(folder: Path) -> None:
    """Where diffusers' own call fails, sides being no multiples of 32; the picture is of the source's size."""
    pytest.importorskip("diffusers")
    image = whole(folder)("dog", image=painted(70, 109).picture).images[0]
    assert image.size == (96, 64)


# ------------------------------------------------------------------------------------ refusals


def test_refusals(folder: Path) -> None:
    pipeline = pipeline_of(folder)
    with pytest.raises(OptionError, match="at most 4"):
        pipeline("dog", image=[painted(64, 64).picture] * 5)
    with pytest.raises(OptionError, match="pictures included"):
        pipeline(" ".join(["dog"] * 3000), image=painted(64, 64).picture)
    mixed = [Request("dog", sources=SOURCES[1], size=(64, 64)), Request("dog", size=(64, 64))]
    with pytest.raises(OptionError, match="all images have pictures"):
        pipeline.draw(mixed, pipeline.resolve("ar"))


@pytest.mark.parametrize(
    ("change", "why"),
    [(None, "is missing"), ({"patch_size": 14}, "patch_size"), ({"image_mean": [0.4] * 3}, "mean")],
)
def test_unknown_settings_of_pictures_are_refused_before_weights_are_read(
    folder: Path, tmp_path: Path, change: dict[str, Any] | None, why: str
) -> None:
    copy = tmp_path / "glm-image"
    shutil.copytree(folder, copy, symlinks=True)
    file = copy / "processor" / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.unlink()
    newer = copy / "processor" / "processor_config.json"
    kept = json.loads(newer.read_text())
    newer.write_text(json.dumps({k: v for k, v in kept.items() if k != "image_processor"}))
    if change is not None:
        file.write_text(json.dumps(settings | change))
    found = open_model(find_parts(str(copy)))
    assert reads_pictures(found.config) == 0
    with pytest.raises(OptionError, match=why):
        check_sources(found.config, "glm-image", 1)


def test_a_converted_folder_reads_pictures_too(folder: Path, tmp_path: Path) -> None:
    pipeline = pipeline_of(folder)
    pipeline.save_pretrained(tmp_path / "ours")
    again = LanternPipeline.from_pretrained(
        str(tmp_path / "ours"), device="cpu", dtype="float32", pictures=False
    )
    own = [SOURCES[2]]
    assert (drawn(again, own).tokens == drawn(pipeline, own).tokens).all()


def test_saved_tokens_of_an_edit_are_not_taken_for_those_of_words(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their pixels are made of the sources too, which the file does not hold."""
    cat, file = tmp_path / "cat.png", tmp_path / "t.npz"
    SOURCES[1][0].picture.save(cat)
    args = ["--model", str(folder), "--device", "cpu"]
    line = ["--prompt", "dog", "--image", str(cat), "--save-tokens", str(file), "--method", "ar"]
    assert generate.main([*args, *line]) == 0
    assert pixels.main([str(file), *args, "--output", str(tmp_path / "x.png")]) == 2
    assert "drawn from pictures" in capsys.readouterr().err


def test_memory_counts_the_tower_where_pictures_are_read(folder: Path) -> None:
    """And prompts of the length that they need."""
    pipeline = pipeline_of(folder)
    model, setting = pipeline.model, pipeline.resolve("ar")
    numbers = sum(p.numel() for p in reader_of(model).loaded().parameters())
    sizes = {}
    for sources in ((), SOURCES[1]):
        spec = pipeline.spec([Request("dog", sources=sources)], setting.tree, 1)
        sizes[bool(sources)] = dict(weights(model.config, Setup(spec, "bfloat16")))
    assert sizes[True]["vision tower weights"] == 2 * numbers
    assert sizes[False]["vision tower weights"] == 0
