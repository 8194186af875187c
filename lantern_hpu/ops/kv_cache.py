"""Keys and values of committed tokens in preallocated, flat storage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class WrittenKeys:
    """A cache of which a pass reads just what it writes, and so costs the same however large the cache is."""

    whole: KVCache
    index: Tensor  # [n * T] int32, storage indices in a layer, as the pass writes them
    rows: int  # n

    @property
    def k(self) -> Tensor:
        return self.whole.k

    @property
    def v(self) -> Tensor:
        return self.whole.v

    def start(self, layer: int) -> int:
        return self.whole.start(layer)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Copies [n, T, kv_heads, hd] of one layer."""
        index = self.index + self.start(layer)
        k, v = self.k.index_select(0, index), self.v.index_select(0, index)
        return k.unflatten(0, (self.rows, -1)), v.unflatten(0, (self.rows, -1))


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

    def written(self, index: Tensor, rows: int) -> WrittenKeys:
        """The cache for a pass of some rows whose tokens attend to each other alone; index as in `WrittenKeys`."""
        return WrittenKeys(self, index, rows)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy positions to others in every layer, gathering all before writing any.

        Args:
            source, destination: [layers * n] int32 storage indices; destination holds no value twice.
        """
        goal = destination.long()  # `index_copy_` takes no other
        self.k.index_copy_(0, goal, self.k.index_select(0, source))
        self.v.index_copy_(0, goal, self.v.index_select(0, source))
