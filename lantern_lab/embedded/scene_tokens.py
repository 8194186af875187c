"""Painted scenes as the embedded model's tokenizer encodes them: what a drafter learns from without any drawing.

    python -m lantern_lab.embedded.scene_tokens --data-dir data --pictures 4000 --output data/scenes.npz
    lantern-hpu train drafter --tokens data/scenes.npz --samples 0 ...

The target of the same training saw none of these pictures, unless it was shown a hundred million.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from lantern_hpu.files import write_file
from lantern_lab.embedded.pictures import encoded, load_tokenizer

FIRST = 10**8  # picture; trainings of targets count from 0
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description="Paint scenes and encode them.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--pictures", type=int, default=4000)
    parser.add_argument("--first", type=int, default=FIRST, help="number of the first picture")
    parser.add_argument("--output", type=Path, default=Path("data/scenes.npz"))
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.data_dir)
    tokens, captions = [], []
    for start in tqdm(range(0, arguments.pictures, BATCH), desc="pictures", unit="batch"):
        end = min(start + BATCH, arguments.pictures)
        numbers = range(arguments.first + start, arguments.first + end)
        codes, said = encoded(tokenizer, numbers)
        tokens.append(codes.short())  # [B, N]
        captions += said
    content = io.BytesIO()
    np.savez_compressed(content, tokens=torch.cat(tokens).numpy(), captions=np.array(captions))
    write_file(arguments.output, content.getvalue(), force=True)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
