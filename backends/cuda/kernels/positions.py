"""Angles, mask and cache positions of a pass in one kernel, from a few numbers of each image."""

# Triton reads the annotations of its functions: they are not postponed, and say `constexpr` or nothing.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cuda.kernels.programs import block_of, packed, warps
from lantern_hpu.ops.kernels import Placed


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


def placed_out(
    start: Tensor,
    offset: Tensor,
    column: Tensor,
    table: Tensor,
    valid: Tensor | None,
    pads: Tensor | None,
    angles: Tensor,
    slot: Tensor,
    row_start: Tensor,
    dtype: Any,
) -> Placed:
    rows, tokens = len(row_start), len(column)
    rope = angles.new_empty(rows, tokens, *angles.shape[1:], dtype=dtype)
    mask = angles.new_empty(rows, 1, tokens, len(slot), dtype=dtype)
    return rope, mask, start.new_empty(rows * tokens)


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
