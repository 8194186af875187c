"""Acceptance by depth and rank: which drafts of a static tree get through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.config import Request
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.step import Step
from lantern_hpu.tree import DraftTree


@torch.no_grad()
def profile(
    pipeline: LanternPipeline,
    requests: Sequence[Request],
    tree: DraftTree,
    drafter: Drafter | None = None,
) -> dict[str, Any]:
    """Draw these images and count.

    Args:
        drafter: in place of the model's own.

    Returns `tokens_per_step`; `tried` [D], walks that reached a node with children at each depth; `accepted`
    [D][C], how often the child of each rank was accepted there; `by_depth` [D], the share accepted.
    """
    plan = pipeline.plan(requests, tree, len(requests))
    engine = pipeline.make_engine(plan, "eager", drafter)
    pipeline.warm_up(engine, requests[0])
    step = engine.step.function
    assert isinstance(step, Step)
    stops: list[tuple[Tensor, Tensor]] = []
    accept = step.accept

    def noted(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        result = accept(*given)
        stops.append((result[0].clone(), engine.state.count < step.tokens - 1))
        return result

    setattr(step, "accept", noted)  # noqa: B010 - a method, for this engine alone
    decoded = pipeline.draw_batch(engine, requests, len(requests))
    tried = [0] * tree.depth
    accepted = [[0] * tree.max_children for _ in range(tree.depth)]
    for nodes, running in stops:
        for node in nodes[running].tolist():
            count(tree, node, tried, accepted)
    gained = len(requests) * (step.tokens - 1)
    return {
        "tree": tree.name,
        "tokens_per_step": gained / sum(decoded.steps),
        "tried": tried,
        "accepted": accepted,
        "by_depth": [sum(a) / t if t else 0.0 for a, t in zip(accepted, tried, strict=True)],
    }


def count(tree: DraftTree, node: int, tried: list[int], accepted: list[list[int]]) -> None:
    """Add one walk that ended at this node."""
    path = tree.paths[node]
    for depth, rank in enumerate(path):
        tried[depth] += 1
        accepted[depth][rank] += 1
    if tree.children[node]:
        tried[len(path)] += 1
