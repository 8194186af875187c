"""Which drafts of a static tree get through: acceptance by depth, by rank, and by the kind of the parent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lantern_hpu.core import Request
from lantern_hpu.decode.batch import Encode
from lantern_hpu.decode.engine import Engine
from lantern_hpu.tree import DraftTree, Path

KINDS = ("first", "later")  # of parents: the root and first children; all others


def kind_of(path: Path) -> int:
    """Which of `KINDS` a node is."""
    return int(bool(path) and path[-1] > 0)


@dataclass(frozen=True, eq=False)
class ChildCounts:
    """By the kind of the parent, its depth, and the rank of the child."""

    offered: NDArray[np.int64]  # [2, D, C]
    accepted: NDArray[np.int64]  # [2, D, C]

    @classmethod
    def none(cls, tree: DraftTree) -> ChildCounts:
        """Before any walk down this tree."""
        return cls(*np.zeros((2, len(KINDS), tree.depth, tree.max_children), np.int64))

    @property
    def walks(self) -> NDArray[np.int64]:
        """[D] walks that reached a node with children at each depth: such a node has a first child."""
        return self.offered[..., 0].sum(0)

    def add(self, tree: DraftTree, node: int, room: int) -> None:
        """Count a walk that ended at this node, in an image that lacked `room` tokens: no more is counted."""
        path = tree.paths[node]
        for depth in range(min(len(path) + 1, room, tree.depth)):
            parent = path[:depth]
            self.offered[kind_of(parent), depth, : len(tree.children[tree.ids[parent]])] += 1
            if depth < len(path):
                self.accepted[kind_of(parent), depth, path[depth]] += 1

    def as_json(self) -> dict[str, Any]:
        """For each kind lists `offered` and `accepted` [D][C]."""
        tables = zip(KINDS, self.offered, self.accepted, strict=True)
        return {name: {"offered": o.tolist(), "accepted": a.tolist()} for name, o, a in tables}


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
def profile(engine: Engine, encode: Encode, requests: Sequence[Request]) -> Profile:
    """Draw these images uncaptured, with the static tree of the engine's spec, and count."""
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
    return Profile(tree.name, len(requests) * (total - 1) / steps, counts)
