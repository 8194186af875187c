"""How well a picture fits its caption: attributes that are classified right, CLIP score, HPSv2. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lantern_lab.evaluate.statistics import (
    Array,
    QualityMetric,
    mean_metric,
    ratio_metric,
)


def agreement() -> QualityMetric:
    """Share of the attributes named in the captions that the classifier predicts."""
    return ratio_metric("agreement", "caption agreement", "higher")


def agreement_rows(matches: Sequence[Mapping[str, bool]]) -> Array:
    """[n, 2] right ones and all of each picture, from whether each attribute of its caption is right."""
    return np.asarray([(sum(one.values()), len(one)) for one in matches], np.float64)


def clip_score() -> QualityMetric:
    """Cosine of picture and caption by CLIP, scaled as the protocol does."""
    return mean_metric("clip", "CLIP score", "higher", 4)


def hps_score() -> QualityMetric:
    """Human preference score, version 2.1."""
    return mean_metric("hps", "HPSv2", "higher", 4)
