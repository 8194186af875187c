"""Where drafts come from. A drafting owns its part of the state; the step knows none of its fields."""

from __future__ import annotations

from lantern_hpu.decode.drafting.base import Committed, Drafting, Drafts
from lantern_hpu.decode.drafting.scheduled import ScheduledDrafting
from lantern_hpu.decode.drafting.static import DynamicDrafting, StaticDrafting
from lantern_hpu.decode.drafting.window import WindowDrafting
from lantern_hpu.decode.spec import Spec
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.tree import DynamicTree, Window

__all__ = [
    "Committed",
    "Drafting",
    "Drafts",
    "ScheduledDrafting",
    "WindowDrafting",
    "make_drafting",
]


def make_drafting(target: Target, drafter: Drafter | None, spec: Spec) -> Drafting | None:
    """What drafts a spec's tree; None where the root is the whole tree."""
    if isinstance(spec.tree, Window):
        kind_of_window = ScheduledDrafting if spec.tree.commit else WindowDrafting
        return kind_of_window(target, spec)
    if not spec.tree.depth:
        return None
    assert drafter is not None, "a tree of drafts needs a drafter"
    kind = DynamicDrafting if isinstance(spec.tree, DynamicTree) else StaticDrafting
    return kind(target, drafter, spec)
