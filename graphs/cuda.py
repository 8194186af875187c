"""CUDA graphs: the whole function is recorded once, and each call is one launch.

A capture records without executing, so the first call captures and then replays; kernels that are chosen on first use
are chosen in a run before the capture, after which the state is put back; see `State.restorable`.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

from lantern_hpu.backends.base import Backend
from lantern_hpu.backends.cuda.backend import CUDABackend
from lantern_hpu.errors import CaptureError
from lantern_hpu.graphs.base import Function, Runner, State


class CUDAGraphRunner(Runner):
    """Records the function into a `torch.cuda.CUDAGraph`."""

    mode = "cuda_graph"
    output: Tensor

    def __init__(self, function: Function, state: State, backend: Backend) -> None:
        super().__init__(function, state, backend)
        assert isinstance(backend, CUDABackend)
        self.device = backend
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> Tensor:
        if self.graph is None:
            self.capture()
        assert self.graph is not None
        self.graph.replay()
        self.stats.replays += 1
        return self.output

    def capture(self) -> None:
        """Run once on the side, put the state back, record."""
        began = time.perf_counter()
        changed = self.state.restorable()
        before = {name: tensor.clone() for name, tensor in changed.items()}
        graph, main = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        pool, stream = self.device.graph_pool(), self.device.capture_stream
        handled = sys.exc_info()[1]
        try:
            self.run_aside()
            for name, tensor in changed.items():
                tensor.copy_(before[name])
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self.output = self.function(self.state)
        except RuntimeError as error:
            # The end of a capture that was invalidated raises too, before it leaves the stream
            torch.cuda.set_stream(main)
            cause = first_of(error, handled)
            if isinstance(cause, torch.cuda.OutOfMemoryError) or not isinstance(cause, Exception):
                raise cause from None  # the backend says what to do
            why = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
            raise CaptureError(f"{type(self.function).__name__} cannot be captured", why) from cause
        self.graph = graph
        self.device.recordings.add(self)
        self.stats.captures += 1
        self.stats.capture_seconds += time.perf_counter() - began

    def close(self) -> None:
        graph, self.graph = self.graph, None
        if graph is not None:
            self.device.retire(self, graph)

    def run_aside(self) -> None:
        """One run on the stream of captures, which need one; a wait for the device in it is an error.

        Workspaces of libraries are allocated here, so that none of them is in the graphs' pool.
        """
        aside, main = self.device.capture_stream, torch.cuda.current_stream()
        aside.wait_stream(main)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(aside):
                self.function(self.state)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        main.wait_stream(aside)


def first_of(error: BaseException, handled: BaseException | None) -> BaseException:
    """What went wrong first: an error that is raised while another is handled hides it.

    What was being handled before is none of it.
    """
    while (earlier := error.__cause__ or error.__context__) not in (None, handled):
        assert earlier is not None
        error = earlier
    return error
