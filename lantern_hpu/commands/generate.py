"""Draw images from prompts.

    python -m lantern_hpu.generate --prompt "a red apple" --output apple.png

Options, one call and what is printed; the call is `commands/generate_draw.py`, which hands over to `LanternPipeline`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lantern_hpu import __version__
from lantern_hpu.commands import options
from lantern_hpu.commands.generate_draw import draw_job
from lantern_hpu.commands.generate_workers import draw_with_workers
from lantern_hpu.errors import exit_code
from lantern_hpu.methods.setting import Resolved

if TYPE_CHECKING:
    from lantern_hpu.results.images import GenerationResult


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.generate",
        description="Draw images from prompts.",
    )
    add_what(parser.add_argument_group("what to draw"))
    add_where(parser.add_argument_group("where it goes"))
    how = parser.add_argument_group("how it runs")
    models = "a name of `lantern-hpu models`, a Hub id, a folder or a weights file"
    how.add_argument("--model", help=f"`builtin`, {models} (builtin)")
    options.add_stretch_option(how)
    options.add_part_options(how)
    options.add_device_options(how)
    options.add_running_options(how)
    many = "Ray processes that generate, one per card (default: generate in this process)"
    how.add_argument("--workers", type=int, metavar="N", help=many)
    how.add_argument("--batch-size", type=int, help="images per batch (at most 8 if not set)")
    options.add_method_options(parser.add_argument_group("method"))
    options.add_sampling_options(parser.add_argument_group("sampling (default: the model's own)"))
    chosen = "print the chosen number format, layout and threads, with reasons"
    parser.add_argument("--verbose", action="store_true", help=chosen)
    parser.add_argument("--version", action="version", version=f"lantern_hpu {__version__}")
    return parser


def add_what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    label = "ImageNet class by name or index, for class-conditional models; repeat for several"
    add(
        "--prompt",
        action="append",
        default=[],
        help="text to draw; repeat the option for several prompts",
    )
    negative = "negative prompt, for models that support one (Emu3)"
    add("--negative-prompt", metavar="TEXT", help=negative)
    add("--class-label", action="append", default=[], metavar="LABEL", help=label)
    add(
        "--prompts-file",
        type=options.file_path,
        metavar="FILE",
        help=".txt (one a line), .tsv or .json",
    )
    add(
        "--from-png",
        type=options.file_path,
        metavar="FILE",
        help="regenerate the image of a PNG from its metadata",
    )
    add("--num-images", type=int, help="images per prompt (1)")
    pixels = (
        "height in pixels, for models with variable sizes; without --width a square (model default)"
    )
    add("--height", type=int, metavar="PIXELS", help=pixels)
    add("--width", type=int, metavar="PIXELS", help="see --height")
    add("--seed", type=int, help="seed of the first image; image i uses seed + i (0)")


def add_where(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    every = "write a preview every ROWS rows of the image"
    add(
        "--output",
        type=options.file_path,
        default=Path("out"),
        help="a .png file, or a folder (out)",
    )
    add("--force", action="store_true", help="replace existing files")
    add("--resume", action="store_true", help="keep existing images and generate the missing ones")
    add("--grid", action="store_true", help="also write one sheet with all images")
    add(
        "--report",
        type=options.file_path,
        metavar="FILE.json",
        help="write acceptance, timing, graph statistics and settings",
    )
    tokens = "the image tokens, also of a model without its VQ tokenizer; `lantern-hpu pixels` makes pictures of them"
    add("--save-tokens", type=options.file_path, metavar="FILE.npz", help=tokens)
    add("--preview-every", type=int, default=0, metavar="ROWS", help=every)


def generate_summary(result: GenerationResult, output: Path) -> str:
    """One line for the user."""
    from lantern_hpu.results.images import mean_tv, tokens_per_step

    records, setting = result.records, Resolved.read(result.config)
    seeds = records[0].seed if len(records) == 1 else f"{records[0].seed} to {records[-1].seed}"
    tv = mean_tv(records)
    cost = f"TV {tv:.3f} a token, " if tv else ""
    return (
        f"{len(records)} image(s), seed {seeds}, {setting}, {tokens_per_step(records):.2f} tokens a step, {cost}"
        f"{result.timing.generate_s:.1f} s -> {output}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The `generate` command; returns the exit code."""
    args = make_parser().parse_args(argv)

    def command() -> None:
        if args.workers is not None:
            print(f"{draw_with_workers(args)} image(s) drawn -> {args.output}")
            return
        result = draw_job(args)
        where = args.output if not result or result.images else args.save_tokens
        print(generate_summary(result, where) if result else f"every image is in {where}")

    try:
        return exit_code(command)
    except KeyboardInterrupt:
        print("interrupted: what was drawn is kept, --resume draws the rest", file=sys.stderr)
        return 130
