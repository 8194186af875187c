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
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.errors import OptionError, OutputError, choices, exit_code
from lantern_hpu.generate import add_part_options, given_parts

if TYPE_CHECKING:
    from lantern_hpu.models.folder import ImageModel
    from lantern_hpu.parts import Parts

DTYPES = ("auto", "float32", "bfloat16", "float16")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.convert", description="Turn published checkpoints into one model folder."
    )
    parser.add_argument("source", help="what `generate --model` takes")
    parser.add_argument("output", type=Path, help="folder to write; must not exist")
    add_part_options(parser.add_argument_group("parts"))
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
        text = model.condition.tokenizer.backend_tokenizer.to_str()
        (folder / names.TOKENIZER).write_text(text)
        files[names.TOKENIZER] = sha256(folder / names.TOKENIZER)
    (folder / CONFIG).write_text(json.dumps(names.describe(model, files), indent=1))


def drafts(parts: Parts) -> bool:
    """Whether the model has a drafter to convert."""
    from lantern_hpu.models.folder import DRAFTER_WEIGHTS

    return parts.drafter is not None or (parts.target / DRAFTER_WEIGHTS).is_file()


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A new folder beside the output, which takes its name when all is written, and is removed otherwise.

    Raises:
        OutputError: it cannot be written.
    """
    from safetensors import SafetensorError

    folder = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        yield folder
        readable(folder)
        os.replace(folder, output)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"cannot write {output}", why, "another folder or disk") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def readable(folder: Path) -> None:
    """Give files and folders the rights that new ones have here; some libraries write for their user alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


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
    with tqdm(total=3 + drafts(parts), unit="part", file=sys.stderr) as progress:
        progress.set_description_str("loading")
        model = load(parts, Placement(dtype))
        progress.update()
        with staged(output) as folder:
            write_model(model, folder, progress)
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
