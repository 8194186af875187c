"""Turn the icons' variants into codes and captions, which is what the transformer trains on.

    python scripts/encode_icons.py --data-dir data

needs `icons.npz` (scripts/icons.py) and the tokenizer (scripts/train_tokenizer.py), and writes
`codes.npz`:

    codes     [n, 256] int16   codes of the picture, row by row
    captions  [n] str
    icon      [n] int32        which icon of icons.npz
    held_out  [n] bool         the concept is not for training
    style     [n] str          the icon's pack

and `words.json`, the sorted words of all captions: word i has the id i + 2, after 0 for padding and
1 for unknown.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from icons import Variant, held_out, load_icons, make_variants, words_of, write_atomic, write_npz
from numpy.typing import NDArray
from safetensors.torch import load_file
from tqdm import tqdm

from lantern_hpu.models.vq import VQConfig, VQModel


def load_tokenizer(data_dir: Path) -> VQModel:
    """The tokenizer that scripts/train_tokenizer.py wrote, ready to encode."""
    path = data_dir / "tokenizer.safetensors"
    if not path.exists():
        raise SystemExit(f"{path} is missing: run scripts/train_tokenizer.py first")
    model = VQModel(VQConfig(**json.loads((data_dir / "tokenizer.json").read_text())))
    model.load_state_dict(load_file(path))
    return model.eval().requires_grad_(False)


def encode(model: VQModel, variants: list[Variant], batch: int = 64) -> NDArray[np.int16]:
    """The codes of every variant: [n, N] int16."""
    found: list[NDArray[np.int16]] = []
    for start in tqdm(range(0, len(variants), batch), desc="encode", unit="batch"):
        images = np.stack([v.image for v in variants[start : start + batch]])  # [B, 64, 64, 3]
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
        pixels = pixels.contiguous(memory_format=torch.channels_last)  # [B, 3, 64, 64]
        codes = model.encode(pixels).flatten(1)  # [B, N] int64
        found.append(codes.to(torch.int16).numpy())
    return np.concatenate(found)


def vocabulary(captions: Iterable[str]) -> list[str]:
    """Every word of the captions, sorted."""
    return sorted({word for caption in captions for word in words_of(caption)})


def main() -> None:
    parser = argparse.ArgumentParser(description="Encode the icons with the trained tokenizer.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--variants", type=int, default=8, help="pictures of each icon")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    data_dir: Path = arguments.data_dir
    model = load_tokenizer(data_dir)
    if model.config.codebook_size > np.iinfo(np.int16).max + 1:
        raise SystemExit("codes.npz holds 16-bit codes; this codebook is too large for them")
    icons = load_icons(data_dir)
    variants = make_variants(icons, arguments.variants, arguments.seed)
    captions = [v.caption for v in variants]
    icon = np.array([v.icon for v in variants], dtype=np.int32)  # [n]
    out = np.array([held_out(name) for name in icons.names])[icon]  # [n] bool
    codes = encode(model, variants)  # [n, N]
    words = vocabulary(captions)
    write_atomic(data_dir / "words.json", json.dumps(words, indent=0).encode())
    write_npz(
        data_dir / "codes.npz",
        codes=codes,
        captions=np.array(captions),
        icon=icon,
        held_out=out,
        style=np.array(icons.styles)[icon],
    )
    print(
        f"{len(codes)} pictures, {int(out.sum())} of them held out, "
        f"{len(np.unique(codes))} codes used, {len(words)} words"
    )


if __name__ == "__main__":
    main()
