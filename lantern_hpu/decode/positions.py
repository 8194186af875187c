"""Positions of tokens: cache positions, rotary angles and masks, as constants on the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lantern_hpu.decode.spec import Spec, capacity
from lantern_hpu.decode.state import DecodeState, Moves, PrefillInput
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.transformer import Rotary
from lantern_hpu.ops.buffers import arange32, causal_mask, constant
from lantern_hpu.ops.sampling import gather


class Positions(nn.Module):
    def __init__(self, config: TransformerConfig, spec: Spec) -> None:
        super().__init__()
        tree = spec.tree
        size = capacity(config, tree)
        self.images, self.guidance = spec.images, spec.guidance
        self.prefix, self.size, self.nodes, self.depth = config.prefix, size, tree.size, tree.depth
        width = max(config.prefix, tree.depth + 1)
        last = config.prefix + config.tokens + tree.depth
        self.rotary = Rotary(config, last + 1)
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

    def rope(self, position: Tensor, state: DecodeState | PrefillInput) -> Tensor:
        """Cosines and sines at cache positions [R, T]: [R, T, 2, hd / 2]."""
        return self.rotary(position, state.pads).to(state.dtype)

    def cache_index(self, start: Tensor, width: int) -> Tensor:
        """Storage indices of `width` positions from start [R]: [R * width]."""
        return (self.row_start + start)[:, None].add(self.arange[:width]).flatten()

    def entry_index(self, rows: Tensor, width: int) -> Tensor:
        """Storage indices of the first `width` positions of some rows [RA]: [RA * width]."""
        return self.row_start[rows][:, None].add(self.arange[:width]).flatten()

    # -- the accepted path

    def moves(self, path: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """How the keys of an accepted path come to lie together, behind the committed ones.

        Args:
            path: [B, D + 1], its nodes from the root on, the last one repeated.
            before, after: [B] image tokens in the cache (t) before and after the step.

        Returns cache positions, where from and where to: [B, D] each, no goal twice. What does not belong to the path
        stays where it is, at positions that the next step does not write.
        """
        start, order = (self.prefix + before)[:, None], self.arange[: self.depth]  # [B, 1], [D]
        # [B] drafts that stay; of an image that is done fewer than were accepted
        kept = (after - before - 1).clamp(min=0)
        place = order - kept[:, None]  # [B, D] negative for those
        idle = self.idle(after, place.clamp(min=0))
        source = torch.where(place < 0, start + path[:, 1:], idle)
        return source, torch.where(place < 0, start + order + 1, idle)

    def idle(self, count: Tensor, place: Tensor) -> Tensor:
        """Cache positions that a step of images with `count` [B] tokens does not write: [B, D].

        They follow its nodes, and go on at the front of the row; `place` [B, D] or [D] says which of them.
        """
        position = (self.prefix + count + self.nodes)[:, None] + place
        return torch.where(position < self.size, position, position - self.size)

    def with_moves(self, index: Tensor, moves: Moves) -> tuple[Tensor, Tensor]:
        """Storage indices of a step's one write: of what moves and of its new nodes [R * M]; and where the former is.

        Returns [R * (D + M)] and [R * D].
        """
        start, rows = self.row_start[:, None], len(self.row_start)
        goal, source = start + self.per_row(moves.goal), start + self.per_row(moves.source)
        return torch.cat([goal, index.unflatten(0, (rows, -1))], 1).flatten(), source.flatten()

    def mask(self, start: Tensor, table: Tensor) -> Tensor:
        """What queries behind `start` [R] committed positions attend to [R, T, S] bool: those, and each other by table.

        The table is [T, X] bool, or one a row [R, T, X]; column x is position start + x.
        """
        offset = self.positions - start[:, None]  # [R, S]
        inside = (offset >= 0) & (offset < table.shape[-1])
        column = offset.clamp(0, table.shape[-1] - 1)
        table = table.expand(len(start), -1, -1)
        local = gather(table, 2, column[:, None].expand(-1, table.shape[1], -1))
        return (offset < 0)[:, None] | (local & inside[:, None])
