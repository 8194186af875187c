"""What `lantern-hpu fidelity` and `lantern-hpu evaluate` measure, and how much of it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lantern_hpu.errors import check_ranges, option
from lantern_hpu.methods.request import MAX_IMAGES


@dataclass(frozen=True)
class FidelityOptions:
    """How much is measured."""

    images: int = option(64, "positions to measure, one per image", low=1, high=MAX_IMAGES)
    draws: int = option(
        256, "samples per position to estimate rejected drafts of a static tree", low=1
    )
    timed: int = option(8, "images to time", low=1, high=MAX_IMAGES)
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
        None,
        "comma-separated draft trees; each applies to the methods that use its kind (method default)",
    )
    seed: int = option(0, "seed of the first image", low=0)
    batch_size: int = option(8, "images per batch", low=1)
    rounds: int = option(200, "bootstrap samples", low=2)
    places: int = option(
        0,
        "positions at which to measure the next-token distribution, as `fidelity` does",
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
    panels: int = option(
        25, "captions with four images each, to compare by eye", low=2, high=MAX_IMAGES
    )
    fresh: int = option(4000, "reference images from the scene generator", low=65, high=MAX_IMAGES)

    def __post_init__(self) -> None:
        check_ranges(self)
