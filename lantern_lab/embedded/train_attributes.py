"""Train the network that tells what a painted picture shows: `lantern_lab/evaluate/attributes.py`.

    python -m lantern_lab.embedded.train_attributes --data-dir data

paints pictures, each in a process of its own while the network already learns from those there are, and goes over
them again; half of them are spoilt, by one of four means that the network has to name, as drawn pictures are. Writes
`lantern_hpu/assets/attributes.safetensors` with its own error on fresh pictures in the header. `--resume` goes on
after an interruption, to the same weights.
"""

from __future__ import annotations

import argparse
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save
from tqdm import tqdm

from lantern_hpu.files import write_file
from lantern_lab.embedded.pictures import FRESH, Stream, noise
from lantern_lab.embedded.training import Run, native_bfloat16, parse
from lantern_lab.evaluate.attributes import (
    ATTRIBUTES,
    SIDE,
    SPOILT,
    WEIGHTS,
    AttributeNet,
    Classifier,
    Pixels,
    scene_attributes,
    to_network,
)
from lantern_lab.scenes import paint_picture

NONE = -100  # what cross_entropy leaves out
FIRST = 5 * 10**8  # pictures of no other training
Labelled = tuple[
    Pixels, NDArray[np.int64]
]  # [B, SIDE, SIDE, 3]; [B, attributes], NONE where there is none


def labelled(first: int, count: int) -> Labelled:
    """Pictures `first` to `first + count - 1`, and what is in them."""
    pictures = [paint_picture(first + i, noise(SIDE)) for i in range(count)]
    known = [scene_attributes(p.scene) for p in pictures]
    labels = [
        [values.index(one[name]) if name in one else NONE for name, values in ATTRIBUTES.items()]
        for one in known
    ]
    return np.stack([p.pixels for p in pictures]), np.asarray(labels)


# ------------------------------------------------------------------------------------ spoilt pictures


def spoil(pixels: Pixels, how: str, rng: Generator) -> Pixels:
    """One picture [SIDE, SIDE, 3], a little worse."""
    if how == "blurred":
        inner = int(rng.integers(24, 52))
        image = Image.fromarray(pixels).resize((inner, inner), Image.Resampling.BOX)
        return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    if how == "noisy":
        noise = rng.normal(0, rng.uniform(4, 20), pixels.shape)
        return np.clip(pixels + noise, 0, 255).astype(np.uint8)
    if how == "compressed":
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=int(rng.integers(12, 60)))
        return np.asarray(Image.open(file))
    if how == "misplaced":
        return misplaced(pixels, rng)
    return pixels


def misplaced(pixels: Pixels, rng: Generator) -> Pixels:
    """Some 4 x 4 patches are those of another place nearby, as tokens are that should not have been accepted."""
    side = SIDE // 4
    share, reach = rng.uniform(0.05, 0.3), 3
    rows, columns = np.indices((side, side))
    move = rng.random((side, side)) < share
    dy, dx = rng.integers(-reach, reach + 1, (2, side, side))
    rows = np.clip(rows + move * dy, 0, side - 1)
    columns = np.clip(columns + move * dx, 0, side - 1)
    patches = pixels.reshape(side, 4, side, 4, 3).swapaxes(1, 2)[rows, columns]
    return np.ascontiguousarray(patches.swapaxes(1, 2).reshape(pixels.shape))


def spoilt(pixels: Pixels, rng: Generator) -> Labelled:
    """Pictures [B, ...], half of them spoilt, and how [B]."""
    how = rng.integers(len(SPOILT), size=len(pixels)) * (rng.random(len(pixels)) < 0.625)
    made = [spoil(one, SPOILT[kind], rng) for one, kind in zip(pixels, how, strict=True)]
    return np.stack(made), how


# ------------------------------------------------------------------------------------ training


class Training:
    """The network, its optimiser and the pictures: all that a step needs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.net = args, AttributeNet()
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimiser = torch.optim.AdamW(self.net.parameters(), lr=0.0, weight_decay=0.02)
        self.bfloat16 = native_bfloat16()
        self.kept: list[Labelled] = []
        self.fresh = args.pictures // args.batch  # batches that are painted, then seen again
        self.stream = Stream(labelled, args.batch, FIRST)
        parts: dict[str, Any] = {"net": self.net, "optimiser": self.optimiser}
        steps = args.epochs * args.pictures // args.batch
        self.run = Run(args.data_dir / "runs" / "attributes", parts, steps=steps)
        if args.resume:
            self.run.resume()
            for _ in tqdm(range(min(self.run.step, self.fresh)), desc="painting again"):
                self.kept.append(self.stream.batch())

    def pictures(self, rng: Generator) -> Labelled:
        """The next ones, turned around half the time."""
        if len(self.kept) < self.fresh:
            self.kept.append(self.stream.batch())
            pixels, labels = self.kept[-1]
        else:
            chosen = rng.integers(self.fresh * self.args.batch, size=self.args.batch)
            pairs = [divmod(i, self.args.batch) for i in chosen.tolist()]
            pixels = np.stack([self.kept[a][0][b] for a, b in pairs])
            labels = np.stack([self.kept[a][1][b] for a, b in pairs])
        turned = rng.random(len(pixels)) < 0.5
        return np.where(turned[:, None, None, None], pixels[:, :, ::-1], pixels), labels

    def train_step(self) -> dict[str, float]:
        """One step; its random numbers depend on its number alone, so that a resumed run goes on alike."""
        rng = np.random.default_rng((self.args.seed, self.run.step))
        pixels, labels = self.pictures(rng)
        pixels, how = spoilt(pixels, rng)
        warm = min(1.0, (self.run.step + 1) / 200)
        rate = 0.5 * (1 + math.cos(math.pi * self.run.progress))
        self.optimiser.param_groups[0]["lr"] = self.args.lr * warm * rate
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            features = self.net(to_network(pixels))
        targets = torch.from_numpy(np.concatenate([labels, how[:, None]], 1)).T  # [heads, B]
        pairs = zip(self.net.logits(features.float()).values(), targets, strict=True)
        losses = [F.cross_entropy(*pair, ignore_index=NONE) for pair in pairs]
        loss = torch.stack(losses).nan_to_num().sum()
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        self.optimiser.step()
        return {"loss": loss.item()}


# ------------------------------------------------------------------------------------ its own error


def accuracy(classifier: Classifier, pixels: Pixels, labels: NDArray[np.int64]) -> dict[str, float]:
    """The share of each attribute that is classified correctly, where there is one, and of all."""
    seen, found, right = classifier.classify(pixels).values, {}, list[bool]()
    for column, (name, values) in enumerate(ATTRIBUTES.items()):
        pairs = zip(seen, labels[:, column].tolist(), strict=True)
        hits = [one[name] == values[label] for one, label in pairs if label != NONE]
        found[name] = float(np.mean(hits))
        right += hits
    return found | {"all": float(np.mean(right))}


def measured(classifier: Classifier, count: int) -> dict[str, dict[str, float]]:
    """Accuracy on fresh pictures, clean and spoilt in each way."""
    batches = [labelled(FRESH + n, min(64, count - n)) for n in range(0, count, 64)]
    pixels, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    found = {}
    for how in SPOILT:
        rng = np.random.default_rng(1)
        made = np.stack([spoil(one, how, rng) for one in pixels])
        found[how] = {k: round(v, 4) for k, v in accuracy(classifier, made, labels).items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the network that names attributes.")
    add = parser.add_argument
    add("--output", type=Path, default=WEIGHTS)
    add("--pictures", type=int, default=32_000, help="painted")
    add("--epochs", type=int, default=6, help="times that each is seen")
    add("--batch", type=int, default=64)
    add("--lr", type=float, default=2e-3)
    add("--stop", type=int, help="the step to stop at; --resume goes on")
    add("--measured", type=int, default=2000, help="fresh pictures at the end")
    args = parse(parser)
    training = Training(args)
    training.run.train(training.train_step, lambda means: "saved", "loss", args.stop)
    # As they are stored, so that what is measured is what is used
    state = training.net.state_dict()
    tensors = {n: t.half() if t.is_floating_point() else t for n, t in state.items()}
    training.net.load_state_dict(tensors)
    about: dict[str, Any] = {"pictures": args.pictures, "epochs": args.epochs}
    about["measured_on"] = args.measured
    about["accuracy"] = measured(Classifier(training.net, {}), args.measured)
    contiguous = {name: t.contiguous() for name, t in tensors.items()}
    write_file(args.output, save(contiguous, metadata={"about": json.dumps(about)}), force=True)
    print(json.dumps(about["accuracy"], indent=1))
    print(f"wrote {args.output}, {args.output.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
