"""Attention of a few queries over a long cache, of which each row reads what it sees and no more.

The mask says what that is: a part of it is loaded first, and where all of that is at the floor, the keys and
values there are not. So an image reads its committed slots and its tree, however large the cache is. The keys of a
row are shared out among several programs, which a second kernel brings together (flash decoding).
"""

# Triton reads the annotations of its functions: they are not postponed, and say `constexpr` or nothing.

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cuda.kernels.programs import EXACTLY, block_of, warps
from lantern_hpu.ops.kernels import attention

WIDEST = 128  # features of a head that fit a program
FEWEST = 16  # queries or keys that a product of matrices takes
MOST_SPLITS = 8  # programs that share the keys of a row
LOWEST = tl.constexpr(-1e38)  # below any score


@triton.jit
def attention_kernel(
    q,  # [R, h, T, HD]
    k,  # [R, kv, S, HD]
    v,  # [R, kv, S, HD]
    mask,  # [R, T, S]
    out,  # [R, T, h, SPLITS, HD]
    sizes,  # [R, T, h, SPLITS], logarithms of what each split's weights add up to; None for one split
    q_row,  # steps of the arguments
    q_token,
    kv_row,  # keys and values have the same strides
    kv_slot,
    mask_row,
    mask_token,
    T,
    S,
    share,  # heads of q to a head of k
    scale,
    Q_HEAD: tl.constexpr,  # known to the compiler, which then reads several features at once
    KV_HEAD: tl.constexpr,
    HD: tl.constexpr,
    FLOOR: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_HD: tl.constexpr,
):
    """One program a head, a block of queries and a split of the keys. Who sees nothing gets zeros."""
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = tl.program_id(1) // SPLITS * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1) % SPLITS
    feature = tl.arange(0, BLOCK_HD)[None, :]
    asks = (token < T)[:, None] & (feature < HD)
    source = q + row * q_row + head * Q_HEAD + token[:, None] * q_token + feature
    query = tl.load(source, mask=asks, other=0.0)
    start = row * kv_row + head // share * KV_HEAD + feature
    mask += row * mask_row + token[:, None] * mask_token
    top = tl.full([BLOCK_T], LOWEST, tl.float32)
    mass = tl.zeros([BLOCK_T], tl.float32)
    mixed = tl.zeros([BLOCK_T, BLOCK_HD], tl.float32)
    # In turn, so that each split has its share of the slots that are committed.
    for block in range(split, tl.cdiv(S, BLOCK_S), SPLITS):
        slot = block * BLOCK_S + tl.arange(0, BLOCK_S)
        inside = (token < T)[:, None] & (slot < S)[None, :]
        tile = tl.load(mask + slot[None, :], mask=inside, other=FLOOR)
        if tl.max(tile) > FLOOR:
            there = (slot < S)[:, None] & (feature < HD)
            place = start + slot[:, None] * kv_slot
            key = tl.load(k + place.T, mask=there.T, other=0.0)
            value = tl.load(v + place, mask=there, other=0.0)
            score = tl.dot(query, key, input_precision="ieee") * scale
            bias = tile.to(tl.float32)
            score = tl.where(bias > FLOOR, score + bias, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            fade, top = tl.exp(top - higher), higher
            weight = tl.exp(score - top[:, None])
            mass = mass * fade + tl.sum(weight, 1)
            mixed = mixed * fade[:, None]
            mixed += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    # The highest score weighs 1: less than that is nothing.
    mass = tl.maximum(mass, 1.0)
    result = ((row * T + token) * tl.num_programs(0) + head) * SPLITS + split
    tl.store(out + result[:, None] * HD + feature, mixed / mass[:, None], mask=asks)
    if SPLITS > 1:
        tl.store(sizes + result, top + tl.log(mass), mask=token < T)


@triton.jit
def combine_kernel(
    parts,  # [n, SPLITS, HD]
    sizes,  # [n, SPLITS]
    out,  # [n, HD]
    HD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_HD: tl.constexpr,
):
    """One program a query of a head."""
    query = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    feature = tl.arange(0, BLOCK_HD)
    size = tl.load(sizes + query * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    weight = tl.exp(size - tl.max(size, 0))
    there = (split < SPLITS)[:, None] & (feature < HD)[None, :]
    source = parts + (query * SPLITS + split[:, None]) * HD + feature[None, :]
    mixed = tl.sum(tl.load(source, mask=there, other=0.0) * weight[:, None], 0)
    tl.store(out + query * HD + feature, mixed / tl.sum(weight, 0), mask=feature < HD)


def attention_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """In memory [R, T, h, hd], which is how the next matrix reads it."""
    rows, heads, tokens, width = q.shape
    return q.new_empty(rows, tokens, heads, width).transpose(1, 2)


def splits_of(slots: int, block: int) -> int:
    """With more rows fewer would do, but an image's bits must not depend on its company."""
    return max(1, min(MOST_SPLITS, triton.cdiv(slots, block) // 2))


@operator("attention(Tensor q, Tensor k, Tensor v, Tensor mask) -> Tensor", attention_out)
def launch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    if k.stride() != v.stride() or k.stride(-1) != 1:
        k, v = k.contiguous(), v.contiguous()
    q, mask = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, mask))
    rows, heads, tokens, width = q.shape
    # Matrix units take numbers of two bytes; products of others fill the registers.
    most, keys = (64, 64) if q.element_size() == 2 else (FEWEST, 32)
    queries, slots = min(most, max(FEWEST, block_of(tokens))), k.shape[2]
    splits = splits_of(slots, keys)
    out = parts = attention_out(q, k, v, mask)
    sizes = None
    if splits > 1:
        parts = q.new_empty(rows, tokens, heads, splits, width, dtype=torch.float32)
        sizes = q.new_empty(rows, tokens, heads, splits, dtype=torch.float32)
    attention_kernel[(heads, triton.cdiv(tokens, queries) * splits, rows)](
        q,
        k,
        v,
        mask,
        parts,
        sizes,
        *q.stride()[0:3:2],
        *k.stride()[0:3:2],
        *mask.expand(rows, -1, -1, -1).stride()[0:3:2],
        tokens,
        slots,
        heads // k.shape[1],
        width**-0.5,
        Q_HEAD=q.stride(1),
        KV_HEAD=k.stride(1),
        HD=width,
        FLOOR=torch.finfo(mask.dtype).min,
        SPLITS=splits,
        BLOCK_T=queries,
        BLOCK_S=keys,
        BLOCK_HD=max(FEWEST, block_of(width)),
        num_warps=4,
        **EXACTLY,
    )
    if sizes is not None:
        combine_kernel[(rows * tokens * heads,)](
            parts,
            sizes,
            out,
            HD=width,
            SPLITS=splits,
            BLOCK_SPLITS=block_of(splits),
            BLOCK_HD=block_of(width),
            num_warps=warps(block_of(splits) * block_of(width)),
            **EXACTLY,
        )
    return out


def triton_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`kernels.attention`, in memory [R, T, h, hd]; a query that sees nothing gets zeros, which are not read.

    Wide heads, gradients and mixed dtypes take the plain form.
    """
    mixed = len({x.dtype for x in (q, k, v, mask)}) > 1
    if torch.is_grad_enabled() or mixed or q.shape[-1] > WIDEST:
        return attention(q, k, v, mask)
    return launch_attention(q, k, v, mask)
