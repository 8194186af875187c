"""A dynamic tree as it stands at one step of an image."""

from __future__ import annotations

from contextlib import closing

import torch

from lantern_hpu.config import Request, require
from lantern_hpu.draft import Drafts
from lantern_hpu.errors import OptionError
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.tree import DraftTree, DynamicTree, Path


def grow(
    tree: DynamicTree, prompt: str, model: str = "builtin", seed: int = 0, step: int = 0
) -> tuple[DraftTree, list[str]]:
    """The tree that exact decoding would verify after `step` steps, and a label with the token of each node.

    Raises:
        LanternError: the model or an option is unusable, or the image ends before that step.
    """
    require(step >= 0, "--step", step, "0 or more")
    with closing(LanternPipeline.from_pretrained(model)) as pipeline:
        request = Request(prompt, seed, pipeline.model.sampling)
        engine, _ = pipeline.engine([request], tree, 1)
        pipeline.warm_up(engine, request)
        with torch.no_grad():
            known = engine.start(pipeline.prefix(engine, [request]), [request])
            for number in range(1, step + 1):
                known = engine.advance([seed], number, 1)
                if min(known) >= engine.target.config.tokens:
                    why = f"the image ends with step {number}"
                    raise OptionError(f"--step is {step}", why, f"--step 0 to {number - 1}")
            return named(engine.draft([seed], step + 1))


def named(drafts: Drafts, image: int = 0) -> tuple[DraftTree, list[str]]:
    """One image's tree with its nodes named by ranks, and labels."""
    child = drafts.tables.child[image].tolist()  # [M][C]
    paths: dict[int, Path] = {0: ()}
    for node in range(len(child)):
        for rank, below in enumerate(child[node]):
            if below:
                paths[below] = (*paths[node], rank)
    tree = DraftTree.from_paths("dynamic", paths.values(), draws=len(child[0]))
    token = {paths[node]: int(t) for node, t in enumerate(drafts.tokens[image])}
    return tree, [f"token {token[path]}" for path in tree.paths]
