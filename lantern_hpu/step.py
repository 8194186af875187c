"""The captured functions: prefill, and the step - draft, verify, accept, commit.

Both are functions of one `DecodeState`: no host read, no shape that depends on data, no Python value that
varies between calls. Autoregressive decoding is the step with the one-node tree.

Words: L = P + t is the number of committed slots; the root (token t) is certain but not yet in the cache.
The drafter's entry i is made from the target's feature of slot i and token i + 1, so its last committed
entry, L - 1, already holds the root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lantern_hpu.accept import Acceptance, Residual, Verdict
from lantern_hpu.constants import Constants, count_up
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.transformer import Target, additive, prefix_mask, rope_table
from lantern_hpu.sampling import choose, choose_distinct, gather, guide, law, likeliest
from lantern_hpu.state import DecodeState, Shapes, capacity, columns
from lantern_hpu.tree import DraftTree


@dataclass(frozen=True)
class Plan:
    """What is fixed when a step is built; a different plan is a different graph."""

    shapes: Shapes
    max_top_k: int = 0  # 0: no image uses top-k
    use_top_p: bool = False
    use_greedy: bool = False  # some image is greedy
    use_sampled: bool = True  # some image is sampled
    neighbours: int = 0  # K, neighbours kept; 0: acceptance is exact
    residual: Residual = "sound"


class Slots(Constants):
    """Positions and masks of the cache, as constants on the device."""

    rope: Tensor
    slot: Tensor
    row_start: Tensor
    below: Tensor
    wide: Tensor

    def __init__(self, target: Target, shapes: Shapes) -> None:
        super().__init__()
        config, tree = target.config, shapes.tree
        self.rows, self.guidance = shapes.rows, shapes.guidance
        size = capacity(config, tree)
        width = max(config.prefix, tree.depth + 1)
        self.constant("rope", rope_table(config, config.prefix + config.tokens + tree.depth + 1))
        self.constant("slot", count_up(size))  # [S]
        self.constant("row_start", count_up(shapes.rows) * size)  # [R]
        self.constant("below", torch.ones(width, width, dtype=torch.bool).tril())
        self.constant("wide", count_up(max(width, tree.size)))

    def per_row(self, x: Tensor) -> Tensor:
        """[B, ...] -> [R, ...]: an image's rows always hold the same tokens at the same positions."""
        return torch.cat([x, x]) if self.guidance else x

    def flat(self, start: Tensor, width: int) -> Tensor:
        """Storage rows of `width` slots from start [R]: [R * width]."""
        return (self.row_start + start)[:, None].add(self.wide[:width]).flatten()

    def sees(self, start: Tensor, table: Tensor) -> Tensor:
        """What queries that follow `start` committed slots may see: those slots, and each other by table.

        Args:
            start: [R]. table: [T, X] bool; column x is slot start + x.

        Returns [R, T, S] bool.
        """
        offset = self.slot - start[:, None]  # [R, S]
        inside = (offset >= 0) & (offset < table.shape[1])
        local = table[:, offset.clamp(0, table.shape[1] - 1)].transpose(0, 1)  # [R, T, S]
        return (offset < 0)[:, None] | (local & inside[:, None])


class Sampler(nn.Module):
    """Hidden states to laws: the target's head, guidance and the sampling settings."""

    def __init__(self, target: Target, plan: Plan) -> None:
        super().__init__()
        self.head, self.plan = target.head, plan

    def forward(self, hidden: Tensor, state: DecodeState) -> Tensor:
        """[R, T, H] -> [B, T, V] float32."""
        logits = guide(self.head(hidden), state.settings, self.plan.shapes.guidance)
        return law(logits, state.settings, self.plan.max_top_k, self.plan.use_top_p)

    def token(
        self, laws: Tensor, greedy_laws: Tensor, uniform: Tensor, state: DecodeState
    ) -> Tensor:
        """One token an image [B]: drawn from laws [B, V], or the likeliest of greedy_laws [B, V]."""
        if not self.plan.use_greedy:
            return choose(laws, uniform)
        best = likeliest(greedy_laws, 1)[..., 0]
        if not self.plan.use_sampled:
            return best
        return torch.where(state.settings.greedy, best, choose(laws, uniform))

    def distinct(self, laws: Tensor, uniform: Tensor, state: DecodeState) -> Tensor:
        """Children of each node [B, w, c] from laws [B, w, V]: drawn, or the likeliest if greedy."""
        if not self.plan.use_greedy:
            return choose_distinct(laws, uniform)
        best = likeliest(laws, uniform.shape[-1])
        if not self.plan.use_sampled:
            return best
        return torch.where(
            state.settings.greedy[:, None, None], best, choose_distinct(laws, uniform)
        )


def at(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [A, T, H] at index [A, n]: [A, n, H]."""
    return gather(x, 1, index[..., None].expand(-1, -1, x.shape[-1]))


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

    def rope(self, first: int, width: int) -> Tensor:
        table = self.slots.rope[first : first + width].to(self.target.head.weight.dtype)
        return table.expand(self.plan.shapes.rows, -1, -1, -1)

    def forward(self, state: DecodeState) -> Tensor:
        """Returns how many tokens of each image are known [B]."""
        width, start = self.prefix, torch.zeros_like(self.slots.row_start)
        mask = self.mask(state, start, width, sees_pads=False)
        where = self.slots.flat(start, width)
        hidden = self.target(state.prefix, self.rope(0, width), mask, state.target_cache, where)
        laws = self.sampler(hidden[:, -1:], state)[:, 0]  # [B, V]
        root = self.sampler.token(laws, laws, state.first_uniform, state)
        if self.drafter is not None and width > 1:
            self.fill_drafter(self.drafter, hidden, state)
        self.reset(state, root, hidden[:, -1:])
        return state.count + 1

    def fill_drafter(self, drafter: Drafter, hidden: Tensor, state: DecodeState) -> None:
        """Entries 0 .. P-2 carry the condition's features beside the filler token 0."""
        width, start = self.prefix - 1, torch.zeros_like(self.slots.row_start)
        mask = self.mask(state, start, width, drafter.sees_pads)
        filler = torch.zeros_like(hidden[:, :-1, 0], dtype=torch.int32)
        where = self.slots.flat(start, width)
        rope = self.rope(1, width)
        drafter(filler, hidden[:, :-1], rope, mask, state.drafter_cache, where)

    def reset(self, state: DecodeState, root: Tensor, last: Tensor) -> None:
        for tensor in (state.count, state.cursor, state.steps, state.accepted, state.relaxed):
            tensor.zero_()
        state.tokens.index_copy_(0, self.first.long(), root)
        state.root.copy_(root)
        # The drafter owes the pair (feature of the last condition slot, root).
        state.pending_tokens.copy_(root[:, None].expand_as(state.pending_tokens))
        state.pending_features.copy_(last.expand_as(state.pending_features))
        state.pending_count.fill_(1)


class Level(Constants):
    """Tables of one drafting level: nodes at this depth that have children."""

    child_table: Tensor
    pick: Tensor
    expand: Tensor
    parent: Tensor
    sees: Tensor
    scratch: Tensor

    def __init__(self, tree: DraftTree, depth: int) -> None:
        super().__init__()
        frontier, self.depth = tree.frontiers[depth], depth
        widest = max(len(tree.children[node]) for node in frontier)
        # Uniform of each child is that of its node; where a node has fewer children the draw is unused.
        table = [
            [max(child - 1, 0) for child in tree.children[node]]
            + [0] * (widest - len(tree.children[node]))
            for node in frontier
        ]
        self.constant("child_table", torch.tensor(table))  # [w, c]
        row = {node: i for i, node in enumerate(frontier)}
        below = tree.levels[depth + 1]
        pick = [row[tree.parent[n]] * widest + tree.paths[n][-1] for n in below]
        self.constant("pick", torch.tensor(pick))  # [nodes at depth + 1]
        grown = tree.frontiers[depth + 1] if depth + 1 < tree.depth else ()
        self.constant("expand", torch.tensor([below.index(n) for n in grown], dtype=torch.int32))
        self.constant(
            "parent", torch.tensor([row[tree.parent[n]] for n in grown], dtype=torch.int32)
        )
        # The drafter keeps the tree's entries behind its committed ones, in the order of expansion.
        inner = tree.expanded[1:]
        sees = [[tree.ancestors[n][other] for other in inner] for n in grown]
        self.constant("sees", torch.tensor(sees, dtype=torch.bool))  # [grown, I - 1]
        self.constant("scratch", torch.tensor([inner.index(n) for n in grown], dtype=torch.int32))


class Drafting(nn.Module):
    """The drafter's part of a step: catch up with the accepted tokens, then grow the tree."""

    levels: Sequence[Level]  # an nn.ModuleList

    def __init__(self, target: Target, drafter: Drafter, plan: Plan, slots: Slots) -> None:
        super().__init__()
        self.drafter, self.slots = drafter, slots
        self.sampler = Sampler(target, plan)
        tree = plan.shapes.tree
        self.width = tree.depth + 1
        self.levels = nn.ModuleList(Level(tree, depth) for depth in range(tree.depth))  # type: ignore[assignment]

    def run(
        self,
        tokens: Tensor,
        features: Tensor,
        slot: Tensor,
        sees: Tensor,
        where: Tensor,
        state: DecodeState,
    ) -> Tensor:
        """One pass. tokens [B, T], features [R, T, H], slot [R, T] of the token, sees [R, T, S]."""
        if not self.drafter.sees_pads:
            sees = sees & state.valid[:, None]
        rope = self.slots.rope[slot].to(features.dtype)
        mask = additive(sees, features.dtype)
        rows = self.slots.per_row(tokens)
        return self.drafter(rows, features, rope, mask, state.drafter_cache, where)

    def catch_up(self, length: Tensor, state: DecodeState) -> Tensor:
        """Add the pairs of the last step; entries past the real ones are overwritten. -> [R, 1, H]"""
        pending = self.slots.per_row(state.pending_count)  # [R]
        start = length - pending
        slot = start[:, None] + 1 + self.slots.wide[: self.width]
        sees = self.slots.sees(start, self.slots.below[: self.width, : self.width])
        where = self.slots.flat(start, self.width)
        guess = self.run(state.pending_tokens, state.pending_features, slot, sees, where, state)
        return at(guess, (pending - 1)[:, None])

    def forward(self, length: Tensor, uniform: Tensor, state: DecodeState) -> tuple[Tensor, Tensor]:
        """
        Args:
            length: [R] committed slots. uniform: [B, M - 1], one a draft.

        Returns the tree's tokens [B, M] and the drafter's laws [B, I, V] at nodes with children.
        """
        guess = self.catch_up(length, state)  # [R, w, H]
        tokens, laws = [state.root[:, None]], []
        for level in self.levels:
            q = self.sampler(guess, state)  # [B, w, V]
            draws = self.sampler.distinct(q, uniform[:, level.child_table], state)  # [B, w, c]
            drafts = draws.flatten(1)[:, level.pick]  # [B, nodes at the next depth]
            laws.append(q)
            tokens.append(drafts)
            if len(level.expand):
                slot = (length + level.depth + 1)[:, None].expand(-1, len(level.expand))
                where = (self.slots.row_start + length)[:, None] + level.scratch
                sees = self.slots.sees(length, level.sees)
                guess = self.run(
                    drafts[:, level.expand],
                    guess[:, level.parent],
                    slot,
                    sees,
                    where.flatten(),
                    state,
                )
        return torch.cat(tokens, 1), torch.cat(laws, 1)


class Step(Constants):
    """One decode step for a batch of images, each at its own length."""

    depths: Tensor
    ancestors: Tensor
    expanded: Tensor
    path: Tensor
    has_children: Tensor
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
        self.drafting = self.acceptance = None
        if drafter is not None and self.depth:
            self.drafting = Drafting(target, drafter, plan, self.slots)
            self.acceptance = Acceptance(tree, neighbours, plan.residual)
        constants = {
            "depths": torch.tensor(tree.depths),  # [M]
            "ancestors": torch.tensor(tree.ancestors),  # [M, M]
            "expanded": torch.tensor(tree.expanded, dtype=torch.int32),  # [I]
            "path": torch.tensor(tree.path_table),  # [M, D + 1]
            "has_children": torch.tensor([bool(c) for c in tree.children]),  # [M]
            "first": count_up(plan.shapes.images) * columns(config, tree),  # [B]
            "layer_start": count_up(config.layers) * plan.shapes.rows * capacity(config, tree),
        }
        for name, value in constants.items():
            self.constant(name, value)

    def forward(self, state: DecodeState) -> Tensor:
        """Returns how many tokens of each image are known [B]."""
        return self.finish(state, *self.draft(state))

    @property
    def parts(self) -> tuple[Callable[..., Any], ...]:
        """Two halves, for a device that cannot record the whole as one graph."""
        return self.draft, self.finish

    def draft(self, state: DecodeState) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """This step's uniforms [B, draws], committed slots [R], tree tokens [B, M], drafter laws [B, I, V]."""
        uniform = state.uniforms.index_select(0, state.cursor)[0]
        state.cursor.add_(1)
        length = self.slots.per_row(state.count) + self.prefix
        if self.drafting is None:
            return uniform, length, state.root[:, None], None
        tokens, q = self.drafting(length, uniform[:, : self.size - 1], state)
        return uniform, length, tokens, q

    def finish(
        self, state: DecodeState, uniform: Tensor, length: Tensor, tokens: Tensor, q: Tensor | None
    ) -> Tensor:
        """Verify, accept and commit. -> [B] tokens known"""
        hidden = self.verify(tokens, length, state)
        node, bonus, relaxed = self.accept(hidden, tokens, q, uniform[:, self.size - 1 :], state)
        return self.commit(hidden, tokens, node, bonus, relaxed, length, state)

    def verify(self, tokens: Tensor, length: Tensor, state: DecodeState) -> Tensor:
        """The target over the whole tree in one pass: [B, M] -> features [R, M, H]."""
        rope = self.slots.rope[length[:, None] + self.depths].to(state.prefix.dtype)
        sees = self.slots.sees(length, self.ancestors) & state.valid[:, None]
        where = self.slots.flat(length, self.size)
        x = self.target.embed(self.slots.per_row(tokens))
        return self.target(x, rope, additive(sees, x.dtype), state.target_cache, where)

    def accept(
        self, hidden: Tensor, tokens: Tensor, q: Tensor | None, uniform: Tensor, state: DecodeState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Where the walk stops [B], the token after it [B], and which drafts were relaxed [B, D]."""
        if self.acceptance is None or q is None:
            laws = self.sampler(hidden, state)[:, 0]
            bonus = self.sampler.token(laws, laws, uniform[:, 0], state)
            none = torch.zeros_like(state.accepted, dtype=torch.bool)  # [B, 0]: nothing to relax
            return torch.zeros_like(state.root), bonus, none
        p = self.sampler(hidden[:, self.expanded], state)  # [B, I, V]
        verdict = self.judge(self.acceptance, p, q, tokens, uniform, state)
        stop = self.slots.per_row(verdict.node)[:, None]  # [R, 1]
        fresh = self.sampler(at(hidden, stop), state)[:, 0]  # [B, V]
        laws = torch.where(self.has_children[verdict.node][:, None], verdict.law, fresh)
        bonus = self.sampler.token(laws, fresh, uniform[:, -1], state)
        return verdict.node, bonus, verdict.relaxed

    def judge(
        self,
        acceptance: Acceptance,
        p: Tensor,
        q: Tensor,
        tokens: Tensor,
        uniform: Tensor,
        state: DecodeState,
    ) -> Verdict:
        """The sampled walk, the greedy one, or each for its images."""
        if not self.plan.use_sampled:
            return acceptance.greedy(p, tokens, state.bounds)
        tries = uniform[:, :-1].unflatten(1, (self.depth, -1))  # [B, D, C]
        sampled = acceptance.sampled(p, q, tokens, tries, state.bounds)
        if not self.plan.use_greedy:
            return sampled
        likeliest = acceptance.greedy(p, tokens, state.bounds)
        greedy = state.settings.greedy
        node = torch.where(greedy, likeliest.node, sampled.node)
        relaxed = torch.where(greedy[:, None], likeliest.relaxed, sampled.relaxed)
        return Verdict(node, sampled.law, relaxed)

    def commit(
        self,
        hidden: Tensor,
        tokens: Tensor,
        node: Tensor,  # [B]
        bonus: Tensor,  # [B]
        relaxed: Tensor,  # [B, D]
        length: Tensor,  # [R]
        state: DecodeState,
    ) -> Tensor:
        """Keep the accepted path and the bonus token; everything else is overwritten later."""
        path, taken = self.path[node], self.depths[node]  # [B, D + 1], [B]
        order = self.slots.wide[: self.depth + 1]  # [D + 1]
        # Token t + 1 + i is draft i + 1 of the path, or the bonus token after the last of them.
        drafts = gather(tokens, 1, torch.cat([path[:, 1:], path[:, -1:]], 1))
        news = torch.where(order < taken[:, None], drafts, bonus[:, None])  # [B, D + 1]
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
