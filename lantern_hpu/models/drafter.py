"""The EAGLE drafter: one block that guesses the target's next feature from the last one.

Entry i of its sequence is made from (target feature h_i, embedding of token i+1) and guesses h_{i+1};
the target's head turns that into a guess of token i+2. (EAGLE, arXiv 2401.15077; LlamaGen's drafter has
no norm before the attention, Anole's has one.) It may read outputs of lower target layers too, as EAGLE-3 does
(arXiv 2503.01840): they are normalised, projected and added to the last feature.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lantern_hpu.models.config import DrafterConfig, TransformerConfig
from lantern_hpu.models.transformer import Block, RMSNorm
from lantern_hpu.ops.kernels import PLAIN, Kernels
from lantern_hpu.ops.kv_cache import GrowingCache, LayerCache


class AuxInput(nn.Module):
    """What the outputs of one lower layer of the target add to its last features."""

    def __init__(self, config: TransformerConfig, kernels: Kernels) -> None:
        super().__init__()
        self.norm = RMSNorm(config, kernels)
        self.linear = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [R, T, H] -> [R, T, H]
        return self.linear(self.norm(x))


class Drafter(nn.Module):
    """Embedding, fc over [embedding, feature], one block; no final norm and no head of its own."""

    def __init__(
        self,
        target: TransformerConfig,
        drafter_config: DrafterConfig = DrafterConfig(),
        kernels: Kernels = PLAIN,
    ) -> None:
        """
        Args:
            target: sizes of the target. drafter_config: where the drafter differs.
        """
        super().__init__()
        self.drafter_config, self.config = drafter_config, drafter_config.sizes(target)
        self.sees_pads, self.shift = drafter_config.sees_pads, drafter_config.shift
        self.aux_layers = drafter_config.aux_layers
        self.embed = nn.Embedding(target.embed_rows or target.vocab_size, target.dim)
        self.fc = nn.Linear(2 * target.dim, target.dim)
        self.block = Block(self.config, kernels, drafter_config.input_norm)
        self.aux = nn.ModuleList(AuxInput(self.config, kernels) for _ in self.aux_layers)

    @property
    def feature_width(self) -> int:
        """H * (1 + n): of the target's features, with the outputs of n lower layers behind the last ones."""
        return self.config.dim * (1 + len(self.aux_layers))

    def forward(
        self,
        tokens: Tensor,  # [R, T] int, token i + shift of each entry i
        # [R, T, H * (1 + n)], feature i of the target with n lower layers; [R, T, H], the parent's guess in the tree
        features: Tensor,
        rope: Tensor,  # [R, T, 2, hd / 2], of the target's position i + 1
        mask: Tensor,  # [R, 1, T, S] additive
        cache: LayerCache | GrowingCache | None = None,
        index: Tensor | None = None,  # [R * T], where in the cache to write
    ) -> Tensor:
        """Guessed features [R, T, H] of the next position, in the head's input space."""
        features, *aux = features.split(self.config.dim, -1)
        for read, x in zip(self.aux, aux, strict=False):  # a guess has none
            features = features + read(x)
        x = self.fc(torch.cat([self.embed(tokens), features], -1))
        return self.block(x, rope, mask, cache, index)
