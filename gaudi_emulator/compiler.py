"""`torch.compile(backend="hpu_backend")` of a user's program: the real dynamo and AOT autograd, watched.

While a compiled function is called the emulator's modes are out of the way, and `HPUTensor` is what torch calls a
traceable wrapper: dynamo traces through it to the CPU tensor inside. What the tracers say is noted with its line: a
graph break, the guard whose failure compiled a function once more, a size that became a symbol.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import config, trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as compiled_of
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported, UserError
from torch._dynamo.utils import graph_break_reasons
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gaudi_emulator import checks, ops
from gaudi_emulator.card import SIZES, VARIANTS, flag
from gaudi_emulator.device import Device
from gaudi_emulator.ops import Op
from gaudi_emulator.rules import SKIPPED, Site
from gaudi_emulator.tensor import HPU, META, Args, HPUTensor, Kwargs, autocast_lists, cast, is_hpu
from gaudi_emulator.torch_calls import across, replaced, wrapped

CPU = torch.device("cpu")
TRACERS: Any = sys.modules.get("torch._functorch._aot_autograd.graph_compile")  # of newer torch
TENSORIFY = "_apply_tensorify_python_scalars"
# Operators that torch picks on a CPU, or while it traces (in one_hot), where the device has the composite one
STANDS_IN = frozenset({"_scaled_dot_product_flash_attention_for_cpu", "_assert_async"})
ALWAYS_CUT = frozenset("addcmul slice_backward nonzero _unique2 bincount _grouped_mm".split())
INDEX_WRITES = frozenset(
    "index_copy index_put _unsafe_index_put index_add index_fill scatter scatter_add scatter_reduce".split()
)
# What leads from a tensor's new value to its earlier one, besides writes by index
SAME_TENSOR = frozenset("select_scatter slice_scatter view _unsafe_view select slice".split())


class Compiler:
    """The backend `hpu_backend` of one card, for all functions that a program compiles."""

    def __init__(self, card: Device) -> None:
        torch._dynamo.reset()  # what another program compiled
        for name in "card checks device ops recording rules tensor".split():  # not to be traced
            trace_rules.add(f"{__package__}.{name}")
        self.card = card
        self.failed: list[
            tuple[str, Site]
        ] = []  # guards, since the last compilation; the newest first
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
                full = is_full(real)
                with tracing(self.card), config.patch(fail_on_recompile_limit_hit=full):
                    result = function(*args, **kwargs)
                self.need_uncut(graph_break_reasons[known:], flags)
                return result
            except FailOnRecompileLimitHit as error:
                if "fullgraph" in str(error):
                    raise
                return real(*args, **kwargs)  # operator by operator
            except (Unsupported, UserError) as error:  # of a function that is to be one graph
                site = where(getattr(error, "real_stack", None))
                self.card.findings.hit("H090", first_line(error), "error", site)
                raise
            finally:
                self.note_breaks(graph_break_reasons[known:])
                if self.failed:  # a guard failed and nothing was compiled
                    reason, site = self.failed[0]
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
            cause, site = self.failed[0]
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


def is_full(function: Callable[..., Any]) -> bool:
    """Whether dynamo has compiled a function as often as it may."""
    owner: Any = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    if function is nn.Module._call_impl:  # of `module.compile()`
        function = type(owner).forward
    code = getattr(function, "__code__", None)
    return code is not None and len(compiled_of(code)) >= config.recompile_limit


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
    known = autocast_lists(card.flags)
    for node in graph.graph.nodes:
        function = function_called_by(node)
        if function in known.lower | known.float32:
            target = node.target if node.op == "call_function" else function
            node.op, node.target = "call_function", casting(function, target)
    graph.recompile()


def cast_run(real: Any, tracer: Any, node: fx.Node, *given: Any) -> Any:
    """A call as dynamo tries it to know its result's format, which a program may ask for."""
    (args, kwargs), rest = given[:2], given[2:]
    args, kwargs = cast(function_called_by(node), args, kwargs)
    return real(tracer, node, args, kwargs, *rest)


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
            stack.enter_context(wrapped(torch._dynamo.utils, "run_node", cast_run))
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


@register_op_impl(torch.ops.aten.histc.default)
def histc(fake_mode: Any, func: Any, x: Tensor, bins: int = 100, *limits: Any, **named: Any) -> Any:
    """Its shape; the CPU, which torch takes our tensors to be on, has none for integers."""
    return x.new_empty(bins)


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


# What `hpu_backend` does with a traced graph, by release: cuts to eager, and which writes come to be in place. Written
# from descriptions of the bridge's compile backend (dynamo/compile_backend: shared_layer.py, passes.py,
# _passes/reinplace.py). A cut splits the graph: what is before it and after it are launches of their own.


def lower(card: Device, graph: fx.GraphModule) -> tuple[int, int]:
    """Look at a traced graph's operators and do to the graph what the release's passes do.

    Returns: launches of each call, and whole tensors that it copies because they are written by index.
    """
    cuts = [(node, why) for node in operators(graph) if (why := cut(card, node))]
    if cuts and not flag(card.flags, "PT_HPU_USE_EAGER_FALLBACK", True):
        names = ", ".join(sorted({name_of(card, node) for node, _ in cuts}))
        raise AssertionError(f"eager fallback of {names}, and PT_HPU_USE_EAGER_FALLBACK=0")
    launches = launches_of({node for node, _ in cuts}, graph)
    for node, why in cuts:
        card.counts.cuts[name_of(card, node)] += 1
        if why is not FALLBACK:  # a rule of its own
            card.findings.hit("H091", f"{name_of(card, node)}: {why}", site=source(node))
    chains(card, graph)
    return launches, put_in_place(card, graph)


def operators(graph: fx.GraphModule) -> Iterator[fx.Node]:
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            yield node


def name_of(card: Device, node: fx.Node) -> str:
    return ops.op_of(node.target, card.release).name


def values(arguments: Any) -> Any:
    """Arguments of a node, with fake tensors for nodes."""
    return fx.map_arg(arguments, lambda node: node.meta.get("val"))


# Cuts

FALLBACK = "runs on the CPU"


def cut(card: Device, node: fx.Node) -> str:
    """Why an operator is cut out of the graph; empty if it is not."""
    op = ops.op_of(node.target, card.release)
    args, kwargs = values(node.args), values(node.kwargs)
    if op.packet in checks.DYNAMIC:
        card.findings.hit(checks.DYNAMIC[op.packet], op.name, site=source(node))
    if op.packet not in STANDS_IN and (why := checks.falls_back(card, op, args, kwargs)):
        card.counts.fallbacks[op.name] += 1
        card.findings.hit("H040", f"{op.name}: {why}", "error", site=source(node))
        return FALLBACK
    return uncompiled(card, op, args, node.meta.get("val"))


def uncompiled(card: Device, op: Op, args: tuple[Any, ...], result: Any) -> str:
    """Why a native operator is not compiled; empty if it is."""
    if op.packet in ALWAYS_CUT:
        return "not compiled"
    if op.random:
        return "its seed is drawn outside the graph"
    if op.packet == "permute" and result.dtype == torch.int64:
        return "permutes int64"
    if any(isinstance(value, float) and math.isnan(value) for value in args):
        return "NaN as a number"
    if op.packet == "index" and not whole_index(args[1]):
        limited = card.release.partial_index_rank
        if result.dim() > limited or result.dim() != len(args[1]):
            return "an index that leaves a dimension out"
    if op.packet in ("index_put", "_unsafe_index_put", "index_put_"):
        masks = sum(i is not None and i.dtype == torch.bool for i in args[1])
        if masks > 1 or not whole_index(args[1]):
            return "two masks as an index" if masks > 1 else "an index that leaves a dimension out"
    if "scaled_dot_product" in op.packet and any(map(symbolic, args)):
        return "attention over sizes that vary"
    return ""


def whole_index(indices: Any) -> bool:
    return all(index is not None for index in indices)


def symbolic(value: Any) -> bool:
    return isinstance(value, Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape)


def launches_of(cuts: set[fx.Node], graph: fx.GraphModule) -> int:
    """Launches of a call: runs of operators between cuts, in the graph's order, and the cuts."""
    count, inside = len(cuts), False
    for node in operators(graph):
        count += node not in cuts and not inside
        inside = node not in cuts
    return max(count, 1)


# Writes by index


def chains(card: Device, graph: fx.GraphModule) -> None:
    """Report tensors of the caller that are written by index more than once."""
    corrupt = card.release.chains_corrupt and index_copies_in_place(card)
    written: dict[fx.Node, int] = {}
    for node in operators(graph):
        base = root(node)
        packet = plain_packet(node)
        if packet not in INDEX_WRITES or base is None or closing_copy(base) is None:
            continue
        written[base] = written.get(base, 0) + 1
        if written[base] == 2:
            loses = corrupt and packet == "index_copy"
            what = "only the first write lasts" if loses else "the whole tensor is copied for each"
            card.findings.hit("H092", what, "error" if loses else "warn", source(node))


def root(node: Any) -> fx.Node | None:
    """The caller's tensor that a node is a new value of."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if plain_packet(node) not in INDEX_WRITES | SAME_TENSOR:
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.op == "placeholder" else None


def plain_packet(node: fx.Node) -> str:
    target: Any = node.target
    return str(target._schema.name.partition("::")[2]) if hasattr(target, "_schema") else ""


def closing_copy(base: fx.Node) -> fx.Node | None:
    """The copy of a tensor's last value into the caller's."""
    copies = (n for n in base.users if n.target == torch.ops.aten.copy_.default)
    return next((n for n in copies if n.args[0] is base), None)


def index_copies_in_place(card: Device) -> bool:
    return flag(card.flags, "PT_HPU_USE_INPLACE_INDEX_COPY", True)


def put_in_place(card: Device, graph: fx.GraphModule) -> int:
    """Let index copies into the caller's tensors be in place, as the release's pass does; the closing copy goes.

    1.19 does not ask that the closing copy be of this very write: of a chain the first member is put in place and
    what the others wrote is lost; and what the graph reads before it writes it is not put in place. From 1.24 on
    no member of a chain is, nor what is read as it was after its write.

    Returns: writes by index into the caller's tensors that are left, each of which copies its whole tensor.
    """
    writes = [n for n in operators(graph) if plain_packet(n) in INDEX_WRITES and lasts(n)]
    left = len(writes)
    for node in writes:
        closing = fits(card, node)
        if closing is None:
            continue
        left -= 1
        with graph.graph.inserting_before(node):
            write = graph.graph.call_function(torch.ops.aten.index_copy_.default, node.args)
        write.meta = dict(node.meta)
        node.replace_all_uses_with(write)
        graph.graph.erase_node(node)
        closing.replace_all_uses_with(write)
        graph.graph.erase_node(closing)
    graph.recompile()
    return left


def lasts(node: fx.Node) -> bool:
    """Whether what a node writes comes to be in the caller's tensor; else it is a new tensor that the program made."""
    base, reached = root(node), [node]
    for one in reached:
        if plain_packet(one) in INDEX_WRITES | SAME_TENSOR:
            reached += one.users
    return base is not None and closing_copy(base) in reached


def fits(card: Device, node: fx.Node) -> fx.Node | None:
    """The closing copy that goes if an index copy is put in place; None if it is not."""
    base = node.args[0]
    copies = node.target == torch.ops.aten.index_copy.default and index_copies_in_place(card)
    if not copies or not isinstance(base, fx.Node) or base.op != "placeholder":
        return None
    closing = closing_copy(base)
    if closing is None:
        return None
    if card.release.chains_corrupt:
        return closing if len(base.users) == 2 else None
    read_later = any(node < user < closing for user in base.users)
    return closing if closing.args[1] is node and not read_later else None


def watched(card: Device, site: Site, run: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which reports in its first call what it writes of two tensors that share a storage."""
    new = True
    sizes: set[tuple[int, ...]] = set()

    def call(*given: Any) -> Any:
        nonlocal new
        checks.no_bare_meta(given, "a compiled function")
        if varied := tuple(n for n in given if type(n) is int):  # symbols of the graph
            card.counts.recipes += bool(sizes) and varied not in sizes
            sizes.add(varied)
            if len(sizes) > SIZES:
                card.findings.hit("H024", f"compiled inside for {len(sizes)} sizes")
        if not new:
            return run(*given)
        new = False
        storages: dict[int, list[Tensor]] = {}
        for value in (getattr(t, "raw", t) for t in given if isinstance(t, Tensor)):
            known = storages.setdefault(value.untyped_storage().data_ptr(), [])
            if all(value is not other for other in known):
                known.append(value)
        shared = [(t, t._version) for ts in storages.values() if len(ts) > 1 for t in ts]
        result = run(*given)
        if any(tensor._version != before for tensor, before in shared):
            card.findings.hit("H093", f"{len(shared)} tensors", site=site)
        return result

    return call


def source(node: fx.Node) -> Site:
    """Where in the traced code an operator comes from."""
    every = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    places = [place for place in every if not place[0].startswith(SKIPPED)] or every
    return (places[-1][0], int(places[-1][1])) if places else ("unknown", 0)
