"""Train the embedded model's target on painted scenes: captions to image tokens, LlamaGen of small size.

    python -m lantern_lab.embedded.train_target --data-dir data --minutes 600

needs the tokenizer (train_tokenizer.py) and writes `words.json`, `target.safetensors` and `target.json`.
Every picture is painted for its one use, so the loss is that of unseen pictures and there is nothing to learn by
heart. `--start` begins at the weights of a model folder, for as much of them as means the same here; `--resume` goes
on after an interruption, or with more `--minutes` after the end.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor, nn

from lantern_hpu.files import write_file
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.text.prefix import CaptionProjection, WordConditioner
from lantern_hpu.models.transformer import Target, rope_table
from lantern_hpu.models.vq import VQModel
from lantern_hpu.ops.buffers import additive_mask, causal_mask, prefix_mask
from lantern_lab.embedded.pictures import FRESH, Stream, chosen, encoded, load_tokenizer
from lantern_lab.embedded.training import Learner, Run, parse, write_json
from lantern_lab.scenes import caption_of, sample_scene

PREFIX = 16
CAPTION_DIM = 256


class Lesson(NamedTuple):
    """Captioned pictures as a model reads them."""

    ids: Tensor  # [B, P] word ids, padded on the left
    codes: Tensor  # [B, N]


def vocabulary(captions: int = 50_000) -> list[str]:
    """Every word that captions have, sorted."""
    rng, words = np.random.default_rng(0), set()
    for _ in range(captions):
        words.update(WordConditioner.split(caption_of(sample_scene(rng), rng)))
    return sorted(words)


@cache
def tokenizer(data_dir: Path) -> VQModel:
    torch.set_num_threads(1)
    return load_tokenizer(data_dir)


def lesson_of(vq: VQModel, words: Sequence[str], numbers: Iterable[int]) -> Lesson:
    """The pictures with these numbers, encoded."""
    codes, captions = encoded(vq, numbers)
    index = {word: i + 2 for i, word in enumerate(words)}
    rows = [[index[word] for word in WordConditioner.split(caption)] for caption in captions]
    return Lesson(torch.tensor([[0] * (PREFIX - len(r)) + r for r in rows]), codes)


def lessons(data_dir: Path, words: tuple[str, ...], first: int, count: int) -> Lesson:
    """The pictures at places `first` to `first + count - 1` of the training, encoded."""
    return lesson_of(tokenizer(data_dir), words, map(chosen, range(first, first + count)))


@torch.no_grad()
def fresh_nats(model: TextToImage, vq: VQModel, pictures: int) -> float:
    """Cross-entropy on pictures of no training, nats a token, with their captions."""
    total = 0.0
    for first in range(0, pictures, 8):
        numbers = range(FRESH + first, FRESH + min(first + 8, pictures))
        lesson = lesson_of(vq, list(model.words.index), numbers)
        kept = torch.zeros(len(numbers), dtype=torch.bool)
        total += len(numbers) * model(lesson, kept).item()
    return total / pictures


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

    rope: Tensor
    causal: Tensor

    def __init__(self, config: TransformerConfig, words: list[str]) -> None:
        super().__init__()
        condition = ConditionConfig("words", CAPTION_DIM, words=tuple(words))
        self.words = WordConditioner(condition, config.prefix)
        self.condition = CaptionProjection(CAPTION_DIM, config.dim, config.prefix)
        self.target = Target(config)
        for name, weight in self.target.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))  # of a block's branch
                scale = (2 * config.layers) ** -0.5 if last else 1
                nn.init.normal_(weight, std=0.02 * scale)
        length = config.prefix + config.tokens - 1
        self.register_buffer("rope", rope_table(config, length), persistent=False)
        self.register_buffer("causal", causal_mask(length), persistent=False)

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
        mask = additive_mask(prefix_mask(valid, self.causal), x.dtype)
        return self.target(x, self.rope.expand(len(x), -1, -1, -1), mask)

    def forward(self, lesson: Lesson, uncond: Tensor) -> Tensor:
        """Mean nats a token, [] float32."""
        hidden = self.hidden(lesson.ids, lesson.codes, uncond)[:, self.words.prefix - 1 :]
        logits = self.target.head(hidden)  # [B, N, V]
        return F.cross_entropy(logits.flatten(0, 1).float(), lesson.codes.flatten())


@torch.no_grad()
def start_from(model: TextToImage, folder: Path, vq: VQModel) -> None:
    """Take the weights of the model in `folder`: known words by name, those of the codes if it has the same."""
    about = json.loads((folder / "model.json").read_text())
    found = load_file(folder / "target.safetensors")
    table, mine = found.pop("words.table.weight"), model.words.table.weight
    for index, word in enumerate(about["condition"]["words"], start=2):
        if word in model.words.index:
            mine[model.words.index[word]] = table[index].to(mine.dtype)
    codes = load_file(folder / "vq.safetensors")["quantize.embedding.weight"]  # [V, code_dim]
    if not torch.equal(codes.half(), vq.quantize.embedding.weight.half()):
        found = {n: w for n, w in found.items() if not n.endswith(("embed.weight", "head.weight"))}
    try:
        model.load_state_dict(found, strict=False)
    except RuntimeError as error:
        raise SystemExit(f"{folder} cannot be the start: {error}") from None


class Trainer:
    """The model, its pictures and its run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.config = args, config_of(args)
        words = vocabulary()
        write_json(args.data_dir / "words.json", words)
        self.model = TextToImage(self.config, words)
        if args.start:
            start_from(self.model, args.start, tokenizer(args.data_dir))
        how = {"decay": 0.05, "clip": 1.0, "average": 0.998, "compiled": args.compile}
        self.learner = Learner(self.model, args.threads, **how)
        folder = args.data_dir / "runs" / "target"
        self.run = Run(folder, {"learner": self.learner}, args.minutes)
        if args.resume:
            self.run.resume()
        size = args.batch * args.accumulate
        make = partial(lessons, args.data_dir, tuple(words))
        self.stream = Stream(make, size, args.first + self.run.step * size)

    @property
    def learning_rate(self) -> float:
        """Linear warm-up, then level, then a line down to 2 % in the last third.

        Because it is level, a run can be resumed with more minutes.
        """
        warm = min(1.0, (self.run.step + 1) / 100)
        return float(self.args.lr * warm * min(1.0, 0.02 + 3 * (1 - self.run.progress)))

    def train_step(self) -> dict[str, float]:
        """One step, its gradients summed over the micro-batches."""
        size, lesson = self.args.batch, self.stream.batch()
        uncond = torch.rand(len(lesson.ids), generator=self.run.generator) < 0.1
        parts = zip(
            lesson.ids.split(size), lesson.codes.split(size), uncond.split(size), strict=True
        )
        batches = [(Lesson(ids, codes), dropped) for ids, codes, dropped in parts]
        nats = self.learner.gradients(lambda model, batch: model(*batch), batches)
        self.learner.step(self.learning_rate, self.run.step)
        return {"nats": nats}

    def milestone(self, means: dict[str, float]) -> str:
        """Measure and save the averaged weights."""
        data_dir: Path = self.args.data_dir
        with self.learner.averaged():  # of `model`
            nats = fresh_nats(self.model, tokenizer(data_dir), self.args.measured)
        weights = save(self.learner.named_average())
        write_file(data_dir / "target.safetensors", weights, force=True)
        write_json(data_dir / "target.json", asdict(self.config))
        return f"averaged on fresh pictures: {nats:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded model's target.")
    add = parser.add_argument
    add("--start", type=Path, help="a model folder whose weights to start from")
    add("--first", type=int, default=0, help="first place, so that --start trains on none twice")
    add("--minutes", type=float, default=600.0, help="budget of training time")
    add("--dim", type=int, default=320)
    add("--layers", type=int, default=8)
    add("--batch", type=int, default=6, help="pictures a micro-batch")
    add("--accumulate", type=int, default=4, help="micro-batches a step")
    add("--lr", type=float, default=1.5e-3)
    add("--measured", type=int, default=64, help="fresh pictures at a milestone")
    add("--compile", action="store_true", help="faster after the first minute")
    trainer = Trainer(parse(parser))
    parameters = sum(w.numel() for w in trainer.learner.weights)
    print(f"{parameters / 1e6:.2f} M parameters, {trainer.learner.dtype}")
    trainer.run.train(trainer.train_step, trainer.milestone, "nats")


if __name__ == "__main__":
    main()
