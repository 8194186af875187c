"""Draft trees as tensors: the same for every image and step, or grown anew from scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lantern_hpu.ops.buffers import arange32, constant
from lantern_hpu.ops.sampling import gather, gather_rows
from lantern_hpu.tree import DraftTree, DynamicTree, Tree


@dataclass
class TreeTables:
    """One tree an image: M nodes, at most D deep, at most C children of a node."""

    parent: Tensor  # [B, M] int32, the root is its own
    depth: Tensor  # [B, M] int32
    child: Tensor  # [B, M, C] int32 in sibling order, 0 where there is none
    path: Tensor  # [B, M, D + 1] int32, nodes from the root to each node, then the node itself repeated
    ancestors: Tensor  # [B, M, M] bool, whether the second node is the first or above it
    row: Tensor  # [B, M] int32, which distribution is a node's; means nothing at leaves


@dataclass
class Drafts:
    """The tree of each image, with its tokens."""

    tokens: Tensor  # [B, M] int32, the root's first
    # [B, I, V] float32, the probabilities that children were drawn with; None: they were not drawn
    q: Tensor | None
    tables: TreeTables
    uniform: Tensor | None = None  # [B, n] of the step's uniforms, those that `absorb` takes


def rows_at(table: Tensor, node: Tensor) -> Tensor:
    """Rows of a table [B, M, X] at node [B]: [B, X]."""
    return gather_rows(table, node[:, None])[:, 0]


class StaticTables(nn.Module):
    """The tables of a static tree, as constants on the device."""

    def __init__(self, tree: DraftTree) -> None:
        super().__init__()
        table = [list(c) + [0] * (tree.max_children - len(c)) for c in tree.children]
        expanded = {node: row for row, node in enumerate(tree.expanded)}
        rows = [expanded.get(node, 0) for node in range(tree.size)]
        self.parent, self.depth = constant(tree.parent), constant(tree.depths)  # [M] both
        self.child = constant(table, torch.int32)  # [M, C]
        self.path = constant(tree.path_table)  # [M, D + 1]
        self.ancestors = constant(tree.ancestors)  # [M, M]
        self.row = constant(rows)  # [M]

    def forward(self, images: int) -> TreeTables:
        tables = (self.parent, self.depth, self.child, self.path, self.ancestors, self.row)
        return TreeTables(*(table.expand(images, *table.shape) for table in tables))


class JudgedNodes(nn.Module):
    """The nodes whose distributions a step computes: those with children; a chain's and a window's all.

    Of a dynamic tree all are, since which have children is not known.
    """

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        judged = tree.judged if isinstance(tree, DraftTree) else None
        self.node = None if judged is None else constant(judged, torch.int32)  # [J]
        # [M] which of the judged nodes' distributions is a node's, where all nodes are judged
        whole = judged is not None and len(judged) == tree.size
        ranks = {node: rank for rank, node in enumerate(judged or ())}
        self.rank = constant([ranks[n] for n in range(tree.size)]) if whole else None
        self.inner = len(tree.expanded) if isinstance(tree, DraftTree) else tree.size  # I

    def forward(self, x: Tensor) -> Tensor:
        """Of all nodes [A, M, ...] those that are judged [A, J, ...]."""
        # Not by brackets: an index beside a full dimension leaves the graph of some compilers.
        return x if self.node is None else x.index_select(1, self.node)


class DynamicTables(nn.Module):
    """Keeps the most probable candidates and links them to trees.

    Candidates are numbered as they come: `top_k` children of the root, then for each expansion the children
    of its `top_k` nodes. A child never scores more than its parent and has a higher number; so with ties going
    to the lower number, a candidate that is kept has its parent kept.
    """

    def __init__(self, tree: DynamicTree) -> None:
        super().__init__()
        self.tree = tree
        k, count = tree.top_k, tree.candidates
        first = torch.ones(k, dtype=torch.int32)
        deeper = arange32(tree.expansions).repeat_interleave(k * k) + 2
        earlier = torch.ones(count, count, dtype=torch.bool).tril(-1)
        self.earlier = constant(earlier)  # [n, n], the second comes before the first
        self.depth_of = constant(torch.cat([first, deeper]))  # [n]
        self.rank_of = constant(arange32(count) % k)  # [n] place among its siblings
        self.node = constant(arange32(tree.size))  # [M]
        self.order = constant(arange32(tree.depth + 1))  # [D + 1]

    def forward(self, scores: Tensor, parents: Tensor) -> tuple[Tensor, TreeTables]:
        """
        Args:
            scores: [B, n] float32, log-probability of the path to each candidate.
            parents: [B, n] int32, the parent's number plus 1; 0 is the root.

        Returns the candidates behind nodes 1 .. M-1 [B, M - 1] int32, and the trees.
        """
        chosen, number = self.keep(scores)
        zero = torch.zeros_like(chosen[:, :1])
        nodes = torch.cat([zero, number], 1)  # [B, n + 1] node of a candidate, by its number plus 1
        parent = torch.cat([zero, gather(nodes, 1, gather(parents, 1, chosen))], 1)
        depth = torch.cat([zero, self.depth_of[chosen]], 1)
        path = self.paths(parent, depth)
        ancestors = (path[:, :, None] == self.node[:, None]).any(-1)
        child = self.link(parent, self.rank_of[chosen])
        every = self.node.expand(len(scores), -1)
        return chosen, TreeTables(parent, depth, child, path, ancestors, every)

    def keep(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The kept candidates in their order [B, M - 1], and how many are kept up to each candidate [B, n]."""
        mine, other = scores[..., None], scores[:, None]
        before = (other > mine) | ((other == mine) & self.earlier)  # [B, n, n]
        kept = before.sum(-1) < self.tree.drafts  # [B, n]
        number = kept.cumsum(-1, dtype=torch.int32)
        wanted = self.node[1:].expand(len(scores), -1).contiguous()
        return torch.searchsorted(number, wanted, out_int32=True), number

    def paths(self, parent: Tensor, depth: Tensor) -> Tensor:
        """[B, M, D + 1]: climb from every node at once, then turn the ways round."""
        way = [self.node.expand_as(parent)]
        for _ in range(self.tree.depth):
            way.append(gather(parent, 1, way[-1]))
        up = torch.stack(way, -1)  # [B, M, D + 1], the node, its parent, ...
        return gather(up, 2, (depth[..., None] - self.order).clamp(min=0))

    def link(self, parent: Tensor, rank: Tensor) -> Tensor:
        """The children of each node [B, M, C] from parents [B, M] and the drafts' ranks [B, M - 1]."""
        k = self.tree.top_k
        place = parent[:, 1:] * k + rank
        empty = torch.zeros_like(parent)[..., None].expand(-1, -1, k).flatten(1)
        drafts = self.node[1:].expand_as(place)
        return empty.scatter(1, place.long(), drafts).unflatten(1, (-1, k))
