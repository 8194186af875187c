"""The fused kernels of `habana_frameworks.torch.hpex`, with their calling rules and plain arithmetic.

They are autograd functions, so `apply` takes positions only: as many as the release has. Each kernel is one operator,
as on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library, register_autograd

from gaudi_emulator.device import current
from gaudi_emulator.scope import OutOfScope

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
    grouped = q.dim() == 4 and q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, pairwise: bool) -> Tensor:
    if pairwise:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    return x * cos + turned * sin


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
    ctx.inputs = [None if isinstance(x, Tensor) else x for x in inputs]


def backward_of(plain: Callable[..., Tensor]) -> Callable[..., Any]:
    """A kernel's backward by its plain arithmetic, operator by operator."""

    def backward(ctx: Any, grad: Tensor) -> Any:
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # Under names of their own, so that hooks of the caller's tensors hear of one gradient
            inputs = [
                x if t is None else t.view_as(t)
                for t, x in zip(ctx.saved_tensors, ctx.inputs, strict=True)
            ]
            learning = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
            made = torch.autograd.grad(plain(*inputs), learning, grad, create_graph=again)
        found = iter(made)
        return tuple(
            next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in inputs
        )

    return backward


for name, function in (("sdpa", sdpa), ("rms_norm", rms_norm), ("rope", rope)):
    OPERATORS.impl(name, function, "CPU")
    OPERATORS.impl(name, lambda x, *others: torch.empty_like(x), "Meta")
    register_autograd(
        f"hpu_emulated::{name}", backward_of(function), setup_context=setup_context, lib=OPERATORS
    )


def need(condition: bool, message: str, error: type[Exception] = RuntimeError) -> None:
    if not condition:
        raise error(message)


def run_fused(name: str, plain: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """One operator of the device; operator by operator where its backward needs what was dropped out."""
    drops = name == "sdpa" and inputs[4] > 0 and torch.is_grad_enabled()
    kernel = plain if drops else getattr(torch.ops.hpu_emulated, name)
    made: Tensor = kernel(*inputs)
    return made


# A program under torch.compile need not trace the card.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def release_and_recompute() -> tuple[str, bool]:
    """Of the card in use: its release, and whether attention computes the softmax again in backward."""
    return current().release.name, "recompute_sdp" in current().switches


class FusedSDPA:
    """Attention in one kernel (tests/pytest_working/any_mode/test_hpu_sdpa.py)."""

    @staticmethod
    def apply(
        q: Tensor,  # [B, Hq, Lq, D], or [B, Lq, D]
        k: Tensor,  # [B, Hkv, Lkv, D]
        v: Tensor,
        attn_mask: Tensor | None = None,  # bool or additive, broadcasts to [B, Hq, Lq, Lkv]
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
        *since_1_24: Any,
    ) -> Tensor:
        release, recompute = release_and_recompute()
        newer = release != "1.19"
        recompute = recompute if recompute_mode is None else recompute_mode
        learns = q.requires_grad or k.requires_grad or v.requires_grad
        most = 15 if newer else 13
        if 13 + len(since_1_24) > most:
            raise TypeError(f"FusedSDPA takes {most} positions, not {13 + len(since_1_24)}")
        if newer and 0 in (q.numel(), k.numel(), v.numel()):
            return q.new_empty((*q.shape[:-1], v.shape[-1]))
        mode = softmax_mode.lower()
        needed = {
            "FusedSDPA takes a mask or is_causal, not both": not is_causal or attn_mask is None,
            f"unknown softmax_mode {softmax_mode!r}": mode in ("none", "fast", "fp32"),
            "FusedSDPA takes tensors of 3 or 4 dimensions": q.dim() == k.dim() == v.dim() in (3, 4),
            "q, k and v must have one dtype": q.dtype == k.dtype == v.dtype,
            "the mask must be of booleans, or additive and of q's dtype": attn_mask is None
            or attn_mask.dtype in (q.dtype, torch.bool),
        }
        asserted = {
            "softmax_mode fp32 is for inference in bfloat16": mode != "fp32"
            or (q.dtype == torch.bfloat16 and not (newer and learns)),
            "softmax_mode fast needs is_causal in training with recompute": mode != "fast"
            or not (recompute and learns)
            or is_causal,
            "valid_seq_len is for inference with is_causal": valid_seq_len is None
            or (is_causal and not learns),
        }
        for message, holds in needed.items():
            need(holds, message)
        for message, holds in asserted.items():
            need(holds, message, AssertionError)
        if return_dropout_mask or return_attn_probs:
            raise OutOfScope("FusedSDPA with more results than one", "plain attention")
        if since_1_24:
            raise OutOfScope("FusedSDPA with a window or a sink", "plain attention")
        if valid_seq_len is not None:
            padding = seq_padding_type.lower()
            need(padding in ("left", "right"), f"unknown seq_padding_type {seq_padding_type!r}")
            attn_mask, is_causal = causal_pairs(q, k, valid_seq_len, padding), False
        return run_fused("sdpa", sdpa, q, k, v, attn_mask, dropout_p, is_causal, scale)


def causal_pairs(q: Tensor, k: Tensor, valid_seq_len: Tensor, padding: str) -> Tensor:
    """Which query sees which key, by lengths [B]: [B, 1, Lq, Lkv]. A query that is padding sees all."""
    rows = torch.arange(q.shape[-2], device=q.device)[:, None]  # [Lq, 1]
    columns = torch.arange(k.shape[-2], device=q.device)  # [Lkv]
    lengths = valid_seq_len.to(q.device).reshape(-1, 1, 1, 1)  # [B, 1, 1, 1]
    begins = k.shape[-2] - lengths if padding == "left" else 0 * lengths
    ends = begins + lengths
    real = (columns >= begins) & (columns < ends)  # [B, 1, 1, Lkv]
    padded = (rows < begins) | (rows >= ends)  # [B, 1, Lq, 1]
    return ((columns <= rows) & real) | padded


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
        wanted = torch.promote_types(data_in.dtype, gamma.dtype)
        return run_fused("rms_norm", rms_norm, data_in.to(wanted), gamma.to(wanted), eps).to(
            data_in.dtype
        )


class RotaryPosEmbeddingMode(Enum):
    """Which features form a pair."""

    BLOCKWISE = 0  # (0, d / 2), (1, d / 2 + 1), ...
    PAIRWISE = 1  # (0, 1), (2, 3), ...


def apply_rotary_pos_emb(
    p: Tensor,  # [..., heads, D], or [B, heads, T, D] with position_ids
    cos: Tensor,  # broadcasts with p, D wide: each angle stands at both features of its pair
    sin: Tensor | None = None,
    position_ids: Tensor | None = None,  # [B, T], rows of cos and sin
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
    /,
) -> Tensor:
    """Turn pairs of features (hpex/kernels/RotaryPosEmbeddingHelper.py): formats are matched, float32 wins."""
    if sin is None:
        raise OutOfScope(
            "apply_rotary_pos_emb with angles in one tensor", "cos and sin of their own"
        )
    wanted = torch.float32 if torch.float32 in (p.dtype, cos.dtype, sin.dtype) else p.dtype
    p, cos, sin = p.to(wanted), cos.to(wanted), sin.to(wanted)
    if position_ids is not None and mode == RotaryPosEmbeddingMode.BLOCKWISE:
        width = cos.shape[-1]
        cos, sin = (t.reshape(-1, width)[position_ids].unsqueeze(1) for t in (cos, sin))
    elif offset:
        raise OutOfScope(
            "apply_rotary_pos_emb with an offset", "rows of cos and sin by position_ids"
        )
    need(cos.shape[-1] == p.shape[-1], "cos and sin must be as wide as the features")
    return run_fused("rope", rope, p, cos, sin, mode == RotaryPosEmbeddingMode.PAIRWISE)


class RotaryPosEmbeddingHelperV2:
    """Rows by position."""

    @staticmethod
    def apply(p: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> Tensor:
        return apply_rotary_pos_emb(p, cos, sin, position_ids)
