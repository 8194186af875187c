"""CUDA graphs: the whole function is recorded once, and each call is one launch.

A capture records without executing, so the first call captures and then replays; kernels that are chosen on first use
are chosen in a run before the capture, after which the state is put back; see `State.restorable`.
"""

from __future__ import annotations

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
        self.pool = backend.graph_pool
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
        graph = torch.cuda.CUDAGraph()
        try:
            self.run_aside()
            for name, tensor in changed.items():
                tensor.copy_(before[name])
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self.pool):
                self.output = self.function(self.state)
        except torch.cuda.OutOfMemoryError:
            raise  # the backend says what to do
        except RuntimeError as error:
            why = str(error).strip().splitlines()[0]
            raise CaptureError(f"{type(self.function).__name__} cannot be captured", why) from error
        self.graph = graph
        self.stats.captures += 1
        self.stats.capture_seconds += time.perf_counter() - began

    def close(self) -> None:
        self.graph = None

    def run_aside(self) -> None:
        """One run on another stream, as captures need; a wait for the device in it is an error."""
        aside, main = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(main)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(aside):
                self.function(self.state)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        main.wait_stream(aside)
