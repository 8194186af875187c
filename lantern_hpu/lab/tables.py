"""Tables of measurements: columns that say what a row shows, laid out as Markdown. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from lantern_hpu.results.tables import markdown

Columns = Mapping[str, Callable[[Any], str]]  # by their heads, what each shows of a row


class Table(NamedTuple):
    """Cells under their heads."""

    head: list[str]
    lines: list[list[str]]

    @classmethod
    def of(cls, columns: Columns, rows: Iterable[Any]) -> Table:
        """A line for each row."""
        return cls(list(columns), [[show(row) for show in columns.values()] for row in rows])

    def markdown(self) -> str:
        return markdown(self.head, self.lines)


def ratio(value: float | None) -> str:
    """With two digits; empty where there is none."""
    return "" if value is None else f"{value:.2f}"


def plus_minus(value: float, around: float | None, digits: int = 3) -> str:
    """A figure with half of its interval, where it has one (None or NaN: it has not)."""
    known = around is not None and around == around
    return f"{value:.{digits}f}" + (f" ± {around:.{digits}f}" if known else "")
