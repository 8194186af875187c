"""Train the embedded model's VQ tokenizer on painted scenes.

    python -m lantern_lab.embedded.train_tokenizer --data-dir data --minutes 90
    python -m lantern_lab.embedded.train_tokenizer --data-dir data --minutes 90 --start MODEL --keep-codes

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
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save
from torch import Tensor, nn
from tqdm import tqdm

from lantern_hpu.files import write_file
from lantern_hpu.models.config import VQConfig
from lantern_hpu.models.vq import VQModel
from lantern_hpu.results.images import encode
from lantern_lab.embedded.picture_losses import (
    PatchDiscriminator,
    PerceptualLoss,
    balanced,
    picture_loss,
)
from lantern_lab.embedded.pictures import FRESH, Stream, painted, to_float
from lantern_lab.embedded.training import Run, native_bfloat16, parse, write_json

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
PERCEPTUAL, COMMITMENT = 0.5, 0.25  # weights of losses
DISCRIMINATOR_AHEAD = 0.03  # share of the budget for which it learns before the decoder listens


class LatentAverages(nn.Module):
    """The codebook's moving averages: a code is the mean of the latents that chose it."""

    count: Tensor
    total: Tensor

    def __init__(self, codes: int, dim: int, decay: float = 0.99, revive_below: float = 0.05):
        super().__init__()
        self.decay, self.revive_below = decay, revive_below
        self.register_buffer("count", torch.ones(codes))  # [V], latents a step
        self.register_buffer("total", torch.zeros(codes, dim))  # [V, code_dim]

    @torch.no_grad()
    def update(self, weight: Tensor, z: Tensor, codes: Tensor) -> int:
        """Move the codebook [V, code_dim] to the latents z [n, code_dim] that chose `codes` [n].

        Codes that are chosen too rarely are moved to latents that are far from their codes; returns how many.
        """
        self.count.mul_(self.decay)
        self.total.mul_(self.decay)
        rate = 1 - self.decay
        self.count.index_add_(0, codes, torch.full_like(codes, rate, dtype=torch.float))
        self.total.index_add_(0, codes, z * rate)
        dead = (self.count < self.revive_below).nonzero().flatten()  # [dead]
        if len(dead):
            # Drawn by how far off they are: an even sky, much of a batch, is close to its codes.
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
    """The models, their averages and the optimisers."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.bfloat16, self.revived = args, native_bfloat16(), 0
        self.model, self.discriminator = VQModel(CONFIG), PatchDiscriminator()
        self.perceptual = PerceptualLoss()
        if args.start:
            start_from(self.model, args.start, args.keep_codes)
        for module in (self.model, self.discriminator):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.codebook = LatentAverages(CONFIG.codebook_size, CONFIG.code_dim)
        learnt = LEARNT_FROM_CODES if args.keep_codes else LEARNT
        for name, weight in self.model.named_parameters():
            weight.requires_grad_(name.startswith(learnt))
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(self.weights, betas=(0.9, 0.98), weight_decay=1e-4)
        self.critic = torch.optim.AdamW(
            self.discriminator.parameters(), betas=(0.5, 0.98), weight_decay=0.0
        )
        parts: dict[str, Any] = {"model": self.model, "average": self.average}
        parts |= {"codebook": self.codebook, "optimiser": self.optimiser}
        parts |= {"discriminator": self.discriminator, "critic": self.critic}
        folder = args.data_dir / "runs" / "tokenizer"
        self.run = Run(folder, parts, args.minutes, args.steps)
        if args.resume:
            self.run.resume()
        self.pictures = Stream(painted, args.batch, self.run.step * args.batch)

    def learning_rate(self) -> float:
        warm = min(1.0, (self.run.step + 1) / 50)
        falling = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.run.progress))
        return float(self.args.lr * warm * falling)

    def start_codebook(self) -> None:
        """k-means of the latents that the plain autoencoder has reached."""
        with torch.no_grad():
            latents = []
            for first in range(0, self.args.codebook_pictures, 64):
                pixels = painted(FRESH // 2 + first, 64).pixels
                latents.append(self.model.latents(to_float(pixels)).reshape(-1, CONFIG.code_dim))
        centres = kmeans(torch.cat(latents), CONFIG.codebook_size, 8, self.run.generator)
        self.model.quantize.embedding.weight.data.copy_(centres)
        self.codebook.count.fill_(1.0)
        self.codebook.total.copy_(centres)

    @property
    def adversarial_share(self) -> float:
        """The discriminator's weight: 0 until it has learnt for a while, then rising over a twentieth of the budget."""
        since = self.run.progress - self.args.adversarial_from - DISCRIMINATOR_AHEAD
        return float(self.args.adversarial * min(1.0, max(0.0, since / 0.05)))

    def draw(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The pictures as the decoder draws them [B, 3, H, W], and the commitment loss []."""
        nothing = torch.zeros(())
        if self.args.keep_codes:
            with torch.no_grad():
                chosen = self.model.quantize.look_up(self.model.encode(images))
            return self.model.decode_latents(chosen).float(), nothing
        if self.run.step < self.args.warm_up:
            return self.model.decode_latents(self.model.latents(images)).float(), nothing
        drawn, z, codes = self.model(images)
        z, codes = z.flatten(0, 2), codes.flatten()  # [n, code_dim], [n]
        weight = self.model.quantize.embedding.weight.data  # [V, code_dim]
        commitment = (z - weight[codes]).square().sum(-1).mean()
        # Codes move for most of the run; then they rest, so that the decoder can settle on them.
        if self.run.progress < 0.85:
            self.revived += self.codebook.update(weight, z.detach(), codes)
        return drawn.float(), COMMITMENT * commitment

    def backward(self, drawn: Tensor, images: Tensor, commitment: Tensor) -> dict[str, float]:
        """Leave the gradients of all losses on the model; returns the losses."""
        perceptual = self.perceptual(drawn, images)
        pixels = picture_loss(drawn, images)
        loss = pixels + PERCEPTUAL * perceptual
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
        self.critic.param_groups[0]["lr"] = self.args.critic_lr
        self.critic.zero_grad(set_to_none=True)
        loss.backward()
        self.critic.step()
        return loss.item()

    def train_step(self) -> dict[str, float]:
        """One step; returns its losses, and the squared pixel error alone as `MSE`."""
        if self.run.step == self.args.warm_up and not self.args.keep_codes:
            self.start_codebook()
        self.optimiser.param_groups[0]["lr"] = self.learning_rate()
        images = to_float(self.pictures.batch().pixels)  # [B, 3, H, W] in [-1, 1]
        images = images.contiguous(memory_format=torch.channels_last)
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            drawn, commitment = self.draw(images)
            values = self.backward(drawn, images, commitment)
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimiser.step()
        if self.run.progress >= self.args.adversarial_from:
            values["discriminator"] = self.train_discriminator(drawn, images)
        self.follow()
        return values | {"MSE": F.mse_loss(drawn.detach(), images).item()}

    @torch.no_grad()
    def follow(self) -> None:
        """Move the average towards the model, closely at first, so that it forgets the start."""
        rate = 1 - min(0.997, (1 + self.run.step) / (10 + self.run.step))
        torch._foreach_lerp_(
            list(self.average.parameters()), list(self.model.parameters()), weight=rate
        )
        self.average.quantize.embedding.weight.data.copy_(self.model.quantize.embedding.weight.data)

    def milestone(self, means: dict[str, float]) -> str:
        """Measure the averaged model on fresh pictures, draw the grid, and save usable weights and the curve."""
        ends, data_dir = self.run.progress >= 1, self.args.data_dir
        count = self.args.measured if ends else self.args.measured // 16
        found = measure(self.average, self.perceptual, count)
        point = {"step": self.run.step, "minutes": self.run.seconds / 60, "fresh": count}
        point |= found | {f"training_{name}": value for name, value in means.items()}
        self.run.curve.append({name: round(value, 5) for name, value in point.items()})
        save_grid(self.average, self.run.folder / "grid.png")
        tensors = {n: t.detach().contiguous() for n, t in self.average.state_dict().items()}
        write_file(data_dir / "tokenizer.safetensors", save(tensors), force=True)
        write_json(data_dir / "tokenizer.json", asdict(CONFIG))
        write_json(self.run.folder / "curve.json", self.run.curve)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        return f"{count} fresh pictures: {shown}; {self.revived} codes revived so far"


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


@torch.no_grad()
def measure(model: VQModel, distance: PerceptualLoss, count: int) -> dict[str, float]:
    """How well fresh pictures come through: PSNR in dB, mean distance, codes used and their perplexity."""
    error, far, seen = 0.0, 0.0, torch.zeros(CONFIG.codebook_size)  # [V]
    for first in range(0, count, 32):
        real = to_float(painted(FRESH + first, min(32, count - first)).pixels)
        codes = model.encode(real).flatten(1)  # [B, N]
        drawn = model.decode_codes(codes, GRID)
        error += (drawn - real).square().mean((1, 2, 3)).sum().item()
        far += distance(drawn, real).item() * len(real)
        seen += torch.bincount(codes.flatten(), minlength=CONFIG.codebook_size)
    perplexity = torch.special.entr(seen / seen.sum()).sum().exp().item()
    quality = {"psnr": -10 * math.log10(error / count / 4), "perceptual": far / count}
    return quality | {"used": int((seen > 0).sum()), "perplexity": perplexity}


@torch.no_grad()
def save_grid(model: VQModel, path: Path, count: int = 24) -> None:
    """A PNG of fresh pictures, each above its reconstruction."""
    real = to_float(painted(FRESH, count).pixels)
    drawn = model.decode_codes(model.encode(real).flatten(1), GRID)
    pair = torch.cat([real, drawn], dim=2)  # [count, 3, 2 H, W]
    pixels = ((pair + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    rows = [np.concatenate(list(pixels[i : i + 8]), axis=1) for i in range(0, count, 8)]
    write_file(path, encode(Image.fromarray(np.concatenate(rows))), force=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the VQ tokenizer on painted scenes.")
    add = parser.add_argument
    add("--start", type=Path, help="a model folder with the weights to start from")
    add(
        "--keep-codes", action="store_true", help="train the decoder alone, on the codes of --start"
    )
    add("--minutes", type=float, default=90.0, help="budget of training time")
    add("--steps", type=int, default=0, help="budget in steps, instead of minutes")
    add("--batch", type=int, default=8)
    add("--lr", type=float, default=1e-3)
    add("--adversarial", type=float, default=0.4, help="the discriminator's share of the gradient")
    add("--adversarial-from", type=float, default=0.35, help="share of the budget before it starts")
    add("--critic-lr", type=float, default=1e-3, help="of the discriminator")
    add("--warm-up", type=int, default=300, help="steps before quantisation")
    add("--codebook-pictures", type=int, default=1024, help="whose latents start the codebook")
    add("--measured", type=int, default=1024, help="fresh pictures at the end")
    args = parse(parser)
    if args.keep_codes and not args.start:
        parser.error("--keep-codes needs --start, the model folder whose codes are kept")
    trainer = Trainer(args)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters")
    trainer.run.train(trainer.train_step, trainer.milestone, "MSE")


if __name__ == "__main__":
    main()
