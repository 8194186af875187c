"""From logits to laws, and from laws to tokens. All of it float32, the same for every method.

Settings are tensors, one value per image, so that a batch may mix them without another capture. What
a batch does not use at all (top-k, top-p) is left out when the step is built.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Settings:
    """Sampling settings of a batch on the device. A greedy image has temperature 1 and no filters."""

    cfg_scale: Tensor  # [B] float32
    temperature: Tensor  # [B] float32
    top_k: Tensor  # [B] int32, V when unused
    top_p: Tensor  # [B] float32, 1 when unused
    greedy: Tensor  # [B] bool


def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """`x.gather` with int32 indices, which not every torch takes; ids stay int32 everywhere else."""
    return x.gather(dim, index.long())


def at(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [A, T, X] at index [A, n]: [A, n, X]."""
    return gather(x, 1, index[..., None].expand(-1, -1, x.shape[-1]))


def likeliest(laws: Tensor, count: int) -> Tensor:
    """The `count` likeliest tokens of each law [..., V], likeliest first: [..., count] int32.

    Of equal ones the lower token comes first: `topk` and `argmax` promise no order, and an order that
    differs between devices would make their images differ.
    """
    best = laws.topk(count, -1).values  # [..., count]
    places = []
    for rank in range(count):
        value = best[..., rank : rank + 1]
        before = (best[..., :rank] == value).sum(-1, keepdim=True, dtype=torch.int32)
        seen = (laws == value).cumsum(-1, dtype=torch.int32)  # [..., V]
        places.append((seen <= before).sum(-1, dtype=torch.int32))
    return torch.stack(places, -1)


def guide(logits: Tensor, settings: Settings, guidance: bool) -> Tensor:
    """Classifier-free guidance: u + s (c - u).

    Args:
        logits: [R, T, V]; with guidance the first half of the rows is conditional.

    Returns [B, T, V] float32.
    """
    logits = logits.float()
    if not guidance:
        return logits
    conditional, unconditional = logits.chunk(2)
    scale = settings.cfg_scale[:, None, None]
    return unconditional + scale * (conditional - unconditional)


def law(logits: Tensor, settings: Settings, max_top_k: int, use_top_p: bool) -> Tensor:
    """Temperature, then top-p, then top-k, then softmax.

    Args:
        logits: [B, T, V] float32 after guidance.
        max_top_k: largest top-k in the batch, 0 when no image uses it. Ties with the k-th stay in.
        use_top_p: whether any image uses top-p; the token that crosses the bound stays in.

    Returns probabilities [B, T, V] float32.
    """
    logits = logits / settings.temperature[:, None, None]
    dropped = []
    if use_top_p:
        dropped.append(beyond_top_p(logits.softmax(-1), settings.top_p))
    if max_top_k:
        dropped.append(beyond_top_k(logits, settings.top_k, max_top_k))
    for mask in dropped:
        logits = logits.masked_fill(mask, float("-inf"))
    return logits.softmax(-1)


def laws(
    logits: Tensor, settings: Settings, guidance: bool, max_top_k: int, use_top_p: bool
) -> Tensor:
    """From a head's logits [R, T, V] to probabilities [B, T, V] float32: `guide`, then `law`."""
    return law(guide(logits, settings, guidance), settings, max_top_k, use_top_p)


def beyond_top_p(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens [B, T, V] lie past each image's top-p [B] mass; none where it is 1."""
    ordered = probabilities.sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered  # mass of likelier tokens
    bound = top_p[:, None, None]
    # The least probability that is still inside; equal ones cannot be told apart and stay too.
    least = ordered.masked_fill(before >= bound, 1.0).amin(-1, keepdim=True)
    return (probabilities < least) & (bound < 1)


def beyond_top_k(logits: Tensor, top_k: Tensor, most: int) -> Tensor:
    """Which tokens [B, T, V] are less likely than each image's top-k-th; none where top-k is past `most`."""
    largest = logits.topk(
        most, -1
    ).values  # [B, T, most]; only values are used, never the order of ties
    rank = (top_k.clamp(max=most) - 1)[:, None, None].expand(-1, logits.shape[1], 1)
    return (logits < gather(largest, -1, rank)) & (top_k <= most)[:, None, None]


def choose(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """One token per law by inverse CDF: the first whose cumulative mass exceeds u.

    Args:
        probabilities: [..., V], need not sum to exactly 1.
        uniform: [...] in [0, 1).

    Returns [...] int32.
    """
    mass = probabilities.cumsum(-1)
    return pick(mass, uniform[..., None] * mass[..., -1:])[..., 0]


def pick(mass: Tensor, target: Tensor) -> Tensor:
    """Index of the interval of a cumulative mass [..., V] that holds each target [..., n]."""
    index = torch.searchsorted(mass, target.contiguous(), right=True, out_int32=True)
    return index.clamp(max=mass.shape[-1] - 1)


def choose_distinct(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Tokens drawn one after the other without replacement, one uniform each.

    The law is that of sequential draws: x_i follows the law restricted to what is left. Instead of a new
    cumulative sum for each draw, the target is shifted past the intervals that are gone.

    Args:
        probabilities: [..., V].
        uniform: [..., c] in [0, 1).

    Returns [..., c] int32. Once no mass is left the tokens are arbitrary; they have probability 0 or were
    drawn before, and acceptance skips such a draft.
    """
    mass = probabilities.cumsum(-1)  # [..., V]
    total = mass[..., -1]  # [...]
    tokens: list[Tensor] = []
    starts: list[Tensor] = []  # where each drawn interval begins
    sizes: list[Tensor] = []
    for draw in range(uniform.shape[-1]):
        left = total - sum(sizes) if sizes else total
        target = uniform[..., draw] * left.clamp(min=0)
        shifted = target
        for start, size in zip(starts, sizes, strict=True):
            # The interval's start once all other drawn intervals before it are cut out.
            gone = sum(width * (other < start) for other, width in zip(starts, sizes, strict=True))
            shifted = shifted + size * (target >= start - gone)
        token = pick(mass, shifted[..., None])  # [..., 1]
        size = gather(probabilities, -1, token)[..., 0]
        tokens.append(token[..., 0])
        starts.append(gather(mass, -1, token)[..., 0] - size)
        sizes.append(size)
    return torch.stack(tokens, -1)
