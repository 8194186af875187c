"""Constants of modules, made once so that no step makes them; masks; copies to a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def causal_mask(width: int) -> Tensor:
    """[width, width] bool: a query attends to what comes before it, and to itself."""
    return torch.ones(width, width, dtype=torch.bool).tril()


def prefix_mask(valid: Tensor, mask: Tensor) -> Tensor:
    """A causal mask over a left-padded sequence.

    A real token attends to real tokens before it; a pad to the pads before it, so that no row is empty and
    the drafter reads the same pad features on every device.

    Args:
        valid: [R, S] bool, False at pads; S = T, or the positions of a cache whose first T are the queries.
        mask: [T, S] or [R, T, S] bool, what each query attends to but for pads.

    Returns [R, T, S] bool.
    """
    return mask & (valid[:, None] | ~valid[:, : mask.shape[-2], None])


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Boolean mask [R, T, S] as the additive one [R, 1, T, S] that attention takes.

    The floor is finite: a row that attends to nothing must not become NaN.
    """
    floor = torch.finfo(dtype).min
    return (~mask).to(dtype).mul(floor).unsqueeze(1)


def constant(values: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A buffer that is not saved; whole numbers become int32: a Gaudi in lazy mode stores no others.

    Values are a tensor, or nested lists; where those may be empty, dtype says their type.
    """
    data = torch.as_tensor(values, dtype=dtype)
    return nn.Buffer(data.int() if data.dtype == torch.int64 else data, persistent=False)


class Choice(nn.Module):
    """Which entries of a dimension, always the same ones; those that follow each other are a view."""

    def __init__(self, index: Sequence[int]) -> None:
        super().__init__()
        self.start, self.count = min(index, default=0), len(index)
        follows = list(index) == list(range(self.start, self.start + self.count))
        self.index = None if follows else constant(index, torch.int32)

    def forward(self, x: Tensor, dim: int = 1) -> Tensor:
        # Not by brackets: an index beside a full dimension leaves the graph of some compilers.
        if self.index is None:
            return x.narrow(dim, self.start, self.count)
        return x.index_select(dim, self.index)


# A new tensor of the host on a device; None leaves it where it is
ToDevice = Callable[[Tensor, torch.device | None], Tensor]


def to_device(values: Tensor, device: torch.device | None) -> Tensor:
    """The plain form, for which the host may wait; `Transfers.to_device` is a device's own."""
    return values.to(device)


def arange32(size: int) -> Tensor:
    """0 .. size - 1 as int32."""
    return torch.arange(size, dtype=torch.int32)


def leave(module: nn.Module) -> None:
    """What is done to a module that runs outside of the step, where that is not compiled: nothing."""
