"""Which form of a product is faster here, by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf

from torch import Tensor

SAMPLED = 128 * 2**20  # bytes of the matrices that are timed: more than a core's share of a cache


def time_forms(
    forms: Sequence[Sequence[Callable[[Tensor], Tensor]]], inputs: Sequence[Tensor], rounds: int = 3
) -> list[float]:
    """Least seconds of each form over all inputs; they take turns, so that a busy moment meets all."""
    least = [inf] * len(forms)
    for _ in range(rounds):
        for number, form in enumerate(forms):
            began = time.perf_counter()
            for layer, x in zip(form, inputs, strict=True):
                layer(x)
            least[number] = min(least[number], time.perf_counter() - began)
    return least
