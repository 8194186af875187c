"""Plots: what stands beside points can be read."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from lantern_lab.measure import plots
from scripts.docs.figures import CHARTS

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
    return axes, boxes_of(axes)


def boxes_of(axes: Axes) -> list[Bbox]:
    """Where the letters of a panel's labels lie."""
    renderer = FigureCanvasAgg(axes.figure.figure).get_renderer()
    boxes = []
    for note in axes.texts:
        if isinstance(note, Annotation) and note.get_gid() == plots.LABEL:
            note.update_positions(renderer)
            boxes.append(Text.get_window_extent(note, renderer))
    return boxes


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


@pytest.mark.parametrize("name", CHARTS)
def test_labels_of_a_pages_chart_keep_clear_of_all_that_is_drawn(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    real = plots.saved

    def saved(figure: Figure, suffix: str) -> bytes:
        drawn.append(figure)
        return real(figure, suffix)

    monkeypatch.setattr(plots, "saved", saved)
    CHARTS[name]()
    for axes in drawn[0].axes:
        labels = boxes_of(axes)
        assert not any(Bbox.intersection(one, other) for one, other in combinations(labels, 2))
        lines = [line.get_path().transformed(line.get_transform()) for line in axes.lines]
        spots = [np.asarray(spot) for line in lines for spot in np.asarray(line.vertices)]
        points = [Bbox([spot - 3, spot + 3]) for spot in spots]
        assert not any(Bbox.intersection(box, point) for box in labels for point in points)
        bars = [one for one in axes.collections if isinstance(one, LineCollection)]
        lines += [path.transformed(bar.get_transform()) for bar in bars for path in bar.get_paths()]
        assert not any(line.intersects_bbox(box, filled=False) for line in lines for box in labels)
