"""Download a known model from the Hugging Face Hub.

    lantern-hpu models download llamagen-t2i-256
    lantern-hpu models download llamagen-t2i-256 --to /models/llamagen   # for a machine without network

The same command continues after an interruption; see `lantern_hpu/zoo/fetch.py`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap

from lantern_hpu.commands.options import Parser, file_path
from lantern_hpu.errors import OptionError, OutputError, exit_code
from lantern_hpu.files import amount
from lantern_hpu.results.tables import WIDTH, aligned
from lantern_hpu.zoo.fetch import fetch_all
from lantern_hpu.zoo.find import Located, briefly, draw_command, of_folder
from lantern_hpu.zoo.registry import KnownModel, get

INTERRUPTED = 130  # what a shell returns for it


def make_parser() -> argparse.ArgumentParser:
    about = "Download a known model from the Hugging Face Hub."
    more = "lantern-hpu models lists the known models."
    parser = Parser("lantern-hpu models download", description=about, epilog=more)
    add = parser.add_argument
    add("name", metavar="NAME", help="a known model, or the Hub id of its target")
    to = "download to a folder, with a subfolder per part (default: the Hugging Face cache)"
    add("--to", type=file_path, metavar="FOLDER", help=to)
    without = "skip the drafter: enough for `ar` and the window methods"
    add("--without-drafter", action="store_true", help=without)
    return parser


def download(name: str, to: Path | None, without_drafter: bool) -> None:
    """Fetch the parts that are not here yet; prints what they are, then where."""
    if name == "builtin":
        raise OptionError("builtin is here already", "it comes with the package", "--model builtin")
    entry = get(name)
    parts = entry.needed(drafting=not without_drafter)
    other = of_folder(to) if to else None
    if other is not None and other.name != entry.name:
        raise OutputError(f"{to} holds {other.name}", "one folder, one model", "another --to")
    located = Located(entry, to)
    rows = []
    for part in parts:
        size = "here already" if located[part.role] else amount(part.bytes)
        rows.append((part.role, size, part.licence, f"{part.repo}: {briefly(part.files)}"))
    note = f"note: {entry.note}" if entry.note else ""
    lines = [*aligned(rows).split("\n"), *wrap(note, WIDTH - 2)]
    print("\n  ".join([f"{entry.name}: {entry.title}", *lines]), flush=True)
    lacking = [part for part in parts if located[part.role] is None]
    if lacking:
        fetch_all(entry, lacking, located, to)
    print(download_summary(entry, Located(entry, to), to))


def download_summary(entry: KnownModel, located: Located, to: Path | None) -> str:
    """Where the parts are, and the command that draws with them."""
    method = " --method ar" if located.missing(drafting=True) else ""
    lines = [f"{role}: {path}" for role, path in located.items() if path is not None]
    return "\n".join([*lines, f"draw with: {draw_command(entry, to)}{method}"])


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process at once; else huggingface_hub would wait for the files that it is fetching."""

    def end(*_: object) -> None:
        said = "interrupted: run the same command again to continue; complete files are kept"
        os.write(sys.stderr.fileno(), f"\n{said}\n".encode())
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main(argv: Sequence[str] | None = None) -> int:
    """The `models download` command: 0; 2 after an error; 130 if interrupted."""
    args = make_parser().parse_args(argv)
    with ended_by_interrupt():
        return exit_code(lambda: download(**vars(args)))
