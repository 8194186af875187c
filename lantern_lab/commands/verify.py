"""Everything about a device that this project relies on, asked of the device itself.

    lantern-hpu verify --device hpu
    lantern-hpu verify --device cuda --output cuda.json

Facts of Gaudi's contract, each fused kernel against its plain twin, the tokens of every method against the CPU's,
capture times, memory against `models plan`, and a short benchmark: one file, and a page of the same name. The file
grows while the command works; the same command resumes it. On an emulated card all facts hold by construction.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lantern_hpu.commands.options import Parser, add_fields, from_args
from lantern_hpu.errors import exit_code, needing
from lantern_hpu.files import ASSETS, write_file
from lantern_lab.verify.stages import VerifyRequest, resumed, verify

STATES = ("refuted", "unanswered", "confirmed")  # as the page sorts them
MARKS = {"confirmed": "yes", "refuted": "NO", "unanswered": "open"}


def counts(report: dict[str, Any]) -> dict[str, int]:
    """How many answers there are of each state."""
    results = Counter(result["state"] for result in report["results"])
    return {state: results[state] for state in MARKS}


def verify_summary(report: dict[str, Any]) -> str:
    counted = ", ".join(f"{count} {state}" for state, count in counts(report).items())
    where = report["hardware"].get("card") or report["device"]
    return f"{where}: {counted}, in {report['seconds']:.0f} seconds"


def verify_page(report: dict[str, Any]) -> str:
    """A whole HTML document."""
    names = ("release", "model", "torch", "lantern_hpu")  # the release of Gaudi's software
    about = {"device": report["device"]}
    about |= {name: report[name] for name in names if report.get(name)}
    for name, value in report["hardware"].items():
        if isinstance(value, dict):  # flags and the like, on one line
            value = ", ".join(f"{part}={what}" for part, what in value.items())
        about |= {name: value} if name not in ("device", "torch") else {}
    stages = []
    for stage, results in groupby(report["results"], lambda result: result["stage"]):
        worst_first = sorted(results, key=lambda result: STATES.index(result["state"]))
        states = Counter(result["state"] for result in worst_first)
        stages.append({"name": stage, "results": worst_first, "counts": states})
    with needing("jinja2", "it lays out the page", "compare"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    loader = FileSystemLoader(ASSETS)
    environment = Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["readable"] = readable
    shown = {"about": about, "stages": stages, "states": STATES, "marks": MARKS}
    page = environment.get_template("verify.html")
    return page.render(report=report, summary=verify_summary(report), **shown)


def readable(value: Any) -> str:
    """A number with as many digits as it needs."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


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
