"""`torch.compile(backend="hpu_backend")` of the emulator: dynamo and AOT autograd are the real ones.

Dynamo cannot trace emulated tensors, so the function is traced on the CPU tensors behind them, with the
emulator out of the way; the graph's operators are then held against the device's list. Storages are
shared: what the function writes lands in the emulated state.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from lantern_hpu.backends.hpu.emulator import checks, ops
from lantern_hpu.backends.hpu.emulator.device import Device
from lantern_hpu.backends.hpu.emulator.tensor import HPUTensor

# Operators that torch picks on a CPU where the device has the composite one
STANDS_IN = frozenset({"_scaled_dot_product_flash_attention_for_cpu"})


def on_host(value: Any) -> Any:
    """A module or dataclass with the CPU tensors behind its device tensors; nothing is copied."""
    memo: dict[int, Any] = {}
    for tensor in tensors_of(value):
        raw: Tensor = tensor.raw
        if isinstance(tensor, nn.Parameter):
            raw = nn.Parameter(raw, requires_grad=False)
        memo[id(tensor)] = raw
    return copy.deepcopy(value, memo)


def tensors_of(value: Any) -> list[HPUTensor]:
    """Device tensors of a module, or of a dataclass and what it holds."""
    if isinstance(value, nn.Module):
        tensors: list[Any] = [*value.parameters(), *value.buffers()]
    elif is_dataclass(value):
        tensors = tensors_of(tuple(getattr(value, field.name) for field in fields(value)))
    elif isinstance(value, tuple):
        tensors = [t for part in value for t in tensors_of(part)]
    else:
        tensors = [value]
    return [tensor for tensor in tensors if isinstance(tensor, HPUTensor)]


def compile_on_host(card: Device, function: nn.Module) -> Callable[[Any], Tensor]:
    """The function compiled whole; a call takes a state of device tensors."""
    if card.lazy:
        card.findings.hit("H080", "torch.compile with hpu_backend in lazy mode", "error")
        raise RuntimeError("hpu_backend needs PT_HPU_LAZY_MODE=0")
    backend = aot_autograd(fw_compiler=lambda graph, inputs: as_it_is(card, graph))
    compiled = torch.compile(on_host(function), backend=backend, fullgraph=True, dynamic=False)
    twins: dict[int, Any] = {}
    held: list[Any] = []  # states stay alive, so that their ids stay theirs

    def call(state: Any) -> Tensor:
        if id(state) not in twins:
            twins[id(state)] = on_host(state)
            held.append(state)
        with card.aside():
            result: Tensor = compiled(twins[id(state)])
        card.counts.launches += 1
        card.counts.graphs["launches"] += 1
        card.earn()
        return card.new(result)

    return call


def as_it_is(card: Device, graph: fx.GraphModule) -> Callable[..., Any]:
    """A compiled graph, looked at and counted."""
    card.counts.recipes += 1
    if card.warm:
        card.counts.recompiles += 1
        card.findings.hit("H020", "compiled after warm-up")
    look_at(card, graph)
    return graph.forward


def look_at(card: Device, graph: fx.GraphModule) -> None:
    """Check a compiled graph's operators."""
    for node in graph.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        op = ops.describe(node.target, card.release)
        args = fx.map_arg(node.args, lambda n: n.meta.get("val"))
        kwargs = fx.map_arg(node.kwargs, lambda n: n.meta.get("val"))
        native = op.native or op.packet in STANDS_IN
        if not native or checks.falls_back(card, op, args, kwargs):
            card.counts.fallbacks[op.name] += 1
            card.findings.hit("H040", op.name, "error", site=source(node))
        if op.packet in checks.DYNAMIC:
            card.findings.hit(checks.DYNAMIC[op.packet], op.name, site=source(node))


def source(node: fx.Node) -> tuple[str, int]:
    """Where in the traced code an operator comes from."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    return (places[-1][0], int(places[-1][1])) if places else ("unknown", 0)
