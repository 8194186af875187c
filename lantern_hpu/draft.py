"""The drafter's part of a step: catch up with the accepted tokens, then grow a tree of drafts.

A static tree draws the children of each node; a dynamic one (EAGLE-2, arXiv 2406.16858) takes the likeliest, goes
on from the likeliest of those, and keeps the likeliest of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lantern_hpu.constants import Constants, count_up
from lantern_hpu.layout import Plan, Sampler, Slots
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.transformer import Target, additive
from lantern_hpu.sampling import at, gather, likeliest
from lantern_hpu.state import DecodeState
from lantern_hpu.tables import DynamicTables, StaticTables, Tables
from lantern_hpu.tree import DraftTree, DynamicTree


@dataclass
class Drafts:
    """A tree for each image."""

    tokens: Tensor  # [B, M] int32, the root's first
    q: Tensor | None  # [B, I, V] float32, laws that the children were drawn from; None: not drawn
    tables: Tables


class Drafting(Constants):
    """What both kinds of trees need of the drafter; each kind's `forward` makes `Drafts`."""

    def __init__(self, target: Target, drafter: Drafter, plan: Plan, slots: Slots) -> None:
        super().__init__()
        self.drafter, self.slots = drafter, slots
        self.sampler = Sampler(target, plan)
        self.width = plan.shapes.tree.depth + 1

    def run(
        self,
        tokens: Tensor,
        features: Tensor,
        slot: Tensor,
        sees: Tensor,
        where: Tensor,
        state: DecodeState,
    ) -> Tensor:
        """One pass. tokens [B, T], features [R, T, H], slot [R, T] that the guess is used in, sees [R, T, S]."""
        if not self.drafter.sees_pads:
            sees = sees & state.valid[:, None]
        rope = self.slots.turn(slot, state)
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


class StaticDrafting(Drafting):
    """Children are drawn without replacement from the drafter's law at their parent."""

    levels: Sequence[Level]  # an nn.ModuleList

    def __init__(self, target: Target, drafter: Drafter, plan: Plan, slots: Slots) -> None:
        super().__init__(target, drafter, plan, slots)
        tree = plan.shapes.tree
        assert isinstance(tree, DraftTree)
        self.tables = StaticTables(tree)
        self.levels = nn.ModuleList(Level(tree, depth) for depth in range(tree.depth))  # type: ignore[assignment]

    def forward(self, length: Tensor, uniform: Tensor, state: DecodeState) -> Drafts:
        """
        Args:
            length: [R] committed slots. uniform: [B, M - 1], one a draft.
        """
        guess = self.catch_up(length, state)  # [R, w, H]
        tokens, laws = [state.root[:, None]], []
        frontier = state.root[:, None]  # [B, w] tokens of this level's nodes
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
                above, frontier = frontier[:, level.parent], drafts[:, level.expand]
                read = frontier if self.drafter.shift else above
                source = guess[:, level.parent]
                guess = self.run(read, source, slot, sees, where.flatten(), state)
        return Drafts(torch.cat(tokens, 1), torch.cat(laws, 1), self.tables(len(state.root)))


def widen(laws: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest children of each node.

    Args:
        laws: [B, w, V] float32. scores: [B, w] float32, log-probability of the path to each node.

    Returns their tokens [B, w * count] int32 and scores [B, w * count].
    """
    tokens = likeliest(laws, count)  # [B, w, count]
    found = scores[..., None] + gather(laws, -1, tokens).log()
    return tokens.flatten(1), found.flatten(1)


class DynamicDrafting(Drafting):
    """The likeliest drafts, as many as the tree holds."""

    origin: Tensor
    own: Tensor

    def __init__(self, target: Target, drafter: Drafter, plan: Plan, slots: Slots) -> None:
        super().__init__(target, drafter, plan, slots)
        tree = plan.shapes.tree
        assert isinstance(tree, DynamicTree)
        self.tree, self.tables = tree, DynamicTables(tree)
        k = tree.top_k
        # Places in one level: which node of the level before a candidate hangs from
        self.constant("origin", count_up(k * k) // k)  # [k * k]
        own = torch.eye(tree.scratch, dtype=torch.bool).unflatten(0, (tree.expansions, k))
        self.register_buffer(
            "own", own, persistent=False
        )  # [E, k, E * k], node itself in the cache

    def forward(self, length: Tensor, uniform: Tensor, state: DecodeState) -> Drafts:
        """
        Args:
            length: [R] committed slots. uniform: [B, 0], as nothing is drawn.
        """
        k, guess = self.tree.top_k, self.catch_up(length, state)  # [R, 1, H]
        laws = self.sampler(guess, state)  # [B, 1, V]
        new, score = widen(laws, torch.zeros_like(laws[..., 0]), k)  # [B, k]
        tokens, scores, parents = [new], [score], [torch.zeros_like(new)]
        # The frontier: its places among the newest candidates, where those hang, and what its nodes see
        place = self.slots.wide[:k].expand_as(new)
        above, first, frontier = torch.zeros_like(new), 1, state.root[:, None]
        sees = torch.zeros_like(self.own[:1])  # [1, k, E * k], nothing yet
        for level in range(self.tree.expansions):
            sees = at(sees.expand(len(new), -1, -1), above) | self.own[level]  # [B, k, E * k]
            guess = at(guess, self.slots.per_row(above))
            before, frontier = frontier, gather(new, 1, place)  # [B, k] tokens
            read = frontier if self.drafter.shift else gather(before, 1, above)
            guess = self.pass_on(level, read, guess, sees, length, state)
            parent = place + first  # numbers of the frontier, plus 1
            first = first + new.shape[1]
            laws = self.sampler(guess, state)  # [B, k, V]
            new, score = widen(laws, gather(score, 1, place), k)  # [B, k * k]
            tokens.append(new)
            scores.append(score)
            parents.append(gather(parent, 1, self.origin.expand_as(new)))
            place = likeliest(score, k)
            above = self.origin[place]
        chosen, tables = self.tables(torch.cat(scores, 1), torch.cat(parents, 1))
        drafts = gather(torch.cat(tokens, 1), 1, chosen)
        return Drafts(torch.cat([state.root[:, None], drafts], 1), None, tables)

    def pass_on(
        self,
        level: int,
        tokens: Tensor,
        features: Tensor,
        sees: Tensor,
        length: Tensor,
        state: DecodeState,
    ) -> Tensor:
        """The frontier through the drafter: tokens [B, k], features [R, k, H] -> guesses [R, k, H]."""
        k = self.tree.top_k
        slot = (length + level + 1)[:, None].expand(-1, k)
        where = self.slots.flat(length + level * k, k)
        seen = self.slots.sees(length, self.slots.per_row(sees))
        return self.run(tokens, features, slot, seen, where, state)


def make_drafting(
    target: Target, drafter: Drafter, plan: Plan, slots: Slots
) -> StaticDrafting | DynamicDrafting:
    """The drafting of the plan's kind of tree."""
    if isinstance(plan.shapes.tree, DynamicTree):
        return DynamicDrafting(target, drafter, plan, slots)
    return StaticDrafting(target, drafter, plan, slots)
