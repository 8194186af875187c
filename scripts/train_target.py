"""Train the embedded model's target: captions to image tokens, LlamaGen of small size.

    python scripts/train_target.py --data-dir data --minutes 70

needs `codes.npz` and `words.json` (scripts/encode_icons.py) and writes `target.safetensors` and
`target.json`. Weights train in bfloat16 beside float32 masters, in micro-batches small enough
for the processor's cache: on two cores that is several times faster than one large batch. `--resume` goes on
after an interruption.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from icons import write_atomic
from safetensors.torch import save
from torch import Tensor, nn
from tqdm import tqdm

from lantern_hpu.models.llamagen import CaptionProjection
from lantern_hpu.models.text import WordConditioner
from lantern_hpu.models.transformer import (
    Target,
    TransformerConfig,
    additive,
    prefix_mask,
    rope_table,
)

PREFIX = 16
CAPTION_DIM = 256
CHECKPOINT_SECONDS = 180.0


def config_of(arguments: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=4096,
        dim=arguments.dim,
        layers=arguments.layers,
        heads=arguments.dim // 64,
        ffn_dim=64 * math.ceil(arguments.dim * 8 / 3 / 64),
        prefix=PREFIX,
        grid=(16, 16),
        rope_pairs="half",
        rope_prefix="identity",
    )


class TextToImage(nn.Module):
    """Everything that learns from captioned tokens: words, projection, decoder."""

    def __init__(self, config: TransformerConfig, words: list[str]) -> None:
        super().__init__()
        self.words = WordConditioner(words, CAPTION_DIM, config.prefix)
        self.condition = CaptionProjection(CAPTION_DIM, config.dim, config.prefix)
        self.target = Target(config)
        for name, weight in self.target.named_parameters():
            if weight.dim() == 2:
                scale = (2 * config.layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(weight, std=0.02 * scale)
        length = config.prefix + config.tokens - 1
        self.register_buffer("rope", rope_table(config, length).bfloat16(), persistent=False)
        self.register_buffer("causal", torch.ones(length, length).tril().bool(), persistent=False)

    def hidden(self, ids: Tensor, codes: Tensor, uncond: Tensor) -> Tensor:
        """Final hidden states of the prefix and all tokens but the last.

        Args:
            ids: [B, P] word ids, left-padded; codes: [B, N]; uncond: [B] bool, drop the caption.

        Returns [B, P + N - 1, H].
        """
        caption = self.words(ids)
        features = torch.where(uncond[:, None, None], self.condition.uncond, caption.features)
        x = torch.cat([self.condition(features), self.target.embed(codes[:, :-1])], 1)
        valid = F.pad(caption.valid, (0, codes.shape[1] - 1), value=True)
        mask = additive(prefix_mask(valid, self.causal), x.dtype)
        return self.target(x, self.rope.expand(len(x), -1, -1, -1), mask)

    def loss(self, ids: Tensor, codes: Tensor, uncond: Tensor) -> Tensor:
        """Mean nats a token, [] float32."""
        logits = self.target.head(self.hidden(ids, codes, uncond)[:, self.words.prefix - 1 :])
        return F.cross_entropy(logits.flatten(0, 1).float(), codes.flatten())


class Captions:
    """Tokens and word ids of all variants, split by concept."""

    def __init__(self, data_dir: Path, words: WordConditioner) -> None:
        data = np.load(data_dir / "codes.npz")
        self.codes = torch.from_numpy(data["codes"].astype(np.int64))  # [n, N]
        rows = [words.ids(str(caption)) for caption in data["captions"]]
        self.ids = torch.tensor([[0] * (words.prefix - len(r)) + r for r in rows])  # [n, P]
        held = torch.from_numpy(data["held_out"])
        self.train, self.held_out = (~held).nonzero().flatten(), held.nonzero().flatten()

    def batch(self, index: Tensor, drop: float, generator: torch.Generator) -> tuple[Tensor, ...]:
        uncond = torch.rand(len(index), generator=generator) < drop
        return self.ids[index], self.codes[index], uncond


class Trainer:
    """Model, float32 masters, their moving average and the optimiser."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        torch.manual_seed(arguments.seed)
        self.generator = torch.Generator().manual_seed(arguments.seed)
        self.config = config_of(arguments)
        self.model = TextToImage(self.config, json.loads((arguments.data_dir / "words.json").read_text()))
        self.data = Captions(arguments.data_dir, self.model.words)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.master = [p.detach().clone() for p in self.model.parameters()]
        self.average = [p.clone() for p in self.master]
        self.model.bfloat16()
        decay = [m for m in self.master if m.dim() == 2]
        plain = [m for m in self.master if m.dim() != 2]
        self.optimiser = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
            lr=arguments.lr,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.step, self.seconds = 0, 0.0
        self.folder: Path = arguments.data_dir / "runs" / "target"

    @property
    def progress(self) -> float:
        return min(1.0, self.seconds / (60 * self.arguments.minutes))

    def state(self) -> dict[str, Any]:
        return {
            "master": self.master,
            "average": self.average,
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
        for mine, saved in zip(self.master + self.average, state["master"] + state["average"], strict=True):
            mine.copy_(saved)
        self.optimiser.load_state_dict(state["optimiser"])
        self.generator.set_state(state["generator"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.publish(self.master)

    @torch.no_grad()
    def publish(self, weights: list[Tensor]) -> None:
        """Round float32 weights into the bfloat16 model."""
        for parameter, weight in zip(self.model.parameters(), weights, strict=True):
            parameter.copy_(weight)

    def learning_rate(self) -> float:
        warm = min(1.0, (self.step + 1) / 100)
        return float(self.arguments.lr * warm * (0.02 + 0.49 * (1 + math.cos(math.pi * self.progress))))

    def train_step(self) -> float:
        began = time.monotonic()
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate()
        total = 0.0
        for _ in range(self.arguments.accumulate):
            picked = torch.randint(len(self.data.train), (self.arguments.batch,), generator=self.generator)
            batch = self.data.batch(self.data.train[picked], 0.1, self.generator)
            loss = self.model.loss(*batch) / self.arguments.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        for master, parameter in zip(self.master, self.model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(self.master, 1.0)
        self.optimiser.step()
        self.publish(self.master)
        rate = 1 - min(0.998, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.average, self.master, weight=rate)
        self.step += 1
        self.seconds += time.monotonic() - began
        return total

    @torch.no_grad()
    def held_out_loss(self, count: int = 64) -> float:
        """Nats a token of the averaged weights on unseen concepts."""
        self.publish(self.average)
        index = self.data.held_out[:: max(1, len(self.data.held_out) // count)][:count]
        generator = torch.Generator().manual_seed(0)
        parts = [self.model.loss(*self.data.batch(i, 0.0, generator)).item() for i in index.split(8)]
        self.publish(self.master)
        return sum(parts) / len(parts)

    def save_model(self) -> None:
        tensors = dict(zip(self.names, self.average, strict=True))
        write_atomic(self.arguments.data_dir / "target.safetensors", save(tensors))
        write_atomic(self.arguments.data_dir / "target.json", json.dumps(asdict(self.config), indent=2).encode())


def train(trainer: Trainer) -> None:
    """Train to the end of the budget; every few minutes a checkpoint, a measurement and usable weights."""
    saved, mean = trainer.seconds, math.nan
    with tqdm(total=100, bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}", mininterval=5) as bar:
        while trainer.progress < 1:
            loss = trainer.train_step()
            mean = loss if math.isnan(mean) else 0.98 * mean + 0.02 * loss
            bar.n = 100 * trainer.progress
            bar.set_description(f"step {trainer.step} nats {mean:.3f}", refresh=False)
            bar.update(0)
            if trainer.seconds - saved > CHECKPOINT_SECONDS or trainer.progress >= 1:
                saved = trainer.seconds
                trainer.save_checkpoint()
                trainer.save_model()
                tqdm.write(
                    f"step {trainer.step}, {trainer.seconds / 60:.1f} min: train {mean:.3f}, "
                    f"held out {trainer.held_out_loss():.3f} nats a token"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded model's target.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--minutes", type=float, default=70.0)
    parser.add_argument("--dim", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="images a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(arguments)
    parameters = sum(m.numel() for m in trainer.master)
    print(f"{parameters / 1e6:.2f} M parameters, {len(trainer.data.train)} pictures")
    if arguments.resume:
        trainer.load_checkpoint()
    train(trainer)


if __name__ == "__main__":
    main()
