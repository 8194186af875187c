"""Train the embedded model's VQ tokenizer on painted scenes.

    python -m scripts.embedded_model.train_tokenizer --data-dir data --minutes 90
    python -m scripts.embedded_model.train_tokenizer --data-dir data --minutes 90 --start MODEL --keep-codes

writes `tokenizer.safetensors` and `tokenizer.json`, and in `runs/tokenizer` the learning curve (`curve.json`) and
`grid.png`, unseen pictures above their reconstructions. The first steps train a plain autoencoder; then the codebook
starts as k-means of its latents and follows them as moving averages, and codes nobody uses are moved to latents of the
batch. From a share of the budget on, a patch discriminator learns beside the decoder and teaches it texture that the
codes do not hold. The weights saved are the moving average of the trained ones. `--start` begins at the weights of a
model folder, which costs a fraction of the time; with `--keep-codes` its encoder and codebook stay as they are, so that
its target remains of use, and the decoder alone learns. `--resume` goes on after an interruption.
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
from scripts.embedded_model.picture_losses import (
    PatchDiscriminator,
    PerceptualLoss,
    balanced,
    picture_loss,
)
from scripts.embedded_model.pictures import FRESH, Stream, painted, to_float
from scripts.embedded_model.training import native_bfloat16

CONFIG = VQConfig(
    channels=16,
    multipliers=(1, 2, 4, 8),
    decoder_only=1,
    res_blocks=1,
    z_channels=64,
    code_dim=8,
    codebook_size=4096,
    groups=8,
)
GRID = (16, 16)  # codes of a picture
LEARNT_FROM_CODES = ("decoder.", "post_quant_conv.")
LEARNT = ("encoder.", "quant_conv.", *LEARNT_FROM_CODES)  # the codebook follows the latents
DISCRIMINATOR_AHEAD = 0.03  # share of the budget for which it learns before the decoder listens
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
    """The models, their averages, the optimisers and the step count: all that a checkpoint holds."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.generator = torch.Generator().manual_seed(arguments.seed)
        torch.manual_seed(arguments.seed)
        self.model, self.discriminator = VQModel(CONFIG), PatchDiscriminator()
        self.perceptual = PerceptualLoss()
        if arguments.start:
            start_from(self.model, arguments.start, arguments.keep_codes)
        for module in (self.model, self.discriminator):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.codebook = LatentAverages(CONFIG.codebook_size, CONFIG.code_dim)
        learnt = LEARNT_FROM_CODES if arguments.keep_codes else LEARNT
        for name, weight in self.model.named_parameters():
            weight.requires_grad_(name.startswith(learnt))
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(
            self.weights, lr=arguments.lr, betas=(0.9, 0.98), weight_decay=1e-4
        )
        self.critic = torch.optim.AdamW(
            self.discriminator.parameters(),
            lr=arguments.critic_lr,
            betas=(0.5, 0.98),
            weight_decay=0.0,
        )
        self.bfloat16 = native_bfloat16()
        self.step, self.seconds, self.revived = 0, 0.0, 0
        self.curve: list[dict[str, float]] = []
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
            "discriminator": self.discriminator.state_dict(),
            "critic": self.critic.state_dict(),
            "curve": self.curve,
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
        self.discriminator.load_state_dict(state["discriminator"])
        self.critic.load_state_dict(state["critic"])
        self.curve = state["curve"]
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

    @property
    def adversarial_share(self) -> float:
        """The discriminator's weight: 0 until it has learnt for a while, then rising over a twentieth of the budget."""
        since = self.progress - self.arguments.adversarial_from - DISCRIMINATOR_AHEAD
        return float(self.arguments.adversarial * min(1.0, max(0.0, since / 0.05)))

    def draw(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The pictures as the decoder draws them [B, 3, H, W], and the commitment loss []."""
        nothing = torch.zeros(())
        if self.arguments.keep_codes:
            with torch.no_grad():
                chosen = self.model.quantize.look_up(self.model.encode(images))
            return self.model.decode_latents(chosen).float(), nothing
        if self.step < self.arguments.warm_up:
            return self.model.decode_latents(self.model.latents(images)).float(), nothing
        drawn, z, codes = self.model(images)
        z, codes = z.flatten(0, 2), codes.flatten()  # [n, code_dim], [n]
        weight = self.model.quantize.embedding.weight.data  # [V, code_dim]
        commitment = (z - weight[codes]).square().sum(-1).mean()
        # Codes move for most of the run; then they rest, so that the decoder can settle on them.
        if self.progress < 0.85:
            self.revived += self.codebook.update(weight, z.detach(), codes)
        return drawn.float(), self.arguments.commitment * commitment

    def backward(self, drawn: Tensor, images: Tensor, commitment: Tensor) -> dict[str, float]:
        """Leave the gradients of all losses on the model; returns the losses."""
        perceptual = self.perceptual(drawn, images)
        pixels = picture_loss(drawn, images)
        loss = pixels + self.arguments.perceptual * perceptual
        values = {"pixels": pixels.item(), "perceptual": perceptual.item()}
        if share := self.adversarial_share:
            adversarial = -self.discriminator(drawn).mean()
            gradient = balanced(loss, adversarial, drawn, self.model.decoder.conv_out.weight, share)
            values["adversarial"] = adversarial.item()
        else:
            (gradient,) = torch.autograd.grad(loss, drawn)
        if commitment.requires_grad:
            torch.autograd.backward([drawn, commitment], [gradient, None])
        else:
            drawn.backward(gradient)
        return values

    def train_discriminator(self, drawn: Tensor, images: Tensor) -> float:
        loss = self.discriminator.loss(drawn.detach(), images)
        for group in self.critic.param_groups:  # a resumed run may ask for another one
            group["lr"] = self.arguments.critic_lr
        self.critic.zero_grad(set_to_none=True)
        loss.backward()
        self.critic.step()
        return loss.item()

    def train_step(self) -> dict[str, float]:
        """One step; returns its losses and the squared pixel error alone."""
        began = time.monotonic()
        if self.step == self.arguments.warm_up and not self.arguments.keep_codes:
            self.start_codebook()
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate()
        images = self.images()
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            drawn, commitment = self.draw(images)
            values = self.backward(drawn, images, commitment)
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimiser.step()
        if self.progress >= self.arguments.adversarial_from:
            values["discriminator"] = self.train_discriminator(drawn, images)
        self.follow()
        self.step += 1
        self.seconds += time.monotonic() - began
        return values | {"error": F.mse_loss(drawn.detach(), images).item()}

    @torch.no_grad()
    def follow(self) -> None:
        """Move the average towards the model, closely at first, so that it forgets the start."""
        rate = 1 - min(0.997, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(
            list(self.average.parameters()), list(self.model.parameters()), weight=rate
        )
        self.average.quantize.embedding.weight.data.copy_(self.model.quantize.embedding.weight.data)


def start_from(model: VQModel, folder: Path, keep_codes: bool) -> None:
    """Take the weights of the tokenizer in `folder` that have the same name and size."""
    known, mine = load_file(folder / "vq.safetensors"), model.state_dict()
    fitting = {n: t for n, t in known.items() if n in mine and t.shape == mine[n].shape}
    missing = [n for n in mine if not n.startswith(LEARNT_FROM_CODES) and n not in fitting]
    if keep_codes and missing:
        raise SystemExit(
            f"the codes of {folder} cannot be kept: {missing[0]} has another size here"
        )
    model.load_state_dict(fitting, strict=False)
    print(f"{len(fitting)} of {len(mine)} tensors from {folder}")


@dataclass(frozen=True)
class Quality:
    """What `measure` found."""

    psnr: float  # dB, of the mean squared error
    perceptual: float  # mean distance
    used: int  # codes
    perplexity: float  # of the codes


@torch.no_grad()
def measure(model: VQModel, distance: PerceptualLoss, count: int) -> Quality:
    """How well fresh pictures come through."""
    error, far, seen = 0.0, 0.0, torch.zeros(CONFIG.codebook_size)  # [V]
    for first in range(0, count, 32):
        real = to_float(painted(FRESH + first, min(32, count - first)).pixels)
        codes = model.encode(real).flatten(1)  # [B, N]
        drawn = model.decode_codes(codes, GRID)
        error += (drawn - real).square().mean((1, 2, 3)).sum().item()
        far += distance(drawn, real).item() * len(real)
        seen += torch.bincount(codes.flatten(), minlength=CONFIG.codebook_size)
    probs = seen / seen.sum()
    return Quality(
        -10 * math.log10(error / count / 4),
        far / count,
        int((seen > 0).sum()),
        torch.special.entr(probs).sum().exp().item(),
    )


@torch.no_grad()
def save_grid(model: VQModel, path: Path, count: int = 24) -> None:
    """A PNG of fresh pictures, each above its reconstruction."""
    real = to_float(painted(FRESH, count).pixels)
    drawn = model.decode_codes(model.encode(real).flatten(1), GRID)
    pair = torch.cat([real, drawn], dim=2)  # [count, 3, 2 H, W]
    pixels = ((pair + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    rows = [np.concatenate(list(pixels[i : i + 8]), axis=1) for i in range(0, count, 8)]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    Image.fromarray(np.concatenate(rows)).save(part, "PNG")
    os.replace(part, path)


def report(trainer: Trainer, count: int, means: dict[str, float]) -> None:
    """Measure the averaged model on fresh pictures, draw the grid, and save usable weights and the curve."""
    found = measure(trainer.average, trainer.perceptual, count)
    point = {"step": trainer.step, "minutes": trainer.seconds / 60, "fresh": count}
    point |= asdict(found) | {f"training_{name}": value for name, value in means.items()}
    trainer.curve.append({name: round(value, 5) for name, value in point.items()})
    tqdm.write(
        f"step {trainer.step}, {trainer.seconds / 60:.1f} min: PSNR {found.psnr:.2f} dB, "
        f"perceptual distance {found.perceptual:.4f}, "
        f"{found.used} of {CONFIG.codebook_size} codes in {count} fresh pictures, "
        f"perplexity {found.perplexity:.0f}, {trainer.revived} revived so far; training "
        + ", ".join(f"{name} {value:.4f}" for name, value in means.items())
    )
    save_grid(trainer.average, trainer.folder / "grid.png")
    data_dir: Path = trainer.arguments.data_dir
    tensors = {n: t.detach().contiguous() for n, t in trainer.average.state_dict().items()}
    write_file(data_dir / "tokenizer.safetensors", save(tensors), force=True)
    config = json.dumps(asdict(CONFIG), indent=2).encode()
    write_file(data_dir / "tokenizer.json", config, force=True)
    curve = json.dumps(trainer.curve, indent=1).encode()
    write_file(trainer.folder / "curve.json", curve, force=True)


def train(trainer: Trainer) -> None:
    """Train to the end of the budget, with a checkpoint and a measurement every two minutes."""
    saved, means = trainer.seconds, dict[str, float]()
    with tqdm(
        total=100, unit="%", bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}", mininterval=5
    ) as bar:
        while trainer.progress < 1:
            for name, value in trainer.train_step().items():
                means[name] = 0.98 * means.get(name, value) + 0.02 * value
            bar.n = 100 * trainer.progress
            bar.set_description(f"step {trainer.step} MSE {means['error']:.4f}", refresh=False)
            bar.update(0)
            if trainer.progress >= 1 or trainer.seconds - saved > CHECKPOINT_SECONDS:
                saved = trainer.seconds
                whole = trainer.arguments.measured
                report(trainer, whole if trainer.progress >= 1 else whole // 16, means)
                trainer.save_checkpoint()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the VQ tokenizer on painted scenes.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--start", type=Path, help="a model folder with the weights to start from")
    parser.add_argument(
        "--keep-codes", action="store_true", help="train the decoder alone, on the codes of --start"
    )
    parser.add_argument("--minutes", type=float, default=90.0, help="budget of training time")
    parser.add_argument("--steps", type=int, default=0, help="budget in steps, instead of minutes")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--perceptual", type=float, default=0.5, help="weight of that distance")
    parser.add_argument(
        "--adversarial", type=float, default=0.4, help="the discriminator's share of the gradient"
    )
    parser.add_argument(
        "--adversarial-from", type=float, default=0.35, help="share of the budget before it starts"
    )
    parser.add_argument("--critic-lr", type=float, default=1e-3, help="of the discriminator")
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
    if arguments.keep_codes and not arguments.start:
        parser.error("--keep-codes needs --start, the model folder whose codes are kept")
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(arguments)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters")
    train(trainer)


if __name__ == "__main__":
    main()
