"""Randomness as an input: uniforms from a counter-based generator, made on the host.

Every number is a function of (seed, step, index) alone: it does not depend on the device, the batch, or
the numbers drawn before it. The generator is Philox 4x64 (Salmon et al., SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lantern_hpu.ops.race import ROUNDS

STREAM = 0x6C616E7465726E  # the second half of the key: keeps this use of a seed apart from others
PLACES = 0x77696E646F77  # the same, for noise that belongs to a place and not to a step


def uniforms(seed: int, step: int, count: int) -> NDArray[np.float32]:
    """Uniform numbers of one image and step.

    Args:
        seed: the image's seed, 0 to 2**64 - 1.
        step: 0 for prefill, then 1, 2, ...
        count: how many numbers; the i-th is the same whatever it is.

    Returns [count] float32 in [0, 1).
    """
    key = np.array([seed, STREAM], dtype=np.uint64)  # a list of mixed sizes would become float64
    generator = np.random.Philox(key=key, counter=[0, step, 0, 0])
    # 24 bits fill a float32 exactly, so that 1.0 cannot come out by rounding.
    return (generator.random_raw(count) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def block(
    seeds: Sequence[int | None], first: int | Sequence[int], steps: int, count: int
) -> NDArray[np.float32]:
    """Uniforms of several steps for a batch: [steps, B, count] float32.

    Args:
        seeds: of each image; None where there is none, whose numbers are 0.
        first: number of the first of these steps, for all images or each one's own.
    """
    first = [first] * len(seeds) if isinstance(first, int) else first
    result = np.zeros((steps, len(seeds), count), np.float32)
    for image, (seed, begin) in enumerate(zip(seeds, first, strict=True)):
        if seed is not None:
            for step in range(steps):
                result[step, image] = uniforms(seed, begin + step, count)
    return result


def keys(seed: int, places: int) -> NDArray[np.int32]:
    """Keys of the fixed noise of `ops/race.py`, a function of (seed, place).

    Returns [places, ROUNDS] int32, 16 bits each.
    """
    key = np.array([seed, PLACES], dtype=np.uint64)
    raw = np.random.Philox(key=key).random_raw(places * ROUNDS) >> np.uint64(48)
    return raw.astype(np.int32).reshape(places, ROUNDS)
