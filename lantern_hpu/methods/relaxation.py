"""How far acceptance may depart from the exact rule: five types, and the published settings. Needs no torch.

Written as `delta-0.1`, the name of a published setting, or as values between colons: `lambda=2:k=30`.
The algorithm is `decode/accept.py`; what each rule bounds and what it does not: docs/methods.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, get_args

from lantern_hpu.errors import OptionError, choices, option, require

Residual = Literal["sound", "official"]


@dataclass(frozen=True)
class Relaxation:
    """What acceptance needs of a rule; these values are exact.

    Attributes:
        rule: its name in PNG files and reports. bound_name: of its bound, where it is written.
        k: neighbours that may lend their mass; 0 is exact.
        residual: what is left after a refusal; "official" reproduces the published code.
        published: whether `k` is a published number, which a small codebook may lower, and not the user's.
    """

    rule: ClassVar[str]
    bound_name: ClassVar[str]
    more: ClassVar[tuple[str, ...]] = ()  # its fields after the bound
    k: int = 0
    residual: Residual = "sound"
    published: bool = field(default=False, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.residual not in get_args(Residual):
            hint = choices(get_args(Residual))
            raise OptionError(f"unknown residual {self.residual!r}", hint=hint)
        require(self.k >= 0, "--relax-k", self.k, "0 (exact) or more")

    @property
    def delta(self) -> float:
        """Bound on lent mass that does not depend on the draft."""
        return 0.0

    @property
    def factor(self) -> float:
        """Bound on lent mass in units of the draft's own."""
        return 0.0

    def weights(self, depth: int) -> list[float]:
        """[depth] what a draft's own mass is multiplied by."""
        return [1.0] * depth

    @property
    def limits(self) -> tuple[int, float, float]:
        """Ranks, probability and squared distance within which codes are of one cluster; a 0 among them is exact."""
        return 0, 0.0, 0.0

    @property
    def tv(self) -> float:
        """Total variation that the first child of a node may cost; 0 is exact."""
        return 0.0

    @property
    def budget(self) -> float | None:
        """What all tokens of an image may cost together, where it is bounded."""
        return None

    @property
    def lends(self) -> bool:
        """Whether neighbours can lend anything; k = 0, delta = 0 and lambda = 1 are all exact."""
        return self.k > 0 and self.delta + self.factor > 0

    @property
    def weighs(self) -> bool:
        """Whether a draft's own mass is changed anywhere."""
        return any(weight != 1 for weight in self.weights(2))

    @property
    def clusters(self) -> bool:
        """Whether a draft can stand for others of its cluster."""
        return min(self.limits) > 0

    @property
    def active(self) -> bool:
        """Whether it can change what is accepted."""
        return self.lends or self.weighs or self.clusters or self.tv > 0

    @property
    def needs_draws(self) -> bool:
        """Whether it holds the target's mass against what drafts were drawn with."""
        return self.clusters or self.tv > 0

    @property
    def metered(self) -> bool:
        """Whether its cost can be computed from the drafts that are tried."""
        return self.active and not (self.lends and self.residual == "official")

    def fitted(self, codes: int) -> Relaxation:
        """A published setting with no more neighbours than a codebook of so many codes has; others as they are."""
        if not self.published or self.k < codes:
            return self
        return replace(self, k=codes - 1, published=False)

    def __str__(self) -> str:
        """The form that `parse` reads: the name of a published setting, or the values that are not the usual ones."""
        for name, preset in PRESETS.items():
            if self == preset and (self.published or not self.k):
                return name
        usual, bound = USUAL[self.bound_name], self.bound_name
        values = {
            BOUNDS.get(f.name, f.name): getattr(self, f.name) for f in fields(self) if f.compare
        }
        marks = {bound: values.pop(bound)}
        for name, value in values.items():
            is_given = name == "k" and self.k and not self.published
            if is_given or value != getattr(usual, name):
                marks[name] = value
        return ":".join(f"{name}={text_of(value)}" for name, value in marks.items())

    def as_json(self) -> dict[str, Any]:
        """The form of PNG files and reports: one bound, whatever it means to the rule."""
        k, residual, bound, *more = (getattr(self, f.name) for f in fields(self) if f.compare)
        shared = {"rule": self.rule, "k": k, "bound": bound, "residual": residual}
        return shared | {"nu": 0.0, "mu": 0.0} | dict(zip(self.more, more, strict=True))


@dataclass(frozen=True)
class Multiplicative(Relaxation):
    """LANTERN++: a draft's nearest codes raise its mass to at most `lam` times its own."""

    rule, bound_name = "multiplicative", "lambda"
    lam: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.lam >= 1, "--relax-lambda", self.lam, "1 (exact) or more")

    @property
    def factor(self) -> float:
        return self.lam - 1


@dataclass(frozen=True)
class Additive(Relaxation):
    """LANTERN: a draft's nearest codes lend it at most `bound` of their mass."""

    rule, bound_name = "additive", "delta"
    bound: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.bound <= 1, "--relax-delta", self.bound, "0 (exact) to 1")

    @property
    def delta(self) -> float:
        return self.bound


@dataclass(frozen=True)
class Annealed(Relaxation):
    """Cool-SD: a draft's mass is multiplied by omega exp(-nu i - mu), i drafts below the root's children.

    No neighbour lends anything; a weight up to 1 is exact.
    """

    rule, bound_name = "annealed", "omega"
    more = ("nu", "mu")
    omega: float = 1.0
    nu: float = 0.0
    mu: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "0, as no neighbour lends mass to --relax-omega"
        require(self.k == 0, "--relax-k", self.k, why)
        allowed = "0 to 1000; a weight up to 1 is exact"
        require(0 <= self.omega <= 1000, "--relax-omega", self.omega, allowed)
        for name, value in {"--relax-nu": self.nu, "--relax-mu": self.mu}.items():
            require(-10 <= value <= 10, name, value, "-10 to 10")

    def weights(self, depth: int) -> list[float]:
        return [self.omega * math.exp(-self.nu * i - self.mu) for i in range(depth)]


@dataclass(frozen=True)
class Clustered(Relaxation):
    """GSD: a draft is tried as its whole cluster, the codes close to it in rank, in probability and in the codebook.

    No neighbour lends anything beside.

    Attributes:
        distance: squared, between the codes' vectors; that of a member is less.
        ranks: how many places up and down in the order of probability a member may be.
        gap: between the probabilities; that of a member is less.
    """

    rule, bound_name = "clusters", "distance"
    more = ("ranks", "gap")
    distance: float = 0.0
    ranks: int = 7
    gap: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "0, as no neighbour lends mass to --relax-distance"
        require(self.k == 0, "--relax-k", self.k, why)
        allowed = "0 (exact) or more"
        require(0 <= self.distance < math.inf, "--relax-distance", self.distance, allowed)
        require(0 <= self.ranks <= 1000, "--relax-ranks", self.ranks, "0 (exact) to 1000")
        require(0 <= self.gap <= 1, "--relax-gap", self.gap, "0 (exact) to 1")

    @property
    def limits(self) -> tuple[int, float, float]:
        return self.ranks, self.gap, self.distance


@dataclass(frozen=True)
class Blended(Relaxation):
    """A token follows h q + (1 - h) p, h being the largest that keeps it within a total variation `tv` of p.

    No neighbour lends anything. Only the first child of a node is relaxed.

    Attributes:
        tv: of a token.
        budget: of all tokens of an image together; None is no bound.
    """

    rule, bound_name = "tv", "tv"
    more = ("budget",)
    tv: float = 0.0
    budget: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.k == 0, "--relax-k", self.k, "0, as no neighbour lends mass to --relax-tv")
        require(0 <= self.tv <= 1, "--relax-tv", self.tv, "0 (exact) to 1")
        fits = self.budget is None or 0 <= self.budget < math.inf
        require(fits, "--relax-budget", self.budget, "0 (exact) or more")


# By their names; each takes k, residual and bound, and what it has more
RULES: dict[str, type[Any]] = {
    kind.rule: kind for kind in (Multiplicative, Additive, Annealed, Clustered, Blended)
}


def read_relaxation(values: Mapping[str, Any]) -> Relaxation:
    """What `as_json` wrote."""
    try:
        make = RULES[values["rule"]]
        fields = ("k", "residual", "bound", *make.more)
        result: Relaxation = make(*(values[name] for name in fields))
        return result
    except (KeyError, TypeError) as error:
        raise OptionError("unrecognised relaxation settings", str(error)) from error


EXACT = Multiplicative()
# What the papers and their reproductions report figures for; `--relax` takes the names.
PRESETS: dict[str, Relaxation] = {
    "delta-0.1": Additive(1000, bound=0.1, published=True),
    "delta-0.2": Additive(1000, bound=0.2, published=True),
    "delta-0.3": Additive(1000, bound=0.3, published=True),
    "delta-0.4": Additive(1000, bound=0.4, published=True),
    "lambda-5": Multiplicative(10, lam=5.0, published=True),
    "lambda-10": Multiplicative(5, lam=10.0, published=True),
    "lambda-20": Multiplicative(5, lam=20.0, published=True),
    "omega-2": Annealed(omega=2.0, nu=0.2, published=True),
    "gsd": Clustered(distance=0.5, published=True),
    "tv": Blended(tv=0.1, published=True),
}
# By the name of a bound: what else holds where the bound alone is given
USUAL: dict[str, Relaxation] = {
    "lambda": PRESETS["lambda-5"],
    "delta": PRESETS["delta-0.2"],
    "omega": Annealed(published=True),
    "distance": PRESETS["gsd"],
    "tv": PRESETS["tv"],
}
BOUNDS = {"lam": "lambda", "bound": "delta"}  # fields that are written otherwise


LENDERS = "number of nearest codes that count as a match (lantern: 1000, lantern++: 10)"
WEIGHTED = "annealed relaxation: weight OMEGA exp(-NU i - MU) for draft i after the first; lossless where at most 1"
DISTANCE = "gsd: largest squared codebook distance within a cluster (0.5)"
TV = "bound on the total variation distance to the target distribution, per token (tv: 0.1)"
BUDGET = "bound on the sum of --relax-tv over an image; lossless from there on (no bound)"
REST = "residual distribution after a rejection: sound, or official (as published) (sound)"


@dataclass(frozen=True)
class RelaxationOptions:
    """The loose options of a command; None where one was not given."""

    preset: str | None = option(None, ", ".join(PRESETS), name="--relax", metavar="PRESET")
    k: int | None = option(None, LENDERS, name="--relax-k")
    delta: float | None = option(
        None, "additive bound, 0 to 1 (lantern: 0.2)", name="--relax-delta"
    )
    lam: float | None = option(
        None, "multiplicative bound, 1 or more (lantern++: 5)", name="--relax-lambda"
    )
    omega: float | None = option(None, WEIGHTED, name="--relax-omega")
    nu: float | None = option(None, "see omega (0)", name="--relax-nu", metavar="NU")
    mu: float | None = option(None, "see omega (0)", name="--relax-mu", metavar="MU")
    distance: float | None = option(None, DISTANCE, name="--relax-distance", metavar="D")
    ranks: int | None = option(
        None,
        "gsd: largest difference in rank within a cluster (7)",
        name="--relax-ranks",
        metavar="N",
    )
    gap: float | None = option(
        None,
        "gsd: largest difference in probability within a cluster (0.15)",
        name="--relax-gap",
        metavar="P",
    )
    tv: float | None = option(None, TV, name="--relax-tv", metavar="T")
    budget: float | None = option(None, BUDGET, name="--relax-budget", metavar="B")
    residual: Residual | None = option(None, REST)

    def relaxation(self, default: Relaxation | None = None) -> Relaxation | None:
        """What they mean; what is not given is the preset's, or the default's.

        Returns None if nothing was given, which leaves it to the method.
        """
        self._check()
        if self == RelaxationOptions():
            return None
        base = PRESETS[self.preset] if self.preset else default or PRESETS["lambda-5"]
        bounds = {"lambda": ("lam", self.lam), "delta": ("bound", self.delta)}
        bounds |= {"omega": ("omega", self.omega), "distance": ("distance", self.distance)}
        bounds |= {"tv": ("tv", self.tv)}
        for name, (key, bound) in bounds.items():
            if bound is not None:
                base = replace(USUAL[name], **{key: bound})  # type: ignore[arg-type]
        names = ("k", "residual", "ranks", "gap", "nu", "mu", "budget")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(base, **given, published=self.k is None)

    def _check(self) -> None:
        rules = {"--relax-delta": self.delta, "--relax-lambda": self.lam}
        rules |= {"--relax-omega": self.omega, "--relax-distance": self.distance}
        rules |= {"--relax-tv": self.tv}
        given = [name for name, value in rules.items() if value is not None]
        if len(given) > 1:
            why = "they are different rules"
            raise OptionError(f"{given[0]} and {given[1]} exclude each other", why, "give one")
        if self.preset is not None and self.preset not in PRESETS:
            raise OptionError(f"unknown preset {self.preset!r}", hint=choices(PRESETS))
        if self.preset is not None and given:
            raise OptionError(f"--relax and {given[0]} exclude each other", "the preset is a rule")
        if self.omega is None and (self.nu is not None or self.mu is not None):
            raise OptionError("--relax-nu and --relax-mu belong to --relax-omega")
        clustered = self.distance is not None or self.preset == "gsd"
        if not clustered and (self.ranks is not None or self.gap is not None):
            what = "--relax-ranks and --relax-gap belong to --relax-distance"
            raise OptionError(what, hint="--relax gsd, for the published distance")
        if self.budget is not None and self.tv is None and self.preset != "tv":
            why = "of the other rules it is not known what a token costs before it is drawn"
            raise OptionError("--relax-budget belongs to --relax-tv", why, "--relax tv")
        if self.omega is not None:
            why = "none, as no neighbour lends mass to --relax-omega"
            require(self.k is None, "--relax-k", self.k, why)


VALUES = {"lambda": "lam"} | {
    f.name: f.name for f in fields(RelaxationOptions) if f.name not in ("lam", "preset")
}


def parse(text: str, default: Relaxation | None = None) -> Relaxation | None:
    """What is written: the name of a published setting, values between colons, or both.

    Args:
        default: what is not given, where no bound is. None if the text is empty, which leaves it to the method.
    """
    given: dict[str, Any] = {}
    for part in text.split(":") if text else ():
        name, equals, value = part.partition("=")
        if equals and name not in VALUES:
            raise OptionError(f"unknown value {name!r}", hint=choices(VALUES))
        key = VALUES[name] if equals else "preset"
        if key in given:
            raise OptionError(f"{name} is given twice" if equals else "two presets are given")
        given[key] = number_of(name, value) if equals else part
    return RelaxationOptions(**given).relaxation(default)


def number_of(name: str, text: str) -> Any:
    if name == "residual":
        return text
    try:
        return int(text) if name in ("k", "ranks") else float(text)
    except ValueError as error:
        raise OptionError(f"{name} is {text!r}", "a number was expected") from error


def text_of(value: float | str) -> str:
    """`5.0` as `5`; all digits of any other number."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
