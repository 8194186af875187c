"""Constants of modules: made once, they move with their module, and no step makes them anew. And copies to a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def constant(values: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A buffer that is not saved; whole numbers become int32: a Gaudi in lazy mode stores no others.

    Args:
        values: a tensor, or nested lists. dtype: where lists may be empty.
    """
    data = torch.as_tensor(values, dtype=dtype)
    return nn.Buffer(data.int() if data.dtype == torch.int64 else data, persistent=False)


# A new tensor of the host on a device; None leaves it where it is
ToDevice = Callable[[Tensor, torch.device | None], Tensor]


def to_device(values: Tensor, device: torch.device | None) -> Tensor:
    """The plain form, for which the host may wait; `Queue.to_device` is a device's own."""
    return values.to(device)


def arange32(size: int) -> Tensor:
    """0 .. size - 1 as int32."""
    return torch.arange(size, dtype=torch.int32)
