"""Ways of recording a function and replaying it: one file a way. Importing this loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if __name__ == "graphs":
    raise ImportError("import lantern_hpu.graphs, not graphs: the same module would load twice")

if TYPE_CHECKING:
    from lantern_hpu.backends.base import Backend
    from lantern_hpu.graphs.base import Function, Runner, State

RUNNERS = {
    "hpu_graph": "lantern_hpu.graphs.hpu:HPUGraphRunner",
    "hpu_graph_split": "lantern_hpu.graphs.hpu:SplitHPUGraphRunner",
    "cuda_graph": "lantern_hpu.graphs.cuda:CUDAGraphRunner",
    "eager": "lantern_hpu.graphs.base:EagerRunner",
    "strict": "lantern_hpu.graphs.strict:StrictRunner",
    "compile": "lantern_hpu.graphs.compiled:CompiledRunner",
    "compile_layers": "lantern_hpu.graphs.compiled:CompiledLayersRunner",
}


def make_runner(function: Function, state: State, backend: Backend, mode: str) -> Runner:
    """A runner of one of the backend's graph modes for a function of a state."""
    module, _, cls = RUNNERS[mode].partition(":")
    runner: Runner = getattr(import_module(module), cls)(function, state, backend)
    return runner
