"""The metrics of `evaluate`, by name. Needs no torch until one is computed.

A metric is a function of rows, one row a picture: `QualityMetric` in `statistics.py`. The networks that make the rows
are in `attributes.py` for the built-in protocol, and in `networks.py` for published ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lantern_hpu.errors import needing
from lantern_lab.evaluate.statistics import (
    COSTLY,
    Array,
    QualityMetric,
    Rows,
    mean_metric,
    ratio_metric,
)

SUBSET = 1000  # pictures of a subset of KID
NEIGHBOURS = 3  # of a point, whose distances are its manifold

# ------------------------------------------------------------------------------------ Frechet distances


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Mean [d] and covariance [d, d] of features."""

    mean: Array
    covariance: Array

    @classmethod
    def of(cls, features: Array) -> Gaussian:
        rows = np.asarray(features, np.float64)
        return cls(rows.mean(0), np.atleast_2d(np.cov(rows, rowvar=False)))


def frechet(reference: Gaussian) -> Callable[[Gaussian], float]:
    """The squared Frechet distance of a Gaussian from this one (Dowson and Landau 1982):

    |m - m'|^2 + tr(C + C' - 2 (C'^1/2 C C'^1/2)^1/2)
    """
    values, vectors = np.linalg.eigh(reference.covariance)
    half = (vectors * np.sqrt(values.clip(0))) @ vectors.T  # [d, d], the covariance's square root

    def distance(other: Gaussian) -> float:
        between = np.linalg.eigvalsh(half @ other.covariance @ half)
        traces = np.trace(reference.covariance) + np.trace(other.covariance)
        mixed = 2 * np.sqrt(between.clip(0)).sum()
        return float(np.square(reference.mean - other.mean).sum() + traces - mixed)

    return distance


def frechet_metric(features: Array) -> QualityMetric:
    """The distance from reference features [m, d], in per cent of their variance, so that no unit is left."""
    reference = Gaussian.of(features)
    distance, unit = frechet(reference), float(np.trace(reference.covariance)) / 100

    def value(rows: Array) -> float:
        return distance(Gaussian.of(rows)) / unit

    return QualityMetric("frechet", "Frechet distance", value, "lower", features.shape[1] + 1, 2)


def fid(real: Rows, statistics: Gaussian | None) -> QualityMetric:
    """From published statistics, or from rows of the Inception network; agrees with torch-fidelity's."""
    distance = frechet(statistics or Gaussian.of(real["inception"]))

    def value(rows: Array) -> float:
        return distance(Gaussian.of(rows))

    return QualityMetric("fid", "FID", value, "lower", 2, 2, "inception", COSTLY)


# ------------------------------------------------------------------------------------ torch-fidelity's own


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


def inception_score(rows: Array) -> float:
    """Of logits [n, 1008] in ten parts."""
    import torch

    with needing("torch-fidelity", "it has the inception score", "evaluate"):
        from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, isc_features_to_metric

    result = isc_features_to_metric(torch.from_numpy(rows), splits=min(10, len(rows)))
    value = float(result[KEY_METRIC_ISC_MEAN])
    return value if math.isfinite(value) else math.nan


# ------------------------------------------------------------------------------------ rows


def agreement_rows(matches: Sequence[Mapping[str, bool]]) -> Array:
    """[n, 2] right ones and all of each picture, from whether each attribute of its caption is right."""
    return np.asarray([(sum(one.values()), len(one)) for one in matches], np.float64)


def within(pixels: NDArray[np.uint8], panels: int) -> Array:
    """[panels] root mean square distances of the pairs in each panel, of pixels [panels * REPEATS, ...]."""
    groups = pixels.reshape(panels, -1, *pixels.shape[1:]).astype(np.float64)
    pairs = list(combinations(range(groups.shape[1]), 2))
    each = [np.square(groups[:, a] - groups[:, b]).mean((1, 2, 3)) ** 0.5 for a, b in pairs]
    return np.asarray(np.mean(each, 0))


def manifold_rows(drawn: Array, real: Array) -> dict[str, Array]:
    """Precision and recall as rows of both sets, of VGG features [n, d] and [m, d] (Kynkäänniemi et al. 2019)."""
    return {"precision": inside(drawn, real), "recall": inside(real, drawn)}


def inside(points: Array, others: Array) -> Array:
    """[n] 1 where a point [n, d] is as near to one of the others [m, d] as that one's third neighbour among them."""
    import torch

    a, b = (torch.from_numpy(np.ascontiguousarray(x)) for x in (points, others))
    reach = torch.cat(
        [torch.cdist(part, b).kthvalue(NEIGHBOURS + 1).values for part in b.split(1000)]
    )  # [m]; a point's own distance of 0 counts as the first
    hits = [(torch.cdist(part, b) <= reach).any(1) for part in a.split(1000)]
    return np.asarray(torch.cat(hits).double().numpy())


# ------------------------------------------------------------------------------------ all of them


def built_in(fresh: Array) -> list[QualityMetric]:
    """Those of the built-in protocol, from features [m, d] of reference pictures."""
    return [
        frechet_metric(fresh),
        ratio_metric("agreement", "caption agreement", "higher"),
        ratio_metric("diversity", "diversity", "higher", 2),
    ]


@dataclass(frozen=True)
class PublishedMetric:
    """A metric of the literature.

    Attributes:
        network: makes its rows. reference: what it compares with, reference pictures or statistics of some.
        make: of the reference's rows, by network, and of its statistics where they were given.
    """

    network: str
    reference: Literal["pictures", "statistics", ""]
    make: Callable[[Rows, Gaussian | None], QualityMetric]


def share_or_score(
    network: str, reference: Literal["pictures", ""], name: str, title: str
) -> PublishedMetric:
    """One that is the mean of its rows."""
    metric = mean_metric(name, title, "higher", 4)
    return PublishedMetric(network, reference, lambda real, _: metric)


LOGITS = QualityMetric("is", "inception score", inception_score, "higher", 2, 2, "logits", COSTLY)
PUBLISHED = {
    "fid": PublishedMetric("inception", "statistics", fid),
    "kid": PublishedMetric("inception", "pictures", lambda real, _: kid(real)),
    "is": PublishedMetric("inception", "", lambda real, _: LOGITS),
    "precision": share_or_score("vgg", "pictures", "precision", "precision"),
    "recall": share_or_score("vgg", "pictures", "recall", "recall"),
    "clip": share_or_score("clip", "", "clip", "CLIP score"),
    "hps": share_or_score("hps", "", "hps", "HPSv2"),
}
