"""Logits to probabilities in one pass, and those to tokens.

Guidance, temperature, exact top-k, softmax: the k-th largest of a row is found without sorting. A float's bits, read
as a whole number with those of negative floats turned round, rise with the float, so 32 counts settle it bit by bit.

Tokens are drawn by inverse CDF, one program a distribution; several without replacement. A drawn token is struck out
and the rest summed again, while the probabilities stay in registers: each draw follows what is left, however little.

A vocabulary that no program holds is shared out in parts, one a program. What concerns all of it (the largest, the
k-th largest, sums) passes from one launch to the next; the k-th largest is settled 8 bits a launch.
"""

# Triton reads the annotations of its functions: they are not postponed, and say `constexpr` or nothing.

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cuda.kernels.programs import EXACTLY, LARGEST, PART, block_of, warps
from lantern_hpu.ops.kernels import probs_out, tokens_out
from lantern_hpu.ops.sampling import SamplingParams, guided_probs

# ---------------------------------------------------------------------------------- probabilities


@triton.jit
def logits_at(
    logits, cfg_scale, temperature, row, rows, T, token, V: tl.constexpr, GUIDANCE: tl.constexpr
):
    """Logits of a distribution after guidance and temperature; past the vocabulary -inf."""
    image = row // T
    there = token < V
    x = tl.load(logits + row * V + token, mask=there, other=0.0).to(tl.float32)
    if GUIDANCE:
        other = (row + rows) * V  # the unconditional row
        u = tl.load(logits + other + token, mask=there, other=0.0).to(tl.float32)
        x = u + tl.load(cfg_scale + image) * (x - u)
    # Triton's `/` is not rounded as torch's is, and may make ties or break them.
    x = tl.math.div_rn(x, tl.load(temperature + image))
    return tl.where(there, x, float("-inf"))


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
    token = tl.arange(0, BLOCK)
    rows = tl.num_programs(0)
    x = logits_at(logits, cfg_scale, temperature, row, rows, T, token, V, GUIDANCE)
    top = tl.max(x, 0)
    mass = tl.exp(x - top)
    if TOP_K:
        k = tl.load(top_k + row // T)
        if k <= most:
            # What is no number stays, and makes all of the row none, as in the plain form.
            mass = tl.where((x >= kth_largest(x, k)) | (x != x), mass, 0.0)
    tl.store(out + row * V + token, mass / tl.sum(mass, 0), mask=token < V)


DIGITS = tl.constexpr(256)  # of 8 bits


@triton.jit
def shared_out(BLOCK: tl.constexpr):
    """The distribution of a program, which part of it is the program's, and the tokens of that."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    return row, part, part * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def ordered(x):
    """The bits of float32 numbers, which rise with them from the first to the last without a sign."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) | -0x80000000)


@triton.jit
def leading_digits(counts, k, row, rows, parts, KNOWN: tl.constexpr, BLOCK_P: tl.constexpr):
    """Those digits of the k-th largest that were counted, the others 0.

    counts: [4, rows, parts, DIGITS] in memory, of the numbers that agree in all digits before.
    """
    digit = tl.arange(0, DIGITS)
    part = tl.arange(0, BLOCK_P)[:, None]
    found = tl.full([], 0, tl.int32)
    for place in tl.static_range(KNOWN):
        these = counts + ((place * rows + row) * parts + part) * DIGITS + digit[None, :]
        count = tl.sum(tl.load(these, mask=part < parts, other=0), 0)
        from_here = tl.sum(count, 0) - tl.cumsum(count, 0) + count
        chosen = tl.max(tl.where(from_here >= k, digit, 0), 0)
        k -= tl.sum(tl.where(digit > chosen, count, 0), 0)
        found |= chosen << (24 - 8 * place)
    return found


@triton.jit
def scaled_kernel(
    logits,  # [R, T, V]
    cfg_scale,  # [B]
    temperature,  # [B]
    out,  # [B, T, V]
    tops,  # [B, T, parts]
    counts,  # [4, B, T, parts, DIGITS]; None without top-k
    T,
    V: tl.constexpr,
    GUIDANCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a part: its scaled logits, the largest, and how many have each first digit."""
    row, part, token = shared_out(BLOCK)
    rows, parts = tl.num_programs(0), tl.num_programs(1)
    x = logits_at(logits, cfg_scale, temperature, row, rows, T, token, V, GUIDANCE)
    tl.store(out + row * V + token, x, mask=token < V)
    place = row * parts + part
    tl.store(tops + place, tl.max(x, 0))
    if counts is not None:
        count = tl.histogram((ordered(x) >> 24) & (DIGITS - 1), DIGITS, mask=token < V)
        tl.store(counts + place * DIGITS + tl.arange(0, DIGITS), count)


@triton.jit
def counted_kernel(
    x,  # [B, T, V]
    top_k,  # [B]
    counts,  # [4, B, T, parts, DIGITS]
    T,
    V: tl.constexpr,
    KNOWN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One program a part: how many of its numbers that agree in the known digits have each next one."""
    row, part, token = shared_out(BLOCK)
    rows, parts = tl.num_programs(0), tl.num_programs(1)
    key = ordered(tl.load(x + row * V + token, mask=token < V, other=0.0))
    known = leading_digits(counts, tl.load(top_k + row // T), row, rows, parts, KNOWN, BLOCK_P)
    agree = (token < V) & (((key ^ known) >> (32 - 8 * KNOWN)) == 0)
    count = tl.histogram((key >> (24 - 8 * KNOWN)) & (DIGITS - 1), DIGITS, mask=agree)
    place = (KNOWN * rows + row) * parts + part
    tl.store(counts + place * DIGITS + tl.arange(0, DIGITS), count)


@triton.jit
def weighed_kernel(
    out,  # [B, T, V], read as scaled logits and left as masses
    tops,  # [B, T, parts]
    masses,  # [B, T, parts]
    top_k,  # [B]
    counts,  # [4, B, T, parts, DIGITS]; None without top-k
    T,
    most,  # as of `probs_kernel`
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One program a part: its masses, and their sum."""
    row, part, token = shared_out(BLOCK)
    rows, parts = tl.num_programs(0), tl.num_programs(1)
    others = tl.arange(0, BLOCK_P)
    x = tl.load(out + row * V + token, mask=token < V, other=float("-inf"))
    top = tl.load(tops + row * parts + others, mask=others < parts, other=float("-inf"))
    mass = tl.exp(x - tl.max(top, 0))
    if counts is not None:
        k = tl.load(top_k + row // T)
        if k <= most:
            key = leading_digits(counts, k, row, rows, parts, 4, BLOCK_P)
            bits = key ^ (~(key >> 31) | -0x80000000)  # as `ordered` turned them
            mass = tl.where((x >= bits.to(tl.float32, bitcast=True)) | (x != x), mass, 0.0)
    tl.store(out + row * V + token, mass, mask=token < V)
    tl.store(masses + row * parts + part, tl.sum(mass, 0))


@triton.jit
def divided_kernel(
    out,  # [rows, V]
    masses,  # [rows, parts]
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One program a part: masses become probabilities."""
    row, _, token = shared_out(BLOCK)
    parts = tl.num_programs(1)
    others = tl.arange(0, BLOCK_P)
    total = tl.sum(tl.load(masses + row * parts + others, mask=others < parts, other=0.0), 0)
    mass = tl.load(out + row * V + token, mask=token < V, other=0.0)
    tl.store(out + row * V + token, mass / total, mask=token < V)


def probs_in_parts(
    logits: Tensor, params: Sequence[Tensor], out: Tensor, guidance: bool, most: int
) -> Tensor:
    """See `launch_probs`; params: scale, temperature and top-k, [B] each."""
    *scales, top_k = params
    images, tokens, vocabulary = out.shape
    parts = -(-vocabulary // PART)
    grid, shape = (images * tokens, parts), (images, tokens, parts)
    tops, masses = out.new_empty(shape), out.new_empty(shape)
    counts = top_k.new_empty(4, *shape, DIGITS.value, dtype=torch.int32) if most else None
    common = {"V": vocabulary, "BLOCK": PART, "num_warps": warps(PART), **EXACTLY}
    across = common | {"BLOCK_P": block_of(parts)}
    scaled_kernel[grid](logits, *scales, out, tops, counts, tokens, GUIDANCE=guidance, **common)
    for known in range(1, 4) if most else ():
        counted_kernel[grid](out, top_k, counts, tokens, KNOWN=known, **across)
    weighed_kernel[grid](out, tops, masses, top_k, counts, tokens, most, **across)
    divided_kernel[grid](out, masses, **across)
    return out


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
    if vocabulary > LARGEST:
        params = (cfg_scale, temperature, top_k)
        return probs_in_parts(logits.contiguous(), params, out, guidance, most)
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
    if use_top_p:
        return guided_probs(logits, params, guidance, max_top_k, use_top_p, top_p_first)
    return launch_probs(
        logits, params.cfg_scale, params.temperature, params.top_k, guidance, max_top_k
    )


# ----------------------------------------------------------------------------------------- tokens


@triton.jit
def first_past(mass, target, sums, place, end):
    """The first place with a mass whose sum is beyond the target, the last with one if none is; else the end's.

    The sums run in parallel, so they may fall by a rounding, and their end may miss the target: whatever happens, what
    has mass is taken as long as there is any.
    """
    past = tl.min(tl.where((sums > target) & (mass > 0), place, end), 0)
    last = tl.max(tl.where(mass > 0, place, -1), 0)
    return tl.where(past < end, past, tl.where(last < 0, end - 1, last))


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
        drawn = first_past(left, target, mass, token, V)
        tl.store(out + row * draws + draw, drawn)
        left = tl.where(token == drawn, 0.0, left)


@triton.jit
def masses_kernel(
    probs,  # [n, V]
    masses,  # [n, parts]
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a part."""
    row, part, token = shared_out(BLOCK)
    mass = tl.load(probs + row * V + token, mask=token < V, other=0.0)
    tl.store(masses + row * tl.num_programs(1) + part, tl.sum(mass, 0))


@triton.jit
def drawn_kernel(
    probs,  # [n, V]
    uniform,  # [n, draws]
    masses,  # [n, parts]
    out,  # [n, draws]
    draws,
    parts,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program a distribution: the part of each draw, then the token within it, which alone is read."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_P)
    rank = tl.arange(0, BLOCK_D)
    gone = tl.full([BLOCK_D], -1, tl.int32)
    mass = tl.load(masses + row * parts + part, mask=part < parts, other=0.0)
    for draw in range(draws):
        sums = tl.cumsum(mass, 0)
        target = tl.load(uniform + row * draws + draw) * tl.max(sums, 0)
        here = first_past(mass, target, sums, part, parts)
        before = tl.sum(tl.where(part < here, mass, 0.0), 0)
        token = here * BLOCK + tl.arange(0, BLOCK)
        left = tl.load(probs + row * V + token, mask=token < V, other=0.0)
        for earlier in range(draw):
            left = tl.where(token == tl.sum(tl.where(rank == earlier, gone, 0), 0), 0.0, left)
        drawn = first_past(left, target, before + tl.cumsum(left, 0), token, V)
        tl.store(out + row * draws + draw, drawn)
        gone = tl.where(rank == draw, drawn, gone)
        rest = tl.sum(tl.where(token == drawn, 0.0, left), 0)
        mass = tl.where(part == here, rest, mass)


def distinct_in_parts(probs: Tensor, uniform: Tensor, out: Tensor) -> Tensor:
    """See `launch_distinct`."""
    vocabulary, draws = probs.shape[-1], uniform.shape[-1]
    rows, parts = out.numel() // draws, -(-vocabulary // PART)
    masses = probs.new_empty(rows, parts)
    common = {"V": vocabulary, "BLOCK": PART, "num_warps": warps(PART), **EXACTLY}
    masses_kernel[(rows, parts)](probs, masses, **common)
    blocks = {"BLOCK_P": block_of(parts), "BLOCK_D": block_of(draws)}
    drawn_kernel[(rows,)](probs, uniform, masses, out, draws, parts, **blocks, **common)
    return out


@operator("distinct(Tensor probs, Tensor uniform) -> Tensor", tokens_out)
def launch_distinct(probs: Tensor, uniform: Tensor) -> Tensor:
    """`sampling.sample_distinct`: probs [..., V], uniform [..., draws] -> [..., draws] int32."""
    out = tokens_out(probs, uniform)
    vocabulary, draws = probs.shape[-1], uniform.shape[-1]
    if vocabulary > LARGEST:
        return distinct_in_parts(probs.contiguous(), uniform.contiguous(), out)
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
    return launch_distinct(probs, uniform[..., None])[..., 0]
