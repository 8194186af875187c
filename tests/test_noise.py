"""Randomness is a function of (seed, step, slot) and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from lantern_hpu.ops.sampling import uniform_block, uniforms

SEEDS = [0, 1, 42, 2**63 - 1, 2**64 - 1]
# The first six numbers times 2^24.
GOLDEN = {
    (0, 0): [8405392, 9249061, 11506698, 9638000, 3913011, 7607965],
    (42, 7): [14861390, 13674475, 12170271, 3617154, 9799569, 6371983],
    (2**63 - 1, 1000): [6792251, 11822479, 7143033, 8478985, 8656, 15985700],
}


def test_values_never_change_between_releases() -> None:
    assert (uniforms(0, 0, 6) * 2**24).astype(int).tolist() == GOLDEN[0, 0]
    assert (uniforms(42, 7, 6) * 2**24).astype(int).tolist() == GOLDEN[42, 7]
    assert (uniforms(2**63 - 1, 1000, 6) * 2**24).astype(int).tolist() == GOLDEN[2**63 - 1, 1000]


def test_number_does_not_depend_on_how_many_are_asked_for() -> None:
    long = uniforms(5, 3, 300)
    for slots in (1, 2, 3, 4, 5, 63, 64, 299):
        assert np.array_equal(uniforms(5, 3, slots), long[:slots])


def test_number_does_not_depend_on_batch_or_block() -> None:
    whole = uniform_block(SEEDS, first=1, steps=6, count=9)
    assert whole.shape == (6, 5, 9) and whole.dtype == np.float32
    assert np.array_equal(uniform_block([42], 4, 2, 9)[:, 0], whole[3:5, 2])
    assert np.array_equal(uniform_block(SEEDS[::-1], 1, 6, 9), whole[:, ::-1])
    for step in range(6):
        for image, seed in enumerate(SEEDS):
            assert np.array_equal(uniforms(seed, step + 1, 9), whole[step, image])


def test_seeds_and_steps_do_not_share_numbers() -> None:
    rows = [tuple(uniforms(seed, step, 8)) for seed in range(50) for step in range(50)]
    assert len(set(rows)) == len(rows)
    assert len({x for row in rows for x in row}) > 0.99 * 8 * len(rows)


def test_numbers_are_uniform_below_one() -> None:
    numbers = uniform_block(range(100), 0, 100, 60).ravel()
    assert numbers.min() >= 0 and numbers.max() < 1
    spread = 1 / np.sqrt(12 * numbers.size)
    assert abs(numbers.mean() - 0.5) < 5 * spread
    assert numbers.var() == pytest.approx(1 / 12, rel=0.01)
    counts = np.histogram(numbers, 64, (0, 1))[0]
    chi2 = ((counts - numbers.size / 64) ** 2 / (numbers.size / 64)).sum()
    assert chi2 < 63 + 5 * np.sqrt(2 * 63)


def test_neighbouring_numbers_are_not_correlated() -> None:
    numbers = uniform_block(range(64), 0, 64, 32).astype(np.float64) - 0.5
    for axis in range(3):  # steps, seeds, slots
        ahead = np.take(numbers, range(1, numbers.shape[axis]), axis)
        behind = np.take(numbers, range(numbers.shape[axis] - 1), axis)
        assert abs((ahead * behind).mean() * 12) < 5 / np.sqrt(ahead.size)
