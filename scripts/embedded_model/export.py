"""Put the trained parts into a model folder: the one embedded in the package, or any other.

    python -m scripts.embedded_model.export --data-dir data --output data/model
    lantern-hpu train drafter --model data/model --data data/prompts.txt --output data/drafter
    python -m scripts.embedded_model.export --data-dir data --drafter data/drafter --output lantern_hpu/assets/builtin
    python -m scripts.embedded_model.export --data-dir data --only tokenizer --output lantern_hpu/assets/builtin
    python -m scripts.embedded_model.export --drafter data/drafter --only drafter --output lantern_hpu/assets/builtin

The last two replace one part of a model folder and leave the rest: a tokenizer that was trained with `--keep-codes`, a
drafter that was trained for the folder's target.
Without `--drafter` the model gets an untrained one, so that it can be loaded and one can be trained for it. Weights
are stored in float16; `model.json` holds sizes, words, default sampling and a checksum of each file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from lantern_hpu.files import write_file
from lantern_hpu.models.config import DrafterConfig, TransformerConfig
from lantern_hpu.models.files.names import CONFIG, DRAFTER, DRAFTER_WEIGHTS, TARGET
from lantern_hpu.models.transformer import Drafter
from scripts.embedded_model.train_tokenizer import LEARNT_FROM_CODES


def half(part: str, tensors: dict[str, Tensor]) -> bytes:
    """A file of these tensors in float16."""
    small = {name: t.to(torch.float16).contiguous() for name, t in tensors.items()}
    if not all(torch.isfinite(t).all() for t in small.values()):
        raise SystemExit(f"{part} holds weights beyond float16")
    return save(small)


def untrained(target: dict[str, Any]) -> dict[str, Tensor]:
    """Weights of a drafter that knows nothing yet."""
    return Drafter(TransformerConfig(**target), DrafterConfig()).state_dict()


def replace_tokenizer(data: Path, folder: Path) -> None:
    """Give the model in `folder` the tokenizer of `data`."""
    tensors = load_file(data / "tokenizer.safetensors")
    known = load_file(folder / "vq.safetensors")
    kept = [name for name in known if not name.startswith(LEARNT_FROM_CODES)]
    if not all(torch.equal(tensors[name].half(), known[name].half()) for name in kept):
        raise SystemExit(f"{data} has other codes than {folder}: train with --keep-codes")
    replace_part(folder, "vq", tensors, json.loads((data / "tokenizer.json").read_text()))


def replace_drafter(trained: Path, folder: Path) -> None:
    """Give the model in `folder` the drafter that `lantern-hpu train` left in `trained`."""
    about = json.loads((trained / DRAFTER).read_text())
    if about["target"] != json.loads((folder / CONFIG).read_text())["files"][TARGET]:
        raise SystemExit(f"{trained} was trained for another target than that of {folder}")
    replace_part(folder, "drafter", load_file(trained / DRAFTER_WEIGHTS), about["options"])


def replace_part(
    folder: Path, part: str, tensors: dict[str, Tensor], sizes: dict[str, Any]
) -> None:
    """Write one part of a model folder, and what `model.json` says of it."""
    content, config = half(part, tensors), json.loads((folder / CONFIG).read_text())
    config[part] = sizes
    config["files"][f"{part}.safetensors"] = hashlib.sha256(content).hexdigest()
    write_file(folder / f"{part}.safetensors", content, force=True)
    write_file(folder / CONFIG, json.dumps(config, indent=1).encode(), force=True)
    print(f"{part}: {len(content) / 1e6:.1f} MB")


def fastest(text: str) -> tuple[str, list[str | None]]:
    """DEVICE=METHOD+TREE as `model.json` has it."""
    device, _, what = text.partition("=")
    method, _, tree = what.partition("+")
    return device, [method, tree or None]


def main() -> None:
    parser = argparse.ArgumentParser(description="Put the trained parts into a model folder.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--output", type=Path, default=Path("lantern_hpu/assets/builtin"))
    parser.add_argument("--drafter", type=Path, help="a folder of lantern_hpu.train")
    parser.add_argument(
        "--only", choices=("tokenizer", "drafter"), help="leave the rest of the model in --output"
    )
    parser.add_argument("--name", default="builtin")
    parser.add_argument("--cfg-scale", type=float, default=1.5)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--fastest",
        default="cpu=scd+scd:4",
        help="DEVICE=METHOD or DEVICE=METHOD+TREE, as `bench` measured; DEVICE:1 is of one image at a time",
    )
    arguments = parser.parse_args()
    data: Path = arguments.data_dir
    if arguments.only == "tokenizer":
        return replace_tokenizer(data, arguments.output)
    if arguments.only == "drafter":
        if arguments.drafter is None:
            parser.error("--only drafter needs --drafter FOLDER")
        return replace_drafter(arguments.drafter, arguments.output)
    arguments.output.mkdir(parents=True, exist_ok=True)
    target: dict[str, Any] = json.loads((data / "target.json").read_text())
    sources = {
        "target": load_file(data / "target.safetensors"),
        "vq": load_file(data / "tokenizer.safetensors"),
        "drafter": untrained(target)
        if arguments.drafter is None
        else load_file(arguments.drafter / DRAFTER_WEIGHTS),
    }
    files = {}
    for part, tensors in sources.items():
        content = half(part, tensors)
        write_file(arguments.output / f"{part}.safetensors", content, force=True)
        files[f"{part}.safetensors"] = hashlib.sha256(content).hexdigest()
        print(f"{part}: {len(content) / 1e6:.1f} MB")
    config = {
        "name": arguments.name,
        "files": files,
        "target": target,
        "condition": {
            "kind": "words",
            "dim": sources["target"]["words.table.weight"].shape[1],
            "words": json.loads((data / "words.json").read_text()),
        },
        "drafter": DrafterConfig().as_json()
        if arguments.drafter is None
        else json.loads((arguments.drafter / DRAFTER).read_text())["options"],
        "vq": json.loads((data / "tokenizer.json").read_text()),
        "sampling": {
            "cfg_scale": arguments.cfg_scale,
            "temperature": arguments.temperature,
            "top_k": arguments.top_k,
            "top_p": arguments.top_p,
        },
        "fastest": dict(map(fastest, arguments.fastest.split(","))),
    }
    write_file(arguments.output / CONFIG, json.dumps(config, indent=1).encode(), force=True)


if __name__ == "__main__":
    main()
