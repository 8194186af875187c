"""Which drafts of a static tree get through: acceptance by depth, by rank, and by the kind of the parent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lantern_hpu.decode.batch import Encode
from lantern_hpu.decode.child_counts import ChildCounts
from lantern_hpu.decode.engine import Engine
from lantern_hpu.methods.request import Request
from lantern_hpu.tree import DraftTree


@dataclass(frozen=True)
class Profile:
    """What drawing with a tree came to."""

    tree: str
    tokens_per_step: float
    counts: ChildCounts

    def as_json(self) -> dict[str, Any]:
        """For reports.

        `tried` [D], walks that reached a node with children at each depth; `accepted` [D][C], how often the child of
        each rank was accepted there; `by_depth` [D], the share accepted; and the counts by the kind of the parent.
        """
        tried, accepted = self.counts.walks, self.counts.accepted.sum(0)  # [D], [D, C]
        return {
            "tree": self.tree,
            "tokens_per_step": self.tokens_per_step,
            "tried": tried.tolist(),
            "accepted": accepted.tolist(),
            "by_depth": (accepted.sum(1) / tried.clip(min=1)).tolist(),
            **self.counts.as_json(),
        }


@torch.no_grad()
def profile(
    engine: Engine,
    encode: Encode,
    requests: Sequence[Request],
    callback: Callable[[int], None] | None = None,
) -> Profile:
    """Draw these images uncaptured, with the static tree of the engine's spec, and count.

    Args:
        encode: gives the prefix of requests.
        callback: called after each step with the tokens known in the slowest image.
    """
    tree, size = engine.spec.tree, engine.spec.images
    assert isinstance(tree, DraftTree)
    counts, steps, total = ChildCounts.none(tree), 0, engine.target.config.tokens
    for start in range(0, len(requests), size):
        batch = list(requests[start : start + size])
        padded = batch + batch[-1:] * (size - len(batch))
        for step in engine.trace(encode(padded), padded):
            nodes = step.accepted.node.tolist()
            ends = list(zip(nodes, step.before, strict=True))[: len(batch)]
            for node, known in ends:
                counts.add(tree, node, total - known)
                steps += known < total
            if callback is not None:
                callback(min(step.known))
    return Profile(tree.name, len(requests) * (total - 1) / steps, counts)
