"""From hidden states to probabilities and tokens: the target's head, guidance and the sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lantern_hpu.core import Sampling
from lantern_hpu.decode.spec import Spec
from lantern_hpu.decode.state import DecodeState, PrefillInput
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.transformer import Target
from lantern_hpu.ops.grammar import RowEnds
from lantern_hpu.ops.sampling import SamplingParams, topk_tokens


def sampling_params(
    sampling: Sequence[Sampling], vocabulary: int, device: torch.device | None = None
) -> SamplingParams:
    """Each image's parameters as tensors [B]; a filter that is off keeps everything."""

    def each(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    return SamplingParams(
        each(s.cfg_scale for s in sampling),
        each(s.temperature or 1.0 for s in sampling),
        each((vocabulary if s.greedy else s.top_k or vocabulary for s in sampling), torch.int32),
        each(1.0 if s.greedy else s.top_p for s in sampling),
        each((s.greedy for s in sampling), torch.bool),
    )


def make_grammar(config: TransformerConfig) -> RowEnds | None:
    """What decides which tokens a place may hold; None where every place may hold all."""
    return RowEnds(config.grid[1], config.tokens, config.vocab_size) if config.row_ends else None


class Sampler(nn.Module):
    """Everything after the last hidden state, for the images of one spec.

    What a picture's grammar forbids at a place gets no probability, of the target and of any drafter alike.
    """

    def __init__(self, target: Target, spec: Spec) -> None:
        super().__init__()
        self.head, self.kernels, self.spec = target.head, target.kernels, spec
        self.grammar, self.top_p_first = make_grammar(target.config), target.config.top_p_first
        self.width = target.config.dim

    def forward(
        self, hidden: Tensor, state: DecodeState | PrefillInput, depth: Tensor | int
    ) -> Tensor:
        """Probabilities of what comes after each feature: [R, T, H] -> [B, T, V] float32.

        Args:
            hidden: only its first H numbers are read; outputs of lower layers follow them.
            depth: [B, T] int32, or one for all: how far below the root each feature's token is; of images that begin,
                below the last token of their prefix.
        """
        spec, logits = self.spec, self.head(hidden[..., : self.width])
        if self.grammar is not None:
            first = state.slot * 0 if isinstance(state, PrefillInput) else state.count + 1  # [B]
            place = (first[:, None] + depth).expand(-1, hidden.shape[1])  # [B, T]
            logits = self.grammar(logits, torch.cat([place, place]) if spec.guidance else place)
        filters = (spec.guidance, spec.max_top_k, spec.use_top_p, self.top_p_first)
        return self.kernels.probs(logits, state.sampling, *filters)

    def token(
        self,
        probs: Tensor,
        greedy_probs: Tensor,
        uniform: Tensor,
        state: DecodeState | PrefillInput,
    ) -> Tensor:
        """One token an image [B]: drawn from probs [B, V], or the most probable of greedy_probs [B, V]."""
        if not self.spec.use_greedy:
            return self.kernels.sample(probs, uniform)
        best = topk_tokens(greedy_probs, 1)[..., 0]
        if not self.spec.use_sampled:
            return best
        return torch.where(state.sampling.greedy, best, self.kernels.sample(probs, uniform))

    def distinct(self, probs: Tensor, uniform: Tensor, state: DecodeState) -> Tensor:
        """Children of each node [B, w, c] from probs [B, w, V]: drawn, or the most probable if greedy."""
        if not self.spec.use_greedy:
            return self.kernels.sample_distinct(probs, uniform)
        best = topk_tokens(probs, uniform.shape[-1])
        if not self.spec.use_sampled:
            return best
        drawn = self.kernels.sample_distinct(probs, uniform)
        return torch.where(state.sampling.greedy[:, None, None], best, drawn)
