"""Dynamic trees (EAGLE-2): a fixed size, and nodes that are chosen at every step."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lantern_hpu.errors import TreeError
from lantern_hpu.tree.static import DRAWS

DYNAMIC = "dynamic"
MOST_CHILDREN, MOST_EXPANSIONS, MOST_CANDIDATES = 64, 16, 4200


@dataclass(frozen=True)
class DynamicTree:
    """A tree that is grown at each step from what the drafter finds probable, one an image (EAGLE-2).

    The root and then, `expansions` times, the `top_k` most probable of the newest candidates get `top_k`
    children each; of all candidates the `drafts` most probable are kept.
    """

    top_k: int = DRAWS
    expansions: int = 4
    drafts: int = 58
    # What all these trees share; see `DraftTree` and `Window`
    needs_drafter, is_chain, commit = True, False, 0
    draws = 0  # the drafts are the most probable

    def __post_init__(self) -> None:
        why = ""
        if not (1 <= self.top_k <= MOST_CHILDREN and 0 <= self.expansions <= MOST_EXPANSIONS):
            why = f"top-k is 1 to {MOST_CHILDREN}, the depth 0 to {MOST_EXPANSIONS}"
        elif self.candidates > MOST_CANDIDATES:
            why = f"{self.candidates} candidates would be compared with each other; {MOST_CANDIDATES} at most"
        elif not 1 <= self.drafts <= self.candidates:
            why = f"there are {self.candidates} candidates to keep 1 or more of"
        if why:
            raise TreeError(f"no tree {self.name!r} can be grown", why)

    @classmethod
    def parse(cls, name: str) -> DynamicTree:
        """`dynamic`, or `dynamic:8x3x30` for top-k 8, 3 expansions and 30 drafts."""
        if name == DYNAMIC:
            return cls()
        sizes = name.removeprefix(f"{DYNAMIC}:").split("x")
        if len(sizes) != 3 or not all(re.fullmatch("[0-9]{1,9}", size) for size in sizes):
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
    def scratch(self) -> int:
        """Nodes that go through the drafter."""
        return self.expansions * self.top_k
