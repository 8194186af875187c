"""An emulator of Gaudi's contract, so that wrong code fails on a laptop.

    with emulate() as card:
        x = torch.arange(4, device="hpu")
        ...
    print(card.findings.sorted(), card.counts)

It is written from the public sources of the PyTorch bridge, releases 1.19 and 1.24 (`releases.py`; 1.24 unless
asked otherwise), and Habana's documentation. Tensors say `hpu` and keep their numbers on the CPU; lazy graphs,
recipes, HPU graphs, int32 storage, fallbacks, host reads and the metrics follow the bridge. It knows nothing of
speed, fusion, bfloat16 rounding or tie order: what passes here is contract-checked, not tested on a Gaudi.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from gaudi_emulator.device import Counts, Device, as_current, current, listening
from gaudi_emulator.graphs import abandoned_on_error
from gaudi_emulator.habana import dump_asked_for, modules
from gaudi_emulator.lint.rules import RULES, Finding, Rule
from gaudi_emulator.modes import Functions, Operators
from gaudi_emulator.patches import overwrites, replaced
from gaudi_emulator.scope import CustomOperators
from gaudi_emulator.tensor import DEVICE
from lantern_hpu.backends.hpu.env import LAZY_MODE, ROOT, Release

if TYPE_CHECKING:
    from gaudi_emulator.tracing import Compiler

__all__ = ["ROOT", "RULES", "Counts", "Device", "Finding", "Rule", "current", "emulate"]


@contextmanager
def emulate(
    lazy: bool = True,
    flags: Mapping[str, str] | None = None,
    importable: bool = False,
    release: Release | None = None,
) -> Iterator[Device]:
    """Install an emulated card in this thread.

    Args:
        lazy: PT_HPU_LAZY_MODE.
        flags: the other flags of the bridge.
        importable: whether `import habana_frameworks` works meanwhile. Libraries take that for a Gaudi, so
            this is for foreign scripts alone.
        release: of the bridge; `releases.emulated()` if not given.
    """
    card = Device(lazy, flags, release)
    with ExitStack() as stack:
        stack.enter_context(as_current(card))
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


class Importer(MetaPathFinder, Loader):
    """Finds the modules of the bridge; their import is when flags are read."""

    def __init__(self, card: Device) -> None:
        self.card = card

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        known = name in self.card.modules
        return ModuleSpec(name, self, origin="emulated", is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.card.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        if self.card.loaded or module.__name__ == ROOT:
            return
        self.card.loaded = True
        self.card.read_flags({n: v for n, v in os.environ.items() if n.startswith("PT_")})
        wanted = os.environ.get(LAZY_MODE)
        if wanted is not None and (wanted != "0") != self.card.lazy:
            self.card.findings.hit("H080", f"{LAZY_MODE}={wanted}, and this is the other mode")


@contextmanager
def imported(card: Device) -> Iterator[None]:
    """`import habana_frameworks` works, and `torch.compile` knows `hpu_backend`."""

    def compiling(real: Any) -> Any:
        def compile(model: Any = None, **options: Any) -> Any:
            if options.get("backend") != "hpu_backend":
                return real(model, **options)
            if model is None:
                return lambda function: compile(function, **options)
            return compiler_of(card).compile(model, **traced_as(card.release, **options))

        return compile

    importer, card.loaded = Importer(card), False
    finders, modules = (
        sys.meta_path,
        sys.modules,
    )  # where the interpreter ends, sys has neither any more
    finders.insert(0, importer)
    try:
        with replaced(torch, "compile", compiling):
            yield
    finally:
        finders.remove(importer)
        for name in card.modules:
            modules.pop(name, None)


def compiler_of(card: Device) -> Compiler:
    """One for a card: functions that share code share what was compiled of it."""
    if card.compiler is None:
        with card.aside():
            from gaudi_emulator.tracing import Compiler

            card.compiler = Compiler(card)
    return card.compiler


def traced_as(
    release: Release,
    backend: str,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: Any = None,
    **rest: Any,
) -> dict[str, Any]:
    """What of the arguments of `torch.compile` the tracers care for."""
    for name in options or ():
        if name in release.unknown_options:
            raise RuntimeError(f"hpu_backend of {release} has no option {name!r}")
    fixed = bool((options or {}).get("force_static_compile"))
    return {"fullgraph": fullgraph, "dynamic": False if fixed else dynamic}


READ_AT_EACH_CALL = ("PT_HPUGRAPH_DISABLE_TENSOR_CACHE",)  # hpu/graphs.py:594


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Flags that come too late, and forks."""
    if event not in ("os.putenv", "os.fork") or not listening():
        return
    if event == "os.fork":
        current().findings.hit("H082")
        return
    name = os.fsdecode(arguments[0])
    late = current().loaded or autoloaded(current())
    if late and name.startswith("PT_") and name not in READ_AT_EACH_CALL:
        current().findings.hit("H081", name)


def autoloaded(card: Device) -> bool:
    """Whether the program's `import torch`, by the names of the file that is running, has loaded the bridge."""
    kept_away = card.lazy or os.environ.get("PT_HPU_AUTOLOAD") == "0"
    if not card.release.autoloads or kept_away:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("torch") is torch


sys.addaudithook(audit)
