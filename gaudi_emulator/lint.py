"""Programs on the emulated card: what of Gaudi's contract they break, and where. Loading this loads no torch."""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import gaudi_emulator
from gaudi_emulator.releases import DEFAULT, RELEASES, EmulatorError, release_named
from gaudi_emulator.report import FORMATS, LintRun, show

if TYPE_CHECKING:
    from gaudi_emulator.device import Device
    from gaudi_emulator.rules import Finding

BOTH = "both"  # of releases: one run under each
PROFILES = ("lazy", "compile")
RECOMPILING = ("H013", "H014", "H016", "H021", "H024")
Ended = BaseException | None  # what ended a program, if something did
# What is run under a release -> the cards that it ran on, and what ended it. It is pickled for a process of its own
Linted = Callable[[str], tuple[Sequence["Device"], Ended]]


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


# Programs


def run_program(name: str, args: Sequence[str], module: bool) -> None:
    """Run a file as `python FILE ARGUMENTS` does, or a module as `python -m MODULE ARGUMENTS`."""
    sys.argv = [name, *args]
    sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.abspath(name)))
    if not module:
        runpy.run_path(name, run_name="__main__")
        return
    check_module(name)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def check_module(name: str) -> None:
    """Raise an EmulatorError if there is no such module."""
    try:
        found = find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise EmulatorError(f"there is no module {name}", hint="the name of a Python module")


def check_program(file: Path) -> None:
    """Raise an EmulatorError if a file cannot be compiled as Python."""
    if not file.is_file():
        raise EmulatorError(f"there is no {file}", hint="the path of a Python program")
    try:
        compile(file.read_bytes(), str(file), "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise EmulatorError(f"{file} is no Python program", str(error) or repr(error)) from error


def lint_script(
    file: Path | str,
    args: Sequence[str],
    lazy: bool,
    timeout: float = 600.0,
    release: str | None = None,
    module: bool = False,
) -> tuple[Device, Ended]:
    """Run a program on an emulated card. -> the card, and the exception that ended the program, if one did

    What the program prints goes to the error stream: the other one has the findings.

    Args:
        module: whether `file` is the name of a module.
    """
    if not module:
        check_program(Path(file))
    ended: Ended = None
    argv = sys.argv
    with gaudi_emulator.emulate(release, lazy) as card:
        card.differential = True
        if module and file == "pytest":  # each test is judged by itself
            given = os.environ.get("PYTEST_ADDOPTS", "")
            os.environ["PYTEST_ADDOPTS"] = f"{given} -p gaudi_emulator.pytest_plugin --hpu"
        try:
            with redirect_stdout(sys.stderr), limited(timeout):
                run_program(str(file), args, module)
        except EmulatorError:
            raise
        except SystemExit as stop:
            ended = stop if stop.code else None
        except (Exception, TimeOver) as error:
            ended = error
            card.note_failure(error)
        finally:
            sys.argv = argv
        card.end()
    return card, ended


def lint_program(
    words: Sequence[str], module: bool, lazy: bool, timeout: float, release: str
) -> tuple[list[Device], Ended]:
    """A file or a module with its arguments; see `lint_script`."""
    card, ended = lint_script(words[0], words[1:], lazy, timeout, release, module)
    return [card], ended


# What ran


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


def lint_here(linted: Linted, release: str) -> LintRun:
    """A run under one release, in this process."""
    from gaudi_emulator.rules import joined  # which loads torch

    name = release_named(release).name
    cards, ended = linted(name)
    why = None if ended is None else f"{type(ended).__name__}: {ended}"
    findings = joined(card.findings.sorted() for card in cards)
    return LintRun(name, findings, lint_counts(cards), why)


def lint_elsewhere(linted: Linted, release: str) -> LintRun:
    """The same in a process of its own: a program's imports and flags are those of one release."""
    fresh = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as process:
        try:
            return process.submit(lint_here, linted, release).result()
        except BrokenProcessPool:
            return LintRun(release, [], {}, "the process ended")


# The command


def add_options(parser: argparse._ActionsContainer) -> None:
    """What every lint takes: the card, what is shown, and a program."""
    add, rest = parser.add_argument, argparse.REMAINDER
    about = f"release of Gaudi's software: {', '.join([*RELEASES, BOTH])} ({DEFAULT.name})"
    add("--bridge", metavar="RELEASE", help=about)
    about = "`lazy` mode with HPU graphs, or `compile`: PT_HPU_LAZY_MODE=0 and torch.compile (lazy)"
    add("--profile", help=about)
    about = "time limit in seconds, for the program or each method (600)"
    add("--timeout", type=float, default=600.0, help=about)
    about = "exit with code 1 on errors, and on warnings that mean one compilation per input"
    add("--strict", action="store_true", help=about)
    add("--all", action="store_true", help="also show notes")
    about = "text; json: findings and counts; github: annotations of a pull request (text)"
    add("--format", default="text", help=about)
    add("--json", action="store_const", dest="format", const="json", help="as --format json")
    about = (
        "serve a small random model of that type, under both releases and modes if none is given"
    )
    add("--transformers", metavar="MODEL_TYPE[:NAME=VALUE...]", help=about)
    add("-m", nargs=rest, dest="module", help="MODULE ARGUMENTS: run a module")
    add("program", nargs=rest, metavar="FILE.py ARGUMENTS", help="run a program")


def check_options(args: argparse.Namespace) -> None:
    """Raise an EmulatorError of a value that an option does not take."""
    for name, known in (("profile", PROFILES), ("format", FORMATS)):
        value = vars(args)[name]
        if value is not None and value not in known:
            raise EmulatorError(f"--{name} is {value}", hint=", ".join(known))
    if not args.timeout > 0:
        raise EmulatorError(f"--timeout is {args.timeout}", hint="more than 0 seconds")


def asked_program(args: argparse.Namespace) -> Linted | None:
    """What the options of `add_options` name to run, if they do."""
    words = args.module or args.program
    if not words:
        return None
    lazy = args.profile != "compile"
    return partial(lint_program, words, bool(args.module), lazy, args.timeout)


def refuses(finding: Finding) -> bool:
    """Whether `--strict` does: an error, or a warning that means a compilation an input."""
    recompiling = finding.rule.id in RECOMPILING and finding.severity == "warn"
    return recompiling or finding.severity == "error"


def lint(linted: Linted, args: argparse.Namespace) -> int:
    """Run under the releases asked for, and print the findings. -> 1 if it died, or there is what `--strict` refuses

    Args:
        args: of `add_options`.

    Raises:
        EmulatorError: the card had nothing to do, or there is no such option, release or program.
    """
    check_options(args)
    if args.bridge == BOTH:
        runs = [lint_elsewhere(linted, name) for name in RELEASES]
    else:
        runs = [lint_here(linted, args.bridge or DEFAULT.name)]
    from gaudi_emulator.rules import joined  # which loads torch

    findings = joined(run.findings for run in runs)
    show(runs, findings, args.format, args.all)
    refused = any(map(refuses, findings))
    died = any(run.ended is not None for run in runs)
    if not died and not any(any(run.counts.values()) for run in runs):
        hint = "is the device of its tensors hpu, and is habana_frameworks.torch imported?"
        raise EmulatorError("nothing ran on hpu", "so nothing was checked", hint)
    return 1 if died or (args.strict and refused) else 0
