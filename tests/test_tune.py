"""Tuning: the search finds the best tree there is, what it expects of a tree is what drawing measures, and
`--tree auto` draws with what was found."""

from __future__ import annotations

import itertools
import json
import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantern_hpu import cli
from lantern_hpu.commands import generate
from lantern_hpu.commands import tune as command
from lantern_hpu.core import RunStats
from lantern_hpu.errors import LanternError, OptionError, TreeError, as_option
from lantern_hpu.methods import tuned_trees
from lantern_hpu.methods.relaxation import EXACT, Multiplicative
from lantern_hpu.methods.setting import Resolved
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.png import read_png
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.train.acceptance_counts import KINDS, ChildCounts
from lantern_hpu.tree import DraftTree, load_static
from lantern_hpu.tune import result, tuner
from lantern_hpu.tune.options import TuneOptions, read_profile
from lantern_hpu.tune.result import Figures, TunedRow, TuningResult, fastest_text, tuning_table
from lantern_hpu.tune.search import (
    ChanceTable,
    Costs,
    Solver,
    best_tree,
    estimate,
    expected_steps,
    expected_tokens,
    fit_costs,
    gain_probs,
    most_reached,
    ms_per_token,
    probes,
)

NODES, DEPTH, CHILDREN = 8, 3, 3  # of the trees that are all tried
Nested = tuple[Any, ...]  # a tree as the tuple of its subtrees


@cache
def subtrees(nodes: int, depth: int) -> tuple[Nested, ...]:
    """Every tree of so many nodes."""
    return forests(nodes - 1, depth, CHILDREN) if nodes == 1 or depth else ()


@cache
def forests(nodes: int, depth: int, most: int) -> tuple[Nested, ...]:
    """Every list of at most so many subtrees with so many nodes together."""
    if not nodes:
        return ((),)
    return tuple(
        (first, *rest)
        for own in range(1, nodes + 1)
        if most
        for first in subtrees(own, depth - 1)
        for rest in forests(nodes - own, depth, most - 1)
    )


def paths(tree: Nested, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    for rank, subtree in enumerate(tree):
        yield (*path, rank)
        yield from paths(subtree, (*path, rank))


@cache
def all_trees() -> list[DraftTree]:
    """Every tree that the search may choose."""
    found = [tree for nodes in range(2, NODES + 1) for tree in subtrees(nodes, DEPTH)]
    return [DraftTree.from_paths(str(i), paths(tree)) for i, tree in enumerate(found)]


def random_chances(seed: int) -> ChanceTable:
    """Chances in any order of the ranks; those of a node's children add up to less than 1."""
    rng = random.Random(seed)

    def row() -> list[float]:
        weights = [rng.random() ** 2 for _ in range(CHILDREN)]
        total = sum(weights) / rng.uniform(0.4, 0.95)
        return [weight / total for weight in weights]

    return np.array([(row(), row()) for _ in range(DEPTH)])


def random_costs(seed: int) -> Costs:
    """Verification nearly flat, so that large trees pay; trying children costs nothing for every other seed."""
    rng = random.Random(seed)
    verify = tuple(sorted(rng.uniform(20, 24) for _ in range(3)))
    child = rng.uniform(0, 0.6) if seed % 2 else 0.0
    return Costs(8, (2, 5, NODES), verify, rng.uniform(0, 1.5), rng.uniform(0, 0.6), child)


@pytest.mark.parametrize("seed", range(4))
def test_tables_hold_the_most_that_any_tree_of_their_size_gains(seed: int) -> None:
    chances = random_chances(seed)
    table = Solver(chances, NODES, [CHILDREN] * DEPTH).values[0][0]
    sizes = [
        (tree.size, len(tree.expanded), expected_tokens(tree, chances)) for tree in all_trees()
    ]
    for nodes, inner in itertools.product(range(1, NODES + 1), range(NODES)):
        most = max([1.0, *(gain for m, i, gain in sizes if m <= nodes and i <= inner)])
        assert table[nodes, inner] == pytest.approx(most)


@pytest.mark.parametrize("seed", range(24))
def test_search_equals_trying_every_tree(seed: int) -> None:
    chances, costs = random_chances(seed), random_costs(seed)
    found = best_tree(chances, costs, NODES, slack=0)
    least = min(ms_per_token(tree, chances, costs) for tree in all_trees())
    assert ms_per_token(found, chances, costs) == pytest.approx(least)
    quick = best_tree(chances, costs, NODES, slack=0.01)
    assert ms_per_token(quick, chances, costs) <= least * 1.01


def test_search_tries_more_than_one_kind_of_tree() -> None:
    """Otherwise the comparison above would say little."""
    found = [best_tree(random_chances(s), random_costs(s), NODES) for s in range(24)]
    assert len({tree.paths for tree in found}) > 12
    assert len({tree.depth for tree in found}) == 3


def test_most_reached_nodes_gain_more_than_any_others_of_their_number() -> None:
    chances = np.array([([0.5, 0.2, 0.1], [0.3, 0.2, 0.05])] * DEPTH)
    found = most_reached("x", chances, NODES)
    assert found.size == NODES
    most = max(expected_tokens(tree, chances) for tree in all_trees())
    assert expected_tokens(found, chances) == pytest.approx(most)


def test_where_nothing_is_accepted_the_smallest_tree_is_best() -> None:
    nothing = np.zeros((DEPTH, 2, CHILDREN))
    assert best_tree(nothing, random_costs(1), NODES).paths == ((), (0,))


# ------------------------------------------------------------------------------------ expectations


def test_expected_tokens_of_a_small_tree_by_hand() -> None:
    tree = DraftTree.from_paths("x", [[0], [1], [0, 0], [1, 0]])
    chances = np.array([([0.5, 0.2], [9, 9]), ([0.6, 0.1], [0.3, 0.1])])
    assert expected_tokens(tree, chances) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.6 + 0.2 * 0.3)
    gains = gain_probs(tree, chances)
    assert gains == pytest.approx([0.3, 0.7 - 0.36, 0.36])
    assert sum(gain * chance for gain, chance in enumerate(gains, 1)) == pytest.approx(
        expected_tokens(tree, chances)
    )


def test_expected_steps_count_what_is_lost_at_the_end() -> None:
    assert expected_steps([1.0], 7) == pytest.approx(7)
    assert expected_steps([0.0, 1.0], 7) == pytest.approx(4)  # the eighth token is lost
    assert expected_steps([0.5, 0.5], 2) == pytest.approx(1.5)
    assert expected_steps([0.5, 0.5], 2, images=2) == pytest.approx(1.75)
    assert expected_steps([0.0, 0.0, 0.0, 1.0], 2) == pytest.approx(1)


def test_expected_steps_of_a_batch_are_those_of_its_slowest_image() -> None:
    probs, rng = [0.4, 0.3, 0.2, 0.1], np.random.default_rng(0)
    gains = rng.choice([1, 2, 3, 4], size=(4000, 3, 20), p=probs).cumsum(-1)
    slowest = (gains < 20).sum(-1).max(-1) + 1
    assert expected_steps(probs, 20, images=3) == pytest.approx(slowest.mean(), rel=0.01)


def test_fitted_costs_are_those_that_made_the_times() -> None:
    truth = Costs(5.0, (2, 4, 8, 16, 32, 64), (6.0, 6.1, 6.5, 7.5, 10.0, 16.0), 1.5, 0.1, 0.2)
    trees = probes(64, 6, 10)
    assert max(tree.size for tree in trees) == 64 and max(tree.depth for tree in trees) == 6
    found = fit_costs(5.0, trees, [truth.step(tree) for tree in trees])
    for name in ("naive_extend_57", "mc_sim_7b_63", "chain"):
        tree = load_static(name)
        assert found.step(tree) == pytest.approx(truth.step(tree), rel=1e-3)
    assert found.step(DraftTree.root_only()) == 5.0
    rng = random.Random(0)
    noisy = fit_costs(5.0, trees, [truth.step(tree) * rng.gauss(1, 0.05) for tree in trees])
    assert min(noisy.level, noisy.node, noisy.child) >= 0
    assert list(noisy.verify) == sorted(noisy.verify)


def counts_of(offered: list[list[list[int]]], accepted: list[list[list[int]]]) -> ChildCounts:
    return ChildCounts(np.array(offered), np.array(accepted))


def test_seldom_seen_chances_lean_on_the_depth_above() -> None:
    never = [[0, 0], [0, 0]]
    counts = counts_of([[[100, 50], [10, 0]], never], [[[40, 5], [10, 0]], never])
    chances = estimate(counts, depth=3)
    assert chances[0, 0] == pytest.approx([0.4, 0.1])
    assert chances[1, 0] == pytest.approx([(10 + 10 * 0.4) / 20, 0.1])
    assert chances[1, 1] == pytest.approx(chances[0, 0])  # never seen: that of the root
    assert chances[2] == pytest.approx(chances[1])


def test_counts_of_different_trees_add_up() -> None:
    total = sum_of([[1, 2, 3]], [[4, 5], [6, 7]])
    assert total.as_json()["later"]["offered"] == [[5, 7, 3], [6, 7, 0]]
    again = ChildCounts.from_json(json.loads(json.dumps(total.as_json())))
    assert again.as_json() == total.as_json()


def sum_of(*tables: list[list[int]]) -> ChildCounts:
    first, second = (counts_of([rows] * len(KINDS), [rows] * len(KINDS)) for rows in tables)
    return first + second


# ------------------------------------------------------------------------------------ a model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_HPU_CACHE", str(tmp_path / "cache"))


WORDS = ("red cat", "blue apple", "cat on apple", "red")


def test_expected_tokens_a_step_are_measured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 10 %, on other seeds than those that acceptance was counted with."""
    pipeline = LanternPipeline.from_pretrained(str(model))
    costs = Costs(1.0, (2, 64), (1.0, 1.2), 0.05, 0.001, 0.001)
    monkeypatch.setattr(tuner, "NAMED", [])
    monkeypatch.setattr(tuner.Tuner, "costs", lambda self, trees: costs)
    options = TuneOptions(batch_size=8, max_nodes=16, max_depth=4, images=24)
    _, row = tuner.Tuner(pipeline, options, WORDS, ProgressBar(disable=True)).tune().rows
    assert 8 < row.tree.size <= 16 and row.tree.depth > 1
    assert row.expected is not None
    assert row.expected.tokens_per_step == pytest.approx(row.measured.tokens_per_step, rel=0.1)


def tune(model: Path, *options: str) -> int:
    sizes = ["--max-nodes", "3", "--max-depth", "2", "--num-images", "2"]
    return command.main(["--model", str(model), *sizes, *options])


@pytest.mark.slow
def test_command_saves_a_tree_that_auto_draws_with(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuner, "NAMED", ["chain"])  # one is enough here
    tree, report, profile = (tmp_path / f"{name}.json" for name in ("tree", "report", "again"))
    assert tune(model, "--method", "eagle", "--output", str(tree), "--report", str(report)) == 0
    said = capsys.readouterr().out
    assert "| ar | 1 | 0 |" in said and "| chain | 6 | 5 |" in said
    assert "ar wins" in said or "times as fast as ar" in said
    printed = shlex.split(said.splitlines()[-1])
    fastest = tmp_path / "fastest.png"
    assert printed[:2] == ["lantern-hpu", "generate"]
    assert cli.main([*printed[1:], "--output", str(fastest)]) == 0
    wanted = "ar" if "ar wins" in said else "eagle"
    assert read_png(fastest)["config"]["method"] == wanted
    chosen = load_static(str(tree))
    found = json.loads(report.read_text())
    names = [row["tree"] for row in found["rows"]]
    assert names in (["ar", "tuned_1", "chain"], ["ar", "tuned_2", "chain"])
    # A profile spares the measurement of acceptance.
    again = ["--profile", str(report), "--report", str(profile)]
    assert tune(model, "--method", "eagle", *again) == 0
    assert json.loads(profile.read_text())["profile"] == found["profile"]
    assert tune(model, "--method", "lantern++", "--profile", str(report)) == 2
    assert "it is of another method" in capsys.readouterr().err
    assert tune(model, "--method", "eagle", "--output", str(tree)) == 2
    assert "existing files are not overwritten" in capsys.readouterr().err
    # The saved one may be another tree now: the machine was measured again.
    kept = next((tmp_path / "cache" / "trees").glob("*.json"))
    image = tmp_path / "x.png"
    given = ["--model", str(model), "--prompt", "red cat", "--output", str(image)]
    assert generate.main([*given, "--method", "eagle", "--tree", "auto"]) == 0
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
    result = pipeline("red cat", num_images_per_prompt=2, method="eagle", tree="auto")
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


def test_profile_without_counts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for text in ("[", "{}", '{"profile": 3}', '{"profile": {"first": {"offered": []}}}'):
        file.write_text(text)
        with pytest.raises(LanternError, match="holds no profile"):
            read_profile(file)


# ------------------------------------------------------------------------------------ the verdict


def row(tree: DraftTree, expected: float, measured: float) -> TunedRow:
    """A row whose token takes so many milliseconds."""
    return TunedRow(tree, Figures(1.5, 1.0, expected), Figures(1.5, 1.0, measured))


AR = DraftTree.root_only()
TUNED = DraftTree.from_paths("tuned_4", [[0]])
CHAIN = load_static("chain")


def tuning(*rows: TunedRow) -> TuningResult:
    costs = Costs(1.0, (2, 64), (1.0, 1.2), 0.05, 0.001, 0.001)
    return TuningResult(ChildCounts.none(TUNED), costs, rows)


def test_verdict_goes_by_what_was_measured() -> None:
    ar, tuned, chain = rows = row(AR, 10, 10), row(TUNED, 5, 8), row(CHAIN, 8, 9)
    found = tuning(*rows)
    assert (found.best, found.ar_wins, found.fastest) == (tuned, False, "tuned_4")
    assert fastest_text(found) == "tuned_4 draws 1.25 times as fast as ar (expected 2.00)"
    assert "| tuned_4 | 2 | 1 |" in tuning_table(found)
    found = tuning(row(AR, 10, 6), tuned, chain)
    assert (found.best, found.ar_wins, found.fastest) == (tuned, True, "ar")
    found = tuning(ar, row(TUNED, 5, 12), chain)
    assert found.best is chain
    assert "chain was measured 1.33 times as fast as tuned_4" in fastest_text(found)


def test_figures_that_cannot_be_are_not_saved(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step over more tokens that takes less time than one of `ar`; equal steps that take unequal times."""
    monkeypatch.setattr(result, "LEAST_STEP", 0.85)
    monkeypatch.setattr(result, "MOST_SPREAD", 1.5)
    slow = TunedRow(AR, None, Figures(1.0, 10.0, 10.0))
    fast = TunedRow(CHAIN, None, Figures(2.61, 5.9, 2.25))  # 4.45 times at 2.61 tokens a step
    assert "a step over 6 tokens took 5.9 ms, one of ar 10.0" in tuning(slow, fast).doubt
    usual = TunedRow(CHAIN, None, Figures(2.61, 9.9, 3.8))
    assert not tuning(slow, usual).doubt
    found = replace(tuning(slow, usual), spread=3.04)
    assert "took 3.0 times as long as the fastest: the machine was busy" in found.doubt
    monkeypatch.setattr(tuner, "run_tuning", lambda *arguments: found)
    monkeypatch.setattr(tuner, "tuning_report", lambda *arguments: {})
    assert tune(model, "--method", "scd") == 2
    said = capsys.readouterr()
    assert (
        "| chain |" in said.out and "error: nothing is saved: the median of equal steps" in said.err
    )
    assert "saved " not in said.out and "times as fast" not in said.out


def test_settings_take_turns(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of each, then the next of each."""
    drawn: list[tuple[str, int]] = []

    def draw_batch(self: tuner.Tuner, tree: DraftTree, number: int) -> tuple[int, RunStats]:
        drawn.append((tree.name, number))
        return 10, RunStats(steps=10, steps_s=0.1 * (1 + number))

    monkeypatch.setattr(tuner.Tuner, "draw_batch", draw_batch)
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    with ProgressBar(disable=True) as bar:
        found = tuner.Tuner(pipeline, TuneOptions("scd", images=3), [], bar)
        rows, spread = found.draw([AR, CHAIN], [None, None])
    assert drawn == [(name, number) for number in range(3) for name in (AR.name, "chain")]
    assert spread == pytest.approx(2) and rows[0].measured.ms_per_step == pytest.approx(
        20
    )  # the median
