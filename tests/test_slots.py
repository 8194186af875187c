"""Slots: an image is the same alone, in a closed batch, and admitted while others go on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lantern_hpu.commands.generate import main
from lantern_hpu.core import ImageRecord, Request, check_valid
from lantern_hpu.decode.batch import Batch
from lantern_hpu.errors import InvalidImageError
from lantern_hpu.methods.relaxation import Multiplicative
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import read_png
from lantern_hpu.tree import DraftTree, DynamicTree, Tree, load_static, load_tree
from tests.emulated import emulated, rules
from tests.marks import mostly_slow
from tests.test_step import Ahead
from tests.tiny import (
    SMALL_TREE,
    Models,
    make_engine,
    prefix_for,
    request,
    sample,
    spec_for,
    tiny_config,
    tiny_models,
)

AR = DraftTree.root_only()
WINDOWS = [load_tree(name) for name in ("jacobi:6", "scd:6", "sjd-pac:6:3x2")]
SCHEDULED = [load_tree(name) for name in ("scd:6:commit=4", "sjd-pac:6:commit=2")]
GROWN = DynamicTree(top_k=3, expansions=2, drafts=8)
LENT = Multiplicative(6, lam=4.0)
SLOTS = 3
PROMPTS = ["abcd", "xy", "q", "abc", "zebra", "a", "bcd"]


def images(**settings: Any) -> list[Request]:
    """More than there are slots, no two with the same settings."""
    return [
        request(prompt, 20 + i, cfg_scale=1.5 + i / 4, temperature=0.7 + i / 10, **settings)
        for i, prompt in enumerate(PROMPTS)
    ]


def open_batch(models: Models, tree: Tree, requests: Sequence[Request], mode: str) -> Batch:
    spec = replace(spec_for(tree, requests), images=SLOTS, open=True)
    engine = make_engine(models, spec, mode)
    return Batch(engine, partial(prefix_for, engine))


def one_after_another(batch: Batch, requests: Sequence[Request], order: int) -> list[ImageRecord]:
    """Admit at random times, wherever there is room, until all are done."""
    rng, waiting, done = random.Random(order), list(requests), list[ImageRecord]()
    while waiting or batch.slots:
        while waiting and batch.free and rng.random() < 0.6:
            batch.admit([waiting.pop(0)])
        if batch.running:
            batch.advance(until_first_done=rng.random() < 0.5)
        done += [record for _, record in batch.finished()]
    return done


def figures(done: ImageRecord) -> tuple[list[int], int, list[int], int]:
    return done.token_ids.tolist(), done.steps, done.accepted_by_depth, done.relaxed_accepts


@pytest.mark.parametrize("mode", mostly_slow(["eager", "strict"], "eager"))
@pytest.mark.parametrize(
    "tree",
    mostly_slow(
        [AR, SMALL_TREE, GROWN, *WINDOWS, *SCHEDULED], SMALL_TREE, WINDOWS[0], SCHEDULED[0]
    ),
    ids=lambda tree: tree.name,
)
def test_an_image_is_the_same_alone_in_company_and_admitted_in_the_middle(
    models: Models, tree: Tree, mode: str
) -> None:
    exact = (AR, load_tree("jacobi:6"), *SCHEDULED)
    requests = images(relaxation=None if tree in exact else LENT)
    together = sample(models, tree, requests)
    batch = open_batch(models, tree, requests, mode)
    for order in range(3 if mode == "strict" else 1):
        found = {done.request.seed: done for done in one_after_another(batch, requests, order)}
        assert len(found) == len(requests)
        for i, each in enumerate(requests):
            alone = sample(models, tree, [each])
            want = (alone.tokens[0].tolist(), alone.steps[0], alone.accepted[0], alone.relaxed[0])
            assert figures(found[each.seed]) == want
            assert together.tokens[i].tolist() == want[0]
    report = batch.engine.report()
    assert report.recompiles_after_warmup == 0
    if mode == "strict":
        assert report.captures == 3  # of all slots, of one, and of the step


@pytest.mark.parametrize(
    "tree",
    mostly_slow([AR, SMALL_TREE, SCHEDULED[0]], AR, SCHEDULED[0]),
    ids=lambda tree: tree.name,
)
def test_images_are_the_same_where_the_host_reads_while_the_device_goes_on(
    models: Models, tree: Tree
) -> None:
    requests = images()
    batch = open_batch(models, tree, requests, "eager")
    batch.engine.backend = Ahead()
    want = sample(models, tree, requests)
    found = {done.request.seed: done for done in one_after_another(batch, requests, 5)}
    assert [found[r.seed].token_ids.tolist() for r in requests] == want.tokens.tolist()
    assert [found[r.seed].steps for r in requests] == want.steps


def test_admission_leaves_the_other_slots_alone(models: Models) -> None:
    requests = images()
    batch = open_batch(models, SMALL_TREE, requests, "eager")
    batch.admit(requests[:2])
    batch.advance(until_first_done=True)
    state = batch.engine.state
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    assert batch.admit([requests[2]]) == [2]
    rows = 2 * SLOTS
    for name, tensor in state.tensors().items():
        if name.startswith("prefill"):
            continue
        was = before[name]
        if "kv_cache" in name:  # [R * S, heads, hd]
            parts = [x.unflatten(0, (rows, -1)) for x in (was, tensor)]
        elif name == "tokens":
            parts = [x.unflatten(0, (SLOTS, -1)) for x in (was, tensor)]
        else:
            parts = [was, tensor]
        if len(parts[0]) in (SLOTS, rows):
            mine = [slot for slot in range(len(parts[0])) if slot % SLOTS != 2]
            assert parts[0][mine].equal(parts[1][mine]), name
        else:
            assert was.equal(tensor), name  # uniforms, cursor


def test_a_released_slot_is_free_at_once_and_what_ran_there_does_not_show(models: Models) -> None:
    requests = images()
    batch = open_batch(models, SMALL_TREE, requests, "eager")
    batch.admit(requests[:SLOTS])
    batch.advance(until_first_done=True)
    batch.release(1)
    assert batch.free == [1] and sorted(batch.slots) == [0, 2]
    assert batch.admit([requests[5]]) == [1]
    found: dict[int, list[int]] = {}
    while batch.slots:
        if batch.running:
            batch.advance()
        found |= {done.seed: done.token_ids.tolist() for _, done in batch.finished()}
    want = sample(models, SMALL_TREE, requests).tokens.tolist()
    assert found == {requests[i].seed: want[i] for i in (0, 2, 5)}


def test_an_image_leaves_at_the_host_read_that_shows_it_done(models: Models) -> None:
    """Reads come when the next image may be done, so no slot idles for a whole block."""
    requests = images()
    batch = open_batch(models, SMALL_TREE, requests, "eager")
    batch.admit(requests[:SLOTS])
    while batch.slots:
        if batch.running:
            batch.advance(until_first_done=True)
        for slot, done in batch.finished():
            assert slot in batch.free
            slot_steps = [one.step - 1 for one in batch.slots.values()]
            assert all(steps >= done.steps for steps in slot_steps)  # they began together
            assert batch.steps - done.steps <= 1


def test_one_token_images_come_and_go_without_a_step() -> None:
    models, requests = tiny_models(tiny_config(grid=(1, 1))), images()
    spec = replace(spec_for(SMALL_TREE, requests, config=models[0].config), images=2, open=True)
    engine = make_engine(models, spec)
    batch, found = Batch(engine, partial(prefix_for, engine)), dict[int, list[int]]()
    for each in requests:
        batch.admit([each])
        found |= {done.seed: done.token_ids.tolist() for _, done in batch.finished()}
    want = sample(models, SMALL_TREE, requests).tokens.tolist()
    assert [found[r.seed] for r in requests] == want and engine.step.stats.replays == 2


EMULATED = [("ar", "hpu_graph"), ("eagle2", "hpu_graph"), ("scd", "hpu_graph"), ("ar", "eager")]


@pytest.mark.parametrize(
    ("method", "graphs"),
    mostly_slow(EMULATED, EMULATED[0]),
)
def test_more_images_than_slots_are_the_same_on_the_emulated_card(
    model: Path, method: str, graphs: str
) -> None:
    prompts = ["a red apple", "blue cat", "cat on red", "apple", "blue"]
    want = LanternPipeline.from_pretrained(str(model), device="cpu", dtype="float32")
    setting = str(want.resolve(method))
    expected = want(prompts, seed=7, method=setting, batch_size=5)
    with emulated(model, graphs) as (pipeline, card):
        got = pipeline(prompts, seed=7, method=setting, batch_size=2)
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert not rules(card)
        assert got.graph["recompiles_after_warmup"] == 0
        if graphs == "hpu_graph":
            assert got.graph["captures"] == 3
            assert got.graph["device"]["graph_compilations"] == 0


# Written at once


def folder_run(model: Path, out: Path, *options: object) -> int:
    prompts = [word for text in ("red", "cat", "blue", "apple") for word in ("--prompt", text)]
    plain = ["--model", model, *prompts, "--batch-size", 2, "--output", out, *options]
    return main([str(option) for option in plain])


def test_images_are_written_as_they_come_and_resume_draws_the_rest(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert folder_run(model, whole) == 0
    real, drawn = LanternPipeline.drawn, list[Any]()

    def interrupted(self: LanternPipeline, *args: Any) -> Any:
        if len(drawn) == 2:
            raise KeyboardInterrupt
        drawn.append(args)
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LanternPipeline, "drawn", interrupted)
        assert folder_run(model, out) == 130
    assert "--resume" in capsys.readouterr().err
    first = {file.name: file.read_bytes() for file in out.iterdir()}
    assert len(first) == 2
    assert folder_run(model, out) == 2  # existing files are not overwritten
    assert folder_run(model, out, "--resume", "--batch-size", 3) == 0
    files = {file.name: read_png(file) for file in out.iterdir()}
    assert files == {file.name: read_png(file) for file in whole.iterdir()}
    assert all((out / name).read_bytes() == data for name, data in first.items())
    capsys.readouterr()
    assert folder_run(model, out, "--resume") == 0
    assert "every image is in" in capsys.readouterr().out


def test_what_a_recording_returns_lies_in_the_state(models: Models) -> None:
    """Memory of a recording may be used again by the next one, before the host has read the result."""
    requests = images()
    engine = open_batch(models, SMALL_TREE, requests, "eager").engine
    for function in (engine.prefill_function, engine.step_function):
        with torch.no_grad():
            assert function(engine.state) is engine.state.known


def test_an_admission_hands_all_its_numbers_over_without_waiting(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain copy from the host's pageable memory would wait until all that was launched is done."""
    requests = images()
    batch = open_batch(models, load_tree("scd:6"), requests, "eager")
    batch.admit(requests[:2])
    engine, uploaded = batch.engine, list[int]()

    def upload(values: Tensor, target: Tensor) -> None:
        uploaded.append(target.data_ptr())
        target.copy_(values)

    monkeypatch.setattr(engine.backend.transfers, "upload", upload)
    batch.admit([requests[2]])
    entry = engine.prefill_inputs[1]
    assert entry.keys is not None
    settings = (*vars(entry.sampling).values(), *vars(entry.bounds).values())
    needed = [entry.slot, entry.first_uniform, entry.keys, *settings]
    assert {x.data_ptr() for x in needed if x is not None and x.numel()} <= set(uploaded)


@pytest.mark.parametrize(
    "tree",
    mostly_slow([AR, load_static("chain"), GROWN, *WINDOWS, *SCHEDULED], AR, GROWN, *WINDOWS[:1]),
)
def test_probabilities_that_are_nan_are_said_and_stop_nothing(tree: Tree) -> None:
    """What overflows in half precision, or a wrong kernel: the image is lost, the others and the process are not."""
    target, drafter = tiny_models()
    engine = make_engine((target, drafter), spec_for(tree, requests := images()[:2]))
    with torch.no_grad():
        target.norm.weight.fill_(float("nan"))
    batch = Batch(engine, partial(prefix_for, engine))
    batch.admit(requests)
    while batch.running:
        batch.advance()
    records = [record for _, record in batch.finished()]
    assert [record.invalid[:22] for record in records] == ["probabilities were NaN"] * 2
    with pytest.raises(InvalidImageError, match=r"2 of 2 .* seed 20: probabilities were NaN in"):
        check_valid(records)
    tokens = np.array([record.token_ids for record in records])
    assert tokens.min() >= 0 and tokens.max() < target.config.vocab_size
