"""Where tokens stand: cache positions, rotary angles and masks, as constants on the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lantern_hpu.decode.spec import Spec, capacity
from lantern_hpu.decode.state import DecodeState, Entry
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.transformer import rope_table
from lantern_hpu.ops.buffers import arange32, constant
from lantern_hpu.ops.masks import causal_mask
from lantern_hpu.ops.sampling import gather


class Positions(nn.Module):
    """Of one spec."""

    def __init__(self, config: TransformerConfig, spec: Spec) -> None:
        super().__init__()
        tree = spec.tree
        self.images, self.guidance = spec.images, spec.guidance
        self.skips_pads = config.rope == "1d"
        size = capacity(config, tree)
        width = max(config.prefix, tree.depth + 1)
        last = config.prefix + config.tokens + tree.depth
        self.rotations = constant(rope_table(config, last + 1))
        self.positions = constant(arange32(size))  # [S]
        self.row_start = constant(arange32(spec.rows) * size)  # [R]
        self.causal = constant(causal_mask(width))
        self.arange = constant(arange32(max(width, tree.size, tree.max_children)))

    def per_row(self, x: Tensor) -> Tensor:
        """[B, ...] -> [R, ...]: an image's rows always hold the same tokens at the same positions."""
        return torch.cat([x, x]) if self.guidance else x

    def rows_of(self, slot: Tensor) -> Tensor:
        """The rows of slots [A]: [RA], those with the condition first."""
        return torch.cat([slot, slot + self.images]) if self.guidance else slot

    def rope(self, position: Tensor, state: DecodeState | Entry) -> Tensor:
        """Cosines and sines at cache positions [R, T]: [R, T, 2, hd / 2]. Where text is 1-D, pads do not count."""
        if self.skips_pads:
            position = (position - state.pads[:, None]).clamp(min=0)
        return self.rotations[position].to(state.dtype)

    def cache_index(self, start: Tensor, width: int) -> Tensor:
        """Storage indices of `width` positions from start [R]: [R * width]."""
        return (self.row_start + start)[:, None].add(self.arange[:width]).flatten()

    def entry_index(self, rows: Tensor, width: int) -> Tensor:
        """Storage indices of the first `width` positions of some rows [RA]: [RA * width]."""
        return self.row_start[rows][:, None].add(self.arange[:width]).flatten()

    def mask(self, start: Tensor, table: Tensor) -> Tensor:
        """What queries behind `start` committed positions attend to: those positions, and each other by table.

        Args:
            start: [R]. table: [T, X] bool, or one a row [R, T, X]; column x is position start + x.

        Returns [R, T, S] bool.
        """
        offset = self.positions - start[:, None]  # [R, S]
        inside = (offset >= 0) & (offset < table.shape[-1])
        column = offset.clamp(0, table.shape[-1] - 1)
        table = table.expand(len(start), -1, -1)
        local = gather(table, 2, column[:, None].expand(-1, table.shape[1], -1))
        return (offset < 0)[:, None] | (local & inside[:, None])
