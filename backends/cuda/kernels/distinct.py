"""Probabilities to tokens by inverse CDF, one program a distribution; several are drawn without replacement.

A drawn token is struck out and the rest summed again, while the probabilities stay in registers: each draw follows
what is left also where that is little.
"""

# Triton reads the annotations of its functions: they are not postponed, and say `constexpr` or nothing.

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cuda.kernels.programs import EXACTLY, LARGEST, block_of, warps
from lantern_hpu.ops import sampling


@triton.jit
def distinct_kernel(
    probs,  # [n, V]
    uniform,  # [n, draws]
    out,  # [n, draws]
    draws,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a distribution."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    left = tl.load(probs + row * V + token, mask=token < V, other=0.0)
    for draw in range(draws):
        mass = tl.cumsum(left, 0)
        target = tl.load(uniform + row * draws + draw) * tl.max(mass, 0)
        # The sum runs in parallel, so it may fall by a rounding, and its end may miss the target: whatever
        # happens, a token that has mass is taken as long as there is one.
        past = tl.min(tl.where((mass > target) & (left > 0), token, V), 0)
        last = tl.max(tl.where(left > 0, token, -1), 0)
        drawn = tl.where(past < V, past, tl.where(last < 0, V - 1, last))
        tl.store(out + row * draws + draw, drawn)
        left = tl.where(token == drawn, 0.0, left)


def distinct_out(probs: Tensor, uniform: Tensor) -> Tensor:
    return uniform.new_empty(uniform.shape, dtype=torch.int32)


@operator("distinct(Tensor probs, Tensor uniform) -> Tensor", distinct_out)
def launch_distinct(probs: Tensor, uniform: Tensor) -> Tensor:
    """probs [..., V], uniform [..., draws] -> [..., draws] int32."""
    out = distinct_out(probs, uniform)
    vocabulary, draws = probs.shape[-1], uniform.shape[-1]
    block = block_of(vocabulary)
    distinct_kernel[(out.numel() // draws,)](
        probs.contiguous(),
        uniform.contiguous(),
        out,
        draws,
        V=vocabulary,
        BLOCK=block,
        num_warps=warps(block),
        **EXACTLY,
    )
    return out


def triton_sample(probs: Tensor, uniform: Tensor) -> Tensor:
    """`sampling.sample`: probs [..., V], uniform [...] -> [...] int32."""
    if probs.shape[-1] > LARGEST:
        return sampling.sample(probs, uniform)
    return launch_distinct(probs, uniform[..., None])[..., 0]


def triton_distinct(probs: Tensor, uniform: Tensor) -> Tensor:
    """`sampling.sample_distinct`: probs [..., V], uniform [..., c] -> [..., c] int32."""
    if probs.shape[-1] > LARGEST:
        return sampling.sample_distinct(probs, uniform)
    return launch_distinct(probs, uniform)
