"""What `verify` asks, and in which processes: a device reads its flags once. Needs no torch, but for the facts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from lantern_hpu.backends import EMULATED
from lantern_hpu.methods.table import METHODS

State = Literal["confirmed", "refuted", "unanswered"]
KERNELS = ("attention", "rms_norm", "rotate", "swiglu")


@dataclass(frozen=True)
class Stage:
    """A process: one graph mode of one device.

    Attributes:
        kind: `facts`, `kernels`, `methods` or `bench`.
    """

    kind: str
    graphs: str

    @property
    def name(self) -> str:
        return f"{self.kind} {self.graphs}"


class Question(NamedTuple):
    """What is asked, and where the expected answer comes from."""

    item: str
    source: str


@dataclass(frozen=True)
class Result:
    """The answer to one question.

    Attributes:
        item: the question. detail: what was seen, or why there is no answer.
        seconds: that it took. numbers: what was measured, by name with its unit.
    """

    stage: str
    item: str
    state: State
    detail: str = ""
    source: str = ""
    seconds: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def stages_of(device: str) -> list[Stage]:
    """The stages of a device, the cheapest first."""
    best, *others = ["hpu_graph", "compile"] if device == EMULATED else ["auto", "compile"]
    facts = [Stage("facts", mode) for mode in ("hpu_graph", "eager")] if device == EMULATED else []
    methods = [Stage("methods", mode) for mode in (best, *others)]
    return [*facts, Stage("kernels", best), *methods, Stage("bench", best)]


def items_of(stage: Stage) -> Iterator[Question]:
    """Those of a stage; facts load torch."""
    if stage.kind == "facts":
        from lantern_hpu.backends.hpu.facts import facts_for

        yield from (Question(name, source) for name, source in facts_for(stage.graphs))
    elif stage.kind == "kernels":
        yield from (Question(name, "its plain twin") for name in KERNELS)
    elif stage.kind == "methods":
        yield from (Question(name, "the CPU's tokens") for name in METHODS)
    else:
        yield Question("short benchmark", "this machine")
