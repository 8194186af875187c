"""What `verify` asks, and in which processes: a device reads its flags once. Needs no torch, but for the facts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lantern_hpu.backends import BACKENDS
from lantern_hpu.backends.hpu import env as hpu_env
from lantern_hpu.methods.setting import METHODS

State = Literal["confirmed", "refuted", "unanswered"]
KINDS = ("facts", "kernels", "caches", "methods", "cuts", "distribution", "bench")  # cheapest first
ALONE = ("facts", "cuts")  # kinds that share no process
CUTS_REFUSED = "PT_HPU_USE_EAGER_FALLBACK"  # 0: the compiler raises where it would cut a graph
DRAWS = "draws"  # a question of kernels that no kernel is named after
RECAPTURED = "engines recorded again"  # one of methods
GROUPED = "ar, grouped heads"  # of caches: a small model in which queries share keys
# A method without a drafter, and one with it: caches and cuts are asked of these
CACHES = ("ar", "lantern++")
# Whose first tokens are held to the distribution
DRAWN = ("ar", "scd", "sjd-pac", "jacobi", "eagle")


@dataclass(frozen=True)
class Stage:
    """Questions of one kind, in one graph mode of one device."""

    kind: str  # of `KINDS`
    graphs: str
    device: str = next(iter(BACKENDS))
    release: str = hpu_env.DEFAULT.name  # of Gaudi's software, whose facts are asked

    @property
    def name(self) -> str:
        return f"{self.kind} {self.graphs}"

    @property
    def flags(self) -> dict[str, str]:
        """What the environment of its process has, in place of what the user set."""
        return {CUTS_REFUSED: "0"} if self.kind == "cuts" else {}

    @property
    def process(self) -> tuple[str, str]:
        """Stages of which it is the same have a process together, one after the other, and with it their engines."""
        apart = BACKENDS[self.device].modes_apart
        return self.kind if self.kind in ALONE else "", self.graphs if apart else ""


class Question(NamedTuple):
    """What is asked, and where the expected answer comes from."""

    item: str
    source: str
    stage: Stage


@dataclass(frozen=True)
class Result:
    """The answer to one question."""

    stage: str
    item: str  # the question
    state: State
    detail: str = ""  # what was seen, or why it was not answered
    source: str = ""
    seconds: float = 0.0  # that it took
    numbers: dict[str, Any] = field(default_factory=dict)  # measured, by name with its unit


def stages_of(device: str) -> list[Stage]:
    """The stages of a device, in the order in which they are asked: its own, or a graph mode after the other, the
    cheapest first."""
    known, release = BACKENDS[device], hpu_env.release_of().name
    pairs = [(kind, mode) for kind in ("caches", "methods") for mode in known.modes]
    pairs += [(kind, known.modes[0]) for kind in ("distribution", "bench")]
    pairs += [("kernels", known.modes[0])] if known.kernels else []
    pairs.sort(key=lambda pair: (known.modes.index(pair[1]), KINDS.index(pair[0])))
    asked = dict.fromkeys(map(possible, known.stages or pairs))
    return [Stage(*pair, device, release) for pair in asked]


def possible(pair: tuple[str, str]) -> tuple[str, str]:
    """A kind with its mode, or where Gaudi's software has no lazy mode here with one outside it."""
    kind, mode = pair
    if not hpu_env.LAZY.get(mode) or hpu_env.unfit_plugin(lazy=True) is None:
        return pair
    return kind, "eager" if kind == "facts" else "compile"


def items_of(stage: Stage) -> list[Question]:
    """Those of a stage; facts load torch."""
    if stage.kind == "facts":
        from lantern_lab.verify.gaudi_facts import release_facts

        known = release_facts(stage.release, hpu_env.LAZY[stage.graphs])
        return [Question(fact.name, fact.source, stage) for fact in known]
    kernels = BACKENDS[stage.device].kernels
    by_kind = {
        "kernels": {**dict.fromkeys(kernels, "its plain twin"), DRAWS: "sums in float64"},
        "caches": dict.fromkeys((*CACHES, GROUPED), "the plain step on the CPU"),
        "cuts": dict.fromkeys(CACHES, f"{CUTS_REFUSED}=0"),
        "distribution": dict.fromkeys(DRAWN, "the plain model's probabilities on the CPU"),
        "methods": {
            **dict.fromkeys(METHODS, "the CPU's tokens"),
            RECAPTURED: "the tokens before they were closed",  # all are
        },
        "bench": {"short benchmark": "this machine"},
    }
    return [Question(name, source, stage) for name, source in by_kind[stage.kind].items()]
