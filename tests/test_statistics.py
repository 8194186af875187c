"""Figures of sets of pictures against closed forms, and intervals against known spreads."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import sqrtm

from lantern_lab.evaluate.metrics import (
    Difference,
    Gaussian,
    frechet,
    frechet_metric,
    mean_metric,
    measured,
    ratio_metric,
)


def gaussian(seed: int, size: int = 5) -> Gaussian:
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((size, 2 * size))
    return Gaussian(rng.standard_normal(size), root @ root.T)


def test_frechet_distance_agrees_with_the_textbook_formula() -> None:
    one, other = gaussian(1), gaussian(2)
    root = sqrtm(one.covariance @ other.covariance).real
    traces = np.trace(one.covariance + other.covariance - 2 * root)
    want = np.square(one.mean - other.mean).sum() + traces
    assert frechet(one)(other) == pytest.approx(want, rel=1e-9)
    assert frechet(other)(one) == pytest.approx(want, rel=1e-9)
    assert frechet(one)(one) == pytest.approx(0, abs=1e-9)


def test_frechet_distance_of_features_has_no_unit() -> None:
    rng = np.random.default_rng(0)
    reference, drawn = rng.standard_normal((500, 4)), rng.standard_normal((400, 4)) + 1
    here = frechet_metric(reference).value(drawn)
    there = frechet_metric(50 * reference).value(50 * drawn)
    assert here == pytest.approx(there)
    assert here == pytest.approx(100, rel=0.2)  # moved by one deviation along each axis


def test_an_interval_is_as_wide_as_the_mean_is_uncertain() -> None:
    rows = np.random.default_rng(0).standard_normal(2500)
    found = measured(mean_metric("mean", "mean"), rows, rounds=400)
    assert found.around == pytest.approx(1.96 / 50, rel=0.15)
    assert found.interval[0] < found.value < found.interval[1]


def test_a_ratio_weighs_its_rows() -> None:
    rows = np.array([[1.0, 1], [0, 3]])
    assert ratio_metric("r", "r").value(rows) == pytest.approx(0.25)


def test_what_two_settings_share_cancels_in_their_difference() -> None:
    rng = np.random.default_rng(0)
    shared = 10 * rng.standard_normal(400)
    metric = mean_metric("mean", "mean")
    one = measured(metric, shared + 1 + 0.1 * rng.standard_normal(400), 200)
    other = measured(metric, shared, 200)
    apart = Difference.of(one, other, floor=0.0)
    assert apart.value == pytest.approx(1, abs=0.05) and apart.around < 0.05 < one.around
    assert not apart.noise
    assert Difference.of(one, other, floor=2.0).noise  # chance alone does as much
