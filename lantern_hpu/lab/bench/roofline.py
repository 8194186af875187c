"""The least time that a step can take: bytes over bandwidth, operations over rate. Arithmetic alone, no torch.

A pass of the target must read each of its weights and the keys and values of the committed positions once, and
multiply each weight with each token. What is counted is what no implementation can avoid, so masks, activations
and unused positions are not. Whichever takes longer, reading or multiplying, is the floor of a pass; passes of a step
wait for each other, so their floors add up. The cache is taken as it is in the middle of an image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from lantern_hpu.models.config import ModelConfig, TransformerConfig
from lantern_hpu.tree import DynamicTree, Tree


@dataclass(frozen=True)
class Rates:
    """What a device can do in one number format: bytes a second, operations a second.

    Attributes:
        weight_bytes: of a number in a matrix, where it is not kept in that format.
    """

    bandwidth: float
    rate: float
    number_bytes: int = 2  # of the format: bfloat16
    weight_bytes: int | None = None


class Pass(NamedTuple):
    """One pass of the target or the drafter over some tokens a row, the head over some of them."""

    tokens: int
    logits: int


@dataclass(frozen=True)
class StepPasses:
    """The passes of a step: the drafter's one after the other, then the target's over all nodes."""

    draft: tuple[Pass, ...]
    verify: Pass

    @classmethod
    def of(cls, tree: Tree) -> StepPasses:
        """Of a draft tree; the drafter's first pass catches up with one token."""
        if not tree.needs_drafter:
            return cls((), Pass(tree.size, tree.size))
        catch_up = Pass(1, 1)
        if isinstance(tree, DynamicTree):
            grow = (Pass(tree.top_k, tree.top_k),) * tree.expansions
            return cls((catch_up, *grow), Pass(tree.size, tree.size + 1))
        levels = tuple(Pass(len(level), len(level)) for level in tree.frontiers[1:])
        # Logits at the nodes with children, and at the one where the walk stops
        return cls((catch_up, *levels), Pass(tree.size, len(tree.expanded) + 1))

    def as_json(self) -> dict[str, Any]:
        """`[tokens, logits]` of each pass."""
        return {"draft": list(map(list, self.draft)), "verify": list(self.verify)}


@dataclass(frozen=True)
class Floor:
    """Least seconds of a step's two parts, and what bounds the larger one."""

    draft: float
    verify: float
    bound: str  # "bandwidth" or "arithmetic", of the verification

    @property
    def step(self) -> float:
        return self.draft + self.verify


def sizes(model: ModelConfig, guidance: bool, number_bytes: int) -> dict[str, int]:
    """What a step of a model reads and multiplies, as reports have it: counts of numbers unless the name says more."""
    config = model.target
    return {
        "body": config.layers * config.block_parameters(),
        "head": config.head_parameters,
        "drafter": model.drafter.own_parameters(config) if model.drafter else 0,
        "layers": config.layers,
        "width": config.width,
        "kv_width": config.kv_width,
        "prefix": config.prefix,
        "tokens": config.tokens,
        "rows_per_image": 2 if guidance else 1,
        "number_bytes": number_bytes,
    }


def pass_seconds(
    config: TransformerConfig, parameters: int, layers: int, what: Pass, rows: int, rates: Rates
) -> tuple[float, float]:
    """Least seconds to read what a pass through so many parameters and layers needs, and to multiply it."""
    context = config.prefix + config.tokens / 2  # committed positions
    head = config.head_parameters if what.logits else 0
    cached = rows * context * layers * 2 * config.kv_width
    # A multiplication with its addition counts as two.
    matrices = 2 * (what.tokens * parameters + what.logits * head)
    attention = 4 * what.tokens * context * layers * config.width
    weights = (parameters + head) * (rates.weight_bytes or rates.number_bytes)
    read = weights + cached * rates.number_bytes
    return read / rates.bandwidth, rows * (matrices + attention) / rates.rate


def floor(model: ModelConfig, passes: StepPasses, rows: int, rates: Rates) -> Floor:
    """The floor of a step over a batch.

    Args:
        rows: of the batch; with guidance, two an image.
    """
    config = model.target
    drafter = model.drafter.own_parameters(config) if model.drafter else 0
    drafts = [pass_seconds(config, drafter, 1, what, rows, rates) for what in passes.draft]
    body = config.layers * config.block_parameters()
    read, multiply = pass_seconds(config, body, config.layers, passes.verify, rows, rates)
    bound = "bandwidth" if read >= multiply else "arithmetic"
    return Floor(sum(max(pair) for pair in drafts), max(read, multiply), bound)
