"""The least time that steps of large models can take on known cards: arithmetic from published peaks, nothing measured.

    python -m lantern_lab.measure.floors

prints the tables of docs/performance.md: milliseconds of a step in bfloat16 with guidance, for `ar` and for draft
trees of three sizes, drafting included. `floor` counts them. In brackets, for a card that was
measured: the step as projected from its launches, its products and the bandwidth there; and in a table of its own, on a
card of which speeds of other models are published, as projected from those.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lantern_hpu.decode.accelerators import Rates, accelerators, least_seconds, projected_ms
from lantern_hpu.models.config import ModelConfig, TransformerConfig
from lantern_hpu.models.model import EmptyModel
from lantern_hpu.results.tables import between, markdown
from lantern_hpu.tree import DraftTree, DynamicTree, Tree, load_static, load_tree
from lantern_hpu.zoo.registry import entries

MODELS = ("llamagen-t2i-256", "llamagen-t2i-512", "anole-7b")
CARDS = ("rtx3090", "h100", "h200", "gaudi2")
BATCHES = (1, 4, 16)
ROOT = DraftTree.root_only()
TREES = (ROOT, *map(load_static, ("chain", "mc_sim_7b_63", "naive_extend_57")))


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
    """The floor of a step over a batch of these rows; with guidance, two an image.

    Passes of a step wait for each other, so their floors add up.
    """
    drafts = (least_seconds(model, rates, rows, *one, drafter=True) for one in passes.draft)
    read, multiply = least_seconds(model, rates, rows, *passes.verify)
    bound = "bandwidth" if read >= multiply else "arithmetic"
    return Floor(sum(map(max, drafts)), max(read, multiply), bound)


# Kernels of a captured step on CUDA, in parts; `lantern_lab.measure.launches` counts the whole, and a test compares
LAYER = 8  # of a layer
LONG, FEW = 512, 32  # one more where a cache is longer, and heads that share keys have more queries
PLAIN_STEP, DRAFTED, DRAFT_PASS = 12, 24, 17  # of `ar`; what drafts add; of a pass of the drafter
RULED, RULED_DRAFTS = 10, 53  # of a picture's grammar; over the drafts of a window
LARGE, IN_PARTS = 65536, 3  # tokens that one program holds; of samplers whose programs share them

# Of products on a card, fitted to the H200's steps
REACHED = 0.86  # of a copy's rate
SMALLEST = 20e6  # bytes, below which a product takes no less time


def launches(config: TransformerConfig, passes: StepPasses) -> int:
    """About how many kernels a step launches on CUDA; not for dynamic trees, whose tables are many more."""
    positions = config.prefix + config.tokens + passes.verify.tokens
    queries = passes.verify.tokens * config.heads // config.kv
    layer = LAYER + (positions > LONG and queries > FEW)
    drafted = DRAFTED * (passes.verify.tokens > 1) + DRAFT_PASS * len(passes.draft)
    if config.row_ends:
        drafted += RULED + RULED_DRAFTS * (passes.verify.tokens > 1)
    drafted += IN_PARTS * (config.vocab_size > LARGE)
    return config.layers * layer + PLAIN_STEP + drafted


def projected(
    model: ModelConfig, passes: StepPasses, rows: int, rates: Rates, launch: float
) -> float:
    """Seconds of a step by its products, its keys and values, and its launches: a model, not a measurement.

    Args:
        rates: with the bandwidth of a copy. launch: seconds of one.
    """
    config, empty = model.target, EmptyModel.of(model)
    drafts = [least_seconds(model, rates, rows, *one, drafter=True)[1] for one in passes.draft]
    multiply = least_seconds(model, rates, rows, *passes.verify)[1]
    target, drafter = (product_seconds(several, rates) for several in empty.matrices)
    head = product_seconds([x for x in empty.target.head.parameters() if x.dim() == 2], rates)
    layers, context = config.layers + len(drafts), config.prefix + config.tokens / 2
    cached = rows * context * layers * 2 * config.kv_width * rates.number_bytes / rates.bandwidth
    products = max(target, multiply) + sum(max(drafter + head, other) for other in drafts)
    return products + cached + launch * launches(config, passes)


def product_seconds(matrices: Sequence[Tensor], rates: Rates) -> float:
    """Of products with few rows, by what they read."""
    size = rates.weight_bytes or rates.number_bytes
    read = sum(max(size * matrix.numel(), SMALLEST) for matrix in matrices)
    return read / (REACHED * rates.bandwidth)


def table(name: str) -> str:
    """Milliseconds of a step on each card; those that arithmetic bounds, not bandwidth, are starred."""
    model, known, lines = entries()[name].config, accelerators(), list[list[str]]()
    for card in (known[name] for name in CARDS):
        rates = Rates(card.bandwidth, card.rate)
        for images in BATCHES:
            each = [floor(model, StepPasses.of(tree), 2 * images, rates) for tree in TREES]
            cells = [f"{1000 * f.step:.2f}{'*' * (f.bound == 'arithmetic')}" for f in each]
            if card.launch is not None:
                rates = Rates(card.copied or card.bandwidth, card.rate)
                steps = [StepPasses.of(tree) for tree in TREES]
                likely = [projected(model, step, 2 * images, rates, card.launch) for step in steps]
                cells = [f"{c} ({1000 * s:.2f})" for c, s in zip(cells, likely, strict=True)]
            lines.append([card.title, str(images), *cells])
    head = ["card", "images", "ar", *(f"{tree.name}, {tree.size} nodes" for tree in TREES[1:])]
    return markdown(head, lines)


def projected_table(card: str = "gaudi2") -> str:
    """Milliseconds of a step of one image as projected from published speeds, beside the bound of `ar`."""
    found, lines = accelerators()[card], list[list[str]]()
    for name, entry in ((name, entries()[name]) for name in MODELS):
        model = entry.config
        bound = floor(model, StepPasses.of(ROOT), 2, Rates(found.bandwidth, found.rate)).step
        alone = projected_ms(found, model, ROOT, 2)
        many = projected_ms(found, model, load_tree("scd:25"), 2)
        first, last = sorted(one / ar for one, ar in zip(many, alone, strict=True))
        times = f"{first:.2f} to {last:.2f}"
        lines.append([f"`{name}`", f"{1000 * bound:.2f}", between(alone), between(many), times])
    head = "model, bound of `ar`, `ar` projected, 26 nodes projected, times `ar`"
    return markdown(head.split(", "), lines)


def main() -> None:
    argparse.ArgumentParser(
        description="Print the least time of steps on known cards."
    ).parse_args()
    for name in MODELS:
        print(f"{name}\n\n{table(name)}\n")
    print(projected_table())


if __name__ == "__main__":
    main()
