"""Windows: drafts without a drafter. The probs that a step verified give the drafts of the next (Jacobi decoding).

Place i of a window is the image token i + 1 after the root. A step computes the target's distributions at all places,
given the drafts before them; once a tokens were added, place a + i becomes place i and keeps its distribution, from
which its next draft comes:

- `jacobi` draws with noise that belongs to the place (`race_noise`): the image is that of one-token decoding with the
  same noise, for any window (Song et al., ICML 2021; noise as in Wiggers and Hoogeboom, ICML 2020).
- `scd` draws with the same noise, and its drafts are verified like a drafter's (arXiv 2510.24211).
- `sjd-pac` keeps a draft with probability min(1, p / q), and draws from [p - q]+ otherwise: as few drafts change as
  can (arXiv 2603.18599). Either way the draft follows p, which is what it is verified against.

Verification needs the distribution q that a draft was drawn from. It is lossless because a place's draft depends on
nothing that comes after it: given what is before it, it is a draw from q.

On a fixed schedule each step makes its first C places final, without a test. So N tokens take ceil((N - 1) / C) steps
after the first token, the same for every image, and the host need not read what was accepted: nothing is. The chain of
a step is C final tokens whose keys it writes, then the W places of the window.

The first of the C tokens follows the target's distribution given what is before it. The others were drawn from
distributions q that rest on drafts a step old. The next step has today's distributions p of those places, so that
their total variation is known: by convexity a token's distribution, given the tokens before it, is on average no
further from the target's than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.decode.common import Drafts, Sampler, StaticTables
from lantern_hpu.decode.drafting.base import Committed, Drafting
from lantern_hpu.decode.spec import Spec, keeps_noise, token_columns
from lantern_hpu.decode.state import DecodeState, PrefillInput
from lantern_hpu.models.transformer import Target
from lantern_hpu.ops.buffers import Choice, arange32, constant
from lantern_hpu.ops.sampling import ROUNDS, gather, gather_rows, race_noise
from lantern_hpu.tree import Window

CHUNK = 16  # places whose noise is made at once: it stays in a processor's cache


@dataclass
class WindowState:
    """What a window keeps from step to step."""

    drafts: Tensor  # [B, W] int32
    q: Tensor | None  # [B, W, V] float32, what they were drawn from; `jacobi` needs none
    keys: Tensor  # [B, N, ROUNDS] int32, of the fixed noise
    noise: Tensor | None  # [B * N, V] float32, that noise; None: it is made in the step
    # [B, C - 1, V] float32, what the last final tokens but their first were drawn from; None where there are none
    final: Tensor | None = None


class WindowDrafting(Drafting):
    """Drafts from the last step's distributions."""

    def __init__(self, target: Target, spec: Spec) -> None:
        super().__init__()
        tree, config = spec.tree, target.config
        assert isinstance(tree, Window)
        self.tree, self.spec, self.config = tree, spec, config
        self.sampler, self.tables = Sampler(target, spec), StaticTables(tree)
        self.grammar = self.sampler.grammar
        self.width, self.front, self.count = tree.width, tree.front, len(tree.siblings)
        self.place = constant(arange32(tree.width + 1))  # [W + 1]
        self.token = constant(arange32(config.vocab_size))  # [V]
        self.every = constant(arange32(config.tokens))  # [N]
        self.image = constant(arange32(spec.images)[:, None])  # [B, 1]
        self.begin_place = constant(arange32(spec.images)[:, None] * config.tokens)  # [B, 1]
        # Nodes are numbered level by level; the spine's tokens come first, then the siblings'
        order = [*tree.spine, *tree.siblings]
        self.order = Choice([order.index(node) for node in range(tree.size)])  # M

    def allocate(
        self, dtype: torch.dtype, device: torch.device, by_head: bool = False
    ) -> WindowState:
        b, n, v = self.spec.images, self.config.tokens, self.config.vocab_size
        drawn, kept = self.tree.rule != "jacobi", keeps_noise(self.config, self.tree, b)
        return WindowState(
            torch.zeros(b, self.width, dtype=torch.int32, device=device),
            torch.zeros(b, self.width, v, device=device) if drawn else None,
            torch.zeros(b, n, ROUNDS, dtype=torch.int32, device=device),
            torch.zeros(b * n, v, device=device) if kept else None,
        )

    # -- the fixed noise

    def sample(self, probs: Tensor, noise: Tensor, state: DecodeState | PrefillInput) -> Tensor:
        """One token of each distribution [B, T] by its noise, both [B, T, V]; of a greedy image the most probable."""
        if self.spec.use_greedy:
            noise = noise.masked_fill(state.sampling.greedy[:, None, None], 1.0)
        return self.sampler.kernels.race(probs, noise, self.token)

    def draw(self, probs: Tensor, place: Tensor, state: DecodeState) -> Tensor:
        """One token of each distribution [B, T, V] by the fixed noise of image tokens [B, T]: [B, T]."""
        place = place.clamp(max=self.config.tokens - 1)  # past the end nothing matters
        kept: WindowState = state.drafting
        if kept.noise is None:
            return self.sample(probs, race_noise(gather_rows(kept.keys, place), self.token), state)
        rows = (self.begin_place + place).flatten()
        noise = kept.noise.index_select(0, rows).unflatten(0, place.shape)
        return self.sample(probs, noise, state)

    def redraw(self, probs: Tensor, state: DecodeState) -> Tensor | None:
        """With the noise of each place, which `jacobi`'s drafts are compared with."""
        if self.tree.rule != "jacobi":
            return None
        return self.draw(probs, (state.count + 1)[:, None] + self.place, state)

    # -- drafts

    def begin(self, hidden: Tensor, root: Tensor, rows: Tensor, state: DecodeState) -> None:
        """The first drafts, of the root's distribution everywhere."""
        kept: WindowState = state.drafting
        entry, slot = state.prefill, state.prefill.slot.long()
        assert entry.keys is not None
        kept.keys.index_copy_(0, slot, entry.keys)
        if kept.noise is not None:
            parts = entry.keys.flatten(0, 1).split(CHUNK)
            noise = torch.cat([race_noise(keys, self.token) for keys in parts])
            index = (entry.slot * self.config.tokens)[:, None] + self.every
            kept.noise.index_copy_(0, index.flatten().long(), noise)
        if not self.width:
            return
        keys = entry.keys[:, 1 : self.width + 1]  # [A, W, ROUNDS]
        place = self.place[1:].expand(len(slot), -1)  # [A, W]
        probs = self.sampler(hidden[:, -1:], entry, 0).expand(-1, self.width, -1)  # [A, W, V]
        probs = self.force_row_ends(probs, place)
        kept.drafts.index_copy_(0, slot, self.sample(probs, race_noise(keys, self.token), entry))
        if kept.q is not None:
            kept.q.index_copy_(0, slot, probs)

    def force_row_ends(self, probs: Tensor, place: Tensor) -> Tensor:
        """Distributions of codes [B, T, V], some of them another place's, for image tokens [B, T]: [B, T, V]."""
        return probs if self.grammar is None else self.grammar.force_probs(probs, place)

    def draft(
        self, length: Tensor, uniform: Tensor, state: DecodeState
    ) -> Iterator[tuple[str, Any]]:
        """Of the uniforms, one a sibling is used; the others are left for `absorb` [B, draws - siblings]."""
        kept: WindowState = state.drafting
        tokens = torch.cat([state.root[:, None], kept.drafts], 1)
        if self.count:
            assert kept.q is not None
            q = kept.q[:, : self.front].scatter(2, kept.drafts[:, : self.front, None].long(), 0.0)
            draws = uniform[:, : self.count].unflatten(1, (self.front, -1))
            siblings = self.sampler.distinct(q, draws, state).flatten(1)
            tokens = torch.cat([tokens, siblings], 1)
        tables, left = self.tables(len(tokens)), uniform[:, self.count :]
        yield "draft", Drafts(self.order(tokens), kept.q, tables, left)

    def absorb(self, committed: Committed, state: DecodeState) -> None:
        """Move the window, and draft again from its distributions."""
        if not self.width:
            return
        before = committed.added[:, None] + self.place[:-1]  # [B, W] where each place was
        count = committed.before + committed.added
        place = count[:, None] + self.place[1:]  # [B, W]
        # The last place's distribution serves those behind it
        probs = gather_rows(
            committed.probs, torch.minimum(before, self.last(committed.before))
        )  # [B, W, V]
        probs = self.force_row_ends(probs, place)
        if self.tree.rule == "sjd-pac":
            assert committed.uniform is not None
            tokens = self.couple(probs, before, committed.uniform, state)
        else:
            tokens = self.draw(probs, place, state)
        self.keep(tokens, probs, state)

    def keep(self, tokens: Tensor, probs: Tensor, state: DecodeState) -> None:
        """Store the next drafts [B, W] and the distributions [B, W, V] that they were drawn from."""
        kept: WindowState = state.drafting
        kept.drafts.copy_(tokens)
        if kept.q is not None:
            kept.q.copy_(probs)

    def last(self, count: Tensor) -> Tensor:
        """The last place whose distribution is one of codes [B, 1]: the one before it, where the last closes a row."""
        width = self.place[-1:].expand(len(count), -1)
        if self.grammar is None:
            return width
        return width - self.grammar.closing((count + 1)[:, None] + width).int()

    def couple(self, probs: Tensor, before: Tensor, uniform: Tensor, state: DecodeState) -> Tensor:
        """Drafts [B, W] that follow their new distributions `probs` [B, W, V], and change as seldom as can be.

        `before` [B, W] is where each place was; from W on it had no draft. `uniform` is [B, 2 W].
        """
        kept: WindowState = state.drafting
        assert kept.q is not None
        had, old = before < self.width, before.clamp(max=self.width - 1)
        draft, q = gather(kept.drafts, 1, old), gather_rows(kept.q, old) * had[..., None]
        mine, drawn = (gather(x, 2, draft[..., None])[..., 0] for x in (probs, q))
        stay, other = uniform.chunk(2, 1)
        stays = (drawn > 0) & (stay * drawn < mine)
        rest = (probs - q).clamp(min=0)
        lost = rest.sum(-1, keepdim=True) <= 0  # by rounding alone: then probs and q are one
        if self.spec.use_greedy:
            greedy = state.sampling.greedy[:, None]
            stays, lost = stays & ~greedy, lost | greedy[..., None]
        drawn_anew = self.sampler.distinct(
            torch.where(lost, probs, rest), other[..., None].contiguous(), state
        )
        return torch.where(stays, draft, drawn_anew[..., 0])


class ScheduledDrafting(WindowDrafting):
    """On a fixed schedule: drafts, and the tokens that are made of them."""

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
