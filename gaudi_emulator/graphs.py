"""HPU graphs: capture, replay, and the wrapper that keys graphs by their arguments.

A capture executes what it records. A replay runs the recorded operators again on the recorded storages, so
whatever Python changed without copying it into them is visibly stale. The wrapper's traps are kept: its key
compares hashes alone (in 1.19 without number formats), its static inputs are the first caller's tensors, its outputs
are one storage.
"""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from gaudi_emulator import checks, ops
from gaudi_emulator.card import flag
from gaudi_emulator.device import Device, current
from gaudi_emulator.recording import Recording, Run, Slot
from gaudi_emulator.scope import beyond
from gaudi_emulator.streams import Stream, current_stream
from gaudi_emulator.streams import stream as on_stream
from gaudi_emulator.tensor import DEVICE, HPUTensor, each, mapped, tensors_in

SHAPES = 16  # of the inputs of one wrapped function, beyond which its graphs are reported


def fatal_error(device: Device, message: str) -> RuntimeError:
    device.findings.hit("H066", message, "error")
    return RuntimeError(message)


def need_lazy(device: Device, what: str) -> None:
    if not device.lazy:
        device.findings.hit("H080", what, "error")
        raise RuntimeError(f"{what} is available in lazy mode only.")


def replayed(device: Device, recording: Recording, live: dict[int, Tensor]) -> dict[int, Tensor]:
    """Run everything again; see `HPUGraph.rerun`."""
    now: list[Any] = [None] * len(recording.first)

    def fill(value: Any) -> Any:
        if type(value) is Slot:
            return now[value.index]
        if live and isinstance(value, Tensor):
            return live.get(id(value), value)
        return value

    no_functions, no_dispatch = torch._C.DisableTorchFunction, torch._C._DisableTorchDispatch
    with no_functions(), no_dispatch(), torch.no_grad():
        for step in recording.steps:
            device.findings.site = step.site
            args = tuple(each(fill, value) for value in step.args)
            kwargs = {name: each(fill, value) for name, value in step.kwargs.items()}
            if step.op.packet in checks.INDEXED:
                checks.report_indices(device, step.op, args, when=" in a replay", severity="error")
            seed = device.draw_seed() if step.op.random else None
            result = device.compute(step.op, step.func, args, kwargs, seed)
            made = result if isinstance(result, (list, tuple)) else [result]
            for slot, value in zip(step.results, made, strict=True):
                if slot >= 0:
                    now[slot] = value
        device.findings.site = None
        if not live:
            recording.refresh(now)
    return {id(old): new for old, new in zip(recording.first, now, strict=True)}


class HPUGraph:
    """A recording and its replays (`hpu/graphs.py`)."""

    def __init__(self) -> None:
        self.device = current()
        need_lazy(self.device, "HPUGraph class")
        self.recording: Recording | None = None
        self.stream: object = None
        self.inputs: list[Tensor] = []

    def capture_begin(self, dry_run: bool = False) -> None:
        device = self.device
        if device.recording is not None:
            raise fatal_error(device, "graph Capture already in progress")
        if int(device.flags.get("WORLD_SIZE", 1)) > 1 and not flag(
            device.flags, "PT_HPU_ENABLE_LAZY_COLLECTIVES"
        ):
            device.findings.hit("H085", "", "error")
        device.flush("capture begin")
        device.dynamic_shapes = False  # and nothing turns it on again
        self.stream = current_stream()
        self.recording = device.recording = Recording(dry_run)

    def capture_end(self) -> None:
        device = self.device
        if device.recording is None or device.recording is not self.recording:
            raise fatal_error(device, "capture_end without a capture of this graph")
        if self.stream is not current_stream():
            raise fatal_error(device, "capture must end on the stream it began on")
        device.flush("capture end")
        device.recording = None
        self.recording.close()
        device.counts.graphs["captured"] += 1

    def replay(self, asynchronous: bool = False) -> None:
        device = self.device
        if device.recording is not None:
            raise fatal_error(device, "replay while a graph is captured")
        if self.recording is None:
            raise fatal_error(device, "replay of a graph that was never captured")
        self.rerun({})

    def rerun(self, live: dict[int, Tensor]) -> dict[int, Tensor]:
        """Run the recording, with live tensors in the place of those of its capture.

        Args:
            live: by the id of the CPU tensor that the capture saw.

        Returns:
            The new results, by the id of the CPU tensor that the capture made.
        """
        device = self.device
        assert self.recording is not None
        device.flush("replay")
        now = replayed(device, self.recording, live)
        device.counts.launches += self.recording.segments
        device.counts.graphs["replayed"] += 1
        device.counts.graphs["launches"] += self.recording.segments
        device.earn()
        return now

    def made(self, tensor: HPUTensor) -> bool:
        """Whether a tensor lies in a storage that the capture made."""
        return self.recording is not None and id(tensor.raw) in self.recording.slots

    def replay_with_inputs(
        self, tlistI: list[Tensor] | None = None, asynchronous: bool = False
    ) -> None:
        """A replay whose scalars on the host are those of this call; from 1.24 on."""
        if self.device.release.name == "1.19":
            raise AttributeError("'HPUGraph' object has no attribute 'replay_with_inputs'")
        rebinds = flag(self.device.flags, "PT_HPU_ENABLE_H2D_SCALES", True)
        for old, new in zip(self.inputs, tlistI or (), strict=False):
            if rebinds and is_host_scalar(old):
                old.copy_(new)
        self.replay(asynchronous)

    def mark_user_inputs(self, static_tlist: list[Tensor]) -> None:
        self.inputs = list(static_tlist)
        rebinds = flag(self.device.flags, "PT_HPU_ENABLE_H2D_SCALES", True)
        if self.recording is not None and rebinds and self.device.release.name != "1.19":
            self.recording.rebound = {id(t) for t in self.inputs if is_host_scalar(t)}

    def mark_user_outputs(self, static_tlist: list[Tensor], free_inplace: bool = True) -> None: ...

    def clear_inputs(self) -> None:
        self.inputs = []

    replayV2, replayV3, get_user_input_match_indices = (
        beyond(f"HPUGraph.{name}", "replay, after a copy_ into the captured inputs")
        for name in ("replayV2", "replayV3", "get_user_input_match_indices")
    )

    def reset(self) -> None:
        """Forget the recording; an open one is no longer in the way of others."""
        if self.device.recording is self.recording:
            self.device.recording = None
        self.recording = None


class graph:
    """`with graph(g): ...` captures on a stream of its own and always ends the capture."""

    def __init__(self, hpu_graph: HPUGraph, stream: Any = None, dry_run: bool = False) -> None:
        need_lazy(current(), "Context-manager for HPUGraph")
        self.graph, self.dry_run = hpu_graph, dry_run
        self.stream: Any = stream or Stream()
        self.context = on_stream(self.stream)

    def __enter__(self) -> None:
        current().flush("synchronize")
        gc.collect()
        self.context.__enter__()
        self.stream.is_capture = True
        self.graph.capture_begin(self.dry_run)

    def __exit__(self, *error: Any) -> None:
        try:
            self.graph.capture_end()
        finally:
            self.stream.is_capture = False
            self.context.__exit__(*error)


# A function that is to be captured, run twice uncaptured from equal state: whatever differs would be baked in.
#
# A capture keeps Python's values as they were. So each operator of both runs is noted with its constants and its line,
# the runs are laid side by side, and the first difference is a value that Python varies. A tensor of the first run that
# the second reads was carried over in an attribute; a tensor of the state that is another object afterwards was bound
# anew.


def rehearse(
    card: Device,
    body: Callable[[], object],
    state: Callable[[], Mapping[str, Tensor]],
    known: Run | None = None,
) -> Run | None:
    """Run a function twice and report what a capture of it would keep for good.

    Args:
        body: what is about to be captured.
        state: the tensors that it works on, by name.
        known: a run from before the capture; then one more is compared with it.

    Returns:
        The last run, without its tensors.
    """
    if not card.differential or card.recording is not None or card.rehearsed is not None:
        return None
    card.flush("synchronize")
    names = "counts recipes variants again blamed credit earned values_read uploaded staged warm".split()
    books = {name: copy.copy(getattr(card, name)) for name in names}
    books["counts"], seed = copy.deepcopy(card.counts), card.generator.get_state()
    bound = dict(state())  # held, so that no later tensor gets the address of one
    card.findings.muted = True
    runs = [known] if known else []
    try:
        while len(runs) < 2:
            card.generator.set_state(seed)
            card.rehearsed = run = Run()
            runs.append(run)
            try:
                body()
            finally:
                card.rehearsed = None
                run.restore()
    except Exception:
        return None  # the capture itself will say it
    finally:
        card.pending, card.sites, card.written = [], [], set()
        for name, value in books.items():
            setattr(card, name, value)
        card.generator.set_state(seed)
        card.findings.muted = False
    compare_runs(card, runs[0], runs[1])
    for name, tensor in state().items():
        if bound.get(name, tensor) is not tensor and isinstance(tensor, HPUTensor):
            _, site = runs[1].made.get(id(tensor.raw), (None, None))
            card.findings.hit("H069", name, "error", site)
    return Run(runs[1].steps)


def compare_runs(card: Device, first: Run, second: Run) -> None:
    """Report the first operator whose constants differ, and tensors carried from run to run."""
    for (then, _), (now, site) in zip(first.steps, second.steps, strict=False):
        if then != now:
            card.findings.hit("H068", f"{now[0]} had other values in a second run", "error", site)
            break
    else:
        if len(first.steps) != len(second.steps):
            longer = max(first.steps, second.steps, key=len)
            site = longer[min(len(first.steps), len(second.steps))][1]
            what = f"{len(first.steps)} operators, then {len(second.steps)}"
            card.findings.hit("H068", what, "error", site)
    for key, site in second.read:
        if key in first.made and key not in second.made:
            card.findings.hit("H068", "a tensor of the run before is read", "error", site)
            return


def plain_attributes(function: Callable[..., Any]) -> list[Any]:
    """Numbers, strings and switches that a method's module and those in it hold."""
    owner = getattr(function, "__self__", None)
    modules = owner.modules() if isinstance(owner, nn.Module) else ()
    kinds = (bool, int, float, str, type(None))
    return [(n, v) for module in modules for n, v in vars(module).items() if type(v) in kinds]


def module_tensors(function: Callable[..., Any]) -> dict[str, Tensor]:
    """The tensors that a method's module holds, by name."""
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, nn.Module):
        return {}
    found: dict[str, Tensor] = {**dict(owner.named_parameters()), **dict(owner.named_buffers())}
    for prefix, module in owner.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found[f"{prefix}.{name}".lstrip(".")] = value
    return found


# The wrapper


def input_hash(obj: Any) -> int:
    """The key of arguments (`input_hash` of graphs.py): shapes, chains of views and the autocast switch of tensors,
    from 1.24 on their number formats too; values of everything else; no equality.

    In 1.19 a `UserDict` takes its tensors apart, so it never meets its key again, and a dataclass is hashed whole; from
    1.24 on both go by what they hold.
    """
    autocast = torch.is_autocast_enabled(DEVICE)
    typed = current().release.key_has_dtype
    if isinstance(obj, dict):
        return input_hash(tuple(obj.items()))
    if isinstance(obj, UserDict):
        parts = (lambda value: (input_hash(v) for v in value)) if typed else iter
        return hash(tuple((name, tuple(parts(value))) for name, value in obj.items()))
    if typed and is_dataclass(obj) and not isinstance(obj, type):
        return hash(tuple((f.name, input_hash(getattr(obj, f.name))) for f in fields(obj)))
    if isinstance(obj, (list, tuple)):
        return hash((*(input_hash(item) for item in obj), autocast))
    if isinstance(obj, Tensor):
        base = getattr(obj, "base", None)
        chain = None if base is None else (obj.stride(), obj.storage_offset())
        return hash((obj.dtype if typed else None, tuple(obj.shape), chain, autocast))
    return hash((obj, autocast))


def copy_to(dst: Any, src: Any) -> None:
    """Copy tensors into tensors, container by container; what is left over on one side is ignored."""
    if isinstance(dst, Tensor) and isinstance(src, Tensor):
        if dst is not src and getattr(dst, "raw", dst) is not getattr(src, "raw", src):
            dst.copy_(src)
        return
    if type(dst) is not type(src):
        raise TypeError(f"cannot copy {type(src).__name__} to {type(dst).__name__}")
    if isinstance(dst, (dict, UserDict)):
        if set(dst) != set(src):
            raise KeyError(f"keys differ: {sorted(dst)} and {sorted(src)}")
        for name in dst:
            copy_to(dst[name], src[name])
    elif isinstance(dst, (list, tuple)):
        for one, other in zip(dst, src):  # noqa: B905 - cut to the shorter one, as the bridge does
            copy_to(one, other)


def is_host_scalar(value: object) -> bool:
    """A CPU tensor of no dimensions: from 1.24 on its value is that of each call, not of the capture."""
    scalar = isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() == 0
    return scalar and value.dtype in (torch.float32, torch.bfloat16)  # type: ignore[attr-defined]


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
    run: Run | None = None  # of the function, before the capture
    attributes: Any = None  # of its module
    state: dict[str, Tensor] = field(default_factory=dict)  # of it, as far as the graph reads it
    callers: list[weakref.ref[HPUTensor]] = field(default_factory=list)  # first inputs
    handed_out: list[weakref.ref[HPUTensor]] = field(default_factory=list)


class Wrapped:
    """A function whose calls are captured once for each key and replayed after (`wrapped_hpugraph_forward`)."""

    def __init__(
        self,
        func: Callable[..., Any],
        asynchronous: bool = False,
        disable_tensor_cache: bool = False,
        dry_run: bool | None = None,
        max_graphs: int | None = None,
        *since_1_24: Any,
        **named: Any,
    ) -> None:
        allowed = ("free_inplace", "verbose", "log_frequency")
        for name in (*allowed[: len(since_1_24)], *named):
            if name not in allowed or current().release.name == "1.19":
                raise TypeError(f"wrap_in_hpu_graph() got an unexpected keyword argument {name!r}")
        self.func, self.dry_run, self.max_graphs = func, bool(dry_run), max_graphs
        self.disable_tensor_cache = disable_tensor_cache
        self.cache: dict[int, CachedParams] = {}
        self.shapes: dict[Any, set[int]] = {}  # keys by the shapes of their tensors alone

    @property
    def live(self) -> bool:
        """Whether inputs are bound anew at each call; the variable is read each time and wins (graphs.py:594)."""
        name = "PT_HPUGRAPH_DISABLE_TENSOR_CACHE"
        return flag({**current().flags, **os.environ}, name, self.disable_tensor_cache)

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
                device.findings.hit("H062", "view or not contiguous")
        run = self.rehearse(device, inputs)
        made = HPUGraph()
        made.capture_begin(self.dry_run or self.live)
        if device.release.name != "1.19":
            given: list[Tensor] = []
            mapped(inputs, lambda tensor: given.append(alias(tensor)))
            made.mark_user_inputs(given)
        outputs = self.func(*inputs[0], **inputs[1])  # no try: an exception leaves the capture open
        made.capture_end()
        # The storages are the first caller's; the objects are not, so that it is known which are still alive.
        known = CachedParams(mapped(inputs, alias), outputs, made, signature=ops.spec(inputs))
        known.callers = [weakref.ref(t) for t in tensors_in(inputs)]
        known.run, known.attributes = run, plain_attributes(self.func)
        assert made.recording is not None
        known.state = {n: raw for n, raw in self.state().items() if made.recording.reads(raw)}
        self.cache[key] = known
        if self.live:
            return self.bound(known, inputs)
        if self.dry_run:
            made.replay()
        known.handed_out = [weakref.ref(t) for t in tensors_in(outputs) if made.made(t)]
        return outputs

    def state(self) -> dict[str, Tensor]:
        """What the tensors of its module hold, by name."""
        held = module_tensors(self.func).items()
        return {name: t.raw for name, t in held if isinstance(t, HPUTensor)}

    def rehearse(self, device: Device, inputs: Any, known: Run | None = None) -> Run | None:
        def body() -> None:
            self.func(*inputs[0], **inputs[1])

        return rehearse(device, body, lambda: module_tensors(self.func), known)

    def watch_keys(self, device: Device, key: int, inputs: Any) -> None:
        """Too many graphs, which differ by a Python value alone or by shapes."""
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors_in(inputs))
        keys = self.shapes.setdefault(shapes, set())
        keys.add(key)
        if len(self.shapes) > SHAPES:
            device.findings.hit("H021:shapes", f"{len(self.shapes)} graphs for as many shapes")
        if len(keys) > 4:
            device.findings.hit("H021", f"{len(keys)} graphs for the same tensor shapes")

    def again(self, device: Device, known: CachedParams, inputs: Any, warmup: bool) -> Any:
        if warmup:
            device.flush("mark_step")
            return known.graph_outputs
        if known.signature != ops.spec(inputs):
            device.findings.hit(
                "H022", "dtype or type of an argument differs from the capture", "error"
            )
        for name, raw in self.state().items():
            if not raw.is_set_to(known.state.get(name, raw)):
                device.findings.hit("H069", f"{name}, after the capture", "error")
        if known.run and (now := plain_attributes(self.func)) != known.attributes:
            known.attributes = now
            self.rehearse(device, inputs, known.run)
        if self.live:
            return self.bound(known, inputs)
        for ref, mine, new in zip(
            known.callers, tensors_in(known.graph_inputs), tensors_in(inputs), strict=False
        ):
            if ref() is not None and mine.raw is not new.raw:
                device.findings.hit("H064")
        copy_to(known.graph_inputs, inputs)
        known.graph.replay()
        return self.hand_out(known)

    def bound(self, known: CachedParams, inputs: Any) -> Any:
        """A replay on these very inputs; its results have storages of their own."""
        static = (id(t.raw) for t in tensors_in(known.graph_inputs))
        live = dict(zip(static, tensors_in(inputs), strict=False))
        now = known.graph.rerun({key: tensor.raw for key, tensor in live.items()})

        def fresh(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, HPUTensor):
                return tensor
            made = now.get(id(tensor.raw))
            return HPUTensor(made) if made is not None else live.get(id(tensor.raw), tensor)

        return mapped(known.graph_outputs, fresh)

    def hand_out(self, known: CachedParams) -> Any:
        """The outputs, and a mark on those of the last replay: they lie in the same storage.

        The bridge gives the cached object itself; here each call gets its own names for the same storages, so that
        one kept past the next replay is recognised.
        """
        for ref in known.handed_out:
            old = ref()
            if old is not None:
                old.stale = "H063"
        fresh = mapped(
            known.graph_outputs,
            lambda t: alias(t) if isinstance(t, HPUTensor) and known.graph.made(t) else t,
        )
        known.handed_out = [weakref.ref(t) for t in tensors_in(fresh) if known.graph.made(t)]
        return fresh

    def clear_cache(self) -> None:
        current().counts.graphs["evicted"] += len(self.cache)
        self.cache.clear()

    def clear_inputs(self) -> None:
        for known in self.cache.values():
            known.graph.clear_inputs()


def alias(tensor: Tensor) -> Tensor:
    """Another object for the same storage."""
    return HPUTensor(tensor.raw) if isinstance(tensor, HPUTensor) else tensor


def wrap_in_hpu_graph_func(
    func: Callable[..., Any], *options: Any, **named: Any
) -> Callable[..., Any]:
    """A function with a graph for each key; it keeps its name and signature."""
    wrapped = Wrapped(func, *options, **named)

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    for name in ("clear_cache", "clear_inputs"):
        setattr(call, name, getattr(wrapped, name))
    return call


def wrap_in_hpu_graph(module: nn.Module, *options: Any, **named: Any) -> nn.Module:
    """The same module with its `forward` replaced."""
    call: Any = wrap_in_hpu_graph_func(module.forward, *options, **named)
    module.forward = call
    module.clear_cache = call.clear_cache
    module.clear_inputs = call.clear_inputs
    return module


@contextmanager
def abandoned_on_error(device: Device) -> Iterator[None]:
    """An open capture that an exception left behind is noted once and closed, for the next program."""
    try:
        yield
    finally:
        if device.recording is not None:
            device.findings.hit("H066", "a capture was never ended", "error")
            device.recording = None
