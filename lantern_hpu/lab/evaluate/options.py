"""What `lantern-hpu fidelity` and `lantern-hpu evaluate` measure, and how much of it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lantern_hpu.errors import check_ranges, option
from lantern_hpu.methods.request import MAX_IMAGES


@dataclass(frozen=True)
class FidelityOptions:
    """How much is measured."""

    images: int = option(64, "places that are measured, one an image", low=1, high=MAX_IMAGES)
    draws: int = option(256, "draws of a static tree's refused drafts at each place", low=1)
    timed: int = option(8, "images drawn for tokens a step and time", low=1, high=MAX_IMAGES)
    seed: int = option(0, "of the first image")

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class EvaluateOptions:
    """What is drawn and how it is scored, whatever the protocol.

    Attributes:
        floor: draw `ar` with a second set of seeds.
    """

    tree: str | None = option(
        None, "comma-separated, each for the methods that draft such a tree (each method's default)"
    )
    seed: int = option(0, "of the first picture", low=0)
    batch_size: int = option(8, "images decoded together", low=1)
    rounds: int = option(200, "of the bootstrap", low=2)
    places: int = option(
        0,
        "places where the distribution of the next token is measured, as by `fidelity`",
        low=0,
        marks={0: "none"},
    )
    floor: bool = True

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class PaintedOptions:
    """Pictures of the embedded model's protocol; a Frechet distance of 64 features needs more than 64."""

    images: int = option(400, "captions that are drawn once each", low=65, high=MAX_IMAGES)
    panels: int = option(25, "captions that are drawn four times each", low=2, high=MAX_IMAGES)
    fresh: int = option(
        4000, "fresh pictures of the generator, to compare with", low=65, high=MAX_IMAGES
    )

    def __post_init__(self) -> None:
        check_ranges(self)
