"""One style for all plots of measurements; the same figures give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lantern_hpu.errors import needing
from lantern_hpu.files import ASSETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

STYLE = ASSETS / "plots.mplstyle"
MARKERS = "osD^vP*Xp<>"  # of methods
SPREAD = 15  # largest over smallest value from which an axis is logarithmic


@contextmanager
def in_style(extra: str) -> Iterator[None]:
    """The style, for whatever is drawn and saved inside.

    Args:
        extra: of the package, that brings matplotlib.

    Raises:
        OptionError: matplotlib is not installed.
    """
    with needing("matplotlib", "it draws the plots", extra):
        import matplotlib.figure  # noqa: F401
        from matplotlib import style
    with style.context(STYLE, after_reset=True):
        yield


def panels(
    width: float, height: float, columns: int = 1, rows: int = 1, sharey: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure with panels row by row; sizes in inches.

    Args:
        sharey: one vertical scale for all of them.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=sharey, squeeze=False)
    return figure, list(axes.flat)


def legend_under(figure: Figure, axes: Axes, columns: int) -> None:
    """One legend for all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


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
        figure.set_layout_engine(
            "none"
        )  # laid out once, not at each of the draws that saving takes
    dated = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    file = io.BytesIO()
    figure.savefig(file, format=suffix, metadata=dated[suffix])
    return file.getvalue()
