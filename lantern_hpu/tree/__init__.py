"""Draft trees: which drafts a step makes, as data.

A static tree has the same nodes at every step. A node is named by the sibling ranks on its path from the
root: `0.2` is the third child of the first child. Nodes are numbered by (depth, path), the root is node 0.
The named ones stand in `named.py`. A dynamic tree (EAGLE-2) has a fixed size, and grows anew at every step. A window
is a chain, or a chain with some siblings at its front, whose drafts need no drafter. This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path as FilePath
from typing import Literal, get_args

from lantern_hpu.errors import TreeError, choices
from lantern_hpu.files import parse_json
from lantern_hpu.tree.named import NAMED

Path = tuple[int, ...]

DRAWS = 10  # children that a drafter draws at a node, at most
DYNAMIC = "dynamic"
MOST_CHILDREN, MOST_EXPANSIONS, MOST_CANDIDATES = 64, 16, 4200  # of a dynamic tree

Rule = Literal["jacobi", "scd", "sjd-pac"]  # how a window's drafts are verified and made
Guess = Literal["probs", "left", "above", "random"]  # what stands at a place that no step has seen
USUAL: Guess = "probs"  # left out of a window's name
OLD_USUAL = ":law"  # how files of version 0.2 end the name of a window with the usual guess
COMMIT = "commit="  # in the name of a window on a fixed schedule
MOST_WINDOW, FRONT = 256, (3, 3)  # drafts in a row; siblings and levels of sjd-pac's front


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

    @classmethod
    def from_paths(cls, name: str, paths: Iterable[Sequence[int]], draws: int = DRAWS) -> DraftTree:
        """A validated tree from its drafts' paths in any order; the root need not be listed."""
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
        """Nodes whose distributions verification computes together: those with children, or the root alone."""
        return self.expanded or (0,)

    @property
    def needs_drafter(self) -> bool:
        return self.depth > 0

    @property
    def is_chain(self) -> bool:
        """Whether node n is the nth draft of one path, so that an accepted path lies where it belongs."""
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


@dataclass(frozen=True)
class DynamicTree:
    """A tree that is grown anew at each step from what the drafter finds probable, one an image (EAGLE-2).

    The root and then, `expansions` times, the `top_k` most probable of the newest candidates get `top_k`
    children each; of all candidates the `drafts` most probable are kept. Whatever the values, the sizes are these.
    """

    top_k: int = DRAWS
    expansions: int = 4
    drafts: int = 58

    def __post_init__(self) -> None:
        if not (1 <= self.top_k <= MOST_CHILDREN and 0 <= self.expansions <= MOST_EXPANSIONS):
            why = f"top-k is 1 to {MOST_CHILDREN}, the depth 0 to {MOST_EXPANSIONS}"
            raise TreeError(f"no tree {self.name!r} can be grown", why)
        if self.candidates > MOST_CANDIDATES:
            why = f"{self.candidates} candidates would be compared with each other; {MOST_CANDIDATES} at most"
            raise TreeError(f"no tree {self.name!r} can be grown", why)
        if not 1 <= self.drafts <= self.candidates:
            why = f"there are {self.candidates} candidates to keep 1 or more of"
            raise TreeError(f"no tree {self.name!r} can be grown", why)

    @classmethod
    def parse(cls, name: str) -> DynamicTree:
        """`dynamic`, or `dynamic:8x3x30` for top-k 8, 3 expansions and 30 drafts."""
        if name == DYNAMIC:
            return cls()
        sizes = name.removeprefix(f"{DYNAMIC}:").split("x")
        if len(sizes) != 3 or not all(size.isdecimal() for size in sizes):
            why = "expected top-k, expansions and drafts"
            raise TreeError(f"cannot read the tree {name!r}", why, f"{DYNAMIC}:10x4x58")
        return cls(*map(int, sizes))

    @property
    def name(self) -> str:
        return f"{DYNAMIC}:{self.top_k}x{self.expansions}x{self.drafts}"

    @property
    def candidates(self) -> int:
        return self.top_k + self.expansions * self.top_k**2

    @property
    def needs_drafter(self) -> bool:
        return True

    @property
    def is_chain(self) -> bool:
        return False

    @property
    def size(self) -> int:
        """M, nodes with the root."""
        return self.drafts + 1

    @property
    def depth(self) -> int:
        """D, the longest path there can be."""
        return self.expansions + 1

    @property
    def max_children(self) -> int:
        """C, most children of a node."""
        return self.top_k

    @property
    def widest(self) -> tuple[int, ...]:
        """[D] most children of a node at each depth."""
        return (self.top_k,) * self.depth

    @property
    def draws(self) -> int:
        """Uniforms that drafting takes: none, the drafts are the most probable."""
        return 0

    @property
    def scratch(self) -> int:
        """Nodes that go through the drafter."""
        return self.expansions * self.top_k


@dataclass(frozen=True)
class Window(DraftTree):
    """A static tree whose drafts are the last step's own draws: no drafter makes them.

    The first children form a chain of W drafts, the spine. With a front of K x D the first D levels have K siblings
    each, all drawn from the distribution that the spine's draft was drawn from.

    On a fixed schedule the first C places are made final in each step, whatever they are. Their keys are written by the
    next step, so that the chain is of C final tokens and W drafts.

    Attributes:
        rule: how drafts are verified, and what the later places draft next.
        guess: what stands at a place that no step has seen yet.
        commit: C; 0 where acceptance decides.
    """

    rule: Rule = "jacobi"
    guess: Guess = USUAL
    commit: int = 0

    @classmethod
    def of(
        cls,
        rule: Rule,
        width: int,
        front: tuple[int, int] | None = None,
        guess: Guess = USUAL,
        commit: int | None = None,
    ) -> Window:
        """The window of a rule.

        Args:
            width: W; 0 is one token a step, for `jacobi` with the same noise as any other width.
            front: K siblings at the first D levels, for `sjd-pac`; 3 x 3 if not given.
            commit: C, for a fixed schedule.
        """
        if rule not in get_args(Rule) or guess not in get_args(Guess):
            known = choices([*get_args(Rule), *get_args(Guess)])
            raise TreeError(f"no window {rule}, {guess}", "unknown rule or guess", known)
        least = 0 if rule == "jacobi" else 1
        if not least <= width <= MOST_WINDOW:
            raise TreeError(f"--window is {width}", f"{rule} takes {least} to {MOST_WINDOW}")
        if rule != "sjd-pac" and front is not None:
            why = f"{rule} has one draft at each place"
            raise TreeError("--window-tree has no meaning here", why, "--method sjd-pac")
        if commit is not None:
            return cls.scheduled(rule, width, front, guess, commit)
        siblings, levels = front or (FRONT[0], min(FRONT[1], width))
        if not (1 <= siblings <= MOST_CHILDREN and 0 <= levels <= width):
            why = f"1 to {MOST_CHILDREN} siblings at 0 to {width} levels, as many as the window has"
            raise TreeError(f"--window-tree is {siblings}x{levels}", why, "--window-tree 3x3")
        if rule != "sjd-pac":
            levels = 0
        ways = [(0,) * depth for depth in range(width + 1)]
        paths = [
            (*way, rank)
            for depth, way in enumerate(ways[:-1])
            for rank in range(siblings if depth < levels else 1)
        ]
        shape = f":{siblings}x{levels}" if rule == "sjd-pac" else ""
        return cls(f"{rule}:{width}{shape}{suffix(guess)}", ((), *paths), rule, guess)

    @classmethod
    def scheduled(
        cls, rule: Rule, width: int, front: tuple[int, int] | None, guess: Guess, commit: int
    ) -> Window:
        """A window on a fixed schedule."""
        if width < 1:
            raise TreeError(f"--commit is {commit}", "a window of width 0 has no drafts to accept")
        if not 1 <= commit <= width:
            allowed = f"1 to {width}, the places of the window"
            raise TreeError(f"--commit is {commit}; allowed: {allowed}")
        if front is not None:
            why = "siblings are tried where a draft is refused, and a fixed schedule refuses none"
            raise TreeError("--window-tree and --commit exclude each other", why)
        paths = tuple((0,) * depth for depth in range(commit + width))
        return cls(f"{rule}:{width}:{COMMIT}{commit}{suffix(guess)}", paths, rule, guess, commit)

    @classmethod
    def parse(cls, name: str) -> Window:
        """`scd:16`, `scd:16:left`, `scd:16:commit=4`, or `sjd-pac:16:3x3:probs`: rule, W, C or K x D, and guess.

        What is usual may be left out.
        """
        rule, *parts = name.removesuffix(OLD_USUAL).split(":")
        guess = parts.pop() if parts and parts[-1] in get_args(Guess) else USUAL
        commit = parts.pop().removeprefix(COMMIT) if parts[1:] and COMMIT in parts[-1] else None
        if not 1 <= len(parts) <= 2 or not all(n.isdecimal() for n in (parts[0], commit or "0")):
            why = "expected rule, width and what else differs from the usual"
            hint = "scd:16, scd:16:commit=4 or sjd-pac:16:3x3"
            raise TreeError(f"cannot read the window {name!r}", why, hint)
        front = parse_front(parts[1]) if len(parts) == 2 else None
        final = None if commit is None else int(commit)
        return cls.of(rule, int(parts[0]), front, guess, final)  # type: ignore[arg-type]

    @property
    def needs_drafter(self) -> bool:
        return False

    @property
    def width(self) -> int:
        """W, places that hold drafts."""
        return self.depth - max(self.commit - 1, 0)

    @cached_property
    def spine(self) -> tuple[int, ...]:
        """[W + 1] the root and the first children."""
        return tuple(self.ids[(0,) * depth] for depth in range(self.depth + 1))

    @cached_property
    def siblings(self) -> tuple[int, ...]:
        """Nodes beside the spine, by (depth, rank)."""
        return tuple(node for node in range(self.size) if node not in self.spine)

    @property
    def front(self) -> int:
        """Levels with siblings."""
        return max((self.depths[node] for node in self.siblings), default=0)

    @property
    def judged(self) -> tuple[int, ...]:
        """All nodes: a window drafts from the distributions of its places. The spine comes first."""
        return (*self.spine, *self.siblings)

    @property
    def draws(self) -> int:
        """Uniforms of `sjd-pac`: one a sibling, and two a place that keeps its draft or draws another."""
        places = self.depth + bool(self.commit)
        return len(self.siblings) + 2 * places if self.rule == "sjd-pac" else 0

    @property
    def scratch(self) -> int:
        """Nodes that go through a drafter."""
        return 0


Tree = DraftTree | DynamicTree


def suffix(guess: Guess) -> str:
    """What a guess adds to the name of a window."""
    return "" if guess == USUAL else f":{guess}"


def parse_front(text: str) -> tuple[int, int]:
    """`3x3` as 3 siblings at 3 levels."""
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() for size in sizes):
        why = "expected siblings and levels"
        raise TreeError(f"cannot read --window-tree {text!r}", why, "--window-tree 3x3")
    return int(sizes[0]), int(sizes[1])


def is_name_of(tree: Tree, text: str) -> bool:
    """Whether a text names a tree; a window has more than one form."""
    if not isinstance(tree, Window):
        return text == tree.name
    try:
        return Window.parse(text) == tree
    except TreeError:
        return False


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


def load_tree(name: str) -> Tree:
    """Any tree by name or file; see `load_static`, `DynamicTree.parse` and `Window.parse`."""
    kind = name.partition(":")[0]
    if kind == DYNAMIC:
        return DynamicTree.parse(name)
    if kind in get_args(Rule):
        return Window.parse(name)
    return load_static(name)


def load_static(name: str, draws: int = DRAWS) -> DraftTree:
    """A named tree, or a user's from a JSON file: a list of paths, or `{"name": ..., "paths": [...]}`."""
    if name in NAMED:
        return DraftTree.from_counts(name, NAMED[name])
    file = FilePath(name)
    if file.suffix != ".json":
        hint = choices([*NAMED, DYNAMIC, "a .json file"])
        raise TreeError(f"unknown tree {name!r}", hint=hint)
    try:
        data = parse_json(file.read_text())
    except (OSError, ValueError) as error:
        raise TreeError(f"cannot read the tree {name!r}", str(error)) from error
    paths = data.get("paths") if isinstance(data, dict) else data
    if not isinstance(paths, list) or not all(isinstance(p, list) for p in paths) or not any(paths):
        raise TreeError(
            f"{name!r} holds no tree", "expected a list of paths such as [[0], [1], [0, 0]]"
        )
    title = data.get("name", file.stem) if isinstance(data, dict) else file.stem
    return replace(DraftTree.from_paths(str(title), paths, draws), file=name)
