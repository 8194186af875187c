"""Quality against speed: a panel for each metric, a colour for each method, a line through its settings."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lantern_hpu.errors import needing
from lantern_hpu.files import ASSETS
from lantern_hpu.lab.pictures.report import Row
from lantern_hpu.lab.pictures.statistics import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE = ASSETS / "comparison.mplstyle"
MARKERS = "osD^vP*Xp<>"
ARROWS = {"lower": "lower is better", "higher": "higher is better", "": ""}
PANEL = (3.4, 3.1)  # inches


def plot(
    rows: Sequence[Row], baselines: Sequence[Row], metrics: Sequence[Metric], pace: Metric
) -> bytes:
    """A PNG file, the same bytes for the same rows.

    Args:
        baselines: drawn as level lines. pace: what stands on the horizontal axis.
    """
    with needing("matplotlib", "it draws the plots", "evaluate"):
        from matplotlib import style
        from matplotlib.figure import Figure
    with style.context(STYLE, after_reset=True):
        figure = Figure((PANEL[0] * len(metrics), PANEL[1] + 0.6), layout="constrained")
        panels = figure.subplots(1, len(metrics), squeeze=False)[0]
        for axes, metric in zip(panels, metrics, strict=True):
            panel(axes, rows, baselines, metric, pace)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def panel(
    axes: Axes, rows: Sequence[Row], baselines: Sequence[Row], metric: Metric, pace: Metric
) -> None:
    """One metric."""
    methods = list(dict.fromkeys(str(row.about["method"]) for row in rows))
    for i, method in enumerate(methods):
        mine = [row for row in rows if row.about["method"] == method and metric.name in row.figures]
        mine.sort(key=lambda row: row.figures[pace.name].value)
        axes.errorbar(
            [row.figures[pace.name].value for row in mine],
            [row.figures[metric.name].value for row in mine],
            xerr=[row.figures[pace.name].around for row in mine],
            yerr=[row.figures[metric.name].around for row in mine],
            color=f"C{i}",
            marker=MARKERS[i % len(MARKERS)],
            elinewidth=0.8,
            label=method,
        )
        for row in mine:
            told = row.name.partition(":")[2]
            spot = row.figures[pace.name].value, row.figures[metric.name].value
            axes.annotate(told, spot, (4, 4), textcoords="offset points", fontsize=6.5)
    for one, dashes in zip(baselines, (":", "--", "-."), strict=False):
        if metric.name in one.figures:
            level = one.figures[metric.name].value
            axes.axhline(level, color="0.45", linewidth=1, linestyle=dashes, label=one.name)
    axes.set_xlabel(pace.title)
    axes.set_title(f"{metric.title}\n{ARROWS[metric.better]}".strip())
