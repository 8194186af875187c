"""Turn published checkpoints into one model folder.

    lantern-hpu models convert llamagen-t2i-256 models/t2i
    lantern-hpu models convert llamagen-t2i-256 models/t2i-int8 --quantize int8
    lantern-hpu generate --model models/t2i --prompt "a red apple" --output apple.png

The folder holds safetensors files with our names, sizes, default sampling, checksums, the target's fingerprint
(`lantern_hpu/models/files/load.py`) and a model card. It is memory-mapped, and every file is checked each time it is
loaded. A text encoder is not copied: the folder notes its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lantern_hpu.backends import QUANTIZED, DeviceOptions
from lantern_hpu.commands.options import Parser, add_fields, file_path, from_args
from lantern_hpu.errors import OptionError, choices, exit_code, require
from lantern_hpu.models.files.names import PartOverrides

DTYPES = ("auto", "float32", "bfloat16", "float16")


def make_parser() -> Parser:
    about = "Convert published checkpoints to a model folder."
    parser = Parser("lantern-hpu models convert", description=about)
    add = parser.add_argument
    add("source", help="model name, Hub id, folder or weights file")
    add("output", type=file_path, help="folder to write; must not exist")
    number = f"{choices(DTYPES)}; auto: as stored (auto)"
    add("--dtype", default="auto", help=number)
    add_fields(parser, DeviceOptions, "quantize")
    add_fields(parser.add_argument_group("parts"), PartOverrides)
    parser.only_keys("image_size")
    return parser


def convert(
    source: str, output: Path, dtype: str, given: PartOverrides, quantize: str | None = None
) -> str:
    """Write the folder. -> what it holds"""
    if dtype not in DTYPES:
        raise OptionError(f"--dtype is {dtype}", hint=choices(DTYPES, dtype))
    require(quantize in (None, *QUANTIZED), "quantize", quantize, choices(QUANTIZED))
    from lantern_hpu.loading import write_folder

    model = write_folder(source, output, dtype, given, quantize)
    size = sum(file.stat().st_size for file in output.iterdir()) / 1e6
    height, width = model.config.image_size
    return f"{output}: {width} x {height} pixels, {size:.1f} MB, target {model.fingerprint[:12]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)

    def command() -> None:
        given = from_args(PartOverrides, args)
        print(convert(args.source, args.output, args.dtype, given, args.quantize))

    return exit_code(command, parser.spell)
