"""Windows on a fixed schedule: the first C places of a window are made final in each step, whatever they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lantern_hpu.commands import generate
from lantern_hpu.core import Request
from lantern_hpu.decode.batch import Batch
from lantern_hpu.methods.setting import Resolved, Setting
from lantern_hpu.ops.sampling import noise_keys, uniforms
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.tree import Window, load_tree
from tests.emulated import draw_warm, emulated
from tests.marks import mostly_slow
from tests.test_step import (
    DISTRIBUTIONS,
    SETTINGS,
    SMALL,
    Ahead,
    count_images,
    exact_probs,
    fresh_cache,
    same_entries,
    surprise,
)
from tests.test_windows import batch, slow_race
from tests.tiny import (
    Decoded,
    Models,
    advance,
    condition,
    decoded,
    make_engine,
    prefix_for,
    request,
    sample,
    spec_for,
    tiny_config,
    tiny_models,
)
from tests.twin import Twin, slow_sample

SLOW = ["scd:3:commit=2", "jacobi:4:commit=3", "scd:6:commit=6"]
RULES = ("jacobi", "scd", "sjd-pac")


@pytest.fixture(scope="module")
def models() -> Models:
    return tiny_models()


# Against a slow loop over whole forwards


def slow_image(models: Models, one: Request, tree: Window) -> tuple[list[int], list[float]]:
    """An image of a window with fixed noise: tokens [N], and the total variation of each that a later step looked at.

    No cache: each distribution comes from a forward over the whole sequence.
    """
    config = models[0].config
    rows = condition(config, [one.prompt], one.sampling.cfg_scale != 1)[:2]
    twin, keys = Twin(models, one, *rows), noise_keys(one.seed, config.tokens).tolist()

    def draw(probs: Sequence[float], place: int) -> int:
        last = min(place, config.tokens - 1)
        fast = [
            p if one.sampling.greedy else p * slow_race(keys[last], t) for t, p in enumerate(probs)
        ]
        return max(range(len(fast)), key=fast.__getitem__)

    def distance(q: Sequence[float], p: Sequence[float]) -> float:
        if one.sampling.greedy:
            return float(np.argmax(q) != np.argmax(p))
        return sum(max(0.0, a - b) for a, b in zip(q, p, strict=True))

    first = twin.target_probs([])
    start = float(uniforms(one.seed, 0, 1)[0])
    tokens = [int(np.argmax(first)) if one.sampling.greedy else slow_sample(first, start)]
    drafts = [draw(first, 1 + i) for i in range(tree.width)]
    made: list[
        tuple[int, Sequence[float]]
    ] = []  # places made final a step ago, and what they were drawn from
    spent = []
    while len(tokens) < config.tokens:
        spent += [distance(q, twin.target_probs(tokens[:place])) for place, q in made]
        p = [twin.target_probs(tokens + drafts[:i]) for i in range(tree.width + 1)]
        known = len(tokens)
        q = [p[min(i, tree.width)] for i in range(tree.width + tree.commit)]
        drawn = [draw(probs, known + i) for i, probs in enumerate(q)]
        made = [(known + i, q[i]) for i in range(1, tree.commit)]
        tokens, drafts = tokens + drawn[: tree.commit], drawn[tree.commit :]
    return tokens[: config.tokens], spent


@torch.no_grad()
@pytest.mark.parametrize("settings", mostly_slow(SETTINGS, "guided", "greedy"))
@pytest.mark.parametrize("name", mostly_slow(SLOW, SLOW[0]))
def test_images_and_meter_are_those_of_the_slow_loop(
    models: Models, name: str, settings: str
) -> None:
    tree, requests = load_tree(name), batch(**SETTINGS[settings])
    assert isinstance(tree, Window)
    got = sample(models, tree, requests)
    assert got.spent is not None
    for image, one in enumerate(requests):
        tokens, spent = slow_image(models, one, tree)
        assert got.tokens[image].tolist() == tokens
        assert got.spent[image] == pytest.approx((sum(spent), max(spent)), abs=1e-4)
    assert sum(total for total, _ in got.spent) > 0


@pytest.mark.parametrize("settings", mostly_slow(SETTINGS, "guided", "top-k"))
@pytest.mark.parametrize("width", mostly_slow([1, 5], 5))
@pytest.mark.parametrize("rule", ["jacobi", "scd"])
def test_one_token_a_step_is_one_token_decoding_with_the_same_noise(
    models: Models, rule: Any, width: int, settings: str
) -> None:
    requests = batch(**SETTINGS[settings])
    alone = sample(models, Window.of("jacobi", 0), requests)
    drawn = sample(models, Window.of(rule, width, commit=1), requests)
    assert drawn.tokens.tolist() == alone.tokens.tolist()
    assert drawn.steps == alone.steps and drawn.spent is None


@torch.no_grad()
@pytest.mark.parametrize("settings", mostly_slow(["guided top-k", "unguided"], "unguided"))
@pytest.mark.parametrize("rule", mostly_slow(RULES, "sjd-pac"))
def test_one_token_a_step_keeps_the_distribution_of_whole_images(rule: Any, settings: str) -> None:
    models = tiny_models(SMALL, seed=3)
    counts, one = count_images(models, Window.of(rule, 2, commit=1), **DISTRIBUTIONS[settings])
    assert surprise(counts, exact_probs(models[0], one)) < 4


@torch.no_grad()
def test_distribution_test_notices_two_tokens_a_step() -> None:
    models = tiny_models(SMALL, seed=3)
    counts, one = count_images(models, Window.of("scd", 2, commit=2), cfg_scale=1.0)
    assert surprise(counts, exact_probs(models[0], one)) > 8


def test_the_meter_sees_what_the_schedule_costs() -> None:
    """Of three tokens the last two are made final at once, then the step that would look is not run; of five it is."""
    models = tiny_models(replace(SMALL, grid=(1, 5)), seed=3)
    tree, requests = Window.of("scd", 2, commit=2), [request("ab", seed) for seed in range(40)]
    counts = sample(models, tree, requests)
    assert counts.steps == [2] * 40 and counts.spent is not None
    assert 0 < np.mean([total for total, _ in counts.spent]) < 1
    assert all(
        total == most for total, most in counts.spent
    )  # one place that a later step looked at


# Keys


@torch.no_grad()
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
@pytest.mark.parametrize("name", ["scd:6:commit=1", "scd:6:commit=4", "sjd-pac:5:commit=5"])
def test_keys_of_final_tokens_are_those_of_a_fresh_pass(name: str, steps: int) -> None:
    """A token's keys are written by the step after the one that made it final, not left as those of a draft."""
    target, _ = models = tiny_models(tiny_config(grid=(6, 6)))
    tree, requests = load_tree(name), batch()
    assert isinstance(tree, Window)
    engine = make_engine(models, spec_for(tree, requests, config=target.config))
    advance(engine, requests, steps)
    state, images = engine.state, len(requests)
    prefix, valid, *_ = condition(target.config, [one.prompt for one in requests])
    for image in range(images):
        rows = list(range(image, 2 * images, images))
        written = 0 if not steps else 1 + (steps - 1) * tree.commit  # tokens that have keys
        assert int(state.count[image]) == steps * tree.commit
        tokens = state.tokens.view(images, -1)[image, :written]
        whole = torch.cat([prefix[rows], target.embed(tokens).expand(len(rows), -1, -1)], 1)
        same_entries(state.kv_cache, fresh_cache(target, whole, valid[rows], 0), rows)


# Batches


@pytest.mark.parametrize("mode", mostly_slow(["eager", "strict"], "strict"))
@pytest.mark.parametrize("rule", mostly_slow(RULES, "scd"))
def test_image_depends_on_no_other_in_its_batch(models: Models, rule: Any, mode: str) -> None:
    tree = Window.of(rule, 6, commit=3)
    together = [*batch(top_k=9), request("xyz", 3, temperature=0.0)]
    drawn = sample(models, tree, together, mode=mode)
    for image, one in enumerate(together):
        alone = sample(models, tree, [one])
        assert alone.tokens[0].tolist() == drawn.tokens[image].tolist()
        assert drawn.spent is not None and alone.spent is not None
        assert alone.spent[0] == pytest.approx(drawn.spent[image], abs=1e-5)
        assert alone.steps[0] == drawn.steps[image] == 5


def decoded_ahead(models: Models, tree: Window, requests: Sequence[Request]) -> tuple[Decoded, int]:
    """On a device that runs ahead of its host: what it drew, and how often the host read."""
    engine = make_engine(models, spec_for(tree, requests))
    engine.backend = Ahead()
    running = Batch(engine, partial(prefix_for, engine))
    before = engine.report().host_reads
    running.admit(requests)
    seen = []
    while running.running:
        running.advance()
        seen.append(running.known[0])
    assert seen == sorted(seen) and seen[-1] == models[0].config.tokens
    done = decoded(engine, requests)
    return done, engine.report().host_reads - before


def test_the_host_reads_once_an_image(models: Models) -> None:
    requests, tree = batch(), Window.of("scd", 6, commit=2)
    want = sample(models, tree, requests)
    got, reads = decoded_ahead(models, tree, requests)
    assert got.tokens.tolist() == want.tokens.tolist()
    assert (got.steps, reads) == ([8] * 4, 1)
    assert decoded_ahead(models, Window.of("scd", 6), requests)[1] > 2


def test_replays_on_the_emulated_card_are_launched_without_a_read(model: Path) -> None:
    prompts = ["a red apple", "blue cat"]
    want = LanternPipeline.from_pretrained(str(model), device="cpu", dtype="float32")
    with emulated(model, "hpu_graph") as (pipeline, card):
        for method in ("scd@8:commit=4", "sjd-pac@8:commit=3"):
            got, counts = draw_warm(pipeline, card, prompts, seed=3, method=method)
            expected = want(prompts, seed=3, method=method)
            assert got.tokens.tolist() == expected.tokens.tolist()
            graph, steps = got.graph, got.records[0].steps
            assert graph["host_reads"] == 1 and graph["replays"] == steps + 1
            assert counts["graph_launches"] == steps + 1
            assert counts["host_syncs"] == 1 + len(prompts)  # and one for the pixels of each
            assert counts["cpu_fallbacks"] == counts["errors"] == counts["warnings"] == 0
            assert (graph["captures"], graph["recompiles_after_warmup"]) == (2, 0)


# Options


def test_the_window_is_part_of_its_name() -> None:
    tree = Window.of("scd", 16, commit=4)
    assert tree.name == "scd:16:commit=4" and load_tree(tree.name) == tree
    assert (tree.width, tree.size, tree.commit) == (16, 20, 4)
    setting = Setting.parse("scd@16:commit=4")
    assert setting.tree == tree and str(setting) == "scd@16:commit=4"
    resolved = Resolved("scd", tree=tree)
    assert Resolved.read(json.loads(json.dumps(resolved.as_json()))) == resolved
    assert load_tree("scd:16") == Window.of("scd", 16) != tree


def test_the_report_counts_what_is_final(model: Path, tmp_path: Path) -> None:
    first, report = tmp_path / "first.png", tmp_path / "r.json"
    given = ["--model", str(model), "--prompt", "red cat", "--seed", "4", "--output", str(first)]
    window = ["--method", "scd@9:commit=3", "--report", str(report)]
    assert generate.main([*given, *window]) == 0
    record = json.loads(report.read_text())["images"][0]
    assert record["steps"] == 5 and record["tokens_per_step"] == 3
    assert record["accepted_by_depth"][:2] == [5, 5] and sum(record["accepted_by_depth"]) == 10
    assert 0 < record["tv_max"] <= record["tv_sum"] == pytest.approx(15 * record["tv_mean"])
