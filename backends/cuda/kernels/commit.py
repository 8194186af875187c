"""What a step keeps, counts and moves, in one program an image; the plain form is `Step.keep` in `decode/step.py`."""

# Triton reads the annotations of its functions: they are not postponed, and say `constexpr` or nothing.

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cuda.kernels.programs import block_of, packed


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


Kept = tuple[Tensor, Tensor, Tensor, Tensor]


def kept_out(
    node: Tensor, bonus: Tensor, helped: Tensor, probs: Tensor, path: Tensor, *others: object
) -> Kept:
    way = node.new_empty(len(node), path.shape[-1])
    return way, node.new_empty(way.shape), node.new_empty(node.shape), node.new_empty(node.shape)


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
) -> Kept:
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
