"""What a user can choose: methods, sampling, relaxation - checked once, here. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lantern_hpu.errors import OptionError, choices
from lantern_hpu.tree import DraftTree, load_tree

# name: what it does. `eagle2` and `lantern` need dynamic trees.
METHODS = {
    "ar": "one token a step",
    "eagle": "static draft tree, exact acceptance (EAGLE)",
    "lantern++": "static draft tree, relaxed acceptance (LANTERN++)",
}
AUTO = "auto"  # the model's fastest method on the device, as its `model.json` has it
DEFAULT_TREE = "naive_extend_57"
DEFAULT_K, DEFAULT_LAMBDA = 10, 5.0  # of lantern++, as published
MAX_SEED = 2**63 - 1


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raise an OptionError that names the option, its value and the allowed ones."""
    if not holds:
        raise OptionError(f"{name} is {value}", f"allowed: {allowed}")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from the target's logits.

    Attributes:
        cfg_scale: guidance strength s in u + s (c - u); 1 switches guidance off.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens up to this mass; 1 keeps all.
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
class Relaxation:
    """How far a draft may stand for its neighbours in the codebook (algorithm: `accept.py`).

    Attributes:
        k: neighbours that may lend their mass; 0 is exact.
        delta: additive bound on the lent mass, in [0, 1]; excludes lam.
        lam: multiplicative bound: accepted mass is at most lam p(x); 1 is exact; excludes delta.
        residual: law after a relaxed rejection; "official" reproduces the published code.
    """

    k: int = 0
    delta: float | None = None
    lam: float | None = None
    residual: Literal["sound", "official"] = "sound"

    def __post_init__(self) -> None:
        require(self.k >= 0, "--relax-k", self.k, "0 (exact) or more")
        if self.delta is not None and self.lam is not None:
            why = "they are two rules: delta adds to the mass, lambda multiplies it"
            raise OptionError(
                "--relax-delta and --relax-lambda exclude each other", why, "give one"
            )
        if self.delta is not None:
            require(0 <= self.delta <= 1, "--relax-delta", self.delta, "0 (exact) to 1")
        if self.lam is not None:
            require(self.lam >= 1, "--relax-lambda", self.lam, "1 (exact) or more")
        if self.residual not in ("sound", "official"):
            raise OptionError(
                f"unknown residual {self.residual!r}", hint=choices(["sound", "official"])
            )

    @property
    def active(self) -> bool:
        """Whether it can change anything; k = 0, delta = 0 and lambda = 1 are all exact."""
        return self.k > 0 and ((self.delta or 0) > 0 or (self.lam or 1) > 1)


EXACT = Relaxation()


@dataclass(frozen=True)
class Request:
    """One image to draw."""

    prompt: str
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    relaxation: Relaxation = EXACT

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise OptionError(
                "the prompt is empty", "there is nothing to draw", '--prompt "a red apple"'
            )
        require(0 <= self.seed <= MAX_SEED, "--seed", self.seed, f"0 to {MAX_SEED}")


def choose_method(
    method: str, tree: str | None = None, relaxation: Relaxation | None = None
) -> tuple[DraftTree, Relaxation]:
    """The draft tree and relaxation that a method name stands for.

    Args:
        tree: name or file, for methods that draft.
        relaxation: for `lantern++`; its published default if not given.

    Raises:
        OptionError: unknown method, or an option that the method has no use for.
        TreeError: see `load_tree`.
    """
    if method not in METHODS:
        raise OptionError(f"unknown method {method!r}", hint=choices([AUTO, *METHODS]))
    if method == "ar" and tree:
        raise OptionError("--tree has no meaning for ar", "it drafts nothing", "--method eagle")
    if method != "lantern++" and relaxation and relaxation != EXACT:
        raise OptionError(
            f"{method} is exact", "relaxation options need a relaxed method", "--method lantern++"
        )
    if method == "ar":
        return DraftTree.root_only(), EXACT
    chosen = load_tree(tree or DEFAULT_TREE)
    if method == "eagle":
        return chosen, EXACT
    return chosen, relaxation or Relaxation(DEFAULT_K, lam=DEFAULT_LAMBDA)
