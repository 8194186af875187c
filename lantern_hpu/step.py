"""The captured functions: prefill, and the step - draft, verify, accept, commit.

Both are functions of one `DecodeState`: no host read, no shape that depends on data, no Python value that
varies between calls. Autoregressive decoding is the step with the one-node tree.

Words: L = P + t is the number of committed slots; the root (token t) is certain but not yet in the cache.
The drafter's entry i is made from the target's feature of slot i and token i + 1, so its last committed
entry, L - 1, already holds the root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.accept import Acceptance, Verdict
from lantern_hpu.constants import Constants, count_up
from lantern_hpu.draft import Drafts, make_drafting
from lantern_hpu.layout import Plan, Sampler, Slots
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.transformer import Target, additive, prefix_mask
from lantern_hpu.sampling import at, gather
from lantern_hpu.state import DecodeState, capacity, columns
from lantern_hpu.tables import StaticTables, rows_at
from lantern_hpu.tree import DraftTree


class Prefill(Constants):
    """The condition through target and drafter, and the first image token."""

    first: Tensor

    def __init__(self, target: Target, drafter: Drafter | None, plan: Plan) -> None:
        super().__init__()
        self.target, self.drafter = target, drafter
        self.slots, self.sampler = Slots(target, plan.shapes), Sampler(target, plan)
        self.prefix, self.plan = target.config.prefix, plan
        first = count_up(plan.shapes.images) * columns(target.config, plan.shapes.tree)
        self.constant("first", first)  # [B] each image's token 0

    def mask(self, state: DecodeState, start: Tensor, width: int, sees_pads: bool) -> Tensor:
        """[R, 1, width, S] causal mask, with the rule for pads of `prefix_mask`."""
        causal = self.slots.sees(start, self.slots.below[:width, :width])
        if not sees_pads:
            causal = prefix_mask(state.valid, causal)
        return additive(causal, state.prefix.dtype)

    def rope(self, first: int, width: int, state: DecodeState) -> Tensor:
        slot = (self.slots.wide[:width] + first).expand(self.plan.shapes.rows, -1)
        return self.slots.turn(slot, state)

    def forward(self, state: DecodeState) -> Tensor:
        """Returns how many tokens of each image are known [B]."""
        width, start = self.prefix, torch.zeros_like(self.slots.row_start)
        mask = self.mask(state, start, width, sees_pads=False)
        where = self.slots.flat(start, width)
        hidden = self.target(
            state.prefix, self.rope(0, width, state), mask, state.target_cache, where
        )
        laws = self.sampler(hidden[:, -1:], state)[:, 0]  # [B, V]
        root = self.sampler.token(laws, laws, state.first_uniform, state)
        if self.drafter is not None and width > 1:
            self.fill_drafter(self.drafter, hidden, state)
        self.reset(state, root, hidden[:, -1:])
        return state.count + 1

    def fill_drafter(self, drafter: Drafter, hidden: Tensor, state: DecodeState) -> None:
        """Entries 0 .. P-2 carry the condition's features beside its words, or the filler token 0."""
        width, start = self.prefix - 1, torch.zeros_like(self.slots.row_start)
        mask = self.mask(state, start, width, drafter.sees_pads)
        words = state.prefix_tokens[:, drafter.shift :][:, :width]
        where = self.slots.flat(start, width)
        rope = self.rope(1, width, state)
        drafter(words, hidden[:, :-1], rope, mask, state.drafter_cache, where)

    def reset(self, state: DecodeState, root: Tensor, last: Tensor) -> None:
        for tensor in (state.count, state.cursor, state.steps, state.accepted, state.relaxed):
            tensor.zero_()
        state.tokens.index_copy_(0, self.first.long(), root)
        state.root.copy_(root)
        # The drafter owes the pair (feature of the last condition slot, root).
        shifted = self.drafter is None or self.drafter.shift
        owed = root if shifted else state.prefix_tokens[: len(root), -1]
        state.pending_tokens.copy_(owed[:, None].expand_as(state.pending_tokens))
        state.pending_features.copy_(last.expand_as(state.pending_features))
        state.pending_count.fill_(1)


class Step(Constants):
    """One decode step for a batch of images, each at its own length."""

    expanded: Tensor | None
    first: Tensor
    layer_start: Tensor

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        plan: Plan,
        neighbours: Tensor | None = None,
    ) -> None:
        """
        Args:
            drafter: needed unless the tree is the root alone.
            neighbours: [V, K] int32 for relaxed acceptance.
        """
        super().__init__()
        self.target, self.plan = target, plan
        self.slots, self.sampler = Slots(target, plan.shapes), Sampler(target, plan)
        tree, config = plan.shapes.tree, target.config
        self.prefix, self.tokens, self.depth, self.size = (
            config.prefix,
            config.tokens,
            tree.depth,
            tree.size,
        )
        # Nodes whose children may be tried; which they are is not known of a dynamic tree.
        expanded = None
        if isinstance(tree, DraftTree):
            expanded = torch.tensor(tree.expanded, dtype=torch.int32)
        self.drafting = self.acceptance = None
        self.shift = 1 if drafter is None else drafter.shift
        if drafter is not None and self.depth:
            self.drafting = make_drafting(target, drafter, plan, self.slots)
            self.acceptance = Acceptance(
                tree, neighbours, plan.residual, plan.annealed, target.kernels.walk
            )
        self.alone = StaticTables(DraftTree.root_only())
        self.constant("expanded", expanded)  # [I]
        self.constant("first", count_up(plan.shapes.images) * columns(config, tree))  # [B]
        layers = count_up(config.layers) * plan.shapes.rows * capacity(config, tree)
        self.constant("layer_start", layers)  # [layers]

    def forward(self, state: DecodeState) -> Tensor:
        """Returns how many tokens of each image are known [B]."""
        return self.finish(state, *self.draft(state))

    @property
    def parts(self) -> tuple[Callable[..., Any], ...]:
        """Two halves, for a device that cannot record the whole as one graph."""
        return self.draft, self.finish

    def draft(self, state: DecodeState) -> tuple[Tensor, Tensor, Drafts]:
        """This step's uniforms for acceptance [B, D * C + 1], committed slots [R], and trees."""
        uniform = state.uniforms.index_select(0, state.cursor)[0]
        state.cursor.add_(1)
        length = self.slots.per_row(state.count) + self.prefix
        root = state.root[:, None]
        if self.drafting is None:
            return uniform, length, Drafts(root, None, self.alone(len(root)))
        draws = self.plan.shapes.tree.draws
        drafts = self.drafting(length, uniform[:, :draws], state)
        return uniform[:, draws:], length, drafts

    def finish(self, state: DecodeState, uniform: Tensor, length: Tensor, drafts: Drafts) -> Tensor:
        """Verify, accept and commit. -> [B] tokens known"""
        hidden = self.verify(drafts, length, state)
        node, bonus, relaxed = self.accept(hidden, drafts, uniform, state)
        return self.commit(hidden, drafts, node, bonus, relaxed, length, state)

    def verify(self, drafts: Drafts, length: Tensor, state: DecodeState) -> Tensor:
        """The target over the whole tree in one pass: features [R, M, H]."""
        depth, ancestors = map(self.slots.per_row, (drafts.tables.depth, drafts.tables.ancestors))
        rope = self.slots.turn(length[:, None] + depth, state)
        sees = self.slots.sees(length, ancestors) & state.valid[:, None]
        where = self.slots.flat(length, self.size)
        x = self.target.embed(self.slots.per_row(drafts.tokens))
        return self.target(x, rope, additive(sees, x.dtype), state.target_cache, where)

    def accept(
        self, hidden: Tensor, drafts: Drafts, uniform: Tensor, state: DecodeState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Where the walk stops [B], the token after it [B], and which drafts were relaxed [B, D]."""
        if self.acceptance is None:
            laws = self.sampler(hidden, state)[:, 0]
            bonus = self.sampler.token(laws, laws, uniform[:, 0], state)
            none = torch.zeros_like(state.accepted, dtype=torch.bool)  # [B, 0]: nothing to relax
            return torch.zeros_like(state.root), bonus, none
        inner = hidden if self.expanded is None else hidden[:, self.expanded]
        p = self.sampler(inner, state)  # [B, I, V]
        verdict = self.judge(self.acceptance, p, drafts, uniform, state)
        stop = self.slots.per_row(verdict.node)[:, None]  # [R, 1]
        fresh = self.sampler(at(hidden, stop), state)[:, 0]  # [B, V]
        inside = rows_at(drafts.tables.child, verdict.node)[:, :1] > 0  # [B, 1]
        laws = torch.where(inside, verdict.law, fresh)
        bonus = self.sampler.token(laws, fresh, uniform[:, -1], state)
        return verdict.node, bonus, verdict.relaxed

    def judge(
        self,
        acceptance: Acceptance,
        p: Tensor,
        drafts: Drafts,
        uniform: Tensor,
        state: DecodeState,
    ) -> Verdict:
        """The sampled walk, the greedy one, or each for its images."""
        tokens, tables = drafts.tokens, drafts.tables
        if not self.plan.use_sampled:
            return acceptance.greedy(p, tokens, tables, state.bounds)
        tries = uniform[:, :-1].unflatten(1, (self.depth, -1))  # [B, D, C]
        sampled = acceptance.sampled(p, drafts.q, tokens, tables, tries, state.bounds)
        if not self.plan.use_greedy:
            return sampled
        likeliest = acceptance.greedy(p, tokens, tables, state.bounds)
        greedy = state.settings.greedy
        node = torch.where(greedy, likeliest.node, sampled.node)
        relaxed = torch.where(greedy[:, None], likeliest.relaxed, sampled.relaxed)
        return Verdict(node, sampled.law, relaxed)

    def commit(
        self,
        hidden: Tensor,
        drafts: Drafts,
        node: Tensor,  # [B]
        bonus: Tensor,  # [B]
        relaxed: Tensor,  # [B, D]
        length: Tensor,  # [R]
        state: DecodeState,
    ) -> Tensor:
        """Keep the accepted path and the bonus token; everything else is overwritten later."""
        path = rows_at(drafts.tables.path, node)  # [B, D + 1]
        taken = gather(drafts.tables.depth, 1, node[:, None])[:, 0]  # [B]
        order = self.slots.wide[: self.depth + 1]  # [D + 1]
        # Token t + 1 + i is draft i + 1 of the path, or the bonus token after the last of them.
        accepted = gather(drafts.tokens, 1, torch.cat([path[:, 1:], path[:, -1:]], 1))
        news = torch.where(order < taken[:, None], accepted, bonus[:, None])  # [B, D + 1]
        where = (self.first + state.count + 1)[:, None] + order
        state.tokens.index_copy_(0, where.flatten().long(), news.flatten())
        count = (state.count + taken + 1).clamp(max=self.tokens - 1)
        if self.depth:
            # A finished image adds nothing; one pair keeps its catch-up within its own row.
            self.keep(hidden, path, news, (count - state.count).clamp(min=1), length, state)
        self.tally(taken, relaxed, order, state)
        state.root.copy_(bonus)
        state.count.copy_(count)
        return state.count + 1

    def keep(
        self,
        hidden: Tensor,
        path: Tensor,
        news: Tensor,
        added: Tensor,
        length: Tensor,
        state: DecodeState,
    ) -> None:
        """Move the path's keys and values together, and note what the drafter has to catch up with.

        Args:
            added: [B] tokens that the step added.
        """
        rows = self.slots.per_row(path)  # [R, D + 1]
        start = (self.slots.row_start + length)[:, None]
        source = (start + rows[:, 1:]).flatten()  # [R * D]
        goal = (start + self.slots.wide[1 : self.depth + 1]).flatten()
        layers = self.layer_start[:, None]
        state.target_cache.move((layers + source).flatten(), (layers + goal).flatten())
        state.pending_features.copy_(at(hidden, rows))
        if not self.shift:
            news = torch.cat([state.root[:, None], news[:, :-1]], 1)
        state.pending_tokens.copy_(news)
        state.pending_count.copy_(added)

    def tally(self, taken: Tensor, relaxed: Tensor, order: Tensor, state: DecodeState) -> None:
        """Count the step for images that are not done, and only what lies within the image."""
        last = self.tokens - 1
        state.steps.add_(state.count < last)
        if self.depth:
            depth = order[1:]  # 1 .. D
            counted = (depth <= taken[:, None]) & (state.count[:, None] + depth <= last)
            state.accepted.add_(counted)
            state.relaxed.add_((relaxed & counted).sum(1, dtype=torch.int32))


def build(
    target: Target, drafter: Drafter | None, plan: Plan, neighbours: Tensor | None = None
) -> tuple[Prefill, Step]:
    """Prefill and step of one plan on the target's device."""
    device = target.head.weight.device
    drafting = drafter if plan.shapes.tree.depth else None
    near = None if neighbours is None or not plan.neighbours else neighbours[:, : plan.neighbours]
    return (
        Prefill(target, drafting, plan).to(device).eval(),
        Step(target, drafting, plan, near).to(device).eval(),
    )
