"""What a tree should gain: from counts of accepted drafts to chances, tokens a step, and steps an image.

The chances depend on the depth, on the rank, and on whether the parent was a first child: where the drafter's first
guess was right, the next one more often is. Siblings are tried one after the other, so a child's chance does not depend
on how many siblings follow it. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lantern_hpu.decode.child_counts import ChildCounts, kind_of
from lantern_hpu.tree import DraftTree

# [D, 2, C] chance of each child of a node at a depth, given that the node was accepted; by the node's kind
ChanceTable = NDArray[np.float64]
SEEN = 10  # walks that a chance from the depth above is worth


def estimate(counts: ChildCounts, depth: int | None = None) -> ChanceTable:
    """Chances from counts; what was seen seldom leans on the depth above.

    A child that was never offered to a walk, there or above, gets no chance, and will not be drafted.

    Args:
        depth: how deep; as deep as the counts if not given.
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
    """Steps until the slowest of some images has so many more tokens.

    What a step adds past the end of an image is lost, so this is more than tokens / mean gain.

    Args:
        gains: chances that a step adds 1, 2, ... tokens.
    """
    missing = np.zeros(tokens + 1)  # chance that so many tokens are still missing
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
