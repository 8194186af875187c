"""Which width a window should have: tokens a step over the time of a step, both measured. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lantern_hpu.lab.tables import Table
from lantern_hpu.lab.tune.result import Figures, Measured, Ranking
from lantern_hpu.lab.tune.tuner import Tuner
from lantern_hpu.methods.methods import METHODS
from lantern_hpu.tree import DraftTree, Window

WIDTHS = (8, 16, 32, 64)
SMALL_WIDTHS = (
    2,
    4,
    8,
    16,
)  # of a stretched model: with the sizes of real ones a processor has arithmetic for few nodes
HEAD = "window, nodes, tokens a step, ms a step, ms a token, x ar".split(", ")


@dataclass(frozen=True)
class WindowRow(Measured):
    """A window."""

    tree: DraftTree
    measured: Figures

    def as_json(self) -> dict[str, Any]:
        return {"tree": self.name, "nodes": self.tree.size, "measured": asdict(self.measured)}


@dataclass(frozen=True)
class WindowTuning(Ranking[WindowRow]):
    """`ar`, then the windows by width."""

    rows: Sequence[WindowRow]


def windows(method: str, tokens: int, widths: Sequence[int] = WIDTHS) -> list[Window]:
    """Those that are measured for images of so many tokens: the widths that fit, or the longest that does."""
    rule, most = METHODS[method].rule, tokens - 1
    assert rule is not None
    fitting = [width for width in widths if width <= most] or [most]
    return [Window.of(rule, width) for width in fitting]


def tune_windows(tuner: Tuner, trees: Sequence[Window]) -> WindowTuning:
    """Draw with `ar` and with each of these."""
    every = [DraftTree.root_only(), *trees]
    return WindowTuning([WindowRow(tree, tuner.draw(tree)) for tree in every])


def summary(tuning: WindowTuning) -> str:
    """The rows as a Markdown table, and the fastest."""
    ar, best = tuning.rows[0].measured.ms_per_token, tuning.best
    lines = []
    for row in tuning.rows:
        figures = [*asdict(row.measured).values(), ar / row.measured.ms_per_token]
        lines.append([row.name, str(row.tree.size), *(f"{figure:.2f}" for figure in figures)])
    gain = f"{ar / best.measured.ms_per_token:.2f} times as fast"
    said = f"ar wins: {best.name}, the fastest window, draws {gain}"
    if not tuning.ar_wins:
        said = f"{best.name} draws {gain} as ar"
    return f"{Table(HEAD, lines).markdown()}\n\n{said}"
