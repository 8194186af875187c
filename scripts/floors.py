"""The least time that steps of large models can take on known cards: arithmetic from published peaks, nothing measured.

    python scripts/floors.py

prints the tables of docs/performance.md: milliseconds of a step in bfloat16 with guidance, for `ar` and for draft
trees of three sizes, drafting included. See `lantern_hpu/roofline.py` for what is counted.
"""

from __future__ import annotations

from lantern_hpu.bench import markdown, roofline_sizes
from lantern_hpu.kernels import PLAIN
from lantern_hpu.models.transformer import Target
from lantern_hpu.models.weights import shapes_only
from lantern_hpu.random_weights import make_drafter, transformer_config
from lantern_hpu.registry import entries
from lantern_hpu.roofline import Shape, Sizes, accelerators, floor
from lantern_hpu.tree import DraftTree, load_static

MODELS = ("llamagen-t2i-256", "llamagen-t2i-512", "anole-7b")
CARDS = ("rtx3090", "h100", "gaudi2")
BATCHES = (1, 4, 16)
TREES = (DraftTree.root_only(), *map(load_static, ("chain", "mc_sim_7b_63", "naive_extend_57")))


def sizes(name: str) -> Sizes:
    """A known model in bfloat16, with guidance."""
    entry = entries()[name]
    config = transformer_config(entry)
    with shapes_only():
        target, drafter = Target(config), make_drafter(entry, config, PLAIN)
    return roofline_sizes(target.bfloat16(), drafter, guidance=True)


def table(name: str) -> str:
    """Milliseconds of a step on each card; those that arithmetic bounds, not bandwidth, are starred."""
    of, lines = sizes(name), []
    for card in CARDS:
        for images in BATCHES:
            rates = accelerators()[card].rates
            each = [floor(of, Shape.of(tree), images, rates) for tree in TREES]
            cells = [f"{1000 * f.step:.2f}{'*' * (f.bound == 'arithmetic')}" for f in each]
            lines.append([accelerators()[card].title, str(images), *cells])
    head = ["card", "images", "ar", *(f"{tree.name}, {tree.size} nodes" for tree in TREES[1:])]
    return markdown(head, lines)


if __name__ == "__main__":
    for name in MODELS:
        print(f"{name}\n\n{table(name)}\n")
