"""Lumina-mGPT Omni, which draws from a picture: equal to transformers' own class on small random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lantern_hpu.core import Request, Sampling, SourcePicture
from lantern_hpu.errors import OptionError
from lantern_hpu.models.pictures import LuminaReader
from lantern_hpu.models.text.frames import reads_pictures
from lantern_hpu.pipeline import LanternPipeline
from tests.emulated import emulated, rules
from tests.marks import mostly_slow
from tests.published import (
    LUMINA,
    guided_rows,
    lumina,
    obeys,
    opened,
    pipeline_of,
    with_settings,
)
from tests.test_sources import painted

SIZE, GRID = (64, 96), (4, 6)
METHODS = ("jacobi", "scd@8", "sjd-pac@8", "eagle")


@pytest.fixture(scope="module")
def folder(public: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Lumina-mGPT under the name of one that reads pictures, with its drafter."""
    goal = tmp_path_factory.mktemp("omni") / "lumina-omni"
    with_settings(public / LUMINA, goal, _name_or_path="Alpha-VLLM/Lumina-mGPT-7B-512-Omni")
    (goal / "drafter").symlink_to(public / LUMINA / "drafter")
    return goal


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> LanternPipeline:
    return pipeline_of(folder)


def requests_of(
    prompts: Sequence[str], sources: Sequence[SourcePicture], sampling: Sampling, **more: Any
) -> list[Request]:
    return [
        Request(prompt, i, sampling, size=SIZE, sources=(source,), **more)
        for i, (prompt, source) in enumerate(zip(prompts, sources, strict=True))
    ]


@pytest.mark.parametrize(
    "size", [(300, 500), (64, 64), (2000, 900), (40, 160), (512, 512)], ids=str
)
def test_a_source_is_cut_to_the_nearest_size(
    pipeline: LanternPipeline, size: tuple[int, int]
) -> None:
    """As many codes as the model's own pictures or nearly, in whole steps, and little is cut."""
    reader, source = pipeline.model.condition.reader, painted(*size)
    assert isinstance(reader, LuminaReader)
    height, width = reader.size(source)
    assert height % 32 == width % 32 == 0 and max(height, width) <= 4 * min(height, width)
    assert 0.8 * 512**2 < height * width <= 512**2
    assert abs(np.log(height / width) - np.log(size[0] / size[1])) < 0.12
    assert reader.prepared(source).size == (width, height)
    if size == (512, 512):
        assert reader.prepared(source).tobytes() == source.picture.tobytes()


def test_codes_are_those_of_transformers(folder: Path, pipeline: LanternPipeline) -> None:
    theirs, reader = lumina(folder), pipeline.model.condition.reader
    assert isinstance(reader, LuminaReader)
    source = painted(300, 500)
    pixels = reader.pixels(reader.prepared(source))
    with torch.no_grad():
        want = theirs.model.vqmodel.encode(pixels).image_tokens
    codes = reader.codes(source)
    assert torch.equal(codes.flatten(), want.flatten().long())
    assert len(codes.unique()) > 20


def their_row(folder: Path, model: Any, prompt: str, source: SourcePicture) -> list[int]:
    """The row with an instruction and a source, by the authors' description."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    codes = model.condition.reader.codes(source)
    height, width = (side // 2 for side in codes.shape)
    picture = [8197, 8804 + height, 8804 + width]
    for row in codes.tolist():
        picture += [*(code + 4 for code in row), 8803]
    words = tokenizer(f"{prompt} ", add_special_tokens=False)["input_ids"]
    return [0, *words, *picture, 8196, 8710, 8197, 8804 + SIZE[0] // 32, 8804 + SIZE[1] // 32]


@pytest.mark.slow
def test_greedy_pictures_are_those_of_transformers(folder: Path, pipeline: LanternPipeline) -> None:
    """Two prompts with sources of unequal sizes in one batch; the row that guidance subtracts begins at the picture."""
    prompts, sources = ("make it red", "dog"), (painted(300, 500), painted(500, 200))
    requests = requests_of(prompts, sources, Sampling(3.0, 0.0))
    tokens = pipeline.draw(requests, pipeline.resolve("ar"), decode=False).tokens
    assert tokens.shape == (2, GRID[0] * (GRID[1] + 1))
    theirs = lumina(folder)
    for i in range(2):
        given = their_row(folder, pipeline.model, prompts[i], sources[i])
        drawn = [8803 if t == 8192 else t + 4 for t in tokens[i].tolist()]
        logits = guided_rows(theirs.model, theirs.lm_head, (given, given[-3:]), drawn, 3.0)
        assert obeys(logits, GRID[1], 8803, slice(4, 8196)).tolist() == drawn
    assert len(np.unique(tokens)) > 4


@pytest.mark.parametrize("method", mostly_slow(METHODS, "scd@8"))
def test_every_method_draws_what_ar_draws(pipeline: LanternPipeline, method: str) -> None:
    requests = requests_of(["dog"], [painted(300, 500)], Sampling(3.0, 0.0))
    want = pipeline.draw(requests, pipeline.resolve("ar"), decode=False).tokens
    assert (pipeline.draw(requests, pipeline.resolve(method), decode=False).tokens == want).all()


@pytest.mark.slow
def test_an_image_does_not_depend_on_its_batch(pipeline: LanternPipeline) -> None:
    own = [painted(300, 500), painted(500, 200), painted(200, 200)]
    requests = requests_of(("make it red", "dog", "a cat"), own, pipeline.model.sampling)
    setting = pipeline.resolve("scd@8")
    together = pipeline.draw(requests, setting, 2, decode=False).tokens
    for i, request in enumerate(requests):
        assert (pipeline.draw([request], setting, decode=False).tokens == together[i]).all()


@pytest.mark.slow
def test_the_picture_is_of_the_source_s_size(pipeline: LanternPipeline) -> None:
    image = pipeline("make it red", image=painted(200, 300).picture, height=64, width=96).images[0]
    assert image.size == (96, 64)
    reader, source = pipeline.model.condition.reader, painted(200, 300)
    assert reader is not None
    assert pipeline.model.size_of_sources([source]) == reader.size(source)


def test_only_the_model_that_was_taught_to_reads_a_picture(
    public: Path, folder: Path, pipeline: LanternPipeline
) -> None:
    assert reads_pictures(opened(folder).config) == 1
    plain = pipeline_of(public / LUMINA)
    with pytest.raises(OptionError, match="Lumina-mGPT Omni and GLM-Image do"):
        plain("dog", image=painted(64, 64).picture)
    with pytest.raises(OptionError, match="at most 1"):
        pipeline("dog", image=[painted(64, 64).picture] * 2)


@pytest.mark.parametrize(
    ("device", "graphs", "method"),
    mostly_slow(
        [
            ("cpu", "strict", "scd@8"),
            ("cpu", "strict", "eagle"),
            ("hpu", "hpu_graph", "scd@8"),
            ("hpu", "hpu_graph", "ar"),
        ]
    ),
)
def test_the_same_is_drawn_on_every_device(
    folder: Path, pipeline: LanternPipeline, device: str, graphs: str, method: str
) -> None:
    own = [painted(300, 500), painted(500, 200)]
    requests = requests_of(("make it red", "dog"), own, pipeline.model.sampling)
    want = pipeline.draw(requests, pipeline.resolve(method), decode=False).tokens
    if device == "cpu":
        other = pipeline_of(folder, graphs=graphs)
        got = other.draw(requests, other.resolve(method), decode=False)
    else:
        with emulated(folder, graphs, device=device) as (other, card):
            got = other.draw(requests, other.resolve(method), decode=False)
            assert card.counts.fallbacks.total() == 0 and not rules(card, "error", "warn")
    assert got.graph["recompiles_after_warmup"] == 0
    assert (got.tokens == want).all()


@pytest.mark.slow
def test_previews_are_of_the_size_that_is_drawn(pipeline: LanternPipeline) -> None:
    seen: list[tuple[int, int]] = []

    def look(_: Any, step: int, tokens: int, about: dict[str, Any]) -> None:
        seen.extend(picture.size for picture in about["event"].preview())

    own = painted(200, 300).picture
    pipeline("dog", image=own, height=64, width=96, method="ar", callback_on_step_end=look)
    assert set(seen) == {(96, 64)}
