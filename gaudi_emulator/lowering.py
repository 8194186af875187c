"""What `hpu_backend` does with a traced graph, by release: cuts to eager, and which writes come to be in place.

Written from descriptions of the bridge's compile backend (dynamo/compile_backend: shared_layer.py, passes.py,
_passes/reinplace.py). A cut splits the graph: what is before it and after it are launches of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from gaudi_emulator import ops
from gaudi_emulator.device import SIZES, Device, flag
from gaudi_emulator.lint import checks
from gaudi_emulator.ops import Op

# Operators that torch picks on a CPU, or while it traces (in one_hot), where the device has the composite one
STANDS_IN = frozenset({"_scaled_dot_product_flash_attention_for_cpu", "_assert_async"})
ALWAYS_CUT = frozenset("addcmul slice_backward nonzero _unique2 bincount".split())
INDEX_WRITES = frozenset(
    "index_copy index_put _unsafe_index_put index_add index_fill scatter scatter_add scatter_reduce".split()
)
# What leads from a tensor's new value to its earlier one, besides writes by index
SAME_TENSOR = frozenset("select_scatter slice_scatter view _unsafe_view select slice".split())
Site = tuple[str, int]


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
    what the others wrote is lost. From 1.24 on no member of a chain is.

    Returns: writes by index that are left, each of which copies its whole tensor.
    """
    writes = [n for n in operators(graph) if plain_packet(n) in INDEX_WRITES and root(n)]
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


def fits(card: Device, node: fx.Node) -> fx.Node | None:
    """The closing copy that goes if an index copy is put in place; None if it is not."""
    base = node.args[0]
    copies = node.target == torch.ops.aten.index_copy.default and index_copies_in_place(card)
    if not copies or not isinstance(base, fx.Node) or base.op != "placeholder":
        return None
    closing = closing_copy(base)
    if closing is None or len(base.users) != 2:
        return None
    return closing if card.release.chains_corrupt or closing.args[1] is node else None


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
    places = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    return (places[-1][0], int(places[-1][1])) if places else ("unknown", 0)
