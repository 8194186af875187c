"""The fused kernels of `habana_frameworks.torch.hpex`, with their calling rules and plain arithmetic.

Signatures are those of bridge 1.19: autograd functions, so `apply` takes positions only. Each kernel is one
operator, as on the device.
"""

from __future__ import annotations

from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from lantern_hpu.ops.kernels import rms_norm

OPERATORS = Library("hpu_emulated", "DEF")
OPERATORS.define(
    "sdpa(Tensor q, Tensor k, Tensor v, Tensor? mask, float dropout, bool causal, float? scale) -> Tensor"
)
OPERATORS.define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")
OPERATORS.define("rope(Tensor x, Tensor cos, Tensor sin, bool pairwise) -> Tensor")


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped
    )


def rope(x: Tensor, cos: Tensor, sin: Tensor, pairwise: bool) -> Tensor:
    if pairwise:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    return x * cos + turned * sin


for name, function in (("sdpa", sdpa), ("rms_norm", rms_norm), ("rope", rope)):
    OPERATORS.impl(name, function, "CPU")
    OPERATORS.impl(name, lambda x, *others: torch.empty_like(x), "Meta")


def need(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


class FusedSDPA:
    """Attention in one kernel."""

    @staticmethod
    def apply(
        q: Tensor,  # [B, Hq, Lq, D]
        k: Tensor,  # [B, Hkv, Lkv, D]
        v: Tensor,
        attn_mask: Tensor | None = None,  # additive [B, 1 or H, Lq, Lkv]
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: Tensor | None = None,
        seq_padding_type: str = "left",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
        /,
    ) -> Tensor:
        need(
            not (is_causal and attn_mask is not None),
            "FusedSDPA takes a mask or is_causal, not both",
        )
        need(softmax_mode in ("None", "fast"), f"unknown softmax_mode {softmax_mode!r}")
        need(q.dim() == k.dim() == v.dim() == 4, "FusedSDPA takes 4-dimensional tensors")
        need(q.dtype == k.dtype == v.dtype, "q, k and v must have one dtype")
        need(valid_seq_len is None or is_causal, "valid_seq_len needs is_causal")
        if attn_mask is not None:
            need(attn_mask.dim() == 4, "FusedSDPA takes a 4-dimensional mask")
            need(attn_mask.shape[1] in (1, q.shape[1]), "the mask has 1 head or as many as q")
            need(attn_mask.dtype == q.dtype, "the mask must be additive, of q's dtype")
        made: Tensor = torch.ops.hpu_emulated.sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale)
        return made


class FusedRMSNorm:
    """Root-mean-square norm in one kernel."""

    @staticmethod
    def apply(
        data_in: Tensor,
        gamma: Tensor,
        eps: float,
        use_stages: bool = True,
        bwd_mode: int = 0,
        fast_math: bool = False,
        /,
    ) -> Tensor:
        need(data_in.dtype == gamma.dtype, "data and gamma must have one dtype")
        made: Tensor = torch.ops.hpu_emulated.rms_norm(data_in, gamma, eps)
        return made


class RotaryPosEmbeddingMode(Enum):
    """Which features form a pair."""

    BLOCKWISE = 0  # (0, d / 2), (1, d / 2 + 1), ...
    PAIRWISE = 1  # (0, 1), (2, 3), ...


def apply_rotary_pos_emb(
    p: Tensor,  # [..., heads, D]
    cos: Tensor,  # broadcasts with p, D wide: each angle stands at both features of its pair
    sin: Tensor,
    position_ids: Tensor | None = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
) -> Tensor:
    """Turn pairs of features."""
    need(
        cos.shape[-1] == p.shape[-1] == sin.shape[-1], "cos and sin must be as wide as the features"
    )
    need(p.dtype == cos.dtype == sin.dtype, "p, cos and sin must have one dtype")
    need(position_ids is None and offset == 0, "the emulator takes rows already chosen by position")
    pairwise = mode == RotaryPosEmbeddingMode.PAIRWISE
    made: Tensor = torch.ops.hpu_emulated.rope(p, cos, sin, pairwise)
    return made
