"""The walk down a verified tree in one program an image: all levels, and the children of a node in turn.

The rule is that of `accept.py`, with its residual [p - q]+: exact, relaxed by neighbours (LANTERN, arXiv
2410.03355; LANTERN++, arXiv 2502.06352), by depth (Cool-SD, arXiv 2601.09212) or by blending. Exact is relaxed with
nothing.
The probabilities at a node stay in registers while its children are tried. The target's is also kept in memory, where
single entries of it are read.
"""

# Triton reads the annotations of its functions: they are not postponed, and say `constexpr` or nothing.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cuda.kernels.programs import EXACTLY, block_of, packed, warps

TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def keep(where, probs, there):
    """Store probabilities that all threads have read from, or will: they wait for each other before and after."""
    tl.debug_barrier()
    tl.store(where, probs, mask=there)
    tl.debug_barrier()


@triton.jit
def lent_mass(probs, near, count, bound, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Mass of the nearest codes, added up as long as the sum stays within the bound.

    probs: [V] in memory. near: [K] in memory, nearest first, of which `count` may lend.
    """
    rank = tl.arange(0, BLOCK_K)
    lends = (rank < count) & (rank < K)
    code = tl.load(near + rank, mask=lends, other=0)
    sums = tl.cumsum(tl.load(probs + code, mask=lends, other=0.0), 0)
    return tl.max(tl.where(lends & (sums <= bound), sums, 0.0), 0)


@triton.jit
def residual(p, q, weight, whole, there):
    """What is left of p once a draft was refused; where nothing is left, p as it was at first.

    p, q: [V]. whole: [V] in memory.
    """
    left = tl.maximum(tl.maximum(p - q, 0.0), p * tl.maximum(1 - weight, 0.0))
    total = tl.sum(left, 0)
    if total > 0:
        left = left / total
    else:
        left = tl.load(whole, mask=there, other=0.0)
    return left


@triton.jit
def walk_kernel(
    p_probs,  # [B, I, V]
    q_probs,  # [B, I, V]
    tokens,  # [B, M]
    child,  # [B, M, C]
    row,  # [B, M]
    uniform,  # [B, D, C]
    neighbours,  # [V, K]
    k,  # [B]
    delta,  # [B]
    factor,  # [B]
    weights,  # [B, D]
    tv,  # [B]
    budget,  # [B]
    node_out,  # [B]
    left_out,  # [B, V]
    relaxed_out,  # [B, D]
    spent_out,  # [B, D]
    child_step,  # from one image to the next, as images may share a table
    row_step,
    uniform_step,
    weight_step,
    inner,  # I
    nodes,  # M
    depths,  # D
    widest,  # C
    V: tl.constexpr,
    K: tl.constexpr,
    BLENDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program an image."""
    image = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    there = index < V
    tokens += image * nodes
    child += image * child_step
    row += image * row_step
    uniform += image * uniform_step
    weights += image * weight_step
    left_out += image * V
    count, base, share = tl.load(k + image), tl.load(delta + image), tl.load(factor + image)
    if BLENDED:
        cost, left = tl.load(tv + image), tl.load(budget + image)
    node = tl.full([], 0, tl.int32)
    walking = node == 0
    for depth in range(depths):
        helped = node < 0
        spent = tl.full([], 0.0, tl.float32)
        walking = walking & (tl.load(child + node * widest) > 0)
        if walking:
            whole = (image * inner + tl.load(row + node)) * V + index
            p = tl.load(p_probs + whole, mask=there, other=0.0)
            q = tl.load(q_probs + whole, mask=there, other=0.0)
            keep(left_out + index, p, there)
            weight = tl.load(weights + depth)
            if BLENDED:
                distance = tl.sum(tl.maximum(p - q, 0.0), 0)
                spent = tl.minimum(tl.minimum(distance, cost), tl.maximum(left, 0.0))
                blend = spent / tl.maximum(distance, TINY)
                left -= spent
            above = node
            waiting = walking
            for rank in range(widest):
                draft = tl.load(child + above * widest + rank)
                if waiting & (draft > 0):
                    token = tl.load(tokens + draft)
                    own = tl.load(left_out + token)
                    drawn = tl.sum(tl.where(index == token, q, 0.0), 0)
                    bar = tl.load(uniform + depth * widest + rank) * drawn
                    mass = own * weight
                    if K > 0:
                        near = neighbours + token.to(tl.int64) * K
                        mass += lent_mass(left_out, near, count, base + share * own, K, BLOCK_K)
                    # A token without drafter mass was not really drawn, as the draws ran out. Strictly below:
                    # a token of probability 0 is never accepted, for any uniform.
                    if drawn > 0:
                        more = tl.minimum(mass, drawn) - tl.minimum(own, drawn)
                        spent += tl.maximum(more, 0.0) / tl.maximum(drawn, TINY)
                        if BLENDED:
                            mass += tl.where(rank == 0, blend, 0.0) * tl.maximum(drawn - mass, 0.0)
                        if bar < mass:
                            node = draft
                            waiting = node < 0
                            helped = bar >= own
                        else:
                            p = residual(p, q, weight, p_probs + whole, there)
                            keep(left_out + index, p, there)
                    q = tl.where(index == token, 0.0, q)
                    q = q / tl.maximum(tl.sum(q, 0), 1e-30)
            walking = node != above
        tl.store(relaxed_out + image * depths + depth, helped)
        tl.store(spent_out + image * depths + depth, spent)
    tl.store(node_out + image, node)


def shapes(
    p: Tensor, q: Tensor, tokens: Tensor, child: Tensor, row: Tensor, uniform: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, _, vocabulary = p.shape
    return (
        tokens.new_empty(images, dtype=torch.int32),
        p.new_empty(images, vocabulary),
        tokens.new_empty(images, uniform.shape[1], dtype=torch.bool),
        p.new_empty(images, uniform.shape[1]),
    )


@operator(
    "triton_walk(Tensor p, Tensor q, Tensor tokens, Tensor child, Tensor row, Tensor uniform, Tensor? neighbours,"
    " Tensor k, Tensor delta, Tensor factor, Tensor weight, Tensor? tv=None, Tensor? budget=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    shapes,
)
def triton_walk(
    p: Tensor,
    q: Tensor,
    tokens: Tensor,
    child: Tensor,
    row: Tensor,
    uniform: Tensor,
    neighbours: Tensor | None,
    k: Tensor,
    delta: Tensor,
    factor: Tensor,
    weight: Tensor,
    tv: Tensor | None = None,
    budget: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `lantern_hpu.ops.kernels.Walk`."""
    node, left, relaxed, spent = shapes(p, q, tokens, child, row, uniform)
    images, inner, vocabulary = p.shape
    child, row, uniform, weight = (packed(x) for x in (child, row, uniform, weight))
    block = block_of(vocabulary)
    lenders = 0 if neighbours is None else neighbours.shape[1]
    walk_kernel[(images,)](
        p.contiguous(),
        q.contiguous(),
        tokens.contiguous(),
        child,
        row,
        uniform,
        None if neighbours is None else neighbours.contiguous(),
        k,
        delta,
        factor,
        weight,
        tv,
        budget,
        node,
        left,
        relaxed,
        spent,
        *(x.stride(0) for x in (child, row, uniform, weight)),
        inner,
        *child.shape[1:2],
        *uniform.shape[1:],
        V=vocabulary,
        K=lenders,
        BLENDED=tv is not None,
        BLOCK=block,
        BLOCK_K=block_of(max(lenders, 1)),
        num_warps=warps(block),
        **EXACTLY,
    )
    return node, left, relaxed, spent
