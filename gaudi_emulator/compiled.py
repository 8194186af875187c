"""`torch.compile(backend="hpu_backend")` of the emulator: dynamo and AOT autograd are the real ones.

Dynamo cannot trace emulated tensors, so the function is traced on the CPU tensors behind them, with the
emulator out of the way; the graph's operators are then held against the device's list. Storages are
shared: what the function writes lands in the emulated state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from gaudi_emulator.device import Device
from gaudi_emulator.lowering import lower, watched
from gaudi_emulator.tensor import HPUTensor


def host_twin(value: Any) -> Any:
    """A module or dataclass with the CPU tensors behind its device tensors; nothing is copied."""
    memo: dict[int, Any] = {}
    for tensor in device_tensors(value):
        raw: Tensor = tensor.raw
        if isinstance(tensor, nn.Parameter):
            raw = nn.Parameter(raw, requires_grad=False)
        memo[id(tensor)] = raw
    return copy.deepcopy(value, memo)


def device_tensors(value: Any) -> list[HPUTensor]:
    """Device tensors of a module, or of a dataclass and what it holds."""
    if isinstance(value, nn.Module):
        tensors: list[Any] = [*value.parameters(), *value.buffers()]
    elif is_dataclass(value):
        tensors = device_tensors(tuple(getattr(value, field.name) for field in fields(value)))
    elif isinstance(value, tuple):
        tensors = [t for part in value for t in device_tensors(part)]
    else:
        tensors = [value]
    return [tensor for tensor in tensors if isinstance(tensor, HPUTensor)]


def compile_on_host(card: Device, function: nn.Module) -> Callable[[Any], Tensor]:
    """The function compiled whole; a call takes a state of device tensors."""
    if card.lazy:
        card.findings.hit("H080", "torch.compile with hpu_backend in lazy mode", "error")
        raise RuntimeError("hpu_backend needs PT_HPU_LAZY_MODE=0")
    traced = aot_autograd(
        fw_compiler=lambda graph, inputs: as_it_is(card, graph), keep_inference_input_mutations=True
    )
    site = source_of(function)

    def backend(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return watched(card, site, traced(graph, inputs))

    compiled = torch.compile(host_twin(function), backend=backend, fullgraph=True, dynamic=False)
    twins: dict[int, Any] = {}
    held: list[Any] = []  # states stay alive, so that their ids stay theirs

    def call(state: Any) -> Tensor:
        if id(state) not in twins:
            twins[id(state)] = host_twin(state)
            held.append(state)
        with card.aside():
            result: Tensor = compiled(twins[id(state)])
        return card.new(result)

    return call


def source_of(function: nn.Module) -> tuple[str, int]:
    """Where a module's forward begins."""
    code = type(function).forward.__code__
    return code.co_filename, code.co_firstlineno


def as_it_is(card: Device, graph: fx.GraphModule) -> Callable[..., Any]:
    """A compiled graph, counted and lowered; each call launches its parts."""
    card.counts.recipes += 1
    if card.warm:
        card.counts.recompiles += 1
        card.findings.hit("H020", "compiled after warm-up")
    lowered = lower(card, graph)

    def launch(*values: Any) -> Any:
        card.launch(lowered.launches, lowered.whole_copies)
        return graph.forward(*values)

    return launch
