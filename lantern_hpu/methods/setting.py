"""One `Setting`: a method, how its acceptance is relaxed, and its tree or window, with one written form.

    eagle    auto    scd@16    scd@16:commit=4    lantern:delta-0.1    lantern++:lambda=5:k=10@broad_7

The method; after colons a published relaxation or its values; after @ a named tree, a .json file, the width of a
window and what else differs from the usual, or `auto` for what `lantern-hpu tune` found. What is left open is settled
by `resolve`. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from lantern_hpu.backends import ACCELERATOR, DraftingDefaults
from lantern_hpu.errors import (
    Arg,
    LanternError,
    OptionError,
    Words,
    choices,
    require,
    words,
)
from lantern_hpu.methods import relaxation as relaxations
from lantern_hpu.methods import tuned_trees
from lantern_hpu.methods.relaxation import EXACT, PRESETS, Relaxation, Verify, refused
from lantern_hpu.tree import DYNAMIC, DraftTree, DynamicTree, Rule, Tree, Window, load_tree

# ------------------------------------------------------------------------------------------- table

Auto = Literal["auto"]
AUTO: Final = "auto"  # of methods, the fastest measured here; of trees, the tuned one
DEFAULT_TREE = ACCELERATOR.tree
DEFAULT_WINDOW = ACCELERATOR.window
# Where arithmetic is scarce, as on processors, more drafts cost more than they bring (docs/processors.md).
SMALL_TREE, SMALL_DYNAMIC = "chain_2", "dynamic:1x0x1"
SMALL_FRONT = (2, 1)


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
        if relaxation.verify == "block" and self.tree != "static":
            return False
        return relaxation.neutral or (
            self.relaxes and not (relaxation.needs_draws and self.tree == "dynamic")
        )

    @property
    def tunable(self) -> bool:
        """Whether `lantern-hpu tune` finds trees or windows for it."""
        return self.tree in ("static", "window")

    def default_tree(self, defaults: DraftingDefaults = ACCELERATOR) -> Tree:
        if self.tree is None:
            return DraftTree.root_only()
        if self.rule is not None:
            return Window.of(self.rule, defaults.window)
        return load_tree(DYNAMIC if self.tree == "dynamic" else defaults.tree)

    def small_tree(self, width: int) -> Tree:
        """Instead of `default_tree`, on a device without idle arithmetic; a window has `width` drafts."""
        if self.rule == "sjd-pac":  # one of them next to the first
            return Window.of(self.rule, max(width - 1, SMALL_FRONT[0]), SMALL_FRONT)
        if self.rule is not None:
            return Window.of(self.rule, width)
        if not self.drafts:
            return self.default_tree()
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
        "Jacobi window; the image of jacobi@0, which draws one token a step with the same noise",
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
# What draws with a model that has no drafter; lossless without a relaxation
WINDOWS = [name for name, method in METHODS.items() if method.rule]


def method_of(name: str) -> Method:
    if name not in METHODS:
        raise OptionError(f"unknown method {name!r}", hint=choices([AUTO, *METHODS], name))
    return METHODS[name]


# ----------------------------------------------------------------------------------------- setting

ROOT = DraftTree.root_only()
FORM = "METHOD[:RELAXATION][@TREE], such as eagle, scd@16 or lantern++:lambda=5:k=10@broad_7"


@dataclass(frozen=True)
class Setting:
    """What is asked for.

    Attributes:
        method: or `auto`.
        relaxation: None leaves it to the method.
        tree: None for the method's default, or `auto`.

    Raises:
        OptionError: an unknown method, or a relaxation or a tree that the method has no use for.
    """

    method: str = AUTO
    relaxation: Relaxation | None = None
    tree: Tree | Auto | None = None

    def __post_init__(self) -> None:
        name = self.drafting
        check_tree(name, self.tree)
        if self.relaxation is None:
            return
        if not (self.relaxation.neutral or METHODS[name].relaxes):
            raise is_exact(name, self.relaxation)
        tree = METHODS[name].default_tree() if self.tree in (None, AUTO) else self.tree
        assert not isinstance(tree, str | None)
        check_acceptance(tree, self.relaxation)

    @property
    def drafting(self) -> str:
        """Whose trees and relaxations apply: of `auto` with a relaxation `lantern++`, with a tree alone `eagle`."""
        if self.method != AUTO:
            return self.method
        return "eagle" if self.relaxation is None or self.relaxation.neutral else "lantern++"

    @property
    def needs_drafter(self) -> bool:
        """Whether it cannot draw without one, with any model; `auto` finds what needs none."""
        if self.method == AUTO:
            return not isinstance(self.tree, str | None) and self.tree.needs_drafter
        return METHODS[self.method].needs_drafter

    @classmethod
    def parse(cls, text: str) -> Setting:
        """
        Raises:
            OptionError: it cannot be read; the message says what can.
        """
        require(isinstance(text, str), "method", text, "a setting as text")
        head, at, tree = text.strip().partition("@")
        name, _, values = head.partition(":")
        try:
            method = method_of("lantern++" if name == AUTO else name)
            usual = None if name == AUTO else method.relaxation
            relaxation = relaxations.parse(values, usual) if values else None
            if at and not tree:
                raise OptionError("nothing follows @")
            return cls(name, relaxation, read_tree(name, tree) if at else None)
        except LanternError as error:
            what = f"invalid setting {text!r}"
            raise refused(what, error.reason, error.hint or FORM) from error

    def __str__(self) -> str:
        """What `parse` reads."""
        return written(self.method, self.relaxation, self.tree)

    @property
    def drafts(self) -> bool:
        return METHODS[self.drafting].drafts

    @property
    def commit(self) -> int:
        """Tokens that each step makes final on a fixed schedule; 0 where acceptance decides."""
        return 0 if isinstance(self.tree, str | None) else self.tree.commit

    @property
    def slug(self) -> str:
        """As part of a file name."""
        return str(self).replace("/", "-").replace(":", "-")


@dataclass(frozen=True)
class Resolved(Setting):
    """What draws: a setting of which nothing is left open."""

    relaxation: Relaxation = EXACT
    tree: Tree = ROOT
    why: str = field(default="", compare=False)  # it was chosen, where `auto` did

    def __str__(self) -> str:
        """Without what the method has no use for: a relaxation that is exact, the tree of `ar`."""
        method, given = METHODS[self.method], self.relaxation
        if given.verify == verified(replace(given, verify="auto"), self.tree).verify:
            given = replace(given, verify="auto")
        # A number of neighbours that equals the published one is not written out
        is_usual = given == (method.relaxation or EXACT)
        relaxation = None if is_usual else replace(given, published=True)
        return written(self.method, relaxation, self.tree if method.drafts else None)

    def as_json(self) -> dict[str, Any]:
        """The form of PNG files and reports."""
        # The name of a dynamic tree or a window is enough to read it.
        paths = self.tree.paths[1:] if type(self.tree) is DraftTree else ()
        return {
            "method": self.method,
            "tree": self.tree.name,
            "tree_paths": [list(path) for path in paths],
            "relaxation": self.relaxation.as_json(),
        }

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Resolved:
        """What `as_json` wrote."""
        name = values["tree"]
        is_named = method_of(values["method"]).tree in ("dynamic", "window")
        tree = load_tree(name) if is_named else DraftTree.from_paths(name, values["tree_paths"])
        rule = relaxations.read_relaxation(values["relaxation"])
        return cls(values["method"], verified(rule, tree, "token"), tree)


# ------------------------------------------------------------------------------------ what fits


def check_tree(name: str, tree: Tree | Auto | None) -> None:
    """Raise an OptionError where a method cannot draft a tree."""
    method = method_of(name)
    if tree is None or (tree == ROOT and not method.drafts):
        return
    if not method.drafts:
        raise refused(f"{name} takes no tree", "it drafts nothing", Arg("method", "eagle"))
    if tree == AUTO:
        if not method.tunable:
            hint = Arg("method", "eagle@auto")
            raise refused(f"{name}@auto cannot be used", "tuned trees are static", hint)
        return
    assert not isinstance(tree, str)
    if not method.takes(tree):
        fits = next(other for other, entry in METHODS.items() if entry.takes(tree))
        kind = f"{method.tree} tree" if method.rule is None else "window of its own"
        what = f"the tree {tree.name} does not fit {name}"
        raise refused(what, f"{name} drafts a {kind}", Arg("method", written(fits, None, tree)))


def why_by_token(tree: Tree, relaxation: Relaxation) -> str:
    """Why drafts are verified each by itself; empty where they can be verified together."""
    if not tree.depth:
        return "nothing is drafted"
    if isinstance(tree, Window):
        return "a window keeps noise and drafts behind the place where acceptance stops"
    if isinstance(tree, DynamicTree):
        return "the drafts of a dynamic tree are not drawn"
    if not relaxation.keeps_distributions:
        key = relaxation.bound_key()
        return f"{key} makes a token's distribution depend on its draft; lossless rules and tv can"
    return ""


def verified(relaxation: Relaxation, tree: Tree, usual: Verify = "block") -> Relaxation:
    """With how drafts are verified settled, where there is a choice and it is open; single drafts are as they are.

    Raises:
        OptionError: they are to be verified together, and cannot be.
    """
    check_acceptance(tree, relaxation)
    if why_by_token(tree, relaxation):
        return replace(relaxation, verify="auto")
    is_open = relaxation.verify == "auto" and tree.depth > 1
    return replace(relaxation, verify=usual) if is_open else relaxation


def check_acceptance(tree: Tree, relaxation: Relaxation) -> None:
    """Raise an OptionError where the drafts of a tree cannot be accepted in a relaxed way, or together."""
    if relaxation.verify == "block" and (why := why_by_token(tree, relaxation)):
        raise refused("verify=block cannot be used", why, "verify=token")
    if isinstance(tree, Window) and relaxation.active:
        if tree.rule == "jacobi":
            raise is_exact("jacobi", relaxation)
        if tree.commit:
            why = "the first places of the window are made final without verification"
            raise refused("commit takes no relaxation", why, "leave one of them out")
    if isinstance(tree, DynamicTree) and relaxation.needs_draws:
        rule = "clusters" if relaxation.clusters else "tv"
        why = "it needs the distribution that drafts were drawn from, and such drafts are not drawn"
        raise refused(f"no {rule} with a dynamic tree", why, takers(relaxation))


def is_exact(method: str, relaxation: Relaxation) -> OptionError:
    """Why a method takes no relaxation."""
    if method != "jacobi":
        return refused(f"{method} is exact", "it takes no relaxation", takers(relaxation))
    why = "it draws each token itself and tries none, so that there is nothing to relax"
    return refused("jacobi takes no relaxation", why, takers(relaxation))


def takers(relaxation: Relaxation) -> Words:
    """The methods that can be relaxed in this way, as an argument."""
    takes = [name for name, method in METHODS.items() if method.takes_relaxation(relaxation)]
    return one_of("method", takes)


def one_of(name: str, values: Sequence[str]) -> Words:
    """An argument with its possible values: `--method jacobi or scd`."""
    first, *more = values
    return words(Arg(name, first), *(f"or {value}" for value in more))


def lacks_drafter(model: str, what: str | Arg) -> OptionError:
    """Why a model without a drafter cannot draw with a method or a tree."""
    hint = words(one_of("method", ["ar", *WINDOWS]), ", or", Arg("drafter"))
    return OptionError(words(what, "cannot be used"), f"{model} has no drafter", hint)


# ------------------------------------------------------------------------------------ trees as text


def read_tree(method: str, text: str) -> Tree | Auto:
    """A tree by name or file; of a window, its width and what else differs from the usual, or its whole name."""
    if text == AUTO:
        return AUTO
    rule = None if method == AUTO else method_of(method).rule
    is_short = rule is not None and text.partition(":")[0].isdecimal()
    return load_tree(f"{rule}:{text}" if is_short else text)


def written(method: str, relaxation: Relaxation | None, tree: Tree | str | None) -> str:
    """The form that `Setting.parse` reads."""
    relaxed = "" if relaxation is None else f":{relaxation}"
    drafts = "" if tree is None else f"@{tree_text(tree)}"
    return f"{method}{relaxed}{drafts}"


def tree_text(tree: Tree | str) -> str:
    """What `read_tree` reads."""
    if isinstance(tree, str):
        return tree
    if isinstance(tree, Window):
        return tree.name.removeprefix(f"{tree.rule}:")
    return tree.name if isinstance(tree, DynamicTree) else tree.file or tree.name


def typed(tree: str) -> str:
    """A tree's name as it is given to --method: that of a window `scd:16` is `scd@16`."""
    method, _, sizes = tree.partition(":")
    return f"{method}@{sizes}" if sizes and method in METHODS else tree


# ----------------------------------------------------------------------------------------- resolve


@dataclass(frozen=True)
class ResolveContext:
    """What decides: a model on a device, and how many images are decoded together.

    Attributes:
        codes: a token may be. tokens: of an image.
        fastest: the method measured to be fastest with this model on such a device, and its tree, if any was.
        situation: what trees are tuned for; None where none can be.
        defaults: of the device for a model of this size. images: decoded together.
    """

    codes: int
    tokens: int
    has_drafter: bool
    fastest: tuple[str, str | None] | None = None
    situation: tuned_trees.Situation | None = None
    defaults: DraftingDefaults = ACCELERATOR
    images: int = 1


def resolve(setting: Setting, context: ResolveContext) -> Resolved:
    """What draws.

    `auto` is lossless unless a relaxation is given: the fastest that was tuned for this model, device, format and batch
    size, or `ar` if that was faster; else the method measured to be fastest with this model on such a device; else the
    device's default for a model of this size, and on a processor `ar` for several images. With a tree it is `eagle`;
    with a relaxation `lantern++`, or `sjd-pac` without a drafter. The tree `auto` is the one tuned for this model,
    device and batch size; if one token a step was faster and neither method nor relaxation is given, the method is
    `ar`.

    The default tree of a method is small on a device without idle arithmetic; a window is there as long as that which
    was measured to be fastest with this model, or as the device's default.

    Published numbers of neighbours and usual windows are lowered to what the model has. Drafts are verified together
    where that can be done and nothing else is asked for.
    """
    if isinstance(setting, Resolved):
        return setting
    name = setting.method
    tree = setting.tree
    why = ""
    if tree == AUTO:
        name, tree = with_tuned_tree(setting, context)
    elif name == AUTO and setting.relaxation is None and tree is None:
        name, tree, why = fastest_method(context)
    elif name == AUTO:
        name = "sjd-pac" if tree is None and not context.has_drafter else setting.drafting
    method = METHODS[name]
    relaxation = setting.relaxation or method.relaxation or EXACT
    if tree is None:
        tree = shortened(default_tree(method, context), context.tokens)
    assert not isinstance(tree, str)
    return Resolved(name, verified(relaxation.fit(context.codes), tree), tree, why)


def with_tuned_tree(setting: Setting, context: ResolveContext) -> tuple[str, Tree | None]:
    """The method, and the tree that was tuned for it; one for another relaxation of the method will do."""
    name = setting.drafting
    if context.situation is None:
        why = "that tree is known to a loaded model alone"
        hint = "the tree's file, which `lantern-hpu tune` writes"
        raise refused(f"{name}@auto has no meaning here", why, hint)
    wanted = context.situation | {"method": written(name, setting.relaxation, None)}
    if not tuned_trees.file_of(wanted).is_file():
        wanted = context.situation | {"method": name}
    tuned = tuned_trees.find_tree(wanted)
    if tuned.ar_wins and setting.method == AUTO and setting.relaxation is None:
        return "ar", None
    return name, tuned.tree


def fastest_method(context: ResolveContext) -> tuple[str, Tree | None, str]:
    """The lossless method that is fastest here, as far as that is known, with its tree and why; without a drafter only
    what needs none."""

    def usable(name: str) -> bool:
        method = METHODS[name]
        return method.relaxation is None and (context.has_drafter or not method.needs_drafter)

    if context.situation is not None:
        candidates = [name for name, method in METHODS.items() if method.tunable and usable(name)]
        if tuned := tuned_trees.tuned_methods(context.situation, candidates):
            name = max(tuned, key=lambda name: tuned[name].times_ar)
            best = tuned[name]
            if best.ar_wins:
                return "ar", None, "tuned"
            return name, replace(best.tree, file=None), "tuned"  # it is known by its name
    if context.fastest is not None and usable(context.fastest[0]):
        name, tree = context.fastest
        return (
            name,
            load_tree(tree) if tree else None,
            "fastest with this model when it was packaged",
        )
    defaults = context.defaults
    name = defaults.method if usable(defaults.method) else "scd"
    if defaults.idle_arithmetic:
        return name, None, "default on this device"
    if context.images > 1 and name != "ar":
        return "ar", None, "fastest here for several images at once"
    return name, None, "fastest here for a model of this size"


def default_tree(method: Method, context: ResolveContext) -> Tree:
    """The tree of a method where none is named."""
    defaults = context.defaults
    if defaults.idle_arithmetic:
        return method.default_tree(defaults)
    measured = load_tree(context.fastest[1]) if context.fastest and context.fastest[1] else None
    return method.small_tree(measured.depth if isinstance(measured, Window) else defaults.window)


def shortened(tree: Tree, tokens: int) -> Tree:
    """A usual window no longer than an image of that many tokens; other trees as they are."""
    most = tokens - 1
    if not isinstance(tree, Window) or tree.depth <= most:
        return tree
    return Window.of(tree.rule, most)
