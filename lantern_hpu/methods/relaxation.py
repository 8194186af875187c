"""How far acceptance may depart from the lossless rule: one class a rule, and the published settings. Needs no torch.

Written as values between colons, `lambda=2:k=30`, or the name of a published setting, `delta-0.1`, which values may
follow. The algorithm is `decode/rules.py`; what each rule bounds and what it does not: docs/methods.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

from lantern_hpu.errors import OptionError, choices
from lantern_hpu.fields import MOST, is_number

Residual = Literal["sound", "official"]
Verify = Literal["auto", "block", "token"]
LOSSLESS = "lossless"  # in files and reports, of the usual rule where it relaxes nothing
MOST_EXPONENT = 80.0  # of a weight: 1000 e^80 is a float32, and accepts any draft


def value(default: Any, low: float, high: float, allowed: str, key: str = "") -> Any:
    """A field that is written `key=value`, or by its own name, and held to a range; None is always allowed."""
    return field(default=default, metadata={"range": (low, high, allowed), "key": key})


refused = partial(OptionError, field="method")


@dataclass(frozen=True)
class Relaxation:
    """What acceptance needs of a rule; these values are lossless.

    Attributes:
        rule: its name in PNG files and reports.
        k: neighbours that may lend their mass; 0 is lossless.
        residual: what is left after a refusal; "official" reproduces the published code.
        verify: drafts together ("block"), or each by itself; "auto", which only a setting that is to be resolved has,
            takes the former where it can.
        published: whether `k` is a published number, which a small codebook may lower, and not the user's.
    """

    rule: ClassVar[str]
    has_neighbours: ClassVar[bool] = False
    k: int = value(0, 0, MOST, f"0 (exact) to {MOST:g}")
    residual: Residual = "sound"
    verify: Verify = field(default="auto", kw_only=True)
    published: bool = field(default=False, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        for key, allowed in (("residual", get_args(Residual)), ("verify", get_args(Verify))):
            if getattr(self, key) not in allowed:
                raise refused(f"unknown {key} {getattr(self, key)!r}", hint=choices(allowed))
        for key, part in self.by_key().items():
            number = getattr(self, part.name)
            if "range" in part.metadata and (number is not None or part.default is not None):
                low, high, allowed = part.metadata["range"]
                fits = is_number(number, type(part.default)) and low <= number <= high
                if not fits:
                    raise refused(f"{key} is {number}", f"allowed: {allowed}")
        if self.k and not self.has_neighbours:
            why = f"allowed: 0, as no neighbour lends mass to {self.bound_key()}"
            raise refused(f"k is {self.k}", why)

    @classmethod
    def by_key(cls) -> dict[str, Field[Any]]:
        """Its fields by the keys that they are written with: k, residual, verify, the bound, and what else it has."""
        return {part.metadata.get("key") or part.name: part for part in fields(cls) if part.compare}

    @classmethod
    def bound_key(cls) -> str:
        return list(cls.by_key())[3]

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
        """Ranks, probability and squared distance within which codes are of one cluster; a 0 is lossless."""
        return 0, 0.0, 0.0

    @property
    def tv(self) -> float:
        """Total variation that the first child of a node may cost; 0 is lossless."""
        return 0.0

    @property
    def budget(self) -> float | None:
        """What all tokens of an image may cost together, where it is bounded."""
        return None

    @property
    def lends(self) -> bool:
        """Whether neighbours can lend anything; k = 0, delta = 0 and lambda = 1 are all lossless."""
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
    def needs_draws(self) -> bool:
        """Whether it compares the target's mass with the distribution that drafts were drawn from."""
        return self.clusters or self.tv > 0

    @property
    def active(self) -> bool:
        """Whether it can change what is accepted."""
        return self.lends or self.weighs or self.needs_draws

    @property
    def metered(self) -> bool:
        """Whether its cost can be computed from the drafts that are tried."""
        return self.active and not (self.lends and self.residual == "official")

    @property
    def neutral(self) -> bool:
        """Whether it says no more than how drafts are verified."""
        return replace(self, verify="auto") == EXACT

    @property
    def keeps_distributions(self) -> bool:
        """Whether each token follows a distribution that its drafts do not change: drafts may be verified together."""
        return not (self.lends or self.weighs or self.clusters)

    def fit(self, codes: int) -> Relaxation:
        """A published setting with no more neighbours than a codebook of that many codes has; others as they are."""
        if not self.published or self.k < codes:
            return self
        return replace(self, k=codes - 1, published=False)

    def __str__(self) -> str:
        """What `parse` reads: the name of a published setting, or the bound and the values that are not the usual."""
        for name, preset in PRESETS.items():  # `tv` is a key too, and does not say its bound
            if self == preset and name not in USUAL and (self.published or not self.k):
                return name
        if self.neutral and self.verify != "auto":
            return f"verify={self.verify}"
        bound, usual = self.bound_key(), USUAL[self.bound_key()]
        values = {key: getattr(self, part.name) for key, part in self.by_key().items()}
        written = {bound: values.pop(bound)}
        for key, number in values.items():
            is_given = key == "k" and self.k and not self.published
            if is_given or number != getattr(usual, self.by_key()[key].name):
                written[key] = number
        return ":".join(f"{key}={value_text(number)}" for key, number in written.items())

    def as_json(self) -> dict[str, Any]:
        """The form of PNG files and reports: the bound is called so with every rule; `verify` if there is a choice."""
        values = {key: getattr(self, part.name) for key, part in self.by_key().items()}
        k, residual, bound = (values.pop(key) for key in ("k", "residual", self.bound_key()))
        if self.verify == "auto":
            values.pop("verify")
        lossless = self.rule == Multiplicative.rule and not self.active
        rule = LOSSLESS if lossless else self.rule
        shared = {"rule": rule, "k": k, "bound": bound, "residual": residual}
        return shared | {"nu": 0.0, "mu": 0.0} | values


@dataclass(frozen=True)
class Multiplicative(Relaxation):
    """LANTERN++: a draft's nearest codes raise its mass to at most `lam` times its own."""

    rule, has_neighbours = "multiplicative", True
    lam: float = value(1.0, 1, MOST, f"1 (exact) to {MOST:g}", "lambda")

    @property
    def factor(self) -> float:
        return self.lam - 1


@dataclass(frozen=True)
class Additive(Relaxation):
    """LANTERN: a draft's nearest codes lend it at most `bound` of their mass."""

    rule, has_neighbours = "additive", True
    bound: float = value(0.0, 0, 1, "0 (exact) to 1", "delta")

    @property
    def delta(self) -> float:
        return self.bound


@dataclass(frozen=True)
class Annealed(Relaxation):
    """Cool-SD: a draft's mass is multiplied by omega exp(-nu i - mu), i drafts below the root's children."""

    rule = "annealed"
    omega: float = value(1.0, 0, 1000, "0 to 1000; a weight up to 1 is exact")
    nu: float = value(0.0, -10, 10, "-10 to 10")
    mu: float = value(0.0, -10, 10, "-10 to 10")

    def weights(self, depth: int) -> list[float]:
        exponents = [min(-self.nu * i - self.mu, MOST_EXPONENT) for i in range(depth)]
        return [self.omega * math.exp(exponent) for exponent in exponents]


@dataclass(frozen=True)
class Clustered(Relaxation):
    """GSD: a draft is tried as its cluster, the codes close to it in rank, in probability and in embedding.

    Attributes:
        distance: squared, between rows of the target's embedding; that of a member is less.
        ranks: how many places down in the order of probability a member may be, and one less up.
        gap: between the probabilities; that of a member is less.
    """

    rule = "clusters"
    distance: float = value(0.0, 0, MOST, f"0 (exact) to {MOST:g}")
    ranks: int = value(7, 0, 1000, "0 (exact) to 1000")
    gap: float = value(0.15, 0, 1, "0 (exact) to 1")

    @property
    def limits(self) -> tuple[int, float, float]:
        return self.ranks, self.gap, self.distance


@dataclass(frozen=True)
class Blended(Relaxation):
    """A token follows h q + (1 - h) p, h being the largest that keeps it within a total variation `tv` of p.

    Only the first child of a node is relaxed. A budget is of all tokens of an image together; None is no bound.
    """

    rule = "tv"
    tv: float = value(0.0, 0, 1, "0 (exact) to 1")
    budget: float | None = value(None, 0, MOST, f"0 (exact) to {MOST:g}")


EXACT = Multiplicative()
RULES: dict[str, type[Relaxation]] = {
    kind.rule: kind for kind in (Multiplicative, Additive, Annealed, Clustered, Blended)
}
# What the papers and their reproductions report figures for
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
# By the key of a bound: what else holds where the bound alone is given
USUAL: dict[str, Relaxation] = {
    "lambda": PRESETS["lambda-5"],
    "delta": PRESETS["delta-0.2"],
    "omega": Annealed(published=True),
    "distance": PRESETS["gsd"],
    "tv": PRESETS["tv"],
}
OWNERS = {key: rule for rule in USUAL.values() for key in rule.by_key()}  # a rule that has it


def parse(text: str, default: Relaxation | None = None) -> Relaxation:
    """What is written: the name of a published setting, values between colons, or both.

    Values without a bound or such a name change `default`.
    """
    given: dict[str, Any] = {}
    names = []
    for part in text.split(":"):
        key, equals, number = part.partition("=")
        if key in given:
            raise refused(f"{key} is given twice")
        if equals:
            given[key] = read_value(key, number)
        else:
            names.append(part)
    rules = [*names, *(key for key in given if key in USUAL)]
    if len(rules) > 1:
        why = "each is a rule of its own"
        raise refused(f"{rules[0]} and {rules[1]} exclude each other", why, "one of them")
    if names and names[0] not in PRESETS:
        raise refused(f"unknown relaxation {names[0]!r}", hint=choices(PRESETS, names[0]))
    named = (PRESETS if names else USUAL)[rules[0]] if rules else None
    base = named or default or (EXACT if set(given) == {"verify"} else PRESETS["lambda-5"])
    keys = base.by_key()
    for key in given:
        if key not in keys:
            owner = OWNERS[key].bound_key()
            raise refused(f"{key} belongs to {owner}", hint=f"{owner}=...:{text}")
    return replace(
        base, **{keys[key].name: given[key] for key in given}, published="k" not in given
    )


def read_value(key: str, text: str) -> Any:
    if key not in OWNERS:
        raise refused(f"unknown value {key!r}", hint=choices(OWNERS, key))
    default: Any = OWNERS[key].by_key()[key].default
    try:
        return float(text) if default is None else type(default)(text)
    except ValueError as error:
        raise refused(f"{key} is {text!r}", "a number was expected") from error


def value_text(value: float | str) -> str:
    """`5.0` as `5`; all digits of any other number."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def read_relaxation(values: Mapping[str, Any]) -> Relaxation:
    """What `as_json` wrote."""
    try:
        kind = Multiplicative if values["rule"] == LOSSLESS else RULES[values["rule"]]
        bound = kind.bound_key()
        stored = {
            part.name: "bound" if key == bound else key for key, part in kind.by_key().items()
        }
        known = {"verify": "auto"} | dict(values)  # there, where there was a choice
        return kind(**{name: known[key] for name, key in stored.items()})
    except (KeyError, TypeError) as error:
        raise refused("unrecognised relaxation settings", str(error)) from error
