"""HPU graphs: record a function once, replay it with one launch. For Gaudi in lazy mode.

Our own use of `HPUGraph`, not `wrap_in_hpu_graph`: the state's tensors are the static buffers, there is one
graph and no key, and a capture that fails is closed. A capture executes what it records, so it counts as
the first call.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from lantern_hpu.backends.base import Backend
from lantern_hpu.backends.hpu import errors as hpu_errors
from lantern_hpu.errors import CaptureError
from lantern_hpu.graphs.base import Function, Runner, State

if TYPE_CHECKING:
    from lantern_hpu.backends.hpu.backend import HPUBackend


class HPUGraphRunner(Runner):
    """One graph for the whole function."""

    mode = "hpu_graph"
    split = False

    def __init__(self, function: Function, state: State, backend: Backend) -> None:
        super().__init__(function, state, backend)
        self.device = cast("HPUBackend", backend)
        self.graph = self.device.hpu.HPUGraph()
        self.stream = self.device.hpu.Stream()
        self.output: Tensor | None = None

    def __call__(self) -> Tensor:
        if self.output is None:
            self.output = self.capture()
        else:
            self.graph.replay()
        self.stats.replays += 1
        return self.output

    def capture(self) -> Tensor:
        """Record and, with it, run the function."""
        began = time.perf_counter()
        hpu = self.device.hpu
        hpu.synchronize()
        try:
            # A capture must always end on the stream it began on: the next one would be fatal.
            with hpu.stream(self.stream):
                self.graph.capture_begin()
                try:
                    output = self.run()
                finally:
                    self.graph.capture_end()
        except RuntimeError as error:
            self.graph.reset()
            known, name = hpu_errors.explain_gaudi(error), type(self.function).__name__
            why, hint = (
                (str(error), "") if known is None else (f"{known.what} ({known.why})", known.hint)
            )
            raise CaptureError(f"{name} cannot be captured", why, hint) from error
        hpu.synchronize()
        self.stats.captures += 1
        self.stats.capture_seconds += time.perf_counter() - began
        return output

    def close(self) -> None:
        self.graph.reset()
        self.output = None

    def run(self) -> Tensor:
        """The function, in one piece or with a cut after its first stage."""
        begin: Any = getattr(self.function, "stages", None)
        if not self.split or begin is None:
            return self.function(self.state)
        stages = begin(self.state)
        next(stages)
        self.device.transfers.flush()
        *_, (_, known) = stages
        return cast(Tensor, known)


class SplitHPUGraphRunner(HPUGraphRunner):
    """A graph for each half of the function, replayed in a row: for steps too large for one recipe."""

    mode = "hpu_graph_split"
    split = True
