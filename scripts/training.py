"""What the training scripts share: float32 masters of a bfloat16 model, a budget in minutes, checkpoints.

Needs torch 2.9 or newer, for Muon.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

CHECKPOINT_SECONDS = 150.0
TABLES = ("embed.weight", "head.weight", "table.weight", "position.weight", "uncond")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse with the options every training has, and set the threads."""
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return arguments


class Masters:
    """A model in bfloat16, the float32 weights behind it, their moving average and the optimiser."""

    def __init__(self, model: nn.Module, decay: float, clip: float, average: float) -> None:
        """
        Args:
            model: in float32; it is turned to bfloat16.
            decay: weight decay of the blocks' matrices. clip: gradient norm.
            average: decay of the moving average.
        """
        self.model, self.clip, self.rate = model, clip, average
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = [p.detach().clone() for p in model.parameters()]
        self.average = [p.clone() for p in self.weights]
        model.bfloat16()
        # Muon turns the blocks' matrices in all directions alike and needs fewer steps than AdamW; tables
        # and the head, whose rows are used apart, and vectors are not what it is made for.
        inner = [
            weight.dim() == 2 and not name.endswith(TABLES)
            for name, weight in zip(self.names, self.weights, strict=True)
        ]
        matrices = [w for w, inside in zip(self.weights, inner, strict=True) if inside]
        others = [w for w, inside in zip(self.weights, inner, strict=True) if not inside]
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]

    def step(self, lr: float, count: int) -> None:
        """Move the weights along the model's gradients; `count` is the number of steps before this one."""
        for weight, parameter in zip(self.weights, self.model.parameters(), strict=True):
            assert parameter.grad is not None
            weight.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.weights, self.clip)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = lr
            optimiser.step()
        self.publish(self.weights)
        # Early on the average follows closely, so that it forgets the start.
        torch._foreach_lerp_(
            self.average, self.weights, weight=1 - min(self.rate, (1 + count) / (10 + count))
        )

    @torch.no_grad()
    def publish(self, weights: list[Tensor]) -> None:
        """Round float32 weights into the bfloat16 model."""
        for parameter, weight in zip(self.model.parameters(), weights, strict=True):
            parameter.copy_(weight)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with its averaged weights."""
        self.publish(self.average)
        try:
            yield
        finally:
            self.publish(self.weights)

    def named_average(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.average, strict=True))

    def state(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "average": self.average,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }

    def load(self, state: dict[str, Any]) -> None:
        mine, saved = self.weights + self.average, state["weights"] + state["average"]
        for tensor, value in zip(mine, saved, strict=True):
            tensor.copy_(value)
        for optimiser, kept in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
        self.publish(self.weights)


class Run:
    """A training run: its budget, schedule, random numbers and checkpoint."""

    def __init__(
        self, folder: Path, masters: Masters, minutes: float, lr: float, warm_up: int, seed: int
    ) -> None:
        self.file, self.masters = folder / "last.pt", masters
        self.minutes, self.lr, self.warm_up = minutes, lr, warm_up
        self.generator = torch.Generator().manual_seed(seed)
        self.step, self.seconds, self.best = 0, 0.0, 0.0

    @property
    def progress(self) -> float:
        """How much of the budget is spent, 0 to 1."""
        return min(1.0, self.seconds / (60 * self.minutes))

    @property
    def learning_rate(self) -> float:
        """Linear warm-up, then level, then a line down to 2 % in the last third.

        Because it is level, a run can be resumed with more minutes.
        """
        warm = min(1.0, (self.step + 1) / self.warm_up)
        return self.lr * warm * min(1.0, 0.02 + 3 * (1 - self.progress))

    def save(self) -> None:
        state = self.masters.state() | {
            "generator": self.generator.get_state(),
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.file)

    def resume(self) -> None:
        state = torch.load(self.file, weights_only=True)
        self.masters.load(state)
        self.generator.set_state(state["generator"])
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]

    def train(
        self, gradients: Callable[[], float], milestone: Callable[[], str], figure: str
    ) -> None:
        """Spend the budget.

        Args:
            gradients: runs forward and backward of one step and returns the figure to show.
            milestone: measures and saves usable weights, every few minutes and at the end.
            figure: name of the figure.
        """
        saved, mean = self.seconds, math.nan
        shape = "{desc} {percentage:3.0f}%|{bar}| {elapsed}"
        with tqdm(total=100, bar_format=shape, mininterval=5) as bar:
            while self.progress < 1:
                began = time.monotonic()
                value = gradients()
                self.masters.step(self.learning_rate, self.step)
                self.step += 1
                self.seconds += time.monotonic() - began
                mean = value if math.isnan(mean) else 0.98 * mean + 0.02 * value
                bar.n = 100 * self.progress
                bar.set_description(f"step {self.step} {figure} {mean:.3f}", refresh=False)
                bar.update(0)
                if self.seconds - saved > CHECKPOINT_SECONDS or self.progress >= 1:
                    saved = self.seconds
                    shown = f"step {self.step}, {self.seconds / 60:.1f} min: {figure} {mean:.3f}, "
                    tqdm.write(shown + milestone())
                    self.save()
