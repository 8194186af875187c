"""Pictures of a comparison, the same bytes each time: latency, where a step's time goes, tokens a step, throughput.

A device has a colour and a method a marker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from lantern_hpu.bench.columns import EAGER, PARTS, SpeedRow
from lantern_hpu.bench.comparison import ComparedRun, Comparison, Key
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.results.plots import (
    MARKERS,
    far_apart,
    in_style,
    legend_under,
    plain_ticks,
    saved,
)
from lantern_hpu.results.plots import (
    panels as panels_of,
)
from lantern_hpu.results.tables import figure as digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALE = "#9ecae1"  # of a single run's eager figures
PART_COLOURS = {  # of each part of a step, and of the figures on it
    "draft": ("#56b4e9", "black"),
    "tables": ("#9467bd", "white"),
    "verify": ("#0072b2", "white"),
    "accept": ("#e69f00", "black"),
    "commit": ("#009e73", "white"),
    "host": ("#bdbdbd", "black"),
}
LEAST = 9  # per cent of a step that are named on their bar
ACROSS = 5  # panels beside each other
Line = tuple[str, str, str]  # method, tree, setting


@dataclass(frozen=True)
class Chart:
    """A plot with what it shows, in words."""

    name: str
    title: str
    caption: str
    png: bytes
    svg: bytes


def draw_charts(comparison: Comparison) -> list[Chart]:
    """All pictures that the runs have figures for."""
    with in_style("compare"):
        return [
            Chart(name, title, caption, *files_of(make(comparison)))
            for name, title, caption, make in pictures(comparison)
        ]


def files_of(figure: Figure) -> tuple[bytes, bytes]:
    return saved(figure, "png"), saved(figure, "svg")


def pictures(
    comparison: Comparison,
) -> Iterator[tuple[str, str, str, Callable[[Comparison], Figure]]]:
    """Name, title, caption and maker of each picture."""
    about = "a step" if comparison.of_steps else "an image"
    modes = ", each device in its best graph mode" if len(comparison.runs) > 1 else ""
    yield (
        "latency",
        f"Time of {about}, by method and device",
        f"Mean time of {about}{modes}; the thin line reaches to the 95th percentile. Shorter is better.",
        latency,
    )
    yield (
        "step",
        "Where a step's time goes",
        "Parts of an eager step as shares of the whole, whose milliseconds stand at the end of the bar. The device "
        "is waited for between the parts, so the whole is longer than in a run without the clock.",
        step_parts,
    )
    if any(row.accepted_by_depth for row in comparison.rows):
        yield (
            "depth",
            "Tokens a step, by depth of the draft",
            "Tokens that a step adds if only drafts down to this depth counted; at depth 0 the bonus token alone. "
            "The end of a line is the method's tokens a step, and the speed-up there would be if its step took "
            "as long as one of ar.",
            depth,
        )
    yield (
        "throughput",
        "Throughput, by batch size",
        f"{'Steps of an image' if comparison.of_steps else 'Images'} a second{modes}. Higher is better.",
        throughput,
    )


# ------------------------------------------------------------------------------------ what is drawn


@dataclass(frozen=True)
class Series:
    """Rows of one run in one graph mode, and their colour."""

    run: ComparedRun
    graphs: str
    colour: str

    @property
    def name(self) -> str:
        return f"{self.run.title}, {self.run.dtype}, {self.graphs}"

    def row(self, line: Line, batch: int) -> SpeedRow | None:
        return self.run.find(Key(*line, self.run.dtype, self.graphs, batch))


def all_series(comparison: Comparison) -> list[Series]:
    """One a run, in the best of its modes that was measured."""
    result = []
    for index, run in enumerate(comparison.runs):
        modes = {row.graphs for row in run.rows}
        best = run.best if run.best in modes else min(modes)
        result.append(Series(run, best, f"C{index}"))
    return result


def lines_of(comparison: Comparison) -> dict[Line, str]:
    """Methods with tree and setting in the order of the methods, and what each is called.

    That is its method, with tree or setting where the method occurs more than once.
    """
    result = {(key.method, key.tree, key.setting) for key in comparison.keys}
    order = list(METHODS)
    names = {}
    for line in sorted(result, key=lambda line: (order.index(line[0]), *line[1:])):
        others = [other for other in result if other[0] == line[0]]
        more = [line[i] for i in (1, 2) if len({other[i] for other in others}) > 1]
        names[line] = "\n".join([line[0], *more])
    return names


# ------------------------------------------------------------------------------------ axes


def bar_panels(
    batches: Sequence[int], height: float, names: Sequence[str], label: str
) -> tuple[Figure, list[Axes]]:
    """A panel for each batch size, with places for bars of these names from the top down."""
    figure, panels = panels_of(3.4 + 3.3 * len(batches), height, len(batches))
    for batch, axes in zip(batches, panels, strict=True):
        axes.set_title(f"batch {batch}")
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.45, -0.55)
    panels[0].set_ylabel(label)
    return figure, panels


# ------------------------------------------------------------------------------------ the pictures


def latency(comparison: Comparison) -> Figure:
    """Bars by method, one a device; a panel for each batch size."""
    series, lines = all_series(comparison), lines_of(comparison)
    best, rows = series[0], comparison.rows
    if len(series) == 1 and best.graphs != EAGER and any(row.graphs == EAGER for row in rows):
        series = [Series(best.run, EAGER, PALE), best]
    height = 1.3 + len(lines) * (0.22 + 0.2 * len(series)) + 0.2 * len(series)
    named = (max(height, 3), list(lines.values()), "method")
    figure, panels = bar_panels(comparison.batches, *named)
    least, most = min(row.cost for row in rows), max(p95(row) for row in rows)
    log = far_apart([row.cost for row in rows])
    for batch, axes in zip(comparison.batches, panels, strict=True):
        axes.set_xscale("log" if log else "linear")
        for index, one in enumerate(series):
            draw_bars(axes, one, list(lines), batch, index, 0.8 / len(series))
        axes.set_xlabel(rows[0].unit + (", log scale" if log else ""))
        if log:
            axes.set_xlim(least / 2, most * 4)
            plain_ticks(axes.xaxis)
        else:
            axes.set_xlim(0, most * 1.22)
    legend_under(figure, panels[0], 1)
    return figure


def p95(row: SpeedRow) -> float:
    """Of the row's cost; the cost itself where that is more, as a single slow batch can make it."""
    result = row.p95_ms_per_step if row.seconds_per_image is None else row.p95_seconds_per_image
    return max(row.cost, result or 0.0)


def draw_bars(
    axes: Axes, one: Series, lines: Sequence[Line], batch: int, index: int, thick: float
) -> None:
    """The bars of one series, with their values."""
    rows = {i: row for i, line in enumerate(lines) if (row := one.row(line, batch))}
    places = [i - 0.4 + thick * (index + 0.5) for i in rows]
    costs = [row.cost for row in rows.values()]
    beyond = [[0.0] * len(rows), [p95(row) - row.cost for row in rows.values()]]
    bars = axes.barh(
        places,
        costs,
        thick * 0.92,
        color=one.colour,
        label=one.name,
        xerr=beyond,
        error_kw={"ecolor": "#333333", "elinewidth": 1},
    )
    axes.bar_label(bars, [digits(cost) for cost in costs], padding=4, fontsize=8)


def step_parts(comparison: Comparison) -> Figure:
    """Stacked shares of an eager step, a bar for each method on each device."""
    batches, alone = comparison.batches, len(comparison.runs) == 1
    entries = [
        (name if alone else f"{name}\n{one.run.title}", one, line)
        for line, name in lines_of(comparison).items()
        for one in all_series(comparison)
    ]
    names = [name for name, _, _ in entries]
    height = 1.6 + (0.36 if alone else 0.46) * len(entries)
    figure, panels = bar_panels(batches, height, names, "method" if alone else "method, device")
    for batch, axes in zip(batches, panels, strict=True):
        rows = {y: row for y, (_, one, line) in enumerate(entries) if (row := one.row(line, batch))}
        stack(axes, list(rows), [row.eager_step_ms for row in rows.values()])
        axes.set_xlabel("share of an eager step, %")
        axes.set_xlim(0, 100)
        axes.set_xticks(range(0, 101, 20))
    legend_under(figure, panels[0], len(PARTS))
    return figure


def stack(axes: Axes, places: Sequence[int], steps: Sequence[dict[str, float]]) -> None:
    """Bars of shares, each with the whole in milliseconds behind it."""
    totals, left = np.array([sum(step.values()) for step in steps]), np.zeros(len(steps))
    for part, (colour, ink) in PART_COLOURS.items():
        shares = 100 * np.array([step[part] for step in steps]) / totals
        bars = axes.barh(places, shares, 0.72, left, color=colour, label=part)
        named = [f"{share:.0f}" if share >= LEAST else "" for share in shares]
        axes.bar_label(bars, named, label_type="center", color=ink, fontsize=8)
        left += shares
    axes.bar_label(bars, [f"{digits(total)} ms" for total in totals], padding=4, fontsize=8)


def depth(comparison: Comparison) -> Figure:
    """Tokens a step down to each depth: a line for each method, a panel for each device."""
    lines, series, batch = lines_of(comparison), all_series(comparison), comparison.batches[0]
    figure, panels = panels_of(1.9 + 3.6 * len(series), 4.2, len(series))
    deepest = max(len(row.accepted_by_depth) for row in comparison.rows)
    for one, axes in zip(series, panels, strict=True):
        for i, (line, name) in enumerate(lines.items()):
            row = one.row(line, batch)
            if row is None:
                continue
            axes.plot(
                list(accumulate(row.accepted_by_depth, initial=1.0)),
                color=f"C{i}",
                marker=MARKERS[list(METHODS).index(line[0]) % len(MARKERS)],
                # Methods that accept alike would hide each other
                linestyle=":" if i % 2 else "-",
                linewidth=2.2 if i % 2 else 1.4,
                markerfacecolor="white" if i % 2 else None,
                label=name.replace("\n", ", "),
            )
        axes.set_title(one.run.title if len(series) > 1 else f"batch {batch}")
        axes.set_xlabel("deepest draft counted")
        axes.set_xticks(range(deepest + 1))
        axes.set_xlim(-0.3, deepest + 0.3)
        axes.set_ylim(bottom=0.9)
    panels[0].set_ylabel("tokens a step")
    legend_under(figure, panels[0], 3)
    return figure


def throughput(comparison: Comparison) -> Figure:
    """Images a second by batch size: a panel for each method, a line for each device."""
    series, lines, batches = all_series(comparison), lines_of(comparison), comparison.batches
    columns = min(len(lines), ACROSS)
    rows = -(-len(lines) // columns)
    figure, panels = panels_of(1.4 + 1.9 * columns, 1.2 + 2.5 * rows, columns, rows)
    known = [rate(row) for row in comparison.rows]
    log = far_apart(known)
    for axes, (line, name) in zip(panels, lines.items(), strict=False):
        for one in series:
            points = {b: rate(row) for b in batches if (row := one.row(line, b))}
            rates = list(points.values())
            axes.plot(list(points), rates, color=one.colour, marker="o", label=one.name)
        # Batch sizes at equal distances of their doublings
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set_xlim(batches[0] / 1.5, batches[-1] * 1.5)
        axes.set_xlabel("batch size, images")
        axes.set_title(name)
        if log:
            axes.set_yscale("log")
            plain_ticks(axes.yaxis)
        else:
            axes.set_ylim(0, 1.1 * max(known))
    for axes in panels[len(lines) :]:
        axes.set_visible(False)
    what = "steps of an image a second" if comparison.of_steps else "images a second"
    figure.supylabel(what + (", log scale" if log else ""), fontsize=9)
    legend_under(figure, panels[0], 1 if len(series) < 3 else 2)
    return figure


def rate(row: SpeedRow) -> float:
    """Images, or steps of one image, a second."""
    steps = 1000 * row.batch_size / row.ms_per_step
    return steps if row.images_per_second is None else row.images_per_second
