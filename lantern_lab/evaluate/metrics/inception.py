"""KID and the inception score, both torch-fidelity's own. Needs no torch until it is computed."""

from __future__ import annotations

import math

from lantern_hpu.errors import needing
from lantern_lab.evaluate.statistics import COSTLY, Array, QualityMetric, Rows

SUBSET = 1000  # pictures of a subset of KID


def kid(real: Rows) -> QualityMetric:
    """100 subsets of 1,000 pictures, or of all where there are fewer."""
    features = real["inception"]

    def value(rows: Array) -> float:
        import torch

        with needing("torch-fidelity", "it has KID", "evaluate"):
            from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric

        size = min(SUBSET, len(rows), len(features))
        both = (torch.from_numpy(x) for x in (rows, features))
        figures = kid_features_to_metric(*both, kid_subset_size=size, verbose=False)
        return float(figures[KEY_METRIC_KID_MEAN])

    return QualityMetric("kid", "KID", value, "lower", 2, 5, "inception", 0)


def inception_score() -> QualityMetric:
    """Of logits [n, 1008] in ten parts."""
    return QualityMetric("is", "inception score", score_of_logits, "higher", 2, 2, "logits", COSTLY)


def score_of_logits(rows: Array) -> float:
    import torch

    with needing("torch-fidelity", "it has the inception score", "evaluate"):
        from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, isc_features_to_metric

    result = isc_features_to_metric(torch.from_numpy(rows), splits=min(10, len(rows)))
    value = float(result[KEY_METRIC_ISC_MEAN])
    return value if math.isfinite(value) else math.nan
