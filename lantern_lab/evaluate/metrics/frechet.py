"""Frechet distances: of the built-in protocol's features, and FID. Needs no torch.

FID agrees with torch-fidelity's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lantern_lab.evaluate.statistics import COSTLY, Array, QualityMetric, Rows


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Mean [d] and covariance [d, d] of features."""

    mean: Array
    covariance: Array

    @classmethod
    def of(cls, features: Array) -> Gaussian:
        rows = np.asarray(features, np.float64)
        return cls(rows.mean(0), np.atleast_2d(np.cov(rows, rowvar=False)))

    @property
    def root(self) -> Array:
        """The covariance's square root [d, d]."""
        values, vectors = np.linalg.eigh(self.covariance)
        return np.asarray((vectors * np.sqrt(values.clip(0))) @ vectors.T)


def frechet(reference: Gaussian, root: Array | None = None) -> Callable[[Gaussian], float]:
    """The squared Frechet distance of a Gaussian from this one (Dowson and Landau 1982):

        |m - m'|^2 + tr(C + C' - 2 (C'^1/2 C C'^1/2)^1/2)

    Args:
        root: of the reference's covariance, where it is known.
    """
    half = reference.root if root is None else root

    def distance(other: Gaussian) -> float:
        between = np.linalg.eigvalsh(half @ other.covariance @ half)
        traces = np.trace(reference.covariance) + np.trace(other.covariance)
        mixed = 2 * np.sqrt(between.clip(0)).sum()
        return float(np.square(reference.mean - other.mean).sum() + traces - mixed)

    return distance


def frechet_metric(features: Array, name: str = "frechet") -> QualityMetric:
    """The distance from reference features [m, d], in per cent of their variance, so that no unit is left."""
    reference = Gaussian.of(features)
    distance, unit = frechet(reference), float(np.trace(reference.covariance)) / 100

    def value(rows: Array) -> float:
        return distance(Gaussian.of(rows)) / unit

    return QualityMetric(name, "Frechet distance", value, "lower", features.shape[1] + 1, 2)


def fid(real: Rows, statistics: Gaussian | None) -> QualityMetric:
    """From published statistics, or from rows of the Inception network."""
    distance = frechet(statistics or Gaussian.of(real["inception"]))

    def value(rows: Array) -> float:
        return distance(Gaussian.of(rows))

    return QualityMetric("fid", "FID", value, "lower", 2, 2, "inception", COSTLY)
