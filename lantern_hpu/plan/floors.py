"""The least time of a step on a device, and what its launches add: models of a step, not measurements."""

from __future__ import annotations

from typing import NamedTuple

from lantern_hpu.models.config import ModelConfig, TransformerConfig
from lantern_hpu.models.model import EmptyModel
from lantern_hpu.tree import DynamicTree, Tree

# A pass of the target must read each of its weights and the keys and values of the committed positions once, and
# multiply each weight with each token. What is counted is what no implementation can avoid, so masks, activations
# and unused positions are not. The floor of a pass is the longer of reading and multiplying; passes of a step wait for
# each other, so their floors add up. The cache is taken as it is in the middle of an image.


class Rates(NamedTuple):
    """What a device can do in one number format."""

    bandwidth: float  # bytes a second
    rate: float  # operations a second
    number_bytes: int = 2  # of the format: bfloat16
    weight_bytes: int | None = None  # of a number in a matrix, where it is not kept in that format


class Pass(NamedTuple):
    """One pass of the target or the drafter over some tokens a row, the head over some of them."""

    tokens: int
    logits: int


class StepPasses(NamedTuple):
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


class Floor(NamedTuple):
    """Least seconds of a step's two parts, and what bounds the larger one."""

    draft: float
    verify: float
    bound: str  # "bandwidth" or "arithmetic", of the verification

    @property
    def step(self) -> float:
        return self.draft + self.verify


def sizes(model: ModelConfig, guidance: bool, number_bytes: int) -> dict[str, int]:
    """What a step of a model reads and multiplies, as reports have it: counts of numbers unless the name says more."""
    config, empty = model.target, EmptyModel.of(model)
    return {
        "body": empty.body,
        "head": empty.head,
        "drafter": empty.drafting,
        **{name: getattr(config, name) for name in "layers width kv_width prefix tokens".split()},
        "rows_per_image": 2 if guidance else 1,
        "number_bytes": number_bytes,
    }


def floor(model: ModelConfig, passes: StepPasses, rows: int, rates: Rates) -> Floor:
    """The floor of a step over a batch of these rows; with guidance, two an image."""
    config = model.target
    empty = EmptyModel.of(model)
    context = config.prefix + config.tokens / 2  # committed positions

    def seconds(what: Pass, parameters: int, layers: int) -> tuple[float, float]:
        """To read what a pass through these parameters and layers needs, and to multiply it."""
        head = empty.head if what.logits else 0
        cached = rows * context * layers * 2 * config.kv_width
        # A multiplication with its addition counts as two
        matrices = 2 * (what.tokens * parameters + what.logits * head)
        attention = 4 * what.tokens * context * layers * config.width
        weights = (parameters + head) * (rates.weight_bytes or rates.number_bytes)
        read = weights + cached * rates.number_bytes
        return read / rates.bandwidth, rows * (matrices + attention) / rates.rate

    draft = sum(max(seconds(what, empty.drafting, 1)) for what in passes.draft)
    read, multiply = seconds(passes.verify, empty.body, config.layers)
    return Floor(draft, max(read, multiply), "bandwidth" if read >= multiply else "arithmetic")


# Kernels of a captured step on CUDA, in parts; `lantern_lab.measure.launches` counts the whole, and a test compares
LAYER, LONG_LAYER = 8, 10  # of a layer; of one whose cache is longer than this
LONG = 512
PLAIN_STEP, DRAFTED, DRAFT_PASS = 12, 24, 17  # of `ar`; what drafts add; of a pass of the drafter


def launches(config: TransformerConfig, passes: StepPasses) -> int:
    """About how many kernels a step launches on CUDA; not for dynamic trees, whose tables are many more."""
    positions = config.prefix + config.tokens + passes.verify.tokens
    layer = LAYER if positions <= LONG else LONG_LAYER
    drafted = DRAFTED * (passes.verify.tokens > 1) + DRAFT_PASS * len(passes.draft)
    return config.layers * layer + PLAIN_STEP + drafted


def projected(
    model: ModelConfig, passes: StepPasses, rows: int, rates: Rates, launch: float
) -> float:
    """Seconds of a step by its floor and its launches of so many seconds each: a model, not a measurement."""
    return floor(model, passes, rows, rates).step + launch * launches(model.target, passes)
