"""An emulated card's life: put in place, loaded by an import of the vendor's package, taken away."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from gaudi_emulator.device import Device, as_current, current, listening
from gaudi_emulator.graphs import abandoned_on_error
from gaudi_emulator.habana import modules
from gaudi_emulator.releases import (
    DEFAULT,
    LAZY_MODE,
    ROOT,
    Release,
    current_release,
    release_named,
)
from gaudi_emulator.scope import CustomOperators
from gaudi_emulator.tensor import DEVICE, tensors_in
from gaudi_emulator.torch_calls import heard, overwrites, wrapped

if TYPE_CHECKING:
    from gaudi_emulator.compiler import Compiler

VENDOR = Path(__file__).parent / "vendor"  # `habana_frameworks`, and a distribution a release
SHARED = "PYTHONPATH"  # by which processes that this one starts find them
MODULE = f"torch.{DEVICE}"


@contextmanager
def emulated(
    release: str | None = None, lazy: bool | None = None, flags: Mapping[str, str] | None = None
) -> Iterator[Device]:
    """See `gaudi_emulator.emulate`."""
    with same_process(), ExitStack() as stack:
        place_vendor(release)
        os.environ.update(flags or {})
        if lazy is not None:
            os.environ[LAZY_MODE] = str(int(lazy))
        card = stack.enter_context(as_current(Device(current_release(), lazy)))
        card.modules = modules(card)
        stack.enter_context(abandoned_on_error(card))
        show_device_module(card.modules[f"{ROOT}.torch.hpu"])
        stack.enter_context(overwrites(card))
        stack.enter_context(wrapped(torch, "compile", partial(compile_for, card)))
        stack.enter_context(wrapped(threading.Thread, "start", partial(start, card)))
        stack.enter_context(heard(card))
        yield card


@contextmanager
def same_process() -> Iterator[None]:
    """The environment, the path and the vendor's modules are afterwards what they were."""
    environment, path, loaded = dict(os.environ), sys.path, sys.modules
    outer = vendor_modules() if listening() else []  # of a card around this one
    before = {name: loaded.pop(name) for name in outer}
    sys.path = [*path]
    try:
        yield
    finally:
        sys.path = path
        for name in {*os.environ} - {*environment}:
            del os.environ[name]
        os.environ.update({n: v for n, v in environment.items() if os.environ.get(n) != v})
        for name in vendor_modules():
            del loaded[name]
        loaded.update(before)
        for owner in (torch, torch.ops):
            vars(owner).pop(DEVICE, None)
        if MODULE in before:
            show_device_module(before[MODULE])


def vendor_modules() -> list[str]:
    """The loaded modules that the bridge brings."""
    return [name for name in sys.modules if name.partition(".")[0] == ROOT or name == MODULE]


def place_vendor(release: str | None) -> None:
    """The stand-in comes first on the path, here and in processes that this one starts.

    Args:
        release: without one, that of the process that started this one if it had one.
    """
    known = os.environ.get(SHARED, "").split(os.pathsep)
    if release is None and str(VENDOR) in known:  # pytest-xdist gives its workers another path
        inherited = [folder for folder in known if folder.startswith(str(VENDOR))]
        sys.path[:0] = [folder for folder in inherited if folder not in sys.path]
        return
    name = release_named(release or DEFAULT.name).name
    mine = [str(VENDOR), str(VENDOR / f"bridge-{name}")]
    sys.path[:0] = mine
    os.environ[SHARED] = os.pathsep.join([*mine, *filter(None, known)])


def show_device_module(module: ModuleType) -> None:
    """`torch.hpu` and `torch.ops.hpu`, as the bridge registers them."""
    sys.modules[MODULE] = vars(torch)[DEVICE] = module
    vars(torch.ops)[DEVICE] = CustomOperators()


def load() -> None:
    """An import of `habana_frameworks.torch`: flags are read, then the modules are there."""
    card = current()
    if not card.loaded:
        card.load()
        card.modules = modules(card)
        show_device_module(card.modules[f"{ROOT}.torch.hpu"])
    vendor = f"{ROOT}.torch"
    if vendor in sys.modules:
        card.modules[vendor].__path__ = sys.modules[vendor].__path__  # `gpu_migration` stands there
    sys.modules.update({name: m for name, m in card.modules.items() if name != ROOT})
    if distributed.is_available() and "hccl" not in distributed.Backend.backend_list:
        # Collectives of cards are those of their processes' CPU tensors
        over_gloo = distributed.ProcessGroupGloo
        distributed.Backend.register_backend("hccl", over_gloo, devices=["cpu", DEVICE])


def start(card: Device, real: Any, thread: threading.Thread) -> None:
    """Threads call the card too: torch's modes are of one thread each."""
    run = thread.run

    def run_heard() -> None:
        with heard(card):
            run()

    thread.run = run_heard  # type: ignore[method-assign]
    real(thread)


def compile_for(card: Device, real: Any, model: Any = None, **options: Any) -> Any:
    """`torch.compile`, which knows `hpu_backend`."""
    if model is None:
        return lambda function: compile_for(card, real, function, **options)
    if options.get("backend", "inductor") == "inductor":
        return refused_with_tensors(card, real(model, **options))
    if options["backend"] != "hpu_backend":
        return real(model, **options)
    return compiler_of(card).compile(model, **traced_as(card.release, **options))


def refused_with_tensors(card: Device, made: Any) -> Any:
    """What inductor compiled: good for the host, not for the device."""
    run = made.forward if isinstance(made, torch.nn.Module) else made

    @wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        if tensors_in((args, kwargs)):
            card.findings.hit("H086", "inductor")
        return run(*args, **kwargs)

    if not isinstance(made, torch.nn.Module):
        return call
    made.forward = call
    return made


def compiler_of(card: Device) -> Compiler:
    """One for a card: functions that share code share what was compiled of it."""
    if card.compiler is None:
        with card.aside():
            from gaudi_emulator.compiler import Compiler

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
    given = dict(options or {})
    for name in given:
        if name not in release.backend_options:
            raise RuntimeError(f"hpu_backend of {release} has no option {name!r}")
    fixed = bool(given.get("force_static_compile"))
    heard = {  # as the flags that say the same for all functions
        f"PT_HPU_{name.upper()}": str(int(given[name]))
        for name in ("use_eager_fallback", "use_inplace_index_copy")
        if name in given
    }
    return {"fullgraph": fullgraph, "dynamic": False if fixed else dynamic, "flags": heard}


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
    if not card.autoloads:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("torch") is torch


sys.addaudithook(audit)
