"""Plots: what stands beside points can be read."""

from __future__ import annotations

from itertools import combinations

import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

from lantern_lab.measure import plots

NEAR = {
    "lambda=2": (2.02, 17.5),
    "lambda-5": (2.16, 17.5),
    "lambda=20": (2.36, 17.2),
    "tv": (2.3, 17.3),
}


def labelled(line: list[float], labels: dict[str, tuple[float, float]]) -> tuple[Axes, list[Bbox]]:
    """A panel with a line and labels as they are saved, and the labels' boxes."""
    figure, (axes,) = plots.panels(3.4, 3.7)
    axes.plot(range(len(line)), line)
    for text, spot in labels.items():
        plots.label_point(axes, text, spot, "C0")
    plots.saved(figure, "png")
    renderer = FigureCanvasAgg(figure).get_renderer()
    return axes, [note.get_window_extent(renderer) for note in axes.texts]


def test_labels_of_near_points_do_not_overlap() -> None:
    _, boxes = labelled([0, 10, 20, 30], NEAR)
    assert len(boxes) == len(NEAR)
    assert not any(Bbox.intersection(one, other) for one, other in combinations(boxes, 2))


def test_a_label_at_the_edge_stays_inside_its_panel() -> None:
    axes, (box,) = labelled([0, 1], {"a long name of a setting": (1.0, 1.0)})
    assert box.x1 <= axes.bbox.x1 and box.y1 <= axes.bbox.y1


def test_a_label_keeps_off_the_line_between_two_points() -> None:
    axes, (box,) = labelled([0, 1, 2], {"lambda-5": (1.0, 1.0)})
    line = axes.lines[0].get_path().transformed(axes.transData)
    assert not line.intersects_bbox(box, filled=False)
