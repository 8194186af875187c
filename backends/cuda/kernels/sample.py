"""Logits to probabilities in one pass, and those to tokens.

Guidance, temperature, exact top-k, softmax: the k-th largest of a row is found without sorting. A float's bits, read
as a whole number with those of negative floats turned round, rise with the float, so 32 counts settle it bit by bit.

Tokens are drawn by inverse CDF, one program a distribution; several without replacement. A drawn token is struck out
and the rest summed again, while the probabilities stay in registers: each draw follows what is left, however little.
"""

# Triton reads the annotations of its functions: they are not postponed, and say `constexpr` or nothing.

import triton
import triton.language as tl
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cuda.kernels.programs import EXACTLY, LARGEST, block_of, warps
from lantern_hpu.ops import sampling
from lantern_hpu.ops.kernels import probs_out, tokens_out
from lantern_hpu.ops.sampling import SamplingParams, guided_probs

# ---------------------------------------------------------------------------------- probabilities


@triton.jit
def kth_largest(x, k):
    """The k-th largest of a float32 vector; equal entries count each."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    result = tl.full([], -(2**31), tl.int32)
    for place in range(32):
        # The first trial turns the sign, which is set in the lowest number; the others set a bit.
        trial = result ^ (tl.full([], 1, tl.int32) << (31 - place))
        result = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= k, trial, result)
    bits = result ^ ((result >> 31) & 0x7FFFFFFF)  # what turned the bits turns them back
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def probs_kernel(
    logits,  # [R, T, V]
    cfg_scale,  # [B]
    temperature,  # [B]
    top_k,  # [B]
    out,  # [B, T, V]
    T,
    most,  # the largest top-k in use; a larger one keeps everything
    V: tl.constexpr,
    GUIDANCE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a distribution: B * T of them."""
    row = tl.program_id(0).to(tl.int64)
    image = row // T
    token = tl.arange(0, BLOCK)
    there = token < V
    x = tl.load(logits + row * V + token, mask=there, other=0.0).to(tl.float32)
    if GUIDANCE:
        other = (row + tl.num_programs(0)) * V  # the unconditional row
        u = tl.load(logits + other + token, mask=there, other=0.0).to(tl.float32)
        x = u + tl.load(cfg_scale + image) * (x - u)
    # Triton's `/` is not rounded as torch's is, and may make ties or break them.
    x = tl.math.div_rn(x, tl.load(temperature + image))
    x = tl.where(there, x, float("-inf"))
    top = tl.max(x, 0)
    mass = tl.exp(x - top)
    if TOP_K:
        k = tl.load(top_k + image)
        if k <= most:
            # What is no number stays, and makes all of the row none, as in the plain form.
            mass = tl.where((x >= kth_largest(x, k)) | (x != x), mass, 0.0)
    tl.store(out + row * V + token, mass / tl.sum(mass, 0), mask=there)


@operator(
    "probs(Tensor logits, Tensor cfg_scale, Tensor temperature, Tensor top_k, bool guidance, int most)"
    " -> Tensor",
    probs_out,
)
def launch_probs(
    logits: Tensor, cfg_scale: Tensor, temperature: Tensor, top_k: Tensor, guidance: bool, most: int
) -> Tensor:
    out = probs_out(logits, cfg_scale, temperature, top_k, guidance, most)
    images, tokens, vocabulary = out.shape
    block = block_of(vocabulary)
    probs_kernel[(images * tokens,)](
        logits.contiguous(),
        cfg_scale,
        temperature,
        top_k,
        out,
        tokens,
        most,
        V=vocabulary,
        GUIDANCE=guidance,
        TOP_K=most > 0,
        BLOCK=block,
        num_warps=warps(block),
        **EXACTLY,
    )
    return out


def triton_probs(
    logits: Tensor,
    params: SamplingParams,
    guidance: bool,
    max_top_k: int,
    use_top_p: bool,
    top_p_first: bool = False,
) -> Tensor:
    """`sampling.guided_probs`; a batch that uses top-p takes the plain form, which sorts.

    Args:
        logits: [R, T, V] in any dtype.

    Returns [B, T, V] float32.
    """
    if use_top_p or logits.shape[-1] > LARGEST:
        return guided_probs(logits, params, guidance, max_top_k, use_top_p, top_p_first)
    return launch_probs(
        logits, params.cfg_scale, params.temperature, params.top_k, guidance, max_top_k
    )


# ----------------------------------------------------------------------------------------- tokens


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


@operator("distinct(Tensor probs, Tensor uniform) -> Tensor", tokens_out)
def launch_distinct(probs: Tensor, uniform: Tensor) -> Tensor:
    """probs [..., V], uniform [..., draws] -> [..., draws] int32."""
    out = tokens_out(probs, uniform)
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
