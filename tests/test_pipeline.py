"""The pipeline around the engine: how many engines are kept, pictures that are not square, relaxations as stored."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from lantern_hpu.commands import generate
from lantern_hpu.core import Request, Sampling
from lantern_hpu.decode.engine import MAX_ENGINES, Engine
from lantern_hpu.errors import OptionError
from lantern_hpu.methods.relaxation import EXACT, PRESETS, Additive, Relaxation, read_relaxation
from lantern_hpu.methods.setting import Resolved
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.tree import DraftTree, load_static
from tests.folder import write_folder


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


@pytest.mark.parametrize("method", ["ar", "eagle", "lantern"])
def test_a_picture_may_be_wider_than_high(tmp_path: Path, method: str) -> None:
    folder = write_folder(tmp_path / "wide", grid=(3, 5))
    out = tmp_path / "cat.png"
    tree = {"ar": [], "eagle": ["--tree", "chain"], "lantern": ["--tree", "dynamic:3x2x8"]}[method]
    words = ["--model", str(folder), "--method", method, *tree, "--preview-every", "1"]
    assert generate.main([*words, "--prompt", "a cat", "--output", str(out)]) == 0
    width, height = Image.open(out).size
    assert width * 3 == height * 5


@pytest.mark.parametrize("relaxation", [EXACT, *PRESETS.values()], ids=str)
def test_a_relaxation_is_read_as_it_was_written(relaxation: Relaxation) -> None:
    assert read_relaxation(relaxation.as_json()) == relaxation


def test_a_stored_relaxation_out_of_range_is_refused() -> None:
    with pytest.raises(OptionError, match="relax delta"):
        read_relaxation(replace(Additive(5, bound=0.5)).as_json() | {"bound": 2.0})
