"""Intel Gaudi: HPU graphs in lazy mode, `hpu_backend` outside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.backends import DraftingDefaults
from lantern_hpu.backends.base import (
    LACKING,
    Backend,
    Candidate,
    Memory,
    Transfers,
    compile_whole,
    listed_words,
    outcome,
)
from lantern_hpu.backends.hpu import env as hpu_env
from lantern_hpu.backends.hpu import errors as hpu_errors
from lantern_hpu.backends.hpu.env import ROOT
from lantern_hpu.errors import words
from lantern_hpu.ops import kernels
from lantern_hpu.ops.kernels import Kernels, Sizes

MASK_BYTES = 2**31  # FusedSDPA wraps in a larger mask (vllm-gaudi 1749)
KEPT, NODES = 320, 26  # positions and tree nodes that kernels are judged with

DTYPES = {
    "bfloat16": "what the matrix engines are made for",
    "float32": "exact comparisons with other devices hold; slower and twice the memory",
    "float16": "from Gaudi 2 on; bfloat16 has the wider range",
}
LAZY_MODES = {
    "hpu_graph": "the whole step is one HPU graph: nothing of the host is left in it",
    "hpu_graph_split": "two HPU graphs a step, draft and the rest, for a step too large for one",
}
OTHER_MODES = {
    "compile": "torch.compile with hpu_backend; needs PT_HPU_LAZY_MODE=0",
    "compile_layers": "each layer by itself, for a step too large for one graph; needs PT_HPU_LAZY_MODE=0",
    "eager": "one operator at a time: for finding faults; needs PT_HPU_LAZY_MODE=0",
}


class HPUTransfers(Transfers):
    """Lazy mode gathers operations into graphs; the bridge counts them."""

    def __init__(self, backend: HPUBackend) -> None:
        self.backend = backend

    def flush(self) -> None:
        """End the graph that is being gathered; inside a capture, cut it in two."""
        if self.backend.lazy:
            self.backend.part("core").mark_step()

    def counters(self) -> dict[str, int]:
        """From the bridge's metrics."""
        self.backend.synchronize()  # compilations may still be under way
        metric = self.backend.part("hpu.metrics").metric_global
        return {
            "graph_compilations": int(metric("graph_compilation").stats()[0][1]),
            "cpu_fallbacks": int(metric("cpu_fallback").stats()[0][1]),
        }


class HPUBackend(Backend):
    """One Gaudi card of this process, as index 0."""

    name = "hpu"
    device = torch.device("hpu")
    dtypes = DTYPES
    skips_guards = True  # as vllm-gaudi does once it is warm

    def __init__(self, graphs: str = "auto") -> None:
        self.wanted = graphs
        self.flags: hpu_env.Flags | None = None
        self.transfers = HPUTransfers(self)

    def open(self) -> None:
        """Set the flags, then load the software: it reads them while it is imported."""
        self.flags = hpu_env.prepare_flags(self.wanted)
        if why := hpu_env.unfit_plugin(self.flags.lazy):
            raise ImportError(why)
        for name in ("core", "hpu"):
            self.part(name)

    def part(self, name: str) -> ModuleType:
        """A module of habana_frameworks.torch."""
        return import_module(f"{ROOT}.torch.{name}")

    @property
    def hpu(self) -> ModuleType:
        return self.part("hpu")

    @property
    def card(self) -> str:
        """Its name; a report of an emulated card must not pass for a real one's."""
        name = str(self.hpu.get_device_name())
        version = hpu_env.version_of(hpu_env.PLUGIN) or ""
        if "emulated" not in version:
            return name
        release = ".".join(version.split(".")[:2])
        return f"{name} (emulated, bridge {release}: contract-checked)"

    @property
    def lazy(self) -> bool:
        return self.flags is None or self.flags.lazy

    @property
    def graph_modes(self) -> dict[str, str]:  # type: ignore[override]
        """Lazy mode is settled when the software is loaded, and with it which modes there are."""
        if self.flags is None:
            return LAZY_MODES | OTHER_MODES
        return LAZY_MODES if self.flags.lazy else OTHER_MODES

    @property
    def compiles_parts(self) -> bool:  # type: ignore[override]
        """In compile mode; lazy mode makes graphs of what it gathers."""
        return not self.lazy and self.wanted != "eager"

    def available(self) -> tuple[bool, str]:
        reasons: list[str] = []
        if hpu_env.plugin_folder() is not None:
            try:
                self.open()
                if self.hpu.is_available() and self.hpu.device_count():
                    why = self.flags.why if self.flags else ""
                    return True, f"{self.card}, {why}"
                reasons.append(f"{ROOT} finds no card")
            except (ImportError, RuntimeError, AssertionError, OSError) as error:
                known = hpu_errors.explain_gaudi(error)
                seen = f"{type(error).__name__}: {error}"
                reasons.append(words(known.reason, ", try:", known.hint) if known else seen)
        # Only now: the checks ask hl-smi, which a card that works need not wait for.
        missing = [check for check in hpu_env.checks() if not check.ok]
        return False, listed_words([*reasons, *(f"{c.name}: {c.detail}" for c in missing)])

    def drafting_defaults(self, parameters: int, quantize: str | None = None) -> DraftingDefaults:
        """By the projected steps of a Gaudi 2, where drafts cost little: see docs/performance.md."""
        return DraftingDefaults("scd", window=24, tree="mc_sim_7b_63")

    # What the device does

    def synchronize(self) -> None:
        self.hpu.synchronize()

    def memory(self, reset_peak: bool = False) -> Memory:
        free, total = self.hpu.mem_get_info()
        memory = Memory(total, free, self.hpu.max_memory_allocated())
        if reset_peak:
            self.hpu.reset_peak_memory_stats()
        return memory

    def own_kernels(self, dtype: torch.dtype, sizes: Sizes | None) -> Kernels:
        return hpu_kernels(self, dtype, sizes)

    def candidates(self, dtype: torch.dtype) -> dict[str, Candidate]:
        found = hpu_candidates(self, dtype)
        return {name: self.in_graph(each) for name, each in found.items()}

    def in_graph(self, candidate: Candidate) -> Candidate:
        """A candidate as steps call it: in compile mode inside of a graph, which may make something else of it."""
        if not self.compiles_parts:
            return candidate
        return replace(candidate, make=lambda: self.compile(candidate.make()))

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
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
            "card": self.card if self.flags else None,
            "torch": torch.__version__,
            "plugin": hpu_env.version_of(hpu_env.PLUGIN),
            "lazy": self.lazy,
            "flags": {name: hpu_env.without_home(value) for name, value in flags.items()},
        }


# ----------------------------------------------------------------------------------------- kernels

# Gaudi's fused attention, RMS norm and rotary embedding, for `Kernels`.
#
# Each is used only if it is there and agrees with its plain twin on this card; else the plain one is.


def matmul_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of matmul and a softmax in float32, which every release compiles; the signature is `Kernels`'."""
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5 + mask  # [R, h, T, S]
    return scores.softmax(-1).to(v.dtype) @ v


def make_attention(backend: HPUBackend) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    sdpa = backend.part("hpex.kernels").FusedSDPA

    def fused_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        # An autograd function: positions only, and no more of them than release 1.19 has.
        pieces = mask.numel() * mask.element_size() // MASK_BYTES + 1
        parts = zip(q.tensor_split(pieces, 2), mask.tensor_split(pieces, 2), strict=True)
        done = [sdpa.apply(x, k, v, part, 0.0, False, None, "None", True) for x, part in parts]
        return torch.cat(done, 2) if pieces > 1 else done[0]

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


class Grouped:
    """Sizes to judge kernels by where no model is given: four queries share a key head, as in Emu3."""

    dim, heads, kv, head_dim = 512, 8, 2, 64


def hpu_candidates(
    backend: HPUBackend, dtype: torch.dtype = torch.float32, sizes: Any = Grouped
) -> dict[str, Candidate]:
    """All fused kernels, whether or not they are in this release and agree with the plain ones.

    Each is called as a step does it: in the run's number format, with its heads and groups, for one token and a tree,
    with a mask of the lowest number, under which queries see one position or many. A card multiplies in lower precision
    inside of attention; norm and rotary embedding have no products of matrices.
    """
    h, kv, hd, r, s = sizes.heads, sizes.kv, sizes.head_dim, 2, KEPT
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

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
        rounding = 4 * torch.finfo(dtype).eps
        examples = list(zip(moved, wanted, strict=True))
        return Candidate(lambda: make(backend), examples, max(tolerance, rounding))

    def looks(t: int) -> tuple[Tensor, ...]:
        seen = torch.arange(1, r * t + 1).view(r, 1, t, 1) ** 2 % s  # of [R, 1, T, S]
        mask = (torch.arange(s) > seen).to(dtype) * torch.finfo(dtype).min
        return some(r, h, t, hd), some(r, kv, s, hd), some(r, kv, s, hd), mask

    pairs = [
        (some(r, t, n, hd), some(r, t, 2, hd // 2), kind)
        for kind in (True, False)
        for t, n in ((1, h), (3, kv))
    ]
    norms = [(some(r, 3, width), some(width), 1e-5) for width in (sizes.dim, hd)]
    return {
        "attention": candidate(make_attention, kernels.attention, 1e-2, looks(1), looks(NODES)),
        "rms_norm": candidate(make_rms_norm, kernels.rms_norm, 2e-3, *norms),
        "rotate": candidate(make_rotate, kernels.rotate, 1e-3, *pairs),
    }


def hpu_kernels(backend: HPUBackend, dtype: torch.dtype, sizes: Sizes | None = None) -> Kernels:
    """The fused kernels that are here and agree with the plain ones, in a model's format and sizes."""
    served = Kernels(attention=matmul_attention)
    for name, candidate in hpu_candidates(backend, dtype, sizes or Grouped).items():
        with suppress(*LACKING):
            if candidate.agrees() and backend.in_graph(candidate).agrees():
                served = replace(served, **{name: candidate.make()})
    return served
