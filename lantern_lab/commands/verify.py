"""Everything about a device that this project relies on, asked of the device itself.

    lantern-hpu verify --device hpu
    lantern-hpu verify --device cuda --output cuda.json

Facts of Gaudi's contract, each fused kernel against its plain twin, the tokens of every method against the CPU's,
capture times, memory against `plan`, and a short benchmark: one file, and a page of the same name. The file grows
while the command works; the same command resumes it. On an emulated card all facts hold by construction.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from lantern_hpu.commands.options import Parser, add_fields, from_args
from lantern_hpu.errors import exit_code
from lantern_hpu.files import write_file
from lantern_lab.verify.page import counts, verify_page, verify_summary
from lantern_lab.verify.stages import VerifyRequest, resumed, verify


def make_parser() -> argparse.ArgumentParser:
    about = (
        "Check a device: kernels, graph capture, memory and speed. Writes one report and one page."
    )
    parser = Parser("lantern-hpu verify", description=about)
    add_fields(parser, VerifyRequest)
    return parser


def ask_device(wanted: VerifyRequest) -> int:
    """Ask, and write the file and the page. -> 1 if something was refuted or nothing could be asked"""
    if wanted.force:
        wanted.output.unlink(missing_ok=True)
    report = resumed(wanted, lambda line: print(line, file=sys.stderr, flush=True))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left behind
    page = wanted.output.with_suffix(".html")
    try:
        verify(report)
    finally:  # also of a run that was interrupted
        result = report.as_json()
        write_file(page, verify_page(result).encode(), force=True)
    print(f"{verify_summary(result)}\n{wanted.output} and {page} are written")
    numbers = counts(result)
    return 0 if numbers["confirmed"] and not numbers["refuted"] else 1


def main(argv: Sequence[str] | None = None) -> int:
    """The `verify` command: 0, 1 if something was refuted or nothing could be asked, 2 for bad options."""
    args = make_parser().parse_args(argv)

    return exit_code(lambda: ask_device(from_args(VerifyRequest, args)))
