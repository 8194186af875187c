"""The static tree that takes the least time per token.

Two things are known of a model on a device: the chances that drafts are accepted, and what a step costs by the
shape of its tree. What a tree gains is then a sum over its nodes, and the best tree of each size follows by dynamic
programming (Sequoia, arXiv 2402.12374, section 3.1). Here the chances depend on the depth as well, and on whether the
parent was a first child: where the drafter's first guess was right, the next one more often is. And what a level
costs depends on its width.

Siblings are tried in turn, so a child's chance does not depend on how many siblings follow it. Needs no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lantern_hpu.tree import DraftTree, Path

# [D][2][C]: chance of each child of a node at a depth, given that the node was accepted; by the node's kind
Rates = Sequence[Sequence[Sequence[float]]]
KINDS = ("first", "later")  # the root and first children; all others
SEEN = 10  # walks that a chance from the depth above is worth
Table = NDArray[
    np.float64
]  # [nodes + 1, nodes]: at most so many nodes, so many of them with children


def kind(path: Path) -> int:
    """Which of `KINDS` a node is."""
    return int(bool(path) and path[-1] > 0)


# ------------------------------------------------------------------------------------ what a tree gains


def together(*profiles: dict[str, Any]) -> dict[str, Any]:
    """The counts of several profiles (see `lantern_hpu.profile`) of any trees, added."""
    shapes = [np.array(p[name]["offered"]).shape for p in profiles for name in KINDS]
    depth, most = (max(sizes) for sizes in zip(*shapes, strict=True))
    total: dict[str, Any] = {}
    for name in KINDS:
        total[name] = {}
        for what in ("offered", "accepted"):
            table = np.zeros((depth, most), np.int64)
            for profile in profiles:
                rows = np.array(profile[name][what])
                table[: rows.shape[0], : rows.shape[1]] += rows
            total[name][what] = table.tolist()
    return total


def estimate(counts: dict[str, Any], depth: int | None = None) -> Rates:
    """Chances from counts; what was seen seldom leans on the depth above.

    A child that was never offered to a walk, there or above, gets no chance, and will not be drafted.

    Args:
        counts: as `together` returns them. depth: how deep; as deep as the counts if not given.
    """
    shape = np.array(counts[KINDS[0]]["offered"]).shape
    unseen = [0] * shape[1]
    found: list[list[list[float]]] = []
    for level in range(shape[0] if depth is None else depth):
        rows: list[list[float]] = []
        for index, name in enumerate(KINDS):
            offered, accepted = (
                counts[name][what][level] if level < shape[0] else unseen
                for what in ("offered", "accepted")
            )
            if level:
                row = [
                    (got + SEEN * before) / (tries + SEEN)
                    for tries, got, before in zip(offered, accepted, found[-1][index], strict=True)
                ]
            elif index:
                row = rows[0]  # the root is of the other kind; for the depth below to lean on
            else:
                pairs = zip(offered, accepted, strict=True)
                row = [got / tries if tries else 0.0 for tries, got in pairs]
            # Of a node's children one is accepted at most
            rows.append([chance / max(1.0, sum(row)) for chance in row])
        found.append(rows)
    return found


def chances(tree: DraftTree, rates: Rates) -> list[float]:
    """[M] chance that each node is reached: accepted together with all its ancestors."""
    found = [1.0]
    for node in range(1, tree.size):
        *above, rank = tree.paths[node]
        found.append(found[tree.parent[node]] * rates[len(above)][kind(tuple(above))][rank])
    return found


def expected_tokens(tree: DraftTree, rates: Rates) -> float:
    """Tokens that a step adds: the accepted drafts, and the token after them."""
    return sum(chances(tree, rates))


def gain_law(tree: DraftTree, rates: Rates) -> list[float]:
    """[D + 1] chances that a step adds 1, 2, ... D + 1 tokens."""
    reached = chances(tree, rates)
    deep = [*(sum(reached[n] for n in level) for level in tree.levels), 0.0]
    return [here - below for here, below in zip(deep, deep[1:], strict=False)]


def expected_steps(law: Sequence[float], tokens: int, images: int = 1) -> float:
    """Steps until the slowest of some images has so many more tokens, each step's gain drawn from the law.

    What a step adds past the end of an image is lost, so this is more than tokens / mean of the law.
    """
    missing = np.zeros(tokens + 1)  # chance that so many tokens are still missing
    missing[tokens] = 1.0
    steps = 0.0
    while (left := missing[1:].sum()) > 1e-9:
        steps += 1 - (1 - min(left, 1.0)) ** images
        after = np.zeros_like(missing)
        for gain, chance in enumerate(law, 1):
            after[: max(tokens + 1 - gain, 0)] += chance * missing[gain:]
            after[0] += chance * missing[:gain].sum()
        missing = after
    return float(steps)


# ------------------------------------------------------------------------------------ what a step costs


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step by the shape of its tree.

    Attributes:
        alone: with the one-node tree, which drafts nothing.
        widths, verify: of verifying so many nodes, with all that does not depend on the tree; linear in between,
            and never falling.
        level: more for each level of drafts.
        node: more for each node with children: it goes through the drafter, and its laws are made.
        child: more for each child that a walk may try in turn: the most children of a node, at every depth.
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
        """Of verifying this many nodes; beyond the last width its slope goes on."""
        last = self.widths[-1]
        if nodes <= last:
            return float(np.interp(nodes, self.widths, self.verify))
        slope = (self.verify[-1] - self.verify[-2]) / (last - self.widths[-2])
        return self.verify[-1] + slope * (nodes - last)


def fit_costs(alone: float, trees: Sequence[DraftTree], measured: Sequence[float]) -> Costs:
    """Costs that explain measured steps best, by least squares of the relative errors; none is negative.

    Args:
        measured: milliseconds of a step with each of the trees, which differ in every attribute of `Costs`.
    """
    widths = sorted({tree.size for tree in trees})
    sizes = np.array([tree.size for tree in trees])[:, None]
    gaps = np.diff(widths)
    # How far each tree is past each width; the first column is what every step takes
    past = np.clip((sizes - np.array(widths[:-1])) / gaps, 0, 1)
    shape = [[t.depth, len(t.expanded), sum(t.widest)] for t in trees]
    factors = np.hstack([np.ones_like(sizes), past, np.array(shape)])
    found = nonnegative(factors / np.array(measured)[:, None])
    verify = np.cumsum(found[: len(widths)])
    level, node, child = (float(x) for x in found[len(widths) :])
    return Costs(alone, tuple(widths), tuple(map(float, verify)), level, node, child)


def nonnegative(factors: NDArray[np.float64], rounds: int = 20_000) -> NDArray[np.float64]:
    """x >= 0 with the least |factors x - 1|, one entry after the other."""
    square, goal = factors.T @ factors, factors.sum(0)
    x = np.zeros(len(goal))
    for _ in range(rounds):
        before = x.copy()
        for i in range(len(x)):
            x[i] = max(0.0, x[i] + (goal[i] - square[i] @ x) / square[i, i])
        if np.abs(x - before).max() <= 1e-9 * x.max():
            break
    return x


def even_tree(drafts: int, depth: int, parents: int, most: int) -> DraftTree | None:
    """A tree to measure: levels as equal as can be, at most so many nodes with children in each.

    Returns None if a node would have more than `most` children.
    """
    levels: list[list[int]] = []
    above, left = 1, drafts
    for level in range(depth):
        used = min(above, parents)
        below = min(-(-left // (depth - level)), used * most)
        used = min(used, below)
        levels.append([below // used + (i < below % used) for i in range(used)])
        above, left = below, left - below
    if left or drafts < depth:
        return None
    return DraftTree.from_counts(f"even_{drafts}x{depth}x{parents}", levels)


def probes(nodes: int, depth: int, most: int) -> list[DraftTree]:
    """Trees of sizes up to `nodes`; of each size a flat one, and deep ones of few, some and many parents."""
    sizes = [2]
    while sizes[-1] < nodes:
        sizes.append(min(2 * sizes[-1], nodes))
    found: dict[tuple[Path, ...], DraftTree] = {}
    for size in sizes:
        deep = min(depth, size - 1)
        shapes = [*((level, most) for level in range(1, deep + 1)), (deep, 1), (deep, 3)]
        trees = [even_tree(size - 1, level, parents, most) for level, parents in shapes]
        flat = [tree for tree in trees[:deep] if tree is not None][:1]
        found |= {tree.paths: tree for tree in (*flat, *trees[deep - 1 :]) if tree is not None}
    return list(found.values())


# ------------------------------------------------------------------------------------ the best tree


class Solver:
    """The most gaining trees of one depth, whose nodes have at most so many children at each depth.

    `values[d][kind]` holds what the best subtree of a node at depth d gains, the node itself counted as 1;
    `forests[d][kind][b]` the same for a node with exactly b children.
    """

    def __init__(self, rates: Rates, nodes: int, most: Sequence[int]) -> None:
        """
        Args:
            nodes: M at most. most: [D] children of a node at each depth; its length is the tree's depth.
        """
        self.rates, self.most, self.depth = rates, list(most), len(most)
        leaf = np.full((nodes + 1, nodes), -np.inf)
        leaf[1:] = 1.0
        self.values: list[list[Table]] = [[leaf, leaf]]
        self.forests: list[list[list[Table]]] = []
        for depth in reversed(range(self.depth)):
            below = [(table, worth_a_node(table)) for table in self.values[0]]
            kinds = range(2 if depth else 1)  # there is one root
            grown = [[leaf] for _ in kinds]
            for forest, row in zip(grown, rates[depth], strict=False):
                for rank in range(min(most[depth], nodes - 1)):
                    forest.append(one_more(forest, row[rank], *below[min(rank, 1)]))
            self.forests.insert(0, grown)
            self.values.insert(0, [np.maximum.reduce(forest) for forest in grown])

    def cheapest(self, costs: Costs, tries: int) -> tuple[float, DraftTree]:
        """The least milliseconds a token of steps that try so many children in turn, and the tree."""
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
        forest = self.forests[len(path)][kind(path)]
        gains = [table[nodes, inner] for table in forest]
        least = 0 if path else 1
        children = least + int(np.argmax(gains[least:]))
        found: list[Path] = []
        for rank in reversed(range(children)):
            y, j = self.share(path, rank, nodes, inner)
            found += [(*path, rank), *self.paths((*path, rank), y, j)]
            nodes, inner = nodes - y, inner - j - (rank == 0)
        return found

    def share(self, path: Path, rank: int, nodes: int, inner: int) -> tuple[int, int]:
        """Nodes, and nodes with children, that go to the last of `rank` + 1 children of a node."""
        depth = len(path)
        others = self.forests[depth][kind(path)][rank]
        below, rate = self.values[depth + 1][min(rank, 1)], self.rates[depth][kind(path)][rank]
        left = inner - (rank == 0)  # the first child makes its parent one with children
        kept = others[nodes - 1 :: -1, left::-1]  # [y - 1, j]: by what the last child takes away
        gain = kept + rate * below[1 : nodes + 1, : left + 1]
        y, j = np.unravel_index(int(gain.argmax()), gain.shape)
        return int(y) + 1, int(j)


def one_more(
    forest: Sequence[Table], rate: float, below: Table, entries: Sequence[tuple[int, int]]
) -> Table:
    """The best for one child more than the last table of a forest has, over all ways to share the nodes with it.

    Args:
        rate: the child's chance. below: what its own subtree gains. entries: those of `below` worth a look.
    """
    others, first = forest[-1], len(forest) == 1
    nodes, inner = others.shape
    result = np.full_like(others, -np.inf)
    for y, j in entries:
        taken = j + first  # the first child makes its parent one with children
        if taken < inner:
            gain = others[: nodes - y, : inner - taken] + rate * below[y, j]
            np.maximum(result[y:, taken:], gain, out=result[y:, taken:])
    return result


def worth_a_node(table: Table) -> list[tuple[int, int]]:
    """Entries that gain more than with a node less, and than with a node with children less."""
    padded = np.pad(table, ((1, 0), (1, 0)), constant_values=-np.inf)
    rises = (table > padded[:-1, 1:]) & (table > padded[1:, :-1])
    return [(int(y), int(j)) for y, j in np.argwhere(rises)]


def ms_per_token(tree: DraftTree, rates: Rates, costs: Costs) -> float:
    """What `best_tree` minimises."""
    return costs.step(tree) / expected_tokens(tree, rates)


def best_tree(rates: Rates, costs: Costs, nodes: int, slack: float = 0.002) -> DraftTree:
    """The tree of the least time per token among those with a draft, at most `nodes` nodes, and the rates' depth.

    The tables know the depth, the nodes and those with children, but not the most children at each depth, whose
    tries take time too. Those are found by branch and bound: with at most so many children at each depth, and the
    tries of at least so many counted, the tables give a time that none of these trees is below.

    Args:
        slack: share of the least time that the answer may lie above it.
    """
    order = count()  # of equal bounds the older is looked at first
    heap: list[tuple[float, int, DraftTree, Solver, list[int]]] = []

    def push(solver: Solver, fewest: list[int]) -> None:
        bound, tree = solver.cheapest(costs, sum(fewest))
        heapq.heappush(heap, (bound, next(order), tree, solver, fewest))

    for depth in range(1, min(len(rates), nodes - 1) + 1):
        push(Solver(rates, nodes, [len(row[0]) for row in rates[:depth]]), [1] * depth)
    best = heap[0][2]
    while heap:
        bound, _, tree, solver, fewest = heapq.heappop(heap)
        best = min(best, tree, key=lambda tree: ms_per_token(tree, rates, costs))
        if bound * (1 + slack) >= ms_per_token(best, rates, costs):
            break
        spread = [most - least for most, least in zip(tree.widest, fewest, strict=False)]
        if not any(spread):
            continue  # it has that time: no other of these trees is below it
        depth = spread.index(max(spread))
        middle = fewest[depth] + spread[depth] // 2
        push(solver, [*fewest[:depth], middle + 1, *fewest[depth + 1 :]])
        narrower = [*solver.most[:depth], middle, *solver.most[depth + 1 :]]
        push(Solver(rates, nodes, narrower), fewest)
    return best


def likeliest_tree(name: str, rates: Rates, nodes: int) -> DraftTree:
    """The nodes that are reached most often, for chances that do not grow with the rank."""
    heap: list[tuple[float, Path]] = [(-1.0, ())]
    paths: list[Path] = []
    while heap and len(paths) < nodes:
        chance, path = heapq.heappop(heap)
        paths.append(path)
        if len(path) < len(rates):
            for rank, rate in enumerate(rates[len(path)][kind(path)]):
                heapq.heappush(heap, (chance * rate, (*path, rank)))
    return DraftTree.from_paths(name, paths)
