"""The metrics of `evaluate`, by name; a module a family. Needs no torch.

A metric is a function of rows, one row a picture: `QualityMetric` in `statistics.py`. The networks that make the rows
are in `attributes.py` for the built-in protocol, and in `networks.py` for published ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lantern_lab.evaluate.metrics import captions, diversity, frechet, inception, manifolds
from lantern_lab.evaluate.metrics.frechet import Gaussian
from lantern_lab.evaluate.statistics import Array, QualityMetric, Rows


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


PUBLISHED = {
    "fid": PublishedMetric("inception", "statistics", frechet.fid),
    "kid": PublishedMetric("inception", "pictures", lambda real, _: inception.kid(real)),
    "is": PublishedMetric("inception", "", lambda real, _: inception.inception_score()),
    "precision": PublishedMetric("vgg", "pictures", lambda real, _: manifolds.precision()),
    "recall": PublishedMetric("vgg", "pictures", lambda real, _: manifolds.recall()),
    "clip": PublishedMetric("clip", "", lambda real, _: captions.clip_score()),
    "hps": PublishedMetric("hps", "", lambda real, _: captions.hps_score()),
}
# Of the built-in protocol, from features of reference pictures
BUILTIN: dict[str, Callable[[Array], QualityMetric]] = {
    "frechet": frechet.frechet_metric,
    "agreement": lambda fresh: captions.agreement(),
    "diversity": lambda fresh: diversity.diversity(),
}
