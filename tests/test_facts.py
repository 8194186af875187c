"""Each fact of the contract holds on the emulated card, and a card that does otherwise is found out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from lantern_hpu.backends.hpu.backend import HPUBackend
from lantern_hpu.backends.hpu.emulator import lint_checks
from lantern_hpu.backends.hpu.emulator.facts import (
    FACTS,
    Card,
    Fact,
    Refuted,
    Unanswered,
    release_facts,
)
from lantern_hpu.backends.hpu.releases import RELEASES, VARIABLE

CASES = [
    (name, fact)
    for name in RELEASES
    for lazy in (True, False)
    for fact in release_facts(name, lazy)
]


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """Of the release and the mode that the fact is of."""
    monkeypatch.setenv(VARIABLE, request.getfixturevalue("release"))
    mode = "hpu_graph" if request.getfixturevalue("fact").lazy else "eager"
    with closing(HPUBackend(mode, emulate=True)) as backend, torch.no_grad():
        yield Card(backend)


@pytest.mark.filterwarnings("ignore:mark_step does nothing")
@pytest.mark.parametrize(
    ("release", "fact"), CASES, ids=[f"{name}: {fact.name} ({fact.source})" for name, fact in CASES]
)
def test_fact_holds_on_the_emulated_card(release: str, fact: Fact, card: Card) -> None:
    fact.check(card)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("fact", [f for f in FACTS if "int32" in f.name and "stored" in f.name][:1])
def test_planted_difference_is_refuted(
    release: str, fact: Fact, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lint_checks, "narrow", lambda *args: None)
    with pytest.raises(Refuted, match="the contract says"):
        fact.check(card)


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


def test_facts_have_their_own_names_and_sources() -> None:
    names = [fact.name for fact in FACTS]
    assert len(set(names)) == len(names) >= 60
    assert all("/" in fact.source or ":" in fact.source or "." in fact.source for fact in FACTS)
