"""Each fact of the contract holds on the emulated card, and a card that does otherwise is found out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import nn

from gaudi_emulator import checks, emulate, graphs, habana, ops, tensor, torch_calls
from gaudi_emulator.device import Device, current
from lantern_hpu.backends.base import get_backend
from lantern_hpu.backends.hpu.backend import HPUBackend
from lantern_hpu.backends.hpu.env import RELEASES
from lantern_lab.verify.gaudi_facts import (
    FACTS,
    Card,
    Fact,
    Refuted,
    Unanswered,
    ask_fact,
    release_facts,
)

CASES = [
    (name, fact)
    for name in RELEASES
    for lazy in (True, False)
    for fact in release_facts(name, lazy)
]


@pytest.fixture
def card(request: pytest.FixtureRequest) -> Iterator[Card]:
    """Of the release and the mode that the fact is of."""
    with opened(request.getfixturevalue("release"), request.getfixturevalue("fact")):
        yield Card()


@contextmanager
def opened(release: str, fact: Fact) -> Iterator[HPUBackend]:
    with emulate(release), torch.no_grad():
        yield cast(HPUBackend, get_backend("hpu", "hpu_graph" if fact.lazy else "eager"))


@pytest.mark.filterwarnings("ignore:mark_step does nothing")
@pytest.mark.parametrize(
    ("release", "fact"), CASES, ids=[f"{name}: {fact.name} ({fact.source})" for name, fact in CASES]
)
def test_fact_holds_on_the_emulated_card(release: str, fact: Fact, card: Card) -> None:
    fact.check(card)


# Faults of a card. One of the first refutes most facts; the others have one of their own.

Fault = Callable[[pytest.MonkeyPatch, HPUBackend], None]


def reads_are_off_by_one(patch: pytest.MonkeyPatch, backend: HPUBackend) -> None:
    real = Device.read
    patch.setattr(Device, "read", lambda *given, **more: real(*given, **more) + 1)


def recipes_are_forgotten(patch: pytest.MonkeyPatch, backend: HPUBackend) -> None:
    real = Device.flush

    def flush(card: Device, reason: str) -> None:
        card.recipes.clear()
        real(card, reason)

    patch.setattr(Device, "flush", flush)


def recipes_leave_constants_out(patch: pytest.MonkeyPatch, backend: HPUBackend) -> None:
    patch.setattr(ops, "spec", lambda value: None)


def nothing_falls_back(patch: pytest.MonkeyPatch, backend: HPUBackend) -> None:
    patch.setattr(Device, "fall_back", lambda card, op, why: None)


def everything_falls_back(patch: pytest.MonkeyPatch, backend: HPUBackend) -> None:
    patch.setattr(checks, "falls_back", lambda *given: "planted")


def nothing_is_checked(patch: pytest.MonkeyPatch, backend: HPUBackend) -> None:
    for name in ("upload", "stored", "narrow", "foreign"):
        patch.setattr(checks, name, lambda *given: None)


GENERAL: tuple[Fault, ...] = (
    reads_are_off_by_one,
    recipes_are_forgotten,
    recipes_leave_constants_out,
    nothing_falls_back,
    everything_falls_back,
    nothing_is_checked,
)


def replacing(owner: object, name: str, value: object) -> Fault:
    return lambda patch, backend: patch.setattr(owner, name, value)


def answering(module: str, name: str, value: object) -> Fault:
    """A module of the vendor's with another answer."""
    return lambda patch, backend: patch.setattr(backend.part(module), name, value)


def without_handler(function: Callable[..., object]) -> Fault:
    return lambda patch, backend: patch.delitem(torch_calls.HANDLERS, function)


def other_key(patch: pytest.MonkeyPatch, backend: HPUBackend) -> None:
    card = current()
    patch.setattr(
        card, "release", replace(card.release, key_has_dtype=not card.release.key_has_dtype)
    )


def made_anew(module: nn.Module, move: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A module that moves and gets other parameter objects."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(move(parameter)))
    return module


def copies_are_the_same(
    card: Device, func: object, given: tuple[object, ...], more: object
) -> object:
    return given[0]


unseeded = replacing(Device, "draw_seed", lambda *given: int.from_bytes(os.urandom(3), "big"))
OWN: dict[str, Fault] = {
    "random numbers are fresh in each replay": replacing(Device, "draw_seed", lambda *given: 7),
    "one seed reaches host and device": unseeded,
    "one seed reaches the device outside lazy mode": unseeded,
    "the key leaves the format out": other_key,
    "the key has the format": other_key,
    "a wrapped forward keeps its signature": replacing(
        graphs, "wraps", lambda real: lambda made: made
    ),
    "complex numbers come back as a cpu tensor": without_handler(torch.complex),
    "autocast lowers products and keeps exponentials": replacing(
        tensor, "cast", lambda func, given, more: (given, more)
    ),
    "a deep copy has a storage of its own": lambda patch, backend: patch.setitem(
        torch_calls.HANDLERS, torch.Tensor.__deepcopy__, copies_are_the_same
    ),
    "weights that two modules share stay shared": replacing(nn.Module, "_apply", made_anew),
    "metrics are read by position and an unknown one is none": answering(
        "hpu.metrics", "metric_global", lambda name: habana.Metric("graph_compilation")
    ),
    "the metric of memory is a dictionary": replacing(habana.Metric, "stats", lambda metric: []),
    "an unknown local metric raises": answering(
        "hpu.metrics", "metric_localcontext", lambda name: nullcontext()
    ),
    "the bridge says its mode": answering("utils.internal", "is_lazy", lambda: False),
    "the bridge says its mode outside lazy mode": answering(
        "utils.internal", "is_lazy", lambda: True
    ),
    "memory has its keys": answering("hpu", "memory_stats", dict),
    "the graphs interface is missing outside lazy mode": lambda patch, backend: patch.setattr(
        backend.hpu, "HPUGraph", object, raising=False
    ),
    "the graphs interface is named and raises outside lazy mode": replacing(
        graphs, "need_lazy", lambda *given: None
    ),
    "a step mark outside lazy mode is nothing": answering("core", "mark_step", lambda: True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("release", "fact"), CASES, ids=[f"{name}: {fact.name}" for name, fact in CASES]
)
def test_planted_fault_refutes_the_fact(release: str, fact: Fact) -> None:
    """Every question can be refuted, by a fault of the card and by nothing else."""
    answers = []
    for fault in [OWN[fact.name]] if fact.name in OWN else GENERAL:
        with (
            opened(release, fact) as backend,
            pytest.MonkeyPatch.context() as patch,
            suppress(Exception),  # what a card raises besides leaves the question open
        ):
            fault(patch, backend)
            answers.append(ask_fact(fact.name)[0])
        if "refuted" in answers:
            return
    raise AssertionError(f"no fault refutes it: {answers}")


ALONE = [
    (fact.only, other, fact)
    for fact in FACTS
    for other in RELEASES
    if fact.only not in (None, other)
]


@pytest.mark.filterwarnings("ignore:mark_step does nothing")
@pytest.mark.parametrize(
    ("only", "release", "fact"), ALONE, ids=[f"{fact.name} in {other}" for _, other, fact in ALONE]
)
def test_fact_of_one_release_is_refuted_by_the_other(
    only: str, release: str, fact: Fact, card: Card
) -> None:
    """What a card of another release would answer: the question can be refuted."""
    with pytest.raises((Refuted, Unanswered, AttributeError)):
        fact.check(card)
