"""The functions of a step that devices have faster forms of, and their plain forms in torch.

A backend hands out a `Kernels` with its own forms; each has a plain twin - here, in `sampling.py`, or where
`Kernels` says - and must agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lantern_hpu.ops import sampling
from lantern_hpu.ops.buffers import additive_mask
from lantern_hpu.ops.quantized import dequantized
from lantern_hpu.ops.sampling import SamplingParams


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [R, h, T, hd], k and v [R, kv, S, hd], additive mask [R, 1, T, S] -> [R, h, T, hd]."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_norm(
    x: Tensor, more: Tensor, weight: Tensor, eps: float, behind: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + more, and its norm; with `behind` [H] more passes a norm of that weight first."""
    x = x + (more if behind is None else rms_norm(more, behind, eps))
    return x, rms_norm(x, weight, eps)


def rotate(x: Tensor, rope: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding: rotate each pair of features by its angle.

    Args:
        x: [R, T, heads, hd].
        rope: [R, T, 2, hd / 2], cosines and sines of these tokens' positions.
        interleaved: pairs are (0, 1), (2, 3), ... (LlamaGen) or (0, hd/2), (1, hd/2 + 1), ... (Llama).
    """
    cos, sin = rope[:, :, None, 0], rope[:, :, None, 1]  # [R, T, 1, hd / 2]
    if interleaved:
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def head_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Norm over each head's features, x [R, T, heads, hd]: LayerNorm with weights and biases [heads, hd]; without
    biases by root mean square, with one weight [hd] for all heads."""
    if bias is None:
        return rms_norm(x, weight, eps)
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    return (normed * weight.float() + bias.float()).to(x.dtype)


class HeadNorms(NamedTuple):
    """What queries and keys pass before they are rotated; see `head_norm`."""

    q_weight: Tensor
    k_weight: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    eps: float


class CacheWrite(NamedTuple):
    """The one write of a pass into a layer's cache, [R * S, kv, hd] twice.

    A position's index is row * S + position.
    """

    keys: Tensor  # [R * S, kv, hd]
    values: Tensor  # [R * S, kv, hd]
    goal: Tensor  # [R * (D + T)] int32, where it goes: what moves, then the new; no value twice
    # [R * D] int32, the index of what moves to the first D of each row; None: nothing moves
    source: Tensor | None = None


def rotate_into(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: Tensor,
    interleaved: bool,
    write: CacheWrite,
    rotate: Callable[[Tensor, Tensor, bool], Tensor] = rotate,
) -> Tensor:
    """Rotate queries and keys, and keep the keys and the values in a layer's cache.

    Some that lie there already move in the same write.

    Args:
        q, k, v: [R, T, h, hd] and twice [R, T, kv, hd].
        rope, interleaved: see `rotate`.
        write: the cache, and where in it they go.
        rotate: a device's own.

    Returns the queries [R, T, h, hd].
    """
    keys, values, goal, source = write
    k, rows = rotate(k, rope, interleaved), len(k)
    if source is not None:
        k = torch.cat([keys.index_select(0, source).unflatten(0, (rows, -1)), k], 1)
        v = torch.cat([values.index_select(0, source).unflatten(0, (rows, -1)), v], 1)
    goal = goal.long()  # `index_copy_` takes no other
    keys.index_copy_(0, goal, k.flatten(0, 1))
    values.index_copy_(0, goal, v.flatten(0, 1))
    return rotate(q, rope, interleaved)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: Tensor,
    interleaved: bool,
    write: CacheWrite,
    mask: Tensor,
    norms: HeadNorms | None = None,
    rotate: Callable[[Tensor, Tensor, bool], Tensor] = rotate,
    attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = attention,
) -> Tensor:
    """Norms of queries and keys, `rotate_into`, then attention to what the cache holds: [R, h, T, hd]."""
    if norms is not None:
        q = head_norm(q, norms.q_weight, norms.q_bias, norms.eps)
        k = head_norm(k, norms.k_weight, norms.k_bias, norms.eps)
    q, shape = rotate_into(q, k, v, rope, interleaved, write, rotate), (len(q), -1)
    keys, values = (x.unflatten(0, shape).transpose(1, 2) for x in write[:2])
    return attention(q.transpose(1, 2), keys, values, mask)


def angles_at(
    angles: Tensor,
    position: Tensor,
    pads: Tensor | None,
    axes: Tensor | None = None,
    sections: Sequence[int] = (),
) -> Tensor:
    """Cosines and sines at cache positions [R, T]: [R, T, 2, hd / 2].

    Args:
        angles: [places, 2, hd / 2].
        pads: [R], positions that do not count; None: all count.
        axes, sections: where positions stand on three axes [3, positions], and the pairs of features that go with each;
            without them they stand on one, at their own number.
    """
    if axes is None:
        if pads is not None:
            position = (position - pads[:, None]).clamp(min=0)
        return angles[position]
    assert pads is not None
    parts = zip(axes, angles.split(list(sections), -1), strict=True)
    return torch.cat([x[(axis[position] - pads[:, None]).clamp(min=0)] for axis, x in parts], -1)


# Where the new tokens of a pass are: rope [R, T, 2, hd / 2], additive mask [R, 1, T, S], cache index [R * T] int32
Placed = tuple[Tensor, Tensor, Tensor]


def place_tokens(
    start: Tensor,
    offset: Tensor,
    column: Tensor,
    table: Tensor,
    valid: Tensor | None,
    pads: Tensor | None,
    angles: Tensor,
    slot: Tensor,
    row_start: Tensor,
    dtype: torch.dtype,
    axes: Tensor | None = None,
    sections: Sequence[int] = (),
) -> Placed:
    """Where T new tokens of each image are; they attend to all positions before `start`, and to others by a table.

    Args:
        start: [B] int32. row_start: [R] int32, where rows begin in the cache; R = 2 B with guidance.
        offset: [B, T] int32, how far behind `start` their rotary positions are. column: [T] int32, those in the cache.
        table: [B, T, X] bool, which of the positions from `start` on they attend to.
        valid: [R, S] bool, positions that may be attended to; None: all. slot: [S] int32, 0, 1, ...
        pads, axes, sections: see `angles_at`; int32.
        angles: [positions, 2, hd / 2] float32. dtype: of angles and mask.
    """

    def per_row(x: Tensor) -> Tensor:
        return torch.cat([x, x]) if len(row_start) > len(start) else x

    begin = per_row(start)[:, None]  # [R, 1]
    rope = angles_at(angles, begin + per_row(offset), pads, axes, sections)
    behind, width = slot - begin, table.shape[-1]  # [R, S]
    inside = (behind >= 0) & (behind < width)
    where = behind.clamp(0, width - 1)[:, None].expand(-1, table.shape[1], -1)
    local = sampling.gather(per_row(table), 2, where)
    mask = (behind < 0)[:, None] | (local & inside[:, None])
    mask = mask if valid is None else mask & valid[:, None]
    index = (row_start[:, None] + begin).add(column).flatten()
    return rope.to(dtype), additive_mask(mask, dtype), index


def swiglu(gate_up: Tensor) -> Tensor:
    """Gate and up projection in one [..., 2 F] -> [..., F]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    residual: Tensor | None,
    eps: float,
    gated: bool,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
) -> Tensor:
    """A linear layer with what stands around it: RMS norm, product, SwiGLU, residual sum.

    Args:
        x: [..., K]. weight: [N, K], with `gated` [2 N, K]: gates, then ups. bias: [N], or None.
        norm: [K] and eps, of a norm before the product; None: there is none.
        residual: [..., N], what the product is added to, or None.
        scale, zero: of a weight of 8 or 4 bits: see `dequantized`.

    Returns [..., N].
    """
    weight = weight if scale is None else dequantized(weight, scale, x.dtype, zero)
    y = F.linear(x if norm is None else rms_norm(x, norm, eps), weight, bias)
    y = swiglu(y) if gated else y
    return y if residual is None else residual + y


class Sizes(Protocol):
    """Of a model, as its kernels meet them; a `TransformerConfig` has them."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_dim(self) -> int: ...
    @property
    def prefix(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def qk_norm(self) -> bool | str: ...


# Queries, keys and values, then how they turn, their write, the mask [R, 1, T, S] and their norms -> [R, h, T, hd]
Attend = Callable[..., Tensor]
# Those of `product`, and by name the form of a device's own that is to serve
Product = Callable[..., Tensor]


class Walk(Protocol):
    """`LevelWalk` of `decode/walk.py`, down static trees whose children were drawn, with the sound residual."""

    def __call__(
        self,
        p: Tensor,  # [B, I, V] float32, the target's probabilities at nodes with children
        q: Tensor,  # [B, I, V] float32, the drafter's
        tokens: Tensor,  # [B, M] int32
        child: Tensor,  # [B, M, C] int32, 0 where there is none
        row: Tensor,  # [B, M] int32, which of the I distributions is a node's
        uniform: Tensor,  # [B, D, C] float32
        neighbours: Tensor | None,  # [V, K] int32, nearest first
        k: Tensor,  # [B] int32, how many of them may lend their mass
        delta: Tensor,  # [B] float32, bound on what they lend
        factor: Tensor,  # [B] float32, the same in units of the draft's own mass
        weight: Tensor,  # [B, D] float32, of the own mass at each depth
        tv: Tensor | None = None,  # [B] float32, total variation of a token; None: no image blends
        budget: Tensor | None = None,  # [B] float32, of all tokens to come
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A `Verdict`: node [B] int32, residual [B, V] float32, relaxed [B, D] bool, spent [B, D] float32."""


class Traverse(Protocol):
    """`Traversal` of `decode/traversal.py`: the drafts of a static tree verified together."""

    def __call__(
        self,
        p: Tensor,  # [B, I, V] to `row`: as `Walk` has them
        q: Tensor,
        tokens: Tensor,
        child: Tensor,
        row: Tensor,
        order: Tensor,  # [M] int32, nodes as they are asked whether they are kept
        depth: int,  # D
        uniform: Tensor,  # [B, M - 1] float32
        tv: Tensor | None = None,  # [B] float32 both, as `Walk` has them
        budget: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `Walk` returns it."""


class Commit(Protocol):
    """`Step.keep` in `decode/step.py`."""

    def __call__(
        self,
        node: Tensor,  # [B] int32, where the walk stopped
        bonus: Tensor,  # [B] int32
        helped: Tensor,  # [B, D] bool
        probs: Tensor,  # [B, J, V] float32
        path: Tensor,  # [B, M, D + 1] int32
        depth: Tensor,  # [B, M] int32
        drafts: Tensor,  # [B, M] int32
        # Of the decode state: tokens, count, root, known, steps, accepted, relaxed, spoiled, and what moves
        state: Sequence[Tensor],
        prefix: int,
        last: int,  # most tokens in the cache
        size: int,  # positions of a row
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `Step.keep` returns."""


# What a device's own forms return, to be filled; the arguments are theirs.


def tokens_out(probs: Tensor, uniform: Tensor) -> Tensor:
    """Of `sample_distinct`."""
    return uniform.new_empty(uniform.shape, dtype=torch.int32)


def probs_out(logits: Tensor, *given: Any) -> Tensor:
    """Of logits [R, T, V]: [B, T, V] float32; `given` ends with the guidance and the largest top-k."""
    images = len(logits) // (1 + given[-2])
    return logits.new_empty(images, *logits.shape[1:], dtype=torch.float32)


def placed_out(start: Tensor, offset: Tensor, *given: Any) -> Placed:
    """Of `place_tokens`."""
    *_, angles, slot, row_start, dtype = given[:8]
    rows, tokens = len(row_start), offset.shape[1]
    rope = angles.new_empty(rows, tokens, *angles.shape[1:], dtype=dtype)
    mask = angles.new_empty(rows, 1, tokens, len(slot), dtype=dtype)
    return rope, mask, start.new_empty(rows * tokens)


def kept_out(
    node: Tensor, bonus: Tensor, helped: Tensor, probs: Tensor, path: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of `Commit`."""
    way = node.new_empty(len(node), path.shape[-1])
    return way, torch.empty_like(way), torch.empty_like(node), torch.empty_like(node)


@dataclass(frozen=True)
class Kernels:
    """What the transformer, the sampler and the acceptance call; the shapes are those of the plain forms.

    None stands for a plain form that is made of others: of `rotate_into`, around the device's own `rotate`; of
    `add_norm`, in `models/transformer.py`; of the walks, in `decode/walk.py` and
    `decode/traversal.py`; of `product`, in a block's modules; of the commit, in `decode/step.py`.
    """

    attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = attention
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    rotate: Callable[[Tensor, Tensor, bool], Tensor] = rotate
    # x [.., H], what is added to it, weight [H], eps, weight [H] of a norm before -> the sum and its norm
    add_norm: Callable[..., tuple[Tensor, Tensor]] | None = None
    swiglu: Callable[[Tensor], Tensor] = swiglu
    # Norms, rotation and the write, then attention over the whole cache
    attend: Attend | None = None
    place: Callable[..., Placed] = place_tokens
    probs: Callable[[Tensor, SamplingParams, bool, int, bool, bool], Tensor] = sampling.guided_probs
    sample: Callable[[Tensor, Tensor], Tensor] = sampling.sample
    sample_distinct: Callable[[Tensor, Tensor], Tensor] = sampling.sample_distinct
    race: Callable[[Tensor, Tensor, Tensor], Tensor] = sampling.race
    walk: Walk | None = None
    traverse: Traverse | None = None
    product: Product | None = None
    commit: Commit | None = None

    def names(self) -> dict[str, str]:
        """Each kernel and the function that serves it, for reports; those left out (None) are plain too."""
        served = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = (__name__, sampling.__name__)  # modules
        return {
            name: "plain"
            if function.__module__ in plain
            else function.__name__.removesuffix(".default")  # of an operator's overload
            for name, function in served.items()
            if function
        }


PLAIN = Kernels()
