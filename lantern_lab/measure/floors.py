"""The least time that steps of large models can take on known cards: arithmetic from published peaks, nothing measured.

    python -m lantern_lab.measure.floors

prints the tables of docs/performance.md: milliseconds of a step in bfloat16 with guidance, for `ar` and for draft
trees of three sizes, drafting included. `lantern_hpu.plan.floors.floor` counts them. In brackets, for a card that was
measured: the step as projected from its launches and from the bandwidth there.
"""

from __future__ import annotations

import argparse

from lantern_hpu.plan.floors import Rates, StepPasses, floor, projected
from lantern_hpu.plan.requirements import accelerators
from lantern_hpu.results.tables import markdown
from lantern_hpu.tree import DraftTree, load_static
from lantern_hpu.zoo.registry import entries

MODELS = ("llamagen-t2i-256", "llamagen-t2i-512", "anole-7b")
CARDS = ("rtx3090", "h100", "h200", "gaudi2")
BATCHES = (1, 4, 16)
TREES = (DraftTree.root_only(), *map(load_static, ("chain", "mc_sim_7b_63", "naive_extend_57")))


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


def main() -> None:
    argparse.ArgumentParser(
        description="Print the least time of steps on known cards."
    ).parse_args()
    for name in MODELS:
        print(f"{name}\n\n{table(name)}\n")


if __name__ == "__main__":
    main()
