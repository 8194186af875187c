"""Results of tuning: figures of each tree or window, expected and measured, and which is fastest. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lantern_hpu.errors import Arg, shell
from lantern_hpu.methods.setting import AUTO
from lantern_hpu.results.tables import Table
from lantern_hpu.train.acceptance_counts import ChildCounts
from lantern_hpu.tree import DraftTree
from lantern_hpu.tune.search import ChanceTable, Costs, expected_steps, gain_probs

# Of a step of `ar`: what one over more tokens takes at least, but for what clocks are off
LEAST_STEP = 0.85
MOST_STEP = (
    1.5  # of as many steps of `ar` as it has tokens: what it takes at most, drafting included
)
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

    @classmethod
    def expected(
        cls, tree: DraftTree, chances: ChanceTable, costs: Costs, tokens: int, images: int
    ) -> Figures:
        """What n images of n tokens, decoded together, should come to."""
        gains = gain_probs(tree, chances)
        step = costs.step(tree)
        slowest = expected_steps(gains, tokens, images)
        return cls(tokens / expected_steps(gains, tokens), step, step * slowest / (images * tokens))


@dataclass(frozen=True)
class TunedRow:
    """A tree or window that was drawn with; the one-node tree is `ar`."""

    tree: DraftTree
    expected: Figures | None  # None of windows, which are all drawn with
    measured: Figures

    @property
    def name(self) -> str:
        return self.tree.name if self.tree.depth else "ar"

    @property
    def shown(self) -> str:
        """A tree's name; a window as the setting that draws with it."""
        return self.name if self.expected else self.name.replace(":", "@")

    def times_as_fast(self, other: TunedRow) -> tuple[float, ...]:
        """How many times as fast as another: as expected, where that is known of both, and as measured."""
        kinds = [(self.measured, other.measured)]
        if self.expected is not None and other.expected is not None:
            kinds.insert(0, (self.expected, other.expected))
        return tuple(theirs.ms_per_token / mine.ms_per_token for mine, theirs in kinds)

    def as_json(self) -> dict[str, Any]:
        about: dict[str, Any] = {"tree": self.name, "nodes": self.tree.size}
        if self.expected is not None:
            about |= {"depth": self.tree.depth, "expected": asdict(self.expected)}
        return about | {"measured": asdict(self.measured)}


@dataclass(frozen=True)
class TuningResult:
    """All results.

    Attributes:
        counts, costs: of trees; None of windows.
        rows: `ar`, the tree that was expected to be best, the named trees; or `ar` and the windows by width.
        spread: how many times as long as a row's fastest batch the median one took a step, at most.
    """

    counts: ChildCounts | None
    costs: Costs | None
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

FIGURES = "tokens a step, ms a step, ms a token, x ar".split(", ")


def tuning_text(tuning: TuningResult) -> str:
    table = tuning_table(tuning)
    return table if tuning.doubt else f"{table}\n\n{fastest_text(tuning)}"


def tuning_table(tuning: TuningResult) -> str:
    """The rows as a Markdown table; every figure as expected, if that is known, then as measured."""
    ar, tuned, *_ = tuning.rows
    of_trees = tuned.expected is not None
    lines = []
    for row in tuning.rows:
        kinds = [asdict(figures) for figures in (row.expected, row.measured) if figures is not None]
        figures = [*zip(*(kind.values() for kind in kinds), strict=True), row.times_as_fast(ar)]
        shape = [row.shown, str(row.tree.size)]
        if of_trees:
            figures.append(tuned.times_as_fast(row))
            shape.append(str(row.tree.depth))
        lines.append(shape + [" -> ".join(f"{value:.2f}" for value in each) for each in figures])
    head = ["window", "nodes", *FIGURES]
    if of_trees:
        head = ["expected -> measured", "nodes", "depth", *FIGURES, f"{tuned.shown} is x"]
    return Table(head, lines).markdown()


def fastest_text(tuning: TuningResult) -> str:
    """Which tree or window is fastest, and whether `ar` is faster still."""
    ar, tuned, *_ = tuning.rows
    best = tuning.best
    *expected, gain = best.times_as_fast(ar)
    hoped = f" (expected {expected[0]:.2f})" if expected else ""
    if tuning.ar_wins:
        what = "tree" if expected else "window"
        line = f"ar wins: the fastest {what}, {best.shown}, draws {gain:.2f} times as fast{hoped}"
    else:
        line = f"{best.shown} draws {gain:.2f} times as fast as ar{hoped}"
    if expected and best is not tuned:
        lead = best.times_as_fast(tuned)[-1]
        line += f"\n{best.shown} was measured {lead:.2f} times as fast as {tuned.shown}, the best expected"
    return line


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
