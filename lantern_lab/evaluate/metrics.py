"""The metrics of `evaluate`, by name, and how far their figures can be trusted. Needs no torch until one is computed.

A metric is a function of rows, one a picture or a group of pictures. So its interval comes about without knowing what
it is: rows are drawn again with replacement, and the spread of what the function makes of them is the metric's own
(Efron's bootstrap, 1979). The interval is the figure +- 1.96 of that spread, and not quantiles: a set that holds
pictures twice lies farther from the reference than it should, which moves the quantiles of a Frechet distance but not
their spread. The networks that make the rows are in `attributes.py` and `scorer_published.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lantern_hpu.errors import needing

Array = NDArray[np.float64]
Rows = Mapping[str, Array]  # by the name of the metric: [n, ...]
COSTLY = 20  # bootstrap rounds of a metric that takes seconds
SIDES = 1.96  # of a normal distribution's 95 %


@dataclass(frozen=True)
class QualityMetric:
    """A figure of a set of pictures.

    Attributes:
        name: in `evaluation.json`. title: in tables and plots.
        value: of rows [n, ...]; n pictures, or groups of them.
        better: "lower", "higher" or "" where neither is.
        digits: behind the point, in tables.
        of: name of its rows, if it is not its own. rounds: of the bootstrap at most; 0 gives no interval.
    """

    name: str
    title: str
    value: Callable[[Array], float]
    better: str = ""
    digits: int = 3
    of: str = ""
    rounds: int = 10**6

    @property
    def source(self) -> str:
        return self.of or self.name


@dataclass(frozen=True)
class Figure:
    """What a metric came to.

    Attributes:
        around: half the width of its 95 % interval. draws: [rounds], of rows drawn again.
    """

    value: float
    around: float
    draws: Array

    @property
    def interval(self) -> tuple[float, float]:
        return self.value - self.around, self.value + self.around


def measured(metric: QualityMetric, rows: Array, rounds: int, seed: int = 0) -> Figure:
    """A metric of rows [n, ...]; equal numbers of rows are drawn alike, so that figures can be compared in pairs."""
    rng, n = np.random.default_rng(seed), len(rows)
    again = (rows[rng.integers(n, size=n)] for _ in range(min(rounds, metric.rounds)))
    draws = np.asarray([metric.value(some) for some in again])
    return Figure(metric.value(rows), spread(draws), draws)


def spread(draws: Array) -> float:
    """Half the width of a 95 % interval; NaN of fewer than two draws."""
    return SIDES * float(np.std(draws, ddof=1)) if len(draws) > 1 else math.nan


@dataclass(frozen=True)
class Difference:
    """Of two figures of the same prompts.

    Attributes:
        noise: whether nothing is to be seen in it: it is smaller than the floor, or its interval holds 0.
    """

    value: float
    around: float
    noise: bool

    @classmethod
    def of(cls, one: Figure, other: Figure, floor: float) -> Difference:
        """One less the other; the same rows of both were drawn again, so what they share cancels."""
        value, around = one.value - other.value, spread(one.draws - other.draws)
        return cls(value, around, abs(value) <= max(floor, 0.0 if math.isnan(around) else around))


def ratio_metric(name: str, title: str, better: str = "", digits: int = 3) -> QualityMetric:
    """Of rows [n, 2]: the sum of the first column over that of the second."""

    def value(rows: Array) -> float:
        return float(rows[:, 0].sum() / rows[:, 1].sum())

    return QualityMetric(name, title, value, better, digits)


def mean_metric(name: str, title: str, better: str = "higher", digits: int = 4) -> QualityMetric:
    """Of rows [n]."""
    return QualityMetric(name, title, lambda rows: float(rows.mean()), better, digits)


def figures(metrics: Sequence[QualityMetric], rows: Rows, rounds: int) -> dict[str, Figure]:
    return {m.name: measured(m, rows[m.source], rounds) for m in metrics if m.source in rows}


def as_json(found: Mapping[str, Figure]) -> dict[str, Any]:
    known = {name: one for name, one in found.items() if not math.isnan(one.around)}
    intervals = {name: list(one.interval) for name, one in known.items()}
    return {name: one.value for name, one in found.items()} | {"intervals": intervals}


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

    return QualityMetric("frechet", "Frechet distance", value, "lower", 2)


def fid(real: Rows, statistics: Gaussian | None) -> QualityMetric:
    """From published statistics, or from rows of the Inception network; agrees with torch-fidelity's."""
    distance = frechet(statistics or Gaussian.of(real["inception"]))

    def value(rows: Array) -> float:
        return distance(Gaussian.of(rows))

    return QualityMetric("fid", "FID", value, "lower", 2, "inception", COSTLY)


# ------------------------------------------------------------------------------------ torch-fidelity's own


def kid(real: Rows, statistics: Gaussian | None = None) -> QualityMetric:
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

    return QualityMetric("kid", "KID", value, "lower", 5, "inception", 0)


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


def fixed(metric: QualityMetric) -> Callable[[Rows, Gaussian | None], QualityMetric]:
    """One that is the same whatever the reference is."""
    return lambda real, statistics: metric


SCORE = QualityMetric("is", "inception score", inception_score, "higher", 2, "logits", COSTLY)
PUBLISHED = {
    "fid": PublishedMetric("inception", "statistics", fid),
    "kid": PublishedMetric("inception", "pictures", kid),
    "is": PublishedMetric("inception", "", fixed(SCORE)),
    "precision": PublishedMetric("vgg", "pictures", fixed(mean_metric("precision", "precision"))),
    "recall": PublishedMetric("vgg", "pictures", fixed(mean_metric("recall", "recall"))),
    "clip": PublishedMetric("clip", "", fixed(mean_metric("clip", "CLIP score"))),
    "hps": PublishedMetric("hps", "", fixed(mean_metric("hps", "HPSv2"))),
}
