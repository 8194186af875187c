"""Fetch the files of a known model from the Hugging Face Hub.

    lantern-hpu download llamagen-t2i-256
    lantern-hpu download llamagen-t2i-256 --to /models/llamagen   # for a machine without network

The same command goes on after an interruption; see `lantern_hpu/zoo/fetch.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lantern_hpu.commands.options import Parser, file_path
from lantern_hpu.errors import OptionError, OutputError, exit_code
from lantern_hpu.zoo.fetch import choose_parts, fetch_all, fetch_text
from lantern_hpu.zoo.find import Located, draw_command, of_folder
from lantern_hpu.zoo.registry import KnownModel, get

INTERRUPTED = 130  # what a shell returns for it


def make_parser() -> argparse.ArgumentParser:
    about = "Download a known model from the Hugging Face Hub."
    more = "lantern-hpu models lists the known models."
    parser = Parser("lantern-hpu download", description=about, epilog=more)
    add = parser.add_argument
    add("name", metavar="NAME", help="a known model, or the Hub id of its target")
    only = "download only these parts: target, drafter, vq, ..."
    add("--only", metavar="PART,...", help=only)
    to = "download to a folder, with a subfolder per part (default: the Hugging Face cache)"
    add("--to", type=file_path, metavar="FOLDER", help=to)
    without = "skip the drafter: enough for `ar` and the window methods"
    add("--without-drafter", action="store_true", help=without)
    return parser


def download_parts(name: str, only: str | None, to: Path | None, without_drafter: bool) -> None:
    if name == "builtin":
        raise OptionError("builtin is here already", "it comes with the package", "--model builtin")
    entry = get(name)
    parts = choose_parts(entry, only, not without_drafter)
    other = of_folder(to) if to else None
    if other is not None and other.name != entry.name:
        raise OutputError(f"{to} holds {other.name}", "one folder, one model", "another --to")
    located = Located(entry, to)
    print(fetch_text(entry, parts, located), flush=True)
    lacking = [part for part in parts if located[part.role] is None]
    if lacking:
        fetch_all(entry, lacking, located, to)
    print(download_summary(entry, Located(entry, to), to))


def download_summary(entry: KnownModel, located: Located, to: Path | None) -> str:
    """Where the parts are, and how to draw with them or which are missing."""
    lines = [f"{role}: {path}" for role, path in located.items() if path is not None]
    lacking = [part.role for part in located.missing(drafting=False)]
    if lacking:
        return "\n".join([*lines, f"to draw it still lacks: {', '.join(lacking)}"])
    method = " --method ar" if located.missing(drafting=True) else ""
    return "\n".join([*lines, f"draw with: {draw_command(entry, to)}{method}"])


def main(argv: Sequence[str] | None = None) -> int:
    """The `download` command: 0; 2 after an error; 130 if interrupted."""
    args = make_parser().parse_args(argv)
    try:
        return exit_code(lambda: download_parts(**vars(args)))
    except KeyboardInterrupt:
        said = "interrupted: files that are whole stay, the same command fetches the others"
        print(f"\n{said}", file=sys.stderr)
        return INTERRUPTED
