"""What begins images: the condition through the target, and the first image token, in slots that the host names.

Like the step it is a function of one `DecodeState`: no host read, no shape that depends on data, no Python value
that varies between calls. Two recordings of it exist: for all slots at once, and for one slot while the others go
on; what lies in other slots is neither read nor written.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lantern_hpu.decode.drafting import Drafting
from lantern_hpu.decode.positions import Positions
from lantern_hpu.decode.sampler import Sampler
from lantern_hpu.decode.spec import Spec, token_columns
from lantern_hpu.decode.state import DecodeState
from lantern_hpu.models.transformer import Target
from lantern_hpu.ops.buffers import arange32, constant
from lantern_hpu.ops.masks import additive_mask, prefix_mask


class Admit(nn.Module):
    """Begins the A images of `state.entry`."""

    def __init__(self, target: Target, drafting: Drafting | None, spec: Spec) -> None:
        super().__init__()
        self.target, self.drafting, self.spec = target, drafting, spec
        self.positions, self.sampler = Positions(target.config, spec), Sampler(target, spec)
        columns = token_columns(target.config, spec.tree)
        self.first = constant(arange32(spec.images) * columns)  # [B] each image's token 0
        self.aux_layers = drafting.aux_layers if drafting is not None else ()

    def forward(self, state: DecodeState) -> Tensor:
        """Returns how many tokens of each image are known [B]."""
        entry = state.entry
        rows, slot = self.positions.rows_of(entry.slot), entry.slot.long()
        hidden = self.read_prefix(rows, state)  # [RA, P, F]
        probs = self.sampler(hidden[:, -1:], entry, 0)[:, 0]  # [A, V]
        root = self.sampler.token(probs, probs, entry.first_uniform, entry)  # [A]
        if self.drafting is not None:
            self.drafting.begin(hidden, root, rows, state)
        for goal, news in entry.by_row(state):
            goal.index_copy_(0, rows.long(), news)
        for goal, news in entry.by_slot(state):
            goal.index_copy_(0, slot, news)
        if state.moves is not None:
            places = self.positions.arange[: self.spec.tree.depth]
            idle = self.positions.idle(torch.zeros_like(entry.slot), places)
            state.moves.source.index_copy_(0, slot, idle)
            state.moves.goal.index_copy_(0, slot, idle)
        for counter in state.counters:
            counter.index_fill_(0, slot, 0)
        state.tokens.index_copy_(0, self.first[entry.slot].long(), root)
        state.root.index_copy_(0, slot, root)
        return state.known.copy_(state.count + 1)

    def read_prefix(self, rows: Tensor, state: DecodeState) -> Tensor:
        """The target over the prefixes, each of which attends to itself alone: features [RA, P, F]."""
        entry, width = state.entry, self.target.config.prefix
        causal = self.positions.causal[:width, :width]
        mask = additive_mask(prefix_mask(entry.valid[:, :width], causal), entry.dtype)
        position = self.positions.arange[:width].expand(len(rows), -1)
        index = self.positions.entry_index(rows, width)
        cache = state.kv_cache.written(index, len(rows))
        rope = self.positions.rope(position, entry)
        return self.target(entry.prefix, rope, mask, cache, index, aux_layers=self.aux_layers)
