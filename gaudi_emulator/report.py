"""What a lint found, for readers, for programs and for GitHub's checks. Loading this loads no torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gaudi_emulator.rules import Finding, Rule, Severity

FORMATS = ("text", "json", "github")
# Of GitHub's annotations
LEVELS: dict[Severity, str] = {"error": "error", "warn": "warning", "info": "notice"}


@dataclass(frozen=True)
class LintRun:
    """A program under one release of the bridge.

    Attributes:
        counts: what the device did, by name.
        ended: what ended the program, with its type; None if it went through.
    """

    release: str
    findings: list[Finding]
    counts: dict[str, int]
    ended: str | None

    @property
    def runs(self) -> bool:
        """Whether a card would run it: nothing ended it, and no finding is an error."""
        return self.ended is None and all(f.severity != "error" for f in self.findings)


def show(runs: Sequence[LintRun], findings: Sequence[Finding], form: str, everything: bool) -> None:
    """Print what runs found, and on the error stream what ended them.

    Args:
        form: one of FORMATS.
        everything: whether notes are shown; `json` has them always.
    """
    if form == "json":
        print_json(runs, findings)
    else:
        print_findings(runs, findings, form, everything)
    for run in runs:
        if run.ended is not None:
            under = f" under {run.release}" if len(runs) > 1 else ""
            print(f"the program ended{under} with {run.ended}", file=sys.stderr)


def print_json(runs: Sequence[LintRun], findings: Sequence[Finding]) -> None:
    """For programs; `counts` are those of each release where there is more than one."""
    counts = {run.release: run.counts for run in runs}
    report = {
        "release": runs[0].release if len(runs) == 1 else "both",
        "findings": [finding.as_dict() for finding in findings],
        "counts": runs[0].counts if len(runs) == 1 else counts,
        "runs_on": [run.release for run in runs if run.runs],
        "ended": {run.release: run.ended for run in runs if run.ended is not None},
    }
    print(json.dumps(report, indent=2))


def print_findings(
    runs: Sequence[LintRun], findings: Sequence[Finding], form: str, everything: bool
) -> None:
    """A line a finding, how many there are, and what the device did."""
    shown = [f for f in findings if everything or f.severity != "info"]
    lines = commands(shown) if form == "github" else text(shown, named=len(runs) > 1)
    for line in lines:
        print(line)
    for run in runs:
        kinds = [f.severity for f in run.findings]
        errors, warnings, notes = (kinds.count(kind) for kind in LEVELS)
        hidden = ", shown with --all" if notes and not everything else ""
        print(f"{errors} errors, {warnings} warnings, {notes} notes{hidden} (bridge {run.release})")
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


def text(findings: Sequence[Finding], named: bool = False) -> Iterator[str]:
    """A line a finding; then why and what instead, once for each rule."""
    rules: dict[Rule, dict[str, None]] = {}  # with the releases that it was broken under
    for finding in findings:
        yield line(finding, named)
        rules.setdefault(finding.rule, {}).update(dict.fromkeys(finding.releases))
    yield from ("", *(reason(rule, [*on]) for rule, on in rules.items()), "") if rules else ()


def line(finding: Finding, named: bool = False) -> str:
    """Where, which rule and what of it.

    Args:
        named: whether the releases that the finding holds for are named.
    """
    under = f" under {' and '.join(finding.releases)}" if named else ""
    captured = " in a capture" if finding.captured else ""
    place = f"{path(finding, os.getcwd())}:{finding.line}"
    return f"{place}: {finding.severity} {finding.rule.title}{captured}{under}{about(finding)}"


def reason(rule: Rule, releases: Sequence[str]) -> str:
    """Why, and what instead."""
    return f"{rule.title}: {rule.reason(releases)}\n    instead: {rule.instead}"


def commands(findings: Sequence[Finding]) -> Iterator[str]:
    """Commands of a GitHub workflow, which shows them at the lines of a pull request."""
    root = os.environ.get("GITHUB_WORKSPACE", os.getcwd())
    for finding in findings:
        rule, level = finding.rule, LEVELS[finding.severity]
        file = escaped(path(finding, root), ",:")
        why = f"{rule.reason(finding.releases)}{about(finding)}\ninstead: {rule.instead}"
        place = f"file={file},line={finding.line},title={rule.title}"
        yield f"::{level} {place}::{escaped(why)}"


def escaped(text: str, more: str = "") -> str:
    """Text of a workflow's command, whose properties may not hold `more`."""
    for letter in "%\r\n" + more:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text


def path(finding: Finding, root: str) -> str:
    return os.path.relpath(finding.file, root) if os.path.isabs(finding.file) else finding.file


def about(finding: Finding) -> str:
    """The detail of a finding, and how often it came, in brackets."""
    often = f"{finding.count} times" if finding.count > 1 else ""
    parts = [part for part in (finding.detail, often) if part]
    return f" ({', '.join(parts)})" if parts else ""
