"""A device's own forms of kernels, before anybody uses them: each is held to its plain twin by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Example = tuple[Sequence[Any], Sequence[Tensor]]  # arguments, outcome
# What software without the kernel, or with other arguments for it, raises
LACKING = (ImportError, AttributeError, TypeError, RuntimeError)


@dataclass(frozen=True)
class Candidate:
    """A device's own form of a kernel of `Kernels`.

    Attributes:
        make: gives it; raises where the device's software lacks it.
        examples: calls, and what comes of the plain twin.
        tolerance: the largest difference to it, absolute for small numbers and relative for large ones.
    """

    make: Callable[[], Callable[..., Any]]
    examples: Sequence[Example]
    tolerance: float

    def apart(self) -> float:
        """The largest difference over all examples; infinite where types differ or a number is none."""
        kernel = self.make()
        with torch.no_grad():
            got = on_host([x for given, _ in self.examples for x in outcome(kernel, given)])
        wanted = [want for _, results in self.examples for want in results]
        return max(difference(*pair) for pair in zip(got, wanted, strict=True))

    def agrees(self) -> bool:
        return self.apart() <= self.tolerance


def on_host(results: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors, those of a number format in one: each copy waits for a card."""
    found = list(results)
    for dtype in {x.dtype for x in found}:
        same = [i for i, x in enumerate(found) if x.dtype == dtype]
        flat = torch.cat([found[i].flatten() for i in same]).cpu()
        for i, part in zip(same, flat.split([found[i].numel() for i in same]), strict=True):
            found[i] = part.view(found[i].shape)
    return found


def difference(got: Tensor, want: Tensor) -> float:
    """The largest |got - want| / (1 + |want|); whole numbers are equal, or infinitely apart."""
    got, want = got.cpu(), want.cpu()
    if got.dtype != want.dtype or got.shape != want.shape:
        return float("inf")
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else float("inf")
    got, want = got.double(), want.double()
    same, apart = got == want, (got - want).abs() / (1 + want.abs())
    apart = apart.masked_fill(same, 0.0)  # equal infinities are NaN apart
    return float(apart.nan_to_num(float("inf"), float("inf")).max()) if apart.numel() else 0.0


def outcome(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    """What a call returns, and the tensors it was given as it leaves them: some are written to."""
    given = deepcopy(arguments)
    results = function(*given)
    return (*(results if isinstance(results, tuple) else (results,)), *tensors(given))


def tensors(arguments: Sequence[Any]) -> Sequence[Tensor]:
    """Those among arguments, and in the tuples among them."""
    nested = [tensors(x) if isinstance(x, tuple) else [x] for x in arguments]
    return [x for part in nested for x in part if isinstance(x, Tensor)]
