"""What an evaluation shows: rows for `evaluation.json`, a table, plots of quality against speed. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lantern_hpu.methods.relaxation import read_relaxation
from lantern_hpu.results.tables import Columns, Table
from lantern_lab.evaluate.drawing import Line
from lantern_lab.evaluate.metrics import (
    Array,
    Difference,
    Figure,
    QualityMetric,
    as_json,
    ratio_metric,
)
from lantern_lab.measure import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS = ratio_metric("tokens_per_step", "tokens a step", "higher", 2)
SECONDS = ratio_metric("seconds_per_image", "seconds an image", "lower", 3)
SPENT = ratio_metric("tv_per_token", "TV a token", "lower", 3)
PACE = (STEPS, SPENT, SECONDS)
NOISE = "≈"  # behind a figure that chance alone could have moved as far from that of `ar`


@dataclass(frozen=True)
class QualityRow:
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

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> QualityRow:
        """What `as_json` wrote, as far as plots need it: without draws and differences."""
        figures = {
            name: Figure(data[name], (high - low) / 2, np.empty(0))
            for name, (low, high) in data["intervals"].items()
        }
        about = {name: data[name] for name in ("method", "tree", "relaxation") if name in data}
        return cls(data["row"], about, figures)


def pace(lines: Sequence[Line]) -> dict[str, Array]:
    """Rows of tokens a step, TV a token and seconds an image; the token that prefill draws takes no step."""
    steps = [(line.tokens - 1, max(line.steps, 1)) for line in lines]
    seconds = [(line.seconds, 1.0) for line in lines]
    found = {STEPS.name: np.asarray(steps, float), SECONDS.name: np.asarray(seconds, float)}
    spent = [(line.tv, line.tokens - 1) for line in lines]
    if all(tv is not None for tv, _ in spent):
        found[SPENT.name] = np.asarray(spent, float)
    return found


def compare_with_ar(rows: Sequence[QualityRow], again: QualityRow | None) -> list[QualityRow]:
    """The rows with their differences from `ar`, which are held against those of `ar` with other seeds."""
    first = next((row for row in rows if row.name == "ar"), None)
    if first is None:
        return list(rows)
    # What chance alone makes of each metric: how far two sets of seeds of one method lie apart
    other = again.figures if again else {}
    shared = first.figures.keys() & other.keys()
    floor = {name: abs(first.figures[name].value - other[name].value) for name in shared}
    result = []
    for row in rows:
        names = [] if row is first else [n for n in row.figures if n in first.figures]
        against = {
            name: Difference.of(row.figures[name], first.figures[name], floor.get(name, 0.0))
            for name in names
            if len(row.figures[name].draws) == len(first.figures[name].draws)
        }
        result.append(QualityRow(row.name, row.about, row.figures, row.extra, against))
    return result


# ------------------------------------------------------------------------------------ text


def plus_minus(value: float, around: float | None, digits: int = 3) -> str:
    """A figure with half of its interval, where it has one (None or NaN: it has not)."""
    known = around is not None and around == around
    return f"{value:.{digits}f}" + (f" ± {around:.{digits}f}" if known else "")


def metric_cell(metric: QualityMetric, row: QualityRow) -> str:
    """A figure with its interval, marked where it may be noise."""
    if metric.name not in row.figures:
        return ""
    one = row.figures[metric.name]
    noise = metric.name in row.against and row.against[metric.name].noise and metric not in PACE
    return plus_minus(one.value, one.around, metric.digits) + f" {NOISE}" * noise


def tv_cell(row: QualityRow) -> str:
    tv = row.extra.get("tv")
    return "" if tv is None else plus_minus(tv, row.extra.get("tv_interval") or 0.0)


def quality_table(rows: Sequence[QualityRow], metrics: Sequence[QualityMetric]) -> Table:
    shown = [m for m in (*PACE, *metrics) if any(m.name in row.figures for row in rows)]
    columns: Columns = {
        "method": lambda row: row.name,
        **{metric.title: partial(metric_cell, metric) for metric in shown},
    }
    if any("tv" in row.extra for row in rows):
        columns = {**columns, "TV of the next token": tv_cell}
    return Table.of(columns, rows)


# ------------------------------------------------------------------------------------ plots


def plot(
    rows: Sequence[QualityRow],
    baselines: Sequence[QualityRow],
    metrics: Sequence[QualityMetric],
    pace: QualityMetric,
) -> bytes:
    """Quality against speed as a PNG file: a panel for each metric, a colour for each series.

    Args:
        baselines: drawn as level lines. pace: what stands on the horizontal axis.
    """
    with plots.in_style("evaluate"):
        figure, panels = plots.panels(3.4 * len(metrics), 4.8, len(metrics), sharey=False)
        for axes, metric in zip(panels, metrics, strict=True):
            draw_metric(axes, rows, metric, pace)
            for one, dashes in zip(baselines, (":", "--", "-."), strict=False):
                if metric.name in one.figures:
                    level = one.figures[metric.name].value
                    axes.axhline(level, color="0.45", lw=1, ls=dashes, label=one.name)
        plots.legend_under(figure, panels[0], 4)
        return plots.saved(figure, "png")


def series_of(row: QualityRow, pace: QualityMetric) -> str:
    """Which line a row belongs to: its method's; against TV, that of the method under one rule."""
    method, relaxation = str(row.about["method"]), row.about.get("relaxation", {})
    relaxed = bool(relaxation) and read_relaxation(relaxation).active
    return f"{method}, {relaxation['rule']}" if pace is SPENT and relaxed else method


def shared_tree(rows: Sequence[QualityRow]) -> str:
    """How the names of all settings of a line end, `@broad_7`; empty if their trees differ."""
    trees = {"".join(row.name.partition("@")[1:]) for row in rows}
    return trees.pop() if len(trees) == 1 else ""


def draw_metric(
    axes: Axes, rows: Sequence[QualityRow], metric: QualityMetric, pace: QualityMetric
) -> None:
    """A line for each series through its settings."""
    shown = [row for row in rows if metric.name in row.figures and pace.name in row.figures]
    shown.sort(key=lambda row: row.figures[pace.name].value)
    for i, name in enumerate(dict.fromkeys(series_of(row, pace) for row in rows)):
        mine = [row for row in shown if series_of(row, pace) == name]
        x, y = ([row.figures[axis] for row in mine] for axis in (pace.name, metric.name))
        method, comma, rule = name.partition(", ")
        axes.errorbar(
            [one.value for one in x],
            [one.value for one in y],
            xerr=[one.around for one in x],
            yerr=[one.around for one in y],
            color=f"C{i}",
            marker=plots.MARKERS[i % len(plots.MARKERS)],
            elinewidth=0.8,
            label=mine[0].name if len(mine) == 1 else method + shared_tree(mine) + comma + rule,
        )
        for row, across, up in zip(mine, x, y, strict=True):
            if len(mine) > 1:  # a setting alone on its line is named by the legend
                about = row.name.partition(":")[2].removesuffix(shared_tree(mine))
                plots.label_point(axes, about, (across.value, up.value), f"C{i}")
    axes.margins(y=0.1)  # room for labels
    axes.set_xlabel(pace.title)
    axes.set_title(f"{metric.title}\n{metric.better and metric.better + ' is better'}".strip())
