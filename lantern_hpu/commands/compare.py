"""Put reports of `lantern_hpu.lab.bench` beside each other: a table, plots, and a page to send to a colleague.

    lantern-hpu compare cpu.json h100.json --output comparison

Reports of different models, samplings, seeds or prompts are refused, and the error says what differs. The same files
give the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from lantern_hpu.errors import OutputError, exit_code, needing
from lantern_hpu.files import write_file
from lantern_hpu.lab.compare.comparison import load
from lantern_hpu.lab.compare.document import csv_text, document, main_table, notes
from lantern_hpu.lab.compare.plots import draw_charts
from lantern_hpu.lab.pages import render_page

NAME = "comparison"  # of the table and the page


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern-hpu compare",
        description="Put reports of lantern_hpu.lab.bench beside each other: table, plots, page.",
    )
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT.json")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--force", action="store_true", help="write into a folder that exists")
    return parser


def check_compare(folder: Path, force: bool) -> None:
    """Refuse what can be refused before anything is read or drawn.

    Raises:
        OutputError: the folder exists, unless forced, or is a file. OptionError: a library is missing.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file", "a folder was to be written there")
    if folder.exists() and not force:
        why = "nothing is overwritten unasked"
        raise OutputError(f"{folder} exists", why, "--force or another --output")
    with needing("matplotlib", "it draws the plots", "compare"):
        import matplotlib.figure  # noqa: F401
    with needing("jinja2", "it lays out the page", "compare"):
        import jinja2  # noqa: F401


def compare_reports(args: argparse.Namespace) -> None:
    """Check, compare, print the table, write the files."""
    check_compare(args.output, args.force)
    comparison = load(args.reports)
    pictures = draw_charts(comparison)
    whole = document(comparison, pictures)
    texts = {
        suffix: render_page(f"comparison.{suffix}", document=whole) for suffix in ("html", "md")
    }
    texts["csv"] = csv_text(comparison)
    files = {f"{NAME}.{suffix}": text.encode() for suffix, text in texts.items()}
    for picture in pictures:
        files |= {f"{picture.name}.png": picture.png, f"{picture.name}.svg": picture.svg}
    print(main_table(comparison).markdown())
    for entry in chain(*notes(comparison).values()):
        print(f"note: {entry}")
    for name, data in files.items():
        write_file(args.output / name, data, args.force)
    print(f"wrote {args.output / NAME}.html, .md and .csv, and the plots beside them")


def main(argv: Sequence[str] | None = None) -> int:
    """The `compare` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: compare_reports(args))
