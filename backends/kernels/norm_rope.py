"""RMS norm and rotary embedding, each in one pass over its tensor.

Both go through plain torch where a gradient is wanted, as drafters are trained with the same modules.
"""

# Triton reads the annotations of its functions: they are not postponed, and say `constexpr` or nothing.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_hpu.backends.kernels.operators import EXACTLY, block_of, operator, warps
from lantern_hpu.kernels import rms_norm, rotate


@triton.jit
def rms_norm_kernel(
    x,  # [n, H]
    weight,  # [H]
    out,  # [n, H]
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a vector: x / sqrt(mean(x^2) + eps) * weight in float32."""
    start = tl.program_id(0).to(tl.int64) * H
    index = tl.arange(0, BLOCK)
    there = index < H
    value = tl.load(x + start + index, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(weight + index, mask=there, other=0.0).to(tl.float32)
    size = tl.math.rsqrt(tl.sum(value * value, 0) / H + eps)
    tl.store(out + start + index, value * size * scale, mask=there)


def like_x(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


@operator("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", like_x)
def launch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = like_x(x)
    width = x.shape[-1]
    block = block_of(width)
    rms_norm_kernel[(x.numel() // width,)](
        x.contiguous(),
        weight.contiguous(),
        out,
        eps,
        H=width,
        BLOCK=block,
        num_warps=warps(block),
        **EXACTLY,
    )
    return out


def triton_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`kernels.rms_norm`: x [..., H] in any dtype, weight [H]."""
    if torch.is_grad_enabled():
        return rms_norm(x, weight, eps)
    return launch_rms_norm(x, weight, eps)


@triton.jit
def rotate_kernel(
    x,  # [R, T, heads, 2 PAIRS]
    rope,  # [R, T, 2, PAIRS]
    out,  # [R, T, heads, 2 PAIRS]
    row_step,  # of x, which may be a part of a wider tensor
    token_step,
    head_step,
    T,
    heads,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """One program a token. Each product is rounded to x's dtype, as torch does it."""
    place = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    there = (head < heads) & (pair < PAIRS)
    first = 2 * pair if INTERLEAVED else pair
    apart = 1 if INTERLEAVED else PAIRS
    source = x + (place // T) * row_step + (place % T) * token_step + head * head_step + first
    goal = out + (place * heads + head) * (2 * PAIRS) + first
    angle = rope + place * (2 * PAIRS) + pair
    cos = tl.load(angle, mask=pair < PAIRS, other=0.0).to(tl.float32)
    sin = tl.load(angle + PAIRS, mask=pair < PAIRS, other=0.0).to(tl.float32)
    a = tl.load(source, mask=there, other=0.0)
    b = tl.load(source + apart, mask=there, other=0.0)
    dtype = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    turned = (a * cos).to(dtype).to(tl.float32) - (b * sin).to(dtype).to(tl.float32)
    tl.store(goal, turned, mask=there)
    turned = (b * cos).to(dtype).to(tl.float32) + (a * sin).to(dtype).to(tl.float32)
    tl.store(goal + apart, turned, mask=there)


@operator("rotate(Tensor x, Tensor rope, bool interleaved) -> Tensor", like_x)
def launch_rotate(x: Tensor, rope: Tensor, interleaved: bool) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = like_x(x)
    rows, tokens, heads, width = x.shape
    rotate_kernel[(rows * tokens,)](
        x,
        rope.contiguous(),
        out,
        *x.stride()[:3],
        tokens,
        heads,
        PAIRS=width // 2,
        INTERLEAVED=interleaved,
        BLOCK_HEADS=block_of(heads),
        BLOCK_PAIRS=block_of(width // 2),
        num_warps=warps(block_of(heads) * block_of(width // 2)),
        **EXACTLY,
    )
    return out


def triton_rotate(x: Tensor, rope: Tensor, interleaved: bool) -> Tensor:
    """`kernels.rotate`: x [R, T, heads, hd], rope [R, T, 2, hd / 2]; mixed dtypes, as under autocast, stay plain."""
    if torch.is_grad_enabled() or x.dtype != rope.dtype:
        return rotate(x, rope, interleaved)
    return launch_rotate(x, rope, interleaved)
