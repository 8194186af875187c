"""Windows: `jacobi` equals one-token decoding with the same noise; `scd` and `sjd-pac` are lossless."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lantern_hpu.core import Request
from lantern_hpu.decode import spec
from lantern_hpu.decode.common import Drafts, StaticTables
from lantern_hpu.decode.drafting.window import WindowDrafting
from lantern_hpu.decode.spec import Spec
from lantern_hpu.decode.state import Bounds
from lantern_hpu.decode.walk import Acceptance, LevelWalk, SpineWalk
from lantern_hpu.errors import OptionError
from lantern_hpu.methods import tuned_trees
from lantern_hpu.methods.relaxation import (
    EXACT,
    Annealed,
    Blended,
    Clustered,
    Multiplicative,
    Relaxation,
)
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.ops.sampling import (
    FACTORS,
    gather,
    gather_rows,
    noise_keys,
    race_noise,
    sample_distinct,
)
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.tree import DraftTree, Window, load_tree
from lantern_lab.commands import tune
from tests.marks import mostly_slow
from tests.test_step import DISTRIBUTIONS, SETTINGS, SMALL, count_images, exact_probs, surprise
from tests.tiny import Models, circle, request, ring, sample, tiny_models

PROMPTS = ["abcd", "xy", "q", "abc"]


def batch(**settings: Any) -> list[Request]:
    return [request(prompt, 10 + seed, **settings) for seed, prompt in enumerate(PROMPTS)]


# The fixed noise


def slow_race(keys: Sequence[int], token: int) -> float:
    """1 / e of one token, in whole numbers of Python and float64."""
    high, low = token >> 16, token & 0xFFFF
    for key, factor in zip(keys, FACTORS, strict=True):
        product = low * factor
        assert product < 2**31
        high, low = product & 0xFFFF, (product >> 16) ^ high ^ key
    return float(
        -1 / torch.tensor(-(low * 65536 + high + 0.5) / 2**32, dtype=torch.float64).log1p()
    )


def test_noise_is_that_of_the_slow_network() -> None:
    keys, tokens = noise_keys(3, 5), [0, 1, 77, 4095, 32767, 70000]
    fast = race_noise(torch.from_numpy(keys), torch.tensor(tokens, dtype=torch.int32))
    slow = torch.tensor([[slow_race(place, token) for token in tokens] for place in keys.tolist()])
    torch.testing.assert_close(fast, slow.float(), rtol=1e-5, atol=0)


def test_noise_of_a_place_depends_on_seed_and_place_alone() -> None:
    assert noise_keys(3, 9)[:5].tolist() == noise_keys(3, 5).tolist()
    assert noise_keys(4, 5).tolist() != noise_keys(3, 5).tolist()
    assert len({tuple(place) for place in noise_keys(3, 500).tolist()}) == 500


@pytest.mark.parametrize("vocabulary", mostly_slow([5, 64, 1000], 5, 64))
def test_races_are_won_as_often_as_a_token_is_probable(vocabulary: int) -> None:
    p = torch.rand(vocabulary, generator=torch.Generator().manual_seed(1)) ** 4
    p, tokens = p / p.sum(), torch.arange(vocabulary, dtype=torch.int32)
    won = [
        (p * race_noise(torch.from_numpy(noise_keys(s, 4096)), tokens)).argmax(-1) for s in range(8)
    ]
    counts = torch.bincount(torch.cat(won), minlength=vocabulary).double()
    assert surprise(counts, p.double()) < 4


# jacobi


@pytest.mark.parametrize(
    ("width", "settings"),
    mostly_slow(
        [(width, name) for width in (1, 2, 5, 15) for name in SETTINGS],
        *((1, "guided"), (2, "top-k"), (5, "unguided"), (15, "top-p"), (2, "greedy")),
    ),
)
def test_jacobi_draws_the_tokens_of_one_token_decoding(
    models: Models, width: int, settings: str
) -> None:
    requests = batch(**SETTINGS[settings])
    alone = sample(models, Window.of("jacobi", 0), requests)
    drawn = sample(models, Window.of("jacobi", width), requests)
    assert drawn.tokens.tolist() == alone.tokens.tolist()
    assert sum(drawn.steps) < sum(alone.steps)


@torch.no_grad()
@pytest.mark.parametrize("settings", mostly_slow(["guided", "unguided top-p"]))
def test_one_token_decoding_with_fixed_noise_keeps_the_distribution(settings: str) -> None:
    models = tiny_models(SMALL, seed=3)
    counts, one = count_images(models, Window.of("jacobi", 0), **DISTRIBUTIONS[settings])
    assert surprise(counts, exact_probs(models[0], one)) < 4


def test_noise_made_in_the_step_is_the_noise_that_is_kept(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, requests = Window.of("jacobi", 5), batch()
    kept = sample(models, tree, requests).tokens.tolist()
    monkeypatch.setattr(spec, "NOISE_BYTES", 0)
    made = sample(models, tree, requests)
    assert made.tokens.tolist() == kept


# Windows whose drafts are tried

RULES = [load_tree(n) for n in ("scd:2", "sjd-pac:2:3x2", "sjd-pac:2:2x1", "sjd-pac:1:1x0")]


@torch.no_grad()
@pytest.mark.parametrize("settings", mostly_slow(["guided top-k", "unguided"], "unguided"))
@pytest.mark.parametrize("tree", mostly_slow(RULES, RULES[0]), ids=lambda tree: tree.name)
def test_windows_keep_the_distribution_of_whole_images(tree: Window, settings: str) -> None:
    models = tiny_models(SMALL, seed=3)
    counts, one = count_images(models, tree, **DISTRIBUTIONS[settings])
    assert surprise(counts, exact_probs(models[0], one)) < 4


@contextmanager
def stale_probs() -> Iterator[None]:
    """`sjd-pac` as published code has it: a kept draft stays beside the distribution that it was once drawn from."""
    couple, keep = WindowDrafting.couple, WindowDrafting.keep
    kept: list[Tensor] = []

    def stale(self: WindowDrafting, probs: Tensor, before: Tensor, *rest: Any) -> Tensor:
        own = rest[-1].drafting
        tokens, old = couple(self, probs, before, *rest), before.clamp(max=self.width - 1)
        same = (tokens == gather(own.drafts, 1, old)) & (before < self.width)
        kept.append(torch.where(same[..., None], gather_rows(own.q, old), probs))
        return tokens

    def with_stale(self: WindowDrafting, tokens: Tensor, probs: Tensor, *rest: Any) -> None:
        keep(self, tokens, kept.pop() if kept else probs, *rest)

    changed: Any = WindowDrafting
    changed.couple, changed.keep = stale, with_stale
    try:
        yield
    finally:
        changed.couple, changed.keep = couple, keep


@pytest.mark.slow
@torch.no_grad()
def test_distribution_test_notices_a_stale_distribution() -> None:
    """A kept draft beside the distribution that it was once drawn from, as published code has it, is not exact."""
    models, tree = tiny_models(SMALL, seed=1), load_tree("sjd-pac:2:1x0")
    exact, one = count_images(models, tree, cfg_scale=1.0)
    with stale_probs():
        wrong, _ = count_images(models, tree, cfg_scale=1.0)
    probs = exact_probs(models[0], one)
    assert surprise(exact, probs) < 4
    assert surprise(wrong, probs) > 8


@pytest.mark.slow
def test_jacobi_draws_the_same_images_of_the_embedded_model_at_any_width() -> None:
    pipeline = LanternPipeline.from_pretrained("builtin", device="cpu")
    narrow, wide = (
        pipeline("a red apple", num_images_per_prompt=2, method=f"jacobi@{width}").tokens
        for width in (1, 8)
    )
    assert np.array_equal(narrow, wide)


# The walk along a spine, and the walk by levels


@pytest.mark.parametrize(
    "rule",
    [
        EXACT,
        Multiplicative(6, lam=4.0),
        Annealed(omega=2.0, nu=0.2),
        Clustered(distance=1.2),
        Blended(tv=0.08, budget=0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["scd:6", "sjd-pac:6:4x3", "sjd-pac:3:2x3"])
def test_the_walk_along_a_spine_is_the_walk_by_levels(name: str, rule: Relaxation) -> None:
    tree, images, vocabulary = load_tree(name), 400, 12
    assert isinstance(tree, Window)
    generator = torch.Generator().manual_seed(2)
    p, q = torch.rand(2, images, tree.depth, vocabulary, generator=generator) ** 3
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    q = torch.lerp(p, q, 0.4)
    tokens = torch.zeros(images, tree.size, dtype=torch.int32)
    for row, node in enumerate(tree.expanded):
        children = list(tree.children[node])
        uniform = torch.rand(images, len(children), generator=generator)
        tokens[:, children] = sample_distinct(q[:, row], uniform)
    tries = torch.rand(images, tree.depth, tree.max_children, generator=generator)
    near = ring(vocabulary) if rule.lends else None
    codes = circle(vocabulary) if rule.clusters else None
    how: dict[str, Any] = {"annealed": rule.weighs, "ranks": 7, "blended": rule.tv > 0}
    acceptance = Acceptance(Spec(images, False, tree, **how, metered=True), near, codes)
    drafts = Drafts(tokens, q, StaticTables(tree)(images))
    given = (p, drafts, tries, Bounds.of([rule] * images, tree.depth))
    fast, slow = acceptance.walk_sampled(*given), LevelWalk(acceptance.rules, tree)(*given)
    assert isinstance(acceptance.walk_sampled, SpineWalk)
    assert fast.node.tolist() == slow.node.tolist()
    assert len(set(fast.node.tolist())) > tree.depth  # every depth, and siblings if there are any
    torch.testing.assert_close(fast.residual, slow.residual)
    counts = torch.tensor(tree.depths)[fast.node]
    inside = torch.arange(tree.depth) < counts[:, None]
    assert (fast.relaxed & inside).tolist() == (slow.relaxed & inside).tolist()
    assert bool((slow.relaxed & inside).any()) == rule.active
    assert fast.spent is not None and slow.spent is not None
    torch.testing.assert_close(fast.spent, slow.spent, rtol=0, atol=1e-6)
    assert bool(slow.spent.any()) == rule.active


# Options, and what they are chosen by


def test_jacobi_refuses_a_relaxed_request_in_a_batch(models: Models) -> None:
    relaxed = [request(relaxation=Multiplicative(3, lam=2.0))]
    with pytest.raises(OptionError, match="jacobi takes no relaxation"):
        sample(models, Window.of("jacobi", 2), relaxed)


@pytest.mark.parametrize("name", mostly_slow(["scd:6", "sjd-pac:6:3x2", "chain"], "scd:6"))
def test_clusters_change_no_other_image_of_the_batch(models: Models, name: str) -> None:
    near, far = Clustered(distance=0.5), Clustered(distance=0.0)
    plain = batch()
    mixed = [replace(one, relaxation=(near, far)[i % 2]) for i, one in enumerate(plain)]
    exact, drawn = (sample(models, load_tree(name), some) for some in (plain, mixed))
    for i, one in enumerate(mixed):
        alone = sample(models, load_tree(name), [one])
        assert drawn.tokens[i].tolist() == alone.tokens[0].tolist()
        assert i % 2 == 0 or drawn.tokens[i].tolist() == exact.tokens[i].tolist()
    assert drawn.tokens.tolist() != exact.tokens.tolist()
    assert drawn.relaxed[1::2] == [0, 0] and sum(drawn.relaxed) > 0


def test_greedy_windows_draw_what_one_token_decoding_draws(models: Models) -> None:
    requests = batch(temperature=0.0)
    want = sample(models, DraftTree.root_only(), requests).tokens.tolist()
    for name in ("jacobi:6", "scd:6", "sjd-pac:6:3x2"):
        drawn = sample(models, load_tree(name), requests)
        assert drawn.tokens.tolist() == want
        assert sum(drawn.steps) < len(want) * (len(want[0]) - 1)


def test_tuned_windows_are_what_auto_takes_without_a_drafter(model: Path) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    pipeline.model.drafter = None
    pipeline.model.files = {n: d for n, d in pipeline.model.files.items() if "drafter" not in n}
    assert pipeline.resolve("auto").method == "ar"  # nothing was measured
    for method, gain in (("scd", 1.3), ("sjd-pac", 1.4), ("jacobi", 1.2)):
        save_tuned(pipeline, method, gain)
    chosen = pipeline.resolve("auto")
    assert (chosen.method, chosen.tree) == ("sjd-pac", Window.of("sjd-pac", 7))
    assert pipeline.resolve("auto:lambda=2:k=3").method == "sjd-pac"
    assert pipeline.resolve("scd@auto").tree == Window.of("scd", 7)
    save_tuned(pipeline, "sjd-pac", 0.9)  # ar won there
    assert pipeline.resolve("auto").method == "scd"
    for method in ("scd", "jacobi"):  # and everywhere else
        save_tuned(pipeline, method, 0.9)
    assert pipeline.resolve("auto").method == "ar"


def save_tuned(pipeline: LanternPipeline, method: str, gain: float) -> None:
    """A window of 7, measured to be `gain` times as fast as `ar`."""
    tree = Window.of(METHODS[method].rule or "scd", 7)
    tuned_trees.save_tree(pipeline.situation(method, 1), tuned_trees.TunedTree(tree, gain))


def test_tune_measures_widths_and_saves_the_fastest(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    given = ["--model", str(model), "--device", "cpu", "--method", "scd", "--num-images", "2"]
    assert tune.main([*given, "--report", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [row["tree"] for row in rows] == ["root", "scd:2", "scd:5", "scd:8"]
    assert rows[0]["tokens_per_step"] == 1 < rows[3]["tokens_per_step"]
    assert "times as fast" in capsys.readouterr().out
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    best = min(rows[1:], key=lambda row: row["ms_per_token"])
    assert pipeline.resolve("scd@auto").tree == Window.parse(best["tree"])
    fastest = min(rows, key=lambda row: row["ms_per_token"])["tree"]
    chosen = pipeline.resolve("auto")
    assert chosen.why == "tuned"
    assert chosen.tree == (DraftTree.root_only() if fastest == "root" else Window.parse(fastest))
