"""Two reference lines of a device, measured: how fast it copies memory, and how fast it multiplies matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_hpu.backends.base import Backend
from lantern_hpu.lab.clock import seconds_of

COPIED = 256 * 2**20  # bytes of the copied tensor: more than a cache holds
LARGEST = 8192  # rows and columns of the largest product tried
ENOUGH = 0.02  # seconds of one timing; products that take as long are large enough
TIMES = 5  # timings of each; the fastest is kept, as a floor is what can be reached


@dataclass(frozen=True)
class MeasuredRates:
    """As reports have them; `bf16_operations_per_s` is None where the device has no bfloat16."""

    copy_bytes_per_s: float
    bf16_operations_per_s: float | None
    operations_per_s: float  # in the run's own format
    how: str = (
        f"fastest of {TIMES}: one tensor of {COPIED // 2**20} MiB copied to another, counted as read "
        f"and written; square matrix products of growing size up to {LARGEST}"
    )


def least_seconds(backend: Backend, function: Callable[[], object]) -> float:
    """Least time of a call; short ones are timed several in a row."""
    seconds_of(backend, function)
    calls = max(1, round(ENOUGH / seconds_of(backend, function)))
    return min(seconds_of(backend, function, calls) for _ in range(TIMES))


@torch.no_grad()
def copy_bandwidth(backend: Backend) -> float:
    """Bytes a second of one tensor copied to another: each byte is read once and written once."""
    source = torch.ones(COPIED // 4, dtype=torch.float32, device=backend.device)
    goal = torch.zeros_like(source)
    return 2 * COPIED / least_seconds(backend, lambda: goal.copy_(source))


@torch.no_grad()
def matrix_rate(backend: Backend, dtype: torch.dtype) -> float:
    """Operations a second of a square matrix product; the size grows until a product takes long enough."""
    size, best = 256, 0.0
    while True:
        left = torch.ones(size, size, dtype=dtype, device=backend.device)
        right, product = torch.ones_like(left), torch.empty_like(left)

        def multiply(a: Tensor = left, b: Tensor = right, out: Tensor = product) -> Tensor:
            return torch.mm(a, b, out=out)

        taken = least_seconds(backend, multiply)
        best = max(best, 2 * size**3 / taken)
        if taken >= ENOUGH or size >= LARGEST:
            return best
        size *= 2


def measure_rates(backend: Backend, dtype: torch.dtype) -> MeasuredRates:
    """The reference lines for a report.

    Args:
        dtype: of the run; its floor is counted with the matrix rate of this format.
    """
    with backend.errors():
        matrices = matrix_rate(backend, dtype)
        bf16: float | None = matrices
        if dtype != torch.bfloat16:
            known = "bfloat16" in backend.dtypes
            bf16 = matrix_rate(backend, torch.bfloat16) if known else None
        return MeasuredRates(copy_bandwidth(backend), bf16, matrices)
