"""Windows: chains, or chains with some siblings at their front, whose drafts need no drafter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from lantern_hpu.errors import Arg, TreeError, choices
from lantern_hpu.tree.dynamic import DYNAMIC, MOST_CHILDREN, DynamicTree
from lantern_hpu.tree.static import DraftTree, load_static

Tree = DraftTree | DynamicTree

Rule = Literal["jacobi", "scd", "sjd-pac"]  # how a window's drafts are verified and drawn
MOST_WINDOW, FRONT = 256, (3, 3)  # drafts in a row; siblings and levels of sjd-pac's front
COUNT = "([0-9]{1,9})"
TEXT = re.compile(f"([a-z-]+):{COUNT}(?::{COUNT}x{COUNT})?(?::commit={COUNT})?")


@dataclass(frozen=True)
class Window(DraftTree):
    """A static tree whose drafts are the last step's own draws: no drafter makes them.

    The first children form a chain of W drafts, the spine. With a front of K x D the first D levels have K siblings
    each, all drawn from the distribution that the spine's draft was drawn from.

    On a fixed schedule the first C places are made final in each step without verification. Their keys are written by
    the next step, so that the chain is of C final tokens and W drafts.

    Attributes:
        rule: how drafts are verified, and what the later places draft next.
        commit: C; 0 where acceptance decides.
    """

    rule: Rule = "jacobi"
    commit: int = 0
    needs_drafter = False

    @classmethod
    def of(
        cls, rule: Rule, width: int, front: tuple[int, int] | None = None, commit: int | None = None
    ) -> Window:
        """The window of a rule.

        Args:
            width: W; 0 is one token a step, for `jacobi` with the same noise as any other width.
            front: K siblings at the first D levels, for `sjd-pac`; 3 x 3 if not given.
            commit: C, for a fixed schedule.
        """
        if rule not in get_args(Rule):
            raise TreeError(f"no window {rule}", "unknown rule", choices(get_args(Rule)))
        least = 0 if rule == "jacobi" else 1
        if not least <= width <= MOST_WINDOW:
            why = f"{rule} takes {least} to {MOST_WINDOW}"
            raise TreeError(f"invalid window {width}", why)
        if commit is not None:
            check_commit(width, front, commit)
            paths = tuple((0,) * depth for depth in range(commit + width))
            return cls(f"{rule}:{width}:commit={commit}", paths, rule, commit)
        siblings, levels = front_of(rule, width, front)
        paths = tuple(
            (*(0,) * depth, rank)
            for depth in range(width)
            for rank in range(siblings if depth < levels else 1)
        )
        shape = f":{siblings}x{levels}" if rule == "sjd-pac" else ""
        return cls(f"{rule}:{width}{shape}", ((), *paths), rule)

    @classmethod
    def parse(cls, text: str) -> Window:
        """`scd:16`, `scd:16:commit=4` or `sjd-pac:16:3x3`: rule, W, and K x D or C."""
        match = TEXT.fullmatch(text)
        if match is None:
            why = "expected the rule, the width and what else differs from the usual"
            hint = "scd:16, scd:16:commit=4 or sjd-pac:16:3x3"
            raise TreeError(f"cannot read the window {text!r}", why, hint)
        rule, width, siblings, levels, commit = match.groups()
        front = None if siblings is None else (int(siblings), int(levels))
        final = None if commit is None else int(commit)
        return cls.of(rule, int(width), front, final)  # type: ignore[arg-type]

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
        """Nodes off the spine, by (depth, rank)."""
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


def check_commit(width: int, front: tuple[int, int] | None, commit: int) -> None:
    """Raise a TreeError for a fixed schedule that a window does not have."""
    what = f"invalid window {width}:commit={commit}"
    if width < 1:
        raise TreeError(what, "a window of width 0 has no drafts to accept")
    if not 1 <= commit <= width:
        raise TreeError(what, f"commit is 1 to {width}, the places of the window")
    if front is not None:
        why = "siblings are tried where a draft is refused, and a fixed schedule refuses none"
        raise TreeError(f"{front[0]}x{front[1]} and commit={commit} exclude each other", why)


def front_of(rule: Rule, width: int, front: tuple[int, int] | None) -> tuple[int, int]:
    """Siblings at each of the first levels; none but for `sjd-pac`."""
    if rule != "sjd-pac":
        if front is not None:
            what = f"invalid window {width}:{front[0]}x{front[1]}"
            raise TreeError(what, f"{rule} has one draft at each place", Arg("method", "sjd-pac"))
        return 1, 0
    siblings, levels = front or (FRONT[0], min(FRONT[1], width))
    if not (1 <= siblings <= MOST_CHILDREN and 0 <= levels <= width):
        why = f"1 to {MOST_CHILDREN} siblings at 0 to {width} levels, as many as the window has"
        what = f"invalid window {width}:{siblings}x{levels}"
        raise TreeError(what, why, f"{width}:2x1")
    return siblings, levels


def load_tree(name: str) -> Tree:
    """Any tree by name or file; see `load_static`, `DynamicTree.parse` and `Window.parse`."""
    kind = name.partition(":")[0]
    if kind == DYNAMIC:
        return DynamicTree.parse(name)
    if kind in get_args(Rule):
        return Window.parse(name)
    return load_static(name)
