"""Turn published checkpoints into one model folder.

    python -m lantern_hpu.convert llamagen-t2i-256 models/t2i
    python -m lantern_hpu.generate --model models/t2i --prompt "a red apple"

The folder holds safetensors files with our names, sizes, default sampling, checksums and the target's fingerprint
(`lantern_hpu.models.folder`). It loads by memory map, and is checked whole each time. A text encoder is not copied:
the folder notes where it lies.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.errors import OptionError, OutputError, choices, exit_code
from lantern_hpu.generate import add_model_options, given_parts

if TYPE_CHECKING:
    from lantern_hpu.models.folder import ImageModel

DTYPES = ("auto", "float32", "bfloat16", "float16")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.convert", description="Turn published checkpoints into one model folder."
    )
    parser.add_argument("source", help="what `generate --model` takes")
    parser.add_argument("output", type=Path, help="folder to write; must not exist")
    add_model_options(parser.add_argument_group("parts"), model=False)
    parser.add_argument(
        "--dtype", default="auto", help=f"{choices(DTYPES)}; auto: as stored (auto)"
    )
    return parser


def write_model(model: ImageModel, folder: Path, progress: Any) -> None:
    """Write a model's parts and `model.json` into an empty folder."""
    import numpy as np
    from safetensors.torch import save_file
    from torch import nn

    from lantern_hpu import codebook
    from lantern_hpu.hub import CONFIG, sha256
    from lantern_hpu.models import folder as names
    from lantern_hpu.models.chameleon import TokenConditioner

    main = nn.ModuleDict({**model.condition.parts(), "target": model.target})
    parts: dict[str, nn.Module] = {names.TARGET: main, names.VQ: model.vq}
    if model.drafter is not None:
        parts[names.DRAFTER_WEIGHTS] = model.drafter
    files = {}
    for name, module in parts.items():
        progress.set_description_str(name)
        tensors = {key: tensor.contiguous() for key, tensor in module.state_dict().items()}
        save_file(tensors, folder / name)
        files[name] = sha256(folder / name)
        progress.update()
    if model.neighbours is not None:
        width = codebook.open_table(model.neighbours).shape[1]
        table = codebook.read_table(model.neighbours, min(width, codebook.KEPT))
        np.save(folder / names.NEIGHBOURS, table.numpy())
        files[names.NEIGHBOURS] = sha256(folder / names.NEIGHBOURS)
    if isinstance(model.condition, TokenConditioner):
        (folder / names.TOKENIZER).mkdir()
        model.condition.tokenizer.backend_tokenizer.save(
            str(folder / names.TOKENIZER / "tokenizer.json")
        )
    (folder / CONFIG).write_text(json.dumps(names.describe(model, files), indent=1))


def convert(args: argparse.Namespace) -> None:
    """The whole command after parsing.

    Raises:
        LanternError: the source cannot be loaded, or the output exists or cannot be written.
    """
    if args.dtype not in DTYPES:
        raise OptionError(f"--dtype is {args.dtype}", hint=choices(DTYPES))
    output: Path = args.output
    if output.exists():
        raise OutputError(f"{output} exists", hint="another name, or remove it")
    import torch
    from tqdm import tqdm

    from lantern_hpu.models.folder import Placement
    from lantern_hpu.models.load import load
    from lantern_hpu.parts import resolve

    parts = resolve(args.source, given_parts(args))
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    with tqdm(total=4, unit="part", file=sys.stderr) as progress:
        progress.set_description_str("loading")
        model = load(parts, Placement(dtype))
        progress.update()
        staging = output.with_name(output.name + ".part")
        shutil.rmtree(staging, ignore_errors=True)
        try:
            staging.mkdir(parents=True)
            write_model(model, staging, progress)
            os.replace(staging, output)
        except OSError as error:
            why = error.strerror or str(error)
            raise OutputError(f"cannot write {output}", why) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        progress.update(progress.total - progress.n)
    (height, width), size = model.image_size, sum(f.stat().st_size for f in output.rglob("*.*"))
    print(
        f"{output}: {width} x {height} pixels, {size / 1e6:.1f} MB, target {model.fingerprint[:12]}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The `convert` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: convert(args))


if __name__ == "__main__":
    sys.exit(main())
