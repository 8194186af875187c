"""Widen a small model to the sizes of a large one, and write it as a model folder.

    lantern-hpu models stretch llamagen-xl --output xl
    lantern-hpu bench --model xl --device cpu --output xl.json

It computes what the small model computes, each step at the large one's cost: `lantern_lab/stretch.py` says how.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from lantern_hpu.commands.options import Parser, add_fields, from_args
from lantern_hpu.errors import OptionError, OutputError, choices, exit_code
from lantern_hpu.fields import option
from lantern_hpu.files import amount
from lantern_hpu.zoo import registry
from lantern_hpu.zoo.registry import KnownModel

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Known models by short names
LLAMAGEN = {
    "llamagen-b": "llamagen-c2i-b-256",
    "llamagen-l": "llamagen-c2i-l-256",
    "llamagen-xl": "llamagen-t2i-256",
    "llamagen-xxl": "llamagen-c2i-xxl-384",
}


@dataclass(frozen=True)
class StretchRequest:
    """What is widened, to which sizes, and where it goes."""

    to: str = option(
        MISSING, f"a known model whose sizes are meant: {', '.join(LLAMAGEN)}", positional=True
    )
    output: Path = option(MISSING, "folder to write; must not exist", metavar="FOLDER")
    model: str = option("builtin", "the small model: `builtin`, a folder or a known name")
    dtype: str = option("auto", f"{choices(DTYPES)}; auto: as stored")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "lantern-hpu models stretch",
        description="Write a small model at the sizes of a large one, to measure that one's cost without its weights.",
    )
    add_fields(parser, StretchRequest)
    return parser


def find_sizes(name: str) -> KnownModel:
    """The known model that is meant; only its sizes are used."""
    result = registry.find_model_by_name(LLAMAGEN.get(name, name))
    if result is None or not result.family.startswith("llamagen"):
        why = (
            "no sizes are known of it" if result is None else f"it is of the family {result.family}"
        )
        raise OptionError(f"cannot stretch to {name!r}", why, choices(LLAMAGEN))
    return result


def check_room(output: Path, needed: int) -> None:
    """Raise an OutputError unless memory and disk can hold that many bytes."""
    from lantern_hpu.backends.host import available_bytes

    there = next(folder for folder in output.absolute().parents if folder.is_dir())
    room = {"in memory": available_bytes(), f"at {there}": shutil.disk_usage(there).free}
    for where, free in room.items():
        if free is not None and free < needed:
            why = f"{amount(free)} are free {where}"
            raise OutputError(
                f"{output} needs {amount(needed)}", why, "--dtype bfloat16, or smaller sizes"
            )


def stretch(asked: StretchRequest) -> str:
    """Write the folder. -> what it holds"""
    entry, output = find_sizes(asked.to), asked.output
    if asked.dtype not in DTYPES:
        raise OptionError(f"--dtype is {asked.dtype}", hint=choices(DTYPES))
    if output.exists():
        raise OutputError(f"{output} exists", hint="another name, or remove it")
    import torch
    from tqdm import tqdm

    from lantern_hpu.models.files.load import open_model, staged, write_model
    from lantern_hpu.models.model import parameters_of
    from lantern_hpu.zoo.find import find_parts
    from lantern_lab.stretch import stretch_model, stretched_config

    opened, large = open_model(find_parts(asked.model)), entry.config.target
    numbers = sum(parameters_of(stretched_config(opened.config, asked.to, large)).values())
    check_room(output, numbers * (4 if asked.dtype == "float32" else 2))
    dtype = None if asked.dtype == "auto" else getattr(torch, asked.dtype)
    with (
        tqdm(unit="tensor", desc="widening", file=sys.stderr) as progress,
        staged(output) as folder,
    ):
        model = stretch_model(opened, asked.to, large, dtype, progress)
        write_model(model, folder, progress)
    size = sum(file.stat().st_size for file in output.iterdir())
    return f"{output}: {model.name}, {size / 1e6:.1f} MB\n{model.notes[-1]}"


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return exit_code(lambda: print(stretch(from_args(StretchRequest, args))))
