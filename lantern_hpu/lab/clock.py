"""One clock for everything that is timed: steps of a run, calls on a device, images from prompt to pixels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lantern_hpu.backends.base import Backend
from lantern_hpu.results.images import RunStats
from lantern_hpu.results.progress import Event


def device_time(backend: Backend) -> float:
    """The time in seconds when everything asked for so far is done."""
    backend.queue.flush()  # a lazy device would drop or postpone it
    backend.synchronize()
    return time.perf_counter()


def seconds_of(backend: Backend, function: Callable[[], object], calls: int = 1) -> float:
    """Mean seconds of a call, of several in a row: waiting for the device then hardly counts."""
    began = device_time(backend)
    for _ in range(calls):
        function()
        backend.queue.flush()
    return (device_time(backend) - began) / calls


def image_seconds(timing: RunStats, images: int) -> float:
    """Prompt to pixels, without loading and warm-up."""
    return (timing.text_s + timing.generate_s + timing.decode_s) / images


def quantile(values: Sequence[float], share: float) -> float:
    """What this share of the values does not exceed, between neighbours in proportion."""
    return float(np.quantile(values, share))


@dataclass
class StepClock:
    """Times the steps of runs through `LanternPipeline.stream`, which takes `timing` and `read`.

    Attributes:
        blocks: seconds and steps between two host reads.
        show: is called with the progress.
    """

    show: Callable[[str], object] = str
    timing: RunStats = field(default_factory=RunStats)
    blocks: list[tuple[float, int]] = field(default_factory=list)
    _seen: tuple[float, int] = (0.0, 0)

    def read(self, event: Event) -> None:
        """Callback of the run: a host read is done."""
        seconds, steps = self._seen
        if (
            self.timing.steps > steps
        ):  # what is on its way belongs to the block that is read with it
            self.blocks.append((self.timing.steps_s - seconds, self.timing.steps - steps))
            self._seen = self.timing.steps_s, self.timing.steps
        self.show(f"{self.timing.steps} steps")

    @property
    def step_ms(self) -> list[float]:
        """Milliseconds of each step, all of a block alike."""
        return [1000 * seconds / steps for seconds, steps in self.blocks for _ in range(steps)]
