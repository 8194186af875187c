"""What commands print: columns, Markdown tables, figures. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import TextWrapper
from typing import Any, NamedTuple

WIDTH = 100
Columns = Mapping[str, Callable[[Any], str]]  # by their heads, what each shows of a row


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells with each column as wide as its widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def paragraph(name: str, text: str) -> list[str]:
    """A name and its text, wrapped under itself; nothing where there is no text."""
    wrapper = TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = f"  {name:<12}", " " * 14
    return wrapper.wrap(text)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|" + "---|" * len(head)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(x)} |" for x in lines)])


class Table(NamedTuple):
    """Cells under their heads."""

    head: list[str]
    lines: list[list[str]]

    @classmethod
    def of(cls, columns: Columns, rows: Iterable[Any]) -> Table:
        return cls(list(columns), [[show(row) for show in columns.values()] for row in rows])

    def markdown(self) -> str:
        return markdown(self.head, self.lines)


def figure(value: float | None) -> str:
    """Three digits and no powers of ten; empty where there is none."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ratio(value: float | None) -> str:
    """With two digits; empty where there is none."""
    return "" if value is None else f"{value:.2f}"


def between(ends: Sequence[float]) -> str:
    """Of a projected figure, from and to."""
    first, last = ends
    return f"{first:.1f} to {last:.1f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
