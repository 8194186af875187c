"""Keys and values of committed tokens in preallocated, flat storage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class KVCache:
    """Static key/value cache.

    The base layout is flat so that one `index_copy_` serves rows whose lengths differ, and one gather
    commits a path in all layers: the storage index of (layer, row, position) is (layer * R + row) * S + position.
    """

    k: Tensor  # [layers * R * S, kv_heads, hd]
    v: Tensor  # [layers * R * S, kv_heads, hd]
    layers: int
    rows: int  # R
    capacity: int  # S

    @classmethod
    def allocate(
        cls,
        layers: int,
        rows: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """Zeros: positions not yet written are masked, and must hold finite numbers to stay harmless."""
        shape = (layers * rows * capacity, kv_heads, head_dim)
        k = torch.zeros(shape, dtype=dtype, device=device)
        v = torch.zeros(shape, dtype=dtype, device=device)
        return cls(k, v, layers, rows, capacity)

    def start(self, layer: int) -> int:
        """The storage index where a layer begins."""
        return layer * self.rows * self.capacity

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views [R, S, kv_heads, hd] of one layer."""
        shape = (self.layers, self.rows, self.capacity)
        return self.k.unflatten(0, shape)[layer], self.v.unflatten(0, shape)[layer]

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy positions to others in every layer, gathering all before writing any.

        Args:
            source, destination: [layers * n] int32 storage indices; destination holds no value twice.
        """
        goal = destination.long()  # `index_copy_` takes no other
        self.k.index_copy_(0, goal, self.k.index_select(0, source))
        self.v.index_copy_(0, goal, self.v.index_select(0, source))
