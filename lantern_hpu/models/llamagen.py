"""LlamaGen's condition: caption features through an MLP, in front of the image tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CaptionProjection(nn.Module):
    """Caption features to prefix embeddings, and the learned features of "no caption".

    Pads are exact zeros and stay zeros, since neither layer has a bias.
    """

    def __init__(self, caption_dim: int, dim: int, prefix: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(caption_dim, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)
        self.uncond = nn.Parameter(torch.randn(prefix, caption_dim) / caption_dim**0.5)

    def forward(self, features: Tensor) -> Tensor:
        """[.., P, caption_dim] features -> [.., P, H] embeddings."""
        return self.fc2(F.gelu(self.fc1(features), approximate="tanh"))

    def rows(self, features: Tensor, valid: Tensor, guidance: bool) -> tuple[Tensor, Tensor]:
        """Prefix embeddings of all rows: conditional ones first, then unconditional ones.

        Args:
            features: [B, P, caption_dim], zero at pads.
            valid: [B, P] bool.

        Returns embeddings [R, P, H] and valid [R, P]. The unconditional rows use the caption's mask,
        as LlamaGen's sampler does.
        """
        if not guidance:
            return self(features), valid
        uncond = self.uncond.expand_as(features)
        return self(torch.cat([features, uncond])), torch.cat([valid, valid])
