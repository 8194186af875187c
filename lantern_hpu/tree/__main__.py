"""The `tree` command: list draft trees, and draw them.

python -m lantern_hpu.tree list
python -m lantern_hpu.tree show naive_extend_57 --svg tree.svg
python -m lantern_hpu.tree show dynamic --prompt "a red apple" --step 20
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from lantern_hpu.errors import OptionError, exit_code
from lantern_hpu.tree import (
    DYNAMIC,
    NAMED,
    DraftTree,
    DynamicTree,
    dotted,
    load_static,
    load_tree,
)


def as_text(tree: DraftTree, labels: Sequence[str] | None = None) -> str:
    """The tree drawn with lines, one node a row; with a label for each node if given."""
    widths = "/".join(str(len(level)) for level in tree.levels[1:])
    rows = [
        f"{tree.name}: {tree.size - 1} drafts + root, depth {tree.depth}",
        f"drafts by depth {widths}, {len(tree.expanded)} nodes with children",
        "root",
    ]

    def draw(node: int, indent: str) -> None:
        below = tree.children[node]
        for child in below:
            last = child == below[-1]
            said = f"  {labels[child]}" if labels else ""
            rows.append(f"{indent}{'└─' if last else '├─'} {dotted(tree.paths[child])}{said}")
            draw(child, indent + ("   " if last else "│  "))

    draw(0, "")
    return "\n".join(rows)


def layout(tree: DraftTree) -> list[float]:
    """A horizontal place for each node: leaves in path order, parents above the middle of their children."""
    place = [0.0] * tree.size
    leaves = sorted((p, n) for n, p in enumerate(tree.paths) if not tree.children[n])
    for column, (_, node) in enumerate(leaves):
        place[node] = float(column)
    for node in reversed(range(tree.size)):
        below = tree.children[node]
        if below:
            place[node] = (place[below[0]] + place[below[-1]]) / 2
    return place


def as_svg(tree: DraftTree, step: int = 30, margin: int = 24) -> str:
    """The tree as an SVG picture: each circle shows its sibling rank."""
    place, leaves = layout(tree), sum(not below for below in tree.children)
    width = max(340, 2 * margin + step * (leaves - 1))
    height = 2 * margin + 2 * step * tree.depth + 26
    shift = (width - 2 * margin - step * (leaves - 1)) / 2 + margin
    spot = [(shift + step * x, 44 + 2 * step * d) for x, d in zip(place, tree.depths, strict=True)]
    lines, circles = [], []
    for node, (x, y) in enumerate(spot):
        if node:
            px, py = spot[tree.parent[node]]
            lines.append(f'<line x1="{px:.1f}" y1="{py:.1f}" x2="{x:.1f}" y2="{y:.1f}"/>')
        label = tree.paths[node][-1] if node else "r"
        fill = "#1b6ca8" if tree.children[node] else "#7fb4d9"
        circles.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="10" fill="{fill}"/>'
            f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" fill="#fff">{label}</text>'
        )
    title = escape(f"{tree.name}: {tree.size - 1} drafts + root, depth {tree.depth}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{margin}" y="20" font-size="13">{title}</text>'
        f'<g stroke="#99a" stroke-width="1.2">{"".join(lines)}</g>{"".join(circles)}</svg>\n'
    )


def list_trees() -> None:
    """Print the named trees' sizes."""
    for name in NAMED:
        print("\n".join(as_text(load_static(name)).split("\n")[:2]), end="\n\n")
    tree = DynamicTree()
    print(f"{DYNAMIC} ({tree.name}): {tree.drafts} drafts + root, depth {tree.depth} at most")
    print(f"the likeliest of {tree.candidates} candidates, grown anew at each step")


def show(args: argparse.Namespace) -> None:
    """Print one tree, and draw it if asked."""
    tree, labels = load_tree(args.name), None
    if isinstance(tree, DynamicTree):
        if not args.prompt:
            why = "a dynamic tree depends on the image, and on the step"
            raise OptionError("there is nothing to show yet", why, '--prompt "a red apple"')
        from lantern_hpu.grown import grow  # needs torch

        tree, labels = grow(tree, args.prompt, args.model, args.seed, args.step)
    elif args.prompt:
        raise OptionError(
            f"--prompt has no meaning for {args.name}", "it is the same at every step"
        )
    print(as_text(tree, labels))
    if args.svg:
        from lantern_hpu.results import write_file  # keeps `list` free of image libraries

        write_file(args.svg, as_svg(tree).encode(), args.force)
        print(f"wrote {args.svg}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lantern_hpu.tree", description="List and draw draft trees.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the named trees and their sizes")
    show = commands.add_parser("show", help="draw a tree")
    show.add_argument("name", help="a named tree, a .json file, or `dynamic` with a prompt")
    show.add_argument("--prompt", help="of a dynamic tree: the image")
    show.add_argument("--step", type=int, default=0, help="of a dynamic tree: steps before it (0)")
    show.add_argument("--seed", type=int, default=0, help="of a dynamic tree (0)")
    show.add_argument("--model", default="builtin", help="of a dynamic tree (builtin)")
    show.add_argument("--svg", type=Path, metavar="FILE", help="also write an SVG picture")
    show.add_argument("--force", action="store_true", help="replace an existing SVG")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The `tree` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: list_trees() if args.command == "list" else show(args))


if __name__ == "__main__":
    sys.exit(main())
