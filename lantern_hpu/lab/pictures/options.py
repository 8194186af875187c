"""What `lantern_hpu.commands.fidelity` and `lantern_hpu.lab.pictures` measure, and how much of it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lantern_hpu.errors import OptionError, choices, require
from lantern_hpu.methods.methods import METHODS, choose_method
from lantern_hpu.methods.relaxation import PRESETS, Relaxation, RelaxationOptions

# What may be given after a method, and the field of RelaxationOptions that it is
VALUES = {"lambda": "lam", "preset": "preset"} | {
    n: n for n in "k delta omega nu mu distance ranks gap".split()
}


def number(text: str, name: str, value: str) -> Any:
    """A value as RelaxationOptions takes it.

    Raises:
        OptionError: it is no number.
    """
    if name == "preset":
        return value
    try:
        return int(value) if name in ("k", "ranks") else float(value)
    except ValueError as error:
        raise OptionError(f"{name} is {value!r} in {text!r}", "a number was expected") from error


@dataclass(frozen=True)
class Setting:
    """A method with a setting of its relaxation.

    Attributes:
        name: as it was asked for: `eagle`, `lantern:delta-0.2`, or `lantern++:lambda=2:k=20`.
        own_k: whether its number of neighbours was asked for.
    """

    name: str
    method: str
    relaxation: Relaxation
    own_k: bool = False

    @classmethod
    def parse(cls, text: str) -> Setting:
        """A method; after colons the name of a preset, or values of the relaxation.

        Raises:
            OptionError: unknown method, preset or value, one out of range, or a relaxation of an exact method.
        """
        method, *parts = text.split(":")
        if method not in METHODS:
            raise OptionError(f"unknown method {method!r}", hint=choices(METHODS))
        values: dict[str, str] = {}
        for part in parts:
            name, equals, value = part.partition("=")
            if equals and name not in VALUES:
                raise OptionError(f"unknown value {name!r} in {text!r}", hint=choices(VALUES))
            if not equals and name not in PRESETS:
                raise OptionError(f"unknown preset {name!r}", hint=choices(PRESETS))
            values |= {name: value} if equals else {"preset": name}
        given = RelaxationOptions(**{VALUES[n]: number(text, n, v) for n, v in values.items()})
        relaxation = given.relaxation(METHODS[method].relaxation)
        return cls(text, method, choose_method(method, None, relaxation)[1], "k" in values)


@dataclass(frozen=True)
class FidelityOptions:
    """How much is measured.

    Attributes:
        images: places, one an image. draws: of a static tree's refused drafts at each place.
        timed: images drawn for tokens a step and time.
    """

    images: int = 64
    draws: int = 64
    timed: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("images", "draws", "timed"):
            require(getattr(self, name) >= 1, f"--{name}", getattr(self, name), "1 or more")


@dataclass(frozen=True)
class EvaluateOptions:
    """What `lantern_hpu.lab.pictures` draws and how it scores, whatever the protocol.

    Attributes:
        rounds: of the bootstrap.
        places: where the distribution of the next token is compared; 0 leaves it out.
        floor: draw `ar` with a second set of seeds.
        tree: comma-separated, each for the methods that can draft it; None for each method's own.
    """

    rounds: int = 200
    places: int = 0
    seed: int = 0
    batch_size: int = 8
    floor: bool = True
    tree: str | None = None

    def __post_init__(self) -> None:
        check_least(self, {"rounds": 2, "places": 0, "batch_size": 1, "seed": 0})


@dataclass(frozen=True)
class PaintedOptions:
    """Pictures of the embedded model's protocol; a Frechet distance of 64 features needs more than 64.

    Attributes:
        images: captions that are drawn once each. panels: captions that are drawn several times each.
        fresh: of the generator, with which drawn pictures are compared.
    """

    images: int = 400
    panels: int = 25
    fresh: int = 4000

    def __post_init__(self) -> None:
        check_least(self, {"images": 65, "panels": 2, "fresh": 65})


def check_least(options: object, least: dict[str, int]) -> None:
    """
    Raises:
        OptionError: a field is below its least value.
    """
    for name, lowest in least.items():
        value = getattr(options, name)
        require(value >= lowest, f"--{name.replace('_', '-')}", value, f"{lowest} or more")
