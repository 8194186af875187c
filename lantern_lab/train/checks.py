"""Before hours of training, that the target as its own drafter has every draft accepted; after them, which drafts were.

A wrong shift of tokens, wrong positions or masks, or guidance in one place only fail it. Features that a drafter reads
are not checked, since the target needs none; `tests/test_models.py` and `tests/test_train.py` compare those with a slow
twin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lantern_hpu.core import Request
from lantern_hpu.decode.batch import Encode
from lantern_hpu.decode.engine import Engine
from lantern_hpu.decode.state import DecodeState
from lantern_hpu.errors import WeightsError
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.ops.buffers import additive_mask
from lantern_hpu.ops.kv_cache import GrowingCache, LayerCache
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.tree import DraftTree

DEPTH = 3  # of the chain


class Echo(Drafter):
    """A drafter that asks the target: its entry i is the target's position i + 1, in the target's own cache.

    What it writes there is behind the committed positions, or equal to what was there.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target.config)
        self.asked = target
        self.state: DecodeState | None = None  # of the engine that it drafts for

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        rope: Tensor,
        mask: Tensor,
        cache: LayerCache | GrowingCache | None = None,
        index: Tensor | None = None,
    ) -> Tensor:
        """See `Drafter`. The condition's entries, 0 .. P - 2, are left alone: the target knows the condition."""
        assert self.state is not None and index is not None
        prefix = self.config.prefix
        if prefix > 1 and int(index[0]) == 0:
            return features
        words = additive_mask(self.state.valid[:, None, :prefix], mask.dtype)  # [R, 1, 1, P]
        words = words.expand(-1, -1, mask.shape[2], -1)
        shifted = torch.cat([words, mask[..., prefix - 1 : -1]], -1)
        x = self.asked.embed(tokens)
        return self.asked(x, rope, shifted, self.state.kv_cache, index + 1)


@torch.no_grad()
def check_wiring(pipeline: LanternPipeline, prompt: str, seed: int = 0) -> str:
    """Raise a WeightsError if the target, drafting a chain for itself, wastes steps. -> how many it did

    There are none, unless rounding makes a draft fail.
    """
    chain = DraftTree.from_paths("chain", [[0] * length for length in range(1, DEPTH + 1)])
    requests = [Request(prompt, seed, pipeline.model.sampling)]
    echo = Echo(pipeline.model.target)
    tokens = pipeline.model.target.config.tokens
    engine = pipeline.engines.make(pipeline.spec(requests, chain, 1, echo), "eager", echo)
    echo.state = engine.state
    pipeline.warm_up(engine, requests[0])
    steps = pipeline.draw_batch(engine, requests)[0].steps
    more = steps - math.ceil((tokens - 1) / (DEPTH + 1))
    if more > max(1, tokens // 100):
        why = f"drafting for itself it needs {more} steps more than it should"
        raise WeightsError("the target and the decoder do not fit", why, "check the model folder")
    return f"{more} steps more than the fewest" if more else "all of its drafts accepted"


@torch.no_grad()
def profile(engine: Engine, encode: Encode, requests: Sequence[Request]) -> dict[str, Any]:
    """Draw these images uncaptured, with the static tree of the engine's spec, and count which drafts are accepted.

    Returns `tried` [D], walks that reached a node with children at each depth; `accepted` [D][C], how often the child
    of each rank was accepted there; `by_depth` [D], the share accepted.
    """
    tree = engine.spec.tree
    size = engine.spec.images
    total = engine.target.config.tokens
    assert isinstance(tree, DraftTree)
    tried = np.zeros(tree.depth, np.int64)
    accepted = np.zeros((tree.depth, tree.max_children), np.int64)
    steps = 0
    for start in range(0, len(requests), size):
        batch = list(requests[start : start + size])
        padded = batch + batch[-1:] * (size - len(batch))
        for step in engine.trace(encode(padded), padded):
            ends = list(zip(step.accepted.node.tolist(), step.before, strict=True))
            for node, known in ends[: len(batch)]:
                steps += known < total
                path = tree.paths[node]
                # An image that lacks fewer tokens than the tree is deep counts no more than these
                for depth in range(min(len(path) + 1, total - known, tree.depth)):
                    tried[depth] += bool(tree.children[tree.ids[path[:depth]]])
                    if depth < len(path):
                        accepted[depth, path[depth]] += 1
    return {
        "tree": tree.name,
        "tokens_per_step": len(requests) * (total - 1) / steps,
        "tried": tried.tolist(),
        "accepted": accepted.tolist(),
        "by_depth": (accepted.sum(1) / tried.clip(min=1)).tolist(),
    }
