"""What the training scripts share: replicas of a model on threads, an optimiser, a budget in minutes, checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lantern_hpu.files import write_file

CHECKPOINT_SECONDS = 120.0
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

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "average": self.average,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine, saved = self.weights + self.average, state["weights"] + state["average"]
        for tensor, value in zip(mine, saved, strict=True):
            tensor.copy_(value)
        for optimiser, kept in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
        self.publish(self.weights)


class Run:
    """A training run: its budget, random numbers, learning curve and checkpoint."""

    def __init__(
        self, folder: Path, parts: Mapping[str, Any], minutes: float = 0, steps: int = 0
    ) -> None:
        """
        Args:
            folder: for the checkpoint. parts: what a checkpoint holds, by name: modules, optimisers, learners.
            minutes: the budget, of training time alone. steps: the budget in place of minutes.
        """
        self.folder, self.file, self.parts = folder, folder / "last.pt", parts
        self.minutes, self.steps = minutes, steps
        self.generator = torch.Generator().manual_seed(torch.initial_seed())
        self.step, self.seconds, self.curve = 0, 0.0, list[dict[str, float]]()

    @property
    def progress(self) -> float:
        """How much of the budget is spent, 0 to 1."""
        spent = self.step / self.steps if self.steps else self.seconds / (60 * self.minutes)
        return min(1.0, spent)

    def save(self) -> None:
        state = {name: part.state_dict() for name, part in self.parts.items()}
        numbers = {"generator": self.generator.get_state(), "torch": torch.get_rng_state()}
        rest = {"step": self.step, "seconds": self.seconds, "curve": self.curve}
        content = io.BytesIO()
        torch.save(state | numbers | rest, content)
        write_file(self.file, content.getvalue(), force=True)

    def resume(self) -> None:
        state = torch.load(self.file, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch"])
        self.step, self.seconds, self.curve = state["step"], state["seconds"], state["curve"]

    def train(
        self,
        train_step: Callable[[], dict[str, float]],
        milestone: Callable[[dict[str, float]], str],
        shown: str,
        stop: int | None = None,
    ) -> None:
        """Spend the budget.

        Args:
            train_step: moves the weights, and returns figures.
            milestone: measures and saves usable weights, every few minutes and at the end; takes the figures'
                running means, and returns what to print.
            shown: the figure next to the progress bar. stop: the step to stop at, for another run to resume.
        """
        saved, means = self.seconds, dict[str, float]()
        form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}"
        with tqdm(total=100, bar_format=form, mininterval=5) as bar:
            while self.progress < 1 and self.step != stop:
                began = time.monotonic()
                figures = train_step()
                self.step += 1
                self.seconds += time.monotonic() - began
                for name, value in figures.items():
                    means[name] = 0.98 * means.get(name, value) + 0.02 * value
                bar.n = 100 * self.progress
                bar.set_description(f"step {self.step} {shown} {means[shown]:.3f}", refresh=False)
                bar.update(0)
                ends = self.progress >= 1 or self.step == stop
                if ends or self.seconds - saved > CHECKPOINT_SECONDS:
                    saved = self.seconds
                    about = f"step {self.step}, {self.seconds / 60:.1f} min: "
                    tqdm.write(f"{about}{shown} {means[shown]:.3f}, {milestone(means)}")
                    self.save()


def write_json(file: Path, content: Any) -> None:
    write_file(file, json.dumps(content, indent=1).encode(), force=True)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse with the options every training has, and set threads and seed."""
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    return args
