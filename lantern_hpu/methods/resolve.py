"""Where the method is decided: a setting, with a model on a device and a batch size at hand, becomes what draws."""

from __future__ import annotations

from dataclasses import dataclass

from lantern_hpu.errors import OptionError
from lantern_hpu.methods.relaxation import EXACT
from lantern_hpu.methods.setting import Resolved, Setting
from lantern_hpu.methods.table import AUTO, METHODS, SMALL_WINDOW, WINDOWS, Method
from lantern_hpu.tree import Tree, Window, load_tree, tuned_trees


@dataclass(frozen=True)
class ResolveContext:
    """What decides: a model on a device, and how many images are decoded together.

    Attributes:
        codes: a token may be. tokens: of an image.
        fastest: the method measured to be fastest here, and its tree, if any was.
        situation: what trees are tuned for; None where none can be.
        idle_arithmetic: whether the device verifies dozens of drafts at little cost. images: decoded together.
    """

    codes: int
    tokens: int
    has_drafter: bool
    fastest: tuple[str, str | None] | None = None
    situation: tuned_trees.Situation | None = None
    idle_arithmetic: bool = True
    images: int = 1


def resolve(setting: Setting, context: ResolveContext) -> Resolved:
    """What draws.

    `auto` is lossless unless a relaxation is given: the fastest lossless method measured with this model on this
    device; where none was, `eagle` on a device with idle arithmetic and a drafter, else the fastest window tuned here,
    or `ar` if that beat them all; where no window was tuned, a short one, and `ar` for several images on a processor.
    With a tree it is `eagle`; with a relaxation `lantern++`, or `sjd-pac` without a drafter. The tree `auto` is the one
    tuned for this model, device and batch size; if one token a step was faster and neither method nor relaxation is
    given, the method is `ar`.

    The default tree of a method is small on a device without idle arithmetic; a window is there as long as that which
    was measured to be fastest with this model.

    Published numbers of neighbours and usual windows are lowered to what the model has.

    Raises:
        OptionError: no tree was tuned for `auto`, or a relaxation does not go with the tree.
    """
    if isinstance(setting, Resolved):
        return setting
    if setting.tree == AUTO:
        setting = with_tuned_tree(setting, context)
    elif setting.method == AUTO:
        setting = with_method(setting, context)
    method, tree = METHODS[setting.method], setting.tree
    relaxation = setting.relaxation or method.relaxation or EXACT
    if tree is None:
        tree = shortened(default_tree(method, context), context.tokens)
    assert not isinstance(tree, str)
    return Resolved(setting.method, relaxation.fitted(context.codes), tree)


def with_tuned_tree(setting: Setting, context: ResolveContext) -> Setting:
    """With the tree that was tuned for it; one for another relaxation of the method will do.

    Raises:
        OptionError: none was tuned.
    """
    name, situation = setting.drafting, context.situation
    if situation is None:
        why, hint = "that tree is known to a loaded model alone", "the file of tune --output"
        raise OptionError(f"--tree {AUTO} has no meaning here", why, hint)
    relaxed = Setting(name, setting.relaxation)
    wanted = situation | {"method": str(relaxed)}
    if not tuned_trees.file_of(wanted).is_file():
        wanted = situation | {"method": name}
    tuned = tuned_trees.find_tree(wanted)
    if tuned.ar_wins and setting == Setting(AUTO, None, AUTO):
        return Setting("ar")
    return Setting(name, setting.relaxation, tuned.tree)


def with_method(setting: Setting, context: ResolveContext) -> Setting:
    """`auto` by its name."""
    if setting == Setting(AUTO):
        return fastest_method(context)
    name = "sjd-pac" if setting.tree is None and not context.has_drafter else setting.drafting
    return Setting(name, setting.relaxation, setting.tree)


def fastest_method(context: ResolveContext) -> Setting:
    """As measured with this model, if it is lossless; without a drafter only what needs none."""
    if context.fastest is not None:
        name, tree = context.fastest
        method = METHODS[name]
        if method.relaxation is None and (context.has_drafter or not method.needs_drafter):
            return Setting.of(name, tree=tree)
    if context.has_drafter and context.idle_arithmetic:
        return Setting("eagle")
    tuned = (
        {} if context.situation is None else tuned_trees.tuned_windows(context.situation, WINDOWS)
    )
    paying = {name: window for name, window in tuned.items() if not window.ar_wins}
    if paying:
        name = min(paying, key=lambda name: paying[name].ms_per_token or 0)
        return Setting(name, tree=paying[name].tree)
    if tuned or (not context.idle_arithmetic and context.images > 1):
        return Setting("ar")
    return Setting("scd")


def default_tree(method: Method, context: ResolveContext) -> Tree:
    """The tree of a method where none is named."""
    if context.idle_arithmetic:
        return method.default_tree
    measured = load_tree(context.fastest[1]) if context.fastest and context.fastest[1] else None
    return method.small_tree(measured.depth if isinstance(measured, Window) else SMALL_WINDOW)


def shortened(tree: Tree, tokens: int) -> Tree:
    """A usual window no longer than an image of so many tokens; other trees as they are."""
    most = tokens - 1
    if not isinstance(tree, Window) or tree.depth <= most:
        return tree
    return Window.of(tree.rule, most, guess=tree.guess)
