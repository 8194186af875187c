"""What `lantern_hpu.fidelity` measures, and how much of it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lantern_hpu.config import METHODS, choose_method
from lantern_hpu.errors import OptionError, choices, require
from lantern_hpu.relaxation import PRESETS, Relaxation


@dataclass(frozen=True)
class Setting:
    """A method with a setting of its relaxation.

    Attributes:
        name: as it was asked for: `eagle`, or `lantern:delta-0.2`.
    """

    name: str
    method: str
    relaxation: Relaxation

    @classmethod
    def parse(cls, text: str) -> Setting:
        """A method, or a method and the name of a preset after a colon.

        Raises:
            OptionError: unknown method or preset, or a preset for an exact method.
        """
        method, _, preset = text.partition(":")
        if method not in METHODS:
            raise OptionError(f"unknown method {method!r}", hint=choices(METHODS))
        if preset and preset not in PRESETS:
            raise OptionError(f"unknown preset {preset!r}", hint=choices(PRESETS))
        relaxation = PRESETS[preset] if preset else None
        return cls(text, method, choose_method(method, None, relaxation)[1])


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
