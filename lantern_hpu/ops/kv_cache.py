"""Keys and values of committed tokens, in preallocated storage of each layer's own.

A recorded function writes each of these tensors once, by one `index_copy_`: several writes into one tensor are not
safe with every compiler, nor are several tensors that share a storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LayerCache:
    """One layer's. The storage is flat, so that one `index_copy_` serves rows whose lengths differ.

    The storage index of (row, position) is row * S + position.
    """

    k: Tensor  # [R * S, kv_heads, hd]
    v: Tensor  # [R * S, kv_heads, hd]
    rows: int  # R

    def prepare_write(self) -> tuple[Tensor, Tensor]:
        """Called once a pass: the tensors [R * S, kv_heads, hd] that it writes into."""
        return self.k, self.v

    def read(self) -> tuple[Tensor, Tensor]:
        """Views [R, S, kv_heads, hd]."""
        shape = (self.rows, -1)
        return self.k.unflatten(0, shape), self.v.unflatten(0, shape)


@dataclass
class ScratchCache(LayerCache):
    """What several passes of one step write, none of which is kept: each pass writes into a copy of its own."""

    def prepare_write(self) -> tuple[Tensor, Tensor]:
        """Clones what the passes before have written."""
        self.k = self.k.clone()
        self.v = self.v.clone()
        return self.k, self.v


@dataclass
class WrittenCache(LayerCache):
    """A layer of which a pass reads just what it writes, and so costs the same however large the cache is."""

    index: Tensor  # [n * T] int32, storage indices, as the pass writes them
    written_rows: int  # n

    def read(self) -> tuple[Tensor, Tensor]:
        """Copies [n, T, kv_heads, hd]."""
        shape = (self.written_rows, -1)
        k, v = self.k.index_select(0, self.index), self.v.index_select(0, self.index)
        return k.unflatten(0, shape), v.unflatten(0, shape)


@dataclass
class GrowingCache:
    """A layer's keys and values of all passes so far, which keep their gradients: for training."""

    k: list[Tensor] = field(default_factory=list)  # each [R, T, kv_heads, hd]
    v: list[Tensor] = field(default_factory=list)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add a pass. -> those of all passes [R, passes * T, kv_heads, hd]"""
        self.k.append(k)
        self.v.append(v)
        return torch.cat(self.k, 1), torch.cat(self.v, 1)


@dataclass
class KVCache:
    """The layers of a network."""

    layers: tuple[LayerCache, ...]

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
        by_head: bool = False,
    ) -> KVCache:
        """Zeros: positions not yet written are masked, and must hold finite numbers to stay harmless.

        In memory all positions of a head lie together (`by_head`), or all heads of a position. Shapes are the same.
        """

        def zeros() -> Tensor:
            if by_head:
                shape = kv_heads, rows * capacity, head_dim
                return torch.zeros(shape, dtype=dtype, device=device).transpose(0, 1)
            return torch.zeros(rows * capacity, kv_heads, head_dim, dtype=dtype, device=device)

        return cls(tuple(LayerCache(zeros(), zeros(), rows) for _ in range(layers)))

    def written(self, index: Tensor, rows: int) -> KVCache:
        """The cache for a pass of some rows whose tokens attend to each other alone; see `WrittenCache`."""
        layers = (WrittenCache(one.k, one.v, one.rows, index, rows) for one in self.layers)
        return KVCache(tuple(layers))
