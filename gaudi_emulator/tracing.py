"""`torch.compile(backend="hpu_backend")` of a user's program: the real dynamo and AOT autograd, watched.

While a compiled function is called the emulator's modes are out of the way, and `HPUTensor` is what torch calls a
traceable wrapper: dynamo traces through it to the CPU tensor inside. What the tracers say is noted with its line: a
graph break, the guard whose failure compiled a function once more, a size that became a symbol.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.utils import graph_break_reasons
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gaudi_emulator import ops
from gaudi_emulator.autocast import cast, lists
from gaudi_emulator.device import VARIANTS, Device, flag
from gaudi_emulator.lint import checks, rules
from gaudi_emulator.lint.rules import SKIPPED
from gaudi_emulator.lowering import lower, source, watched
from gaudi_emulator.modes import across
from gaudi_emulator.patches import replaced
from gaudi_emulator.tensor import HPU, META, Args, HPUTensor, Kwargs, is_hpu

CPU = torch.device("cpu")
TRACERS: Any = sys.modules.get("torch._functorch._aot_autograd.graph_compile")  # of newer torch
TENSORIFY = "_apply_tensorify_python_scalars"
Site = tuple[str, int]


class Compiler:
    """The backend `hpu_backend` of one card, for all functions that a program compiles."""

    def __init__(self, card: Device) -> None:
        torch._dynamo.reset()  # what another program compiled
        inside = [f"{__package__}.{name}" for name in ("device", "ops", "tensor")]
        for module in (*inside, checks.__name__, rules.__name__):  # not to be traced themselves
            trace_rules.add(module)
        self.card = card
        self.failed: list[tuple[str, Site]] = []  # guards, since the last compilation
        self.again: Counter[Site] = Counter()  # compilations by function, after its first
        self.backends: dict[tuple[tuple[str, str], ...], Callable[..., Any]] = {}

    def compile(
        self, model: Any, fullgraph: bool, dynamic: bool | None, flags: dict[str, str]
    ) -> Any:
        """A function or module that is traced when it is called."""
        backend = self.backends.setdefault(tuple(flags.items()), partial(self.piece, flags))
        made: Any = torch._dynamo.optimize(
            backend, nopython=fullgraph, dynamic=dynamic, guard_fail_fn=self.guard_failed
        )(model)
        if not isinstance(model, nn.Module):
            return self.watched(made, model, flags)
        made.forward = self.watched(made.forward, model.forward, flags)
        return made

    def watched(
        self, function: Callable[..., Any], real: Callable[..., Any], flags: dict[str, str]
    ) -> Callable[..., Any]:
        @wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.card.lazy:
                self.card.findings.hit(
                    "H080", "torch.compile with hpu_backend in lazy mode", "error"
                )
                return real(*args, **kwargs)  # operator by operator
            known = len(graph_break_reasons)
            try:
                with tracing(self.card):
                    result = function(*args, **kwargs)
                self.need_uncut(graph_break_reasons[known:], flags)
                return result
            except (Unsupported, UserError) as error:  # of a function that is to be one graph
                site = where(getattr(error, "real_stack", None))
                self.card.findings.hit("H090", first_line(error), "error", site)
                raise
            finally:
                self.note_breaks(graph_break_reasons[known:])
                if self.failed:  # a guard failed and nothing was compiled
                    reason, site = self.failed.pop()
                    self.failed.clear()
                    self.card.findings.hit("H023", f"no more compilations: {reason}", "warn", site)

        return call

    def need_uncut(self, breaks: Sequence[Any], flags: dict[str, str]) -> None:
        """Raise for an operator that runs outside the graph since its result has no known shape, if none may."""
        reasons = (first_line(found.reason) for found in breaks)
        unknown = next((r for r in reasons if "dynamic shape operator" in r.lower()), None)
        if unknown and not flag(self.card.flags | flags, "PT_HPU_USE_EAGER_FALLBACK", True):
            raise AssertionError(f"eager fallback ({unknown}), and PT_HPU_USE_EAGER_FALLBACK=0")

    def guard_failed(self, failure: Any) -> None:
        code = failure.orig_code
        reason = re.sub(r"^\d+/\d+: ", "", str(failure.reason)).splitlines()[0]
        self.failed.append((reason, (code.co_filename, code.co_firstlineno)))

    def note_breaks(self, breaks: Sequence[Any]) -> None:
        for found in breaks:
            self.card.findings.hit("H090", first_line(found.reason), None, where(found.user_stack))

    def piece(
        self, flags: dict[str, str], graph: fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """What dynamo hands over: a piece of a function, to be compiled."""
        hit = self.card.findings.hit
        self.card.counts.recipes += 1
        if any(isinstance(value, torch.SymInt) for value in inputs):
            hit("H015", "a size that varied was made a symbol")
        cause = "a new function"
        if self.failed:
            cause, site = self.failed[-1]
            self.failed.clear()
            self.again[site] += 1
            if self.again[site] > VARIANTS and not self.card.warm:
                hit(
                    "H024",
                    f"compiled {1 + self.again[site]} times; the last time: {cause}",
                    None,
                    site,
                )
        if self.card.warm:
            self.card.counts.recompiles += 1
            hit("H020", cause)
        site = next((source(n) for n in graph.graph.nodes if n.stack_trace), ("unknown", 0))
        cast_calls(self.card, graph)
        here = made_on_card(graph)
        lowered = aot_autograd(
            fw_compiler=partial(self.graph, flags), keep_inference_input_mutations=True
        )
        return placed(self.card, here, watched(self.card, site, lowered(graph, inputs)))

    def graph(
        self, flags: dict[str, str], graph: fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """A graph of aten operators on CPU tensors: looked at once, launched at each call."""
        with replaced(self.card, "flags", lambda known: known | flags):
            launches, whole_copies = lower(self.card, graph)
        at_home(graph)
        run = Launched(graph, self.card)

        def launch(*values: Any) -> Any:
            self.card.launch(launches, whole_copies)
            return run.run(*values)

        boxed: Callable[..., Any] = make_boxed_func(launch)
        return boxed


def made_on_card(graph: fx.GraphModule) -> list[bool]:
    """Of each result whether it lies on the card; tracers take what no input brings there for the host's."""
    here: dict[fx.Node, bool] = {}
    for node in graph.graph.nodes:
        if node.op == "output":
            return [isinstance(n, fx.Node) and here[n] for n in node.args[0]]
        goal = node.kwargs.get("device")
        if node.target == "to":
            goal = next((a for a in node.args[1:] if isinstance(a, (str, torch.device))), goal)
        follows = node.target != "cpu" and any(here[n] for n in node.all_input_nodes)
        here[node] = follows if goal is None else is_device(goal)
    return []


def placed(card: Device, here: list[bool], run: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with such results on the card."""

    def place(value: Any) -> Any:
        if type(value) is not Tensor:
            return value
        return across(card, value, "upload") if value.requires_grad else card.new(value)

    def call(*given: Any) -> Any:
        return [place(v) if on else v for v, on in zip(run(*given), here, strict=True)]

    return call if any(here) else run


def cast_calls(card: Device, graph: fx.GraphModule) -> None:
    """Functions that autocast has a format for ask for it while they are traced further; dynamo leaves that to torch's
    dispatch keys, which emulated tensors do not have."""
    known = lists(card.flags)
    for node in graph.graph.nodes:
        function = function_called_by(node)
        if function in known.lower | known.float32:
            target = node.target if node.op == "call_function" else function
            node.op, node.target = "call_function", casting(function, target)
    graph.recompile()


def function_called_by(node: fx.Node) -> Any:
    """The function of torch, or the method of tensors, that a node calls."""
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), None)
    if getattr(node.target, "__module__", "") == "_operator":
        return getattr(Tensor, f"__{node.target.__name__}__", None)  # type: ignore[union-attr]
    return node.target if node.op == "call_function" else None


@cache
def casting(function: Callable[..., Any], target: Any) -> Callable[..., Any]:
    """What a node calls, with its arguments as autocast wants them for a function."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast(function, args, kwargs)
        return target(*args, **kwargs)

    return call


class Launched(fx.Interpreter):
    """Runs a compiled graph; indices are data, so they are looked at in each launch."""

    def __init__(self, graph: fx.GraphModule, card: Device) -> None:
        super().__init__(graph)
        self.card = card

    def run_node(self, node: fx.Node) -> Any:
        self.node = node
        return super().run_node(node)

    def call_function(self, target: Any, args: Args, kwargs: Kwargs) -> Any:
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        op = ops.op_of(target, self.card.release)
        if op.packet in checks.INDEXED:
            site = source(self.node)
            checks.report_indices(self.card, op, args, severity="error", site=site)
        seed = self.card.draw_seed() if op.random else None
        return self.card.compute(op, target, args, kwargs, seed)


def at_home(graph: fx.GraphModule) -> None:
    """What a program makes on the device is made where the emulator keeps it."""
    for node in graph.graph.nodes:
        if is_device(node.kwargs.get("device")):
            node.kwargs = {**node.kwargs, "device": CPU}
    graph.recompile()


def is_device(value: object) -> bool:
    """Whether a device is ours: `meta` is what torch's C++ takes the emulated one for."""
    return isinstance(value, (str, torch.device)) and (is_hpu(value) or torch.device(value) == META)


@contextmanager
def tracing(card: Device) -> Iterator[None]:
    """torch is left to itself; its fake tensors never lie on a device that has no driver here."""

    def host(value: Any) -> Any:
        return CPU if is_device(value) else value

    def faking(real: Any) -> Any:
        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return real(cls, *map(host, args), **{n: host(v) for n, v in kwargs.items()})

        return staticmethod(new)

    plain = torch._C._disabled_torch_function_impl
    with ExitStack() as stack:
        if not card.traced:
            differentiate_composites()
            stack.enter_context(card.aside())
            stack.enter_context(replaced(FakeTensorMode, "avoid_device_init", lambda real: True))
            stack.enter_context(replaced(Tensor, "to", moving))
            if hasattr(TRACERS, TENSORIFY):
                stack.enter_context(replaced(TRACERS, TENSORIFY, keeping_keywords))
            stack.enter_context(replaced(FakeTensor, "__new__", faking))
            stack.enter_context(replaced(HPUTensor, "__torch_function__", lambda real: plain))
            stack.enter_context(replaced(card, "traced", lambda before: True))
        yield


def keeping_keywords(real: Callable[[fx.GraphModule], None]) -> Callable[[fx.GraphModule], None]:
    """torch (2.13) makes tensors of numbers that became symbols, and forgets what else the operator was told by name:
    `alpha` of a sum, how a quotient is rounded. Graphs with such calls keep their numbers."""

    def forgets(node: fx.Node) -> bool:
        numbers = (a.meta.get("val") for a in node.args if isinstance(a, fx.Node))
        return bool(node.kwargs) and any(isinstance(n, torch.SymFloat) for n in numbers)

    def apply(graph: fx.GraphModule) -> None:
        if not any(map(forgets, graph.graph.nodes)):
            real(graph)

    return apply


def moving(real: Any) -> Any:
    """`Tensor.to` with the card's number: torch would ask a driver for it."""

    def numbered(value: Any) -> Any:
        return HPU if isinstance(value, (str, torch.device)) and is_hpu(value) else value

    @wraps(real)
    def to(*args: Any, **kwargs: Any) -> Any:
        return real(*map(numbered, args), **{n: numbered(v) for n, v in kwargs.items()})

    return to


@cache
def differentiate_composites() -> None:
    """Gradients pass through composite operators by their parts. To the tracers our tensors are on `meta`, and where
    torch has a function for the shapes there they take the whole operator for one without a derivative."""
    key = torch._C.DispatchKey
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    for packet in (p for p in packets if isinstance(p, torch._ops.OpOverloadPacket)):
        for overload in (getattr(packet, name) for name in packet.overloads()):
            has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, overload.name())
            known = overload.py_kernels
            shaped = key.Meta in known and not has("Meta") and key.AutogradMeta not in known
            if shaped and has("CompositeImplicitAutograd"):
                overload.py_impl(key.AutogradMeta)(overload.decompose)


def first_line(reason: object) -> str:
    return str(reason).strip().splitlines()[0]


def where(stack: Any) -> Site | None:
    """The innermost place in a traced stack that is not torch's own."""
    places = [(frame.filename, frame.lineno) for frame in stack or ()]
    return next((p for p in reversed(places) if not p[0].startswith(SKIPPED)), None)
