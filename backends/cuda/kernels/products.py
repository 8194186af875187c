"""A linear layer of a few rows with its norm, SwiGLU and residual sum inside: one launch in place of two to four.

Two ways to multiply. Up to 8 rows, a program reads a few whole rows of the matrix in straight-line code, all of its
loads under way at once, and multiplies and adds without matrix units. From 9 rows on, it goes through blocks of K with
`tl.dot`. Products and sums are in float32; the result is rounded once.
"""

# Triton reads the annotations of its functions: they are not postponed, and say `constexpr` or nothing.

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cuda.kernels.programs import FORMS


@triton.jit
def product_kernel(
    x,  # [M, K]
    weight,  # [N, K], with GATED [2 N, K]; of 4 bits two numbers in a byte
    bias,  # [N] or None
    norm,  # [K] or None
    residual,  # [M, N] or None
    scale,  # [N], with GATED [2 N], of a weight int8; of 4 bits [N, K / GROUP]; or None
    zero,  # [N, K / GROUP] of 4 bits, or None
    out,  # [M, N]
    M,
    N,
    eps,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale, of 4 bits
    GATED: tl.constexpr,
    UNITS: tl.constexpr,  # whether by `tl.dot`
    OWN: tl.constexpr,  # inputs next to each other that a thread reads at once
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One program BN columns of BM rows. The norm's scale is a number a row, and follows the product."""
    # Programs next to each other read the same columns
    row = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    if UNITS:
        y, up = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
        square = tl.zeros([BM, 1], tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)[None, :]
            a, squares = normed_rows(x, norm, row, k, M, K)
            square += tl.sum(squares, 1)[:, None]
            a = a.to(x.dtype.element_ty)
            part = part_of(weight, scale, zero, n, start, 0, N, K, GROUP, BK).to(a.dtype)
            y = tl.dot(a, part.T, y, input_precision="ieee")
            if GATED:
                part = part_of(weight, scale, zero, n, start, N, N, K, GROUP, BK).to(a.dtype)
                up = tl.dot(a, part.T, up, input_precision="ieee")
    else:
        # Of each thread's inputs the sums alone are kept
        ys = tl.zeros([BM, BN, BK // OWN], tl.float32)
        ups, squared = ys, ys
        for start in tl.static_range(0, K, BK):
            # A copy for each column, so that a thread holds rows and columns at the same inputs and none waits
            k = start + tl.arange(0, BK)[None, None, :] + tl.zeros([1, BN, 1], tl.int32)
            a, squares = normed_rows(x, norm, row[:, :, None], k, M, K)
            squared += own_sums(squares, OWN)
            part = part_of(weight, scale, zero, n, start, 0, N, K, GROUP, BK).to(tl.float32)
            ys += own_sums(a * part[None], OWN)
            if GATED:
                part = part_of(weight, scale, zero, n, start, N, N, K, GROUP, BK).to(tl.float32)
                ups += own_sums(a * part[None], OWN)
        y, up, square = tl.sum(ys, 2), tl.sum(ups, 2), tl.sum(squared, 2)
    if scale is not None and zero is None:
        y *= tl.load(scale + n, mask=n < N, other=0.0)[None, :]
        if GATED:
            up *= tl.load(scale + N + n, mask=n < N, other=0.0)[None, :]
    if norm is not None:
        normed = tl.math.rsqrt(square / K + eps)
        y *= normed
        up *= normed
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        y = y / (1 + tl.exp(-y)) * up
    there = (row < M) & (n < N)[None, :]
    place = row.to(tl.int64) * N + n[None, :]
    if residual is not None:
        y += tl.load(residual + place, mask=there, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def own_sums(values, OWN: tl.constexpr):
    """Of the inputs that a thread holds: [BM, BN, BK] -> [BM, BN, BK / OWN]."""
    apart = values.reshape(values.shape[0], values.shape[1], values.shape[2] // OWN, OWN)
    return tl.sum(apart, 3)


@triton.jit
def normed_rows(x, norm, row, k, M, K: tl.constexpr):
    """A block of x times the norm's weight, and its squares; row, k: [BM, 1], [1, BK] or [BM, 1, 1], [1, BN, BK]."""
    a = tl.load(x + row * K + k, mask=(row < M) & (k < K), other=0.0).to(tl.float32)
    squares = a * a
    if norm is not None:
        a *= tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    return a, squares


@triton.jit
def part_of(
    weight, scale, zero, n, start, first, N, K: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr
):
    """A block [BN, BK] of the matrix, whose rows are counted from `first` on; it is read once."""
    there = (n < N)[:, None]
    row = (first + n).to(tl.int64)[:, None]
    PACKED: tl.constexpr = 1 if zero is None else 2  # numbers of a byte
    k = start // PACKED + tl.arange(0, BK // PACKED)[None, :]
    inside = there & (k < K // PACKED)
    place = weight + row * (K // PACKED) + k
    part = tl.load(place, mask=inside, other=0, eviction_policy="evict_first")
    if zero is not None:
        GROUPS: tl.constexpr = (BK + GROUP - 1) // GROUP
        numbers = tl.interleave(part & 15, part >> 4)
        numbers = numbers.reshape(part.shape[0], GROUPS, BK // GROUPS).to(tl.float32)
        group = start // GROUP + tl.arange(0, GROUPS)[None, :]
        inside = there & (group < K // GROUP)
        place = row * (K // GROUP) + group
        least = tl.load(zero + place, mask=inside, other=0).to(tl.float32)
        step = tl.load(scale + place, mask=inside, other=0.0)
        numbers = (numbers - least[:, :, None]) * step[:, :, None]
        part = numbers.reshape(part.shape[0], BK)
    return part


def product_out(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    gated = others[4]
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (1 + gated))


@operator(
    "product(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, Tensor? residual, float eps, bool gated,"
    " Tensor? scale, Tensor? zero, str form)"
    " -> Tensor",
    product_out,
)
def triton_product(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    """`kernels.product` in a form of `FORMS`, for as many rows as that takes."""
    bias, norm, residual, eps, gated, scale, zero, name = others
    out, depth = product_out(x, weight, *others), x.shape[-1]
    rows, width = x.numel() // depth, out.shape[-1]
    form = FORMS[name].sized(rows, x.itemsize, weight.itemsize * (1 + gated))
    product_kernel[(triton.cdiv(rows, form.most_rows), triton.cdiv(width, form.columns))](
        x.contiguous(),
        weight,
        bias,
        norm,
        None if residual is None else residual.contiguous(),
        scale,
        zero,
        out,
        rows,
        width,
        eps,
        K=depth,
        GROUP=0 if zero is None else depth // zero.shape[1],
        GATED=gated,
        UNITS=form.kernel == "dot",
        OWN=16 // x.itemsize,
        BM=form.most_rows,
        BN=form.columns,
        BK=form.depth,
        num_warps=form.warps,
        num_stages=form.stages,
    )
    return out
