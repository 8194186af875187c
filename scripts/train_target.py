"""Train the embedded model's target: captions to image tokens, LlamaGen of small size.

    python scripts/train_target.py --data-dir data --minutes 70

needs `codes.npz` and `words.json` (scripts/encode_icons.py) and writes `target.safetensors` and
`target.json`. Weights train in bfloat16 beside float32 masters, in micro-batches small enough
for the processor's cache: on two cores that is several times faster than one large batch; `--compile` makes it
nearly twice as fast again and needs a C++ compiler. `--resume` goes on after an interruption, or with more
`--minutes` after the end.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from icons import write_atomic
from safetensors.torch import save
from torch import Tensor, nn
from training import Masters, Run, parse

from lantern_hpu.kernels import PLAIN
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


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention written out: on a processor its backward pass is faster than the fused one's."""
    scores = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2) + mask  # [B, heads, T, T]
    return scores.softmax(-1) @ v


class TextToImage(nn.Module):
    """Everything that learns from captioned tokens: words, projection, decoder."""

    def __init__(self, config: TransformerConfig, words: list[str]) -> None:
        super().__init__()
        self.words = WordConditioner(words, CAPTION_DIM, config.prefix)
        self.condition = CaptionProjection(CAPTION_DIM, config.dim, config.prefix)
        self.target = Target(config, replace(PLAIN, attention=attention))
        for name, weight in self.target.named_parameters():
            if weight.dim() == 2:
                scale = (
                    (2 * config.layers) ** -0.5
                    if name.endswith(("out.weight", "down.weight"))
                    else 1
                )
                nn.init.normal_(weight, std=0.02 * scale)
        length = config.prefix + config.tokens - 1
        self.register_buffer("rope", rope_table(config, length).bfloat16(), persistent=False)
        self.register_buffer("causal", torch.ones(length, length).tril().bool(), persistent=False)

    def hidden(self, ids: Tensor, codes: Tensor, uncond: Tensor) -> Tensor:
        """Final hidden states of the prefix and all tokens but the last.

        Args:
            ids: [B, P] word ids, left-padded; codes: [B, N], what is read; uncond: [B] bool, drop the caption.

        Returns [B, P + N - 1, H].
        """
        caption = self.words(ids)
        features = torch.where(uncond[:, None, None], self.condition.uncond, caption.features)
        x = torch.cat([self.condition(features), self.target.embed(codes[:, :-1])], 1)
        valid = F.pad(caption.valid, (0, codes.shape[1] - 1), value=True)
        mask = additive(prefix_mask(valid, self.causal), x.dtype)
        return self.target(x, self.rope.expand(len(x), -1, -1, -1), mask)

    def loss(self, ids: Tensor, codes: Tensor, uncond: Tensor, read: Tensor) -> Tensor:
        """Mean nats a token, [] float32, of `codes` [B, N] after those that were `read` [B, N]."""
        logits = self.target.head(self.hidden(ids, read, uncond)[:, self.words.prefix - 1 :])
        return F.cross_entropy(logits.flatten(0, 1).float(), codes.flatten())


class Captions:
    """Tokens and word ids of all variants, split by concept and by pairs of colour and thing."""

    def __init__(self, data_dir: Path, words: WordConditioner) -> None:
        data = np.load(data_dir / "codes.npz")
        self.codes = torch.from_numpy(data["codes"].astype(np.int64))  # [n, N]
        self.captions, self.concept = data["captions"], data["concept"]  # [n] str each
        rows = [words.ids(str(caption)) for caption in self.captions]
        self.ids = torch.tensor([[0] * (words.prefix - len(r)) + r for r in rows])  # [n, P]
        concept = torch.from_numpy(data["held_out"])  # [n] bool
        pair = torch.from_numpy(data["pair_held_out"]) & ~concept  # [n] bool
        self.train = (~concept & ~pair).nonzero().flatten()
        self.concepts, self.pairs = concept.nonzero().flatten(), pair.nonzero().flatten()

    def batch(
        self, index: Tensor, drop: float, slip: float, generator: torch.Generator
    ) -> tuple[Tensor, ...]:
        """Arguments of `TextToImage.loss` for some pictures.

        Args:
            drop: share of captions left out, for guidance.
            slip: share of tokens read wrong, each as another picture of the batch has it. A model that only ever reads
                flawless pictures knows them by their first row, and loses its way after one odd draw.
        """
        uncond = torch.rand(len(index), generator=generator) < drop
        codes = self.codes[index]
        wrong = torch.rand(codes.shape, generator=generator) < slip
        return self.ids[index], codes, uncond, torch.where(wrong, codes.roll(1, 0), codes)


class Trainer:
    """The model, its data and its run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.config = arguments, config_of(arguments)
        torch.manual_seed(arguments.seed)
        words = json.loads((arguments.data_dir / "words.json").read_text())
        self.model = TextToImage(self.config, words)
        self.data = Captions(arguments.data_dir, self.model.words)
        masters = Masters(self.model, decay=0.05, clip=1.0, average=0.998)
        self.loss = self.model.loss
        if arguments.compile:
            self.loss = torch.compile(self.model.loss, dynamic=False)
        folder = arguments.data_dir / "runs" / "target"
        self.run = Run(folder, masters, arguments.minutes, arguments.lr, 100, arguments.seed)

    def gradients(self) -> float:
        """One step's loss, its gradients summed over the micro-batches."""
        total = 0.0
        generator, count = self.run.generator, len(self.data.train)
        for _ in range(self.arguments.accumulate):
            picked = torch.randint(count, (self.arguments.batch,), generator=generator)
            batch = self.data.batch(self.data.train[picked], 0.1, self.arguments.slip, generator)
            loss = self.loss(*batch) / self.arguments.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    @torch.no_grad()
    def held_out_loss(self, index: Tensor, count: int = 64) -> float:
        """Nats a token of the averaged weights on some of these pictures."""
        index = index[:: max(1, len(index) // count)][:count]
        generator = torch.Generator().manual_seed(0)
        with self.run.masters.averaged():
            parts = [
                self.model.loss(*self.data.batch(i, 0.0, 0.0, generator)).item()
                for i in index.split(8)
            ]
        return sum(parts) / len(parts)

    def milestone(self) -> str:
        """Measure and save the averaged weights."""
        data_dir: Path = self.arguments.data_dir
        weights = save(self.run.masters.named_average())
        write_atomic(data_dir / "target.safetensors", weights)
        config = json.dumps(asdict(self.config), indent=2).encode()
        write_atomic(data_dir / "target.json", config)
        concepts, pairs = (self.held_out_loss(i) for i in (self.data.concepts, self.data.pairs))
        return f"held out: concepts {concepts:.3f}, colours on things {pairs:.3f} nats a token"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded model's target.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--minutes", type=float, default=70.0)
    parser.add_argument("--dim", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="images a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--slip", type=float, default=0.04, help="share of tokens read wrong")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    arguments = parse(parser)
    trainer = Trainer(arguments)
    parameters = sum(w.numel() for w in trainer.run.masters.weights)
    print(f"{parameters / 1e6:.2f} M parameters, {len(trainer.data.train)} pictures")
    if arguments.resume:
        trainer.run.resume()
    trainer.run.train(trainer.gradients, trainer.milestone, "nats")


if __name__ == "__main__":
    main()
