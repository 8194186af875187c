"""No recording: call the function. Every device can do this."""

from __future__ import annotations

from torch import Tensor

from lantern_hpu.graphs.base import Runner


class EagerRunner(Runner):
    """Runs the function as it stands."""

    mode = "eager"

    def __call__(self) -> Tensor:
        self.stats.replays += 1
        result: Tensor = self.function(self.state)
        return result
