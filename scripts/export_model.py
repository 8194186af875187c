"""Put the trained parts into a model folder: the one embedded in the package, or any other.

    python scripts/export_model.py --data-dir data --output lantern_hpu/assets/builtin

Weights are stored in float16; `model.json` holds sizes, words, default sampling and a checksum of each file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from icons import write_atomic
from safetensors.torch import load_file, save

PARTS = {"target": "target", "drafter": "drafter", "vq": "tokenizer"}


def half(file: Path) -> bytes:
    """A file's tensors in float16.

    Raises:
        SystemExit: a weight does not fit float16.
    """
    tensors = {name: t.to(torch.float16).contiguous() for name, t in load_file(file).items()}
    if not all(torch.isfinite(t).all() for t in tensors.values()):
        raise SystemExit(f"{file} holds weights beyond float16")
    return save(tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description="Put the trained parts into a model folder.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--output", type=Path, default=Path("lantern_hpu/assets/builtin"))
    parser.add_argument("--name", default="builtin")
    parser.add_argument("--cfg-scale", type=float, default=2.5)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--fastest-cpu",
        default="ar",
        help="METHOD or METHOD,TREE, as measured by lantern_hpu.bench",
    )
    arguments = parser.parse_args()
    data: Path = arguments.data_dir
    arguments.output.mkdir(parents=True, exist_ok=True)
    files = {}
    for part, source in PARTS.items():
        content = half(data / f"{source}.safetensors")
        write_atomic(arguments.output / f"{part}.safetensors", content)
        files[f"{part}.safetensors"] = hashlib.sha256(content).hexdigest()
        print(f"{part}: {len(content) / 1e6:.1f} MB")
    target: dict[str, Any] = json.loads((data / "target.json").read_text())
    config = {
        "name": arguments.name,
        "files": files,
        "target": target,
        "caption_dim": load_file(data / "target.safetensors")["words.table.weight"].shape[1],
        "drafter": {"input_norm": False, "sees_pads": False},
        "vq": json.loads((data / "tokenizer.json").read_text()),
        "sampling": {
            "cfg_scale": arguments.cfg_scale,
            "temperature": arguments.temperature,
            "top_k": arguments.top_k,
            "top_p": arguments.top_p,
        },
        "fastest": {"cpu": [*arguments.fastest_cpu.split(","), None][:2]},
        "words": json.loads((data / "words.json").read_text()),
    }
    write_atomic(arguments.output / "model.json", json.dumps(config, indent=1).encode())


if __name__ == "__main__":
    main()
