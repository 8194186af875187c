"""Intel Gaudi: HPU graphs in lazy mode, `hpu_backend` outside it; or an emulator of its contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lantern_hpu.backends import HOST
from lantern_hpu.backends.base import Backend, Memory, Queue, Tuning, compile_whole
from lantern_hpu.backends.candidates import LACKING, Candidate, outcome
from lantern_hpu.backends.hpu import env as hpu_env
from lantern_hpu.backends.hpu import errors as hpu_errors
from lantern_hpu.backends.hpu.env import ROOT
from lantern_hpu.ops import kernels
from lantern_hpu.ops.kernels import PLAIN, Kernels

if TYPE_CHECKING:
    from gaudi_emulator import Device

# ------------------------------------------------------------------------------------------ dtypes

# Number formats on a Gaudi card; `auto` takes the first.

DTYPES = {
    "bfloat16": "what the matrix engines are made for",
    "float32": "exact comparisons with other devices hold; slower and twice the memory",
    "float16": "from Gaudi 2 on; bfloat16 has the wider range",
}
# An emulated card is there to be compared
EMULATED_DTYPES = {"float32": "an emulated card is held against other devices", **DTYPES}


# ----------------------------------------------------------------------------------------- backend

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
        """Set the flags, then load the software: it reads them while it is imported."""
        self.flags = hpu_env.prepare_flags(self.wanted, self.emulated)
        if self.emulated:
            from gaudi_emulator import emulate

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
            from gaudi_emulator.rehearsal import rehearse

            rehearse(self.card, body, state)

    def kernels(self, choice: str = "auto", dtype: torch.dtype | None = None) -> Kernels:

        super().kernels(choice)
        return hpu_kernels(self) if choice == "auto" else PLAIN

    def compile(self, function: nn.Module) -> Callable[[Any], Tensor]:
        if self.card is not None:
            from gaudi_emulator.compiled import compile_on_host

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


# ----------------------------------------------------------------------------------------- kernels

# Gaudi's fused attention, RMS norm and rotary embedding, for `Kernels`.
#
# Each is used only if it is there and agrees with its plain twin on this card; else the plain one is.


def matmul_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of matmul and softmax, which every release compiles; the signature is `Kernels`'."""
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask  # [R, h, T, S]
    return scores.softmax(-1) @ v


def make_attention(backend: HPUBackend) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    sdpa = backend.part("hpex.kernels").FusedSDPA

    def fused_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        # An autograd function: positions only, and no more of them than release 1.19 has.
        return sdpa.apply(q, k, v, mask, 0.0, False, None, "None", True)

    return fused_sdpa


def make_rms_norm(backend: HPUBackend) -> Callable[[Tensor, Tensor, float], Tensor]:
    norm = backend.part("hpex.normalization").FusedRMSNorm

    def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.apply(x, weight.to(x.dtype), eps)

    return fused_rms_norm


def make_rotate(backend: HPUBackend) -> Callable[[Tensor, Tensor, bool], Tensor]:
    module = backend.part("hpex.kernels")
    apply, mode = module.apply_rotary_pos_emb, module.RotaryPosEmbeddingMode

    def fused_rope(x: Tensor, rope: Tensor, interleaved: bool) -> Tensor:
        angles = rope[:, :, None]  # [R, T, 1, 2, hd / 2]
        # The kernel wants each angle at both features of its pair.
        if interleaved:
            wide = torch.stack([angles, angles], -1).flatten(-2)
        else:
            wide = torch.cat([angles, angles], -1)
        kind = mode.PAIRWISE if interleaved else mode.BLOCKWISE
        return apply(x, wide[..., 0, :], wide[..., 1, :], None, 0, kind)

    return fused_rope


def hpu_candidates(backend: HPUBackend) -> dict[str, Candidate]:
    """All fused kernels, whether or not they are in this release and agree with the plain ones.

    A card multiplies in lower precision inside of attention; norm and rotary embedding have no products of matrices.
    """
    r, h, t, s, hd = 2, 4, 3, 8, 64
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def candidate(
        make: Callable[[HPUBackend], Callable[..., Tensor]],
        plain: Callable[..., Tensor],
        tolerance: float,
        *calls: tuple[Any, ...],
    ) -> Candidate:
        with torch.no_grad():
            wanted = [outcome(plain, call) for call in calls]
        moved = [
            tuple(x.to(backend.device) if isinstance(x, Tensor) else x for x in call)
            for call in calls
        ]
        return Candidate(lambda: make(backend), list(zip(moved, wanted, strict=True)), tolerance)

    looks = (some(r, h, t, hd), some(r, h, s, hd), some(r, h, s, hd), some(r, 1, t, s))
    pairs = [(some(r, t, h, hd), some(r, t, 2, hd // 2), kind) for kind in (True, False)]
    norm = (some(r, t, hd), some(hd), 1e-5)
    return {
        "attention": candidate(make_attention, kernels.attention, 1e-2, looks),
        "rms_norm": candidate(make_rms_norm, kernels.rms_norm, 2e-3, norm),
        "rotate": candidate(make_rotate, kernels.rotate, 1e-3, *pairs),
    }


def hpu_kernels(backend: HPUBackend) -> Kernels:
    """The fused kernels that are here and agree with the plain ones."""
    served = Kernels(attention=matmul_attention)
    for name, candidate in hpu_candidates(backend).items():
        with suppress(*LACKING):
            if candidate.agrees():
                served = replace(served, **{name: candidate.make()})
    return served
