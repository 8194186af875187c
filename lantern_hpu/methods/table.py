"""The table of methods: what each drafts, and whether its acceptance may be relaxed. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from lantern_hpu.errors import OptionError, choices
from lantern_hpu.methods.relaxation import PRESETS, Relaxation
from lantern_hpu.tree import DYNAMIC, DraftTree, DynamicTree, Rule, Tree, Window, load_tree

Auto = Literal["auto"]
AUTO: Final = (
    "auto"  # of methods, the fastest measured here; of trees, the tuned one: see `resolve`
)
DEFAULT_TREE = "naive_extend_57"
DEFAULT_WINDOW = 16
# Where arithmetic is scarce, as on processors, more drafts cost more than they bring (docs/processors.md).
SMALL_TREE, SMALL_DYNAMIC = "chain_2", "dynamic:1x0x1"
SMALL_WINDOW, SMALL_FRONT = 2, (2, 1)


@dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes:
        about: what it does, for help texts.
        tree: the kind of tree that it drafts; None drafts nothing.
        relaxation: the published default of a method that relaxes acceptance; None is exact.
        rule: of its window.
    """

    about: str
    tree: Literal["static", "dynamic", "window"] | None = None
    relaxation: Relaxation | None = None
    rule: Rule | None = None

    @property
    def drafts(self) -> bool:
        return self.tree is not None

    @property
    def needs_drafter(self) -> bool:
        return self.tree in ("static", "dynamic")

    @property
    def relaxes(self) -> bool:
        """Whether it takes a relaxation; windows are exact without one."""
        return self.relaxation is not None or self.rule in ("scd", "sjd-pac")

    def takes_relaxation(self, relaxation: Relaxation) -> bool:
        """Whether it can be relaxed in this way."""
        return self.relaxes and not (relaxation.needs_draws and self.tree == "dynamic")

    @property
    def tunable(self) -> bool:
        """Whether `lantern-hpu tune` finds trees or windows for it."""
        return self.tree in ("static", "window")

    @property
    def default_tree(self) -> Tree:
        if self.tree is None:
            return DraftTree.root_only()
        if self.rule is not None:
            return Window.of(self.rule, DEFAULT_WINDOW)
        return load_tree(DYNAMIC if self.tree == "dynamic" else DEFAULT_TREE)

    def small_tree(self, width: int = SMALL_WINDOW) -> Tree:
        """Instead of `default_tree`, on a device without idle arithmetic; a window has `width` drafts in a row."""
        if self.rule is not None:
            return Window.of(self.rule, width, SMALL_FRONT if self.rule == "sjd-pac" else None)
        if not self.drafts:
            return self.default_tree
        return load_tree(SMALL_DYNAMIC if self.tree == "dynamic" else SMALL_TREE)

    def takes(self, tree: Tree) -> bool:
        """Whether it can draft this tree."""
        if isinstance(tree, Window):
            return self.rule == tree.rule
        return self.tree == ("dynamic" if isinstance(tree, DynamicTree) else "static")


METHODS: dict[str, Method] = {
    "ar": Method("one token a step"),
    "eagle": Method("static draft tree, lossless (EAGLE)", "static"),
    "eagle2": Method("dynamic draft tree, lossless (EAGLE-2)", "dynamic"),
    "lantern": Method(
        "dynamic draft tree, relaxed acceptance (LANTERN)", "dynamic", PRESETS["delta-0.2"]
    ),
    "lantern++": Method(
        "static draft tree, relaxed acceptance (LANTERN++)", "static", PRESETS["lambda-5"]
    ),
    "jacobi": Method(
        "Jacobi window; same image as one-token decoding with the same noise",
        "window",
        rule="jacobi",
    ),
    "scd": Method(
        "window with coupled sampling, lossless unless relaxed (SCD)", "window", rule="scd"
    ),
    "sjd-pac": Method(
        "window that reuses drafts and starts with several candidates, lossless unless relaxed (SJD-PAC)",
        "window",
        rule="sjd-pac",
    ),
}
# What draws with a model that has no drafter, and needs no bound
WINDOWS = [name for name, method in METHODS.items() if method.rule]


def method_of(name: str) -> Method:
    """
    Raises:
        OptionError: there is none of that name.
    """
    if name not in METHODS:
        raise OptionError(f"unknown method {name!r}", hint=choices([AUTO, *METHODS]))
    return METHODS[name]
