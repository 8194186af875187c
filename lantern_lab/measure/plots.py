"""One style for all plots of measurements; the same figures give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

from lantern_hpu.errors import needing
from lantern_hpu.files import ASSETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

STYLE = ASSETS / "plots.mplstyle"
MARKERS = "osD^vP*Xp<>"  # of methods
SPREAD = 15  # largest over smallest value from which an axis is logarithmic
LABEL = "label"  # of a point, which `set_apart` may move
# Where a label may begin, in points from its own; those to the left end there
OFFSETS = [(side * 4, up) for up in (4, -10, 12, -18, 20, -26) for side in (1, -1)]


@contextmanager
def in_style(extra: str) -> Iterator[None]:
    """The style, for what is drawn and saved inside; `extra` is that of the package which brings matplotlib."""
    with needing("matplotlib", "it draws the plots", extra):
        import matplotlib.figure  # noqa: F401
        from matplotlib import style
    with style.context(STYLE, after_reset=True):
        yield


def panels(
    width: float, height: float, columns: int = 1, rows: int = 1, sharey: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure with panels row by row, with one vertical scale for all of them if `sharey`; sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=sharey, squeeze=False)
    return figure, list(axes.flat)


def legend_under(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def label_point(axes: Axes, text: str, spot: tuple[float, float], color: str) -> None:
    """Name a point, next to it and in its colour; `saved` moves what would overlap."""
    if text:
        from matplotlib.patheffects import withStroke

        note = axes.annotate(text, spot, OFFSETS[0], textcoords="offset points", fontsize=7.5)
        halo = withStroke(linewidth=2, foreground="white")  # letters can be read on lines
        note.set(color=color, path_effects=[halo])
        note.set_gid(LABEL)
        note.set_in_layout(False)


def set_apart(figure: Figure) -> None:
    """Move each label to where it hides least of points, lines, other labels and of what is outside its panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

    renderer = FigureCanvasAgg(figure).get_renderer()

    def hidden(box: Bbox, others: Sequence[Bbox], panel: Bbox) -> float:
        shared = [Bbox.intersection(box, other) for other in (*others, panel)]
        areas = [0.0 if one is None else one.width * one.height for one in shared]
        return sum(areas[:-1]) + box.width * box.height - areas[-1]

    for axes in figure.axes:
        curves = [
            axes.transData.transform(line.get_xydata())
            for line in axes.lines
            if line.get_transform() == axes.transData
        ]
        points = [Bbox([spot - 4, spot + 4]) for curve in curves for spot in curve]
        points += [
            Bbox([start + (end - start) * i / 30 - 2, start + (end - start) * i / 30 + 2])
            for curve in curves
            for start, end in pairwise(curve)
            for i in range(31)
        ]
        for note in axes.texts:
            if not isinstance(note, Annotation) or note.get_gid() != LABEL:
                continue
            boxes = []
            for offset in OFFSETS:
                set_at(note, offset)
                boxes.append(note.get_window_extent(renderer))
            costs = [hidden(box, points, axes.bbox) for box in boxes]
            best = costs.index(min(costs))
            set_at(note, OFFSETS[best])
            points.append(boxes[best])


def set_at(note: Annotation, offset: tuple[float, float]) -> None:
    """Set a label `offset` points from its own, to the left of it or to the right."""
    note.xyann = offset
    note.set_horizontalalignment("left" if offset[0] > 0 else "right")


def far_apart(values: Sequence[float]) -> bool:
    """Whether values ask for a logarithmic axis."""
    return min(values) > 0 and max(values) / min(values) > SPREAD


def plain_ticks(axis: Axis) -> None:
    """Numbers as one writes them, on a logarithmic axis."""
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 3.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def saved(figure: Figure, suffix: str) -> bytes:
    """A `png` or `svg` file, without the date and the program that would make two differ."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, not at each draw of saving
    set_apart(figure)
    dated = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    file = io.BytesIO()
    figure.savefig(file, format=suffix, metadata=dated[suffix])
    return file.getvalue()
