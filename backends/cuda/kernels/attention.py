"""Attention of a few queries over a long cache, of which each row reads what it sees and no more.

The mask says what that is: a part of it is loaded first, and where all of that is at the floor, the keys and
values there are not. So an image reads its committed slots and its tree, however large the cache is. The keys of a
long row are shared out among several programs, which a second kernel brings together (flash decoding). A short row's
are one program's for each head, which also rotates the new queries and keys and writes the cache before it reads it.
"""

# Triton reads the annotations of its functions: they are not postponed, and say `constexpr` or nothing.

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cuda.kernels.forward import triton_rotate_into
from lantern_hpu.backends.cuda.kernels.programs import EXACTLY, block_of, warps
from lantern_hpu.ops.kernels import CacheWrite, attend, attention

WIDEST = 128  # features of a head that fit a program
FEWEST = 16  # queries or keys that a product of matrices takes
MOST_SPLITS = 8  # programs that share the keys of a row
ALONE = 512  # slots that one program reads, in larger pieces
LOWEST = tl.constexpr(-1e38)  # below any score


@triton.jit
def turned(
    x,  # [n, 2 PAIRS]
    angles,  # [n, 2, PAIRS]
    feature,
    there,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotated vectors. Each product is rounded to their dtype, as torch does it."""
    if INTERLEAVED:
        pair, second, partner = feature // 2, feature % 2, feature ^ 1
    else:
        pair, second = feature % PAIRS, feature // PAIRS
        partner = (feature + PAIRS) % (2 * PAIRS)
    cos = tl.load(angles + pair, mask=there, other=0.0).to(tl.float32)
    sin = tl.load(angles + PAIRS + pair, mask=there, other=0.0).to(tl.float32)
    own = tl.load(x + feature, mask=there, other=0.0)
    other = tl.load(x + partner, mask=there, other=0.0).to(tl.float32)
    other = (other * sin).to(own.dtype).to(tl.float32)
    kept = (own.to(tl.float32) * cos).to(own.dtype).to(tl.float32)
    return (kept + tl.where(second == 1, other, -other)).to(own.dtype)


@triton.jit
def attention_kernel(
    q,  # [R, h, T, HD]
    k,  # [R, kv, S, HD]
    v,  # [R, kv, S, HD]
    mask,  # [R, T, S]
    out,  # [R, T, h, SPLITS, HD]
    sizes,  # [R, T, h, SPLITS], logarithms of what each split's weights add up to; None for one split
    new_k,  # [R, h, T, HD] to be rotated and written first, with the steps of q; None: nothing is
    new_v,  # [R, h, T, HD]
    rope,  # [R, T, 2, HD / 2]
    index,  # [R * (D + T)], slots of the whole cache where what moves goes, and what is new
    moved,  # [R * D], slots of what moves; None: nothing does
    D,
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
    INTERLEAVED: tl.constexpr,
    BLOCK_D: tl.constexpr,
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
    source = row * q_row + head * Q_HEAD + token[:, None] * q_token
    if new_k is None:
        query = tl.load(q + source + feature, mask=asks, other=0.0)
    else:  # of this head of this row no other program reads or writes the cache
        angles = rope + (row * T + token[:, None]) * HD
        query = turned(q + source, angles, feature, asks, HD // 2, INTERLEAVED)
        fresh_key = turned(new_k + source, angles, feature, asks, HD // 2, INTERLEAVED)
        fresh_value = tl.load(new_v + source + feature, mask=asks, other=0.0)
        goals = index + row * (D + T)
        vector = head * KV_HEAD + feature
        if moved is not None:
            step = tl.arange(0, BLOCK_D)[:, None]
            moves = (step < D) & (feature < HD)
            at = tl.load(moved + row * D + step, mask=step < D, other=0)
            old = at.to(tl.int64) * kv_slot + vector
            old_key = tl.load(k + old, mask=moves, other=0.0)
            old_value = tl.load(v + old, mask=moves, other=0.0)
            tl.debug_barrier()  # all is read before anything is written
            at = tl.load(goals + step, mask=step < D, other=0)
            goal = at.to(tl.int64) * kv_slot + vector
            tl.store(k + goal, old_key, mask=moves)
            tl.store(v + goal, old_value, mask=moves)
        at = tl.load(goals + D + token[:, None], mask=(token < T)[:, None], other=0)
        goal = at.to(tl.int64) * kv_slot + vector
        tl.store(k + goal, fresh_key, mask=asks)
        tl.store(v + goal, fresh_value, mask=asks)
        tl.debug_barrier()
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


def most_queries(q: Tensor) -> int:
    """Of one program: matrix units take numbers of two bytes; products of others fill the registers."""
    return 64 if q.element_size() == 2 else FEWEST


def splits_of(slots: int, block: int) -> int:
    """With more rows fewer would do, but an image's bits must not depend on its company."""
    return 1 if slots <= ALONE else max(1, min(MOST_SPLITS, triton.cdiv(slots, block) // 2))


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    new: Sequence[Tensor | None] = (None,) * 5,  # k, v, rope, index and source
    interleaved: bool = False,
) -> Tensor:
    if k.stride() != v.stride() or k.stride(-1) != 1:
        k, v = k.contiguous(), v.contiguous()
    q, mask = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, mask))
    rows, heads, tokens, width = q.shape
    most, slots = most_queries(q), k.shape[2]
    keys = (128 if slots <= ALONE else 64) if most > FEWEST else 32
    queries, splits = min(most, max(FEWEST, block_of(tokens))), splits_of(slots, keys)
    *_, source = new
    count = 0 if source is None else source.numel() // rows
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
        *new,
        count,
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
        INTERLEAVED=interleaved,
        BLOCK_D=block_of(max(count, 1)),
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


@operator("attention(Tensor q, Tensor k, Tensor v, Tensor mask) -> Tensor", attention_out)
def launch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attended(q, k, v, mask)


def triton_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`kernels.attention`, in memory [R, T, h, hd]; a query that sees nothing gets zeros, which are not read.

    Wide heads, gradients and mixed dtypes take the plain form.
    """
    mixed = len({x.dtype for x in (q, k, v, mask)}) > 1
    if torch.is_grad_enabled() or mixed or q.shape[-1] > WIDEST:
        return attention(q, k, v, mask)
    return launch_attention(q, k, v, mask)


@operator(
    "attend(Tensor q, Tensor k, Tensor v, Tensor rope, bool interleaved, Tensor(a!) keys, Tensor(b!) values,"
    " Tensor index, Tensor? source, Tensor mask) -> Tensor",
    lambda q, *others: attention_out(q.transpose(1, 2), q, q, q),
)
def launch_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: Tensor,
    interleaved: bool,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    source: Tensor | None,
    mask: Tensor,
) -> Tensor:
    q, shape = q.transpose(1, 2), (len(q), -1)
    keys, values = (x.unflatten(0, shape).transpose(1, 2) for x in (keys, values))
    new = (k, v, rope.contiguous(), index.contiguous(), source)
    return attended(q, keys, values, mask, new, interleaved)


def triton_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: Tensor,
    interleaved: bool,
    write: CacheWrite,
    mask: Tensor,
) -> Tensor:
    """`kernels.attend`: in one kernel where a program sees to all of a head of a row, else in several."""
    shares = k.shape[2] != q.shape[2] or not q.stride() == k.stride() == v.stride()
    wide = q.shape[1] > most_queries(q) or mask.shape[-1] > ALONE or q.shape[-1] > WIDEST
    mixed = len({x.dtype for x in (q, k, v, rope, *write[:2], mask)}) > 1
    if torch.is_grad_enabled() or shares or wide or mixed or q.stride(-1) != 1:
        return attend(q, k, v, rope, interleaved, write, mask, triton_rotate_into, triton_attention)
    return launch_attend(q, k, v, rope, interleaved, *write, mask)
