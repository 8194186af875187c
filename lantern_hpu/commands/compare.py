"""Put reports of `lantern_hpu.bench` beside each other: a table, plots, and a page to send to a colleague.

    lantern-hpu compare cpu.json h100.json --output comparison

Reports of different models, samplings, seeds or prompts are refused, and the error says what differs. The same files
give the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from itertools import chain
from pathlib import Path

from lantern_hpu.bench.compare_document import csv_text, document, main_table, notes
from lantern_hpu.bench.compare_plots import draw_charts
from lantern_hpu.bench.comparison import load
from lantern_hpu.commands.options import add_fields, filled
from lantern_hpu.errors import OutputError, exit_code, needing, option
from lantern_hpu.files import write_file
from lantern_hpu.results.pages import render_page

NAME = "comparison"  # of the table and the page


@dataclass(frozen=True)
class CompareRequest:
    """What is compared, and where the files go."""

    reports: tuple[Path, ...] = option(
        MISSING, "a report of `lantern-hpu bench`", metavar="REPORT.json", positional=True
    )
    output: Path = option(MISSING, "folder for the table, the plots and the page", metavar="FOLDER")
    force: bool = option(False, "write into an existing folder")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern-hpu compare",
        description="Compare benchmark reports: a table, plots and a page.",
    )
    add_fields(parser, CompareRequest)
    return parser


def check_compare(asked: CompareRequest) -> None:
    """Refuse what can be refused before anything is read or drawn."""
    folder = asked.output
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file", "a folder cannot be written there")
    if folder.exists() and not asked.force:
        why = "existing files are not overwritten"
        raise OutputError(f"{folder} exists", why, "--force or another --output")
    with needing("matplotlib", "it draws the plots", "compare"):
        import matplotlib.figure  # noqa: F401
    with needing("jinja2", "it lays out the page", "compare"):
        import jinja2  # noqa: F401


def compare_reports(asked: CompareRequest) -> None:
    """Check, compare, print the table, write the files."""
    check_compare(asked)
    comparison = load(asked.reports)
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
        write_file(asked.output / name, data, asked.force)
    print(f"wrote {asked.output / NAME}.html, .md and .csv, and the plots beside them")


def main(argv: Sequence[str] | None = None) -> int:
    """The `compare` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: compare_reports(filled(CompareRequest, args)))
