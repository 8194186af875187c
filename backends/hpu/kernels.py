"""Gaudi's fused attention, RMS norm and rotary embedding, for `Kernels`.

Each is used only if it is there and agrees with its plain twin on this card; else the plain one is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lantern_hpu.backends.candidates import LACKING, Candidate, outcome
from lantern_hpu.ops import kernels
from lantern_hpu.ops.kernels import Kernels

if TYPE_CHECKING:
    from lantern_hpu.backends.hpu.backend import HPUBackend


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
