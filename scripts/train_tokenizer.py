"""Train the embedded model's VQ tokenizer on painted scenes.

    python -m scripts.train_tokenizer --data-dir data --minutes 90

writes `tokenizer.safetensors`, `tokenizer.json` and `runs/tokenizer/grid.png`, unseen pictures above their
reconstructions. The first steps train a plain autoencoder; then the codebook starts as k-means of its latents and
follows them as moving averages, and codes nobody uses are moved to latents of the batch. The weights saved are the
moving average of the trained ones. `--start` begins at the weights of a model folder, which costs a fraction of the
time; `--resume` goes on after an interruption.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm

from lantern_hpu.files import write_file
from lantern_hpu.models.config import VQConfig
from lantern_hpu.models.vq import VQModel
from scripts.pictures import FRESH, Stream, painted, to_float
from scripts.training import native_bfloat16

CONFIG = VQConfig(
    channels=32,
    multipliers=(1, 2, 4),
    res_blocks=1,
    z_channels=64,
    code_dim=8,
    codebook_size=4096,
    groups=8,
)
GRID = (16, 16)  # codes of a picture
CHECKPOINT_SECONDS = 120.0


class LatentAverages:
    """The codebook's moving averages: a code is the mean of the latents that chose it."""

    def __init__(self, codes: int, dim: int, decay: float = 0.99, revive_below: float = 0.05):
        self.decay, self.revive_below = decay, revive_below
        self.count = torch.ones(codes)  # [V], latents a step
        self.total = torch.zeros(codes, dim)  # [V, code_dim]

    def start(self, weight: Tensor) -> None:
        self.count.fill_(1.0)
        self.total.copy_(weight)

    @torch.no_grad()
    def update(self, weight: Tensor, z: Tensor, codes: Tensor) -> int:
        """Move the codebook [V, code_dim] to the latents z [n, code_dim] that chose `codes` [n].

        Codes too rarely chosen are moved to latents that are served badly; returns how many.
        """
        self.count.mul_(self.decay)
        self.total.mul_(self.decay)
        rate = 1 - self.decay
        self.count.index_add_(0, codes, torch.full_like(codes, rate, dtype=torch.float))
        self.total.index_add_(0, codes, z * rate)
        dead = (self.count < self.revive_below).nonzero().flatten()  # [dead]
        if len(dead):
            # Drawn by how far off they are: an even sky, much of a batch, is served well.
            error = (z - weight[codes]).square().sum(-1) + 1e-6  # [n]
            chosen = z[torch.multinomial(error, len(dead), replacement=len(dead) > len(z))]
            self.total[dead], self.count[dead] = chosen, 1.0
        weight.copy_(F.normalize(self.total, dim=-1))
        return len(dead)


def picture_loss(drawn: Tensor, real: Tensor) -> Tensor:
    """L1 and L2 on pixels, the same on hue, L1 on differences of neighbours at three scales, and texture.

    The differences keep edges sharp. Without the term on hue, a small codebook spends its codes on
    brightness first and draws green as grey for the first thousand steps. Texture asks for as much roughness as
    there was, wherever its strokes may lie: the other terms would rather have none than misplace one.
    """
    error = drawn - real  # [B, 3, H, W]
    hue = error - error.mean(dim=1, keepdim=True)  # [B, 3, H, W]
    loss = error.abs().mean() + error.square().mean()
    loss = loss + hue.abs().mean() + 2 * hue.square().mean()
    for _ in range(3):
        loss = loss + 0.5 * error.diff(dim=-1).abs().mean() + 0.5 * error.diff(dim=-2).abs().mean()
        error = F.avg_pool2d(error, 2)
    return loss + 0.25 * (roughness(drawn) - roughness(real)).abs().mean()


def roughness(x: Tensor) -> Tensor:
    """The size of differences between neighbours, over 4 x 4 pixels: [B, 3, H, W] -> [B, 3, H / 4, W / 4]."""
    across, down = x.diff(dim=-1)[..., :-1, :], x.diff(dim=-2)[..., :-1]
    return (F.avg_pool2d(across.square() + down.square(), 4, ceil_mode=True) + 1e-4).sqrt()


@torch.no_grad()
def kmeans(points: Tensor, count: int, rounds: int, generator: torch.Generator) -> Tensor:
    """`count` centres [count, d] on the sphere of points [n, d]."""
    points = points[torch.randperm(len(points), generator=generator)]
    centres = points[:count].clone()
    for _ in tqdm(range(rounds), desc="k-means", unit="round"):
        nearest = torch.cat([(part @ centres.T).argmax(-1) for part in points.split(8192)])  # [n]
        total = torch.zeros_like(centres).index_add_(0, nearest, points)
        used = torch.bincount(nearest, minlength=count) > 0  # [count]
        spare = points[torch.randint(len(points), (count,), generator=generator)]
        centres = F.normalize(torch.where(used[:, None], total, spare), dim=-1)
    return centres


class Trainer:
    """The model, its averages, the optimiser and the step count: all that a checkpoint holds."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.generator = torch.Generator().manual_seed(arguments.seed)
        torch.manual_seed(arguments.seed)
        self.model = VQModel(CONFIG)
        if arguments.start:
            self.model.load_state_dict(load_file(arguments.start / "vq.safetensors"))
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.codebook = LatentAverages(CONFIG.codebook_size, CONFIG.code_dim)
        weights = [p for n, p in self.model.named_parameters() if not n.startswith("quantize")]
        self.optimiser = torch.optim.AdamW(
            weights, lr=arguments.lr, betas=(0.9, 0.98), weight_decay=1e-4
        )
        self.bfloat16 = native_bfloat16()
        self.step, self.seconds, self.revived = 0, 0.0, 0
        self.folder: Path = arguments.data_dir / "runs" / "tokenizer"
        if arguments.resume:
            self.load_checkpoint()
        self.pictures = Stream(painted, arguments.batch, self.step * arguments.batch)

    @property
    def progress(self) -> float:
        """How much of the budget is spent, 0 to 1."""
        if self.arguments.steps:
            return min(1.0, self.step / self.arguments.steps)
        return min(1.0, self.seconds / (60 * self.arguments.minutes))

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "count": self.codebook.count,
            "total": self.codebook.total,
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "torch": torch.get_rng_state(),
            "step": self.step,
            "seconds": self.seconds,
        }

    def save_checkpoint(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / "last.pt.part"
        torch.save(self.state(), part)
        os.replace(part, self.folder / "last.pt")

    def load_checkpoint(self) -> None:
        state = torch.load(self.folder / "last.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.codebook.count, self.codebook.total = state["count"], state["total"]
        self.optimiser.load_state_dict(state["optimiser"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch"])
        self.step, self.seconds = state["step"], state["seconds"]

    def learning_rate(self) -> float:
        warm = min(1.0, (self.step + 1) / 50)
        return float(
            self.arguments.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.progress)))
        )

    def images(self) -> Tensor:
        """The next pictures, [B, 3, H, W] in [-1, 1], channels last."""
        return to_float(self.pictures.batch().pixels).contiguous(memory_format=torch.channels_last)

    def start_codebook(self) -> None:
        """k-means of the latents that the plain autoencoder has reached."""
        with torch.no_grad():
            latents = []
            for first in range(0, self.arguments.codebook_pictures, 64):
                pixels = painted(FRESH // 2 + first, 64).pixels
                latents.append(self.model.latents(to_float(pixels)).reshape(-1, CONFIG.code_dim))
        centres = kmeans(torch.cat(latents), CONFIG.codebook_size, 8, self.generator)
        self.model.quantize.embedding.weight.data.copy_(centres)
        self.codebook.start(centres)

    def loss(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The step's loss and the squared pixel error alone."""
        if self.step < self.arguments.warm_up:
            drawn = self.model.decode_latents(self.model.latents(images)).float()
            return picture_loss(drawn, images), F.mse_loss(drawn.detach(), images)
        drawn, z, codes = self.model(images)
        drawn, z, codes = drawn.float(), z.flatten(0, 2), codes.flatten()  # [n, code_dim], [n]
        weight = self.model.quantize.embedding.weight.data  # [V, code_dim]
        commitment = (z - weight[codes]).square().sum(-1).mean()
        # Codes move for most of the run; then they rest, so that the decoder can settle on them.
        if self.progress < 0.85:
            self.revived += self.codebook.update(weight, z.detach(), codes)
        loss = picture_loss(drawn, images) + self.arguments.commitment * commitment
        return loss, F.mse_loss(drawn.detach(), images)

    def train_step(self) -> float:
        began = time.monotonic()
        if self.step == self.arguments.warm_up:
            self.start_codebook()
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            loss, error = self.loss(self.images())
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.follow()
        self.step += 1
        self.seconds += time.monotonic() - began
        return error.item()

    @torch.no_grad()
    def follow(self) -> None:
        """Move the average towards the model, closely at first, so that it forgets the start."""
        rate = 1 - min(0.997, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(
            list(self.average.parameters()), list(self.model.parameters()), weight=rate
        )
        self.average.quantize.embedding.weight.data.copy_(self.model.quantize.embedding.weight.data)


@dataclass(frozen=True)
class Quality:
    """What `measure` found."""

    psnr: float  # dB, of the mean squared error
    used: int  # codes
    perplexity: float  # of the codes


@torch.no_grad()
def measure(model: VQModel, count: int) -> Quality:
    """How well fresh pictures come through."""
    error, seen = 0.0, torch.zeros(CONFIG.codebook_size)  # [V]
    for first in range(0, count, 64):
        real = to_float(painted(FRESH + first, min(64, count - first)).pixels)
        codes = model.encode(real).flatten(1)  # [B, N]
        error += (model.decode_codes(codes, GRID) - real).square().mean((1, 2, 3)).sum().item()
        seen += torch.bincount(codes.flatten(), minlength=CONFIG.codebook_size)
    probs = seen / seen.sum()
    return Quality(
        -10 * math.log10(error / count / 4),
        int((seen > 0).sum()),
        torch.special.entr(probs).sum().exp().item(),
    )


@torch.no_grad()
def save_grid(model: VQModel, path: Path, count: int = 40) -> None:
    """A PNG of fresh pictures, each above its reconstruction, at twice the size."""
    real = to_float(painted(FRESH, count).pixels)
    drawn = model.decode_codes(model.encode(real).flatten(1), GRID)
    pair = torch.cat([real, drawn], dim=2)  # [count, 3, 128, 64]
    pixels = ((pair + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    rows = [np.concatenate(list(pixels[i : i + 10]), axis=1) for i in range(0, count, 10)]
    sheet = Image.fromarray(np.concatenate(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    sheet.resize((sheet.width * 2, sheet.height * 2), Image.Resampling.NEAREST).save(part, "PNG")
    os.replace(part, path)


def report(trainer: Trainer, count: int) -> None:
    """Measure the averaged model on fresh pictures, draw the grid, and save usable weights."""
    found = measure(trainer.average, count)
    tqdm.write(
        f"step {trainer.step}, {trainer.seconds / 60:.1f} min: PSNR {found.psnr:.2f} dB, "
        f"{found.used} of {CONFIG.codebook_size} codes in {count} fresh pictures, "
        f"perplexity {found.perplexity:.0f}, {trainer.revived} revived so far"
    )
    save_grid(trainer.average, trainer.folder / "grid.png")
    data_dir: Path = trainer.arguments.data_dir
    tensors = {n: t.detach().contiguous() for n, t in trainer.average.state_dict().items()}
    write_file(data_dir / "tokenizer.safetensors", save(tensors), force=True)
    config = json.dumps(asdict(CONFIG), indent=2).encode()
    write_file(data_dir / "tokenizer.json", config, force=True)


def train(trainer: Trainer) -> None:
    """Train to the end of the budget, with a checkpoint and a measurement every two minutes."""
    saved = trainer.seconds
    with tqdm(
        total=100, unit="%", bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}", mininterval=5
    ) as bar:
        mean = math.nan
        while trainer.progress < 1:
            error = trainer.train_step()
            mean = error if math.isnan(mean) else 0.98 * mean + 0.02 * error
            bar.n = 100 * trainer.progress
            bar.set_description(f"step {trainer.step} MSE {mean:.4f}", refresh=False)
            bar.update(0)
            if trainer.seconds - saved > CHECKPOINT_SECONDS:
                saved = trainer.seconds
                trainer.save_checkpoint()
                report(trainer, trainer.arguments.measured // 4)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the VQ tokenizer on painted scenes.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument(
        "--start", type=Path, help="a model folder with the same sizes, whose weights to start from"
    )
    parser.add_argument("--minutes", type=float, default=90.0, help="budget of training time")
    parser.add_argument("--steps", type=int, default=0, help="budget in steps, instead of minutes")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--commitment", type=float, default=0.25)
    parser.add_argument("--warm-up", type=int, default=300, help="steps before quantisation")
    parser.add_argument(
        "--codebook-pictures", type=int, default=1024, help="whose latents start the codebook"
    )
    parser.add_argument("--measured", type=int, default=1024, help="fresh pictures at the end")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(arguments)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters")
    train(trainer)
    trainer.save_checkpoint()
    report(trainer, arguments.measured)


if __name__ == "__main__":
    main()
