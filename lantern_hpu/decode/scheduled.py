"""A window on a fixed schedule: in each step its first C places are made final, without a test.

So N tokens take ceil((N - 1) / C) steps after the first token, the same for every image, and the host need not read
what was accepted: nothing is. The chain of a step is C final tokens whose keys it writes, then the W places of the
window.

The first of the C tokens follows the target's distribution given what is before it. The others were drawn from
distributions q that rest on drafts a step old. The next step has today's distributions p of those places, so that
their total variation is known: by convexity a token's distribution, given the tokens before it, is on average no
further from the target's than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.decode.common import Drafts
from lantern_hpu.decode.drafting.window import WindowDrafting, WindowState
from lantern_hpu.decode.spec import Spec, token_columns
from lantern_hpu.decode.state import DecodeState
from lantern_hpu.decode.step import Accepted, Step
from lantern_hpu.models.transformer import Target
from lantern_hpu.ops.buffers import arange32, constant
from lantern_hpu.ops.sampling import gather, gather_rows, topk_tokens


class ScheduledDrafting(WindowDrafting):
    """Drafts, and the tokens that are made of them."""

    def __init__(self, target: Target, spec: Spec) -> None:
        super().__init__(target, spec)
        self.final = self.tree.commit  # C
        self.node = constant(arange32(self.tree.size))  # [C + W]
        self.columns = token_columns(target.config, self.tree)

    def allocate(
        self, dtype: torch.dtype, device: torch.device, by_head: bool = False
    ) -> WindowState:
        b, v = self.spec.images, self.config.vocab_size
        state = super().allocate(dtype, device)
        q = state.q if self.tree.rule == "sjd-pac" else None  # that no other rule asks for
        final = torch.zeros(b, self.final - 1, v, device=device) if self.final > 1 else None
        return replace(state, q=q, final=final)

    def lag(self, state: DecodeState) -> Tensor:
        """Final tokens before the last one whose keys are not written yet [B] int32: none at first, then C - 1."""
        return state.count.clamp(max=self.final - 1)

    def draft(
        self, length: Tensor, uniform: Tensor, state: DecodeState
    ) -> Iterator[tuple[str, Any]]:
        """Final tokens without keys, then drafts [B, C + W]; `accept` takes the uniforms."""
        lag = self.lag(state)[:, None]
        index = self.image * self.columns + state.count[:, None] + self.node - lag
        final = state.tokens.index_select(0, index.flatten()).unflatten(0, index.shape)
        place = (self.node - lag - 1).clamp(min=0, max=self.width - 1)  # [B, C + W]
        drafts = gather(state.drafting.drafts, 1, place)
        tokens = torch.where(self.node <= lag, final, drafts)
        yield "draft", Drafts(tokens, None, self.tables(len(tokens)), uniform)

    def draw_all(self, p: Tensor, uniform: Tensor, state: DecodeState) -> tuple[Tensor, Tensor]:
        """Tokens of the C + W places after the last final one [B, C + W], and what they were drawn from.

        They are drawn from p [B, C + W, V], the target's after each node, with uniforms [B, draws].
        """
        place = (state.count + 1)[:, None] + self.node
        # The last place's distribution serves those behind it
        row = self.lag(state)[:, None] + torch.minimum(self.node, self.last(state.count))
        probs = self.force_row_ends(gather_rows(p, row), place)
        if self.tree.rule == "sjd-pac":
            return self.couple(probs, self.node.expand_as(place), uniform, state), probs
        return self.draw(probs, place, state), probs

    def keep_drawn(self, tokens: Tensor, probs: Tensor, state: DecodeState) -> None:
        """The tokens and distributions of all C + W places: the first C are final, the others the next drafts."""
        kept: WindowState = state.drafting
        if kept.final is not None:
            kept.final.copy_(probs[:, 1 : self.final])
        self.keep(tokens[:, self.final :], probs[:, self.final :], state)


class ScheduledStep(Step):
    """One step for a batch of images, of which each gains C tokens: verify, draw, make the first C places final."""

    drafting: ScheduledDrafting

    @property
    def final(self) -> int:
        """C, tokens that a step makes final."""
        return self.drafting.final

    def inputs(self, state: DecodeState) -> tuple[Tensor, Tensor]:
        """This step's uniforms [B, draws], and how many positions of each image are in the cache [B]."""
        uniform, length = super().inputs(state)
        return uniform, length - self.drafting.lag(state)

    def accept(
        self, hidden: Tensor, drafts: Drafts, uniform: Tensor, state: DecodeState
    ) -> Accepted:
        """Sample all places again, from the target's distributions given what was before them."""
        lag = self.drafting.lag(state)
        p = self.sampler(hidden, state, drafts.tables.depth - lag[:, None])  # [B, C + W, V]
        assert drafts.uniform is not None
        tokens, probs = self.drafting.draw_all(p, drafts.uniform, state)
        bonus, node = tokens[:, self.final - 1], lag + (self.final - 1)
        relaxed = torch.zeros_like(tokens[:, 1:], dtype=torch.bool)
        return Accepted(probs, node, bonus, relaxed, self.spent(p, drafts.tokens, state), tokens)

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
        assert accepted.tokens is not None
        self.note_spoiled(accepted, state)
        index = (self.first + state.count + 1)[:, None] + self.positions.arange[: self.final]
        news = accepted.tokens[:, : self.final]
        state.tokens.index_copy_(0, index.flatten().long(), news.flatten())
        count = (state.count + self.final).clamp(max=self.tokens - 1)
        self.drafting.keep_drawn(accepted.tokens, accepted.probs, state)
        self.tally_final(accepted.spent, state)
        return self.end(accepted, count, state)

    def tally_final(self, spent: Tensor | None, state: DecodeState) -> None:
        """Count the step for images that are not done; what it made final after its first token counts as accepted.

        What was spent [B, C - 1] is of the tokens of the step before.
        """
        last, depth = self.tokens - 1, self.positions.arange[1 : self.depth + 1]
        running = state.count < last
        state.steps.add_(running)
        state.accepted.add_((depth < self.final) & (state.count[:, None] + depth <= last))
        if state.meter is not None and spent is not None:
            state.meter.add(spent * running[:, None])
