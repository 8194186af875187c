"""Modules with tables that are made once and live on the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Constants(nn.Module):
    """Tables become buffers, so that they move with the module and no step makes them anew."""

    def constant(self, name: str, value: Tensor | None) -> None:
        """Whole numbers become int32: a Gaudi in lazy mode stores no others."""
        if value is not None and value.dtype == torch.int64:
            value = value.int()
        self.register_buffer(name, value, persistent=False)


def count_up(size: int) -> Tensor:
    """0 .. size - 1 as int32."""
    return torch.arange(size, dtype=torch.int32)
