"""Which tokens a place may hold, in pictures whose rows of codes are closed by a token of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lantern_hpu.ops.buffers import arange32, constant

# Finite, so that guidance, u + s (c - u), stays a number; e to this power is 0 after any temperature.
NEVER = -1e30


class RowEnds(nn.Module):
    """The last token of the vocabulary closes each row of n columns of codes, and is nowhere else.

    Places past the N tokens, row ends included, count as the last.
    """

    def __init__(self, columns: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.last = tokens - 1
        self.closes = constant((arange32(tokens) + 1) % (columns + 1) == 0)  # [N]
        self.is_end = constant(arange32(vocabulary) == vocabulary - 1)  # [V]

    def forward(self, logits: Tensor, place: Tensor) -> Tensor:
        """Forbid, in logits [R, T, V], what places [R, T] int32 of the picture may not hold."""
        forbidden = self.closing(place)[..., None] != self.is_end
        return logits.masked_fill(forbidden, max(NEVER, torch.finfo(logits.dtype).min))

    def closing(self, place: Tensor) -> Tensor:
        """Which places [R, T] are rows' ends: [R, T] bool."""
        return self.closes[place.clamp(max=self.last)]

    def force_probs(self, probs: Tensor, place: Tensor) -> Tensor:
        """Probabilities of codes [R, T, V], taken from elsewhere, for these places [R, T]: rows' ends are certain."""
        return torch.where(self.closing(place)[..., None], self.is_end.to(probs.dtype), probs)
