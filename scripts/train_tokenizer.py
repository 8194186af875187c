"""Train the embedded model's VQ tokenizer on the rendered icons.

    python scripts/train_tokenizer.py --data-dir data --minutes 46

needs `icons.npz` (scripts/icons.py) and writes `tokenizer.safetensors`, `tokenizer.json` and a grid
of held-out originals and reconstructions. The first steps train a plain autoencoder; then the
codebook starts as k-means of its latents and follows them as moving averages, and codes nobody uses
are moved to latents of the batch. The weights saved are the moving average of the trained ones. A
run that was cut off goes on with `--resume`; `--start FILE` begins with the weights of an earlier run.

Where other programs share the cores, OMP_WAIT_POLICY=PASSIVE keeps the threads from stalling.
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
from icons import load_icons, write_atomic
from PIL import Image
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm
from variants import held_out, make_variants

from lantern_hpu.models.vq import VQConfig, VQModel

CONFIG = VQConfig(
    channels=32,
    multipliers=(1, 2, 4),
    res_blocks=1,
    z_channels=64,
    code_dim=8,
    codebook_size=4096,
    groups=8,
)
CHECKPOINT_SECONDS = 120.0


@dataclass
class Pictures:
    """Pictures as uint8, to be normalised a batch at a time."""

    train: Tensor  # [n, 3, 64, 64] uint8
    held_out: Tensor  # [m, 3, 64, 64] uint8


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
            # Drawn by how far off they are: flat background, most of a batch, is served well.
            error = (z - weight[codes]).square().sum(-1) + 1e-6  # [n]
            chosen = z[torch.multinomial(error, len(dead), replacement=len(dead) > len(z))]
            self.total[dead], self.count[dead] = chosen, 1.0
        weight.copy_(F.normalize(self.total, dim=-1))
        return len(dead)


def load_pictures(data_dir: Path, seed: int) -> Pictures:
    """Every variant, split by concept."""
    icons = load_icons(data_dir)
    variants = make_variants(icons, seed=seed)
    images = torch.from_numpy(np.stack([v.image for v in variants]))  # [n, 64, 64, 3] uint8
    out = torch.tensor([held_out(icons.names[v.icon]) for v in variants])  # [n] bool
    images = images.permute(0, 3, 1, 2)
    return Pictures(images[~out].contiguous(), images[out].contiguous())


def to_float(images: Tensor) -> Tensor:
    """[B, 3, H, W] uint8 to float32 in [-1, 1], channels last."""
    return (images.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)


def batch_of(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A batch, each picture mirrored with probability 1/2: [B, 3, 64, 64] float32."""
    picked = images[torch.randint(len(images), (size,), generator=generator)]
    mirrored = torch.rand(size, 1, 1, 1, generator=generator) < 0.5
    return to_float(torch.where(mirrored, picked.flip(-1), picked))


def picture_loss(drawn: Tensor, real: Tensor) -> Tensor:
    """L1 and L2 on pixels, the same on hue, and L1 on differences of neighbours at three scales.

    The differences keep edges sharp. Without the term on hue, a small codebook spends its codes on
    brightness first and draws green as grey for the first thousand steps.
    """
    error = drawn - real  # [B, 3, H, W]
    hue = error - error.mean(dim=1, keepdim=True)  # [B, 3, H, W]
    loss = error.abs().mean() + error.square().mean()
    loss = loss + hue.abs().mean() + 2 * hue.square().mean()
    for _ in range(3):
        loss = loss + 0.5 * error.diff(dim=-1).abs().mean() + 0.5 * error.diff(dim=-2).abs().mean()
        error = F.avg_pool2d(error, 2)
    return loss


@torch.no_grad()
def kmeans(points: Tensor, count: int, rounds: int, generator: torch.Generator) -> Tensor:
    """`count` centres [count, d] on the sphere of points [n, d]."""
    # Flat background gives the same latent many thousands of times; one of each is enough here.
    points = F.normalize(torch.unique((points * 64).round(), dim=0), dim=-1)
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

    def __init__(self, arguments: argparse.Namespace, pictures: Pictures) -> None:
        self.arguments, self.pictures = arguments, pictures
        self.generator = torch.Generator().manual_seed(arguments.seed)
        torch.manual_seed(arguments.seed)
        self.model = VQModel(CONFIG).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.codebook = LatentAverages(CONFIG.codebook_size, CONFIG.code_dim)
        weights = [p for n, p in self.model.named_parameters() if not n.startswith("quantize")]
        self.optimiser = torch.optim.AdamW(
            weights, lr=arguments.lr, betas=(0.9, 0.98), weight_decay=1e-4
        )
        self.step, self.seconds, self.revived = 0, 0.0, 0
        if arguments.start is not None:
            self.start_from(arguments.start)
        self.folder: Path = arguments.data_dir / "runs" / "tokenizer"

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
        self.step, self.seconds = state["step"], state["seconds"]

    def start_from(self, file: Path) -> None:
        """Begin with finished weights, codebook included, instead of as a plain autoencoder."""
        weights = load_file(file)
        self.model.load_state_dict(weights)
        self.average.load_state_dict(weights)
        self.codebook.start(F.normalize(weights["quantize.embedding.weight"], dim=-1))
        self.arguments.warm_up = -1

    def learning_rate(self) -> float:
        warm = min(1.0, (self.step + 1) / 50)
        return float(
            self.arguments.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.progress)))
        )

    def start_codebook(self) -> None:
        """k-means of the latents that the plain autoencoder has reached."""
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            batches = [batch_of(self.pictures.train, 64, self.generator) for _ in range(8)]
            points = torch.cat(
                [self.model.latents(b).reshape(-1, CONFIG.code_dim) for b in batches]
            )
        centres = kmeans(points, CONFIG.codebook_size, 8, self.generator)
        self.model.quantize.embedding.weight.data.copy_(centres)
        self.codebook.start(centres)

    def loss(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The step's loss and the squared pixel error alone."""
        if self.step < self.arguments.warm_up:
            drawn = self.model.decode_latents(self.model.latents(images)).float()
            return picture_loss(drawn, images), F.mse_loss(drawn.detach(), images)
        drawn, z, codes = self.model(images)
        drawn, z, codes = (
            drawn.float(),
            z.flatten(0, 2),
            codes.flatten(),
        )  # [n, code_dim], [n]
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
        images = batch_of(self.pictures.train, self.arguments.batch, self.generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.arguments.float32):
            loss, error = self.loss(images)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
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

    error: float  # mean squared, on [-1, 1]
    psnr: float  # dB, the mean over pictures
    used: int  # codes
    perplexity: float  # of the codes

    @property
    def psnr_of_mean(self) -> float:
        """dB of the mean squared error: lower than the mean of the pictures' own."""
        return -10 * math.log10(self.error / 4)


@torch.no_grad()
def measure(model: VQModel, images: Tensor) -> Quality:
    """How well uint8 images come through."""
    errors, counts = [], torch.zeros(CONFIG.codebook_size)  # [V]
    for part in images.split(64):
        real = to_float(part)
        codes = model.encode(real).flatten(1)  # [B, N]
        errors.append((model.decode_codes(codes) - real).square().mean((1, 2, 3)))
        counts += torch.bincount(codes.flatten(), minlength=CONFIG.codebook_size)
    error = torch.cat(errors)  # [n]
    law = counts / counts.sum()
    return Quality(
        error.mean().item(),
        (-10 * (error / 4).log10()).mean().item(),
        int((counts > 0).sum()),
        torch.special.entr(law).sum().exp().item(),
    )


@torch.no_grad()
def save_grid(model: VQModel, images: Tensor, path: Path, count: int = 40) -> None:
    """A PNG of held-out pictures, each above its reconstruction, at twice the size."""
    # An odd stride, so that all kinds of variants come up.
    stride = max(1, (len(images) - 1) // count) | 1
    real = to_float(images[torch.arange(count) * stride % len(images)])
    drawn = model.decode_codes(model.encode(real).flatten(1))
    pair = torch.cat([real, drawn], dim=2)  # [count, 3, 128, 64]
    pixels = ((pair + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    rows = [np.concatenate(list(pixels[i : i + 10]), axis=1) for i in range(0, count, 10)]
    sheet = Image.fromarray(np.concatenate(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    sheet.resize((sheet.width * 2, sheet.height * 2), Image.Resampling.NEAREST).save(part, "PNG")
    os.replace(part, path)


def report(trainer: Trainer, every: int = 4) -> None:
    """Measure the averaged model on every few of the held-out pictures, and draw the grid."""
    held = trainer.pictures.held_out[::every]
    found = measure(trainer.average, held)
    tqdm.write(
        f"step {trainer.step}, {trainer.seconds / 60:.1f} min: held-out MSE {found.error:.4f}, "
        f"PSNR {found.psnr_of_mean:.2f} dB ({found.psnr:.2f} as a mean over pictures), "
        f"{found.used} of {CONFIG.codebook_size} codes used on held-out pictures, "
        f"perplexity {found.perplexity:.0f}, {trainer.revived} revived so far"
    )
    save_grid(trainer.average, held, trainer.folder / "grid.png")


def save_model(model: VQModel, data_dir: Path) -> None:
    """The weights in float32 and the configuration."""
    tensors = {name: t.detach().float().contiguous() for name, t in model.state_dict().items()}
    write_atomic(data_dir / "tokenizer.safetensors", save(tensors))
    write_atomic(data_dir / "tokenizer.json", json.dumps(asdict(model.config), indent=2).encode())


def train(trainer: Trainer) -> None:
    """Train to the end of the budget, with a checkpoint and a measurement every two minutes."""
    saved = trainer.seconds
    with tqdm(total=100, unit="%", bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}") as bar:
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
                report(trainer)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the VQ tokenizer on the rendered icons.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--minutes", type=float, default=16.0, help="budget of training time")
    parser.add_argument("--steps", type=int, default=0, help="budget in steps, instead of minutes")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--commitment", type=float, default=0.25)
    parser.add_argument("--start", type=Path, help="tokenizer.safetensors of an earlier run")
    parser.add_argument("--warm-up", type=int, default=120, help="steps before quantisation")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float32", action="store_true", help="no bfloat16 autocast")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(arguments, load_pictures(arguments.data_dir, arguments.seed))
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {len(trainer.pictures.train)} pictures")
    if arguments.resume:
        trainer.load_checkpoint()
    train(trainer)
    trainer.save_checkpoint()
    save_model(trainer.average, arguments.data_dir)
    report(trainer, every=1)


if __name__ == "__main__":
    main()
