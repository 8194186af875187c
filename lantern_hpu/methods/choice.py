"""Which method, tree and relaxation draw, where a user leaves some of it to us."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lantern_hpu.methods.methods import AUTO, WINDOWS, check_tunable
from lantern_hpu.methods.relaxation import Relaxation
from lantern_hpu.tree import Tree, Window, tuned_trees


@dataclass(frozen=True)
class Choice:
    """What was chosen."""

    method: str
    tree: Tree
    relaxation: Relaxation


def tuned(situation: tuned_trees.Situation, method: str, relaxes: bool) -> tuple[str, Tree | None]:
    """The method and the tree that `lantern_hpu.lab.tune` found best in this situation.

    Raises:
        OptionError: it found none yet, or the method takes none.
    """
    drafting = "lantern++" if method == AUTO else method
    check_tunable(drafting)
    found = tuned_trees.find(situation | {"method": drafting})
    if found.ar_wins and method == AUTO and not relaxes:
        return "ar", None
    return drafting, found.tree


def fastest_without_drafter(situation: tuned_trees.Situation) -> tuple[str, Tree | None]:
    """The fastest exact method that was measured here for a model that has no drafter: a tuned window, or `ar`."""
    found = min(tuned_trees.windows(situation, WINDOWS), default=None, key=lambda window: window[0])
    return ("ar", None) if found is None else found[1:]


def fitted(relaxation: Relaxation, codes: int) -> Relaxation:
    """A published setting with no more neighbours than a codebook has."""
    return replace(relaxation, k=min(relaxation.k, codes - 1))


def fitted_tree(tree: Tree, tokens: int) -> Tree:
    """A usual window no longer than a picture of so many tokens; other trees as they are."""
    most = tokens - 1
    if not isinstance(tree, Window) or tree.depth <= most:
        return tree
    return Window.of(tree.rule, most, guess=tree.guess)
