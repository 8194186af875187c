"""An emulator of Gaudi's contract, so that wrong code fails on a laptop.

    with emulate() as card:
        x = torch.arange(4, device="hpu")
        ...
    print(card.findings.sorted(), card.counts)

It is written from the public sources of the PyTorch bridge, release 1.19, and Habana's documentation. Tensors
say `hpu` and keep their numbers on the CPU; lazy graphs, recipes, HPU graphs, int32 storage, fallbacks, host
reads and the metrics follow the bridge. It knows nothing of speed, fusion, bfloat16 rounding, tie order or
newer bridges: what passes here is contract-checked, not tested on a Gaudi.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from lantern_hpu.backends.hpu_emulator.device import Counts, Device, current, installed, listening
from lantern_hpu.backends.hpu_emulator.graphs import abandoned_on_error
from lantern_hpu.backends.hpu_emulator.habana import dump_asked_for, modules
from lantern_hpu.backends.hpu_emulator.modes import Functions, Operators
from lantern_hpu.backends.hpu_emulator.patches import overwrites
from lantern_hpu.backends.hpu_emulator.rules import RULES, Finding, Rule
from lantern_hpu.backends.hpu_emulator.scope import CustomOperators
from lantern_hpu.backends.hpu_emulator.tensor import DEVICE
from lantern_hpu.backends.hpu_env import ROOT

__all__ = ["ROOT", "RULES", "Counts", "Device", "Finding", "Rule", "current", "emulate"]


@contextmanager
def emulate(
    lazy: bool = True, flags: Mapping[str, str] | None = None, importable: bool = False
) -> Iterator[Device]:
    """Install an emulated card in this thread.

    Args:
        lazy: PT_HPU_LAZY_MODE.
        flags: the other flags of the bridge.
        importable: whether `import habana_frameworks` works meanwhile. Libraries take that for a Gaudi, so
            this is for foreign scripts alone.
    """
    card = Device(lazy, flags)
    with ExitStack() as stack:
        stack.enter_context(installed(card))
        card.modules = modules(card)
        stack.enter_context(abandoned_on_error(card))
        stack.enter_context(device_module(card.modules[f"{ROOT}.torch.hpu"]))
        stack.enter_context(overwrites(card))
        if importable:
            stack.enter_context(imported(card))
        card.listen(Functions(card), Operators(card))
        stack.callback(card.deaf)
        yield card
        dump_asked_for(card)


@contextmanager
def device_module(module: ModuleType) -> Iterator[None]:
    """`torch.hpu`, as the bridge registers it."""
    name = f"torch.{DEVICE}"
    torch.hpu = sys.modules[name] = module  # type: ignore[attr-defined]
    operators: Any = torch.ops
    operators.hpu = CustomOperators()
    try:
        yield
    finally:
        del torch.hpu, sys.modules[name]  # type: ignore[attr-defined]
        del operators.hpu


@contextmanager
def imported(card: Device) -> Iterator[None]:
    """The modules under their names in `sys.modules`, and `hpu_backend` for `torch.compile`."""
    real = torch.compile

    def compile(model: Any = None, *args: Any, backend: Any = "inductor", **options: Any) -> Any:
        if backend != "hpu_backend":
            return real(model, *args, backend=backend, **options)
        if model is None:
            return lambda function: compile(function, backend=backend, **options)
        return compiled_for(card, model)

    sys.modules.update(card.modules)
    torch.compile = compile
    try:
        yield
    finally:
        torch.compile = real
        for name in card.modules:
            sys.modules.pop(name, None)


def compiled_for(card: Device, model: Any) -> Any:
    """A user's function compiled with `hpu_backend`: in lazy mode that does nothing, and says so when it is called."""

    @wraps(model)
    def call(*args: Any, **kwargs: Any) -> Any:
        if card.lazy:
            card.findings.hit("H080", "torch.compile with hpu_backend in lazy mode", "error")
        return model(*args, **kwargs)  # operator by operator

    return call


READ_AT_EACH_CALL = ("PT_HPUGRAPH_DISABLE_TENSOR_CACHE",)  # hpu/graphs.py:594


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Flags that come too late, and forks."""
    if event not in ("os.putenv", "os.fork") or not listening():
        return
    if event == "os.fork":
        current().findings.hit("H082")
        return
    name = os.fsdecode(arguments[0])
    if name.startswith("PT_") and name not in READ_AT_EACH_CALL:
        current().findings.hit("H081", name)


sys.addaudithook(audit)
