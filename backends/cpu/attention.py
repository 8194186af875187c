"""Attention of one token a row, on a processor: cache positions that no row attends to are not read.

With one query a row in float32, sums run over the positions in turn, and a masked one adds an exact zero: what is left
out changes no bit. With several queries it does, as the library cuts longer sums otherwise, and in caches whose size is
no multiple of four, where the library has no whole vectors. Those take the plain form.

In 16 bits the library is slow for one query a row: it takes three times as long as for two. So keys and values that are
read are brought to float32 and multiplied there, which rounds less.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lantern_hpu.backends.operators import operator
from lantern_hpu.ops.kernels import attention as plain

STEP = 16  # positions read are rounded up to a multiple of it: a vector of any number format
VECTOR = 4  # sizes of a cache that the library goes through in whole vectors are multiples of it
CAPACITIES = (192, 448, 1152)  # positions that the form is tried with


def float32_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`plain` in float32, whatever the dtype: q [R, h, T, hd] -> [R, h, T, hd]."""
    return plain(q.float(), k.float(), v.float(), mask.float()).to(q.dtype)


def filled_positions(mask: Tensor) -> int:
    """How many of the positions of a mask [R, 1, T, S] are to be read; all of them if none is attended to."""
    attended = (mask > torch.finfo(mask.dtype).min).flatten(0, -2).any(0).nonzero()  # [n, 1]
    size = mask.shape[-1]
    return min(size, -(-(int(attended[-1]) + 1) // STEP) * STEP) if len(attended) else size


@operator(
    "attention_filled(Tensor q, Tensor k, Tensor v, Tensor mask) -> Tensor",
    lambda q, k, v, mask: torch.empty_like(q),
)
def attention_filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """An operator because how much is read depends on data, which captures and compilers cannot follow."""
    end = filled_positions(mask)
    return float32_attention(q, k[:, :, :end], v[:, :, :end], mask[..., :end]).contiguous()


def filled_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [R, h, T, hd], k and v [R, kv, S, hd], additive mask [R, 1, T, S] -> [R, h, T, hd]."""
    if q.shape[2] > 1 or torch.is_grad_enabled():
        return plain(q, k, v, mask)
    if k.shape[2] % VECTOR:
        return float32_attention(q, k, v, mask)
    result: Tensor = attention_filled(q, k, v, mask)
    return result


def masked_from(lengths: Tensor, capacity: int, dtype: torch.dtype) -> Tensor:
    """An additive mask of rows that are filled to these lengths [R, 1, T, 1]: [R, 1, T, S]."""
    hidden = torch.arange(capacity) >= lengths
    return hidden.to(dtype) * torch.finfo(dtype).min


@torch.no_grad()
def attention_keeps_bits(dtype: torch.dtype) -> bool:
    """Whether what is left out changes no bit here, in caches of several sizes filled to several lengths."""
    random = torch.Generator().manual_seed(0)
    for capacity in CAPACITIES:
        k, v = (torch.randn(2, capacity, 4, 64, generator=random).to(dtype) for _ in range(2))
        q = torch.randn(2, 4, 1, 64, generator=random).to(dtype)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        for length in range(7, capacity, capacity // 5):
            lengths = torch.tensor([length, length // 2 + 1])[:, None, None, None]
            mask = masked_from(lengths, capacity, dtype)
            if not torch.equal(filled_attention(q, k, v, mask), float32_attention(q, k, v, mask)):
                return False
    return True


def by_positions(x: Tensor) -> Tensor:
    """The same [R, kv, S, hd], which in memory is [R, S, kv, hd]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@cache
@torch.no_grad()
def order_keeps_bits(dtype: torch.dtype) -> bool:
    """Whether attention has the same bits here with a cache by head as with one by position."""
    random = torch.Generator().manual_seed(0)
    for capacity in CAPACITIES:
        k, v = (torch.randn(2, 4, capacity, 64, generator=random).to(dtype) for _ in range(2))
        for places in (1, 8, 17):
            q = torch.randn(2, 4, places, 64, generator=random).to(dtype)
            ends = torch.tensor([capacity // 3, capacity // 2])[:, None, None, None]
            mask = masked_from(ends + torch.arange(places)[:, None], capacity, dtype)
            if not torch.equal(
                plain(q, k, v, mask), plain(q, by_positions(k), by_positions(v), mask)
            ):
                return False
    return True
