"""Facts of Gaudi's bridge that a card can be asked, and its emulator too; `facts.py` has the questions."""

from __future__ import annotations

from typing import Literal, cast

import torch

from gaudi_emulator.facts import FACTS, Card, Refuted, Unanswered, release_facts
from lantern_hpu.backends.base import Backend
from lantern_hpu.backends.hpu.backend import HPUBackend
from lantern_hpu.backends.hpu.env import LAZY, PLUGIN, version_of

Answer = Literal["confirmed", "refuted", "unanswered"]


def facts_for(graphs: str, release: str) -> list[tuple[str, str]]:
    """(name, source) of the facts of a release that a graph mode can be asked."""
    facts = release_facts(release, LAZY[graphs])
    return [(fact.name, fact.source) for fact in facts]


def stands_in(device: str) -> bool:
    """Whether the Gaudi of this process is emulated; known before its software is loaded."""
    return device == HPUBackend.name and "emulated" in (version_of(PLUGIN) or "")


@torch.no_grad()
def ask_fact(name: str, backend: Backend) -> tuple[Answer, str]:
    """Whether a fact holds on a device, real or emulated, and why not."""
    (fact,) = (fact for fact in FACTS if fact.name == name)
    try:
        fact.check(Card(cast(HPUBackend, backend)))
    except Refuted as error:
        return "refuted", str(error)
    except Unanswered as error:
        return "unanswered", str(error)
    return "confirmed", ""
