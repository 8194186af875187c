"""HPU graphs: capture, replay, and the wrapper that keys graphs by their arguments.

A capture executes what it records. A replay runs the recorded operators again on the recorded storages, so
whatever Python changed without copying it into them is visibly stale. The wrapper's traps are kept: its key
leaves dtypes out, its static inputs are the first caller's tensors, its outputs are one storage.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lantern_hpu.backends.hpu_emulator import checks, ops
from lantern_hpu.backends.hpu_emulator.device import Device, current, flag
from lantern_hpu.backends.hpu_emulator.tensor import HPUTensor

GARBAGE = -(2**31)


@dataclass(frozen=True)
class Slot:
    """A result of an earlier recorded operator."""

    index: int


@dataclass
class Recorded:
    """One operator of a recording."""

    op: ops.Op
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int]  # slots of new results; -1 for an argument given back


class Recording:
    """Operators in their order, and which results somebody still holds."""

    def __init__(self, device: Device, dry_run: bool) -> None:
        self.device, self.dry_run = device, dry_run
        self.steps: list[Recorded] = []
        self.first: list[Tensor] = []  # results at capture: they keep their storage
        self.slots: dict[int, int] = {}
        self.held: list[tuple[weakref.ref[HPUTensor], int]] = []
        self.segments = 1
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # what a dry run must undo

    def add(
        self, op: ops.Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record an operator that has just run."""
        results = result if isinstance(result, (list, tuple)) else [result]
        given = {id(value) for value in (*args, *kwargs.values())}
        step = Recorded(
            op,
            func,
            tuple(map(self.point, args)),
            {n: self.point(v) for n, v in kwargs.items()},
            [],
        )
        for made in results:
            if isinstance(made, Tensor) and id(made) not in given:
                self.slots[id(made)] = len(self.first)
                step.results.append(len(self.first))
                self.first.append(made)
            else:
                step.results.append(-1)
        self.steps.append(step)

    def point(self, value: Any) -> Any:
        """An argument, with earlier results replaced by their slots."""
        if isinstance(value, Tensor):
            return Slot(self.slots[id(value)]) if id(value) in self.slots else value
        if isinstance(value, list):
            return [self.point(item) for item in value]
        return value

    def follow(self, tensor: HPUTensor) -> None:
        """A tensor made in this capture: if it outlives the capture, replays refresh it."""
        slot = self.slots.get(id(tensor.raw))
        if slot is not None:
            self.held.append((weakref.ref(tensor), slot))

    def keep(self, target: Tensor) -> None:
        """Before a dry run changes a tensor from outside: note what was in it."""
        key = target.untyped_storage().data_ptr()
        if self.dry_run and key not in self.before:
            self.before[key] = (target, target.clone())

    def close(self) -> None:
        """The capture ends; a dry run leaves no trace but garbage in its results."""
        self.held = [(ref, slot) for ref, slot in self.held if ref() is not None]
        for target, values in self.before.values():
            target.copy_(values)
        for ref, _ in self.held if self.dry_run else ():
            tensor = ref()
            if tensor is not None:
                spoil(tensor.raw)
                tensor.stale = "H067"

    def run(self) -> None:
        """Run everything again."""
        now: list[Any] = [None] * len(self.first)

        def fill(value: Any) -> Any:
            if type(value) is Slot:
                return now[value.index]
            return [fill(item) for item in value] if type(value) is list else value

        no_functions, no_dispatch = torch._C.DisableTorchFunction, torch._C._DisableTorchDispatch
        with no_functions(), no_dispatch(), torch.no_grad():
            for step in self.steps:
                args = tuple(map(fill, step.args))
                kwargs = {name: fill(value) for name, value in step.kwargs.items()}
                if step.op.packet in checks.INDEXED:
                    self.check(step, args)
                seed = self.device.draw_seed() if step.op.random else None
                result = self.device.compute(step.op, step.func, args, kwargs, seed)
                made = result if isinstance(result, (list, tuple)) else [result]
                for slot, value in zip(step.results, made, strict=True):
                    if slot >= 0:
                        now[slot] = value
            self.refresh(now)

    def check(self, step: Recorded, args: tuple[Any, ...]) -> None:
        """Indices are data: they are looked at in each replay."""
        if step.op.packet in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        ):
            return
        accumulates = len(args) > 3 and args[3] is True
        indices = checks.index_tensors(step.op, args)
        for rule, detail in checks.broken_indices(
            step.op.name, args[0], indices, args, accumulates
        ):
            self.device.findings.hit(rule, f"{step.op.name} in a replay: {detail}", "error")

    def refresh(self, now: list[Any]) -> None:
        """Put the new results where the capture left the old ones."""
        for ref, slot in self.held:
            tensor = ref()
            if tensor is not None and now[slot].data_ptr() != tensor.raw.data_ptr():
                tensor.raw.copy_(now[slot])
            if tensor is not None and tensor.stale == "H067":
                tensor.stale = None


def spoil(raw: Tensor) -> None:
    """Fill with what no honest result has."""
    raw.fill_(float("nan") if raw.is_floating_point() else GARBAGE if raw.dtype.itemsize > 2 else 1)


def fatal(device: Device, message: str) -> RuntimeError:
    device.findings.hit("H066", message, "error")
    return RuntimeError(message)


class HPUGraph:
    """A recording and its replays (bridge 1.19, `hpu/graphs.py`)."""

    def __init__(self) -> None:
        self.device = current()
        self.recording: Recording | None = None
        self.stream: object = None
        self.inputs: list[Tensor] = []

    def capture_begin(self, dry_run: bool = False) -> None:
        from lantern_hpu.backends.hpu_emulator.habana import current_stream

        device = self.device
        if device.recording is not None:
            raise fatal(device, "graph Capture already in progress")
        if int(device.flags.get("WORLD_SIZE", 1)) > 1 and not flag(
            device.flags, "PT_HPU_ENABLE_LAZY_COLLECTIVES"
        ):
            device.findings.hit("H085", "", "error")
        device.flush("capture begin")
        device.dynamic_shapes = False  # and nothing turns it on again
        self.stream = current_stream()
        self.recording = device.recording = Recording(device, dry_run)

    def capture_end(self) -> None:
        from lantern_hpu.backends.hpu_emulator.habana import current_stream

        device = self.device
        if device.recording is None or device.recording is not self.recording:
            raise fatal(device, "capture_end without a capture of this graph")
        if self.stream is not current_stream():
            raise fatal(device, "capture must end on the stream it began on")
        device.flush("capture end")
        device.recording = None
        self.recording.close()
        device.counts.graphs["captured"] += 1

    def replay(self, asynchronous: bool = False) -> None:
        device = self.device
        if device.recording is not None:
            raise fatal(device, "replay while a graph is captured")
        if self.recording is None:
            raise fatal(device, "replay of a graph that was never captured")
        device.flush("replay")
        self.recording.run()
        device.counts.launches += self.recording.segments
        device.counts.graphs["replayed"] += 1
        device.counts.graphs["launches"] += self.recording.segments
        device.earn()

    def replayV2(
        self, static_tlist: list[Tensor], tlist: list[Tensor], asynchronous: bool = False
    ) -> None:
        copy_to(static_tlist, tlist)
        self.replay(asynchronous)

    def replayV3(self, tlistI: list[Tensor], asynchronous: bool = False) -> None:
        copy_to(self.inputs, tlistI)
        self.replay(asynchronous)

    def mark_user_inputs(self, static_tlist: list[Tensor]) -> None:
        self.inputs = list(static_tlist)

    def mark_user_outputs(self, static_tlist: list[Tensor]) -> None: ...

    def get_user_input_match_indices(self) -> list[int]:
        return list(range(len(self.inputs)))

    def clear_inputs(self) -> None:
        self.inputs = []

    def reset(self) -> None:
        self.recording = None


class graph:
    """`with graph(g): ...` captures on a stream of its own and always ends the capture."""

    def __init__(self, hpu_graph: HPUGraph, stream: Any = None, dry_run: bool = False) -> None:
        from lantern_hpu.backends.hpu_emulator import habana

        self.graph, self.dry_run = hpu_graph, dry_run
        self.context = habana.stream(stream or habana.Stream())

    def __enter__(self) -> None:
        current().flush("synchronize")
        gc.collect()
        self.context.__enter__()
        self.graph.capture_begin(self.dry_run)

    def __exit__(self, *error: Any) -> None:
        try:
            self.graph.capture_end()
        finally:
            self.context.__exit__(*error)


# The wrapper


def input_hash(obj: Any) -> int:
    """The key of arguments: shapes of tensors, values of everything else; no dtypes, no equality."""
    if isinstance(obj, dict):
        return input_hash(tuple(obj.items()))
    if isinstance(obj, (list, tuple)):
        return hash(tuple(input_hash(item) for item in obj))
    if isinstance(obj, Tensor):
        return hash((tuple(obj.shape), getattr(obj, "base", None) is not None))
    return hash(obj)


def copy_to(dst: Any, src: Any) -> None:
    """Copy tensors into tensors, container by container; what is left over on one side is ignored."""
    if type(dst) is not type(src) and not (isinstance(dst, Tensor) and isinstance(src, Tensor)):
        raise TypeError(f"cannot copy {type(src).__name__} to {type(dst).__name__}")
    if isinstance(dst, dict):
        if set(dst) != set(src):
            raise KeyError(f"keys differ: {sorted(dst)} and {sorted(src)}")
        for name in dst:
            copy_to(dst[name], src[name])
    elif isinstance(dst, (list, tuple)):
        for one, other in zip(dst, src):  # noqa: B905 - cut to the shorter one, as the bridge does
            copy_to(one, other)
    elif isinstance(dst, Tensor) and dst is not src:
        dst.copy_(src)


@dataclass
class CachedParams:
    """A graph with its static inputs and outputs."""

    graph_inputs: Any
    graph_outputs: Any
    graph: HPUGraph
    out_tinfo_list: Any = None
    asynchronous: bool = False
    # The emulator's own notes
    signature: Any = None
    handed_out: list[weakref.ref[HPUTensor]] = field(default_factory=list)


def signature(obj: Any) -> Any:
    """What the key should have held."""
    if isinstance(obj, Tensor):
        return ("tensor", obj.dtype, tuple(obj.shape))
    if isinstance(obj, dict):
        return tuple((name, signature(value)) for name, value in obj.items())
    if isinstance(obj, (list, tuple)):
        return tuple(signature(item) for item in obj)
    return (type(obj).__name__, obj)


def tensors_in(obj: Any) -> Iterator[HPUTensor]:
    if isinstance(obj, HPUTensor):
        yield obj
    elif isinstance(obj, dict):
        for value in obj.values():
            yield from tensors_in(value)
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            yield from tensors_in(value)


class Wrapped:
    """A function whose calls are captured once for each key and replayed after."""

    def __init__(
        self,
        func: Callable[..., Any],
        asynchronous: bool = False,
        disable_tensor_cache: bool = False,
        dry_run: bool = False,
        max_graphs: int | None = None,
    ) -> None:
        self.func, self.dry_run, self.max_graphs = func, dry_run, max_graphs
        flags = current().flags
        self.live_inputs = flag(flags, "PT_HPUGRAPH_DISABLE_TENSOR_CACHE", disable_tensor_cache)
        self.cache: dict[int, CachedParams] = {}
        self.shapes: dict[Any, set[int]] = {}  # keys by the shapes of their tensors alone

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = current()
        warmup = kwargs.pop("warmup_mode", False)
        kwargs.pop("cache_tensors_list", None)
        if kwargs.pop("bypass_hpu_graphs", False):
            device.counts.graphs["bypassed"] += 1
            return self.func(*args, **kwargs)
        inputs = (args, kwargs)
        key = input_hash(inputs)
        if key in self.cache:
            return self.again(device, self.cache[key], inputs, warmup)
        if self.max_graphs is not None and len(self.cache) >= self.max_graphs:
            device.findings.hit("H023", f"{self.max_graphs} graphs")
            device.counts.graphs["bypassed"] += 1
            return self.func(*args, **kwargs)
        return self.capture(device, key, inputs)

    def capture(self, device: Device, key: int, inputs: Any) -> Any:
        self.watch_keys(device, key, inputs)
        for tensor in tensors_in(inputs):
            if tensor.base is not None or not tensor.is_contiguous():
                device.findings.hit("H062", "view or not contiguous", "error")
        made = HPUGraph()
        made.capture_begin(self.dry_run or self.live_inputs)
        outputs = self.func(*inputs[0], **inputs[1])  # no try: an exception leaves the capture open
        made.capture_end()
        if self.live_inputs:
            made.replay()
        handed_out = [weakref.ref(t) for t in tensors_in(outputs)]
        self.cache[key] = CachedParams(
            inputs, outputs, made, signature=signature(inputs), handed_out=handed_out
        )
        return outputs

    def watch_keys(self, device: Device, key: int, inputs: Any) -> None:
        """Too many graphs that differ by a Python value alone."""
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors_in(inputs))
        keys = self.shapes.setdefault(shapes, set())
        keys.add(key)
        if len(keys) > 4:
            device.findings.hit("H021", f"{len(keys)} graphs for the same tensor shapes", "error")

    def again(self, device: Device, known: CachedParams, inputs: Any, warmup: bool) -> Any:
        if warmup:
            device.flush("mark_step")
            return known.graph_outputs
        if known.signature != signature(inputs):
            device.findings.hit(
                "H022", "dtype or type of an argument differs from the capture", "error"
            )
        mine = list(tensors_in(known.graph_inputs))
        if any(one is not other for one, other in zip(mine, tensors_in(inputs), strict=False)):
            device.findings.hit("H064")
        copy_to(known.graph_inputs, inputs)
        known.graph.replay()
        return self.hand_out(known)

    def hand_out(self, known: CachedParams) -> Any:
        """The outputs, and a mark on those of the last replay: they lie in the same storage."""
        for ref in known.handed_out:
            old = ref()
            if old is not None:
                old.stale = "H063"
        fresh = alias(known.graph_outputs)
        known.handed_out = [weakref.ref(t) for t in tensors_in(fresh)]
        return fresh

    def clear_cache(self) -> None:
        current().counts.graphs["evicted"] += len(self.cache)
        self.cache.clear()

    def clear_inputs(self) -> None:
        for known in self.cache.values():
            known.graph.clear_inputs()


def alias(outputs: Any) -> Any:
    """New names for the same storages, so that one kept past the next replay can be told."""
    if isinstance(outputs, HPUTensor):
        return HPUTensor(outputs.raw)
    if isinstance(outputs, dict):
        return {name: alias(value) for name, value in outputs.items()}
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(alias(value) for value in outputs)
    return outputs


def wrap_in_hpu_graph_func(func: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return Wrapped(func, **options)


def wrap_in_hpu_graph(module: nn.Module, **options: Any) -> nn.Module:
    """The same module with its `forward` replaced."""
    wrapped = Wrapped(module.forward, **options)
    module.forward = wrapped
    module.clear_cache = wrapped.clear_cache  # type: ignore[assignment]
    module.clear_inputs = wrapped.clear_inputs  # type: ignore[assignment]
    return module


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    warmups: int = 0,
    allow_unused_input: bool = False,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
) -> Any:
    """Callables captured on sample arguments; for inference only."""
    single = not isinstance(callables, tuple)
    made = tuple(
        Wrapped(one, asynchronous, disable_tensor_cache, dry_run)
        for one in ((callables,) if single else callables)
    )
    for one, sample in zip(made, (sample_args,) if single else sample_args, strict=True):
        for _ in range(warmups + 1):
            one(*sample)
    return made[0] if single else made


@contextmanager
def abandoned_on_error(device: Device) -> Iterator[None]:
    """An open capture that an exception left behind is noted once and closed, for the next program."""
    try:
        yield
    finally:
        if device.recording is not None:
            device.findings.hit("H066", "a capture was never ended", "error")
            device.recording = None
