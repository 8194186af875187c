"""What the training scripts share: replicas of a model on threads, an optimiser, a budget in minutes, checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

CHECKPOINT_SECONDS = 300.0
TABLES = ("embed.weight", "head.weight", "table.weight", "position.weight", "uncond")


def native_bfloat16() -> bool:
    """Whether bfloat16 trains faster here: it does with AMX. AVX512-BF16 alone takes 1.5 times as long as float32."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


class Muon(torch.optim.Optimizer):
    """Momentum whose update is turned into the nearest orthogonal matrix (Jordan 2024).

    torch has one that orthogonalises in bfloat16 alone: hundreds of times slower where that is emulated.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic Newton-Schulz iteration

    def __init__(
        self, weights: list[Tensor], decay: float, dtype: torch.dtype, momentum: float = 0.95
    ) -> None:
        super().__init__(weights, {"lr": 0.0})
        self.decay, self.dtype, self.momentum = decay, dtype, momentum

    def orthogonal(self, x: Tensor) -> Tensor:
        a, b, c = self.COEFFICIENTS
        tall = x.shape[0] > x.shape[1]
        x = (x.T if tall else x).to(self.dtype)
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
        return x.T if tall else x

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                moved = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                moved.lerp_(weight.grad, 1 - self.momentum)
                update = self.orthogonal(weight.grad.lerp(moved, self.momentum))
                # As large as AdamW's, so that one learning rate serves both
                rate = group["lr"] * 0.2 * math.sqrt(max(weight.shape))
                weight.mul_(1 - group["lr"] * self.decay).add_(update, alpha=-rate)


class Learner:
    """A model's float32 weights, their moving average, the optimisers, and replicas that compute gradients.

    Each replica has a thread with one torch thread: two cores then never wait for each other inside an operator.
    Where the processor has bfloat16, replicas hold rounded weights; elsewhere the float32 ones themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        replicas: int,
        decay: float,
        clip: float,
        average: float,
        compiled: bool = False,
    ) -> None:
        """
        Args:
            model: in float32.
            replicas: number of threads.
            decay: weight decay of the blocks' matrices. clip: gradient norm.
            average: decay of the moving average.
            compiled: by torch's compiler, which fuses what lies between the matrices: 1.4 times as fast with AMX.
        """
        self.model, self.clip, self.rate = model, clip, average
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = [p.detach().clone() for p in model.parameters()]
        self.average = [p.clone() for p in self.weights]
        self.dtype = torch.bfloat16 if native_bfloat16() else torch.float32
        self.replicas = [copy.deepcopy(model).to(self.dtype) for _ in range(replicas)]
        self.shared = [w.to(self.dtype) for w in self.weights]  # in float32 the weights themselves
        for replica in self.replicas:
            for parameter, weight in zip(replica.parameters(), self.shared, strict=True):
                parameter.data = weight
        self.calls: list[Any] = [torch.compile(r) if compiled else r for r in self.replicas]
        self.in_turn = compiled  # the first time: the compiler is not made for threads
        self.pool = ThreadPoolExecutor(replicas, initializer=torch.set_num_threads, initargs=(1,))
        # Tables and the head, whose rows are used apart, and vectors are not what Muon is made for.
        inner = [
            weight.dim() == 2 and not name.endswith(TABLES)
            for name, weight in zip(self.names, self.weights, strict=True)
        ]
        matrices = [w for w, inside in zip(self.weights, inner, strict=True) if inside]
        others = [w for w, inside in zip(self.weights, inner, strict=True) if not inside]
        self.optimisers: list[torch.optim.Optimizer] = [
            Muon(matrices, decay, self.dtype),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]

    def gradients(self, loss: Callable[[nn.Module, Any], Tensor], batches: Sequence[Any]) -> float:
        """Mean loss over batches of one size; its gradients are left on the weights."""

        def work(index: int) -> float:
            total, replica = 0.0, self.calls[index]
            for batch in batches[index :: len(self.replicas)]:
                part = loss(replica, batch) / len(batches)
                part.backward()
                total += part.item()
            return total

        if self.in_turn:
            total = sum(self.pool.submit(work, i).result() for i in range(len(self.replicas)))
            self.in_turn = False
        else:
            total = sum(self.pool.map(work, range(len(self.replicas))))
        for weight, *parameters in zip(
            self.weights, *(r.parameters() for r in self.replicas), strict=True
        ):
            parts = [p.grad.float() for p in parameters if p.grad is not None]
            weight.grad = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
            for parameter in parameters:
                parameter.grad = None
        return total

    def step(self, lr: float, count: int) -> None:
        """Move the weights along their gradients; `count` is the number of steps before this one."""
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
        """Give the replicas these weights."""
        for mine, weight in zip(self.shared, weights, strict=True):
            mine.copy_(weight)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The model with its averaged weights."""
        for parameter, weight in zip(self.model.parameters(), self.average, strict=True):
            parameter.data = weight
        yield self.model

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
        self, folder: Path, learner: Learner, minutes: float, lr: float, warm_up: int, seed: int
    ) -> None:
        self.file, self.learner = folder / "last.pt", learner
        self.minutes, self.lr, self.warm_up = minutes, lr, warm_up
        self.generator = torch.Generator().manual_seed(seed)
        self.step, self.seconds = 0, 0.0

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
        state = self.learner.state() | {
            "generator": self.generator.get_state(),
            "step": self.step,
            "seconds": self.seconds,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.file)

    def resume(self) -> None:
        state = torch.load(self.file, weights_only=True)
        self.learner.load(state)
        self.generator.set_state(state["generator"])
        self.step, self.seconds = state["step"], state["seconds"]

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
                self.learner.step(self.learning_rate, self.step)
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


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse with the options every training has, and set the threads."""
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return arguments
