"""Results of tuning: figures of each tree or window, expected and measured, and which is fastest. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lantern_hpu.decode.child_counts import ChildCounts
from lantern_hpu.lab.tune.costs import Costs
from lantern_hpu.lab.tune.expectation import ChanceTable, expected_steps, gain_probs
from lantern_hpu.tree import DraftTree


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
        """What so many images of so many tokens, decoded together, should come to."""
        gains, step = gain_probs(tree, chances), costs.step(tree)
        slowest = expected_steps(gains, tokens, images)
        each = slowest if images == 1 else expected_steps(gains, tokens)
        return cls(tokens / each, step, step * slowest / (images * tokens))


@dataclass(frozen=True)
class TunedRow:
    """A tree or window that was drawn with; the one-node tree is `ar`.

    Attributes:
        expected: None of windows, which are all drawn with.
    """

    tree: DraftTree
    expected: Figures | None
    measured: Figures

    @property
    def name(self) -> str:
        return self.tree.name if self.tree.depth else "ar"

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
    """

    counts: ChildCounts | None
    costs: Costs | None
    rows: Sequence[TunedRow]

    @property
    def best(self) -> TunedRow:
        """The fastest but `ar`."""
        return min(self.rows[1:], key=lambda row: row.measured.ms_per_token)

    @property
    def ar_wins(self) -> bool:
        """Whether one token a step was measured to be faster still."""
        return self.rows[0].measured.ms_per_token <= self.best.measured.ms_per_token

    @property
    def fastest(self) -> str:
        return "ar" if self.ar_wins else self.best.name
