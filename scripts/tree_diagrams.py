"""Draft trees drawn as text and as SVG pictures. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import MISSING, dataclass
from html import escape
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from lantern_hpu.commands.options import add_fields, filled
from lantern_hpu.errors import OptionError, check_ranges, exit_code, option
from lantern_hpu.files import write_file
from lantern_hpu.tree import (
    DYNAMIC,
    DraftTree,
    DynamicTree,
    Path,
    dotted,
    load_static,
    load_tree,
)
from lantern_hpu.tree.named import NAMED

if TYPE_CHECKING:
    from lantern_hpu.decode.drafting import Drafts


def title(tree: DraftTree) -> str:
    return f"{tree.name}: {tree.size - 1} drafts + root, depth {tree.depth}"


def as_text(tree: DraftTree, labels: Sequence[str] | None = None) -> str:
    """The tree drawn with lines, one node a row; with a label for each node if given."""
    widths = "/".join(str(len(level)) for level in tree.levels[1:])
    rows = [
        title(tree),
        f"drafts by depth {widths}, {len(tree.expanded)} nodes with children",
        "root",
    ]

    def draw(node: int, indent: str) -> None:
        children = tree.children[node]
        for child in children:
            last = child == children[-1]
            said = f"  {labels[child]}" if labels else ""
            rows.append(f"{indent}{'└─' if last else '├─'} {dotted(tree.paths[child])}{said}")
            draw(child, indent + ("   " if last else "│  "))

    draw(0, "")
    return "\n".join(rows)


def columns_of(tree: DraftTree) -> list[float]:
    """A horizontal place for each node: leaves in path order, parents above the middle of their children."""
    place = [0.0] * tree.size
    leaves = sorted((p, n) for n, p in enumerate(tree.paths) if not tree.children[n])
    for column, (_, node) in enumerate(leaves):
        place[node] = float(column)
    for node in reversed(range(tree.size)):
        if children := tree.children[node]:
            place[node] = (place[children[0]] + place[children[-1]]) / 2
    return place


def as_svg(tree: DraftTree, step: int = 30, margin: int = 24) -> str:
    """The tree as an SVG picture: each circle shows its sibling rank.

    Args:
        step: pixels between two leaves.
    """
    leaves = sum(not children for children in tree.children)
    width = max(340, 2 * margin + step * (leaves - 1))
    height = 2 * margin + 2 * step * tree.depth + 26
    shift = (width - step * (leaves - 1)) / 2
    place = zip(columns_of(tree), tree.depths, strict=True)
    spots = [(shift + step * column, 44.0 + 2 * step * depth) for column, depth in place]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{margin}" y="20" font-size="13">{escape(title(tree))}</text>'
        f'<g stroke="#99a" stroke-width="1.2">{svg_lines(tree, spots)}</g>{svg_nodes(tree, spots)}</svg>\n'
    )


def svg_lines(tree: DraftTree, spots: Sequence[tuple[float, float]]) -> str:
    """From each parent to its children."""
    pairs = ((spots[tree.parent[node]], spots[node]) for node in range(1, tree.size))
    return "".join(
        f'<line x1="{px:.1f}" y1="{py:.1f}" x2="{x:.1f}" y2="{y:.1f}"/>'
        for (px, py), (x, y) in pairs
    )


def svg_nodes(tree: DraftTree, spots: Sequence[tuple[float, float]]) -> str:
    """A circle each, dark where there are children."""
    circles = []
    for node, (x, y) in enumerate(spots):
        label = tree.paths[node][-1] if node else "r"
        fill = "#1b6ca8" if tree.children[node] else "#7fb4d9"
        circles.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="10" fill="{fill}"/>'
            f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" fill="#fff">{label}</text>'
        )
    return "".join(circles)


# -------------------------------------------------------------------------------------------- tree

# The `tree` command: list draft trees, and draw them.
#
# lantern-hpu tree list
# lantern-hpu tree show naive_extend_57 --svg tree.svg
# lantern-hpu tree show dynamic --prompt "a red apple" --step 20


@dataclass(frozen=True)
class ShowRequest:
    """The options of `tree show`; all but the last two are of a dynamic tree."""

    name: str = option(
        MISSING, "a named tree, a .json file, or `dynamic` with a prompt", positional=True
    )
    prompt: str | None = option(None, "dynamic tree: prompt of the image")
    step: int = option(0, "dynamic tree: number of the step", low=0)
    seed: int = option(0, "dynamic tree: seed of the image")
    model: str = option("builtin", "dynamic tree: model name, Hub id, folder or weights file")
    svg: FilePath | None = option(None, "also write an SVG picture", metavar="FILE")
    force: bool = option(False, "replace an existing SVG")

    def __post_init__(self) -> None:
        check_ranges(self)


def list_trees() -> None:
    """Print the named trees' sizes."""
    for name in NAMED:
        print("\n".join(as_text(load_static(name)).split("\n")[:2]), end="\n\n")
    tree = DynamicTree()
    print(f"{DYNAMIC} ({tree.name}): {tree.drafts} drafts + root, depth {tree.depth} at most")
    print(f"the most probable of {tree.candidates} candidates, grown anew at each step")


def grow(tree: DynamicTree, asked: ShowRequest) -> tuple[DraftTree, list[str]]:
    """The tree that exact decoding verifies after some steps, and a label with the token of each node."""
    import torch

    from lantern_hpu.methods.request import Request
    from lantern_hpu.pipeline import LanternPipeline

    with closing(LanternPipeline.from_pretrained(asked.model)) as pipeline, torch.no_grad():
        requests = [Request(asked.prompt or "", asked.seed, pipeline.model.sampling)]
        engine = pipeline.engines.make(pipeline.spec(requests, tree, 1), mode="eager")
        number = 0
        for number, made in enumerate(engine.trace(pipeline.prefix(engine, requests), requests)):
            if number == asked.step:
                return grown_tree(made.drafts)
    why = f"the image ends with step {number + 1}"
    raise OptionError(f"--step is {asked.step}", why, f"--step 0 to {number}")


def grown_tree(drafts: Drafts, image: int = 0) -> tuple[DraftTree, list[str]]:
    """One image's tree with its nodes named by ranks, and labels."""
    child = drafts.tables.child[image].tolist()  # [M][C]
    paths: dict[int, Path] = {0: ()}
    for parent, children in enumerate(child):
        paths |= {node: (*paths[parent], rank) for rank, node in enumerate(children) if node}
    tree = DraftTree.from_paths(DYNAMIC, paths.values(), draws=len(child[0]))
    token = {paths[node]: int(t) for node, t in enumerate(drafts.tokens[image])}
    return tree, [f"token {token[path]}" for path in tree.paths]


def show_tree(asked: ShowRequest) -> None:
    """Print one tree, and draw it if asked."""
    tree, labels = load_tree(asked.name), None
    if isinstance(tree, DynamicTree):
        if not asked.prompt:
            why = "a dynamic tree depends on the image, and on the step"
            raise OptionError("there is nothing to show yet", why, '--prompt "a red apple"')
        tree, labels = grow(tree, asked)
    elif asked.prompt:
        what = f"--prompt has no meaning for {asked.name}"
        raise OptionError(what, "it is the same at every step")
    print(as_text(tree, labels))
    if asked.svg:
        write_file(asked.svg, as_svg(tree).encode(), asked.force)
        print(f"wrote {asked.svg}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lantern-hpu tree", description="List and draw draft trees.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the named trees and their sizes")
    add_fields(commands.add_parser("show", help="draw a tree"), ShowRequest)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The `tree` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    if args.command == "list":
        return exit_code(list_trees)
    return exit_code(lambda: show_tree(filled(ShowRequest, args)))
