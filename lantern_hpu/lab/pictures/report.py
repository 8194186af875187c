"""What an evaluation says: rows for `evaluation.json`, a table, a page. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lantern_hpu.lab.pictures.folder import Line
from lantern_hpu.lab.pictures.statistics import (
    Array,
    Difference,
    Figure,
    Metric,
    as_json,
    floors,
    ratio_metric,
)
from lantern_hpu.results.tables import markdown

STEPS = ratio_metric("tokens_per_step", "tokens a step", "higher", 2)
SECONDS = ratio_metric("seconds_per_image", "seconds an image", "lower", 3)
PACE = (STEPS, SECONDS)
NOISE = "≈"  # behind a figure that chance alone could have moved as far from that of `ar`


@dataclass(frozen=True)
class Row:
    """A setting with its figures.

    Attributes:
        about: method, tree and relaxation; empty of a baseline.
        extra: what has no interval of its own.
    """

    name: str
    about: Mapping[str, Any]
    figures: Mapping[str, Figure]
    extra: Mapping[str, Any] = field(default_factory=dict)
    against: Mapping[str, Difference] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        differences = {
            name: {"difference": one.value, "around": one.around, "noise": one.noise}
            for name, one in self.against.items()
        }
        known = {"row": self.name, **self.about, **as_json(self.figures), **self.extra}
        return known | ({"against_ar": differences} if differences else {})


def pace(lines: Sequence[Line]) -> dict[str, Array]:
    """Rows of tokens a step and seconds an image; the token that prefill draws takes no step."""
    steps = [(line.tokens - 1, max(line.steps, 1)) for line in lines]
    seconds = [(line.seconds, 1.0) for line in lines]
    return {STEPS.name: np.asarray(steps, float), SECONDS.name: np.asarray(seconds, float)}


def judged(rows: Sequence[Row], again: Row | None) -> list[Row]:
    """The rows with their differences from `ar`, which are held against those of `ar` with other seeds."""
    first = next((row for row in rows if row.name == "ar"), None)
    if first is None:
        return list(rows)
    floor = floors(first.figures, again.figures) if again else {}
    found = []
    for row in rows:
        names = [] if row is first else [n for n in row.figures if n in first.figures]
        against = {
            name: Difference.of(row.figures[name], first.figures[name], floor.get(name, 0.0))
            for name in names
            if len(row.figures[name].draws) == len(first.figures[name].draws)
        }
        found.append(Row(row.name, row.about, row.figures, row.extra, against))
    return found


# ------------------------------------------------------------------------------------ text


def cell(metric: Metric, row: Row) -> str:
    """A figure with its interval, marked where it may be noise."""
    if metric.name not in row.figures:
        return ""
    one, digits = row.figures[metric.name], metric.digits
    around = "" if math.isnan(one.around) else f" ± {one.around:.{digits}f}"
    noise = metric.name in row.against and row.against[metric.name].noise
    mark = f" {NOISE}" if noise and metric not in PACE else ""
    return f"{one.value:.{digits}f}{around}{mark}"


def distance(row: Row) -> str:
    """The total variation of the next token."""
    tv = row.extra.get("tv")
    return "" if tv is None else f"{tv:.3f} ± {row.extra.get('tv_interval') or 0:.3f}"


def table(rows: Sequence[Row], metrics: Sequence[Metric]) -> str:
    """Method by figure, as Markdown."""
    law = any("tv" in row.extra for row in rows)
    shown = [m for m in (*PACE, *metrics) if any(m.name in row.figures for row in rows)]
    head = ["method", *(m.title for m in shown), *(["TV of the next token"] if law else [])]
    lines = [
        [row.name, *(cell(m, row) for m in shown), *([distance(row)] if law else [])]
        for row in rows
    ]
    return markdown(head, lines)


def page(about: Mapping[str, Any], rows: Sequence[Row], metrics: Sequence[Metric]) -> str:
    """The whole page."""
    pictures = "\n\n".join(
        f"![{name}]({name}.png)" for name in ("quality-tokens", "quality-seconds")
    )
    notes = "\n".join(f"- {note}" for note in about["notes"])
    return (
        f"# What a method costs in pictures: {about['model']}\n\n"
        f"{about['protocol']}\n\n{table(rows, metrics)}\n\n{notes}\n\n{pictures}\n\n"
        f"Made on {about['date']} with `{about['command']}`\n"
    )
