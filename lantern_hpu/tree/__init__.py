"""Draft trees: which drafts a step makes, as data. Needs no torch.

A file a kind: `static.py`, which has the named ones, `dynamic.py` and `window.py`.
"""

from __future__ import annotations

from lantern_hpu.tree.dynamic import DYNAMIC, MOST_CHILDREN, DynamicTree
from lantern_hpu.tree.static import DRAWS, NAMED, DraftTree, Path, dotted, load_static
from lantern_hpu.tree.window import MOST_WINDOW, Rule, Tree, Window, load_tree

__all__ = [
    "DRAWS",
    "DYNAMIC",
    "MOST_CHILDREN",
    "MOST_WINDOW",
    "NAMED",
    "DraftTree",
    "DynamicTree",
    "Path",
    "Rule",
    "Tree",
    "Window",
    "dotted",
    "load_static",
    "load_tree",
]
