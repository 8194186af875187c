"""What a pass does between its matrices and attention, each in one pass over its tensor.

Norms and rotary embedding, the latter also on the way into the cache; SwiGLU; and in one kernel angles, mask and cache
positions of a pass, from a few numbers of each image. All but the last go through plain torch where a gradient is
wanted, as drafters are trained with the same modules.
"""

# Triton reads the annotations of its functions: they are not postponed, and say `constexpr` or nothing.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cuda.kernels.programs import EXACTLY, block_of, packed, warps
from lantern_hpu.ops.kernels import (
    Placed,
    add_norm,
    placed_out,
    rms_norm,
    rotate,
    swiglu,
)

PIECE = 1024  # features that one program of SwiGLU makes


# ---------------------------------------------------------------------- norm and rotary embedding


@triton.jit
def rms_norm_kernel(
    x,  # [n, H]
    weight,  # [H]
    out,  # [n, H]
    more,  # [n, H], to be added to x before; None: nothing
    behind,  # [H], the weight of a norm that `more` passes first; None: it passes none
    total,  # [n, H], for that sum
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a vector: x / sqrt(mean(x^2) + eps) * weight in float32."""
    start = tl.program_id(0).to(tl.int64) * H
    index = tl.arange(0, BLOCK)
    there = index < H
    value = tl.load(x + start + index, mask=there, other=0.0)
    if more is not None:  # the sum is rounded, as torch does it
        added = tl.load(more + start + index, mask=there, other=0.0).to(tl.float32)
        if behind is not None:
            scale = tl.load(behind + index, mask=there, other=0.0).to(tl.float32)
            size = tl.math.rsqrt(tl.sum(added * added, 0) / H + eps)
            added = (added * size * scale).to(value.dtype).to(tl.float32)
        value = (value.to(tl.float32) + added).to(value.dtype)
        tl.store(total + start + index, value, mask=there)
    value = value.to(tl.float32)
    scale = tl.load(weight + index, mask=there, other=0.0).to(tl.float32)
    size = tl.math.rsqrt(tl.sum(value * value, 0) / H + eps)
    tl.store(out + start + index, value * size * scale, mask=there)


def like_x(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


@operator(
    "norm(Tensor x, Tensor weight, float eps, Tensor? more, Tensor? behind) -> (Tensor, Tensor)",
    lambda x, *others: (like_x(x), like_x(x)),
)
def launch_norm(
    x: Tensor, weight: Tensor, eps: float, more: Tensor | None, behind: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The sum of x and more, which means nothing without more, and its norm."""
    total, out, width = like_x(x), like_x(x), x.shape[-1]
    block = block_of(width)
    rms_norm_kernel[(x.numel() // width,)](
        x.contiguous(),
        weight.contiguous(),
        out,
        None if more is None else more.contiguous(),
        behind,
        total,
        eps,
        H=width,
        BLOCK=block,
        num_warps=warps(block),
        **EXACTLY,
    )
    return total, out


def triton_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`kernels.rms_norm`: x [..., H] in any dtype, weight [H]."""
    if torch.is_grad_enabled():
        return rms_norm(x, weight, eps)
    normed: Tensor = launch_norm(x, weight, eps, None, None)[1]
    return normed


def triton_add_norm(
    x: Tensor, more: Tensor, weight: Tensor, eps: float, behind: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`kernels.add_norm`; mixed dtypes, as under autocast, stay plain."""
    if torch.is_grad_enabled() or x.dtype != more.dtype:
        return add_norm(x, more, weight, eps, behind)
    result: tuple[Tensor, Tensor] = launch_norm(x, weight, eps, more, behind)
    return result


@triton.jit
def scaled(x, mean, size, weight, bias, place, there):
    """The last part of a norm: x [n, features] by weights at places [n, features]."""
    result = (x - mean) * size * tl.load(weight + place, mask=there, other=0.0).to(tl.float32)
    if bias is not None:
        result += tl.load(bias + place, mask=there, other=0.0).to(tl.float32)
    return result


@triton.jit
def turned(
    x,  # [n, 1], where vectors of 2 PAIRS begin
    angles,  # [n, 1] or one for all, where their [2, PAIRS] begin
    feature,  # [1, BLOCK]
    there,  # [n, BLOCK]
    head,  # [n, 1] or one for all, whose they are
    weight,  # of the norm that they pass before; None: they pass none
    bias,  # of each head, as the weights are then; None: the norm is by root mean square, one for all heads
    eps,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotated vectors [n, BLOCK]. Norm and products are rounded to their dtype, as torch does it."""
    if INTERLEAVED:
        pair, second, partner = feature // 2, feature % 2, feature ^ 1
    else:
        pair, second = feature % PAIRS, feature // PAIRS
        partner = (feature + PAIRS) % (2 * PAIRS)
    cos = tl.load(angles + pair, mask=there, other=0.0).to(tl.float32)
    sin = tl.load(angles + PAIRS + pair, mask=there, other=0.0).to(tl.float32)
    own = tl.load(x + feature, mask=there, other=0.0)
    dtype = own.dtype
    own = own.to(tl.float32)
    other = tl.load(x + partner, mask=there, other=0.0).to(tl.float32)
    if weight is not None:
        vector, mean = 0, 0.0
        if bias is not None:
            vector = head * (2 * PAIRS)
            mean = tl.sum(own, 1)[:, None] / (2 * PAIRS)
        apart = tl.where(there, own - mean, 0.0)
        size = tl.math.rsqrt(tl.sum(apart * apart, 1)[:, None] / (2 * PAIRS) + eps)
        own = scaled(own, mean, size, weight, bias, vector + feature, there)
        other = scaled(other, mean, size, weight, bias, vector + partner, there)
        own, other = own.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
    other = (other * sin).to(dtype).to(tl.float32)
    kept = (own * cos).to(dtype).to(tl.float32)
    return (kept + tl.where(second == 1, other, -other)).to(dtype)


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
    BLOCK_HD: tl.constexpr,
):
    """One program a token."""
    place = tl.program_id(0).to(tl.int64)
    head, feature = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HD)[None, :]
    there = (head < heads) & (feature < 2 * PAIRS)
    x += (place // T) * row_step + (place % T) * token_step + head * head_step
    angles = rope + place * (2 * PAIRS)
    vector = turned(x, angles, feature, there, head, None, None, 0.0, PAIRS, INTERLEAVED)
    tl.store(out + (place * heads + head) * (2 * PAIRS) + feature, vector, mask=there)


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
        BLOCK_HD=block_of(width),
        num_warps=warps(block_of(heads) * block_of(width)),
        **EXACTLY,
    )
    return out


def triton_rotate(x: Tensor, rope: Tensor, interleaved: bool) -> Tensor:
    """`kernels.rotate`: x [R, T, heads, hd], rope [R, T, 2, hd / 2]; mixed dtypes, as under autocast, stay plain."""
    if torch.is_grad_enabled() or x.dtype != rope.dtype:
        return rotate(x, rope, interleaved)
    return launch_rotate(x, rope, interleaved)


# ----------------------------------------------------------------------------------------- SwiGLU


@triton.jit
def swiglu_kernel(
    gate_up,  # [n, 2 F]
    out,  # [n, F]
    F,
    BLOCK: tl.constexpr,
):
    """One program a block of a vector. What the gate makes is rounded before the product, as torch does it."""
    vector = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = feature < F
    source = gate_up + vector * 2 * F + feature
    gate = tl.load(source, mask=there, other=0.0)
    up = tl.load(source + F, mask=there, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    open = tl.math.div_rn(x, 1 + tl.exp(-x)).to(gate.dtype).to(tl.float32)
    tl.store(out + vector * F + feature, open * up, mask=there)


def swiglu_out(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@operator("swiglu(Tensor gate_up) -> Tensor", swiglu_out)
def launch_swiglu(gate_up: Tensor) -> Tensor:
    out = swiglu_out(gate_up)
    features = out.shape[-1]
    swiglu_kernel[(out.numel() // features, triton.cdiv(features, PIECE))](
        gate_up.contiguous(), out, features, BLOCK=PIECE, num_warps=warps(PIECE), **EXACTLY
    )
    return out


def triton_swiglu(gate_up: Tensor) -> Tensor:
    """`kernels.swiglu`: gate_up [..., 2 F] in any dtype."""
    if torch.is_grad_enabled():
        return swiglu(gate_up)
    return launch_swiglu(gate_up)


# -------------------------------------------------------------------------------------- positions


@triton.jit
def place_kernel(
    start,  # [B]
    offset,  # [B, T]
    column,  # [T]
    table,  # [B, T, X]
    valid,  # [R, S]; None: all are
    pads,  # [R], positions that do not count; None: all do
    axes,  # [3, positions] where positions stand on three axes; None: on one
    angles,  # [positions, HD]
    rope,  # [R, T, HD]
    mask,  # [R, T, S]
    index,  # [R, T]
    offset_image,  # steps, as images may share a table
    offset_token,
    table_image,
    axis_step,
    B,
    X,
    S,
    FIRST,  # pairs that go with the first axis
    SECOND,  # and with the second
    HD: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_HD: tl.constexpr,
):
    """One program a token of a row."""
    row, token = tl.program_id(0), tl.program_id(1)
    image, place = row % B, row * tl.num_programs(1) + token
    begin = tl.load(start + image)
    tl.store(index + place, row * S + begin + tl.load(column + token))
    position = begin + tl.load(offset + image * offset_image + token * offset_token)
    feature = tl.arange(0, BLOCK_HD)
    if axes is not None:
        pair = feature % (HD // 2)
        axis = (pair >= FIRST).to(tl.int32) + (pair >= FIRST + SECOND).to(tl.int32)
        position = tl.load(axes + axis * axis_step + position)
    if pads is not None:
        position = tl.maximum(position - tl.load(pads + row), 0)
    angle = tl.load(angles + position * HD + feature, mask=feature < HD, other=0.0)
    tl.store(rope + place * HD + feature, angle, mask=feature < HD)
    slot = tl.arange(0, BLOCK_S)
    behind = slot - begin
    inside = (behind >= 0) & (behind < X)
    local = tl.load(table + image * table_image + token * X + behind, mask=inside, other=0)
    seen = (behind < 0) | (inside & (local != 0))
    if valid is not None:
        seen = seen & (tl.load(valid + row * S + slot, mask=slot < S, other=0) != 0)
    tl.store(mask + place.to(tl.int64) * S + slot, tl.where(seen, 0.0, FLOOR), mask=slot < S)


@operator(
    "place(Tensor start, Tensor offset, Tensor column, Tensor table, Tensor? valid, Tensor? pads, Tensor angles,"
    " Tensor slot, Tensor row_start, ScalarType dtype, Tensor? axes=None, int[] sections=[])"
    " -> (Tensor, Tensor, Tensor)",
    placed_out,
)
def triton_place(*given: Any) -> Placed:
    """See `lantern_hpu.ops.kernels.place_tokens`."""
    start, offset, column, table, valid, pads, angles, slot, row_start, dtype, *several = given
    axes, (first, second, *_) = several or (None, (0, 0))
    made, table, width = placed_out(*given), packed(table), angles[0].numel()
    block = block_of(len(slot))
    place_kernel[(len(row_start), len(column))](
        start,
        offset,
        column,
        table,
        valid,
        pads,
        axes,
        angles,
        *made,
        *offset.stride(),
        table.stride(0),
        0 if axes is None else axes.stride(0),
        len(start),
        table.shape[-1],
        len(slot),
        first,
        second,
        HD=width,
        FLOOR=torch.finfo(dtype).min,
        BLOCK_S=block,
        BLOCK_HD=block_of(width),
        num_warps=warps(block),
        enable_fp_fusion=False,
    )
    return made
