"""How well the target draws: figures on training captions, and sheets to look at.

    python scripts/measure_target.py --data-dir data --output out/measure

prints how often a drawn training caption has its own icon, and its own picture, among the five training
pictures that are nearest in the space of the tokenizer's code vectors; and writes `train.png` (those
captions), `pairs.png` (colours never seen on their thing) and `examples.png` (the README's prompts).
"""

from __future__ import annotations

import argparse
import io
import os
from pathlib import Path

import numpy as np
import torch
from drawing import draw, load_target
from encode_icons import load_tokenizer
from icons import write_atomic
from PIL import Image, ImageDraw
from torch import Tensor
from train_target import Captions, TextToImage

from lantern_hpu.config import Sampling
from lantern_hpu.models.vq import VQModel

EXAMPLES = [
    "a red apple",
    "a blue bird on a yellow background",
    "a smiling cat face",
    "a rocket",
    "a green rocket",
    "a sun",
    "a fish",
    "a pizza",
    "an evergreen tree",
    "a small purple car on an orange background",
]
CELL, TEXT = 128, 24  # pixels of a picture on a sheet and of the words under it


def sheet(vq: VQModel, codes: Tensor, captions: list[str], path: Path, columns: int = 10) -> None:
    """Pictures with their captions, as a PNG."""
    rows = -(-len(codes) // columns)
    page = Image.new("RGB", (columns * CELL, rows * (CELL + TEXT)), "white")
    pen = ImageDraw.Draw(page)
    pixels = torch.cat([vq.decode_codes(part) for part in codes.split(16)])  # [n, 3, 64, 64]
    images = ((pixels + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x, y = index % columns * CELL, index // columns * (CELL + TEXT)
        page.paste(Image.fromarray(image).resize((CELL - 2, CELL - 2)), (x, y))
        pen.text(
            (x, y + CELL - 2), caption[:22] + "\n" + caption[22:44], fill="black", font_size=10
        )
    content = io.BytesIO()
    page.save(content, "PNG")
    write_atomic(path, content.getvalue())


def nearest(vq: VQModel, drawn: Tensor, known: Tensor, count: int = 5) -> Tensor:
    """Which of the known pictures [m, N] are nearest to each drawn one [n, N]: [n, count] int64."""
    table = vq.quantize.look_up(torch.arange(vq.config.codebook_size))  # [V, code_dim], on a sphere
    wanted = table[drawn].flatten(1)  # [n, N code_dim]
    likeness = [wanted @ table[part].flatten(1).T for part in known.split(1024)]
    return torch.cat(likeness, 1).topk(count).indices


def recall(vq: VQModel, data: Captions, index: Tensor, drawn: Tensor) -> tuple[float, float]:
    """Share of drawn pictures with their own icon, and their own caption, among the nearest."""
    found = data.train[nearest(vq, drawn, data.codes[data.train])].numpy()  # [n, 5]
    own = index.numpy()[:, None]
    icon = (data.concept[found] == data.concept[own]).any(1).mean()
    caption = (data.captions[found] == data.captions[own]).any(1).mean()
    return float(icon), float(caption)


def one_each(data: Captions, index: Tensor, count: int) -> Tensor:
    """Some of these pictures, each of another concept."""
    order = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))]
    _, first = np.unique(data.concept[order.numpy()], return_index=True)
    return order[torch.from_numpy(np.sort(first))][:count]


def ids_of(model: TextToImage, captions: list[str]) -> Tensor:
    """Word ids [n, P], left-padded."""
    rows = [model.words.ids(caption) for caption in captions]
    return torch.tensor([[0] * (model.words.prefix - len(row)) + row for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure and show what the target draws.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--output", type=Path, default=Path("out/measure"))
    parser.add_argument("--count", type=int, default=200, help="training captions to draw")
    parser.add_argument("--cfg-scale", type=float, default=1.5)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sampling = Sampling(arguments.cfg_scale, arguments.temperature)
    model, vq = load_target(arguments.data_dir), load_tokenizer(arguments.data_dir)
    data = Captions(arguments.data_dir, model.words)
    sets = {
        "train": one_each(data, data.train, arguments.count),
        "pairs": one_each(data, data.pairs, arguments.count // 2),
    }
    examples = [prompt for prompt in EXAMPLES for _ in range(4)]
    codes = draw(model, ids_of(model, examples), sampling)
    sheet(vq, codes, examples, arguments.output / "examples.png", columns=8)
    for name, index in sets.items():
        drawn = draw(model, data.ids[index], sampling)
        captions = data.captions[index.numpy()].tolist()
        sheet(vq, drawn, captions, arguments.output / f"{name}.png", columns=16)
        icon, caption = recall(vq, data, index, drawn)
        print(f"{name}: {len(index)} drawn, own icon among 5 nearest {icon:.0%}", end="")
        print(f", own caption {caption:.0%}" if name == "train" else "")


if __name__ == "__main__":
    main()
