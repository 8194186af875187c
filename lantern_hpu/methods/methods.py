"""What a user can choose: methods, sampling, requests - checked once, here. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lantern_hpu.errors import OptionError, choices, require
from lantern_hpu.methods.relaxation import EXACT, PRESETS, Relaxation
from lantern_hpu.tree import (
    DYNAMIC,
    DraftTree,
    DynamicTree,
    Rule,
    Tree,
    Window,
    load_tree,
    parse_front,
)

# Of methods, the fastest on the device, as `model.json` has it; of trees, what `lantern_hpu.lab.tune` found
AUTO = "auto"
DEFAULT_TREE = "naive_extend_57"
DEFAULT_WINDOW = 16
MAX_SEED = 2**63 - 1
NO_BOUND = "it draws each token itself and tries none, so that there is nothing to relax"


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
        return self.relaxes and not (relaxation.clusters and self.tree == "dynamic")

    @property
    def tunable(self) -> bool:
        """Whether `lantern_hpu.lab.tune` finds trees or windows for it."""
        return self.tree in ("static", "window")

    @property
    def default_tree(self) -> Tree:
        if self.tree is None:
            return DraftTree.root_only()
        if self.rule is not None:
            return Window.of(self.rule, DEFAULT_WINDOW)
        return load_tree(DYNAMIC if self.tree == "dynamic" else DEFAULT_TREE)

    def takes(self, tree: Tree) -> bool:
        """Whether it can draft this tree."""
        if isinstance(tree, Window):
            return self.rule == tree.rule
        return self.tree == ("dynamic" if isinstance(tree, DynamicTree) else "static")


METHODS = {
    "ar": Method("one token a step"),
    "eagle": Method("static draft tree, exact acceptance (EAGLE)", "static"),
    "eagle2": Method("dynamic draft tree, exact acceptance (EAGLE-2)", "dynamic"),
    "lantern": Method(
        "dynamic draft tree, relaxed acceptance (LANTERN)", "dynamic", PRESETS["delta-0.2"]
    ),
    "lantern++": Method(
        "static draft tree, relaxed acceptance (LANTERN++)", "static", PRESETS["lambda-5"]
    ),
    "jacobi": Method(
        "window of the last step's draws, the image of one-token decoding with the same noise",
        "window",
        rule="jacobi",
    ),
    "scd": Method("window of coupled draws, exact unless relaxed (SCD)", "window", rule="scd"),
    "sjd-pac": Method(
        "window that keeps drafts, with siblings at its front, exact unless relaxed (SJD-PAC)",
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


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from the target's logits.

    Attributes:
        cfg_scale: guidance strength s in u + s (c - u); 1 switches guidance off.
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the most probable tokens up to this mass; 1 keeps all.
    """

    cfg_scale: float = 3.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        require(1 <= self.cfg_scale <= 100, "--cfg-scale", self.cfg_scale, "1 (off) to 100")
        # Below 0.01 float32 would overflow on the way to what greedy says exactly.
        fits = self.temperature == 0 or 0.01 <= self.temperature <= 10
        require(fits, "--temperature", self.temperature, "0 (greedy), or 0.01 to 10")
        require(self.top_k >= 0, "--top-k", self.top_k, "0 (off) or more")
        require(0 < self.top_p <= 1, "--top-p", self.top_p, "above 0, up to 1 (off)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class Request:
    """One image to draw.

    Attributes:
        negative: what guidance draws away from, for models that read one; None: the model's own.
    """

    prompt: str
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    relaxation: Relaxation = EXACT
    negative: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise OptionError(
                "the prompt is empty", "there is nothing to draw", '--prompt "a red apple"'
            )
        require(0 <= self.seed <= MAX_SEED, "--seed", self.seed, f"0 to {MAX_SEED}")


def in_turn(
    prompts: Sequence[str],
    index: Iterable[int],
    seed: int,
    sampling: Sampling,
    relaxation: Relaxation = EXACT,
) -> list[Request]:
    """Request i takes the next prompt, around and around, and seed `seed` + i."""
    return [Request(prompts[i % len(prompts)], seed + i, sampling, relaxation) for i in index]


def choose_method(
    name: str, tree: str | Tree | None = None, relaxation: Relaxation | None = None
) -> tuple[Tree, Relaxation]:
    """The draft tree and relaxation that a method name stands for.

    Args:
        tree: name, file or the tree itself, for methods that draft; not `auto`, which depends on model and device.
        relaxation: for relaxed methods; the published default if not given.

    Raises:
        OptionError: unknown method, or an option that the method has no use for.
        TreeError: see `load_tree`.
    """
    method = method_of(name)
    if tree == AUTO:
        why, hint = "that tree is known to a loaded model alone", "the file of tune --output"
        raise OptionError(f"--tree {AUTO} has no meaning here", why, hint)
    if tree and not method.drafts:
        why = "it drafts nothing"
        raise OptionError(f"--tree has no meaning for {name}", why, "--method eagle")
    if relaxation and relaxation != EXACT and not method.relaxes:
        relaxed = [other for other, entry in METHODS.items() if entry.relaxes]
        hint = "--method " + " or ".join(relaxed)
        if method.rule == "jacobi":
            raise OptionError("jacobi takes no relaxation", NO_BOUND, "--method scd")
        raise OptionError(f"{name} is exact", "relaxation options need a relaxed method", hint)
    chosen = method.default_tree
    if tree:
        chosen = load_tree(tree) if isinstance(tree, str) else tree
    if method.drafts and not method.takes(chosen):
        fits = [other for other, entry in METHODS.items() if entry.takes(chosen)]
        why = f"{name} drafts a {method.tree if method.rule is None else 'window of its own'}"
        why += "" if method.rule else " tree"
        raise OptionError(f"--tree {tree} does not fit {name}", why, f"--method {fits[0]}")
    check_clusters(chosen, relaxation or EXACT)
    return chosen, relaxation or method.relaxation or EXACT


def check_clusters(tree: Tree, relaxation: Relaxation) -> None:
    """Raise an OptionError where clusters meet a tree whose drafts were not drawn."""
    if relaxation.clusters and isinstance(tree, DynamicTree):
        why = "a cluster's mass is held against what its codes were drawn with, and such drafts are not drawn"
        hint = "--method lantern++, scd or sjd-pac"
        raise OptionError("no clusters with a dynamic tree", why, hint)


def window_tree(method: str, tree: str | None, width: int | None, front: str | None) -> str | None:
    """The name of the tree that `--window` and `--window-tree` mean; `--tree` itself where neither is given.

    Raises:
        OptionError, TreeError: they do not fit the method or each other, or one is out of range.
    """
    if width is None and front is None:
        return tree
    given = "--window" if width is not None else "--window-tree"
    rule = None if method == AUTO else method_of(method).rule
    if rule is None:
        why, hint = f"{method} has no window", "--method " + " or ".join(WINDOWS)
        raise OptionError(f"{given} has no meaning for {method}", why, hint)
    if tree:
        raise OptionError(f"--tree and {given} exclude each other", "a window is its own tree")
    levels = None if front is None else parse_front(front)
    return Window.of(rule, DEFAULT_WINDOW if width is None else width, levels).name


def check_drafter(method: str, drafter: object) -> None:
    """Raise an OptionError where a drafter is given beside a method that would not use it."""
    if drafter is not None and method in WINDOWS:
        why = "its drafts are the last step's own draws"
        raise OptionError(f"--drafter has no use for {method}", why, "leave --drafter out")


def check_tunable(name: str) -> None:
    """Raise an OptionError unless a tuned tree can serve the method."""
    if not method_of(name).tunable:
        why = "tuned trees are static" if METHODS[name].drafts else "it drafts nothing"
        fits = next(other for other, entry in METHODS.items() if entry.tunable)
        raise OptionError(f"--tree {AUTO} does not fit {name}", why, f"--method {fits}")
