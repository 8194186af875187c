"""Static trees: the same drafts at every step.

A node is named by the sibling ranks on its path from the root: `0.2` is the third child of the first child. Nodes are
numbered by (depth, path), the root is node 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path as FilePath

from lantern_hpu.errors import TreeError, choices
from lantern_hpu.files import parse_json, read_text

Path = tuple[int, ...]
DRAWS = 10  # children that a drafter draws at a node, at most
MOST_DRAFTS = (
    512  # of a tree, windows among them: what a step takes grows with the square of their number
)


def dotted(path: Path) -> str:
    """`(0, 2)` as `0.2`; the root is `root`."""
    return ".".join(map(str, path)) or "root"


@dataclass(frozen=True)
class DraftTree:
    """A static tree of drafts; hashable, built once on the host.

    Attributes:
        name: what reports call it.
        paths: one sibling-rank path per node, sorted by (depth, path); `paths[0]` is the root, `()`.
        file: that it was read from.

    M nodes with the root, I of them with children, depth D.
    """

    name: str
    paths: tuple[Path, ...]
    file: str | None = field(default=None, compare=False, repr=False, kw_only=True)
    commit = 0  # of windows alone

    def __post_init__(self) -> None:
        check_drafts(self.name, self.paths[1:])

    @classmethod
    def from_paths(cls, name: str, paths: Iterable[Sequence[int]], draws: int = DRAWS) -> DraftTree:
        """A validated tree from its drafts' paths in any order; the root need not be listed."""
        listed = [tuple(path) for path in paths if len(path)]
        check_drafts(name, listed)
        for path in listed:
            if not all(type(rank) is int and rank >= 0 for rank in path):
                why = "ranks are whole numbers from 0"
                raise TreeError(f"tree {name!r} has a node {path}", why)
        ordered = sorted(listed, key=lambda path: (len(path), path))
        known = {(), *ordered}
        for before, path in zip([(), *ordered], ordered, strict=False):
            if path == before:
                raise TreeError(f"tree {name!r} lists node {dotted(path)} twice")
            check_node(name, path, known, draws)
        return cls(name, ((), *ordered))

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
        result: list[list[int]] = [[] for _ in self.paths]
        for node in range(1, self.size):
            result[self.parent[node]].append(node)
        return tuple(map(tuple, result))

    @cached_property
    def max_children(self) -> int:
        """C, most children of a node."""
        return max(map(len, self.children))

    @cached_property
    def expanded(self) -> tuple[int, ...]:
        """[I] nodes with children, in id order."""
        return tuple(node for node, children in enumerate(self.children) if children)

    @property
    def judged(self) -> tuple[int, ...]:
        """Nodes whose probs verification computes together: those with children, and a chain's end, too.

        Its other leaves are many, and one of them at most is needed: then the head is read once more.
        """
        return tuple(range(self.size)) if self.is_chain else self.expanded

    @property
    def needs_drafter(self) -> bool:
        return self.depth > 0

    @property
    def is_chain(self) -> bool:
        """Whether node n is the nth draft of one path, so that an accepted path is where it belongs."""
        return self.size == self.depth + 1

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
    def widest(self) -> tuple[int, ...]:
        """[D] most children of a node at each depth."""
        return tuple(max(len(self.children[n]) for n in nodes) for nodes in self.frontiers)

    @property
    def draws(self) -> int:
        """Uniforms that drafting takes: one a draft."""
        return self.size - 1

    @property
    def scratch(self) -> int:
        """Nodes that go through the drafter."""
        return max(0, len(self.expanded) - 1)

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


def check_drafts(name: str, paths: Sequence[Path]) -> None:
    """Raise a TreeError for a tree that is too large to draw with, before work is done for it."""
    count = max([len(paths), *map(len, paths)])
    if count > MOST_DRAFTS:
        what = f"tree {name[:40]!r} has {count} drafts or levels"
        raise TreeError(what, f"a tree has {MOST_DRAFTS} drafts at most")


def check_node(name: str, path: Path, known: set[Path], draws: int) -> None:
    """Raise a TreeError unless the node can be drafted from its parent."""
    if path[-1] >= draws:
        why = f"the drafter draws {draws} children of a node, ranks 0 to {draws - 1}"
        raise TreeError(f"tree {name!r} asks for rank {path[-1]} at node {dotted(path)}", why)
    parent, before = path[:-1], (*path[:-1], path[-1] - 1)
    what = f"tree {name!r} has node {dotted(path)}"
    if parent not in known:
        raise TreeError(what, f"but not its parent {dotted(parent)}")
    if path[-1] and before not in known:
        raise TreeError(what, f"but not the sibling {dotted(before)} before it")


def load_static(name: str, draws: int = DRAWS) -> DraftTree:
    """A named tree, or a user's from a JSON file: a list of paths, or `{"name": ..., "paths": [...]}`."""
    if name in NAMED:
        return DraftTree.from_counts(name, NAMED[name])
    file = FilePath(os.path.expanduser(name))
    if file.suffix != ".json":
        hint = choices([*NAMED, "dynamic", "a .json file"], name)
        raise TreeError(f"unknown tree {name!r}", hint=hint)
    try:
        data = parse_json(read_text(file))
    except (OSError, ValueError) as error:
        raise TreeError(f"cannot read the tree {name!r}", str(error)) from error
    paths = data.get("paths") if isinstance(data, dict) else data
    if not isinstance(paths, list) or not all(isinstance(p, list) for p in paths) or not any(paths):
        why = "expected a list of paths such as [[0], [1], [0, 0]]"
        raise TreeError(f"{name!r} holds no tree", why)
    title = data.get("name", file.stem) if isinstance(data, dict) else file.stem
    return replace(DraftTree.from_paths(str(title), paths, draws), file=name)


# The named ones: those of the published LANTERN++, EAGLE and Medusa configurations, a chain, small ones.
#
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
    "chain_2": ((1,), (1,)),
    "flat_4": ((4,),),
    "broad_7": ((4,), (2, 1)),
    "deep_7": ((2,), (2,), (1,), (1,), (1,)),
}
