"""What a lint found, for readers and for programs. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gaudi_emulator.lint import LintRun, text

if TYPE_CHECKING:
    from gaudi_emulator.lint.rules import Finding

BOTH = "both"  # of `--bridge`: one run under each release


def print_json(runs: Sequence[LintRun], findings: Sequence[Finding]) -> None:
    """For programs; `counts` are those of each release where there is more than one."""
    counts = {run.release: run.counts for run in runs}
    report = {
        "release": runs[0].release if len(runs) == 1 else BOTH,
        "findings": [finding.as_dict() for finding in findings],
        "counts": runs[0].counts if len(runs) == 1 else counts,
        "runs_on": [run.release for run in runs if run.runs],
        "ended": {run.release: run.ended for run in runs if run.ended is not None},
    }
    print(json.dumps(report, indent=2))


def print_text(runs: Sequence[LintRun], findings: Sequence[Finding], everything: bool) -> None:
    """A paragraph a finding, how many there are, and what the device did."""
    shown = [f for f in findings if everything or f.severity != "info"]
    if shown:
        print(text(shown, named=len(runs) > 1))
    for run in runs:
        kinds = [f.severity for f in run.findings]
        errors, warnings, notes = (kinds.count(kind) for kind in ("error", "warn", "info"))
        print(f"{errors} errors, {warnings} warnings, {notes} notes (bridge {run.release})")
        print(", ".join(f"{n} {name.replace('_', ' ')}" for name, n in run.counts.items()))
    if len(runs) > 1:
        print(verdict(runs))


def verdict(runs: Sequence[LintRun]) -> str:
    """On which releases a program runs, in one line."""
    good = [run.release for run in runs if run.runs]
    if len(good) == len(runs):
        return f"runs on both: bridge {' and '.join(good)}"
    if not good and all(run.ended is None for run in runs):
        return "ends on both, with errors: what a card computes there is not known"
    return f"runs on bridge {good[0]} alone" if good else "runs on neither"
