"""Attention of a few queries over a long cache, of which each row reads what it sees and no more.

The mask says what that is: a part of it is loaded first, and where all of that is at the floor, the keys and
values there are not. So an image reads its committed slots and its tree, however large the cache is. Heads that share
keys are rows of one tile, so that keys are read once. Those of a long row are shared out among several programs (flash
decoding): of a few queries the last of them brings all together, of many a second kernel does. The programs also norm
and rotate the new queries and keys, and each writes the part of the cache that it then reads; several tiles of queries
write the same.
"""

# Triton reads the annotations of its functions: they are not postponed, and say `constexpr` or nothing.

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cuda.kernels.forward import triton_rotate, turned
from lantern_hpu.backends.cuda.kernels.programs import EXACTLY, FEWEST, block_of, warps
from lantern_hpu.ops.kernels import CacheWrite, HeadNorms, attend, attention

WIDEST = 128  # features of a head that fit a program
MOST_SPLITS = 8  # programs that share the keys of a row, for each head of the queries
# Parts (queries of a head by splits) that one program brings together: 128 KB of 128 features
MOST_PARTS = 256
COUNTERS = 1 << 14  # of programs that share keys
NEW = 32  # tokens that a program writes at once
COMBINED = 4  # queries of heads that a program of the second kernel brings together
ALONE = 512  # slots that one program reads, in larger pieces
LOWEST = tl.constexpr(-1e38)  # below any score
# The fields of `HeadNorms` as arguments of an operator, and what those are where there are no norms
NORMS = "Tensor? q_weight, Tensor? k_weight, Tensor? q_bias, Tensor? k_bias, float eps"
NO_NORMS = (None, None, None, None, 0.0)


@triton.jit
def looked(
    asked,  # [BLOCK_T, BLOCK_HD] queries
    k,  # where a row's keys and values of a head begin
    v,
    mask,  # [BLOCK_T, 1], where the queries' begin
    known,  # [BLOCK_T]
    feature,
    kv_slot,
    S,
    split,
    HD: tl.constexpr,
    FLOOR: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Of a split's keys: the highest score [BLOCK_T], what all weigh against it, and what they give [BLOCK_T, HD]."""
    top = tl.where(known, LOWEST, LOWEST)
    mass = tl.where(known, 0.0, 0.0)
    mixed = tl.zeros_like(asked).to(tl.float32)
    # In turn, so that each split has its share of the slots that are committed.
    for block in range(split, tl.cdiv(S, BLOCK_S), SPLITS):
        slot = block * BLOCK_S + tl.arange(0, BLOCK_S)
        inside = known[:, None] & (slot < S)[None, :]
        bias = tl.load(mask + slot[None, :], mask=inside, other=FLOOR).to(tl.float32)
        if tl.max(bias) > FLOOR:
            there = (slot < S)[:, None] & (feature < HD)
            place = slot[:, None].to(tl.int64) * kv_slot + feature
            key = tl.load(k + place.T, mask=there.T, other=0.0)
            value = tl.load(v + place, mask=there, other=0.0)
            score = tl.dot(asked, key, input_precision="ieee") * HD**-0.5
            score = tl.where(bias > FLOOR, score + bias, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            fade, top = tl.exp(top - higher), higher
            weight = tl.exp(score - top[:, None])
            mass = mass * fade + tl.sum(weight, 1)
            mixed = mixed * fade[:, None]
            mixed += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    # The highest score weighs 1: less than that is nothing.
    return top, tl.maximum(mass, 1.0), mixed


@triton.jit
def together(parts, sizes, known, there, HD: tl.constexpr, SPLITS: tl.constexpr):
    """What all splits make of some queries: there [n, BLOCK_HD], known [n]; parts and sizes are places of the first."""
    top = tl.where(known, LOWEST, LOWEST)
    mass = tl.where(known, 0.0, 0.0)
    mixed = tl.where(there, 0.0, 0.0)
    for split in tl.range(SPLITS, loop_unroll_factor=8):  # many loads at once
        size = tl.load(sizes + split, mask=known, other=0.0, cache_modifier=".cg")
        part = tl.load(parts + split * HD, mask=there, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, size)
        fade, weight, top = tl.exp(top - higher), tl.exp(size - higher), higher
        mass = mass * fade + weight
        mixed = mixed * fade[:, None] + weight[:, None] * part
    return mixed / mass[:, None]


@triton.jit
def move(
    k,  # where the keys and values of a head begin, of all rows
    v,
    from_k,  # and those that move: in the same cache at slots `source`, or [R, D] without them
    from_v,
    source,
    goal,  # [D] slots
    row,
    feature,
    D,
    S,
    split,
    kv_slot,
    HD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Within a split's part of the cache."""
    step = tl.arange(0, BLOCK_D)[:, None]
    moves = (step < D) & (feature < HD)
    at = row * D + step
    if source is not None:
        at = tl.load(source + at, mask=step < D, other=0).to(tl.int64)
    key = tl.load(from_k + at * kv_slot + feature, mask=moves, other=0.0)
    value = tl.load(from_v + at * kv_slot + feature, mask=moves, other=0.0)
    tl.debug_barrier()  # all is read before anything is written
    at = tl.load(goal + step, mask=step < D, other=0).to(tl.int64)
    moves = moves & ((at - row * S) // BLOCK_S % SPLITS == split)
    tl.store(k + at * kv_slot + feature, key, mask=moves)
    tl.store(v + at * kv_slot + feature, value, mask=moves)


@triton.jit
def attention_kernel(
    q,  # [R, h, T, HD]
    k,  # [R, kv, S, HD]
    v,  # [R, kv, S, HD]
    mask,  # [R, T, S]
    out,  # [R, T, h, HD]
    parts,  # [R, T, h, SPLITS, HD], what each split makes of it; None for one split
    sizes,  # [R, T, h, SPLITS], logarithms of what each split's weights add up to
    arrived,  # [R, tiles, kv] zeros, splits that are done; None: another kernel brings them together
    new_k,  # [R, kv, T, HD] to be rotated and written first, with the steps of q; None: nothing is
    new_v,  # [R, kv, T, HD]
    rope,  # [R, T, 2, HD / 2]
    index,  # [R * (D + T)], slots of the whole cache where what moves goes, and what is new
    moved,  # see `move`; nothing moves without `moved_k`
    moved_k,
    moved_v,
    q_weight,  # of the norms that queries and keys pass before; None: they pass none
    k_weight,
    q_bias,
    k_bias,
    eps,
    D,
    q_row,  # steps of the arguments
    q_token,
    kv_row,  # keys and values have the same strides
    kv_slot,
    T,
    S,
    Q_HEAD: tl.constexpr,  # known to the compiler, which then reads several features at once
    KV_HEAD: tl.constexpr,
    HD: tl.constexpr,
    FLOOR: tl.constexpr,
    SHARE: tl.constexpr,  # heads of q to a head of k
    SPLITS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_NEW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_HD: tl.constexpr,
):
    """One program a head of the keys, a tile of queries and a split of the keys. Who sees nothing gets zeros."""
    group, row = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    tile, split = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    query = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    token, head = query // SHARE, group * SHARE + query % SHARE
    known = token < T
    feature = tl.arange(0, BLOCK_HD)[None, :]
    asks = known[:, None] & (feature < HD)
    source = q + row * q_row + head[:, None] * Q_HEAD + token[:, None] * q_token
    k += group * KV_HEAD
    v += group * KV_HEAD
    if new_k is None:
        asked = tl.load(source + feature, mask=asks, other=0.0)
    else:
        turns, whose = rope + (row * T + token[:, None]) * HD, head[:, None]
        asked = turned(
            source, turns, feature, asks, whose, q_weight, q_bias, eps, HD // 2, INTERLEAVED
        )
        index += row * (D + T)
        if moved_k is not None:
            move(
                k, v, moved_k + group * KV_HEAD, moved_v + group * KV_HEAD, moved, index, row,
                feature, D, S, split, kv_slot, HD, SPLITS, BLOCK_D, BLOCK_S,
            )  # fmt: skip
        for first in range(0, T, BLOCK_NEW):
            step = first + tl.arange(0, BLOCK_NEW)[:, None]
            fresh = (step < T) & (feature < HD)
            at = row * q_row + group * Q_HEAD + step * q_token
            angles = rope + (row * T + step) * HD
            key = turned(
                new_k + at, angles, feature, fresh, group, k_weight, k_bias, eps, HD // 2, INTERLEAVED
            )  # fmt: skip
            slot = tl.load(index + D + step, mask=step < T, other=0).to(tl.int64)
            fresh = fresh & ((slot - row * S) // BLOCK_S % SPLITS == split)
            tl.store(k + slot * kv_slot + feature, key, mask=fresh)
            value = tl.load(new_v + at + feature, mask=fresh)
            tl.store(v + slot * kv_slot + feature, value, mask=fresh)
        tl.debug_barrier()
    at = row * kv_row
    mask += (row * T + token[:, None]) * S
    top, mass, mixed = looked(
        asked, k + at, v + at, mask, known, feature, kv_slot, S, split, HD, FLOOR, SPLITS, BLOCK_S
    )
    result = (row * T + token) * (tl.num_programs(0) * SHARE) + head
    out += result[:, None] * HD + feature
    if SPLITS == 1:
        tl.store(out, mixed / mass[:, None], mask=asks)
    else:
        sizes += result * SPLITS
        parts += result[:, None] * (SPLITS * HD) + feature
        tl.store(sizes + split, top + tl.log(mass), mask=known)
        tl.store(parts + split * HD, mixed / mass[:, None], mask=asks)
        if arrived is not None:
            tl.debug_barrier()  # all threads have stored theirs
            arrived += (row * (tl.num_programs(1) // SPLITS) + tile) * tl.num_programs(0) + group
            # The last one finds in memory what the others made
            if tl.atomic_add(arrived, 1) == SPLITS - 1:
                tl.store(arrived, 0)
                tl.store(out, together(parts, sizes, known, asks, HD, SPLITS), mask=asks)


@triton.jit
def combine_kernel(
    parts,  # [n, SPLITS, HD]
    sizes,  # [n, SPLITS]
    out,  # [n, HD]
    n,
    HD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HD: tl.constexpr,
):
    """One program a few queries of heads."""
    query = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    feature, known = tl.arange(0, BLOCK_HD)[None, :], query < n
    there = known[:, None] & (feature < HD)
    parts += query[:, None] * (SPLITS * HD) + feature
    mixed = together(parts, sizes + query * SPLITS, known, there, HD, SPLITS)
    tl.store(out + query[:, None] * HD + feature, mixed, mask=there)


def attention_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """In memory [R, T, h, hd], which is how the next matrix reads it."""
    rows, heads, tokens, width = q.shape
    return q.new_empty(rows, tokens, heads, width).transpose(1, 2)


def splits_of(slots: int, block: int, share: int) -> int:
    """With more rows fewer would do, but an image's bits must not depend on its company."""
    most = min(MOST_SPLITS * share, MOST_PARTS // share, triton.cdiv(slots, block) // 2)
    return 1 if slots <= ALONE else max(1, most)


@cache
def counters(device: torch.device, stream: int) -> Tensor:
    """Of each stream's own: zeros, as every kernel leaves them. First called before a recording, which keeps them."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    new: tuple[Any, ...] = (None,) * 5,  # k, v, rope, index and source
    interleaved: bool = False,
    norms: tuple[Any, ...] = NO_NORMS,
) -> Tensor:
    if k.stride() != v.stride() or k.stride(-1) != 1:
        k, v = k.contiguous(), v.contiguous()
    q = q if q.stride(-1) == 1 else q.contiguous()
    rows, heads, tokens, width = q.shape
    mask = mask.expand(rows, -1, -1, -1).contiguous()
    # Matrix units take numbers of two bytes; products of others fill the registers
    most = 64 if q.element_size() == 2 else FEWEST
    slots = k.shape[2]
    keys = (128 if slots <= ALONE else 64) if most > FEWEST else 32
    kv = k.shape[1]
    share = heads // kv
    queries = min(most, max(FEWEST, block_of(tokens * share)))
    tiles, splits = triton.cdiv(tokens * share, queries), splits_of(slots, keys, share)
    *fresh, source = new
    moved: tuple[Tensor | None, ...] = (None, None, None)
    if source is not None and tiles * splits == 1:
        moved = (source, k, v)
    elif source is not None:  # gathered, as other programs write where they are
        moved = (None, *(x.transpose(1, 2).flatten(0, 1).index_select(0, source) for x in (k, v)))
    count = 0 if source is None else source.numel() // rows
    out = attention_out(q, k, v, mask)
    parts = sizes = arrived = None
    if splits > 1:
        parts = q.new_empty(rows, tokens, heads, splits, width, dtype=torch.float32)
        sizes = q.new_empty(rows, tokens, heads, splits, dtype=torch.float32)
        if tokens * share * splits <= MOST_PARTS and rows * tiles * kv <= COUNTERS:
            stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
            arrived = counters(q.device, stream)
    attention_kernel[(kv, tiles * splits, rows)](
        q,
        k,
        v,
        mask,
        out,
        parts,
        sizes,
        arrived,
        *fresh,
        *moved,
        *norms,
        count,
        *q.stride()[0:3:2],
        *k.stride()[0:3:2],
        tokens,
        slots,
        Q_HEAD=q.stride(1),
        KV_HEAD=k.stride(1),
        HD=width,
        FLOOR=torch.finfo(mask.dtype).min,
        SHARE=share,
        SPLITS=splits,
        INTERLEAVED=interleaved,
        BLOCK_D=block_of(max(count, 1)),
        BLOCK_NEW=min(NEW, block_of(tokens)),
        BLOCK_T=queries,
        BLOCK_S=keys,
        BLOCK_HD=max(FEWEST, block_of(width)),
        num_warps=4,
        **EXACTLY,
    )
    if splits > 1 and arrived is None:
        combine_kernel[(triton.cdiv(rows * tokens * heads, COMBINED),)](
            parts,
            sizes,
            out,
            rows * tokens * heads,
            HD=width,
            SPLITS=splits,
            BLOCK=COMBINED,
            BLOCK_HD=block_of(width),
            num_warps=warps(COMBINED * block_of(width)),
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
    f" Tensor index, Tensor? source, Tensor mask, {NORMS}) -> Tensor",
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
    *norms: Any,
) -> Tensor:
    q, shape = q.transpose(1, 2), (len(q), -1)
    keys, values = (x.unflatten(0, shape).transpose(1, 2) for x in (keys, values))
    new = (k, v, rope.contiguous(), index.contiguous(), source)
    return attended(q, keys, values, mask, new, interleaved, norms)


def triton_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: Tensor,
    interleaved: bool,
    write: CacheWrite,
    mask: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """`kernels.attend`, into a contiguous cache."""
    assert write.keys.is_contiguous() and write.values.is_contiguous()
    apart = not q.stride() == k.stride() == v.stride() or q.stride(-1) != 1
    mixed = len({x.dtype for x in (q, k, v, rope, *write[:2], mask)}) > 1
    how = (rope, interleaved)
    if torch.is_grad_enabled() or apart or mixed or q.shape[-1] > WIDEST:
        return attend(q, k, v, *how, write, mask, norms, triton_rotate, triton_attention)
    return launch_attend(q, k, v, *how, *write, mask, *(norms or NO_NORMS))
