"""Intel Gaudi: HPU graphs in lazy mode, `hpu_backend` outside it; or an emulator of its contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lantern_hpu.backends import HOST
from lantern_hpu.backends.base import Backend, Memory, Queue, Tuning, compile_whole
from lantern_hpu.backends.hpu import env as hpu_env
from lantern_hpu.backends.hpu import errors as hpu_errors
from lantern_hpu.backends.hpu.dtypes import DTYPES, EMULATED_DTYPES
from lantern_hpu.backends.hpu.env import ROOT
from lantern_hpu.ops.kernels import PLAIN, Kernels

if TYPE_CHECKING:
    from lantern_hpu.backends.hpu.emulator import Device

LAZY_MODES = {
    "hpu_graph": "the whole step is one HPU graph: nothing of the host is left in it",
    "hpu_graph_split": "two HPU graphs a step, draft and the rest, for a step too large for one",
}
OTHER_MODES = {
    "compile": "torch.compile with hpu_backend; needs PT_HPU_LAZY_MODE=0",
    "eager": "one operator at a time: for finding faults; needs PT_HPU_LAZY_MODE=0",
}


class HPUQueue(Queue):
    """Lazy mode gathers operations into graphs; the bridge and the emulator count them."""

    def __init__(self, backend: HPUBackend) -> None:
        self.backend = backend

    def flush(self) -> None:
        """End the graph that is being gathered; inside a capture, cut it in two."""
        if self.backend.lazy:
            self.backend.part("core").mark_step()

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        card = self.backend.card
        if card is not None:
            card.warm = False
        yield
        self.backend.synchronize()
        if card is not None:
            card.warmed_up()

    def counters(self) -> dict[str, int]:
        """From the bridge's metrics; the emulator counts more."""
        self.backend.synchronize()  # compilations may still be under way
        metric = self.backend.part("hpu.metrics").metric_global
        counted = {
            "graph_compilations": int(metric("graph_compilation").stats()[0][1]),
            "cpu_fallbacks": int(metric("cpu_fallback").stats()[0][1]),
        }
        if self.backend.card is not None:
            counts, findings = self.backend.card.counts, self.backend.card.findings
            counted |= {
                "graph_launches": counts.graphs["launches"],
                "device_reads": counts.host_syncs.total(),
                "uploads": counts.uploads,
                "lint_errors": findings.hits("error"),
                "lint_warnings": findings.hits("warn"),
            }
        return counted


class HPUBackend(Backend):
    """One Gaudi card of this process, as index 0."""

    name = "hpu"
    device = torch.device("hpu")

    def __init__(self, graphs: str = "auto", emulate: bool = False) -> None:
        self.wanted, self.emulated = graphs, emulate
        self.flags: hpu_env.Flags | None = None
        self.stack = ExitStack()
        self.card: Device | None = None  # the emulated one
        self.modules: dict[str, ModuleType] = {}
        if emulate:
            self.open()

    # Life

    def open(self) -> None:
        """Set the flags, then load the software: it reads them while it is imported.

        Raises:
            DeviceError: the flags contradict the graph mode, or would end the process.
            ImportError: the software does not fit the torch that is installed.
        """
        self.flags = hpu_env.prepare_flags(self.wanted, self.emulated)
        if self.emulated:
            from lantern_hpu.backends.hpu.emulator import emulate

            flags = self.flags.chosen | self.flags.respected
            self.card = self.stack.enter_context(emulate(self.flags.lazy, flags))
            self.modules = self.card.modules
        else:
            if why := hpu_env.unfit_plugin(self.flags.lazy):
                raise ImportError(why)
            for name in ("torch", "torch.core", "torch.hpu"):
                self.modules[f"{ROOT}.{name}"] = import_module(f"{ROOT}.{name}")

    def close(self) -> None:
        self.stack.close()

    def part(self, name: str) -> ModuleType:
        """A module of habana_frameworks.torch, the real one or the emulator's."""
        full = f"{ROOT}.torch.{name}"
        if full not in self.modules:
            if self.emulated:
                raise ImportError(full)
            self.modules[full] = import_module(full)
        return self.modules[full]

    @property
    def dtypes(self) -> dict[str, str]:  # type: ignore[override]
        return EMULATED_DTYPES if self.emulated else DTYPES

    @cached_property
    def tuning(self) -> Tuning:
        """An emulated card's arithmetic is the CPU's, and so are its measured defaults."""
        return Tuning(self.name, self.dtypes, measured_as=HOST if self.emulated else self.name)

    @cached_property
    def queue(self) -> HPUQueue:
        return HPUQueue(self)

    @property
    def hpu(self) -> ModuleType:
        return self.part("hpu")

    @property
    def lazy(self) -> bool:
        return self.flags is None or self.flags.lazy

    @property
    def graph_modes(self) -> dict[str, str]:  # type: ignore[override]
        """Lazy mode is settled when the software is loaded, and with it which modes there are."""
        if self.flags is None:
            return LAZY_MODES | OTHER_MODES
        return LAZY_MODES if self.flags.lazy else OTHER_MODES

    def available(self) -> tuple[bool, str]:
        if self.emulated:
            return True, "emulated: contract-checked, nothing runs on a Gaudi"
        reasons = []
        if hpu_env.plugin_folder() is not None:
            try:
                self.open()
                if self.hpu.is_available() and self.hpu.device_count():
                    why = self.flags.why if self.flags else ""
                    return True, f"{self.hpu.get_device_name()}, {why}"
                reasons.append(f"{ROOT} finds no card")
            except (ImportError, RuntimeError, AssertionError, OSError) as error:
                known = hpu_errors.explain_gaudi(error)
                reasons.append(str(known) if known else f"{type(error).__name__}: {error}")
        # Only now: the checks ask hl-smi, which a card that works need not wait for.
        missing = [check for check in hpu_env.checks() if not check.ok]
        return False, "; ".join([*reasons, *(f"{c.name}: {c.detail}" for c in missing)])

    # What the device does

    def synchronize(self) -> None:
        self.hpu.synchronize()

    def memory(self, reset_peak: bool = False) -> Memory:
        free, total = self.hpu.mem_get_info()
        memory = Memory(total, free, self.hpu.max_memory_allocated())
        if reset_peak:
            self.hpu.reset_peak_memory_stats()
        return memory

    def rehearse(self, body: Callable[[], object], state: Callable[[], dict[str, Tensor]]) -> None:
        """Before a capture: on an emulated card that is to tell, what of the function would be baked in."""
        if self.card is not None:
            from lantern_hpu.backends.hpu.emulator.rehearsal import rehearse

            rehearse(self.card, body, state)

    def kernels(self, choice: str = "auto", dtype: torch.dtype | None = None) -> Kernels:
        from lantern_hpu.backends.hpu.kernels import hpu_kernels

        super().kernels(choice)
        return hpu_kernels(self) if choice == "auto" else PLAIN

    def compile(self, function: nn.Module) -> Callable[[Any], Tensor]:
        if self.card is not None:
            from lantern_hpu.backends.hpu.emulator.compiled import compile_on_host

            return compile_on_host(self.card, function)
        return compile_whole(function, "hpu_backend")

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, AssertionError) as error:
            known = hpu_errors.explain_gaudi(error)
            if known is None:
                raise
            raise known from error

    def describe(self) -> dict[str, object]:
        flags = self.flags.chosen | self.flags.respected if self.flags else {}
        return {
            "device": "hpu",
            "emulated": self.emulated,
            "card": self.hpu.get_device_name() if self.modules else None,
            "torch": torch.__version__,
            "plugin": f"emulator of {self.card.release}"
            if self.card is not None
            else hpu_env.version_of(hpu_env.PLUGIN),
            "lazy": self.lazy,
            "flags": {name: hpu_env.without_home(value) for name, value in flags.items()},
        }
