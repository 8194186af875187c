"""Which drafts of a static tree get through: acceptance by depth, by rank, and by the parent's kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.config import Request
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.pipeline import Event, LanternPipeline
from lantern_hpu.step import Step
from lantern_hpu.tree import DraftTree
from lantern_hpu.tree.search import KINDS, kind


class Walks:
    """Counts of the walks down a tree. What lies past the end of an image is left out."""

    def __init__(self, tree: DraftTree) -> None:
        def none() -> list[list[int]]:
            return [[0] * tree.max_children for _ in range(tree.depth)]

        self.tree, self.tried = tree, [0] * tree.depth
        self.offered, self.accepted = [none() for _ in KINDS], [none() for _ in KINDS]

    def add(self, node: int, room: int) -> None:
        """One walk that ended at this node, in an image that lacked `room` tokens."""
        path = self.tree.paths[node]
        for depth in range(min(len(path) + 1, room, self.tree.depth)):
            above = path[:depth]
            which, children = kind(above), len(self.tree.children[self.tree.ids[above]])
            self.tried[depth] += children > 0
            for rank in range(children):
                self.offered[which][depth][rank] += 1
            if depth < len(path):
                self.accepted[which][depth][path[depth]] += 1

    def report(self) -> dict[str, Any]:
        """Lists by depth, or by depth and rank."""
        accepted = [
            [sum(ranks) for ranks in zip(*rows, strict=True)]
            for rows in zip(*self.accepted, strict=True)
        ]
        shares = zip(accepted, self.tried, strict=True)
        kinds = zip(KINDS, self.offered, self.accepted, strict=True)
        return {
            "tried": self.tried,
            "accepted": accepted,
            "by_depth": [sum(row) / tried if tried else 0.0 for row, tried in shares],
            **{name: {"offered": offered, "accepted": taken} for name, offered, taken in kinds},
        }


@torch.no_grad()
def profile(
    pipeline: LanternPipeline,
    requests: Sequence[Request],
    tree: DraftTree,
    drafter: Drafter | None = None,
    size: int | None = None,
    callback: Callable[[Event], None] | None = None,
) -> dict[str, Any]:
    """Draw these images and count.

    Args:
        drafter: in place of the model's own.
        size: images decoded together; all of them if not given.
        callback: called after each host read.

    Returns `tokens_per_step`; `tried` [D], walks that reached a node with children at each depth; `accepted`
    [D][C], how often the child of each rank was accepted there; `by_depth` [D], the share accepted; and for each
    kind of parent, `first` and `later` (see `tree.search`), how often such a child was `offered` [D][C] and
    `accepted` [D][C].
    """
    size = size or len(requests)
    engine = pipeline.make_engine(pipeline.plan(requests, tree, size), "eager", drafter)
    pipeline.warm_up(engine, requests[0])
    step = engine.step.function
    assert isinstance(step, Step)
    stops: list[tuple[Tensor, Tensor]] = []
    accept = step.accept

    def noted(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        result = accept(*given)
        stops.append((result[0].clone(), step.tokens - 1 - engine.state.count))
        return result

    setattr(step, "accept", noted)  # noqa: B010 - a method, for this engine alone
    walks, steps = Walks(tree), 0
    for start in range(0, len(requests), size):
        batch = requests[start : start + size]
        stops.clear()
        decoded = pipeline.draw_batch(engine, batch, size, callback=callback)
        steps += sum(decoded.steps[: len(batch)])
        for nodes, room in stops:
            ends = list(zip(nodes.tolist(), room.tolist(), strict=True))
            for node, left in ends[: len(batch)]:
                walks.add(node, left)
    gained = len(requests) * (step.tokens - 1)
    return {"tree": tree.name, "tokens_per_step": gained / steps, **walks.report()}
