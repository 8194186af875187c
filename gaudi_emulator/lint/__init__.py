"""Programs on the emulated card: what of Gaudi's contract they break, and where. Loading this loads no torch."""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import gaudi_emulator
from lantern_hpu.errors import LanternError, OptionError

if TYPE_CHECKING:
    from gaudi_emulator.device import Device
    from gaudi_emulator.lint.rules import Finding


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
        return cls(release, merged(cards), lint_counts(cards), ending(ended))

    @property
    def runs(self) -> bool:
        """Whether a card would run it: nothing ended it, and no finding is an error."""
        return self.ended is None and all(f.severity != "error" for f in self.findings)


# Rules whose warnings mean a compilation an input
RECOMPILING = ("H013", "H014", "H016", "H021", "H024")
Ended = BaseException | None  # what ended a program, if something did


def ending(error: Ended) -> str | None:
    """What ended a program, in one line; without the hint of an error of ours, which may advise to run the lint."""
    if error is None:
        return None
    message = error.reason if isinstance(error, LanternError) else str(error)
    return f"{type(error).__name__}: {message}"


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
        raise OptionError(f"there is no {file}", hint="the path of a Python program")
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
    """Raise an OptionError if a file cannot be compiled as Python."""
    try:
        compile(file.read_bytes(), str(file), "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise OptionError(f"{file} is no Python program", str(error) or repr(error)) from error


def merged(cards: Iterable[Device]) -> list[Finding]:
    """Findings of several runs, each rule and place once."""
    from gaudi_emulator.lint.rules import Findings

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
