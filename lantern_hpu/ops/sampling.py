"""From logits to probabilities, and from those and noise to tokens. All of it float32, the same for every method.

Parameters are tensors, one value per image, so that a batch may mix them without another capture. What
a batch does not use at all (top-k, top-p) is left out when the step is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lantern_hpu.ops.buffers import arange32, constant

# -- noise: every number is a function of (seed, step or place, index) alone, not of the device, the batch or
# the numbers drawn before it. The generator is Philox 4x64 (Salmon et al., SC 2011).

ROUNDS = 6
FACTORS = (0x7A2D, 0x5E63, 0x6B4F, 0x72D5, 0x4F9B, 0x69A7)  # odd, 15 bits
WORD = 0xFFFF
STREAM = 0x6C616E7465726E  # the second half of the key: keeps this use of a seed apart from others
PLACES = 0x77696E646F77  # the same, for noise that belongs to a place and not to a step


def uniforms(seed: int, step: int, count: int) -> NDArray[np.float32]:
    """Uniform numbers of one image and step.

    Args:
        seed: the image's seed, 0 to 2**64 - 1.
        step: 0 for prefill, then 1, 2, ...
        count: how many numbers; the i-th is the same for any count.

    Returns [count] float32 in [0, 1).
    """
    key = np.array([seed, STREAM], dtype=np.uint64)  # a list of mixed sizes would become float64
    generator = np.random.Philox(key=key, counter=[0, step, 0, 0])
    # 24 bits fill a float32 exactly, so that 1.0 cannot come out by rounding.
    return (generator.random_raw(count) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def uniform_block(
    seeds: Sequence[int | None], first: int | Sequence[int], steps: int, count: int
) -> NDArray[np.float32]:
    """Uniforms of several steps for a batch: [steps, B, count] float32.

    Args:
        seeds: of each image; None where there is none, whose numbers are 0.
        first: number of the first of these steps, for all images or each one's own.
    """
    first = [first] * len(seeds) if isinstance(first, int) else first
    result = np.zeros((steps, len(seeds), count), np.float32)
    for image, (seed, begin) in enumerate(zip(seeds, first, strict=True)):
        if seed is not None:
            for step in range(steps):
                result[step, image] = uniforms(seed, begin + step, count)
    return result


def noise_keys(seed: int, places: int) -> NDArray[np.int32]:
    """Keys of `race_noise`: [places, ROUNDS] int32, 16 bits each."""
    key = np.array([seed, PLACES], dtype=np.uint64)
    raw = np.random.Philox(key=key).random_raw(places * ROUNDS) >> np.uint64(48)
    return raw.astype(np.int32).reshape(places, ROUNDS)


def race_noise(keys: Tensor, token: Tensor) -> Tensor:
    """Fixed noise of places and tokens: 1 / e for `probs * race_noise(...)`, whose largest entry is the token drawn.

    Tokens race: x arrives after e[x] / p[x], with e[x] exponential, and the first one wins (the Gumbel-max trick
    without its logarithms). With e a function of (seed, place, token) alone, draws at one place from two distributions
    that differ little are mostly the same. e comes from a Feistel network over the token's number, in the manner of
    Philox with words of 16 bits: products stay below 2**31, so that no device's overflow or shift of negative numbers
    matters.

    Args:
        keys: [..., ROUNDS] int32, 16 bits each.
        token: [V] int32.

    Returns [..., V] float32, 0 to 2**33.
    """
    high, low = token >> 16, token & WORD
    for number, factor in enumerate(FACTORS):
        product = low * factor  # below 2**31
        high, low = product & WORD, (product >> 16) ^ high ^ keys[..., number : number + 1]
    # Small numbers decide races, and a float holds them to 24 digits of their own
    share = (low.float() * 65536.0 + high.float() + 0.5) * 2.0**-32
    share = share.clamp(max=1 - 2.0**-24)  # at 1 even a certain token would lose
    return -1.0 / (-share).log1p()


def race(probs: Tensor, noise: Tensor, token: Tensor) -> Tensor:
    """What `race_noise` [..., V] draws from probs [..., V], with `token` 0, 1, ... [V]: [...] int32."""
    return topk_tokens(probs * noise, 1, token)[..., 0]


@dataclass
class SamplingParams:
    """How a batch is sampled, on the device. A greedy image has temperature 1 and no filters."""

    cfg_scale: Tensor  # [B] float32
    temperature: Tensor  # [B] float32
    top_k: Tensor  # [B] int32, V when unused
    top_p: Tensor  # [B] float32, 1 when unused
    greedy: Tensor  # [B] bool


def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """`x.gather` with int32 indices, which not every torch takes; ids stay int32 everywhere else."""
    return x.gather(dim, index.long())


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [A, T, X] at index [A, n]: [A, n, X]."""
    if len(x) == 1:  # copied whole, which takes a processor a tenth of the time
        return x.index_select(1, index[0])
    return x.gather(1, index.long()[..., None].expand(-1, -1, x.shape[-1]))


def topk_tokens(probs: Tensor, count: int, token: Tensor | None = None) -> Tensor:
    """The `count` most probable tokens of each distribution [..., V], the first first: [..., count] int32.

    Of equal ones the lower token comes first: `topk` and `argmax` promise no order, and an order that
    differs between devices would make their images differ. `token` is 0, 1, ... [V], where that is at hand.
    """
    best = probs.amax(-1, keepdim=True) if count == 1 else probs.topk(count, -1).values
    token = numbered(probs) if token is None else token
    places: list[Tensor] = []
    for rank in range(count):
        value = best[..., rank : rank + 1]
        others = probs != value  # [..., V]
        if rank:  # of equal ones those up to the last that was taken are gone
            differs = best[..., rank - 1 : rank] != value
            others = others | (token <= places[-1].masked_fill(differs, -1))
        # At NaN, which equals nothing, it is the last one
        places.append(token.masked_fill(others, len(token) - 1).amin(-1, keepdim=True))
    return torch.cat(places, -1) if count > 1 else places[0]


def apply_guidance(logits: Tensor, params: SamplingParams, guidance: bool) -> Tensor:
    """Classifier-free guidance, u + s (c - u), from logits [R, T, V]: [B, T, V] float32.

    With guidance the first half of the rows is conditional.
    """
    logits = logits.float()
    if not guidance:
        return logits
    conditional, unconditional = logits.chunk(2)
    scale = params.cfg_scale[:, None, None]
    return unconditional + scale * (conditional - unconditional)


def to_probs(
    logits: Tensor,
    params: SamplingParams,
    max_top_k: int,
    use_top_p: bool,
    top_p_first: bool = False,
) -> Tensor:
    """Temperature, then top-p and top-k, then softmax.

    Args:
        logits: [B, T, V] float32 after guidance.
        max_top_k: largest top-k in the batch, 0 when no image uses it. Ties with the k-th stay in.
        use_top_p: whether any image uses top-p; the token that crosses the bound stays in.
        top_p_first: whether top-p is of the whole mass, or of what top-k leaves.

    Returns [B, T, V] float32.
    """
    logits = logits / params.temperature[:, None, None]
    kept = logits
    if max_top_k:
        kept = logits.masked_fill(outside_top_k(logits, params.top_k, max_top_k), float("-inf"))
    if use_top_p:
        mass = (logits if top_p_first else kept).softmax(-1)
        kept = kept.masked_fill(outside_top_p(mass, params.top_p), float("-inf"))
    return kept.softmax(-1)


def guided_probs(
    logits: Tensor,
    params: SamplingParams,
    guidance: bool,
    max_top_k: int,
    use_top_p: bool,
    top_p_first: bool = False,
) -> Tensor:
    """From a head's logits [R, T, V] to probabilities [B, T, V] float32: `apply_guidance`, then `to_probs`."""
    guided = apply_guidance(logits, params, guidance)
    return to_probs(guided, params, max_top_k, use_top_p, top_p_first)


def outside_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens [B, T, V] lie past each image's top-p [B] mass; none where it is 1."""
    ordered = probs.sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered  # mass of likelier tokens
    bound = top_p[:, None, None]
    # The least probability that is still inside; equal ones cannot be distinguished and stay too.
    least = ordered.masked_fill(before >= bound, 1.0).amin(-1, keepdim=True)
    return (probs < least) & (bound < 1)


def outside_top_k(logits: Tensor, top_k: Tensor, most: int) -> Tensor:
    """Which tokens [B, T, V] are less likely than each image's top-k-th; none where top-k is past `most`."""
    # Only values are used, never the order of ties
    largest = logits.topk(most, -1).values  # [B, T, most]
    rank = (top_k.clamp(max=most) - 1)[:, None, None].expand(-1, logits.shape[1], 1)
    return (logits < gather(largest, -1, rank)) & (top_k <= most)[:, None, None]


Find = Callable[[Tensor, Tensor, Tensor], Tensor]


def first_beyond(probs: Tensor, mass: Tensor, target: Tensor) -> Tensor:
    """The first token with a probability whose cumulative mass is beyond the target; the last with one if none is.

    Cards sum in parallel: there the mass of a token may be less than that of the one before it, and more at one of
    probability 0, so that a search by halves may end at a token that cannot be drawn.

    `probs` and `mass` are [..., V], `target` [...]. Returns [...] int32.
    """
    token, there = numbered(probs), probs > 0
    beyond = token.masked_fill(~there | (mass <= target[..., None]), len(token)).amin(-1)
    last = token.masked_fill(~there, -1).amax(-1)
    last = last.masked_fill(last < 0, len(token) - 1)
    return torch.minimum(beyond, last)


def search_in_order(probs: Tensor, mass: Tensor, target: Tensor) -> Tensor:
    """`first_beyond` by halves, for devices that sum in order, as processors do; there the tokens are the same."""
    index = torch.searchsorted(mass, target[..., None], right=True, out_int32=True)[..., 0]
    return index.clamp(max=mass.shape[-1] - 1)


def numbered(x: Tensor) -> Tensor:
    """0, 1, ... along the last dimension of x [..., n]: [n] int32, made without a constant."""
    row = x[(0,) * (x.dim() - 1)]
    return torch.ones_like(row, dtype=torch.int32).cumsum(-1, dtype=torch.int32) - 1


def sample(probs: Tensor, uniform: Tensor, find: Find = first_beyond) -> Tensor:
    """One token per distribution by inverse CDF: the first whose cumulative mass exceeds u.

    `probs` [..., V] need not sum to exactly 1; `uniform` [...] is in [0, 1).

    Returns [...] int32; a token of probability 0 only where all others have none either.
    """
    mass = probs.cumsum(-1)
    return find(probs, mass, uniform * mass.amax(-1))


def sample_in_order(probs: Tensor, uniform: Tensor) -> Tensor:
    return sample(probs, uniform, search_in_order)


def sample_distinct(probs: Tensor, uniform: Tensor, find: Find = first_beyond) -> Tensor:
    """Tokens drawn one after the other without replacement from probs [..., V], one uniform [..., c] in [0, 1) each.

    As sequential draws: x_i follows the distribution restricted to what is left. Instead of a new cumulative sum for
    each draw, the target is shifted past the intervals that are gone.

    Returns [..., c] int32. Once no mass is left the tokens are arbitrary; they have probability 0 or were
    drawn before, and acceptance skips such a draft.
    """
    mass = probs.cumsum(-1)  # [..., V]
    total = mass.amax(-1)  # [...]
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
        token = find(probs, mass, shifted)[..., None]  # [..., 1]
        size = gather(probs, -1, token)[..., 0]
        tokens.append(token[..., 0])
        starts.append(gather(mass, -1, token)[..., 0] - size)
        sizes.append(size)
    return torch.stack(tokens, -1)


def sample_distinct_in_order(probs: Tensor, uniform: Tensor) -> Tensor:
    return sample_distinct(probs, uniform, search_in_order)


# ---------------------------------------------------------------------------------------- grammar

# Which tokens a place may hold, in pictures whose rows of codes are closed by a token of their own.

# Finite, so that guidance, u + s (c - u), stays a number; e to this power is 0 after any temperature.
NEVER = -1e30


class RowEnds(nn.Module):
    """The last token of the vocabulary closes each row of n columns of codes, and is nowhere else.

    Places past the N tokens, row ends included, count as the last.
    """

    def __init__(self, columns: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.last = tokens - 1
        self.closes = constant((arange32(tokens) + 1) % (columns + 1) == 0)  # [N]
        self.is_end = constant(arange32(vocabulary) == vocabulary - 1)  # [V]

    def forward(self, logits: Tensor, place: Tensor) -> Tensor:
        """Forbid, in logits [R, T, V], what places [R, T] int32 of the picture may not hold."""
        forbidden = self.closing(place)[..., None] != self.is_end
        return logits.masked_fill(forbidden, max(NEVER, torch.finfo(logits.dtype).min))

    def closing(self, place: Tensor) -> Tensor:
        """Which places [R, T] are rows' ends: [R, T] bool."""
        return self.closes[place.clamp(max=self.last)]

    def force_probs(self, probs: Tensor, place: Tensor) -> Tensor:
        """Probabilities of codes [R, T, V], taken from elsewhere, for these places [R, T]: rows' ends are certain."""
        return torch.where(self.closing(place)[..., None], self.is_end.to(probs.dtype), probs)
