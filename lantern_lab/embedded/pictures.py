"""Painted scenes for the training scripts: painted in a process of their own, ahead of use, none of them twice.

Picture number n is the same on every machine and in every run, so a training that resumes knows what it has seen.
Numbers from `FRESH` are for measuring; no training comes near them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from lantern_hpu.models.config import VQConfig
from lantern_hpu.models.vq import VQModel
from lantern_lab.scenes import Noise, paint_picture, sample_scene

SIDE = 128  # pixels
FRESH = 10**9
AHEAD = 4  # batches painted before they are asked for


class Batch(NamedTuple):
    pixels: NDArray[np.uint8]  # [B, SIDE, SIDE, 3]
    captions: list[str]


# How likely the picture of a number is taken to learn from: what is rare or hard to draw more often than the rest
SHARES: dict[str | None, float] = {
    "windmill": 1.0,
    "house": 0.8,
    "pyramid": 0.7,
    "lighthouse": 0.6,
    "cactus": 0.6,
    "balloon": 0.6,
    "sailboat": 0.5,
    "tree": 0.5,
    "palm tree": 0.5,
    None: 0.25,
}
OTHER_SHARE, PAIR_SHARE = 0.4, 0.9
TRIES = 16  # numbers that one picture is chosen from


@cache
def noise(side: int) -> Noise:
    """What pictures of this side are painted with."""
    return Noise(2 * side)


def painted(first: int, count: int) -> Batch:
    """Pictures `first` to `first + count - 1`."""
    pictures = [paint_picture(first + i, noise(SIDE)) for i in range(count)]
    return Batch(np.stack([p.pixels for p in pictures]), [p.caption for p in pictures])


def chosen(place: int) -> int:
    """The number of the picture at this place of a training: the first of `TRIES` that its share lets pass.

    Some captions become more likely, the pictures of a caption do not: what a model learns of a caption is right.
    """
    for number in range(place * TRIES, (place + 1) * TRIES):
        scene = sample_scene(np.random.default_rng(number))
        share = PAIR_SHARE if scene.count > 1 else SHARES.get(scene.thing, OTHER_SHARE)
        if np.random.default_rng((number, 1)).random() < share:
            return number
    return place * TRIES


def encoded(tokenizer: VQModel, numbers: Iterable[int]) -> tuple[Tensor, list[str]]:
    """Codes [n, N] and captions of the pictures with these numbers.

    They are painted at the size that the encoder averages them to, which takes a tenth of the time.
    """
    shrink = 1 << tokenizer.config.decoder_only
    pictures = [paint_picture(number, noise(SIDE // shrink)) for number in numbers]
    small = to_float(np.stack([p.pixels for p in pictures]))  # [n, 3, SIDE / shrink, ..]
    with torch.no_grad():
        codes = tokenizer.encode(F.interpolate(small, scale_factor=float(shrink)))
    return codes.flatten(1), [p.caption for p in pictures]


class Stream:
    """Batches of ever new pictures, made by `make(first, count)` in another process."""

    def __init__(self, make: Callable[[int, int], Any], size: int, first: int = 0) -> None:
        """`first`: the number of the first picture, so that a run goes on where it ended."""
        self.make, self.size, self.next = make, size, first
        self.pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self.queue: deque[Future[Any]] = deque()

    def batch(self) -> Any:
        """The next `size` pictures."""
        while len(self.queue) < AHEAD:
            first = self.next + self.size * len(self.queue)
            self.queue.append(self.pool.submit(self.make, first, self.size))
        self.next += self.size
        return self.queue.popleft().result()


def to_float(pixels: NDArray[np.uint8]) -> Tensor:
    """[B, H, W, 3] uint8 to [B, 3, H, W] float32 in [-1, 1]."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def load_tokenizer(data_dir: Path) -> VQModel:
    """The tokenizer that lantern_lab/embedded/train_tokenizer.py wrote."""
    path = data_dir / "tokenizer.safetensors"
    if not path.exists():
        raise SystemExit(
            f"{path} is missing: run python -m lantern_lab.embedded.train_tokenizer first"
        )
    model = VQModel(VQConfig(**json.loads((data_dir / "tokenizer.json").read_text())))
    model.load_state_dict(load_file(path))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # 1.7 times as fast
    return model.eval().requires_grad_(False)
