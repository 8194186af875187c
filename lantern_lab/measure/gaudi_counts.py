"""What a decode step is on Gaudi in each graph mode, counted on the emulated card: launches, graphs and guards.

    python -m lantern_lab.measure.gaudi_counts --methods ar,scd --graphs hpu_graph,compile

Counts, not times: a card launches whole graphs faster than single operators, and how much faster is not known here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from gaudi_emulator import emulate
from gaudi_emulator.device import Device
from gaudi_emulator.lint import lint_counts
from gaudi_emulator.torch_calls import wrapped
from lantern_hpu.backends.hpu.backend import HPUBackend
from lantern_hpu.core import Request, RunStats
from lantern_hpu.decode.engine import Engine
from lantern_hpu.graphs.compiled import CompiledRunner
from lantern_hpu.pipeline import LanternPipeline

GRAPHS = ("hpu_graph", "hpu_graph_split", "compile", "compile_layers")
METHODS = ("ar", "scd", "lantern++")
STEPS = 2  # counted, after the warm-up
HEAD = ("method", "graphs", "graph launches", "single operators", "graphs", "guards", "left out")


@dataclass(frozen=True)
class StepCounts:
    """Of one step: launches of graphs, of operators alone; graphs that it is made of, with their guards."""

    graph_launches: float
    operators: float
    graphs: int
    guards: int
    skipped: bool  # whether the guards are left out once it is warm

    def row(self) -> list[str]:
        numbers = [self.graph_launches, self.operators, self.graphs, self.guards]
        return [f"{number:g}" for number in numbers] + ["yes" if self.skipped else "no"]


def count_step(model: str, method: str, graphs: str) -> StepCounts:
    """Draw the beginning of an image with a model on the emulated card, and count its steps."""
    compiled: list[Any] = []  # code objects of the last runner, which is the step's

    def begin(real: Callable[..., Any], *given: Any) -> None:
        compiled.clear()
        real(*given)

    def note(real: Callable[..., Any], backend: HPUBackend, function: Any) -> Any:
        compiled.append(function.__code__)
        return real(backend, function)

    with ExitStack() as stack:
        card = stack.enter_context(emulate())
        stack.enter_context(wrapped(CompiledRunner, "__init__", begin))
        stack.enter_context(wrapped(HPUBackend, "compile", note))
        stack.enter_context(torch.no_grad())
        made = LanternPipeline.from_pretrained(model, device="hpu", dtype="float32", graphs=graphs)
        with closing(made) as pipeline:
            chosen = pipeline.resolve(method)
            request = Request("a red apple", 0, pipeline.model.sampling, chosen.relaxation)
            engine = pipeline.engines.get(pipeline.spec([request], chosen.tree, 1))
            pipeline.prepare(engine, [request], RunStats())
            before = launched(card, engine)
            engine.replay_steps(STEPS)
            after = launched(card, engine)
            runner, guards = engine.step, sum(map(guards_of, compiled))
            skipped = isinstance(runner, CompiledRunner) and runner.unguarded
            graph, alone = ((b - a) / STEPS for a, b in zip(before, after, strict=True))
            made_of = runner.stats.captures if compiled else int(graph)
            return StepCounts(graph, alone, made_of, guards, skipped)


def launched(card: Device, engine: Engine) -> tuple[int, int]:
    """(launches of graphs, of operators alone) so far."""
    engine.backend.synchronize()
    counts = lint_counts([card])
    return counts["graph_launches"], counts["launches"] - counts["graph_launches"]


def guards_of(code: Any) -> int:
    """The guards that select the graphs of a code object."""
    return sum(leaves(entry.guard_manager.root) for entry in _debug_get_cache_entry_list(code))


def leaves(manager: Any) -> int:
    return len(manager.get_leaf_guards()) + sum(map(leaves, manager.get_child_managers()))


def table(model: str, methods: Sequence[str], graphs: Sequence[str]) -> Iterator[str]:
    """Lines of a table."""
    yield f"| {' | '.join(HEAD)} |"
    yield f"|{'---|' * len(HEAD)}"
    for method in methods:
        for mode in graphs:
            cells = [f"`{method}`", f"`{mode}`", *count_step(model, method, mode).row()]
            yield f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="builtin", help="`builtin`, or a model folder")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--graphs", default=",".join(GRAPHS))
    asked = parser.parse_args(argv)
    for line in table(asked.model, asked.methods.split(","), asked.graphs.split(",")):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
