"""What tuning found: figures of each tree, expected and measured, and which is fastest. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from lantern_hpu.decode.counts import ChildCounts
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


class Measured:
    """A tree that was drawn with; the one-node tree is `ar`."""

    tree: DraftTree
    measured: Figures

    @property
    def name(self) -> str:
        return self.tree.name if self.tree.depth else "ar"


Row = TypeVar("Row", bound=Measured)


class Ranking(Generic[Row]):
    """`ar`, then what was measured beside it."""

    rows: Sequence[Row]

    @property
    def best(self) -> Row:
        """The fastest but `ar`."""
        return min(self.rows[1:], key=lambda row: row.measured.ms_per_token)

    @property
    def ar_wins(self) -> bool:
        """Whether one token a step was measured to be faster still."""
        return self.rows[0].measured.ms_per_token <= self.best.measured.ms_per_token

    @property
    def fastest(self) -> str:
        return "ar" if self.ar_wins else self.best.name


@dataclass(frozen=True)
class TreeRow(Measured):
    """A tree, with what was expected of it."""

    tree: DraftTree
    expected: Figures
    measured: Figures

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Each figure as expected and as measured."""
        return list(
            zip(asdict(self.expected).values(), asdict(self.measured).values(), strict=True)
        )

    def times_as_fast(self, other: TreeRow) -> tuple[float, float]:
        """How many times as fast as another, as expected and as measured."""
        return (
            other.expected.ms_per_token / self.expected.ms_per_token,
            other.measured.ms_per_token / self.measured.ms_per_token,
        )

    def as_json(self) -> dict[str, Any]:
        about = {"tree": self.name, "nodes": self.tree.size, "depth": self.tree.depth}
        return about | {"expected": asdict(self.expected), "measured": asdict(self.measured)}


@dataclass(frozen=True)
class Tuning(Ranking[TreeRow]):
    """All that was found.

    Attributes:
        rows: `ar`, the tree that was expected to be best, the named trees.
    """

    counts: ChildCounts
    costs: Costs
    rows: Sequence[TreeRow]
