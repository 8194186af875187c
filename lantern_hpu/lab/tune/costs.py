"""What a step costs, by the shape of its tree: the trees that are measured, and what follows for all others.

Needs no torch; `fit_costs` needs scipy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lantern_hpu.tree import DraftTree, Path


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step by the shape of its tree.

    Attributes:
        alone: with the one-node tree, which drafts nothing.
        widths, verify: of verifying so many nodes, with all that does not depend on the tree; linear in between,
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
        """Of verifying this many nodes; beyond the last of several widths its slope goes on."""
        last = self.widths[-1]
        if nodes <= last or len(self.widths) == 1:
            return float(np.interp(nodes, self.widths, self.verify))
        slope = (self.verify[-1] - self.verify[-2]) / (last - self.widths[-2])
        return self.verify[-1] + slope * (nodes - last)


def fit_costs(alone: float, trees: Sequence[DraftTree], measured: Sequence[float]) -> Costs:
    """Costs that explain measured steps best, by least squares of the relative errors; none is negative.

    Args:
        measured: milliseconds of a step with each of the trees, which differ in every attribute of `Costs`.
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
    """A tree to measure: levels as equal as can be, at most so many nodes with children in each.

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
