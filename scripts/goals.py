"""The embedded model's figures, measured: tokenizer, likeness to training pictures, Frechet distance, speed.

    python scripts/goals.py --data-dir data --model lantern_hpu/assets/builtin --output out/goals

prints them with the goals they are held to, and writes `goals.json` and the contact sheets `train.png`, `pairs.png`
(colours never seen on their thing) and `examples.png`.

The Frechet distance is that of two Gaussians fitted to features of samples and of held-out pictures. There is no
network here that knows emoji, so the features are the tokenizer's code vectors averaged over each quarter of the
picture (4 cells of 8 numbers): it sees colours, rough shapes and places, and not what they mean. For scale, the
distance of as many training pictures to the same held-out ones is given too.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from encode_icons import load_tokenizer
from icons import write_atomic
from PIL import Image, ImageDraw
from torch import Tensor
from tqdm import tqdm
from train_target import Captions
from train_tokenizer import load_pictures, measure

from lantern_hpu import LanternPipeline
from lantern_hpu.config import Request
from lantern_hpu.models.vq import VQModel
from lantern_hpu.results import tokens_per_step

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
    "a purple car on a pink background",
]
CELL, TEXT = 128, 24  # pixels of a picture on a sheet and of the words under it
BATCH = 16  # images drawn together


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


def features(vq: VQModel, codes: Tensor) -> np.ndarray:
    """[n, 256] codes -> [n, 32]: code vectors averaged over 2 x 2 cells."""
    table = vq.quantize.look_up(torch.arange(vq.config.codebook_size))
    grid = table[codes].view(-1, 2, 8, 2, 8, table.shape[1])  # [n, row, r, column, c, dim]
    return grid.mean((2, 4)).flatten(1).double().numpy()


def frechet(one: np.ndarray, other: np.ndarray) -> float:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^1/2) of two sets of features [n, d]."""
    gap = one.mean(0) - other.mean(0)
    first, second = np.cov(one.T), np.cov(other.T)
    # The trace of the root of a product: its eigenvalues are real and not negative.
    roots = np.sqrt(np.maximum(np.linalg.eigvals(first @ second).real, 0)).sum()
    return float(gap @ gap + np.trace(first) + np.trace(second) - 2 * roots)


def draw(pipeline: LanternPipeline, captions: list[str], method: str) -> tuple[Tensor, float]:
    """Codes [n, 256] of one image a caption, and tokens a step."""
    _, tree, bounds = pipeline.choose(method)
    records, tokens = [], []
    for start in tqdm(range(0, len(captions), BATCH), desc=method, unit="batch"):
        requests = [
            Request(caption, start + i, pipeline.model.sampling, bounds)
            for i, caption in enumerate(captions[start : start + BATCH])
        ]
        result = pipeline.draw(requests, tree, method, BATCH)
        records += result.records
        tokens.append(torch.from_numpy(result.tokens))
    return torch.cat(tokens), tokens_per_step(records)


def warm_seconds(model: str, file: Path) -> float:
    """Of the default command, the second time it is run: the whole process."""
    command = [sys.executable, "-m", "lantern_hpu.generate", "--model", model, "--force"]
    command += ["--prompt", "a red apple", "--output", str(file)]
    for _ in range(2):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - began
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the embedded model.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--output", type=Path, default=Path("out/goals"))
    parser.add_argument("--count", type=int, default=200, help="training captions to draw")
    parser.add_argument(
        "--likeness", type=int, default=200, help="images for each Frechet distance"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}

    def note(name: str, value: float, goal: str = "") -> None:
        found[name] = round(value, 4)
        print(f"{name}: {value:.3f}" + (f" (goal: {goal})" if goal else ""), flush=True)

    note(
        "warm_command_s", warm_seconds(arguments.model, arguments.output / "warm.png"), "at most 3"
    )
    tokenizer = load_tokenizer(arguments.data_dir)
    quality = measure(tokenizer, load_pictures(arguments.data_dir, 0).held_out[::4])
    note("held_out_psnr_db", quality.psnr_of_mean, "26 or more")
    note("codes_in_use", quality.used / tokenizer.config.codebook_size, "0.7 or more")
    pipeline = LanternPipeline.from_pretrained(arguments.model)
    vq = pipeline.model.vq
    data = Captions(arguments.data_dir, pipeline.model.condition.text)
    train = one_each(data, data.train, arguments.count)
    captions = [str(caption) for caption in data.captions[train.numpy()]]
    drawn, _ = draw(pipeline, captions, "ar")
    icon, caption = recall(vq, data, train, drawn)
    note("own_picture_among_5_nearest", caption, "0.6 or more, by caption")
    note("own_icon_among_5_nearest", icon)
    sheet(vq, drawn, captions, arguments.output / "train.png", columns=16)
    pairs = one_each(data, data.pairs, arguments.count // 2)
    unseen = [str(caption) for caption in data.captions[pairs.numpy()]]
    sheet(vq, draw(pipeline, unseen, "ar")[0], unseen, arguments.output / "pairs.png", columns=10)
    examples = [prompt for prompt in EXAMPLES for _ in range(4)]
    codes = draw(pipeline, examples, "ar")[0]
    sheet(vq, codes, examples, arguments.output / "examples.png", columns=8)
    held = features(vq, data.codes[data.pairs])
    count = arguments.likeness
    same = [str(data.captions[i]) for i in data.pairs[:: max(1, len(data.pairs) // count)]][:count]
    known = data.codes[data.train[:: len(data.train) // count][:count]]
    note("frechet_training_pictures", frechet(features(vq, known), held))
    for method in ("ar", "eagle", "lantern++"):
        codes, rate = draw(pipeline, same, method)
        note(f"frechet_{method}", frechet(features(vq, codes), held))
        goal = {"eagle": "2.6 or more", "lantern++": "3.0 or more"}.get(method, "")
        note(f"tokens_per_step_{method}", rate, goal)
    write_atomic(arguments.output / "goals.json", json.dumps(found, indent=1).encode())


if __name__ == "__main__":
    main()
