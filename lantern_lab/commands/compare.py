"""Put reports of `lantern-hpu bench` side by side: a table and a chart.

    lantern-hpu compare cpu.json h100.json --output comparison

Reports of different models, samplings, seeds or prompts are refused, and the error says what differs. The same files
give the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from lantern_hpu.commands.options import Parser, add_fields, from_args
from lantern_hpu.errors import OutputError, exit_code
from lantern_hpu.fields import option
from lantern_hpu.files import write_file
from lantern_lab.measure.compare import document, draw_chart, load, main_table, notes

NAME = "comparison"  # of both files


@dataclass(frozen=True)
class CompareRequest:
    """What is compared, and where the files go."""

    reports: tuple[Path, ...] = option(
        MISSING, "a report of `lantern-hpu bench`", metavar="REPORT.json", positional=True
    )
    output: Path = option(MISSING, "folder for the table and the chart", metavar="FOLDER")
    force: bool = option(False, "write into an existing folder")


def make_parser() -> argparse.ArgumentParser:
    about = "Compare benchmark reports: a table (Markdown) and a chart (PNG)."
    parser = Parser("lantern-hpu compare", description=about)
    add_fields(parser, CompareRequest)
    return parser


def compare_reports(asked: CompareRequest) -> None:
    folder = asked.output
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file", "a folder cannot be written there")
    if folder.exists() and not asked.force:
        why = "existing files are not overwritten"
        raise OutputError(f"{folder} exists", why, "--force or another --output")
    runs = load(asked.reports)
    chart = draw_chart(runs)
    print("\n".join([main_table(runs), *(f"note: {note}" for note in notes(runs))]))
    write_file(folder / f"{NAME}.md", document(runs, f"{NAME}.png").encode(), asked.force)
    write_file(folder / f"{NAME}.png", chart, asked.force)
    print(f"wrote {folder / NAME}.md and .png")


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return exit_code(lambda: compare_reports(from_args(CompareRequest, args)))
