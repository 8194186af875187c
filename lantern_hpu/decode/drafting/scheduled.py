"""A window on a fixed schedule: in each step its first C places are made final, whatever they are.

So N tokens take ceil((N - 1) / C) steps after the first token, the same for every image, and nobody has to look at what
was accepted: nothing is. The chain of a step is C final tokens whose keys it writes, then the W places of the window.

The first of the C tokens follows the target's distribution given what stands before it. The others were drawn from
distributions q that rest on drafts a step old. The next step has today's distributions p of those places, so that
their total variation is known: by convexity a token's distribution, given the tokens before it, is on average no
further from the target's than that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_hpu.decode.drafting.base import Committed, Drafts
from lantern_hpu.decode.drafting.window import WindowDrafting, WindowState
from lantern_hpu.decode.spec import Spec
from lantern_hpu.decode.state import DecodeState
from lantern_hpu.models.transformer import Target
from lantern_hpu.ops.buffers import arange32, constant
from lantern_hpu.ops.sampling import gather, gather_rows


@dataclass
class ScheduledState(WindowState):
    """What is kept of a window and of the tokens that it made final."""

    # [B, C - 1, V] float32, what the last final tokens but their first were drawn from; None where there are none
    final: Tensor | None


class ScheduledDrafting(WindowDrafting):
    """Drafts, and the tokens that are made of them."""

    def __init__(self, target: Target, spec: Spec) -> None:
        super().__init__(target, spec)
        self.final = self.tree.commit  # C
        self.node = constant(arange32(self.tree.size))  # [C + W]

    def allocate(
        self, dtype: torch.dtype, device: torch.device, by_head: bool = False
    ) -> ScheduledState:
        b, v = self.spec.images, self.config.vocab_size
        kept = super().allocate(dtype, device)
        q = kept.q if self.tree.rule == "sjd-pac" else None  # that no other rule asks for
        final = torch.zeros(b, self.final - 1, v, device=device) if self.final > 1 else None
        return ScheduledState(kept.drafts, q, kept.keys, kept.noise, final)

    def lag(self, state: DecodeState) -> Tensor:
        """Final tokens before the last one whose keys are not written yet [B] int32: none at first, then C - 1."""
        return state.count.clamp(max=self.final - 1)

    def grow(self, length: Tensor, uniform: Tensor, state: DecodeState) -> tuple[Tensor, Tensor]:
        """Final tokens without keys, then drafts [B, C + W]; and the uniforms."""
        kept, lag = state.drafting, self.lag(state)[:, None]
        index = self.image * self.columns + state.count[:, None] + self.node - lag
        final = state.tokens.index_select(0, index.flatten()).unflatten(0, index.shape)
        place = (self.node - lag - 1).clamp(min=0, max=self.width - 1)  # [B, C + W]
        return torch.where(self.node <= lag, final, gather(kept.drafts, 1, place)), uniform

    def link(self, grown: tuple[Tensor, Tensor], state: DecodeState) -> Drafts:
        tokens, uniform = grown
        return Drafts(tokens, None, self.tables(len(tokens)), uniform)

    def drawn(self, p: Tensor, uniform: Tensor, state: DecodeState) -> tuple[Tensor, Tensor]:
        """Tokens of the C + W places after the last final one [B, C + W], and what they were drawn from.

        Args:
            p: [B, C + W, V], the target's after each node. uniform: [B, draws].
        """
        place = (state.count + 1)[:, None] + self.node
        # The last place's distribution serves those behind it
        row = self.lag(state)[:, None] + torch.minimum(self.node, self.last(state))
        probs = self.closed(gather_rows(p, row), place)
        if self.tree.rule == "sjd-pac":
            return self.couple(probs, self.node.expand_as(place), uniform, state), probs
        return self.draw(probs, place, state), probs

    def absorb(self, committed: Committed, state: DecodeState) -> None:
        """Keep what was drawn: `committed` holds the tokens and distributions of all C + W places."""
        kept: ScheduledState = state.drafting
        tokens, probs, final = committed.tokens, committed.probs, self.final  # [B, C + W] and V
        if kept.final is not None:
            kept.final.copy_(probs[:, 1:final])
        seen = torch.full_like(state.count, self.width + 1 - final)
        count = state.count + final
        self.keep(tokens[:, final:], probs[:, final:], tokens[:, final - 1], count, seen, state)
