"""What a user can choose: methods, sampling, relaxation - checked once, here. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from lantern_hpu.errors import OptionError, choices
from lantern_hpu.tree import DYNAMIC, DraftTree, DynamicTree, Tree, load_tree

METHODS = {  # name: what it does
    "ar": "one token a step",
    "eagle": "static draft tree, exact acceptance (EAGLE)",
    "eagle2": "dynamic draft tree, exact acceptance (EAGLE-2)",
    "lantern": "dynamic draft tree, relaxed acceptance (LANTERN)",
    "lantern++": "static draft tree, relaxed acceptance (LANTERN++)",
}
RELAXED, GROWING = ("lantern", "lantern++"), ("eagle2", "lantern")
TUNABLE = ("eagle", "lantern++")  # whose trees `lantern_hpu.tune` finds
# Of methods, the fastest on the device, as `model.json` has it; of trees, what `lantern_hpu.tune` found
AUTO = "auto"
KEPT = ("device", "host", "free")  # where a text encoder stays: see `lantern_hpu.models.t5`
DEFAULT_TREE = "naive_extend_57"
Residual = Literal["sound", "official"]
Rule = Literal["additive", "multiplicative", "annealed"]
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
    """How far acceptance departs from the exact rule (algorithm: `accept.py`).

    Attributes:
        rule: "additive" (LANTERN): a draft's nearest codes lend it at most `bound` of their mass.
            "multiplicative" (LANTERN++): they raise its mass to at most `bound` times its own.
            "annealed" (Cool-SD): its mass is multiplied by bound exp(-nu i - mu), i drafts below the root's
            children.
        k: neighbours that may lend their mass; 0 is exact. Not for the annealed rule.
        bound: delta in [0, 1]; lambda, 1 or more; or the weight at the root's children.
        residual: law after a refusal; "official" reproduces the published code.
        nu, mu: of the annealed rule.
    """

    rule: Rule = "multiplicative"
    k: int = 0
    bound: float = 1.0
    residual: Residual = "sound"
    nu: float = 0.0
    mu: float = 0.0

    @classmethod
    def additive(cls, k: int, delta: float, residual: Residual = "sound") -> Relaxation:
        return cls("additive", k, delta, residual)

    @classmethod
    def multiplicative(cls, k: int, lam: float, residual: Residual = "sound") -> Relaxation:
        return cls("multiplicative", k, lam, residual)

    @classmethod
    def annealed(cls, omega: float, nu: float = 0.0, mu: float = 0.0) -> Relaxation:
        return cls("annealed", 0, omega, "sound", nu, mu)

    def __post_init__(self) -> None:
        for kind, chosen, known in (
            ("rule", self.rule, Rule),
            ("residual", self.residual, Residual),
        ):
            if chosen not in get_args(known):
                raise OptionError(f"unknown {kind} {chosen!r}", hint=choices(get_args(known)))
        require(self.k >= 0, "--relax-k", self.k, "0 (exact) or more")
        if self.rule == "additive":
            require(0 <= self.bound <= 1, "--relax-delta", self.bound, "0 (exact) to 1")
        elif self.rule == "multiplicative":
            require(self.bound >= 1, "--relax-lambda", self.bound, "1 (exact) or more")
        elif self.rule == "annealed":
            require(
                0 <= self.bound <= 1000,
                "--relax-omega",
                self.bound,
                "0 to 1000; a weight up to 1 is exact",
            )
            require(
                self.k == 0, "--relax-k", self.k, "0, as no neighbour lends mass to --relax-omega"
            )
            for name, value in {"--relax-nu": self.nu, "--relax-mu": self.mu}.items():
                require(-10 <= value <= 10, name, value, "-10 to 10")

    @property
    def delta(self) -> float:
        """Bound on lent mass that does not depend on the draft."""
        return self.bound if self.rule == "additive" else 0.0

    @property
    def factor(self) -> float:
        """Bound on lent mass in units of the draft's own."""
        return self.bound - 1 if self.rule == "multiplicative" else 0.0

    def weights(self, depth: int) -> list[float]:
        """[depth] what a draft's own mass is multiplied by."""
        if self.rule != "annealed":
            return [1.0] * depth
        return [self.bound * math.exp(-self.nu * i - self.mu) for i in range(depth)]

    @property
    def lends(self) -> bool:
        """Whether neighbours can lend anything; k = 0, delta = 0 and lambda = 1 are all exact."""
        return self.k > 0 and self.delta + self.factor > 0

    @property
    def weighs(self) -> bool:
        """Whether a draft's own mass is changed anywhere."""
        return any(weight != 1 for weight in self.weights(2))

    @property
    def active(self) -> bool:
        """Whether it can change what is accepted."""
        return self.lends or self.weighs


EXACT = Relaxation()
# What the papers and their reproductions report figures for; `--relax` takes the names.
PRESETS = {
    "delta-0.1": Relaxation.additive(1000, 0.1),
    "delta-0.2": Relaxation.additive(1000, 0.2),
    "delta-0.3": Relaxation.additive(1000, 0.3),
    "delta-0.4": Relaxation.additive(1000, 0.4),
    "lambda-5": Relaxation.multiplicative(10, 5.0),
    "lambda-10": Relaxation.multiplicative(5, 10.0),
    "lambda-20": Relaxation.multiplicative(5, 20.0),
    "omega-2": Relaxation.annealed(2.0, nu=0.2),
}
DEFAULT_RELAXATION = {"lantern": PRESETS["delta-0.2"], "lantern++": PRESETS["lambda-5"]}


def complete(
    method: str,
    k: int | None = None,
    delta: float | None = None,
    lam: float | None = None,
    omega: float | None = None,
    nu: float | None = None,
    mu: float | None = None,
    residual: Residual | None = None,
    preset: str | None = None,
) -> Relaxation | None:
    """The relaxation that loose options mean; what is not given is the preset's, or the method's default.

    Returns None if nothing was given, which leaves it to the method.

    Raises:
        OptionError: two rules at once, an unknown preset, or a value out of range.
    """
    rules = {"--relax-delta": delta, "--relax-lambda": lam, "--relax-omega": omega}
    given = [name for name, value in rules.items() if value is not None]
    if len(given) > 1:
        why = "they are different rules: delta adds to the mass, lambda and omega multiply it"
        raise OptionError(f"{given[0]} and {given[1]} exclude each other", why, "give one")
    if preset is not None and preset not in PRESETS:
        raise OptionError(f"unknown preset {preset!r}", hint=choices(PRESETS))
    if preset is not None and given:
        raise OptionError(f"--relax and {given[0]} exclude each other", "the preset is a rule")
    if omega is None and (nu is not None or mu is not None):
        raise OptionError("--relax-nu and --relax-mu belong to --relax-omega")
    if omega is not None:
        require(k is None, "--relax-k", k, "none, as no neighbour lends mass to --relax-omega")
        return Relaxation("annealed", 0, omega, residual or "sound", nu or 0.0, mu or 0.0)
    if not given and preset is None and k is None and residual is None:
        return None
    base = PRESETS[preset] if preset else DEFAULT_RELAXATION.get(method, PRESETS["lambda-5"])
    if lam is not None:
        base = replace(PRESETS["lambda-5"], bound=lam)
    if delta is not None:
        base = replace(PRESETS["delta-0.2"], bound=delta)
    return replace(base, k=base.k if k is None else k, residual=residual or base.residual)


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
    method: str, tree: str | Tree | None = None, relaxation: Relaxation | None = None
) -> tuple[Tree, Relaxation]:
    """The draft tree and relaxation that a method name stands for.

    Args:
        tree: name, file or the tree itself, for methods that draft; not `auto`, which depends on model and device.
        relaxation: for relaxed methods; the published default if not given.

    Raises:
        OptionError: unknown method, or an option that the method has no use for.
        TreeError: see `load_tree`.
    """
    if method not in METHODS:
        raise OptionError(f"unknown method {method!r}", hint=choices([AUTO, *METHODS]))
    if tree == AUTO:
        why, hint = "that tree is known to a loaded model alone", "the file of tune --output"
        raise OptionError(f"--tree {AUTO} has no meaning here", why, hint)
    if method == "ar" and tree:
        raise OptionError("--tree has no meaning for ar", "it drafts nothing", "--method eagle")
    if method not in RELAXED and relaxation and relaxation != EXACT:
        hint = f"--method {RELAXED[0]} or {RELAXED[1]}"
        raise OptionError(f"{method} is exact", "relaxation options need a relaxed method", hint)
    if method == "ar":
        return DraftTree.root_only(), EXACT
    grows = method in GROWING
    name = tree or (DYNAMIC if grows else DEFAULT_TREE)
    chosen = load_tree(name) if isinstance(name, str) else name
    if isinstance(chosen, DynamicTree) != grows:
        fits = [m for m in METHODS if m != "ar" and (m in GROWING) != grows]
        kind = "a dynamic" if grows else "a static"
        why = f"{method} drafts {kind} tree"
        raise OptionError(f"--tree {tree} does not fit {method}", why, f"--method {fits[0]}")
    return chosen, relaxation or DEFAULT_RELAXATION.get(method, EXACT)


def check_tunable(method: str) -> None:
    """Raise an OptionError unless a tuned tree can serve the method."""
    if method not in TUNABLE:
        why = "it drafts nothing" if method == "ar" else "tuned trees are static"
        raise OptionError(f"--tree {AUTO} does not fit {method}", why, f"--method {TUNABLE[0]}")
