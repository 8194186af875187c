"""Tuning: trees and windows are drawn with in turns, the verdict goes by what was measured, and `METHOD@auto` draws
with what was found."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lantern_hpu import cli
from lantern_hpu.commands import generate
from lantern_hpu.core import RunStats
from lantern_hpu.errors import OptionError, TreeError, as_option
from lantern_hpu.methods import tuned_trees
from lantern_hpu.methods.relaxation import EXACT, Multiplicative
from lantern_hpu.methods.setting import Resolved
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import read_png
from lantern_hpu.tree import DraftTree, load_static
from lantern_lab.commands import tune as command
from lantern_lab.measure import rows as measured
from lantern_lab.measure import tune as tuner
from lantern_lab.measure.meter import Meter, TimedBatch
from lantern_lab.measure.options import TuneOptions
from lantern_lab.measure.rows import Row
from lantern_lab.measure.tune import Tuning

# ------------------------------------------------------------------------------------ a model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_HPU_CACHE", str(tmp_path / "cache"))


def tune(model: Path, *options: str) -> int:
    return command.main(["--model", str(model), "--num-images", "2", *options])


@pytest.mark.slow
def test_command_saves_a_tree_that_auto_draws_with(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuner, "NAMED", ["chain", "chain_2"])
    tree, report = tmp_path / "tree.json", tmp_path / "report.json"
    assert tune(model, "--method", "eagle", "--output", str(tree), "--report", str(report)) == 0
    said = capsys.readouterr().out
    assert "| ar | 1 |" in said and "| chain | 6 |" in said
    assert "ar wins" in said or "times as fast as ar" in said
    printed = shlex.split(said.splitlines()[-1])
    fastest = tmp_path / "fastest.png"
    assert printed[:2] == ["lantern-hpu", "generate"]
    assert cli.main([*printed[1:], "--output", str(fastest)]) == 0
    wanted = "ar" if "ar wins" in said else "eagle"
    assert read_png(fastest)["config"]["method"] == wanted
    chosen = load_static(str(tree))
    found = json.loads(report.read_text())
    assert [row["tree"] for row in found["rows"]] == ["root", "chain", "chain_2"]
    assert tune(model, "--method", "eagle", "--output", str(tree)) == 2
    assert "existing files are not overwritten" in capsys.readouterr().err
    kept = next((tmp_path / "cache" / "trees").glob("*.json"))
    image = tmp_path / "x.png"
    given = ["--model", str(model), "--prompt", "red cat", "--output", str(image)]
    assert generate.main([*given, "--method", "eagle@auto"]) == 0
    config = read_png(image)["config"]
    assert config["method"] == "eagle"
    drawn = DraftTree.from_paths(config["tree"], config["tree_paths"])
    assert drawn == load_static(str(kept)) and chosen.size >= 2
    # Drawing it again takes the tree from the image, whatever is saved now.
    kept.unlink()
    tokens = tmp_path / "again.npz"
    second = ["--from-png", str(image), "--output", str(tmp_path / "y.png")]
    assert generate.main([*second, "--save-tokens", str(tokens)]) == 0
    assert np.load(tokens)["tokens"].shape == (1, 16)
    assert read_png(tmp_path / "y.png")["config"]["tree_paths"] == config["tree_paths"]


def test_choice_decides_the_method_only_if_none_is_named(model: Path) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model))
    tree = DraftTree.from_paths("tuned_2", [[0], [0, 0]])
    for method, gain in (("eagle", 0.9), ("lantern++", 1.5)):
        tuned_trees.save_tree(pipeline.situation(method, 2), tuned_trees.TunedTree(tree, gain))
    relaxed = pipeline.resolve("lantern++").relaxation
    assert pipeline.resolve("auto@auto", 2) == Resolved("ar")
    assert pipeline.resolve("lantern++@auto", 2) == Resolved("lantern++", relaxed, tree)
    assert pipeline.resolve("eagle@auto", 2) == Resolved(
        "eagle", replace(EXACT, verify="block"), tree
    )
    mine = pipeline.resolve("auto:lambda=2:k=3@auto", 2)
    assert mine == Resolved("lantern++", Multiplicative(3, lam=2.0), tree)
    tuned_trees.save_tree(pipeline.situation("eagle", 2), tuned_trees.TunedTree(tree, 1.5))
    assert pipeline.resolve("auto@auto", 2) == Resolved(
        "eagle", replace(EXACT, verify="block"), tree
    )
    with pytest.raises(OptionError, match="none was tuned") as refused:
        pipeline.resolve("eagle@auto", 5)
    assert "there is one for batches of 2" in str(refused.value)
    result = pipeline("red cat", num_images_per_prompt=2, method="eagle@auto")
    assert result.config["tree"] == "tuned_2" and len(result.images) == 2


def test_situations_that_differ_have_choices_of_their_own(model: Path) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model))
    here = pipeline.situation("eagle", 1)
    other = LanternPipeline.from_pretrained(str(model), dtype="bfloat16").situation("eagle", 1)
    changed = [here | {"batch_size": 2}, here | {"method": "lantern++"}, here | {"drafter": "0"}]
    assert len({tuned_trees.file_of(s) for s in (here, other, *changed)}) == 5


def test_damaged_choice_is_refused(model: Path) -> None:
    situation = LanternPipeline.from_pretrained(str(model)).situation("eagle", 1)
    tree = DraftTree.from_paths("x", [[0]])
    file = tuned_trees.save_tree(situation, tuned_trees.TunedTree(tree, 1.5))
    assert tuned_trees.find_tree(situation) == tuned_trees.TunedTree(tree, 1.5)
    file.write_bytes(tuned_trees.tree_file(tree))
    with pytest.raises(TreeError, match="is damaged"):
        tuned_trees.find_tree(situation)
    file.write_text("[")
    with pytest.raises(TreeError, match="cannot read the tree"):
        tuned_trees.find_tree(situation)


def test_a_model_without_a_drafter_is_tuned_by_methods_that_need_none(model: Path) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model))
    pipeline.model.drafter = None
    with pytest.raises(OptionError, match="has no drafter") as refused:
        tuner.check_model(pipeline, pipeline.situation("eagle", 1))
    assert refused.value.text(as_option).endswith("--drafter, or --method jacobi or scd or sjd-pac")


# ------------------------------------------------------------------------------------ the verdict


RECORD: Any = SimpleNamespace(steps=10, tokens=16)
AR = DraftTree.root_only()
CHAIN, SHORT = load_static("chain"), load_static("chain_2")


def row(tree: DraftTree, token: float, step: float = 1.0, rate: float = 1.5) -> Row:
    """A row whose token takes so many milliseconds."""
    method = "eagle" if tree.depth else "ar"
    figures = {
        "nodes": tree.size,
        "tokens_per_step": rate,
        "ms_per_step": step,
        "ms_per_token": token,
    }
    return Row(method, tree.name, EXACT.as_json(), "eager", 1, figures)


def tuning(*rows: Row) -> Tuning:
    return Tuning(rows, [AR, SHORT, CHAIN][: len(rows)])


def test_verdict_goes_by_what_was_measured() -> None:
    ar, short, chain = rows = row(AR, 10), row(SHORT, 8), row(CHAIN, 9)
    found = tuning(*rows)
    assert (found.best, found.ar_wins) == (1, False)
    assert found.verdict() == "chain_2 draws 1.25 times as fast as ar"
    assert "| chain_2 | 3 | 1.50 | 1.00 | 8.00 | 1.25 |" in found.text()
    found = tuning(row(AR, 6), short, chain)
    assert (found.best, found.ar_wins) == (1, True) and found.verdict().startswith("ar wins")
    assert tuning(ar, row(SHORT, 12), chain).best == 2


def test_figures_that_cannot_be_are_not_saved(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step over more tokens that takes less time than one of `ar`; equal steps that take unequal times."""
    monkeypatch.setattr(measured, "LEAST_STEP", 0.85)
    monkeypatch.setattr(measured, "MOST_SPREAD", 1.5)
    slow = row(AR, 10.0, 10.0, 1.0)
    fast = row(CHAIN, 2.25, 5.9, 2.61)  # 4.45 times at 2.61 tokens a step
    assert "a step over 6 tokens took 5.9 ms, one of ar 10.0" in tuning(slow, fast).doubt
    usual = row(CHAIN, 3.8, 9.9, 2.61)
    assert not tuning(slow, usual).doubt
    found = replace(tuning(slow, usual), spread=3.04)
    assert "took 3.0 times as long as the fastest: the machine was busy" in found.doubt
    monkeypatch.setattr(tuner, "tune", lambda *arguments: found)
    assert tune(model, "--method", "scd") == 2
    said = capsys.readouterr()
    assert (
        "| chain |" in said.out and "error: nothing is saved: the median of equal steps" in said.err
    )
    assert "saved " not in said.out and "times as fast" not in said.out


def test_settings_take_turns(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of each, then the next of each; a row is the median of its batches."""
    drawn: list[tuple[str, int]] = []

    def draw(self: Meter, pixels: bool) -> None:
        number = len(self.batches)
        drawn.append((str(self.case.setting), number))
        stats, record = RunStats(steps=10, steps_s=0.1 * (1 + number)), RECORD
        self.batches.append(TimedBatch(stats, records=[record]))

    monkeypatch.setattr(Meter, "draw", draw)
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    found = tuner.tune(pipeline, TuneOptions("scd", images=3))
    names = ["ar", "scd@2", "scd@5", "scd@8"]
    assert drawn == [(name, number) for number in range(3) for name in names]
    assert found.spread == pytest.approx(2)
    assert found.rows[0]["ms_per_step"] == pytest.approx(20)  # the median
