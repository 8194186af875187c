"""Whether a device draws from the model's own distribution: first tokens of many seeds against its exact probabilities.

Each seed's token is placed on the cumulative distribution that the plain model on the CPU has after the tokens before,
from the most probable code to the least. Exact sampling gives uniform numbers there, independent of each
other, so that counts of sixteen bins and all places make one chi-square test. What is drawn too often or too
rarely shows as a distance, which is at most the total variation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lantern_hpu.core import Request, RunStats
from lantern_hpu.errors import require
from lantern_hpu.methods.setting import Resolved
from lantern_hpu.pipeline import LanternPipeline
from lantern_lab.train.unroll import Lesson

PLACES = 3  # tokens compared of each image: the first that steps draw
TOGETHER = 64  # seeds of a batch
BINS = 16
LEAST_CHANCE = 1e-4  # that a device which draws exactly is called wrong


class Deviation(NamedTuple):
    """How far drawn tokens are from a distribution.

    Attributes:
        chance: of what was seen or worse, where the device draws exactly; 0 if a token of probability 0 was drawn.
        tv: of a token, as far as the bins show it, without what so few seeds make of nothing.
        metered: the mean a token by the meter; None where there is none.
    """

    chance: float
    tv: float
    metered: float | None


def measure(
    pipeline: LanternPipeline, host: LanternPipeline, setting: Resolved, prompt: str, seeds: int
) -> Deviation:
    """Draw the first tokens of n seeds, a multiple of 64; `host` has the same weights on the CPU, in float32."""
    require(seeds > 0 and seeds % TOGETHER == 0, "seeds", seeds, f"a multiple of {TOGETHER}")
    noise = torch.Generator().manual_seed(1)
    counts, impossible, spent = torch.zeros(PLACES, BINS), 0, list[float]()
    for start in range(0, seeds, TOGETHER):
        tokens, cost = first_tokens(pipeline, setting, prompt, range(start, start + TOGETHER))
        p = Lesson(host.model, [prompt] * len(tokens), tokens).p  # [64, PLACES, V]
        places, sure = placed(p, tokens[:, 1:], noise)
        impossible += int((~sure).sum())
        bins = (places * BINS).long().clamp(max=BINS - 1)  # [64, PLACES]
        counts += torch.stack([torch.bincount(column, minlength=BINS) for column in bins.T])
        spent += cost
    metered = sum(spent) / len(spent) if spent else None
    chance = 0.0 if impossible else chance_of(counts)
    return Deviation(chance, binned_tv(counts), metered)


@torch.no_grad()
def first_tokens(
    pipeline: LanternPipeline, setting: Resolved, prompt: str, seeds: Sequence[int]
) -> tuple[Tensor, list[float]]:
    """Tokens [n, 1 + PLACES] of each seed, and what the meter says of a token of each, where there is one."""
    sampling = pipeline.model.sampling
    requests = [Request(prompt, seed, sampling, setting.relaxation) for seed in seeds]
    engine = pipeline.engines.get(pipeline.spec(requests, setting.tree, len(requests)))
    pipeline.prepare(engine, requests, RunStats())
    with pipeline.backend.errors():
        list(pipeline.stream(engine, requests, most=PLACES))
    tokens, meter = torch.from_numpy(engine.read_tokens()[:, : PLACES + 1]), engine.state.meter
    if meter is None:
        return tokens, []
    drawn = engine.state.known.cpu() - 1  # [n] tokens that steps drew
    return tokens, (meter.total.cpu() / drawn).tolist()


def placed(p: Tensor, tokens: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """Where tokens [n, places] are on their distributions p [n, places, V], uniform in 0 to 1 if they were drawn from
    them; and which are possible at all."""
    p = p.double()
    own = p.gather(2, tokens[..., None])  # [n, places, 1]
    above, equal = (p * (p > own)).sum(-1), (p * (p == own)).sum(-1)  # [n, places]
    share = torch.rand(tokens.shape, generator=noise, dtype=torch.float64)
    return above + share * equal, own[..., 0] > 0


def chance_of(counts: Tensor) -> float:
    """The chance of such counts [places, bins] or of less even ones, where each bin is as probable."""
    expected = counts.sum(1, keepdim=True).double() / BINS
    squares = ((counts - expected).square() / expected).sum()
    free = torch.tensor(counts.shape[0] * (BINS - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(free, squares / 2))


def binned_tv(counts: Tensor) -> float:
    """The mean total variation of the bins, less that which chance alone makes."""
    n = float(counts[0].sum())
    seen = float((counts / n - 1 / BINS).abs().sum(1).mean()) / 2
    alone = BINS / 2 * math.sqrt(2 / math.pi * (1 / BINS) * (1 - 1 / BINS) / n)
    return max(0.0, seen - alone)
