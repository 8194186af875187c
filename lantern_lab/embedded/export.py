"""Put the trained parts into a model folder: the one embedded in the package, or any other.

    python -m lantern_lab.embedded.export --data-dir data --output data/model
    lantern-hpu train drafter --model data/model --data data/prompts.txt --output data/drafter
    python -m lantern_lab.embedded.export --data-dir data --drafter data/drafter --output lantern_hpu/assets/builtin
    python -m lantern_lab.embedded.export --data-dir data --only tokenizer --output lantern_hpu/assets/builtin
    python -m lantern_lab.embedded.export --drafter data/drafter --only drafter --output lantern_hpu/assets/builtin

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
from lantern_lab.embedded.train_tokenizer import LEARNT_FROM_CODES
from lantern_lab.embedded.training import write_json


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def write_part(folder: Path, part: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write the weights of one part in float16; returns their checksum by the file's name."""
    small = {name: t.to(torch.float16).contiguous() for name, t in tensors.items()}
    if not all(torch.isfinite(t).all() for t in small.values()):
        raise SystemExit(f"{part} holds weights beyond float16")
    content, file = save(small), folder / f"{part}.safetensors"
    write_file(file, content, force=True)
    print(f"{part}: {len(content) / 1e6:.1f} MB")
    return {file.name: hashlib.sha256(content).hexdigest()}


def replace_part(
    folder: Path, part: str, tensors: dict[str, Tensor], sizes: dict[str, Any]
) -> None:
    """Write one part of a model folder, and what `model.json` says of it."""
    config = read_json(folder / CONFIG)
    config[part] = sizes
    config["files"] |= write_part(folder, part, tensors)
    write_json(folder / CONFIG, config)


def replace_tokenizer(data: Path, folder: Path) -> None:
    """Give the model in `folder` the tokenizer of `data`."""
    tensors = load_file(data / "tokenizer.safetensors")
    known = load_file(folder / "vq.safetensors")
    kept = [name for name in known if not name.startswith(LEARNT_FROM_CODES)]
    if not all(torch.equal(tensors[name].half(), known[name].half()) for name in kept):
        raise SystemExit(f"{data} has other codes than {folder}: train with --keep-codes")
    replace_part(folder, "vq", tensors, read_json(data / "tokenizer.json"))


def replace_drafter(trained: Path, folder: Path) -> None:
    """Give the model in `folder` the drafter that `lantern-hpu train` left in `trained`."""
    about = read_json(trained / DRAFTER)
    if about["target"] != read_json(folder / CONFIG)["files"][TARGET]:
        raise SystemExit(f"{trained} was trained for another target than that of {folder}")
    replace_part(folder, "drafter", load_file(trained / DRAFTER_WEIGHTS), about["options"])


def export(args: argparse.Namespace) -> None:
    """Write all parts of a model folder and its `model.json`."""
    data, folder = args.data_dir, args.output
    folder.mkdir(parents=True, exist_ok=True)
    sizes, target = read_json(data / "target.json"), load_file(data / "target.safetensors")
    options = DrafterConfig().as_json()
    drafter = Drafter(TransformerConfig(**sizes), DrafterConfig()).state_dict()  # untrained
    if args.drafter is not None:
        options = read_json(args.drafter / DRAFTER)["options"]
        drafter = load_file(args.drafter / DRAFTER_WEIGHTS)
    vq = load_file(data / "tokenizer.safetensors")
    words = {"kind": "words", "dim": target["words.table.weight"].shape[1]}
    files: dict[str, str] = {}
    for part, tensors in (("target", target), ("vq", vq), ("drafter", drafter)):
        files |= write_part(folder, part, tensors)
    sampling = {"cfg_scale": args.cfg_scale, "temperature": args.temperature}
    config = {
        "name": args.name,
        "files": files,
        "target": sizes,
        "condition": words | {"words": read_json(data / "words.json")},
        "drafter": options,
        "vq": read_json(data / "tokenizer.json"),
        "sampling": sampling | {"top_k": 0, "top_p": 1.0},
        "fastest": {"cpu": ["ar", None]},  # by device; a method and its tree, if it has one
    }
    write_json(folder / CONFIG, config)


def main() -> None:
    parser = argparse.ArgumentParser(description="Put the trained parts into a model folder.")
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"))
    add("--output", type=Path, default=Path("lantern_hpu/assets/builtin"))
    add("--drafter", type=Path, help="a folder of `lantern-hpu train`")
    add("--only", choices=("tokenizer", "drafter"), help="leave the rest of the model in --output")
    add("--name", default="builtin")
    add("--cfg-scale", type=float, default=1.5)
    add("--temperature", type=float, default=0.6)
    args = parser.parse_args()
    if args.only == "tokenizer":
        return replace_tokenizer(args.data_dir, args.output)
    if args.only is None:
        return export(args)
    if args.drafter is None:
        parser.error("--only drafter needs --drafter FOLDER")
    return replace_drafter(args.drafter, args.output)


if __name__ == "__main__":
    main()
