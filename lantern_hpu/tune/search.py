"""The static tree that takes the least time per token.

Two things are known of a model on a device: the chances that drafts are accepted, and what a step costs by the shape of
its tree. What a tree gains is then a sum over its nodes, and the best tree of each
size follows by dynamic programming (Sequoia, arXiv 2402.12374, section 3.1). Here the chances depend on the depth as
well, and on the kind of the parent; and what a level costs depends on its width. Needs no torch;
`fit_costs` needs scipy.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from lantern_hpu.train.acceptance_counts import ChildCounts, kind_of
from lantern_hpu.tree import DraftTree, Path

# ------------------------------------------------------------------------------------ what a step costs


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step by the shape of its tree.

    Attributes:
        alone: with the one-node tree, which drafts nothing.
        widths, verify: of verifying that many nodes, with all that does not depend on the tree; linear in between,
            and never falling.
        level: more for each level of drafts.
        node: more for each node with children: it goes through the drafter, and its probabilities are made.
        child: more for each child that a walk may try: the most children of a node, at every depth.
    """

    alone: float
    widths: tuple[int, ...]
    verify: tuple[float, ...]
    level: float
    node: float
    child: float

    def step(self, tree: DraftTree) -> float:
        """Of a whole step with this tree."""
        if not tree.depth:
            return self.alone
        drafting = self.level * tree.depth + self.node * len(tree.expanded)
        return self.verifying(tree.size) + drafting + self.child * sum(tree.widest)

    def verifying(self, nodes: int) -> float:
        """Of verifying this many nodes; extrapolated beyond the last of several widths."""
        last = self.widths[-1]
        if nodes <= last or len(self.widths) == 1:
            return float(np.interp(nodes, self.widths, self.verify))
        slope = (self.verify[-1] - self.verify[-2]) / (last - self.widths[-2])
        return self.verify[-1] + slope * (nodes - last)


def fit_costs(alone: float, trees: Sequence[DraftTree], measured: Sequence[float]) -> Costs:
    """Costs that explain measured steps best, by least squares of the relative errors; none is negative.

    Steps are measured in milliseconds, with trees that differ in every attribute of `Costs`.
    """
    from scipy.optimize import nnls  # an extra, which windows do without

    widths = sorted({tree.size for tree in trees})
    sizes = np.array([tree.size for tree in trees])[:, None]
    gaps = np.diff(widths)
    # How far each tree is past each width; the first column is what every step takes
    past = np.clip((sizes - np.array(widths[:-1])) / gaps, 0, 1)
    shape = [[t.depth, len(t.expanded), sum(t.widest)] for t in trees]
    factors = np.hstack([np.ones_like(sizes), past, np.array(shape)])
    result, _ = nnls(factors / np.array(measured)[:, None], np.ones(len(trees)))
    verify = np.cumsum(result[: len(widths)])
    level, node, child = (float(x) for x in result[len(widths) :])
    return Costs(alone, tuple(widths), tuple(map(float, verify)), level, node, child)


def even_tree(drafts: int, depth: int, parents: int, most: int) -> DraftTree | None:
    """A tree to measure: levels as equal as can be, at most `parents` nodes with children in each.

    Returns None if a node would have more than `most` children.
    """
    levels: list[list[int]] = []
    width, left = 1, drafts  # of the level above, and drafts that have no place yet
    for level in range(depth):
        expanded = min(width, parents)
        width = min(-(-left // (depth - level)), expanded * most)
        expanded, left = min(expanded, width), left - width
        levels.append([width // expanded + (i < width % expanded) for i in range(expanded)])
    if left or drafts < depth:
        return None
    return DraftTree.from_counts(f"even_{drafts}x{depth}x{parents}", levels)


def probes(nodes: int, depth: int, most: int) -> list[DraftTree]:
    """Trees of sizes up to `nodes`; of each size a flat one, and deep ones of few, some and many parents."""
    sizes = [2]
    while sizes[-1] < nodes:
        sizes.append(min(2 * sizes[-1], nodes))
    result: dict[tuple[Path, ...], DraftTree] = {}
    for size in sizes:
        deep = min(depth, size - 1)
        shapes = [*((level, most) for level in range(1, deep + 1)), (deep, 1), (deep, 3)]
        trees = [even_tree(size - 1, level, parents, most) for level, parents in shapes]
        flat = [tree for tree in trees[:deep] if tree is not None][:1]
        result |= {tree.paths: tree for tree in (*flat, *trees[deep - 1 :]) if tree is not None}
    return list(result.values())


# ------------------------------------------------------------------------------------ what a tree gains

# Chances depend on the depth, on the rank, and on whether the parent was a first child: where the drafter's first
# guess was right, the next one more often is. Siblings are tried one after the other, so a child's chance does not
# depend on how many siblings follow it.

# [D, 2, C] chance of each child of a node at a depth, given that the node was accepted; by the node's kind
ChanceTable = NDArray[np.float64]
SEEN = 10  # walks that a chance from the depth above is worth


def estimate(counts: ChildCounts, depth: int | None = None) -> ChanceTable:
    """Chances from counts, as deep as those unless a depth is given; what was seen seldom leans on the depth above.

    A child that was never offered to a walk, there or above, gets no chance, and will not be drafted.
    """
    levels = counts.offered.shape[1]
    depth = levels if depth is None else depth
    room = ((0, 0), (0, max(depth - levels, 0)), (0, 0))
    offered, accepted = (np.pad(table, room) for table in (counts.offered, counts.accepted))
    # There is one root; for the depth below to lean on, it is of the other kind too.
    root = np.repeat(accepted[:1, 0] / offered[:1, 0].clip(min=1), 2, 0)  # [2, C]
    result = [shares(root)]
    for level in range(1, depth):
        seen = accepted[:, level] + SEEN * result[-1]
        result.append(shares(seen / (offered[:, level] + SEEN)))
    return np.array(result[:depth])


def shares(chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """[2, C] chances of a node's children, of which one is accepted at most."""
    return chances / chances.sum(1, keepdims=True).clip(min=1)


def reach(tree: DraftTree, chances: ChanceTable) -> list[float]:
    """[M] chance that each node is accepted together with all its ancestors."""
    result = [1.0]
    for node in range(1, tree.size):
        *parent, rank = tree.paths[node]
        chance = chances[len(parent), kind_of(tuple(parent)), rank]
        result.append(result[tree.parent[node]] * float(chance))
    return result


def expected_tokens(tree: DraftTree, chances: ChanceTable) -> float:
    """Tokens that a step adds: the accepted drafts, and the token after them."""
    return sum(reach(tree, chances))


def gain_probs(tree: DraftTree, chances: ChanceTable) -> list[float]:
    """[D + 1] chances that a step adds 1, 2, ... D + 1 tokens."""
    reached = reach(tree, chances)
    deep = [*(sum(reached[n] for n in level) for level in tree.levels), 0.0]
    return [here - next_level for here, next_level in zip(deep, deep[1:], strict=False)]


def expected_steps(gains: Sequence[float], tokens: int, images: int = 1) -> float:
    """Steps until the slowest of n images has `tokens` more tokens; `gains` are chances that a step adds 1, 2, ...

    What a step adds past the end of an image is lost, so this is more than tokens / mean gain.
    """
    missing = np.zeros(tokens + 1)  # [n] chance that n tokens are still missing
    missing[tokens] = 1.0
    steps = 0.0
    while (left := missing[1:].sum()) > 1e-9:
        steps += 1 - (1 - min(left, 1.0)) ** images
        after = np.zeros_like(missing)
        for gain, chance in enumerate(gains, 1):
            after[: max(tokens + 1 - gain, 0)] += chance * missing[gain:]
            after[0] += chance * missing[:gain].sum()
        missing = after
    return float(steps)


# ------------------------------------------------------------------------------------ the search

# [nodes + 1, nodes]: at most m nodes, i of them with children
Table = NDArray[np.float64]


class Solver:
    """The most gaining trees of one depth, whose nodes have at most `most` children at each depth.

    `values[d][kind]` holds what the best subtree of a node at depth d gains, the node itself counted as 1;
    `forests[d][kind][b]` the same for a node with exactly b children.
    """

    def __init__(self, chances: ChanceTable, nodes: int, most: Sequence[int]) -> None:
        """Of at most `nodes` nodes; `most` [D] are the children of a node at each of the tree's depths."""
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
        """The least milliseconds a token of steps that try `tries` children, and the tree."""
        best = np.maximum.reduce(self.forests[0][0][1:])  # not the root alone
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

    The child has this chance; `entries` of what its subtree gains are worth a look.
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

    What it takes may exceed the least time by the share `slack`.

    The tables know the depth, the nodes and those with children, but not the most children at each depth, whose
    tries take time too. Those are found by branch and bound: with a bound on the children at each depth, and the
    tries of at least that bound's minimum counted, no such tree takes less time than the tables say.
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
