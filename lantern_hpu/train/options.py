"""How a drafter is trained. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lantern_hpu.errors import OptionError, require


@dataclass(frozen=True)
class TrainOptions:
    """Of a training run; all but `steps` and `lr` must stay the same when it is resumed."""

    steps: int = 2000
    batch: int = 4  # images a step and process
    unroll: int = 3  # passes
    lr: float = 1e-3
    measure_every: int = 250
    measured: int = 8  # held-out images
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "unroll", "measure_every", "measured"):
            require(getattr(self, name) >= 1, option(name), getattr(self, name), "1 or more")
        require(0 < self.lr <= 1, "--lr", self.lr, "above 0, up to 1")

    def rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to 2 %."""
        warm = min(1.0, (step + 1) / max(1, min(50, self.steps // 10)))
        return self.lr * warm * (0.51 + 0.49 * math.cos(math.pi * min(1.0, step / self.steps)))

    def check_resumed(self, earlier: dict[str, Any]) -> None:
        """Raise an OptionError that names an option which must not change."""
        for name, value in asdict(self).items():
            if name not in ("steps", "lr") and earlier[name] != value:
                why, hint = (
                    f"the run was begun with {earlier[name]}",
                    f"{option(name)} {earlier[name]}",
                )
                raise OptionError(f"{option(name)} is {value}", why, hint)


def option(name: str) -> str:
    return "--" + name.replace("_", "-")
