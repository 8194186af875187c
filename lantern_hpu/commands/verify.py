"""Everything about a device that this project relies on, asked of the device itself.

    lantern-hpu verify --device hpu
    lantern-hpu verify --device cuda --output cuda.json

Facts of Gaudi's contract, each fused kernel against its plain twin, the tokens of every method against the CPU's,
capture times, memory against `plan`, and a short benchmark: one file, and a page beside it. The file grows while the
command works; the same command goes on where it was stopped. `--emulate` asks the emulator, which confirms all facts
by construction and tells nothing of a card.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from lantern_hpu.backends import BACKENDS, EMULATED
from lantern_hpu.backends.hpu.releases import choose_release
from lantern_hpu.commands.options import add_bridge_option
from lantern_hpu.errors import OptionError, choices, exit_code, require
from lantern_hpu.files import write_file
from lantern_hpu.lab.verify.page import counts, verify_page, verify_summary
from lantern_hpu.lab.verify.run import VerifyRequest, resumed, verify


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern-hpu verify",
        description="Ask a device whether it is as expected; one file, one page.",
    )
    add = parser.add_argument
    add("--device", default=EMULATED, help=f"{', '.join(BACKENDS)} ({EMULATED})")
    add("--emulate", action="store_true", help="ask the emulator instead of a card")
    add_bridge_option(parser)
    add("--model", default="builtin", help="`builtin`, or a model folder (builtin)")
    add("--minutes", type=float, default=10.0, help="what is not asked by then is left open (10)")
    add(
        "--output",
        type=Path,
        default=Path("verify.json"),
        metavar="FILE.json",
        help="(verify.json)",
    )
    add("--force", action="store_true", help="begin anew, whatever is in the file")
    return parser


def check_verify_options(args: argparse.Namespace) -> VerifyRequest:
    """
    Raises:
        OptionError: an option is out of range. OutputError: the file is no place to write to.
    """
    if args.device not in BACKENDS:
        raise OptionError(f"unknown device {args.device!r}", hint=choices(BACKENDS))
    if args.emulate and args.device != EMULATED:
        raise OptionError(f"{args.device} cannot be emulated", hint=f"--device {EMULATED}")
    choose_release(args.bridge)
    require(args.minutes > 0, "--minutes", args.minutes, "more than 0")
    require(args.output.suffix == ".json", "--output", args.output, "a name that ends in .json")
    return VerifyRequest(args.device, args.emulate, args.model, args.output, args.minutes)


def main(argv: Sequence[str] | None = None) -> int:
    """The `verify` command: 0, 1 if something was refuted or nothing could be asked, 2 for bad options."""
    args = make_parser().parse_args(argv)
    fine = False

    def command() -> None:
        nonlocal fine
        wanted = check_verify_options(args)
        if args.force:
            wanted.output.unlink(missing_ok=True)
        report = resumed(wanted, lambda line: print(line, file=sys.stderr, flush=True))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left behind
        found, shown = report.as_json(), wanted.output.with_suffix(".html")
        try:
            verify(report)
        finally:  # also of a run that was interrupted
            found = report.as_json()
            write_file(shown, verify_page(found).encode(), force=True)
        print(f"{verify_summary(found)}\n{wanted.output} and {shown} are written")
        numbers = counts(found)
        fine = numbers["confirmed"] > 0 and not numbers["refuted"]

    return exit_code(command) or (0 if fine else 1)
