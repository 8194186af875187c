"""The static tree that takes the least time per token.

Two things are known of a model on a device: the chances that drafts are accepted (`expectation.py`), and what a step
costs by the shape of its tree (`costs.py`). What a tree gains is then a sum over its nodes, and the best tree of each
size follows by dynamic programming (Sequoia, arXiv 2402.12374, section 3.1). Here the chances depend on the depth as
well, and on the kind of the parent; and what a level costs depends on its width. Needs no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from lantern_hpu.decode.child_counts import kind_of
from lantern_hpu.lab.tune.costs import Costs
from lantern_hpu.lab.tune.expectation import ChanceTable, expected_tokens
from lantern_hpu.tree import DraftTree, Path

# [nodes + 1, nodes]: at most so many nodes, so many of them with children
Table = NDArray[np.float64]


class Solver:
    """The most gaining trees of one depth, whose nodes have at most so many children at each depth.

    `values[d][kind]` holds what the best subtree of a node at depth d gains, the node itself counted as 1;
    `forests[d][kind][b]` the same for a node with exactly b children.
    """

    def __init__(self, chances: ChanceTable, nodes: int, most: Sequence[int]) -> None:
        """
        Args:
            nodes: M at most. most: [D] children of a node at each depth; its length is the tree's depth.
        """
        self.chances, self.most, self.depth = chances, list(most), len(most)
        leaf = np.full((nodes + 1, nodes), -np.inf)
        leaf[1:] = 1.0
        self.values: list[list[Table]] = [[leaf, leaf]]
        self.forests: list[list[list[Table]]] = []
        for depth in reversed(range(self.depth)):
            subtrees = [(table, worth_a_node(table)) for table in self.values[0]]
            kinds = range(2 if depth else 1)  # there is one root
            grown = [[leaf] for _ in kinds]
            for forest, row in zip(grown, chances[depth], strict=False):
                for rank in range(min(most[depth], nodes - 1)):
                    forest.append(one_more(forest, row[rank], *subtrees[min(rank, 1)]))
            self.forests.insert(0, grown)
            self.values.insert(0, [np.maximum.reduce(forest) for forest in grown])

    def cheapest(self, costs: Costs, tries: int) -> tuple[float, DraftTree]:
        """The least milliseconds a token of steps that try so many children, and the tree."""
        best = np.maximum.reduce(self.forests[0][0][1:])  # the root alone is no step of this kind
        nodes, inner = best.shape
        drafting = costs.level * self.depth + costs.child * tries
        verify = np.array([0.0, *map(costs.verifying, range(1, nodes))])
        price = verify[:, None] + costs.node * np.arange(inner) + drafting
        each = np.where(best > 0, price / np.where(best > 0, best, 1.0), np.inf)
        m, i = np.unravel_index(int(each.argmin()), each.shape)
        paths = self.paths((), int(m), int(i))
        return float(each[m, i]), DraftTree.from_paths(f"tuned_{len(paths)}", paths)

    def paths(self, path: Path, nodes: int, inner: int) -> list[Path]:
        """Drafts of the best subtree of a node, by walking back through the tables."""
        if len(path) == self.depth:
            return []
        forest = self.forests[len(path)][kind_of(path)]
        gains = [table[nodes, inner] for table in forest]
        least = 0 if path else 1
        children = least + int(np.argmax(gains[least:]))
        result: list[Path] = []
        for rank in reversed(range(children)):
            y, j = self.share(path, rank, nodes, inner)
            result += [(*path, rank), *self.paths((*path, rank), y, j)]
            nodes, inner = nodes - y, inner - j - (rank == 0)
        return result

    def share(self, path: Path, rank: int, nodes: int, inner: int) -> tuple[int, int]:
        """Nodes, and nodes with children, that go to the last of `rank` + 1 children of a node."""
        depth = len(path)
        others = self.forests[depth][kind_of(path)][rank]
        subtree = self.values[depth + 1][min(rank, 1)]
        chance = self.chances[depth, kind_of(path), rank]
        left = inner - (rank == 0)  # the first child makes its parent one with children
        kept = others[nodes - 1 :: -1, left::-1]  # [y - 1, j]: by what the last child takes away
        gain = kept + chance * subtree[1 : nodes + 1, : left + 1]
        y, j = np.unravel_index(int(gain.argmax()), gain.shape)
        return int(y) + 1, int(j)


def one_more(
    forest: Sequence[Table], chance: float, subtree: Table, entries: Sequence[tuple[int, int]]
) -> Table:
    """The best for one child more than the last table of a forest has, over all ways to share the nodes with it.

    Args:
        chance: of the child. subtree: what its own gains. entries: those of `subtree` worth a look.
    """
    others, first = forest[-1], len(forest) == 1
    nodes, inner = others.shape
    result = np.full_like(others, -np.inf)
    for y, j in entries:
        taken = j + first  # the first child makes its parent one with children
        if taken < inner:
            gain = others[: nodes - y, : inner - taken] + chance * subtree[y, j]
            np.maximum(result[y:, taken:], gain, out=result[y:, taken:])
    return result


def worth_a_node(table: Table) -> list[tuple[int, int]]:
    """Entries that gain more than with a node less, and than with a node with children less."""
    padded = np.pad(table, ((1, 0), (1, 0)), constant_values=-np.inf)
    rises = (table > padded[:-1, 1:]) & (table > padded[1:, :-1])
    return [(int(y), int(j)) for y, j in np.argwhere(rises)]


def ms_per_token(tree: DraftTree, chances: ChanceTable, costs: Costs) -> float:
    """What `best_tree` minimises."""
    return costs.step(tree) / expected_tokens(tree, chances)


def best_tree(chances: ChanceTable, costs: Costs, nodes: int, slack: float = 0.002) -> DraftTree:
    """The tree of the least time per token among those with a draft, at most `nodes` nodes, and the chances' depth.

    The tables know the depth, the nodes and those with children, but not the most children at each depth, whose
    tries take time too. Those are found by branch and bound: with at most so many children at each depth, and the
    tries of at least so many counted, no such tree takes less time than the tables say.

    Args:
        slack: share of the least time that the answer may lie above it.
    """
    order = count()  # of equal bounds the older is looked at first
    heap: list[tuple[float, int, DraftTree, Solver, list[int]]] = []

    def push(solver: Solver, fewest: list[int]) -> None:
        bound, tree = solver.cheapest(costs, sum(fewest))
        heapq.heappush(heap, (bound, next(order), tree, solver, fewest))

    for depth in range(1, min(len(chances), nodes - 1) + 1):
        push(Solver(chances, nodes, [len(row[0]) for row in chances[:depth]]), [1] * depth)
    best = heap[0][2]
    while heap:
        bound, _, tree, solver, fewest = heapq.heappop(heap)
        best = min(best, tree, key=lambda tree: ms_per_token(tree, chances, costs))
        if bound * (1 + slack) >= ms_per_token(best, chances, costs):
            break
        spread = [most - least for most, least in zip(tree.widest, fewest, strict=False)]
        if not any(spread):
            continue  # it takes that time, and no other of these trees takes less
        depth = spread.index(max(spread))
        middle = fewest[depth] + spread[depth] // 2
        push(solver, [*fewest[:depth], middle + 1, *fewest[depth + 1 :]])
        narrower = [*solver.most[:depth], middle, *solver.most[depth + 1 :]]
        push(Solver(chances, nodes, narrower), fewest)
    return best


def most_reached(name: str, chances: ChanceTable, nodes: int) -> DraftTree:
    """The tree of the nodes that are reached most often, for chances that do not grow with the rank."""
    heap: list[tuple[float, Path]] = [(-1.0, ())]
    paths: list[Path] = []
    while heap and len(paths) < nodes:
        reached, path = heapq.heappop(heap)
        paths.append(path)
        if len(path) < len(chances):
            for rank, chance in enumerate(chances[len(path), kind_of(path)]):
                heapq.heappush(heap, (reached * chance, (*path, rank)))
    return DraftTree.from_paths(name, paths)
