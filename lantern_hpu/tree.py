"""Draft trees: which drafts a step makes, as data, and how to draw them.

    python -m lantern_hpu.tree list
    python -m lantern_hpu.tree show naive_extend_57 --svg tree.svg

A node is named by the sibling ranks on its path from the root: `0.2` is the third child of the first
child. Nodes are numbered by (depth, path), the root is node 0. The named trees are those of the published
LANTERN++, EAGLE and Medusa configurations. This module needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path as FilePath

from lantern_hpu.errors import TreeError, choices, exit_code

Path = tuple[int, ...]

DRAWS = 10  # children that a drafter draws at a node, at most

# Child counts of the nodes, level by level, in the order of their parents; a tree is fully described by
# them, since a node's children have the ranks 0 .. c-1. Trailing leaves are left out of each level.
NAMED: dict[str, tuple[tuple[int, ...], ...]] = {
    "naive_extend_57": (
        (5,),
        (4, 3, 3, 2, 1),
        (4, 3, 3, 2, 2, 1, 0, 1),
        (4, 3, 2, 1, 2, 1, 0, 1),
        (3, 2, 0, 0, 2, 1, 0, 1),
    ),
    "mc_sim_7b_63": ((4,), (3, 2, 2, 1), (3, 2, 2, 1), (3,), (2,)),
    "mc_sim_7b_63_balanced": ((3,), (3, 3, 2), (3, 2, 0, 2, 2), (3,), (2,)),
    "reverse_balanced_25": ((3,), (2, 1, 1), (3, 2, 1), (3, 2), (4, 3)),
    "medusa_2_7b_63": (
        (10,),
        (10, 5, 2, 2, 1, 1, 1, 1),
        (9, 4, 2, 1, 1, 1, 0, 0, 0, 0, 3, 1, 0, 0, 0, 1),
        (4, 1, 1, 0, 0, 0, 0, 0, 0, 1),
    ),
    "chain": ((1,), (1,), (1,), (1,), (1,)),
}


def dotted(path: Path) -> str:
    """`(0, 2)` as `0.2`; the root is `root`."""
    return ".".join(map(str, path)) or "root"


@dataclass(frozen=True)
class DraftTree:
    """A static tree of drafts; hashable, built once on the host.

    Attributes:
        name: what reports call it.
        paths: one sibling-rank path per node, sorted by (depth, path); `paths[0]` is the root, `()`.

    M nodes with the root, I of them with children, depth D.
    """

    name: str
    paths: tuple[Path, ...]

    @classmethod
    def from_paths(cls, name: str, paths: Iterable[Sequence[int]], draws: int = DRAWS) -> DraftTree:
        """A validated tree from its drafts' paths in any order; the root need not be listed.

        Raises:
            TreeError: a path repeats, lacks its parent, skips a sibling, or needs more than `draws` draws.
        """
        listed = [tuple(path) for path in paths if len(path)]
        for path in listed:
            if not all(type(rank) is int and rank >= 0 for rank in path):
                raise TreeError(
                    f"tree {name!r} has a node {path}", "ranks are whole numbers from 0"
                )
        unique = set(listed)
        if len(unique) != len(listed):
            twice = next(path for path in listed if listed.count(path) > 1)
            raise TreeError(f"tree {name!r} lists node {dotted(twice)} twice")
        for path in sorted(unique, key=lambda p: (len(p), p)):
            check_node(name, path, unique, draws)
        return cls(name, ((), *sorted(unique, key=lambda p: (len(p), p))))

    @classmethod
    def from_counts(cls, name: str, levels: Sequence[Sequence[int]]) -> DraftTree:
        """A tree from the child counts of each level's nodes (see `NAMED`)."""
        parents: list[Path] = [()]
        paths: list[Path] = []
        for counts in levels:
            grown = zip(parents, counts, strict=False)
            parents = [(*parent, rank) for parent, count in grown for rank in range(count)]
            paths += parents
        return cls.from_paths(name, paths)

    @classmethod
    def root_only(cls) -> DraftTree:
        """The one-node tree: a step with it is plain autoregressive decoding."""
        return cls("root", ((),))

    @property
    def size(self) -> int:
        """M, nodes with the root."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """D, the longest path."""
        return len(self.paths[-1])

    @cached_property
    def ids(self) -> dict[Path, int]:
        return {path: node for node, path in enumerate(self.paths)}

    @cached_property
    def parent(self) -> tuple[int, ...]:
        """[M] parent of each node; the root is its own."""
        return tuple(self.ids[path[:-1]] for path in self.paths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """[M] drafts between the root and each node, itself included."""
        return tuple(len(path) for path in self.paths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """[M] children of each node in sibling order."""
        found: list[list[int]] = [[] for _ in self.paths]
        for node in range(1, self.size):
            found[self.parent[node]].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def max_children(self) -> int:
        """C, most children of a node."""
        return max(map(len, self.children))

    @cached_property
    def expanded(self) -> tuple[int, ...]:
        """[I] nodes with children, in id order."""
        return tuple(node for node, below in enumerate(self.children) if below)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """[D + 1] node ids at each depth."""
        return tuple(
            tuple(n for n, d in enumerate(self.depths) if d == depth)
            for depth in range(self.depth + 1)
        )

    @cached_property
    def frontiers(self) -> tuple[tuple[int, ...], ...]:
        """[D] expanded nodes at each depth: the rows of each drafting level."""
        return tuple(tuple(n for n in level if self.children[n]) for level in self.levels[:-1])

    @cached_property
    def ancestors(self) -> tuple[tuple[bool, ...], ...]:
        """[M][M] whether the second node is the first or one of its ancestors."""
        return tuple(
            tuple(path[: len(other)] == other for other in self.paths) for path in self.paths
        )

    @cached_property
    def path_table(self) -> tuple[tuple[int, ...], ...]:
        """[M][D + 1] node ids from the root to each node, then the node itself repeated."""
        rows = []
        for node, path in enumerate(self.paths):
            way = [self.ids[path[:length]] for length in range(len(path) + 1)]
            rows.append(tuple(way + [node] * (self.depth - len(path))))
        return tuple(rows)


def check_node(name: str, path: Path, known: set[Path], draws: int) -> None:
    """Raise a TreeError unless the node can be drafted from its parent."""
    if path[-1] >= draws:
        why = f"the drafter draws {draws} children of a node, ranks 0 to {draws - 1}"
        raise TreeError(f"tree {name!r} asks for rank {path[-1]} at node {dotted(path)}", why)
    if path[:-1] and path[:-1] not in known:
        raise TreeError(
            f"tree {name!r} has node {dotted(path)}", f"but not its parent {dotted(path[:-1])}"
        )
    if path[-1] and (*path[:-1], path[-1] - 1) not in known:
        missing = dotted((*path[:-1], path[-1] - 1))
        raise TreeError(
            f"tree {name!r} has node {dotted(path)}", f"but not the sibling {missing} before it"
        )


def load_tree(name: str, draws: int = DRAWS) -> DraftTree:
    """A named tree, or a user's from a JSON file: a list of paths, or `{"name": ..., "paths": [...]}`.

    Raises:
        TreeError: unknown name, unreadable file, or a tree that cannot be drafted.
    """
    if name in NAMED:
        return DraftTree.from_counts(name, NAMED[name])
    file = FilePath(name)
    if file.suffix != ".json":
        hint = choices([*NAMED, "a .json file"])
        raise TreeError(f"unknown tree {name!r}", hint=hint)
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise TreeError(f"cannot read the tree {name!r}", str(error)) from error
    paths = data.get("paths") if isinstance(data, dict) else data
    if not isinstance(paths, list) or not all(isinstance(p, list) for p in paths) or not any(paths):
        raise TreeError(
            f"{name!r} holds no tree", "expected a list of paths such as [[0], [1], [0, 0]]"
        )
    title = data.get("name", file.stem) if isinstance(data, dict) else file.stem
    return DraftTree.from_paths(str(title), paths, draws)


def as_text(tree: DraftTree) -> str:
    """The tree drawn with lines, one node a row."""
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
            rows.append(f"{indent}{'└─' if last else '├─'} {dotted(tree.paths[child])}")
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
        print("\n".join(as_text(load_tree(name)).split("\n")[:2]), end="\n\n")


def show(args: argparse.Namespace) -> None:
    """Print one tree, and draw it if asked."""
    tree = load_tree(args.name)
    print(as_text(tree))
    if args.svg:
        from lantern_hpu.results import write_file  # keeps `list` free of image libraries

        write_file(args.svg, as_svg(tree).encode(), args.force)
        print(f"wrote {args.svg}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lantern_hpu.tree", description="List and draw draft trees.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the named trees and their sizes")
    show = commands.add_parser("show", help="draw a tree")
    show.add_argument("name", help="a named tree or a .json file")
    show.add_argument("--svg", type=FilePath, metavar="FILE", help="also write an SVG picture")
    show.add_argument("--force", action="store_true", help="replace an existing SVG")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The `tree` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: list_trees() if args.command == "list" else show(args))


if __name__ == "__main__":
    sys.exit(main())
