"""Drafts of a static tree verified together: exactly, or by blending.

Block verification (Sun et al., arXiv 2403.10444), of trees traversal verification (arXiv 2505.12398). The root has
the weight 1, and child x of a node of weight c the weight min(1, c p(x) / q(x)). Leaves are kept with the chance of
their weight. The deepest are asked first, and first children before their siblings; where nothing behind a child
is kept, with r = [c p - q]+ and its sum s, its parent goes on with p = r / s, c = s / (s + 1 - c), and q without x.
A node is kept with the chance c that is left once nothing behind it was, and the next token drawn from the p that
is left there. What a node's chance is depends on no uniform: so all are computed, a depth at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from lantern_hpu.decode.common import Drafts, rows_at
from lantern_hpu.decode.rules import TINY, Blend, Verdict, remove_token
from lantern_hpu.decode.state import Bounds
from lantern_hpu.ops.buffers import arange32, constant
from lantern_hpu.ops.kernels import Traverse
from lantern_hpu.ops.sampling import gather
from lantern_hpu.tree import DraftTree


def postorder(tree: DraftTree) -> list[int]:
    """[M] nodes, each after all that is behind it, first children and their nodes first."""
    ranked = [(*path, tree.size) for path in tree.paths]
    return sorted(range(tree.size), key=ranked.__getitem__)


class TraversalLevel(nn.Module):
    """The n nodes of a depth, w of them with up to c children, as `Traversal` comes to them."""

    def __init__(self, tree: DraftTree, depth: int) -> None:
        super().__init__()
        nodes, inner, most = tree.levels[depth], tree.frontiers[depth], tree.widest[depth]
        table = [[*tree.children[n], *[0] * (most - len(tree.children[n]))] for n in inner]
        self.child = constant(table)  # [w, c], 0 where there is none
        self.row = constant([tree.expanded.index(n) for n in inner])  # [w] of p and q
        self.inner = constant([nodes.index(n) for n in inner])  # [w] which of the n they are
        below = [i for i, child in enumerate(chain.from_iterable(table)) if child]
        self.below = constant(below)  # [nodes of the next depth] which of the w * c
        found = {n: len(nodes) + i for i, n in enumerate(inner)}
        self.found = constant([found.get(n, i) for i, n in enumerate(nodes)])  # [n] of the n + w

    def next_level(self, x: Tensor) -> Tensor:
        """What the w nodes have for each child [B, w, c]: of the nodes of the next depth [B, m]."""
        return x.flatten(1).index_select(1, self.below)

    def chances(self, weight: Tensor, left: Tensor) -> Tensor:
        """Of all n nodes [B, n], whose weights are [B, n]; those with children have [B, w] left of theirs."""
        return torch.cat([weight, left], 1).index_select(1, self.found)


class Traversal(nn.Module):
    """The walk of drafts that are verified together."""

    levels: Sequence[TraversalLevel]  # an nn.ModuleList

    def __init__(self, tree: DraftTree, blended: bool, kernel: Traverse | None = None) -> None:
        """`blended`: some image blends. `kernel` is the device's own form."""
        super().__init__()
        self.blended, self.kernel = blended, kernel
        self.levels = nn.ModuleList(TraversalLevel(tree, depth) for depth in range(tree.depth))  # type: ignore[assignment]
        order = postorder(tree)
        self.order = constant(order)  # [M]
        self.priority = constant([tree.size - order.index(n) for n in range(tree.size)])
        self.depth = constant(arange32(tree.depth))  # [D]

    def forward(
        self,
        p: Tensor,  # [B, I, V]
        drafts: Drafts,
        uniform: Tensor,  # [B, M - 1], one a draft
        bounds: Bounds,
    ) -> Verdict:
        tables, tokens, q = drafts.tables, drafts.tokens, drafts.q
        assert q is not None
        tv, budget = (bounds.tv, bounds.budget) if self.blended else (None, None)
        if self.kernel is not None:
            tree = (tokens, tables.child, tables.row, self.order, len(self.levels))
            return Verdict(*self.kernel(p, q, *tree, uniform, tv, budget))
        weight = torch.ones_like(p[:, :1, 0])  # [B, n] of the nodes of a depth
        left = None if budget is None else budget[:, None]  # [B, n]
        chances: list[Tensor] = []
        rests: list[Tensor] = []
        blends: list[Blend] = []
        for level in self.levels:
            here, drawn = p.index_select(1, level.row), q.index_select(1, level.row)  # [B, w, V]
            inner, target = weight.index_select(1, level.inner), here
            if tv is not None and left is not None:
                left = left.index_select(1, level.inner)  # [B, w]
                distance = (here - drawn).clamp(min=0).sum(-1)
                most = torch.minimum(distance, tv[:, None])
                blends.append(Blend.of(distance, torch.minimum(most, left.clamp(min=0))))
                target = here + blends[-1].share[..., None] * (drawn - here)
                left = (left - blends[-1].spent)[..., None].expand(-1, -1, level.child.shape[1])
                left = level.next_level(left)
            children, rest, chance = self.weigh(level, target, drawn, inner, here, tokens)
            chances.append(level.chances(weight, chance))
            rests.append(rest)
            weight = level.next_level(children)
        chance = torch.cat([*chances, weight], 1)  # [B, M]
        kept = torch.cat([torch.ones_like(chance[:, :1]).bool(), uniform < chance[:, 1:]], 1)
        node_at = (
            (kept * self.priority).argmax(-1).int()
        )  # [B] of all that are kept the first asked
        residual = rows_at(torch.cat(rests, 1), gather(tables.row, 1, node_at[:, None])[:, 0])
        relaxed, spent = self.costs(p, q, drafts, uniform, chance, node_at, blends)
        return Verdict(node_at, residual, relaxed, spent)

    def weigh(
        self,
        level: TraversalLevel,
        p: Tensor,  # [B, w, V], blended
        q: Tensor,  # [B, w, V]
        weight: Tensor,  # [B, w]
        whole: Tensor,  # [B, w, V] p as it was
        tokens: Tensor,  # [B, M]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The children of w nodes in turn.

        Returns the children's weights [B, w, c]; and where nothing behind them was kept, what is left of the nodes' p
        [B, w, V] and of their weights [B, w], with which they are kept.
        """
        weights = []
        for rank in range(level.child.shape[1]):
            child = level.child[:, rank]  # [w]
            token = tokens.index_select(1, child)[..., None]  # [B, w, 1]
            own, drawn = gather(p, 2, token)[..., 0], gather(q, 2, token)[..., 0]
            exists = (child > 0) & (drawn > 0)  # else the draws ran out before it
            weights.append((weight * own / drawn.clamp(min=TINY)).clamp(max=1) * exists)
            left = (weight[..., None] * p - q).clamp(min=0)
            mass = left.sum(-1)  # [B, w]
            missing = mass + (1 - weight)
            left = torch.where((mass > 0)[..., None], left / mass[..., None], whole)
            p = torch.where(exists[..., None], left, p)
            chance = (mass / missing).masked_fill(missing <= 0, 1.0)
            weight = torch.where(exists, chance, weight)
            q = remove_token(q, token)
        return torch.stack(weights, 2), p, weight

    def costs(
        self,
        p: Tensor,
        q: Tensor,
        drafts: Drafts,
        uniform: Tensor,
        chance: Tensor,  # [B, M]
        node: Tensor,  # [B] where the walk stops
        blends: Sequence[Blend],  # [B, w] of each depth; none where no image blends
    ) -> tuple[Tensor, Tensor]:
        """Which drafts of the path were kept thanks to relaxation, and what its nodes spent: both [B, D].

        A first child is kept with the mass min(p', q), of which min(p, q) is not due to blending.
        """
        tables, path = drafts.tables, rows_at(drafts.tables.path, node)  # [B, D + 1]
        parent, child = path[:, :-1], path[:, 1:]
        if not blends:
            zero = torch.zeros_like(uniform[:, :1]).expand_as(child)
            return zero > 0, zero
        row, first = gather(tables.row, 1, parent), gather(tables.child[..., 0], 1, parent)
        share, spent = (gather(torch.cat(x, 1), 1, row) for x in zip(*blends, strict=True))
        depth = gather(tables.depth, 1, node[:, None])  # [B, 1]
        spent = spent * ((first > 0) & (self.depth <= depth))
        at = row * p.shape[-1] + gather(drafts.tokens, 1, child)
        own, drawn = gather(p.flatten(1), 1, at), gather(q.flatten(1), 1, at)
        raised = torch.minimum(own + share * (drawn - own), drawn)
        # The last draft of the path was kept as its uniform is less than its chance; the others whatever theirs is
        last = gather(chance, 1, child).masked_fill(self.depth != depth - 1, 1.0)
        bar = gather(uniform, 1, (child - 1).clamp(min=0)) / last
        relaxed = (first == child) & (spent > 0) & (self.depth < depth)
        return relaxed & (bar >= own / raised.clamp(min=TINY)), spent
