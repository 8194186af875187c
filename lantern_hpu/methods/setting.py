"""One `Setting`: a method, how its acceptance is relaxed, and its tree or window, with one written form.

    eagle    auto    scd@16    scd@16:commit=4    lantern:delta-0.1    lantern++:lambda=5:k=10@broad_7

The method; after colons a published relaxation or its values; after @ a named tree, a .json file, the width of a
window and what else differs from the usual, or `auto` for what `lantern-hpu tune` found. What is left open is settled
by `resolve`. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lantern_hpu.errors import LanternError, OptionError
from lantern_hpu.methods import relaxation as relaxations
from lantern_hpu.methods.relaxation import EXACT, Relaxation
from lantern_hpu.methods.table import AUTO, DEFAULT_WINDOW, METHODS, WINDOWS, Auto, method_of
from lantern_hpu.tree import DraftTree, DynamicTree, Tree, Window, load_tree, parse_front

ROOT = DraftTree.root_only()
NO_BOUND = "it draws each token itself and tries none, so that there is nothing to relax"
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
        check_relaxation(self.drafting, self.relaxation)
        check_tree(self.drafting, self.tree)
        check_drawn(self.tree or METHODS[self.drafting].default_tree, self.relaxation)
        check_schedule(self.tree, self.relaxation)

    @property
    def drafting(self) -> str:
        """The method that the rest is for: `auto` with a relaxation is `lantern++`, with a tree alone `eagle`."""
        if self.method != AUTO:
            return self.method
        return "eagle" if self.relaxation in (None, EXACT) else "lantern++"

    @property
    def needs_drafter(self) -> bool:
        """Whether it cannot draw without one, whatever the model; `auto` finds what needs none."""
        if self.method == AUTO:
            return not isinstance(self.tree, str | None) and self.tree.needs_drafter
        return METHODS[self.method].needs_drafter

    @classmethod
    def parse(cls, text: str) -> Setting:
        """
        Raises:
            OptionError: it cannot be read; the message says what can.
        """
        head, at, tree = text.strip().partition("@")
        name, _, values = head.partition(":")
        try:
            method = method_of("lantern++" if name == AUTO else name)
            relaxation = relaxations.parse(values, method.relaxation)
            if at and not tree:
                raise OptionError("nothing follows @")
            return cls(name, relaxation, read_tree(name, tree) if at else None)
        except LanternError as error:
            why = f"{error.what}: {error.why}" if error.why else error.what
            raise OptionError(f"{text!r} is no setting", why, error.hint or FORM) from error

    @classmethod
    def of(
        cls, text: str, relaxation: Relaxation | None = None, tree: Tree | str | None = None
    ) -> Setting:
        """A written form, with what it leaves open.

        Raises:
            OptionError, TreeError: one is given twice, or does not fit.
        """
        setting = cls(text) if text in (AUTO, *METHODS) else cls.parse(text)
        for given, known, option in (
            (relaxation, setting.relaxation, "--relax"),
            (tree, setting.tree, "--tree"),
        ):
            if given is not None and known is not None:
                raise OptionError(f"{text} and {option} exclude each other", "both say the same")
        if isinstance(tree, str):
            tree = read_tree(setting.method, tree)
        setting = setting if relaxation is None else replace(setting, relaxation=relaxation)
        return setting if tree is None else replace(setting, tree=tree)

    def __str__(self) -> str:
        """What `parse` reads."""
        relaxed = "" if self.relaxation is None else f":{self.relaxation}"
        return f"{self.method}{relaxed}" + ("" if self.tree is None else f"@{tree_text(self.tree)}")

    @property
    def commit(self) -> int:
        """Tokens that each step makes final on a fixed schedule; 0 where acceptance decides."""
        return self.tree.commit if isinstance(self.tree, Window) else 0

    @property
    def slug(self) -> str:
        """As part of a file name."""
        return str(self).replace("/", "-").replace(":", "-")


@dataclass(frozen=True)
class Resolved(Setting):
    """What draws: a setting of which nothing is left open."""

    relaxation: Relaxation = EXACT
    tree: Tree = ROOT

    def __post_init__(self) -> None:
        check_drawn(self.tree, self.relaxation)
        check_schedule(self.tree, self.relaxation)

    def __str__(self) -> str:
        """Without what the method has no use for: a relaxation that is exact, the tree of `ar`."""
        method = METHODS[self.method]
        is_usual = self.relaxation == (method.relaxation or EXACT)
        # What draws is settled: whoever gave a number of neighbours, the published one is that setting's.
        relaxation = None if is_usual else replace(self.relaxation, published=True)
        return str(Setting(self.method, relaxation, self.tree if method.drafts else None))

    def as_json(self) -> dict[str, Any]:
        """The form of PNG files and reports."""
        # The name of a dynamic tree or a window says all there is to know.
        paths = self.tree.paths[1:] if type(self.tree) is DraftTree else ()
        return {
            "method": self.method,
            "tree": self.tree.name,
            "tree_paths": [list(path) for path in paths],
            "relaxation": self.relaxation.as_json(),
        }

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Resolved:
        """What `as_json` wrote.

        Raises:
            OptionError: another version wrote it.
        """
        name = values["tree"]
        is_named = method_of(values["method"]).tree in ("dynamic", "window")
        tree = load_tree(name) if is_named else DraftTree.from_paths(name, values["tree_paths"])
        return cls(values["method"], relaxations.read_relaxation(values["relaxation"]), tree)


def lacks_drafter(model: str, what: str) -> OptionError:
    """Why a model without a drafter cannot draw with a method or a tree."""
    hint = f"--method {', '.join(['ar', *WINDOWS])}, or --drafter FOLDER"
    return OptionError(f"{what} cannot be used", f"{model} has no drafter", hint)


# ------------------------------------------------------------------------------------ trees


def read_tree(method: str, text: str) -> Tree | Auto:
    """A tree by name or file; of a window, its width and what else differs from the usual, or its whole name.

    Raises:
        TreeError, OptionError: there is none, or the method drafts none.
    """
    rule = None if method == AUTO else method_of(method).rule
    if text == AUTO:
        return AUTO
    if not (method == AUTO or method_of(method).drafts):
        raise drafts_nothing(method)
    is_short = rule is not None and text.partition(":")[0].isdecimal()
    return load_tree(f"{rule}:{text}" if is_short else text)


def with_tree(settings: Sequence[Setting], name: str) -> list[Setting]:
    """Settings with a tree, where they have none and draft its kind.

    Raises:
        OptionError, TreeError: it cannot be read, or fits none of them.
    """
    tree: Tree | Auto = AUTO if name == AUTO else load_tree(name)

    def takes(setting: Setting) -> bool:
        method = METHODS[setting.drafting]
        return method.tunable if isinstance(tree, str) else method.takes(tree)

    if not any(takes(setting) for setting in settings):
        raise OptionError(f"--tree {name} fits none of {', '.join(map(str, settings))}")
    return [
        replace(setting, tree=tree) if setting.tree is None and takes(setting) else setting
        for setting in settings
    ]


def tree_text(tree: Tree | str) -> str:
    """What `read_tree` reads."""
    if isinstance(tree, str):
        return tree
    if isinstance(tree, Window):
        return tree.name.removeprefix(f"{tree.rule}:")
    return tree.name if isinstance(tree, DynamicTree) else tree.file or tree.name


def window_tree(
    method: str,
    tree: str | None,
    width: int | None,
    front: str | None = None,
    commit: int | None = None,
) -> str | None:
    """The name of the tree that `--window`, `--window-tree` and `--commit` mean; `--tree` itself where none is given.

    Raises:
        OptionError, TreeError: they do not fit the method or each other, or one is out of range.
    """
    options = {"--window": width, "--window-tree": front, "--commit": commit}
    given = next((name for name, value in options.items() if value is not None), None)
    if given is None:
        return tree
    rule = None if method == AUTO else method_of(method).rule
    if rule is None:
        why = "auto chooses the tree" if method == AUTO else f"{method} has no window"
        hint = "--method " + " or ".join(WINDOWS)
        raise OptionError(f"{given} has no meaning for {method}", why, hint)
    if tree:
        raise OptionError(f"--tree and {given} exclude each other", "a window is its own tree")
    levels = None if front is None else parse_front(front)
    places = DEFAULT_WINDOW if width is None else width
    return Window.of(rule, places, levels, commit=commit).name


# ------------------------------------------------------------------------------------ what fits


def check_relaxation(name: str, relaxation: Relaxation | None) -> None:
    """Raise an OptionError where a method is exact and would be relaxed."""
    method = method_of(name)
    if relaxation is None or relaxation == EXACT or method.relaxes:
        return
    if method.rule == "jacobi":
        raise OptionError("jacobi takes no relaxation", NO_BOUND, takers(relaxation))
    why = "relaxation options need a relaxed method"
    raise OptionError(f"{name} is exact", why, takers(relaxation))


def drafts_nothing(name: str) -> OptionError:
    return OptionError(f"--tree has no meaning for {name}", "it drafts nothing", "--method eagle")


def check_tree(name: str, tree: Tree | str | None) -> None:
    """Raise an OptionError where a method cannot draft a tree."""
    method = method_of(name)
    if tree is None:
        return
    if tree == AUTO:
        if not method.tunable:
            why = "tuned trees are static" if method.drafts else "it drafts nothing"
            fits = next(other for other, entry in METHODS.items() if entry.tunable)
            raise OptionError(f"--tree {AUTO} does not fit {name}", why, f"--method {fits}")
        return
    assert not isinstance(tree, str)
    if not method.drafts:
        raise drafts_nothing(name)
    if not method.takes(tree):
        fits = next(other for other, entry in METHODS.items() if entry.takes(tree))
        why = f"{name} drafts a {method.tree if method.rule is None else 'window of its own'}"
        why += "" if method.rule else " tree"
        raise OptionError(f"--tree {tree.name} does not fit {name}", why, f"--method {fits}")


def check_drawn(tree: Tree | str | None, relaxation: Relaxation | None) -> None:
    """Raise an OptionError where a rule that asks what drafts were drawn with meets a tree that draws none."""
    if relaxation is None or not relaxation.needs_draws or not isinstance(tree, DynamicTree):
        return
    rule = "clusters" if relaxation.clusters else "--relax-tv"
    why = "what drafts were drawn with is needed, and such drafts are not drawn"
    raise OptionError(f"no {rule} with a dynamic tree", why, takers(relaxation))


def check_schedule(tree: Tree | str | None, relaxation: Relaxation | None) -> None:
    """Raise an OptionError where acceptance is relaxed that a fixed schedule does not have."""
    if isinstance(tree, Window) and tree.commit and relaxation is not None and relaxation.active:
        why = (
            "the first places of the window are made final whatever they are, so no draft is tried"
        )
        raise OptionError("--commit takes no relaxation", why, "leave one of them out")


def takers(relaxation: Relaxation) -> str:
    """The methods that can be relaxed in this way, as an option."""
    result = [name for name, method in METHODS.items() if method.takes_relaxation(relaxation)]
    return "--method " + " or ".join(result)


def check_drafter(method: str, drafter: object) -> None:
    """Raise an OptionError where a drafter is given beside a method that would not use it."""
    if drafter is not None and method in WINDOWS:
        why = "its drafts are the last step's own draws"
        raise OptionError(f"--drafter has no use for {method}", why, "leave --drafter out")
