"""How far pictures of one caption lie apart. Needs no torch."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from lantern_lab.evaluate.statistics import Array, QualityMetric, ratio_metric


def diversity() -> QualityMetric:
    """Root mean square distance of two pictures of one caption, over that of two of the generator's."""
    return ratio_metric("diversity", "diversity", "higher", 2)


def within(pixels: NDArray[np.uint8], panels: int) -> Array:
    """[panels] root mean square distances of the pairs in each panel, of pixels [panels * REPEATS, ...]."""
    groups = pixels.reshape(panels, -1, *pixels.shape[1:]).astype(np.float64)
    pairs = list(combinations(range(groups.shape[1]), 2))
    each = [np.square(groups[:, a] - groups[:, b]).mean((1, 2, 3)) ** 0.5 for a, b in pairs]
    return np.asarray(np.mean(each, 0))
