"""Turn the icons' variants into codes and captions, which is what the transformer trains on.

    python scripts/encode_icons.py --data-dir data

needs `icons.npz` (scripts/icons.py) and the tokenizer (scripts/train_tokenizer.py), and writes
`codes.npz`:

    codes          [n, 256] int16   codes of the picture, row by row
    captions       [n] str
    concept        [n] str          the icon's name
    held_out       [n] bool         the concept is not for training
    pair_held_out  [n] bool         the colour on this thing is not for training

Codes that mean the same are merged: a plain white corner alone spreads over dozens of near-equal codes,
and a model would spend itself on which of them comes next. A code whose cosine with a commoner one is
at least `--merge` becomes that one; the tokenizer itself stays as it is.

Also writes `words.json`, the sorted words of all captions: word i has the id i + 2, after 0 for padding and
1 for unknown; and `prompts.txt`, the different captions for training, which the drafter's training takes.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from icons import Icons, load_icons, write_atomic, write_npz
from numpy.typing import NDArray
from safetensors.torch import load_file
from tqdm import tqdm
from variants import Variant, held_out, make_variants, things, words_of

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
    """The codes of every variant: [n, N] int16. Equal pictures are encoded once."""
    places: dict[bytes, int] = {}
    index = [places.setdefault(v.image.tobytes(), len(places)) for v in variants]
    pictures = [np.frombuffer(raw, np.uint8).reshape(variants[0].image.shape) for raw in places]
    found: list[NDArray[np.int16]] = []
    for start in tqdm(range(0, len(pictures), batch), desc="encode", unit="batch"):
        images = np.stack(pictures[start : start + batch])  # [B, 64, 64, 3]
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
        pixels = pixels.contiguous(memory_format=torch.channels_last)  # [B, 3, 64, 64]
        codes = model.encode(pixels).flatten(1)  # [B, N] int64
        found.append(codes.to(torch.int16).numpy())
    return np.concatenate(found)[index]


def merge(model: VQModel, codes: NDArray[np.int16], cosine: float) -> NDArray[np.int16]:
    """Replace each code by the commonest one that is at least this close to it."""
    book = model.quantize.look_up(torch.arange(model.config.codebook_size)).numpy()  # [V, code_dim]
    likeness = book @ book.T  # [V, V]
    count = np.bincount(codes.astype(np.int64).ravel(), minlength=len(book))
    stands_for = np.full(len(book), -1)
    for code in np.argsort(-count, kind="stable"):
        if stands_for[code] < 0:
            stands_for[(likeness[code] >= cosine) & (stands_for < 0)] = code
            stands_for[code] = code
    return stands_for[codes.astype(np.int64)].astype(np.int16)


def lessons(icons: Icons, styles: list[str]) -> Icons:
    """The icons the target learns."""
    known = things()
    kept = [
        i
        for i, (name, style) in enumerate(zip(icons.names, icons.styles, strict=True))
        if style in styles and name in known
    ]
    return Icons(
        icons.images[kept], [icons.names[i] for i in kept], [icons.styles[i] for i in kept]
    )


def vocabulary(captions: Iterable[str]) -> list[str]:
    """Every word of the captions, sorted."""
    return sorted({word for caption in captions for word in words_of(caption)})


def main() -> None:
    parser = argparse.ArgumentParser(description="Encode the icons with the trained tokenizer.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--variants", type=int, default=96, help="pictures of each icon")
    parser.add_argument(
        "--styles", default="fluent-emoji-flat", help="comma-separated, of those in icons.npz"
    )
    parser.add_argument("--merge", type=float, default=0.98, help="cosine; above 1 merges nothing")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    data_dir: Path = arguments.data_dir
    model = load_tokenizer(data_dir)
    if model.config.codebook_size > np.iinfo(np.int16).max + 1:
        raise SystemExit("codes.npz holds 16-bit codes; this codebook is too large for them")
    icons = lessons(load_icons(data_dir), arguments.styles.split(","))
    composed = {name for name, everywhere in things().items() if everywhere}
    variants = make_variants(icons, arguments.variants, arguments.seed, composed)
    captions = [v.caption for v in variants]
    concept = [icons.names[v.icon] for v in variants]
    out = np.array([held_out(name) for name in concept])  # [n] bool
    pair = np.array([v.pair_held_out for v in variants])  # [n] bool
    codes = merge(model, encode(model, variants), arguments.merge)  # [n, N]
    words = vocabulary(captions)
    write_atomic(data_dir / "words.json", json.dumps(words, indent=0).encode())
    write_npz(
        data_dir / "codes.npz",
        codes=codes,
        captions=np.array(captions),
        concept=np.array(concept),
        held_out=out,
        pair_held_out=pair,
    )
    learned = sorted({c for c, kept in zip(captions, ~(out | pair), strict=True) if kept})
    write_atomic(data_dir / "prompts.txt", "\n".join(learned).encode())
    print(
        f"{len(codes)} pictures of {len(icons)} icons, {int(out.sum())} held out by concept, "
        f"{int((pair & ~out).sum())} by colour and thing, {len(np.unique(codes))} codes used, "
        f"{len(words)} words"
    )


if __name__ == "__main__":
    main()
