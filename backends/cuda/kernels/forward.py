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
    CacheWrite,
    Placed,
    add_norm,
    placed_out,
    rms_norm,
    rotate,
    rotate_into,
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
        value = (value.to(tl.float32) + added).to(value.dtype)
        tl.store(total + start + index, value, mask=there)
    value = value.to(tl.float32)
    scale = tl.load(weight + index, mask=there, other=0.0).to(tl.float32)
    size = tl.math.rsqrt(tl.sum(value * value, 0) / H + eps)
    tl.store(out + start + index, value * size * scale, mask=there)


def like_x(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


def normed(x: Tensor, weight: Tensor, eps: float, *sums: Tensor | None) -> Tensor:
    """`sums` are what is added to x, and room for the sum."""
    out = like_x(x)
    width = x.shape[-1]
    block = block_of(width)
    rms_norm_kernel[(x.numel() // width,)](
        x.contiguous(),
        weight.contiguous(),
        out,
        *sums,
        eps,
        H=width,
        BLOCK=block,
        num_warps=warps(block),
        **EXACTLY,
    )
    return out


@operator("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", like_x)
def launch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normed(x, weight, eps, None, None)


@operator(
    "add_norm(Tensor x, Tensor more, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, *others: (like_x(x), like_x(x)),
)
def launch_add_norm(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = like_x(x)
    return total, normed(x, weight, eps, more.contiguous(), total)


def triton_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`kernels.rms_norm`: x [..., H] in any dtype, weight [H]."""
    if torch.is_grad_enabled():
        return rms_norm(x, weight, eps)
    return launch_rms_norm(x, weight, eps)


def triton_add_norm(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`kernels.add_norm`; mixed dtypes, as under autocast, stay plain."""
    if torch.is_grad_enabled() or x.dtype != more.dtype:
        return add_norm(x, more, weight, eps)
    return launch_add_norm(x, more, weight, eps)


@triton.jit
def turn(
    source,  # [heads, 2 PAIRS], as far apart as the step says
    angles,  # [2, PAIRS]
    goal,  # [heads, 2 PAIRS]
    head_step,
    heads,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """The heads of one token. Each product is rounded to their dtype, as torch does it."""
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    there = (head < heads) & (pair < PAIRS)
    first = 2 * pair if INTERLEAVED else pair
    apart = 1 if INTERLEAVED else PAIRS
    source += head * head_step + first
    goal += head * (2 * PAIRS) + first
    cos = tl.load(angles + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
    sin = tl.load(angles + PAIRS + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
    a = tl.load(source, mask=there, other=0.0)
    b = tl.load(source + apart, mask=there, other=0.0)
    dtype = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    turned = (a * cos).to(dtype).to(tl.float32) - (b * sin).to(dtype).to(tl.float32)
    tl.store(goal, turned, mask=there)
    turned = (b * cos).to(dtype).to(tl.float32) + (a * sin).to(dtype).to(tl.float32)
    tl.store(goal + apart, turned, mask=there)


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
    place = tl.program_id(0).to(tl.int64)
    source = x + (place // T) * row_step + (place % T) * token_step
    angles, goal = rope + place * (2 * PAIRS), out + place * heads * (2 * PAIRS)
    turn(source, angles, goal, head_step, heads, PAIRS, INTERLEAVED, BLOCK_HEADS, BLOCK_PAIRS)


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


@triton.jit
def rotate_into_kernel(
    q,  # [R, T, heads, 2 PAIRS]
    k,  # [R, T, kv, 2 PAIRS]
    v,  # [R, T, kv, 2 PAIRS]
    rope,  # [R, T, 2, PAIRS]
    out,  # [R, T, heads, 2 PAIRS]
    keys,  # [rows, kv, 2 PAIRS]
    values,  # [rows, kv, 2 PAIRS]
    index,  # [R * (D + T)], where they go: what moves, then the new ones
    moved_keys,  # [R, D, kv, 2 PAIRS]
    moved_values,  # [R, D, kv, 2 PAIRS]
    D,
    q_row,  # steps of q, k and v, which may be parts of a wider tensor
    q_token,
    q_head,
    k_row,
    k_token,
    k_head,
    v_row,
    v_token,
    v_head,
    T,
    heads,
    kv,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """One program a token, and one for each that moves."""
    place = tl.program_id(0).to(tl.int64)
    row, token = place // (D + T), place % (D + T) - D
    kept = tl.load(index + place).to(tl.int64) * kv * (2 * PAIRS)
    head = tl.arange(0, BLOCK_KV)[:, None]
    feature = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
    there = (head < kv) & (feature < 2 * PAIRS)
    if token < 0:
        old = (row * D + token + D) * kv * (2 * PAIRS) + head * (2 * PAIRS) + feature
        goal = kept + head * (2 * PAIRS) + feature
        tl.store(keys + goal, tl.load(moved_keys + old, mask=there), mask=there)
        tl.store(values + goal, tl.load(moved_values + old, mask=there), mask=there)
        return
    place = row * T + token
    q += row * q_row + token * q_token
    k += row * k_row + token * k_token
    v += row * v_row + token * v_token
    angles, out = rope + place * (2 * PAIRS), out + place * heads * (2 * PAIRS)
    turn(q, angles, out, q_head, heads, PAIRS, INTERLEAVED, BLOCK_HEADS, BLOCK_PAIRS)
    turn(k, angles, keys + kept, k_head, kv, PAIRS, INTERLEAVED, BLOCK_KV, BLOCK_PAIRS)
    value = tl.load(v + head * v_head + feature, mask=there)
    tl.store(values + kept + head * (2 * PAIRS) + feature, value, mask=there)


@operator(
    "rotate_into(Tensor q, Tensor k, Tensor v, Tensor rope, bool interleaved, Tensor(a!) keys,"
    " Tensor(b!) values, Tensor index, Tensor? source) -> Tensor",
    like_x,
)
def launch_rotate_into(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: Tensor,
    interleaved: bool,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    source: Tensor | None,
) -> Tensor:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = like_x(q)
    rows, tokens, heads, width = q.shape
    kv, count = k.shape[2], 0 if source is None else source.numel() // rows
    # Gathered before anything is written; without any, no program looks at them.
    moved = (
        (keys, values) if source is None else (x.index_select(0, source) for x in (keys, values))
    )
    rotate_into_kernel[(rows * (count + tokens),)](
        q,
        k,
        v,
        rope.contiguous(),
        out,
        keys,
        values,
        index.contiguous(),
        *moved,
        count,
        *(step for x in (q, k, v) for step in x.stride()[:3]),
        tokens,
        heads,
        kv,
        PAIRS=width // 2,
        INTERLEAVED=interleaved,
        BLOCK_HEADS=block_of(heads),
        BLOCK_KV=block_of(kv),
        BLOCK_PAIRS=block_of(width // 2),
        num_warps=warps(block_of(heads) * block_of(width // 2)),
        **EXACTLY,
    )
    return out


def triton_rotate_into(
    q: Tensor, k: Tensor, v: Tensor, rope: Tensor, interleaved: bool, write: CacheWrite
) -> Tensor:
    """`kernels.rotate_into`, into a contiguous cache; mixed dtypes stay plain."""
    kept = (write.keys, write.values)
    assert all(x.is_contiguous() for x in kept)
    if torch.is_grad_enabled() or len({x.dtype for x in (q, k, v, rope, *kept)}) > 1:
        return rotate_into(q, k, v, rope, interleaved, write)
    return launch_rotate_into(q, k, v, rope, interleaved, *write)


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
    angles,  # [positions, HD]
    rope,  # [R, T, HD]
    mask,  # [R, T, S]
    index,  # [R, T]
    offset_image,  # steps, as images may share a table
    offset_token,
    table_image,
    B,
    X,
    S,
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
    if pads is not None:
        position = tl.maximum(position - tl.load(pads + row), 0)
    feature = tl.arange(0, BLOCK_HD)
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
    " Tensor slot, Tensor row_start, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    placed_out,
)
def triton_place(*given: Any) -> Placed:
    """See `lantern_hpu.ops.kernels.place_tokens`."""
    start, offset, column, table, valid, pads, angles, slot, row_start, dtype = given
    made, table, width = placed_out(*given), packed(table), angles[0].numel()
    block = block_of(len(slot))
    place_kernel[(len(row_start), len(column))](
        start,
        offset,
        column,
        table,
        valid,
        pads,
        angles,
        *made,
        *offset.stride(),
        table.stride(0),
        len(start),
        table.shape[-1],
        len(slot),
        HD=width,
        FLOOR=torch.finfo(dtype).min,
        BLOCK_S=block,
        BLOCK_HD=block_of(width),
        num_warps=warps(block),
        enable_fp_fusion=False,
    )
    return made
