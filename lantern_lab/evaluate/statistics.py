"""Figures of sets of pictures, and how far they can be trusted. Needs no torch.

A metric is a function of rows, one a picture or a group of pictures. So its interval comes about without knowing what
it is: rows are drawn again with replacement, and the spread of what the function makes of them is the metric's own
(Efron's bootstrap, 1979). The interval is the figure +- 1.96 of that spread, and not quantiles: a set that holds
pictures twice lies farther from the reference than it should, which moves the quantiles of a Frechet distance but not
their spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        least: rows that it needs.
        digits: behind the point, in tables.
        of: name of its rows, if it is not its own. rounds: of the bootstrap at most; 0 gives no interval.
    """

    name: str
    title: str
    value: Callable[[Array], float]
    better: str = ""
    least: int = 2
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
    return QualityMetric(
        name, title, lambda rows: float(rows[:, 0].sum() / rows[:, 1].sum()), better, 2, digits
    )


def mean_metric(name: str, title: str, better: str = "", digits: int = 3) -> QualityMetric:
    """Of rows [n]."""
    return QualityMetric(name, title, lambda rows: float(rows.mean()), better, 2, digits)


def figures(metrics: Sequence[QualityMetric], rows: Rows, rounds: int) -> dict[str, Figure]:
    return {m.name: measured(m, rows[m.source], rounds) for m in metrics if m.source in rows}


def floors(ar: Mapping[str, Figure], again: Mapping[str, Figure]) -> dict[str, float]:
    """What chance alone makes of each metric: how far two sets of seeds of one method lie apart."""
    return {name: abs(ar[name].value - again[name].value) for name in ar.keys() & again.keys()}


def as_json(found: Mapping[str, Figure]) -> dict[str, Any]:
    known = {name: one for name, one in found.items() if not math.isnan(one.around)}
    intervals = {name: list(one.interval) for name, one in known.items()}
    return {name: one.value for name, one in found.items()} | {"intervals": intervals}
