"""Pictures of a comparison, the same bytes each time: latency, where a step's time goes, tokens a step, throughput.

A device has a colour and a method a marker. What is projected is hatched, and its name says so.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lantern_hpu.comparison import BEST, EAGER, LABEL, Comparison, Key, Row, Run
from lantern_hpu.config import METHODS
from lantern_hpu.errors import needing
from lantern_hpu.measure import PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind people tell apart
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c6bb1")
PART_COLOURS = dict(
    zip(PARTS, ("#56b4e9", "#9467bd", "#0072b2", "#e69f00", "#009e73", "#bdbdbd"), strict=True)
)
MARKERS = dict(zip(METHODS, "osD^v", strict=True))
HATCH = "////"
ACROSS = 5  # panels beside each other
SPREAD = 15  # largest over smallest value from which an axis is logarithmic
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # matplotlib brings it along
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 2.6,
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "lantern_hpu",  # otherwise the names inside differ from run to run
    "figure.facecolor": "white",
}


@dataclass(frozen=True)
class Picture:
    """A plot with what it shows, in words."""

    name: str
    title: str
    caption: str
    png: bytes
    svg: bytes


def check_library() -> None:
    """Raise an OptionError where matplotlib is missing."""
    with needing("matplotlib", "it draws the plots", "compare"):
        import matplotlib.figure  # noqa: F401


def draw(comparison: Comparison) -> list[Picture]:
    """All pictures that the runs have figures for."""
    import matplotlib

    found = []
    with matplotlib.rc_context(STYLE):
        for name, title, caption, make in pictures(comparison):
            figure = make(comparison)
            found.append(Picture(name, title, caption, *saved(figure)))
    return found


def pictures(
    comparison: Comparison,
) -> Iterator[tuple[str, str, str, Callable[[Comparison], Figure]]]:
    """Name, title, caption and maker of each picture."""
    about = "a step" if comparison.of_steps else "an image"
    modes = ", each device in its best graph mode" if len(comparison.measured) > 1 else ""
    guessed = f" Hatched bars are {LABEL}, not measured." if has_projections(comparison) else ""
    yield (
        "latency",
        f"Time of {about}, by method and device",
        f"Mean time of {about}{modes}; the thin line reaches to the 95th percentile. Shorter is better.{guessed}",
        latency,
    )
    yield (
        "step",
        "Where a step's time goes",
        "Parts of an eager step as shares of the whole, whose milliseconds stand at the end of the bar. The device "
        "is waited for between the parts, so the whole is longer than in a run without the clock.",
        step_parts,
    )
    rows = [row for run in comparison.measured for row in run.rows]
    if any(row["projected"] for row in rows if row["method"] != "ar"):
        yield (
            "speed",
            f"Speed for given tokens a step ({LABEL})",
            f"What the measured steps would make of tokens a step that nobody measured: {LABEL}. Steps alone, "
            "against ar in the same graph mode and batch. Above 1, drafting pays.",
            given_speed,
        )
    if any(row["accepted_by_depth"] for row in rows):
        yield (
            "depth",
            "Tokens a step, by depth of the draft",
            "Tokens that a step adds if only drafts down to this depth counted; at depth 0 the bonus token alone. "
            "The end of a line is the method's tokens a step, and the speed-up there would be if its step took "
            "as long as one of ar.",
            depth,
        )
    dashes = f" Hollow marks and dashes are {LABEL}, not measured."
    yield (
        "throughput",
        "Throughput, by batch size",
        f"{'Steps of an image' if comparison.of_steps else 'Images'} a second{modes}. Higher is better."
        + (dashes if has_projections(comparison) else ""),
        throughput,
    )


def has_projections(comparison: Comparison) -> bool:
    return any(run.projected for run in comparison.runs)


def saved(figure: Figure) -> tuple[bytes, bytes]:
    """PNG and SVG, without the date and the program that would make them differ."""
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=150, bbox_inches="tight", metadata={"Software": None})
    figure.savefig(svg, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return png.getvalue(), svg.getvalue()


def new_figure(
    width: float, height: float, columns: int = 1, rows: int = 1
) -> tuple[Figure, list[Axes]]:
    """A figure with panels of one vertical scale, row by row; sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
    return figure, list(axes.flat)


def plain_ticks(axis: Axis) -> None:
    """Numbers as one writes them, on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 3.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


# ------------------------------------------------------------------------------------ what is drawn


@dataclass(frozen=True)
class Series:
    """Rows of one run in one graph mode, as they are called and coloured."""

    run: Run
    graphs: str  # EAGER or BEST
    name: str
    colour: str

    def row(self, method: str, tree: str, told: str, batch: int) -> Row | None:
        mode = self.graphs if self.graphs != BEST else self.run.best
        key = Key(method, tree, told, self.run.dtype, mode, batch)
        return self.run.find(key)


def series_of(comparison: Comparison, both: bool = True) -> list[Series]:
    """A series a run, in its best mode; of a single measured run its eager figures too."""
    found = []
    for index, run in enumerate(comparison.runs):
        colour, modes = COLOURS[index % len(COLOURS)], {row["graphs"] for row in run.rows}
        name = run.title if run.projected else f"{run.title}, {run.dtype}"
        alone = len(comparison.measured) == 1 and not run.projected
        best = run.best if run.best in modes else min(modes)
        if both and alone and EAGER in modes and best != EAGER:
            found.append(Series(run, EAGER, f"{name}, {EAGER}", "#9ecae1"))
        mode = "" if run.projected else f", {best}"
        found.append(Series(run, best, name + mode, colour))
    return found


def lines_of(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Methods with tree and setting, each once, in the order of the methods."""
    seen = {(key.method, key.tree, key.setting) for key in comparison.keys}
    order = list(METHODS)
    return sorted(seen, key=lambda line: (order.index(line[0]), *line[1:]))


def names_of(lines: Sequence[tuple[str, str, str]]) -> list[str]:
    """What each is called: its method, with tree or setting where the method occurs more than once."""
    found = []
    for method, tree, told in lines:
        others = [line for line in lines if line[0] == method]
        name = method
        if len({line[1] for line in others}) > 1:
            name += f"\n{tree}"
        if len({line[2] for line in others}) > 1:
            name += f"\n{told}"
        found.append(name)
    return found


def scale(values: Sequence[float]) -> str:
    """`log` where the values lie far apart."""
    return "log" if min(values) > 0 and max(values) / min(values) > SPREAD else "linear"


def figure_of(value: float) -> str:
    """Three digits, and no powers of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    """One legend for all panels, under them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


# ------------------------------------------------------------------------------------ the pictures


def latency(comparison: Comparison) -> Figure:
    """Bars by method, one a device; a panel for each batch size."""
    series, lines = series_of(comparison), lines_of(comparison)
    batches = comparison.batches
    height = 1.3 + len(lines) * (0.22 + 0.2 * len(series)) + 0.2 * len(series)
    figure, panels = new_figure(3.4 + 3.3 * len(batches), max(height, 3), len(batches))
    costs = [comparison.cost(row) for run in comparison.runs for row in run.rows]
    p95 = "p95_ms_per_step" if comparison.of_steps else "p95_seconds_per_image"
    ends = [row.get(p95) or 0 for run in comparison.runs for row in run.rows]
    most = max(*costs, *ends)
    for batch, axes in zip(batches, panels, strict=True):
        axes.set_xscale(scale(costs))
        for s, one in enumerate(series):
            bars(axes, comparison, one, lines, batch, (s, len(series)), p95)
        axes.set_title(f"batch {batch}")
        axes.set_xlabel(comparison.unit + (", log scale" if scale(costs) == "log" else ""))
        axes.grid(axis="y", visible=False)
        if scale(costs) == "log":
            axes.set_xlim(min(costs) / 2, most * 4)
            plain_ticks(axes.xaxis)
        else:
            axes.set_xlim(0, most * 1.22)
    panels[0].set_yticks(range(len(lines)), names_of(lines))
    panels[0].set_ylim(len(lines) - 0.45, -0.55)
    panels[0].set_ylabel("method")
    legend_below(figure, panels[0], 1)
    return figure


def bars(
    axes: Axes,
    comparison: Comparison,
    one: Series,
    lines: Sequence[tuple[str, str, str]],
    batch: int,
    place: tuple[int, int],
    p95: str,
) -> None:
    """The bars of one series, with their values."""
    index, count = place
    thick = 0.8 / count
    rows = [(i, one.row(*line, batch)) for i, line in enumerate(lines)]
    known = [(i, row) for i, row in rows if row is not None]
    where = [i - 0.4 + thick * (index + 0.5) for i, _ in known]
    values = [comparison.cost(row) for _, row in known]
    guessed = one.run.projected
    axes.barh(
        where,
        values,
        thick * 0.92,
        label=one.name,
        color="white" if guessed else one.colour,
        edgecolor=one.colour,
        hatch=HATCH if guessed else None,
    )
    for y, value, (_, row) in zip(where, values, known, strict=True):
        end = max(value, row.get(p95) or value)
        if end > value:
            axes.plot([value, end], [y, y], color="#333333", linewidth=1)
        axes.annotate(
            figure_of(value), (end, y), (3, 0), textcoords="offset points", va="center", fontsize=8
        )


def step_parts(comparison: Comparison) -> Figure:
    """Stacked shares of an eager step, a bar for each method on each measured device."""
    lines, batches = lines_of(comparison), comparison.batches
    names = names_of(lines)
    entries = [
        (f"{names[i]}" + (f"\n{run.title}" if len(comparison.measured) > 1 else ""), run, line)
        for i, line in enumerate(lines)
        for run in comparison.measured
    ]
    tall = 0.36 if len(comparison.measured) == 1 else 0.46
    figure, panels = new_figure(3.4 + 3.3 * len(batches), 1.6 + tall * len(entries), len(batches))
    for batch, axes in zip(batches, panels, strict=True):
        for y, (_, run, (method, tree, told)) in enumerate(entries):
            modes = sorted({row["graphs"] for row in run.rows})
            keys = [Key(method, tree, told, run.dtype, mode, batch) for mode in modes]
            row = next((found for key in keys if (found := run.find(key))), None)
            if row is not None:
                stack(axes, y, row["eager_step_ms"])
        axes.set_title(f"batch {batch}")
        axes.set_xlabel("share of an eager step, %")
        axes.set_xlim(0, 100)
        axes.set_xticks(range(0, 101, 20))
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(entries)), [name for name, _, _ in entries])
    panels[0].set_ylim(len(entries) - 0.45, -0.55)
    panels[0].set_ylabel("method" if len(comparison.measured) == 1 else "method, device")
    handles = [handle_of(part) for part in PARTS]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(PARTS))
    return figure


def handle_of(part: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=PART_COLOURS[part], label=part)


def stack(axes: Axes, y: float, parts: dict[str, float]) -> None:
    """One bar of shares, with the whole in milliseconds behind it."""
    total, left = sum(parts.values()), 0.0
    for part in PARTS:
        share = 100 * parts[part] / total
        axes.barh(y, share, 0.72, left=left, color=PART_COLOURS[part], linewidth=0)
        if share >= 9:
            dark = part in ("verify", "tables", "commit")
            axes.text(
                left + share / 2,
                y,
                f"{share:.0f}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark else "black",
            )
        left += share
    axes.annotate(
        f"{figure_of(total)} ms",
        (100, y),
        (4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )


def depth(comparison: Comparison) -> Figure:
    """Tokens a step down to each depth: a line for each method, a panel for each measured device."""
    lines, runs = lines_of(comparison), comparison.measured
    names = names_of(lines)
    figure, panels = new_figure(1.9 + 3.6 * len(runs), 4.2, len(runs))
    batch = comparison.batches[0]
    deepest = 0
    for run, axes in zip(runs, panels, strict=True):
        modes = sorted({row["graphs"] for row in run.rows}, key=lambda mode: mode != run.best)
        for i, (method, tree, told) in enumerate(lines):
            keys = [Key(method, tree, told, run.dtype, mode, batch) for mode in modes]
            row = next((found for key in keys if (found := run.find(key))), None)
            if row is None:
                continue
            tokens = [1.0]
            for share in row["accepted_by_depth"]:
                tokens.append(tokens[-1] + share)
            deepest = max(deepest, len(tokens) - 1)
            axes.plot(
                range(len(tokens)),
                tokens,
                color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[method],
                markersize=6,
                # Methods that accept alike would hide each other
                linestyle=":" if i % 2 else "-",
                linewidth=2.2 if i % 2 else 1.4,
                markerfacecolor="white" if i % 2 else None,
                label=names[i].replace("\n", ", "),
            )
        axes.set_title(run.title if len(runs) > 1 else f"batch {batch}")
        axes.set_xlabel("deepest draft counted")
    for axes in panels:
        axes.set_xticks(range(deepest + 1))
        axes.set_xlim(-0.3, deepest + 0.3)
        axes.set_ylim(bottom=0.9)
    panels[0].set_ylabel("tokens a step")
    legend_below(figure, panels[0], 3)
    return figure


def given_speed(comparison: Comparison) -> Figure:
    """Speed-up for given tokens a step: a line for each method, a panel for each measured device."""
    lines, runs = lines_of(comparison), comparison.measured
    names, batches = names_of(lines), comparison.batches
    figure, panels = new_figure(1.9 + 3.6 * len(runs), 4.2, len(runs))
    styles = ("-", "--", ":", "-.")
    for run, axes in zip(runs, panels, strict=True):
        modes = {row["graphs"] for row in run.rows}
        mode = run.best if run.best in modes else min(modes)
        axes.axhline(1, color="#333333", linewidth=1)
        for i, (method, tree, told) in enumerate(lines):
            for b, batch in enumerate(batches):
                row = run.find(Key(method, tree, told, run.dtype, mode, batch))
                entries = row["projected"] if row and method != "ar" else []
                known = [e for e in entries if e["speed_against_ar"] is not None]
                if known:
                    axes.plot(
                        [e["tokens_per_step"] for e in known],
                        [e["speed_against_ar"] for e in known],
                        color=COLOURS[i % len(COLOURS)],
                        marker=MARKERS[method],
                        markerfacecolor="white",
                        linestyle=styles[b % len(styles)],
                        label=f"{names[i]}, batch {batch} ({LABEL})".replace("\n", ", "),
                    )
        axes.set_title(f"{run.title}, {mode}")
        axes.set_xlabel("tokens a step, given")
    panels[0].set_ylabel(f"speed against ar ({LABEL})")
    legend_below(figure, panels[0], 2)
    return figure


def throughput(comparison: Comparison) -> Figure:
    """Images a second by batch size: a panel for each method, a line for each device."""
    series, lines = series_of(comparison, both=False), lines_of(comparison)
    columns = min(len(lines), ACROSS)
    rows = -(-len(lines) // columns)
    figure, panels = new_figure(1.4 + 1.9 * columns, 1.2 + 2.5 * rows, columns, rows)
    known = [rate(comparison, row) for run in comparison.runs for row in run.rows]
    log = scale(known) == "log"
    for axes, line, name in zip(panels, lines, names_of(lines), strict=False):
        for one in series:
            points = [(b, one.row(*line, b)) for b in comparison.batches]
            values = [None if row is None else rate(comparison, row) for _, row in points]
            drawn = [(b, v) for (b, _), v in zip(points, values, strict=True) if v is not None]
            axes.plot(
                [b for b, _ in drawn],
                [v for _, v in drawn],
                color=one.colour,
                marker="o",
                markerfacecolor="white" if one.run.projected else one.colour,
                linestyle="--" if one.run.projected else "-",
                label=one.name,
            )
        batch_axis(axes, comparison.batches)
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
    legend_below(figure, panels[0], 1 if len(series) < 3 else 2)
    return figure


def batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    """Batch sizes at equal distances of their doublings."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_xlim(batches[0] / 1.5, batches[-1] * 1.5)
    axes.set_xlabel("batch size, images")


def rate(comparison: Comparison, row: Row) -> float:
    """Images, or steps of one image, a second."""
    if comparison.of_steps:
        return 1000 * int(row["batch_size"]) / float(row["ms_per_step"])
    return float(row["images_per_second"])
