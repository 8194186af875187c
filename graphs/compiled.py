"""`torch.compile` with static shapes, and a count of what it compiled."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lantern_hpu.backends.base import Backend
from lantern_hpu.errors import Arg, CaptureError
from lantern_hpu.graphs.base import Function, Runner, State

ENGINES = 64  # that may be compiled in one process
SHOWN = 4  # lines of a compiler's error


class CompiledRunner(Runner):
    """The device's compiler over the whole function in one graph; a part it cannot compile is an error."""

    mode = "compile"

    def __init__(self, function: Function, state: State, backend: Backend) -> None:
        super().__init__(function, state, backend)
        self.compiled = backend.compile(function)

    def __call__(self) -> Tensor:
        before, began = counters["stats"]["unique_graphs"], time.perf_counter()
        try:
            # Each engine compiles its own step; the default limit of 8 is one for all of them together.
            with torch._dynamo.config.patch(cache_size_limit=ENGINES):
                result: Tensor = self.compiled(self.state)
        except torch._dynamo.exc.TorchDynamoException as error:
            what = f"{type(self.function).__name__} cannot be compiled"
            raise CaptureError(what, reason(error), Arg("graphs", "eager")) from error
        if made := counters["stats"]["unique_graphs"] - before:
            self.stats.captures += made
            self.stats.capture_seconds += time.perf_counter() - began
        self.stats.replays += 1
        return result


def reason(error: Exception) -> str:
    """A compiler's own words, shortened: the first line names the stage, the last ones the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    advice = next((i for i, line in enumerate(lines) if line.startswith("Set TORCH")), len(lines))
    lines = lines[:advice] or [type(error).__name__]
    return " ... ".join(lines if len(lines) <= SHOWN else [lines[0], *lines[1 - SHOWN :]])
