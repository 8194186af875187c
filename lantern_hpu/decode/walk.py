"""Where the walk down a verified tree stops; which walk a spec takes is chosen once.

Each walk is a module of `(p, drafts, uniform, bounds)`: p [B, I, V] are the target's probabilities at nodes with
children, the uniforms [B, D, C], or of drafts that are verified together [B, M - 1].
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from lantern_hpu.decode.common import Drafts, TreeTables, rows_at
from lantern_hpu.decode.rules import Node, Rules, Verdict, tv_cost
from lantern_hpu.decode.spec import Spec
from lantern_hpu.decode.state import Bounds
from lantern_hpu.decode.traversal import Traversal
from lantern_hpu.ops.buffers import arange32, constant
from lantern_hpu.ops.kernels import Traverse, Walk
from lantern_hpu.ops.sampling import gather, gather_rows, topk_tokens
from lantern_hpu.tree import DraftTree, Tree, Window


class LevelWalk(nn.Module):
    """From the root, one level at a time, to the last accepted node: for any tree."""

    def __init__(self, rules: Rules, tree: Tree) -> None:
        super().__init__()
        self.rules = rules
        # Most children of a node at each depth: no walk tries more there
        self.widest = tree.widest

    def forward(self, p: Tensor, drafts: Drafts, uniform: Tensor, bounds: Bounds) -> Verdict:
        tables, tokens, q = drafts.tables, drafts.tokens, drafts.q
        node, residual = torch.zeros_like(tokens[:, 0]), p[:, 0]
        walking = torch.ones_like(node, dtype=torch.bool)
        relaxed, spent, left = [], [], bounds
        for depth, width in enumerate(self.widest):
            children = rows_at(tables.child, node)[:, :width]  # [B, c]
            walking = walking & (children[:, 0] > 0)
            row = gather(tables.row, 1, node[:, None])[:, 0]
            here, drawn = rows_at(p, row), None if q is None else rows_at(q, row)  # [B, V]
            passed, rest, level_relaxed, level_spent = self.rules.siblings(
                Node(here, drawn, bounds.weight[:, depth : depth + 1], left),
                gather(tokens, 1, children),
                (children > 0) & walking[:, None],
                uniform[:, depth, :width],
                self.rules.blend(here[:, None], None if drawn is None else drawn[:, None], left),
            )
            residual = torch.where(walking[:, None], rest, residual)
            walking = walking & passed.any(1)
            node = torch.where(walking, (children * passed).sum(1, dtype=torch.int32), node)
            relaxed.append(level_relaxed)
            if level_spent is not None:
                spent.append(level_spent)
                if left.budget is not None:
                    left = replace(left, budget=left.budget - level_spent)
        cost = torch.stack(spent, 1) if spent else None
        return Verdict(node, residual, torch.stack(relaxed, 1), cost)


class SpineWalk(nn.Module):
    """`LevelWalk` where first children alone have children: those, a spine [W + 1], are all tried at once.

    Only where the first of them is refused are its siblings tried as well.
    """

    def __init__(self, rules: Rules, window: Window) -> None:
        super().__init__()
        self.rules = rules
        self.spine = constant(window.spine)  # [W + 1] nodes, the root and the first children

    def forward(self, p: Tensor, drafts: Drafts, uniform: Tensor, bounds: Bounds) -> Verdict:
        rules, spine, q = self.rules, self.spine, drafts.q
        assert q is not None
        tables, tokens = drafts.tables, drafts.tokens.index_select(1, spine[1:])  # [B, W]
        prob, drawn = (gather(x, 2, tokens[..., None])[..., 0] for x in (p, q))
        nodes = Node(p, q, bounds.weight, bounds)
        unblended, _ = rules.accept_mass(nodes, tokens, prob)
        blend = rules.blend(p, q, bounds)
        mass = unblended if blend is None else blend.accept_mass(unblended, drawn)
        bar = uniform[..., 0] * drawn
        passed = (drawn > 0) & (bar < mass)
        taken = ((~passed).cumsum(1) == 0).sum(1, dtype=torch.int32)  # [B]
        stop = taken.clamp(max=tokens.shape[1] - 1)
        node = spine[taken]
        children = rows_at(tables.child, node)  # [B, C]
        weight = gather(bounds.weight, 1, stop[:, None])
        chosen, rest, stop_relaxed, stop_spent = rules.siblings(
            Node(rows_at(p, stop), rows_at(q, stop), weight, bounds),
            gather(drafts.tokens, 1, children),
            children > 0,
            rows_at(uniform, stop),
            None if blend is None else blend.at(stop),
        )
        node = torch.where(chosen.any(1), (children * chosen).sum(1, dtype=torch.int32), node)
        level = tables.depth.index_select(1, spine[1:])  # [B, W] 1 .. W
        here = level > taken[:, None]
        relaxed = torch.where(here, stop_relaxed[:, None], ~(bar < prob))
        if stop_spent is None:
            return Verdict(node, rest, relaxed)
        spent = tv_cost(unblended, prob, drawn)
        spent = spent if blend is None else spent + blend.spent
        spent = torch.where(here, stop_spent[:, None], spent) * (level <= taken[:, None] + 1)
        return Verdict(node, rest, relaxed, spent)


class KernelWalk(nn.Module):
    """A device's own form of `LevelWalk`, down static trees whose children were drawn, with the sound residual."""

    def __init__(self, rules: Rules, kernel: Walk) -> None:
        super().__init__()
        self.rules, self.kernel = rules, kernel

    def forward(self, p: Tensor, drafts: Drafts, uniform: Tensor, bounds: Bounds) -> Verdict:
        tables, neighbours = drafts.tables, self.rules.neighbours
        assert drafts.q is not None
        table = None if neighbours is None else neighbours.table
        tried = (p, drafts.q, drafts.tokens, tables.child, tables.row, uniform, table)
        each = (bounds.k, bounds.delta, bounds.factor, bounds.weight)
        blended = (bounds.tv, bounds.budget) if self.rules.blended else (None, None)
        return Verdict(*self.kernel(*tried, *each, *blended))


class Acceptance(nn.Module):
    """Which drafts of a spec's images are accepted: the sampled walk, the greedy one, or each for its images."""

    def __init__(
        self,
        spec: Spec,
        neighbours: Tensor | None = None,
        codes: Tensor | None = None,
        walk: Walk | None = None,
        traverse: Traverse | None = None,
    ) -> None:
        """
        Args:
            spec: whose tree has at least one draft.
            neighbours, codes: see `Rules`.
            walk, traverse: the device's own forms of `LevelWalk` and `Traversal`, for what they serve.
        """
        super().__init__()
        tree, sound = spec.tree, spec.residual == "sound" or neighbours is None
        self.spec, self.rules = spec, Rules(spec, neighbours, codes)
        self.walk_sampled: nn.Module = LevelWalk(self.rules, tree)
        if isinstance(tree, DraftTree):  # whose children are drawn
            if spec.together:
                self.walk_sampled = Traversal(tree, spec.blended, traverse)
            elif walk is not None and sound and codes is None:
                self.walk_sampled = KernelWalk(self.rules, walk)
            elif isinstance(tree, Window):
                self.walk_sampled = SpineWalk(self.rules, tree)
        # The deepest node wins; at equal depth the lower number does.
        self.priority = constant(tree.size - 1 - arange32(tree.size))  # [M]
        self.depth = constant(arange32(tree.depth))  # [D]

    def forward(
        self, p: Tensor, drafts: Drafts, uniform: Tensor, bounds: Bounds, greedy: Tensor
    ) -> Verdict:
        """For the arguments see this module; `greedy` [B] bool says whose walk is the greedy one."""
        if not self.spec.use_sampled:
            return self.walk_greedy(p, drafts, bounds)
        sampled: Verdict = self.walk_sampled(p, drafts, uniform, bounds)
        if not self.spec.use_greedy:
            return sampled
        best = self.walk_greedy(p, drafts, bounds)
        node = torch.where(greedy, best.node, sampled.node)
        relaxed = torch.where(greedy[:, None], best.relaxed, sampled.relaxed)
        spent = sampled.spent
        if spent is not None and best.spent is not None:
            spent = torch.where(greedy[:, None], best.spent, spent)
        return Verdict(node, sampled.residual, relaxed, spent)

    def walk_greedy(self, p: Tensor, drafts: Drafts, bounds: Bounds) -> Verdict:
        """The longest path of drafts that each win the argmax of p [B, I, V], or do with what relaxation adds to them.

        No filter was applied to p.
        """
        tables, tokens = drafts.tables, drafts.tokens[:, 1:]  # [B, M - 1]
        row = gather(tables.row, 1, tables.parent[:, 1:])  # [B, M - 1]
        prob = gather(p.flatten(1), 1, row * p.shape[-1] + tokens)  # [B, M - 1]
        top, best = gather(p.amax(-1), 1, row), gather(topk_tokens(p, 1)[..., 0], 1, row)
        wins, mass = tokens == best, prob
        if self.rules.changes_mass:
            weight = gather(bounds.weight, 1, tables.depth[:, 1:] - 1)
            nodes = Node(gather_rows(p, row), None, weight, bounds)
            mass, _ = self.rules.accept_mass(nodes, tokens, prob)
        wins_relaxed = (mass > top) | ((mass == top) & (tokens < best))
        node = self.deepest(~(wins | wins_relaxed), tables)
        on_path = rows_at(tables.path, node)[:, 1:]  # [B, D]
        relaxed = gather(
            wins_relaxed & ~wins, 1, (on_path - 1).clamp(min=0)
        )  # past `node`: not counted
        if not self.rules.metered:
            return Verdict(node, p[:, 0], relaxed)
        # Nothing is drawn: where another token than the argmax is taken, all mass has moved
        reached = gather(tables.depth, 1, node[:, None])  # [B, 1]
        spent = (relaxed & (self.depth < reached)).to(p.dtype)
        return Verdict(node, p[:, 0], relaxed, spent)

    def deepest(self, failed: Tensor, tables: TreeTables) -> Tensor:
        """The last node [B] int32 of the longest path without a draft that failed [B, M - 1]."""
        reached = ~(failed[:, None] & tables.ancestors[:, :, 1:]).any(-1)  # [B, M]
        priority = tables.depth * reached.shape[1] + self.priority
        return (reached * priority).argmax(-1).int()

    def match_draws(self, drawn: Tensor, drafts: Drafts) -> Tensor:
        """Where the drafts stop being what their places draw anyway, drawn [B, I]: [B] int32."""
        tables = drafts.tables
        row = gather(tables.row, 1, tables.parent[:, 1:])
        return self.deepest(drafts.tokens[:, 1:] != gather(drawn, 1, row), tables)
