"""The `tree` command: list draft trees, and draw them.

lantern-hpu tree list
lantern-hpu tree show naive_extend_57 --svg tree.svg
lantern-hpu tree show dynamic --prompt "a red apple" --step 20
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from lantern_hpu.errors import OptionError, exit_code, require
from lantern_hpu.files import write_file
from lantern_hpu.tree import (
    DYNAMIC,
    DraftTree,
    DynamicTree,
    Path,
    load_static,
    load_tree,
)
from lantern_hpu.tree.diagrams import as_svg, as_text
from lantern_hpu.tree.named import NAMED

if TYPE_CHECKING:
    from lantern_hpu.decode.drafting import Drafts


def list_trees() -> None:
    """Print the named trees' sizes."""
    for name in NAMED:
        print("\n".join(as_text(load_static(name)).split("\n")[:2]), end="\n\n")
    tree = DynamicTree()
    print(f"{DYNAMIC} ({tree.name}): {tree.drafts} drafts + root, depth {tree.depth} at most")
    print(f"the most probable of {tree.candidates} candidates, grown anew at each step")


def grow(
    tree: DynamicTree, prompt: str, model: str = "builtin", seed: int = 0, step: int = 0
) -> tuple[DraftTree, list[str]]:
    """The tree that exact decoding verifies after `step` steps, and a label with the token of each node.

    Raises:
        LanternError: the model or an option is unusable, or the image ends before that step.
    """
    require(step >= 0, "--step", step, "0 or more")
    import torch

    from lantern_hpu.methods.request import Request
    from lantern_hpu.pipeline import LanternPipeline

    with closing(LanternPipeline.from_pretrained(model)) as pipeline, torch.no_grad():
        requests = [Request(prompt, seed, pipeline.model.sampling)]
        engine = pipeline.engines.make(pipeline.spec(requests, tree, 1), mode="eager")
        number = 0
        for number, made in enumerate(engine.trace(pipeline.prefix(engine, requests), requests)):
            if number == step:
                return grown_tree(made.drafts)
    why = f"the image ends with step {number + 1}"
    raise OptionError(f"--step is {step}", why, f"--step 0 to {number}")


def grown_tree(drafts: Drafts, image: int = 0) -> tuple[DraftTree, list[str]]:
    """One image's tree with its nodes named by ranks, and labels."""
    child = drafts.tables.child[image].tolist()  # [M][C]
    paths: dict[int, Path] = {0: ()}
    for parent, children in enumerate(child):
        paths |= {node: (*paths[parent], rank) for rank, node in enumerate(children) if node}
    tree = DraftTree.from_paths(DYNAMIC, paths.values(), draws=len(child[0]))
    token = {paths[node]: int(t) for node, t in enumerate(drafts.tokens[image])}
    return tree, [f"token {token[path]}" for path in tree.paths]


def show_tree(args: argparse.Namespace) -> None:
    """Print one tree, and draw it if asked."""
    tree, labels = load_tree(args.name), None
    if isinstance(tree, DynamicTree):
        if not args.prompt:
            why = "a dynamic tree depends on the image, and on the step"
            raise OptionError("there is nothing to show yet", why, '--prompt "a red apple"')
        tree, labels = grow(tree, args.prompt, args.model, args.seed, args.step)
    elif args.prompt:
        raise OptionError(
            f"--prompt has no meaning for {args.name}", "it is the same at every step"
        )
    print(as_text(tree, labels))
    if args.svg:
        write_file(args.svg, as_svg(tree).encode(), args.force)
        print(f"wrote {args.svg}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lantern-hpu tree", description="List and draw draft trees.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the named trees and their sizes")
    show = commands.add_parser("show", help="draw a tree")
    show.add_argument("name", help="a named tree, a .json file, or `dynamic` with a prompt")
    show.add_argument("--prompt", help="of a dynamic tree: the image")
    show.add_argument("--step", type=int, default=0, help="of a dynamic tree: steps before it (0)")
    show.add_argument("--seed", type=int, default=0, help="of a dynamic tree (0)")
    show.add_argument("--model", default="builtin", help="of a dynamic tree (builtin)")
    show.add_argument("--svg", type=FilePath, metavar="FILE", help="also write an SVG picture")
    show.add_argument("--force", action="store_true", help="replace an existing SVG")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The `tree` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: list_trees() if args.command == "list" else show_tree(args))
