"""Programs on the emulated card: what of Gaudi's contract they break, and where. Loading this loads no torch."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import gaudi_emulator
from gaudi_emulator.releases import EmulatorError

if TYPE_CHECKING:
    from gaudi_emulator.device import Device
    from gaudi_emulator.rules import Finding


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

    @classmethod
    def of(cls, release: str, cards: Sequence[Device], ended: Ended) -> LintRun:
        why = None if ended is None else f"{type(ended).__name__}: {ended}"
        return cls(release, merged(cards), lint_counts(cards), why)

    @property
    def runs(self) -> bool:
        """Whether a card would run it: nothing ended it, and no finding is an error."""
        return self.ended is None and all(f.severity != "error" for f in self.findings)


BOTH = "both"  # of releases: one run under each
# Rules whose warnings mean a compilation an input
RECOMPILING = ("H013", "H014", "H016", "H021", "H024")
Ended = BaseException | None  # what ended a program, if something did


class TimeOver(BaseException):
    """The program ran longer than it may; no handler of its own is to catch that."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeOver in a program that goes on for too long."""

    def stop(*_: object) -> None:
        raise TimeOver(f"it was stopped after {seconds:g} seconds (--timeout)")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def lint_script(
    file: Path, args: Sequence[str], lazy: bool, timeout: float = 600.0, release: str | None = None
) -> tuple[Device, Ended]:
    """Run a program on an emulated card. -> the card, and the exception that ended the program, if one did

    What the program prints goes to the error stream: the other one has the findings.
    """
    if not file.is_file():
        raise EmulatorError(f"there is no {file}", hint="the path of a Python program")
    check_program(file)
    ended: Ended = None
    argv = sys.argv
    with gaudi_emulator.emulate(release, lazy) as card:
        card.differential = True
        sys.argv, sys.path[:0] = [str(file), *args], [str(file.parent)]
        try:
            with redirect_stdout(sys.stderr), limited(timeout):
                runpy.run_path(str(file), run_name="__main__")
        except SystemExit as stop:
            ended = stop if stop.code else None
        except (Exception, TimeOver) as error:
            ended = error
            card.note_failure(error)
        finally:
            sys.argv = argv
        card.end()
    return card, ended


def check_program(file: Path) -> None:
    """Raise an EmulatorError if a file cannot be compiled as Python."""
    try:
        compile(file.read_bytes(), str(file), "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise EmulatorError(f"{file} is no Python program", str(error) or repr(error)) from error


def merged(cards: Iterable[Device]) -> list[Finding]:
    """Findings of several runs, each rule and place once."""
    from gaudi_emulator.rules import Findings

    together = Findings(lambda: False)
    for card in cards:
        together.add(card.findings)
    return together.sorted()


def lint_counts(cards: Sequence[Device]) -> dict[str, int]:
    """Counts over all runs."""
    counts = [card.counts for card in cards]
    return {
        "recompiles_after_warmup": sum(c.recompiles for c in counts),
        "cpu_fallbacks": sum(c.fallbacks.total() for c in counts),
        "eager_cuts": sum(c.cuts.total() for c in counts),
        "whole_copies": sum(c.whole_copies for c in counts),
        "recipes": sum(c.recipes for c in counts),
        "launches": sum(c.launches for c in counts),
        "graph_launches": sum(c.graphs["launches"] for c in counts),
        "host_syncs": sum(c.host_syncs.total() for c in counts),
        "uploads": sum(c.uploads for c in counts),
    }


# What a lint found, for programs and for readers


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


def text(findings: Sequence[Finding], named: bool = False) -> str:
    """One paragraph a finding.

    Args:
        named: whether the releases that a finding holds for are named.
    """
    blocks = []
    for finding in findings:
        file = os.path.relpath(finding.file) if os.path.isabs(finding.file) else finding.file
        where = f"{file}:{finding.line}"
        captured = " in a capture" if finding.captured else ""
        often = f", {finding.count} times" if finding.count > 1 else ""
        detail = f" ({finding.detail}{often})" if finding.detail else often
        under = f" under {' and '.join(finding.releases)}" if named else ""
        blocks.append(
            f"{where}: {finding.severity} {finding.rule.title}{captured}{under}{detail}\n"
            f"    why: {finding.rule.reason(finding.releases)}\n    instead: {finding.rule.instead}"
        )
    return "\n".join(blocks)
