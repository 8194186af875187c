"""The EAGLE drafter: one block that guesses the target's next feature from the last one.

Entry i of its sequence is made from (target feature h_i, embedding of token i+1) and guesses h_{i+1};
the target's head turns that into a guess of token i+2. (EAGLE, arXiv 2401.15077; LlamaGen's drafter has
no norm before the attention, Anole's has one.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lantern_hpu.cache import KVCache
from lantern_hpu.kernels import PLAIN, Kernels
from lantern_hpu.models.transformer import Block, TransformerConfig


class Drafter(nn.Module):
    """Embedding, fc over [embedding, feature], one block; no final norm and no head of its own."""

    def __init__(
        self,
        config: TransformerConfig,
        input_norm: bool = False,
        sees_pads: bool = False,
        shift: int = 1,
        kernels: Kernels = PLAIN,
    ) -> None:
        """
        Args:
            config: the target's, with `layers` ignored; `norm_eps` may be the drafter's own.
            input_norm: whether the block normalises its input (Anole).
            sees_pads: whether padded condition slots are visible (LlamaGen's published drafters).
            shift: 1 where entry i reads token i + 1, as EAGLE does; 0 where it reads token i, as a drafter
                trained on unshifted tokens does. Such a one guesses alike below all siblings.
        """
        super().__init__()
        self.config, self.sees_pads, self.shift = config, sees_pads, shift
        self.embed = nn.Embedding(config.embed_rows or config.vocab_size, config.dim)
        self.fc = nn.Linear(2 * config.dim, config.dim)
        self.block = Block(config, kernels, input_norm)

    def forward(
        self,
        tokens: Tensor,  # [R, T] int, token i + shift of each entry i
        features: Tensor,  # [R, T, H], feature i: the target's, or the parent's guess in the tree
        rope: Tensor,  # [R, T, 2, hd / 2], of target slot i+1
        mask: Tensor,  # [R, 1, T, S] additive
        cache: KVCache | None = None,
        slots: Tensor | None = None,  # [R * T]
    ) -> Tensor:
        """Guessed features [R, T, H] of the next slot, in the head's input space."""
        x = self.fc(torch.cat([self.embed(tokens), features], -1))
        return self.block(x, rope, mask, 0, cache, slots)
