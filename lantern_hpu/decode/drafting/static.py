"""Static trees: children are drawn without replacement from the drafter's probabilities at their parent (EAGLE)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lantern_hpu.decode.drafting.base import Drafts, EagleDrafting
from lantern_hpu.decode.spec import Spec
from lantern_hpu.decode.state import DecodeState
from lantern_hpu.decode.tree_tables import StaticTables
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.transformer import Target
from lantern_hpu.ops.buffers import constant
from lantern_hpu.tree import DraftTree


class TreeLevel(nn.Module):
    """Tables of one drafting level: nodes at this depth that have children."""

    def __init__(self, tree: DraftTree, depth: int) -> None:
        super().__init__()
        frontier, self.depth = tree.frontiers[depth], depth
        most = max(len(tree.children[node]) for node in frontier)
        # Uniform of each child is that of its node; where a node has fewer children the draw is unused.
        table = [
            [max(child - 1, 0) for child in tree.children[node]]
            + [0] * (most - len(tree.children[node]))
            for node in frontier
        ]
        self.child_table = constant(table)  # [w, c]
        row = {node: i for i, node in enumerate(frontier)}
        next_level = tree.levels[depth + 1]
        pick = [row[tree.parent[n]] * most + tree.paths[n][-1] for n in next_level]
        self.pick = constant(pick)  # [nodes at depth + 1]
        grown = tree.frontiers[depth + 1] if depth + 1 < tree.depth else ()
        self.expand = constant([next_level.index(n) for n in grown], torch.int32)
        self.parent = constant([row[tree.parent[n]] for n in grown], torch.int32)
        # The drafter keeps the tree's entries behind its committed ones, in the order of expansion.
        inner = tree.expanded[1:]
        mask = [[tree.ancestors[n][other] for other in inner] for n in grown]
        self.mask = constant(mask, torch.bool)  # [grown, I - 1]
        self.scratch = constant([inner.index(n) for n in grown], torch.int32)


class StaticDrafting(EagleDrafting):
    """Down the tree, level by level."""

    levels: Sequence[TreeLevel]  # an nn.ModuleList

    def __init__(self, target: Target, drafter: Drafter, spec: Spec) -> None:
        super().__init__(target, drafter, spec)
        tree = spec.tree
        assert isinstance(tree, DraftTree)
        self.tables = StaticTables(tree)
        self.levels = nn.ModuleList(TreeLevel(tree, depth) for depth in range(tree.depth))  # type: ignore[assignment]

    def grow(self, length: Tensor, uniform: Tensor, state: DecodeState) -> tuple[Tensor, Tensor]:
        """
        Args:
            length: [R] committed positions. uniform: [B, M - 1], one a draft.

        Returns tokens [B, M] and probabilities [B, I, V].
        """
        guess = self.catch_up(length, state)  # [R, w, H]
        frontier = state.root[:, None]  # [B, w] tokens of this level's nodes
        tokens, probs, cache = [frontier], [], self.scratch(state)
        for level in self.levels:
            q = self.sampler(guess, state, level.depth)  # [B, w, V]
            each = uniform.index_select(1, level.child_table.flatten())  # [B, w * c]
            draws = self.sampler.distinct(q, each.unflatten(1, level.child_table.shape), state)
            drafts = draws.flatten(1).index_select(1, level.pick)  # [B, nodes at the next depth]
            probs.append(q)
            tokens.append(drafts)
            if len(level.expand):
                position = (length + level.depth + 1)[:, None].expand(-1, len(level.expand))
                index = (self.positions.row_start + length)[:, None] + level.scratch
                mask = self.positions.mask(length, level.mask)
                parents = frontier.index_select(1, level.parent)
                frontier = drafts.index_select(1, level.expand)
                read = frontier if self.drafter.shift else parents
                source = guess.index_select(1, level.parent)
                guess = self.run(read, source, position, mask, cache, index.flatten(), state)
        return torch.cat(tokens, 1), torch.cat(probs, 1)

    def link(self, grown: tuple[Tensor, Tensor], state: DecodeState) -> Drafts:
        tokens, probs = grown
        return Drafts(tokens, probs, self.tables(len(tokens)))
