"""The first captured function: the condition through the target, and the first image token.

Like the step it is a function of one `DecodeState`: no host read, no shape that depends on data, no Python value
that varies between calls.
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


class Prefill(nn.Module):
    """Begins the images of a batch."""

    def __init__(self, target: Target, drafting: Drafting | None, spec: Spec) -> None:
        super().__init__()
        self.target, self.drafting, self.spec = target, drafting, spec
        self.positions, self.sampler = Positions(target.config, spec), Sampler(target, spec)
        columns = token_columns(target.config, spec.tree)
        self.first = constant(arange32(spec.images) * columns)  # [B] each image's token 0

    def forward(self, state: DecodeState) -> Tensor:
        """Returns how many tokens of each image are known [B]."""
        hidden = self.read_prefix(state)
        probs = self.sampler(hidden[:, -1:], state)[:, 0]  # [B, V]
        root = self.sampler.token(probs, probs, state.first_uniform, state)
        if self.drafting is not None:
            self.drafting.begin(hidden, root, state)
        for tensor in (state.count, state.cursor, state.steps, state.accepted, state.relaxed):
            tensor.zero_()
        state.tokens.index_copy_(0, self.first.long(), root)
        state.root.copy_(root)
        return state.count + 1

    def read_prefix(self, state: DecodeState) -> Tensor:
        """The target over the prefix: features [R, P, H]."""
        width, start = self.target.config.prefix, torch.zeros_like(self.positions.row_start)
        mask = self.positions.mask(start, self.positions.causal[:width, :width])
        mask = additive_mask(prefix_mask(state.valid, mask), state.prefix.dtype)
        position = self.positions.arange[:width].expand(self.spec.rows, -1)
        rope, index = self.positions.rope(position, state), self.positions.cache_index(start, width)
        return self.target(state.prefix, rope, mask, state.kv_cache, index)
