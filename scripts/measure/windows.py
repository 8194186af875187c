"""What windows promise, checked on a model's images.

    python -m scripts.measure.windows same       jacobi: tokens that differ from one-token decoding with the same noise
    python -m scripts.measure.windows lossless   scd and sjd-pac: permutation tests against ar, and one that has to fail

**lossless.** Images of `ar` and of a window are drawn from the same prompts with other seeds, in pairs. If the window
is exact the two of a pair can be exchanged; so the statistic - the largest of the paired t-values of some features - is
held against what it is where each pair is exchanged at random. Two of the features have mean 0 for an exact
method: how much more probable the tokens are than the target's own draws would be, in nats and in probability.
`stale` is `sjd-pac` as published code has it; it has to be noticed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from lantern_hpu.core import Request, RunStats
from lantern_hpu.decode.drafting.window import WindowDrafting
from lantern_hpu.errors import require
from lantern_hpu.ops.sampling import gather, gather_rows
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.tables import markdown
from lantern_hpu.tree import DraftTree, Tree, Window
from lantern_lab.fidelity import prompts_of
from lantern_lab.train.unroll import Lesson

ROUNDS = 9999  # of exchanging pairs at random
POWER = 0.84  # standard normal quantile of 80 %


class Drawn(NamedTuple):
    """Images drawn with one tree."""

    prompts: list[str]
    tokens: NDArray[np.int64]  # [n, N]


def draw(pipeline: LanternPipeline, tree: Tree, seeds: Sequence[int], batch: int) -> Drawn:
    """An image of each seed; seed s takes prompt s of the usual ones, around and around."""
    usual, sampling = prompts_of(pipeline), pipeline.model.sampling
    requests = [Request(usual[seed % len(usual)], seed, sampling) for seed in seeds]
    spec = pipeline.spec(requests, tree, min(batch, len(requests)))
    engine = pipeline.engines.get(replace(spec, open=len(requests) > batch))
    pipeline.prepare(engine, requests, RunStats())
    tokens = np.zeros((len(seeds), pipeline.model.target.config.tokens), np.int64)
    stream = pipeline.stream(engine, requests)
    for index, done in tqdm(stream, desc=tree.name, unit="image", total=len(seeds)):
        tokens[index] = done.token_ids
    return Drawn([request.prompt for request in requests], tokens)


# ------------------------------------------------------------------------------------ same


def same(pipeline: LanternPipeline, images: int, width: int, batch: int) -> str:
    """How many images and tokens of `jacobi` differ from one-token decoding with the same noise."""
    differing, tokens, firsts = 0, 0, list[int]()
    for start in range(0, images, batch):
        seeds = range(start, min(images, start + batch))
        alone, drawn = (
            draw(pipeline, Window.of("jacobi", w), seeds, batch).tokens for w in (0, width)
        )
        unlike = alone != drawn  # [n, N]
        differing, tokens = differing + int(unlike.any(1).sum()), tokens + int(unlike.sum())
        firsts += [int(row.argmax()) for row in unlike if row.any()]
        print(f"{seeds[-1] + 1} images: {differing} differ", file=sys.stderr)
    size = pipeline.model.target.config.tokens
    said = f"jacobi:{width}: {differing} of {images} images and {tokens} of {images * size} tokens differ"
    return f"{said}\nthe first of each: {firsts}" if firsts else said


# ------------------------------------------------------------------------------------ lossless


@contextmanager
def stale_probs() -> Iterator[None]:
    """`sjd-pac` as published code has it: a kept draft stays beside the distribution that it was once drawn from."""
    couple, keep = WindowDrafting.couple, WindowDrafting.keep
    kept: list[Tensor] = []

    def stale(self: WindowDrafting, probs: Tensor, before: Tensor, *rest: Any) -> Tensor:
        own = rest[-1].drafting
        tokens, old = couple(self, probs, before, *rest), before.clamp(max=self.width - 1)
        same = (tokens == gather(own.drafts, 1, old)) & (before < self.width)
        kept.append(torch.where(same[..., None], gather_rows(own.q, old), probs))
        return tokens

    def with_stale(self: WindowDrafting, tokens: Tensor, probs: Tensor, *rest: Any) -> None:
        keep(self, tokens, kept.pop() if kept else probs, *rest)

    changed: Any = WindowDrafting
    changed.couple, changed.keep = stale, with_stale
    try:
        yield
    finally:
        changed.couple, changed.keep = couple, keep


@torch.no_grad()
def features(pipeline: LanternPipeline, drawn: Drawn, batch: int) -> NDArray[np.float64]:
    """What images are compared by [n, 4]; the first two have mean 0 for any method that draws exactly.

    Few, since each more raises what the largest of them has to pass.
    """
    model, config = pipeline.model, pipeline.model.target.config
    assert model.vq is not None
    vectors = model.vq.quantize.project(model.codebook.detach().float())
    codes = model.of_vocabulary(vectors).cpu()  # [V, dim]
    found = []
    for start in range(0, len(drawn.tokens), batch):
        some = slice(start, start + batch)
        tokens = torch.from_numpy(drawn.tokens[some])  # [b, N]
        p = Lesson(pipeline.model, drawn.prompts[some], tokens).p.double()  # [b, N - 1, V]
        own = p.gather(2, tokens[:, 1:, None])[..., 0].clamp(min=1e-30)  # [b, N - 1]
        nats = own.log() + torch.special.entr(p).sum(-1)
        mass = own - p.square().sum(-1)
        vectors = codes[tokens].double().unflatten(1, config.grid)  # [b, h, w, dim]
        right = (vectors[:, :, 1:] - vectors[:, :, :-1]).square().sum(-1).mean((1, 2))
        lower = (vectors[:, 1:] - vectors[:, :-1]).square().sum(-1).mean((1, 2))
        found.append(torch.stack([nats.mean(1), mass.mean(1), right, lower], 1))
    return torch.cat(found).numpy()


class Test(NamedTuple):
    """A permutation test of paired images."""

    p: float
    excess: float  # nats a token, by which the one's tokens are more probable than the other's
    seen: float  # nats a token, a difference that is noticed with 80 %


def permutation(one: NDArray[np.float64], other: NDArray[np.float64], rounds: int = ROUNDS) -> Test:
    """Whether the two of each pair of rows [n, F] can be exchanged."""
    gap = one - other
    gap = gap / np.sqrt((gap**2).mean(0))  # exchanging pairs leaves this scale as it is
    root = np.sqrt(len(gap))
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (rounds, len(gap)))

    def largest(means: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of the t-values [.., F] of means of numbers whose square is 1 on average: [..]"""
        t: NDArray[np.float64] = root * np.abs(means) / np.sqrt(np.maximum(1 - means**2, 1e-12))
        return t.max(-1)

    real, drawn = largest(gap.mean(0)), largest(signs @ gap / len(gap))
    bar = float(np.quantile(drawn, 0.95))
    nats = one[:, 0] - other[:, 0]
    chance = (1 + int((drawn >= real).sum())) / (1 + rounds)
    return Test(chance, float(nats.mean()), (bar + POWER) * float(nats.std()) / root)


def lossless(pipeline: LanternPipeline, images: int, width: int, batch: int) -> str:
    """The table of permutation tests."""
    first = range(images)
    second = range(images * 8, images * 9)  # other seeds, the same prompts

    def drawn(tree: Tree, seeds: Sequence[int]) -> NDArray[np.float64]:
        return features(pipeline, draw(pipeline, tree, seeds, batch), batch)

    plain = drawn(DraftTree.root_only(), first)
    pac = Window.of("sjd-pac", width)
    columns = {"ar, other seeds": drawn(DraftTree.root_only(), second)}
    columns |= {tree.name: drawn(tree, second) for tree in (Window.of("scd", width), pac)}
    with stale_probs():
        columns[f"{pac.name}, stale"] = drawn(pac, second)
    lines = []
    for name, found in columns.items():
        test = permutation(found, plain)
        lines.append((name, f"{test.p:.4f}", f"{test.excess:+.3f}", f"{test.seen:.3f}"))
    return markdown(("against ar", "p", "nats a token more", "noticed with 80 %"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check what windows promise.")
    parser.add_argument("what", choices=("same", "lossless"))
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--num-images", type=int, help="same: 200, lossless: 128")
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    images = args.num_images or {"same": 200, "lossless": 128}[args.what]
    require(images % 8 == 0, "images", images, "a multiple of 8, so that pairs share prompts")
    pipeline = LanternPipeline.from_pretrained(args.model, graphs="eager", layout="plain")
    check = same if args.what == "same" else lossless
    print(check(pipeline, images, args.window, args.batch_size))


if __name__ == "__main__":
    main()
