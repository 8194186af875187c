"""The walk down a verified tree in one program an image: all levels, and the children of a node in turn; and in another
what a step keeps, counts and moves.

`triton_walk` tries each draft by itself, `triton_traverse` verifies them together. The rules are those of
`decode/rules.py`: exact, relaxed by blending, and of `triton_walk` by neighbours (LANTERN, arXiv 2410.03355;
LANTERN++, arXiv 2502.06352) or by depth (Cool-SD, arXiv 2601.09212), with the residual [p - q]+. Exact is relaxed with
nothing.
The probabilities at a node stay in registers while its children are tried. `triton_walk` also keeps the target's in
memory, where single entries of it are read.
"""

# Triton reads the annotations of its functions: they are not postponed, and say `constexpr` or nothing.

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cuda.kernels.programs import EXACTLY, block_of, packed, warps
from lantern_hpu.ops.kernels import kept_out

TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


# ------------------------------------------------------------------------------------------- walk


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


@triton.jit
def tried(
    p_probs,  # [I, V]
    q_probs,  # [I, V]
    node,
    tokens,  # [M]
    child,  # [M, C]
    row,  # [M]
    tv,  # []
    numbers,  # [7, M]: see `traverse_kernel`
    nodes,
    widest,
    V: tl.constexpr,
    BLENDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the weights of a node's children. -> what is left of p and of its weight if nothing behind them is kept"""
    index = tl.arange(0, BLOCK)
    there = index < V
    whole = tl.load(row + node).to(tl.int64) * V + index
    p = tl.load(p_probs + whole, mask=there, other=0.0)
    q = tl.load(q_probs + whole, mask=there, other=0.0)
    weight = tl.load(numbers + node)
    if BLENDED:
        distance = tl.sum(tl.maximum(p - q, 0.0), 0)
        left = tl.load(numbers + 4 * nodes + node)
        spent = tl.minimum(tl.minimum(distance, tl.load(tv)), tl.maximum(left, 0.0))
        share = spent / tl.maximum(distance, TINY)
        p += share * (q - p)
        tl.store(numbers + 2 * nodes + node, spent)
        tl.store(numbers + 3 * nodes + node, share)
    for rank in range(widest):
        draft = tl.load(child + node * widest + rank)
        if draft > 0:
            token = tl.load(tokens + draft)
            own = tl.sum(tl.where(index == token, p, 0.0), 0)
            drawn = tl.sum(tl.where(index == token, q, 0.0), 0)
            kept = tl.minimum(weight * own / tl.maximum(drawn, TINY), 1.0)
            tl.store(numbers + draft, tl.where(drawn > 0, kept, 0.0))
            tl.store(numbers + 5 * nodes + draft, node * 1.0)
            tl.store(numbers + 6 * nodes + draft, tl.load(numbers + 6 * nodes + node) + 1)
            if BLENDED:
                tl.store(numbers + 4 * nodes + draft, left - spent)
            if drawn > 0:
                rest = tl.maximum(weight * p - q, 0.0)
                mass = tl.sum(rest, 0)
                refused = mass + (1 - weight)
                if mass > 0:
                    p = rest / mass
                else:
                    p = tl.load(p_probs + whole, mask=there, other=0.0)
                if refused > 0:
                    weight = mass / refused
                else:
                    weight = tl.full([], 1.0, tl.float32)
            q = tl.where(index == token, 0.0, q)
            q = q / tl.maximum(tl.sum(q, 0), 1e-30)
    return p, weight


@triton.jit
def traverse_kernel(
    p_probs,  # [B, I, V]
    q_probs,  # [B, I, V]
    tokens,  # [B, M]
    child,  # [B, M, C]
    row,  # [B, M]
    order,  # [M]
    uniform,  # [B, M - 1]
    tv,  # [B]
    budget,  # [B]
    node_out,  # [B]
    left_out,  # [B, V]
    relaxed_out,  # [B, D] of zeros
    spent_out,  # [B, D] of zeros
    # [B, 7, M] of each node: weight, chance, what it spends and its share of q, what is left to spend, parent, depth
    numbers,
    child_step,  # from one image to the next, as images may share a table
    row_step,
    uniform_step,
    inner,  # I
    nodes,  # M
    depths,  # D
    most,  # C
    V: tl.constexpr,
    BLENDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program an image."""
    image = tl.program_id(0).to(tl.int64)
    p_probs += image * inner * V
    q_probs += image * inner * V
    tokens += image * nodes
    child += image * child_step
    row += image * row_step
    uniform += image * uniform_step
    numbers += image * 7 * nodes
    tl.store(numbers, 1.0)
    tl.store(numbers + 6 * nodes, 0.0)
    if BLENDED:
        tl.store(numbers + 4 * nodes, tl.load(budget + image))
        tv += image
    for node in range(nodes):
        tl.debug_barrier()  # what was stored is read by all threads
        chance = tl.load(numbers + node)
        if tl.load(child + node * most) > 0:
            _, chance = tried(
                p_probs,
                q_probs,
                node,
                tokens,
                child,
                row,
                tv,
                numbers,
                nodes,
                most,
                V,
                BLENDED,
                BLOCK,
            )
        tl.store(numbers + nodes + node, chance)
    tl.debug_barrier()
    slot = tl.arange(0, BLOCK_M)
    asked = tl.load(order + slot, mask=slot < nodes, other=0)
    bars = tl.load(uniform + asked - 1, mask=asked > 0, other=-1.0)  # the root is kept
    kept = bars < tl.load(numbers + nodes + asked)
    stop = tl.load(order + tl.min(tl.where(kept & (slot < nodes), slot, nodes), 0))
    tl.store(node_out + image, stop)
    chance = tl.load(numbers + nodes + stop)
    if tl.load(child + stop * most) > 0:
        p, _ = tried(
            p_probs, q_probs, stop, tokens, child, row, tv, numbers, nodes, most, V, BLENDED, BLOCK
        )
        index = tl.arange(0, BLOCK)
        tl.store(left_out + image * V + index, p, mask=index < V)
        if BLENDED:
            depth = tl.load(numbers + 6 * nodes + stop).to(tl.int64)
            tl.store(spent_out + image * depths + depth, tl.load(numbers + 2 * nodes + stop))
    if BLENDED:  # up the path
        node = stop
        for _ in range(depths):
            if node > 0:
                above = tl.load(numbers + 5 * nodes + node).to(tl.int32)
                place = image * depths + tl.load(numbers + 6 * nodes + above).to(tl.int64)
                at = tl.load(row + above).to(tl.int64) * V + tl.load(tokens + node)
                own, drawn = tl.load(p_probs + at), tl.load(q_probs + at)
                raised = own + tl.load(numbers + 3 * nodes + above) * (drawn - own)
                bar = tl.load(uniform + node - 1) / chance
                need = own / tl.maximum(tl.minimum(raised, drawn), TINY)
                spent = tl.load(numbers + 2 * nodes + above)
                is_first = tl.load(child + above * most) == node
                tl.store(relaxed_out + place, is_first & (spent > 0) & (bar >= need))
                tl.store(spent_out + place, spent)
                chance = tl.full([], 1.0, tl.float32)  # it is not the last of the path
                node = above


def shapes(p: Tensor, tokens: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, _, vocabulary = p.shape
    return (
        tokens.new_empty(images, dtype=torch.int32),
        p.new_zeros(images, vocabulary),
        tokens.new_zeros(images, depth, dtype=torch.bool),
        p.new_zeros(images, depth),
    )


@operator(
    "triton_walk(Tensor p, Tensor q, Tensor tokens, Tensor child, Tensor row, Tensor uniform, Tensor? neighbours,"
    " Tensor k, Tensor delta, Tensor factor, Tensor weight, Tensor? tv=None, Tensor? budget=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda p, q, tokens, child, row, uniform, *others: shapes(p, tokens, uniform.shape[1]),
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
    node, left, relaxed, spent = shapes(p, tokens, uniform.shape[1])
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


@operator(
    "triton_traverse(Tensor p, Tensor q, Tensor tokens, Tensor child, Tensor row, Tensor order, int depth,"
    " Tensor uniform, Tensor? tv=None, Tensor? budget=None) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda p, q, tokens, child, row, order, depth, *others: shapes(p, tokens, depth),
)
def triton_traverse(
    p: Tensor,
    q: Tensor,
    tokens: Tensor,
    child: Tensor,
    row: Tensor,
    order: Tensor,
    depth: int,
    uniform: Tensor,
    tv: Tensor | None = None,
    budget: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `lantern_hpu.ops.kernels.Traverse`."""
    made = shapes(p, tokens, depth)
    images, inner, vocabulary = p.shape
    child, row, uniform = (packed(x) for x in (child, row, uniform))
    _, nodes, widest = child.shape
    block = block_of(vocabulary)
    traverse_kernel[(images,)](
        p.contiguous(),
        q.contiguous(),
        tokens.contiguous(),
        child,
        row,
        order,
        uniform,
        tv,
        budget,
        *made,
        p.new_empty(images, 7, nodes),
        *(x.stride(0) for x in (child, row, uniform)),
        inner,
        nodes,
        depth,
        widest,
        V=vocabulary,
        BLENDED=tv is not None,
        BLOCK=block,
        BLOCK_M=block_of(nodes),
        num_warps=warps(block),
        **EXACTLY,
    )
    return made


# ----------------------------------------------------------------------------------------- commit

# The plain form is `Step.keep` in `decode/step.py`.


@triton.jit
def commit_kernel(
    node,  # [B]
    bonus,  # [B]
    helped,  # [B, D]
    probs,  # [B, J, V]
    path,  # [B, M, D + 1]
    depth,  # [B, M]
    drafts,  # [B, M]
    path_out,  # [B, D + 1]
    news_out,  # [B, D + 1]
    added_out,  # [B]
    before_out,  # [B]
    tokens,  # [B, columns], and what follows, is of the state
    count,
    root,
    known,
    steps,
    accepted,  # [B, D]
    relaxed,
    spoiled,
    source,  # [B, D]; None: nothing moves
    goal,
    path_image,  # steps, as images may share a table
    depth_image,
    columns,
    J,
    V,
    M,
    prefix,
    last,  # the most tokens in the cache
    size,  # positions of a row
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    order = tl.arange(0, BLOCK)
    stop = tl.load(node + image)
    taken = tl.load(depth + image * depth_image + stop)
    before = tl.load(count + image)
    way = path + image * path_image + stop * (D + 1)
    here = tl.load(way + order, mask=order <= D, other=0)
    following = tl.load(way + tl.minimum(order + 1, D))
    token = tl.load(bonus + image)
    drafted = tl.load(drafts + image * M + following)
    news = tl.where(order < taken, drafted, token)
    tl.store(path_out + image * (D + 1) + order, here, mask=order <= D)
    tl.store(news_out + image * (D + 1) + order, news, mask=order <= D)
    tl.store(tokens + image * columns + before + 1 + order, news, mask=order <= D)
    after = tl.minimum(before + taken + 1, last)
    tl.store(added_out + image, tl.maximum(after - before, 1))
    tl.store(before_out + image, before)
    tl.debug_barrier()  # all threads have read what is written over
    tl.store(count + image, after)
    tl.store(root + image, token)
    tl.store(known + image, after + 1)
    runs = (before < last).to(tl.int32)
    tl.store(steps + image, tl.load(steps + image) + runs)
    judged = tl.arange(0, BLOCK_J)
    first = tl.load(probs + (image * J + judged) * V, mask=judged < J, other=0.0)
    bad = tl.max((first != first).to(tl.int32), 0)  # a softmax of one NaN is all NaN
    tl.store(spoiled + image, tl.load(spoiled + image) + bad * runs)
    level, place = order + 1, image * D + order
    counted = (order < D) & (level <= taken) & (before + level <= last)
    so_far = tl.load(accepted + place, mask=order < D, other=0)
    tl.store(accepted + place, so_far + counted.to(tl.int32), mask=order < D)
    more = tl.load(helped + place, mask=counted, other=0).to(tl.int32)
    tl.store(relaxed + image, tl.load(relaxed + image) + tl.sum(more, 0))
    if source is not None:  # see `Positions.moves`
        beyond = order - tl.maximum(after - before - 1, 0)
        idle = prefix + after + M + tl.maximum(beyond, 0)
        idle = tl.where(idle < size, idle, idle - size)
        start = prefix + before
        tl.store(source + place, tl.where(beyond < 0, start + following, idle), mask=order < D)
        tl.store(goal + place, tl.where(beyond < 0, start + level, idle), mask=order < D)


@operator(
    "commit(Tensor node, Tensor bonus, Tensor helped, Tensor probs, Tensor path, Tensor depth, Tensor drafts,"
    " Tensor(a!)[] state, int prefix, int last, int size) -> (Tensor, Tensor, Tensor, Tensor)",
    kept_out,
)
def triton_commit(
    node: Tensor,
    bonus: Tensor,
    helped: Tensor,
    probs: Tensor,
    path: Tensor,
    depth: Tensor,
    drafts: Tensor,
    state: Sequence[Tensor],
    prefix: int,
    last: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `lantern_hpu.ops.kernels.Commit`."""
    made = kept_out(node, bonus, helped, probs, path)
    (images, judged, vocabulary), deepest = probs.shape, helped.shape[1]
    path, depth = packed(path), packed(depth)
    commit_kernel[(images,)](
        node.contiguous(),
        bonus.contiguous(),
        helped.contiguous(),
        probs.contiguous(),
        path,
        depth,
        drafts.contiguous(),
        *made,
        *state,
        *((None, None) if len(state) == 8 else ()),
        path.stride(0),
        depth.stride(0),
        len(state[0]) // images,
        judged,
        vocabulary,
        drafts.shape[1],
        prefix,
        last,
        size,
        D=deepest,
        BLOCK=block_of(deepest + 1),
        BLOCK_J=block_of(judged),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return made
