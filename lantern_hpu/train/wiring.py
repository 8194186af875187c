"""Is everything connected right? The target as its own drafter must have every draft accepted.

Each way to get it wrong - a shift of tokens against features, positions, masks, guidance in one place only -
shows here, before hours of training show it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lantern_hpu.cache import KVCache
from lantern_hpu.config import Request
from lantern_hpu.engine import Engine
from lantern_hpu.errors import WeightsError
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.transformer import Target, additive
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.state import DecodeState
from lantern_hpu.tree import DraftTree

LEAST = 0.9  # rounding may cost a few drafts, a fault costs most


class Echo(Drafter):
    """A drafter that asks the target: its entry i is the target's slot i + 1, in the target's own cache.

    Whatever it writes there lies behind the committed slots, or says the same as what was there.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target.config)
        self.asked, self.state = target, None

    asked: Target
    state: DecodeState | None

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        rope: Tensor,
        mask: Tensor,
        cache: KVCache | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """See `Drafter`. The condition's entries are left alone: the target knows the condition."""
        assert self.state is not None and slots is not None
        prefix = self.config.prefix
        if tokens.shape[1] == prefix - 1:
            return features
        seen = additive(self.state.valid[:, None, :prefix], mask.dtype)  # [R, 1, 1, P]
        seen = seen.expand(-1, -1, mask.shape[2], -1)
        shifted = torch.cat([seen, mask[..., prefix - 1 : -1]], -1)
        return self.asked(
            self.asked.embed(tokens), rope, shifted, self.state.target_cache, slots + 1
        )


@torch.no_grad()
def agreement(pipeline: LanternPipeline, prompt: str, seed: int = 0) -> float:
    """The fewest steps there can be, by the steps it takes when the target drafts a chain for itself.

    It is 1, unless rounding makes a draft fail.
    """
    config = pipeline.model.target.config
    depth = 3 if config.prefix != 5 else 4  # the catch-up must not look like the condition
    chain = DraftTree.from_paths("chain", [[0] * length for length in range(1, depth + 1)])
    requests = [Request(prompt, seed, pipeline.model.sampling)]
    echo = Echo(pipeline.model.target)
    plan = pipeline.plan(requests, chain, 1)
    engine = Engine(pipeline.model.target, echo, plan, pipeline.backend, "eager")
    echo.state = engine.state
    pipeline.warm_up(engine, requests[0])
    rows = pipeline.model.prefix([prompt], plan.shapes.guidance)
    for _ in engine.run(*rows, requests):
        pass
    fewest = math.ceil((config.tokens - 1) / (depth + 1))
    return fewest / engine.result().steps[0]


def check(pipeline: LanternPipeline, prompt: str) -> float:
    """The agreement, if it is what it must be.

    Raises:
        WeightsError: the target does not agree with itself.
    """
    share = agreement(pipeline, prompt)
    if share < LEAST:
        why = f"drafting for itself it needs {1 / share:.1f} times the steps that it should"
        raise WeightsError("the target and the decoder do not fit", why, "check the model folder")
    return share
