"""Which drafts of a verified tree are accepted: exact speculative sampling and its relaxation.

Exact: children of a node were drawn without replacement from q; child x is accepted with probability
min(1, p(x) / q(x)), and after a rejection p becomes [p - q]+ and q loses x (Leviathan et al. 2023, with
SpecInfer's siblings). The law of the image does not change.

Relaxed (LANTERN, arXiv 2410.03355; LANTERN++, arXiv 2502.06352): x also stands for its nearest codes.
Going through its neighbours from the nearest, their mass is added to p(x) as long as the sum stays within
a bound: delta (additive) or (lambda - 1) p(x) (multiplicative).

`reference.py` is the same in plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lantern_hpu.constants import Constants, count_up
from lantern_hpu.sampling import gather, likeliest
from lantern_hpu.tree import DraftTree

Residual = Literal["sound", "official"]


@dataclass
class Bounds:
    """How far acceptance is relaxed, one value per image; k = 0 is exact."""

    k: Tensor  # [B] int32, neighbours that may lend their mass
    delta: Tensor  # [B] float32, additive bound (0 under the multiplicative rule)
    factor: Tensor  # [B] float32, lambda - 1 (0 under the additive rule)


@dataclass
class Verdict:
    """Where the walk down the tree stopped."""

    node: Tensor  # [B] int32, last accepted node
    law: Tensor  # [B, V] float32, law of the next token if `node` has children (all were rejected)
    # [B, D] bool, the draft at depth d+1 was accepted only thanks to its neighbours; means nothing for
    # depths past `node`
    relaxed: Tensor


class Acceptance(Constants):
    """The acceptance rule for one tree, with the tree's tables as constants on the device."""

    parent: Tensor
    child_table: Tensor
    law_row: Tensor
    above: Tensor
    priority: Tensor
    path: Tensor
    neighbours: Tensor | None
    nearness: Tensor | None

    def __init__(
        self, tree: DraftTree, neighbours: Tensor | None = None, residual: Residual = "sound"
    ) -> None:
        """
        Args:
            tree: at least one draft.
            neighbours: [V, K] int32, other codes by rising distance; None leaves relaxation out.
            residual: what a relaxed rejection leaves. "sound": [p - q]+. "official": as published, q is
                zeroed at the first k + 1 neighbours before the subtraction.
        """
        super().__init__()
        self.depth, self.max_children, self.residual = tree.depth, tree.max_children, residual
        # Most children of a node at each depth: no walk tries more there
        self.widest = [max(len(tree.children[n]) for n in nodes) for nodes in tree.frontiers]
        table = [list(c) + [0] * (tree.max_children - len(c)) for c in tree.children]
        expanded = {node: row for row, node in enumerate(tree.expanded)}
        rows = [expanded.get(node, -1) for node in range(tree.size)]
        # The deepest node wins; at equal depth the first in path order, which has the lower number.
        order = [d * tree.size + tree.size - n for n, d in enumerate(tree.depths)]
        self.constant("parent", torch.tensor(tree.parent))  # [M]
        self.constant("child_table", torch.tensor(table))  # [M, C], 0 where there is none
        self.constant("law_row", torch.tensor(rows))  # [M] row in p and q, -1 for leaves
        self.constant("above", torch.tensor(tree.ancestors)[:, 1:])  # [M, M - 1]
        self.constant("priority", torch.tensor(order))  # [M]
        self.constant("path", torch.tensor(tree.path_table)[:, 1:])  # [M, D]
        self.constant("neighbours", neighbours)
        self.constant("nearness", None if neighbours is None else count_up(neighbours.shape[1]))

    def lent(self, p: Tensor, token: Tensor, own: Tensor, bounds: Bounds) -> Tensor:
        """Mass that the neighbours of each token lend it.

        Args:
            p: [B, V] law, or [B, n, V] with one law per token.
            token: [B, n].
            own: [B, n], p(token).

        Returns [B, n] float32: the largest prefix sum within the bound; 0 without relaxation.
        """
        if self.neighbours is None or self.nearness is None:
            return torch.zeros_like(own)
        near = self.neighbours[token]  # [B, n, K]
        source = p if p.dim() == 3 else p[:, None].expand(-1, token.shape[1], -1)
        sums = gather(source, -1, near).cumsum(-1)
        bound = bounds.delta[:, None] + bounds.factor[:, None] * own
        inside = (sums <= bound[..., None]) & (self.nearness < bounds.k[:, None, None])
        return (sums * inside).amax(-1)

    def published_zeros(
        self, p: Tensor, q: Tensor, token: Tensor, own: Tensor, bounds: Bounds
    ) -> Tensor:
        """q [B, V] without the first k + 1 neighbours of token [B, 1], if the nearest is within the bound.

        Where the bound itself is zero q stays whole, so that it is exact under this residual too.
        """
        if self.neighbours is None or self.nearness is None:
            return q
        near = self.neighbours[token[:, 0]].long()  # [B, K]
        bound = bounds.delta[:, None] + bounds.factor[:, None] * own  # [B, 1]
        active = (bounds.k > 0) & (bounds.delta + bounds.factor > 0)
        relaxed = active[:, None] & (p.gather(1, near[:, :1]) <= bound)
        struck = (self.nearness <= bounds.k[:, None]) & relaxed
        return q.scatter(1, near, q.gather(1, near) * ~struck)

    def siblings(
        self,
        p: Tensor,  # [B, V] the target's law at a node
        q: Tensor,  # [B, V] the drafter's
        tokens: Tensor,  # [B, c] the children's tokens in the order of their draws
        exists: Tensor,  # [B, c] bool
        uniform: Tensor,  # [B, c]
        bounds: Bounds,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Try the children of one node in turn.

        Returns which was accepted [B, c] bool (at most one), the residual law if none was [B, V], and
        whether the accepted one needed its neighbours [B] bool.
        """
        whole = p
        waiting = torch.ones_like(exists[:, 0])
        relaxed = torch.zeros_like(waiting)
        accepted = []
        for child in range(tokens.shape[1]):
            token = tokens[:, child : child + 1]
            own, drawn = gather(p, 1, token), gather(q, 1, token)  # [B, 1]
            lent = self.lent(p, token, own, bounds)
            bar = uniform[:, child : child + 1] * drawn
            # Strictly below: a token of probability 0 is never accepted, whatever u. A token without
            # drafter mass was not really drawn (the draws ran out) and is skipped.
            tried = (exists[:, child] & (drawn[:, 0] > 0)) & waiting
            passed = tried & (bar < own + lent)[:, 0]
            relaxed = relaxed | (passed & ~(bar < own)[:, 0])
            failed = (tried & ~passed)[:, None]
            taken = (
                q if self.residual == "sound" else self.published_zeros(p, q, token, own, bounds)
            )
            rest = (p - taken).clamp(min=0)
            total = rest.sum(-1, keepdim=True)
            # Rounding can leave nothing; then the unreduced law is the closest honest answer.
            rest = torch.where(total > 0, rest / total, whole)
            p = torch.where(failed, rest, p)
            q = q.scatter(1, token.long(), 0.0)
            q = q / q.sum(-1, keepdim=True).clamp(min=1e-30)
            waiting = waiting & ~passed
            accepted.append(passed)
        return torch.stack(accepted, 1), p, relaxed

    def sampled(
        self,
        p: Tensor,  # [B, I, V] the target's laws at nodes with children
        q: Tensor,  # [B, I, V] the drafter's
        tokens: Tensor,  # [B, M]
        uniform: Tensor,  # [B, D, C]
        bounds: Bounds,
    ) -> Verdict:
        """Walk from the root, one level at a time, to the last accepted node."""
        node = torch.zeros_like(tokens[:, 0])
        law = p[:, 0]
        walking = torch.ones_like(node, dtype=torch.bool)
        relaxed = []
        for level in range(self.depth):
            row = self.law_row[node]
            walking = walking & (row >= 0)
            index = row.clamp(min=0)[:, None, None].expand(-1, 1, p.shape[-1])
            children = self.child_table[node][:, : self.widest[level]]  # [B, c]
            passed, rest, helped = self.siblings(
                gather(p, 1, index)[:, 0],
                gather(q, 1, index)[:, 0],
                gather(tokens, 1, children),
                (children > 0) & walking[:, None],
                uniform[:, level, : self.widest[level]],
                bounds,
            )
            law = torch.where(walking[:, None], rest, law)
            walking = walking & passed.any(1)
            node = torch.where(walking, (children * passed).sum(1, dtype=torch.int32), node)
            relaxed.append(helped)
        return Verdict(node, law, torch.stack(relaxed, 1))

    def greedy(self, p: Tensor, tokens: Tensor, bounds: Bounds) -> Verdict:
        """The longest path of drafts that each win the argmax, with their neighbours' mass if relaxed.

        Args:
            p: [B, I, V] the target's unfiltered laws; tokens: [B, M].
        """
        drafts = tokens[:, 1:]  # [B, M - 1]
        row = self.law_row[self.parent[1:]]  # [M - 1]
        own = gather(p.flatten(1), 1, row * p.shape[-1] + drafts)  # [B, M - 1]
        top, best = p.amax(-1)[:, row], likeliest(p, 1)[..., 0][:, row]
        wins = drafts == best
        raised = own
        if self.neighbours is not None:
            raised = own + self.lent(p[:, row], drafts, own, bounds)
        helped = (raised > top) | ((raised == top) & (drafts < best))
        failed = ~(wins | helped)  # [B, M - 1]
        reached = ~(failed[:, None] & self.above).any(-1)  # [B, M]
        node = (reached * self.priority).argmax(-1).int()
        on_path = self.path[node]  # [B, D]
        relaxed = gather(helped & ~wins, 1, (on_path - 1).clamp(min=0))  # past `node`: not counted
        return Verdict(node, p[:, 0], relaxed)
