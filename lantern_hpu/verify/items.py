"""What `verify` asks, and in which processes: a device reads its flags once. Needs no torch, but for the facts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from lantern_hpu.backends import EMULATED, OWN_KERNELS
from lantern_hpu.backends.hpu import env
from lantern_hpu.backends.hpu import env as hpu_env
from lantern_hpu.methods.setting import METHODS

State = Literal["confirmed", "refuted", "unanswered"]
CUTS_REFUSED = "PT_HPU_USE_EAGER_FALLBACK"  # 0: the compiler raises where it would cut a graph
CACHES = (
    "ar",
    "lantern++",
)  # a method without a drafter, and one with it: caches and cuts are asked of these


@dataclass(frozen=True)
class Stage:
    """A process: one graph mode of one device.

    Attributes:
        kind: `facts`, `kernels`, `caches`, `methods`, `cuts` or `bench`.
        release: of Gaudi's software, whose facts are asked.
    """

    kind: str
    graphs: str
    device: str = EMULATED
    release: str = env.DEFAULT.name

    @property
    def name(self) -> str:
        return f"{self.kind} {self.graphs}"

    @property
    def flags(self) -> dict[str, str]:
        """What the environment of its process has, whatever the user set."""
        return {CUTS_REFUSED: "0"} if self.kind == "cuts" else {}


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


def stages_of(device: str, emulate: bool = False) -> list[Stage]:
    """The stages of a device, the cheapest first."""
    modes = ["hpu_graph", "compile"] if device == EMULATED else ["auto", "compile"]
    pairs = [("facts", mode) for mode in ("hpu_graph", "eager") if device == EMULATED]
    pairs += [("kernels", modes[0])] if device in OWN_KERNELS else []
    pairs += [(kind, mode) for kind in ("caches", "methods") for mode in modes]
    pairs += [("cuts", "compile")] if device == EMULATED else []
    release = hpu_env.release_of(emulate).name
    return [Stage(*pair, device, release) for pair in [*pairs, ("bench", modes[0])]]


def items_of(stage: Stage) -> Iterator[Question]:
    """Those of a stage; facts load torch."""
    if stage.kind == "facts":
        from gaudi_emulator.ask_facts import facts_for

        facts = facts_for(stage.graphs, stage.release)
        yield from (Question(name, source) for name, source in facts)
    elif stage.kind == "kernels":
        yield from (Question(name, "its plain twin") for name in OWN_KERNELS[stage.device])
    elif stage.kind == "caches":
        yield from (Question(name, "the plain step on the CPU") for name in CACHES)
    elif stage.kind == "cuts":
        yield from (Question(name, f"{CUTS_REFUSED}=0") for name in CACHES)
    elif stage.kind == "methods":
        yield from (Question(name, "the CPU's tokens") for name in METHODS)
    else:
        yield Question("short benchmark", "this machine")
