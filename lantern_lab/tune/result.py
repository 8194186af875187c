"""Results of tuning: figures of each tree or window, and which is fastest. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lantern_hpu.errors import Arg, shell
from lantern_hpu.methods.setting import AUTO
from lantern_hpu.results.tables import Table
from lantern_hpu.tree import DraftTree

# Of a step of `ar`: what one over more tokens takes at least, but for what clocks are off
LEAST_STEP = 0.85
MOST_STEP = 1.5  # of as many steps of `ar` as it has tokens: what it takes at most
MOST_SPREAD = 1.5  # of equal steps on a machine that has nothing else to do


def doubtful_step(tokens: int, step: float, alone: float) -> str:
    """Why a step cannot have taken so many milliseconds on a quiet machine, `alone` of `ar`, or nothing."""
    took = f"a step over {tokens} tokens took {step:.1f} ms, one of ar {alone:.1f}"
    if step < LEAST_STEP * alone:
        return f"{took}: it cannot take less"
    if step > MOST_STEP * tokens * alone:
        return f"{took}: it cannot take more than {tokens} of these"
    return ""


@dataclass(frozen=True)
class Figures:
    """Of drawing with a tree; the time of a token is that of the whole batch, divided by its tokens."""

    tokens_per_step: float
    ms_per_step: float
    ms_per_token: float


@dataclass(frozen=True)
class TunedRow:
    """A tree or window that was drawn with; the one-node tree is `ar`."""

    tree: DraftTree
    measured: Figures

    @property
    def name(self) -> str:
        return self.tree.name if self.tree.depth else "ar"

    @property
    def shown(self) -> str:  # a window as the setting that draws with it
        return self.name.replace(":", "@")

    def times_as_fast(self, other: TunedRow) -> float:
        """How many times as fast as another."""
        return other.measured.ms_per_token / self.measured.ms_per_token

    def as_json(self) -> dict[str, Any]:
        return {"tree": self.name, "nodes": self.tree.size, "measured": asdict(self.measured)}


@dataclass(frozen=True)
class TuningResult:
    """All results.

    Attributes:
        rows: `ar` and the named trees, or the windows by width.
        spread: how many times as long as a row's fastest batch the median one took a step, at most.
    """

    rows: Sequence[TunedRow]
    spread: float = 1.0

    @property
    def doubt(self) -> str:
        """Why these figures say nothing about the machine, or nothing."""
        ar, *others = self.rows
        for row in others:
            mine, alone = row.measured.ms_per_step, ar.measured.ms_per_step
            if why := doubtful_step(row.tree.size, mine, alone):
                return f"{row.shown}: {why}"
        if self.spread > MOST_SPREAD:
            took = f"the median of equal steps took {self.spread:.1f} times as long as the fastest"
            return f"{took}: the machine was busy"
        return ""

    @property
    def best(self) -> TunedRow:
        return min(self.rows[1:], key=lambda row: row.measured.ms_per_token)

    @property
    def ar_wins(self) -> bool:
        """Whether one token a step was measured to be faster still."""
        return self.rows[0].measured.ms_per_token <= self.best.measured.ms_per_token

    @property
    def fastest(self) -> str:
        return "ar" if self.ar_wins else self.best.name


# ------------------------------------------------------------------------------------ as text


def tuning_text(tuning: TuningResult) -> str:
    table = tuning_table(tuning)
    return table if tuning.doubt else f"{table}\n\n{fastest_text(tuning)}"


def tuning_table(tuning: TuningResult) -> str:
    """The rows as a Markdown table."""
    ar = tuning.rows[0]
    lines = []
    for row in tuning.rows:
        figures = [*asdict(row.measured).values(), row.times_as_fast(ar)]
        lines.append([row.shown, str(row.tree.size), *(f"{value:.2f}" for value in figures)])
    head = "drafts, nodes, tokens a step, ms a step, ms a token, x ar".split(", ")
    return Table(head, lines).markdown()


def fastest_text(tuning: TuningResult) -> str:
    """Which tree or window is fastest, and whether `ar` is faster still."""
    best, ar = tuning.best, tuning.rows[0]
    gain = best.times_as_fast(ar)
    if tuning.ar_wins:
        return f"ar wins: the fastest of the others, {best.shown}, draws {gain:.2f} times as fast"
    return f"{best.shown} draws {gain:.2f} times as fast as ar"


def fastest_command(
    tuning: TuningResult, situation: Mapping[str, Any], given: Mapping[str, Any]
) -> str:
    """The `generate` command that draws as was measured to be fastest, with options of the model and the device that
    `tune` was given."""
    names = ("model", "device", "dtype", "quantize", "layout", "graphs", "drafter")
    usual = (None, "auto", "builtin")
    args = [Arg(name, given[name]) for name in names if given.get(name) not in usual]
    method = "ar" if tuning.ar_wins else situation["method"]
    args += [Arg("method", method), *([] if tuning.ar_wins else [Arg("tree", AUTO)])]
    size = int(situation["batch_size"])
    args += [Arg("num_images", size)] if size > 1 else []
    return shell("generate", *args, Arg("prompt", "a red apple"))
