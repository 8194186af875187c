"""The step of a window on a fixed schedule: verify, draw, make the first C places final."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_hpu.decode.drafting import Committed, Drafts, ScheduledDrafting
from lantern_hpu.decode.state import DecodeState
from lantern_hpu.decode.step import Accepted, Step
from lantern_hpu.decode.tree_tables import rows_at
from lantern_hpu.ops.sampling import topk_tokens


@dataclass
class Settled(Accepted):
    """What a step of the schedule has drawn."""

    tokens: Tensor | None = None  # [B, C + W]; `probs` are what they were drawn from


class ScheduledStep(Step):
    """One step for a batch of images, of which each gains C tokens."""

    @property
    def window(self) -> ScheduledDrafting:
        assert isinstance(self.drafting, ScheduledDrafting)
        return self.drafting

    @property
    def final(self) -> int:
        """C, tokens that a step makes final."""
        return self.window.final

    def inputs(self, state: DecodeState) -> tuple[Tensor, Tensor]:
        """This step's uniforms [B, draws], and how many positions of each row are in the cache [R]."""
        uniform, length = super().inputs(state)
        return uniform, length - self.positions.per_row(self.window.lag(state))

    def accept(
        self, hidden: Tensor, drafts: Drafts, uniform: Tensor, state: DecodeState
    ) -> Settled:
        """Draw all places anew, from the target's distributions given what stood before them."""
        lag = self.window.lag(state)
        p = self.sampler(hidden, state, drafts.tables.depth - lag[:, None])  # [B, C + W, V]
        assert drafts.uniform is not None
        tokens, probs = self.window.drawn(p, drafts.uniform, state)
        bonus, node = tokens[:, self.final - 1], lag + (self.final - 1)
        relaxed = torch.zeros_like(tokens[:, 1:], dtype=torch.bool)
        return Settled(probs, node, bonus, relaxed, self.spent(p, drafts.tokens, state), tokens)

    def spent(self, p: Tensor, tokens: Tensor, state: DecodeState) -> Tensor | None:
        """Total variation between what the last final tokens were drawn from and what they should have been.

        Args:
            p: [B, C + W, V], the target's after each node. tokens: [B, C + W].

        Returns [B, C - 1]; 0 where no token was made final yet. The first of them was drawn as it should be.
        """
        final: Tensor | None = state.drafting.final
        if final is None:
            return None
        today = p[:, : final.shape[1]]
        cost = (final - today).clamp(min=0).sum(-1)
        if self.spec.use_greedy:
            other = topk_tokens(today, 1)[..., 0] != tokens[:, 1 : self.final]
            cost = torch.where(state.sampling.greedy[:, None], other.to(cost.dtype), cost)
        return cost * (state.count > 0)[:, None]

    def commit(
        self, hidden: Tensor, drafts: Drafts, accepted: Accepted, state: DecodeState
    ) -> Tensor:
        """Keep the first C tokens; the next step writes their keys."""
        assert isinstance(accepted, Settled) and accepted.tokens is not None
        index = (self.first + state.count + 1)[:, None] + self.positions.arange[: self.final]
        news = accepted.tokens[:, : self.final]
        state.tokens.index_copy_(0, index.flatten().long(), news.flatten())
        count = (state.count + self.final).clamp(max=self.tokens - 1)
        path, added = rows_at(drafts.tables.path, accepted.node), count - state.count
        made = Committed(hidden, path, accepted.tokens, added, accepted.probs)
        self.window.absorb(made, state)
        self.tally_final(accepted.spent, state)
        state.root.copy_(accepted.bonus)
        state.count.copy_(count)
        return state.known.copy_(count + 1)

    def tally_final(self, spent: Tensor | None, state: DecodeState) -> None:
        """Count the step for images that are not done; what it made final beside its first token counts as accepted.

        Args:
            spent: [B, C - 1], on the tokens of the step before.
        """
        last, depth = self.tokens - 1, self.positions.arange[1 : self.depth + 1]
        running = state.count < last
        state.steps.add_(running)
        state.accepted.add_((depth < self.final) & (state.count[:, None] + depth <= last))
        if state.meter is not None and spent is not None:
            state.meter.add(spent * running[:, None])
