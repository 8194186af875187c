"""One style for all plots of measurements; the same figures give the same bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lantern_hpu.errors import needing
from lantern_hpu.files import ASSETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

Mask = NDArray[np.bool_]  # [height, width] of a panel and what is around it
Box = tuple[slice, slice]  # rows and columns of pixels
STYLE = ASSETS / "plots.mplstyle"
MARKERS = "osD^vP*Xp<>"  # of methods
SPREAD = 15  # largest over smallest value from which an axis is logarithmic
OUTSIDE = 1000  # pixels around a panel, where no label is to lie
CLEAR = 3  # pixels around a label
ROUNDS = 3  # of labels that give way to each other
LIGHT = 200  # of 255, from which what is drawn may lie under a label, as the grid does
MIDDLE = 3  # of a label's letters above where it begins, in points
LABEL = "label"  # of a point, which `set_apart` may move
# Where a label may begin, in points from its own, the nearest first; those to the left end there
OFFSETS = sorted(
    ((side * across, up) for up in range(-98, 96, 4) for across in (6, 16, 28) for side in (1, -1)),
    key=lambda offset: math.hypot(offset[0], offset[1] + MIDDLE),
)


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

        line = {"arrowstyle": "-", "color": color, "lw": 0.5, "shrinkA": 0, "shrinkB": 6}
        note = axes.annotate(text, spot, (0, 0), textcoords="offset points", arrowprops=line)
        halo = withStroke(linewidth=2, foreground="white")  # letters can be read on lines
        note.set(color=color, path_effects=[halo], fontsize=7.5)
        note.set_gid(LABEL)
        note.set_in_layout(False)


def set_apart(figure: Figure) -> None:
    """Move each label to where it covers least of what is drawn and of other labels, within its panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Annotation

    canvas = FigureCanvasAgg(figure)
    annotations = [a for axes in figure.axes for a in axes.texts if isinstance(a, Annotation)]
    labels = [note for note in annotations if note.get_gid() == LABEL]
    for note in labels:
        note.set_visible(False)
    canvas.draw()
    drawn = np.asarray(canvas.buffer_rgba())[::-1, :, :3]  # [height, width, 3], upwards
    for axes in figure.axes:
        left, low, right, high = (int(edge) for edge in axes.bbox.extents)
        dark = np.pad(drawn[low:high, left:right].min(-1) < LIGHT, OUTSIDE, constant_values=True)
        corner = np.asarray([left - OUTSIDE, low - OUTSIDE])
        notes = [note for note in labels if note.axes is axes]
        boxes = [boxes_of(note, corner, canvas.get_renderer()) for note in notes]
        spots = [axes.transData.transform(note.xy) - corner for note in notes]
        for note, place in zip(notes, arranged(dark, boxes, spots), strict=True):
            set_at(note, OFFSETS[place])


def arranged(dark: Mask, boxes: Sequence[Sequence[Box]], spots: Sequence[Any]) -> list[int]:
    """Which of its boxes each label of a panel takes; they give way to each other.

    Args:
        dark: [height, width], where something is drawn or outside. spots: what each label names: [2].
    """
    chosen = [0] * len(boxes)
    for i in list(range(len(boxes))) * ROUNDS:
        texts, leaders = np.zeros_like(dark), np.zeros_like(dark)
        for j, spot in enumerate(spots):
            if j != i:
                texts[boxes[j][chosen[j]]] = True
                leaders[leader(spot, boxes[j][chosen[j]])] = True
        taken = dark | texts | leaders
        costs = [taken[box].sum() + texts[leader(spots[i], box)].sum() for box in boxes[i]]
        chosen[i] = int(np.argmin(costs))
    return chosen


def boxes_of(note: Annotation, corner: NDArray[np.int_], renderer: Any) -> list[Box]:
    """Where a label, which is shown from now on, lies at each of the offsets, from a corner [2]."""
    from matplotlib.text import Text

    note.set_visible(True)  # what is not shown has no size
    set_at(note, (1, 0))
    note.update_positions(renderer)
    start = Text.get_window_extent(note, renderer)
    found = []
    for across, up in OFFSETS:
        right, higher = renderer.points_to_pixels(np.asarray([across - 1, up])) - corner
        box = start.translated(right - start.width * (across < 0), higher).padded(CLEAR)
        found.append(np.s_[int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)])
    return found


def leader(spot: NDArray[np.float64], box: Box) -> Any:
    """The pixels of the line from a point [2] to the middle of its label, as an index."""
    rows, columns = box
    middle = (columns.start + columns.stop) / 2, (rows.start + rows.stop) / 2
    across, up = np.linspace(spot, middle, 200).astype(int).T
    return up, across


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
