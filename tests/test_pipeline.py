"""The pipeline around the engine: how many engines are kept, pictures that are not square, relaxations as stored."""

from __future__ import annotations

import gc
import json
import math
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lantern_hpu.commands import generate
from lantern_hpu.core import ImageRecord, Request, Sampling
from lantern_hpu.decode import batch, engine
from lantern_hpu.decode.engine import MAX_ENGINES, Engine
from lantern_hpu.decode.pixels import to_images
from lantern_hpu.errors import InvalidImageError, OptionError, WeightsError
from lantern_hpu.loading import write_folder as write_converted
from lantern_hpu.methods.relaxation import EXACT, PRESETS, Additive, Relaxation, read_relaxation
from lantern_hpu.methods.setting import Resolved
from lantern_hpu.models.vq import as_bytes
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.tree import DraftTree, load_static
from tests.folder import write_folder
from tests.marks import mostly_slow


def test_auto_is_what_was_fastest_for_so_many_images(model: Path) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    pipeline.model.fastest = {"cpu:1": ("jacobi", "jacobi:3"), "cpu": ("ar", None)}
    one, several = pipeline.resolve("auto", 1), pipeline.resolve("auto", 2)
    assert (one.method, one.tree.name, several.method) == ("jacobi", "jacobi:3", "ar")


@pytest.mark.slow
def test_twenty_different_requests_keep_four_engines_and_free_the_others(model: Path) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    trees = [DraftTree.root_only(), load_static("chain")]
    samplings = [
        Sampling(cfg, temperature, 16 if limited else 0, top_p)
        for cfg in (1.0, 2.0)
        for temperature, limited, top_p in (
            (0.0, False, 1.0),
            (1.0, False, 1.0),
            (1.0, True, 1.0),
            (1.0, False, 0.9),
            (1.0, True, 0.9),
        )
    ]
    built = weakref.WeakSet[object]()
    most = 0
    for tree in trees:
        for sampling in samplings:
            pipeline.draw([Request("a red apple", 0, sampling)], Resolved("eagle", tree=tree))
            built.update(pipeline.engines.engines.values())
            gc.collect()
            most = max(most, len(built))
    assert len(trees) * len(samplings) == 20
    assert most == MAX_ENGINES == len(pipeline.engines.engines)


def test_requests_that_differ_a_little_share_an_engine(model: Path) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    tree = load_static("chain")
    for seed, top_k in enumerate((17, 20, 25, 31)):
        sampling = Sampling(1.5 + seed, 0.9, top_k)
        relaxation = Additive(k=17 + seed, bound=0.1)
        pipeline.draw([Request("cat", seed, sampling, relaxation)], Resolved("eagle", tree=tree))
    assert len(pipeline.engines.engines) == 1


def test_what_did_not_warm_up_is_forgotten(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    spec = pipeline.spec([Request("cat", 0, Sampling())], DraftTree.root_only(), 1)
    engine = pipeline.engines.get(spec)
    monkeypatch.setattr(engine, "warm_up", lambda _: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        pipeline.warm_up(engine, Request("cat", 0, Sampling()))
    assert not pipeline.engines.engines
    pipeline.engines.discard(engine)
    assert pipeline.engines.get(spec) is not engine


def test_an_engine_that_something_holds_is_never_closed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device with room for one engine: another goes beside it, and it is the idle ones that give way."""
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    closed: list[Engine] = []
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine))
    monkeypatch.setattr(pipeline.engines, "lacking", lambda specs: 1)
    first, second, third = (
        pipeline.spec([Request("cat", 0, Sampling(1.0 + size))], DraftTree.root_only(), size)
        for size in (1, 2, 3)
    )
    held = pipeline.engines.get(first)
    with held.pinned():
        idle = pipeline.engines.get(second)
        pipeline.engines.get(third)
        assert closed == [idle] and pipeline.engines.get(first) is not held
    pipeline.engines.get(second)
    assert held in closed


@pytest.mark.parametrize(
    "method", mostly_slow(["ar", "eagle@chain", "lantern@dynamic:3x2x8"], "eagle@chain")
)
def test_a_picture_may_be_wider_than_high(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv("LANTERN_HPU_PREVIEW_EVERY", "1")
    folder = write_folder(tmp_path / "wide", grid=(3, 5))
    out = tmp_path / "cat.png"
    words = ["--model", str(folder), "--method", method]
    assert generate.main([*words, "--prompt", "a cat", "--output", str(out)]) == 0
    width, height = Image.open(out).size
    assert width * 3 == height * 5


@pytest.mark.parametrize("relaxation", [EXACT, *PRESETS.values()], ids=str)
def test_a_relaxation_is_read_as_it_was_written(relaxation: Relaxation) -> None:
    assert read_relaxation(relaxation.as_json()) == relaxation


def test_a_stored_relaxation_out_of_range_is_refused() -> None:
    with pytest.raises(OptionError, match="delta"):
        read_relaxation(replace(Additive(5, bound=0.5)).as_json() | {"bound": 2.0})


@pytest.fixture(params=["target", "pixels"])
def spoiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Seed 1 meets numbers that are none, in the target or in the pixel decoder. -> what is said of it"""
    if request.param == "target":
        real = engine.read_records

        def read_records(*given: Any) -> list[ImageRecord]:
            records = real(*given)
            for record in records:
                record.invalid = "probabilities were NaN" if record.seed == 1 else ""
            return records

        monkeypatch.setattr(batch, "read_records", read_records)
        return "probabilities were NaN"
    real_picture = LanternPipeline.picture

    def picture(self: LanternPipeline, record: ImageRecord) -> Any:
        found = real_picture(self, record)
        if record.seed == 1:
            raise InvalidImageError.of_pixels([found])
        return found

    monkeypatch.setattr(LanternPipeline, "picture", picture)
    return "its pixels are NaN or infinite"


def test_a_spoiled_image_is_an_error_that_keeps_the_others(model: Path, spoiled: str) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    kept: list[int] = []
    requests = [Request("cat", seed) for seed in range(3)]
    setting = pipeline.resolve("ar")
    with pytest.raises(InvalidImageError, match=f"1 of 3 images .* seed 1: {spoiled}") as caught:
        pipeline.draw(requests, setting, keep=lambda number, _: kept.append(number))
    assert kept == [0, 2]
    result = caught.value.result
    assert [record.seed for record in result.records] == [0, 2] and len(result.images) == 2
    with pytest.raises(InvalidImageError):
        pipeline("cat", num_images_per_prompt=3, method="ar")
    every = pipeline("cat", num_images_per_prompt=3, method="ar", keep_invalid=True)
    assert len(every.images) == 3 and f"seed 1 is invalid: {spoiled}" in every.warnings
    assert ["invalid" in every.metadata(number) for number in range(3)] == [False, True, False]
    assert [image.get("invalid", "") for image in every.report()["images"]] == ["", spoiled, ""]


def test_a_command_ends_with_1_and_writes_the_other_images(
    model: Path, spoiled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(model), "--prompt", "cat", "--num-images", "3", "--method", "ar"]
    given += ["--output", str(tmp_path / "out"), "--report", str(tmp_path / "report.json")]
    assert generate.main(given) == 1
    assert f"seed 1: {spoiled}" in capsys.readouterr().err
    assert [file.name[:3] for file in sorted((tmp_path / "out").iterdir())] == ["000", "002"]
    assert len(json.loads((tmp_path / "report.json").read_text())["images"]) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_pixels_that_are_no_numbers_are_seen(value: float) -> None:
    """Infinite ones would be clamped to white or black."""
    pixels = torch.zeros(2, 3, 4, 5)
    images, valid = to_images(as_bytes(pixels), 4, 5)
    assert valid and images[0].size == (5, 4)
    pixels[1, 2, 3, 4] = value
    assert not to_images(as_bytes(pixels), 4, 5)[1]


def test_weights_that_hold_nan_are_named_when_they_are_converted(
    public: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "janus"
    shutil.copytree(public / "janus-pro", folder)
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    weights["language_model.model.layers.0.self_attn.q_proj.weight"].view(-1)[0] = math.nan
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"NaN or infinite numbers are in target\.layers\.0\."):
        write_converted(str(folder), tmp_path / "out", "auto")
    assert not (tmp_path / "out").exists()
