"""What `lantern_hpu.commands.fidelity` and `lantern_hpu.lab.pictures` measure, and how much of it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lantern_hpu.errors import require


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
