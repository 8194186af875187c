"""Is everything connected right? The target as its own drafter must have every draft accepted.

A wrong shift of tokens, wrong positions or masks, guidance in one place only: such faults show here, before
hours of training show them. What it cannot show is a fault in the features that a drafter reads, since the target
needs none; `tests/test_models.py` and `tests/test_train.py` hold those to a slow twin.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lantern_hpu.decode.state import DecodeState
from lantern_hpu.errors import WeightsError
from lantern_hpu.methods.request import Request
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.ops.buffers import additive_mask
from lantern_hpu.ops.kv_cache import GrowingCache, LayerCache
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.tree import DraftTree

DEPTH = 3  # of the chain


class Echo(Drafter):
    """A drafter that asks the target: its entry i is the target's position i + 1, in the target's own cache.

    Whatever it writes there lies behind the committed positions, or says the same as what was there.
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
def wasted(pipeline: LanternPipeline, prompt: str, seed: int = 0) -> int:
    """Steps beyond the fewest there can be, when the target drafts a chain for itself.

    There are none, unless rounding makes a draft fail.
    """
    chain = DraftTree.from_paths("chain", [[0] * length for length in range(1, DEPTH + 1)])
    requests = [Request(prompt, seed, pipeline.model.sampling)]
    echo = Echo(pipeline.model.target)
    engine = pipeline.engines.make(pipeline.spec(requests, chain, 1, echo), "eager", echo)
    echo.state = engine.state
    pipeline.warm_up(engine, requests[0])
    steps = pipeline.draw_batch(engine, requests)[0].steps
    fewest = math.ceil((pipeline.model.target.config.tokens - 1) / (DEPTH + 1))
    return steps - fewest


def wasted_steps(pipeline: LanternPipeline, prompt: str) -> int:
    """How many steps were wasted, if there were few."""
    more = wasted(pipeline, prompt)
    allowed = max(1, pipeline.model.target.config.tokens // 100)
    if more > allowed:
        why = f"drafting for itself it needs {more} steps more than it should"
        raise WeightsError("the target and the decoder do not fit", why, "check the model folder")
    return more
