"""Painted scenes for the training scripts: painted in a process of their own, ahead of use, none of them twice.

Picture number n is the same on every machine and in every run, so a training that resumes knows what it has seen.
Numbers from `FRESH` are for measuring; no training comes near them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from lantern_hpu.lab.scenes import Noise, paint_picture
from lantern_hpu.models.config import VQConfig
from lantern_hpu.models.vq import VQModel

SIDE = 128  # pixels
FRESH = 10**9
AHEAD = 4  # batches painted before they are asked for


class Batch(NamedTuple):
    pixels: NDArray[np.uint8]  # [B, SIDE, SIDE, 3]
    captions: list[str]


_noise: Noise | None = None


def painted(first: int, count: int) -> Batch:
    """Pictures `first` to `first + count - 1`."""
    global _noise
    _noise = _noise or Noise(2 * SIDE)
    pictures = [paint_picture(first + i, _noise) for i in range(count)]
    return Batch(np.stack([p.pixels for p in pictures]), [p.caption for p in pictures])


def encoded(tokenizer: VQModel, first: int, count: int) -> tuple[Tensor, list[str]]:
    """Codes [count, N] and captions of pictures `first` to `first + count - 1`."""
    pixels, captions = painted(first, count)
    with torch.no_grad():
        return tokenizer.encode(to_float(pixels)).flatten(1), captions


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
    """The tokenizer that scripts/train_tokenizer.py wrote.

    Raises:
        SystemExit: it is not there.
    """
    path = data_dir / "tokenizer.safetensors"
    if not path.exists():
        raise SystemExit(f"{path} is missing: run python -m scripts.train_tokenizer first")
    model = VQModel(VQConfig(**json.loads((data_dir / "tokenizer.json").read_text())))
    model.load_state_dict(load_file(path))
    return model.eval().requires_grad_(False)
