"""What Gaudi would say to this code, on a machine without one.

    lantern-hpu lint --strict                 the embedded model, every method
    lantern-hpu lint --script my_model.py     your own code
    lantern-hpu lint --bridge both            under every release of Gaudi's software that was read

Code runs on the emulated card; `gaudi_emulator/rules.txt` has the rules. Each that is broken is printed with the
line that broke it, why it matters, and what to write instead. A script may `import habana_frameworks.torch` and call
`gaudi_emulator.warmed_up()` once every shape has occurred: from then on a compilation is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from gaudi_emulator.lint import BOTH, RECOMPILING, LintRun, lint_script, print_json, print_text
from gaudi_emulator.releases import DEFAULT, RELEASES, EmulatorError, release_named
from lantern_hpu.commands.options import Parser, add_fields, from_args
from lantern_hpu.errors import OptionError, choices, exit_code, require
from lantern_hpu.fields import option
from lantern_hpu.graphs import RUNNERS
from lantern_hpu.methods.setting import METHODS, Setting

PROFILES = ("lazy", "compile")


@dataclass(frozen=True)
class LintRequest:
    """What is run on the emulated card, and what is shown of it."""

    model: str = option("builtin", "`builtin`, or a model folder")
    method: str = option("all", f"all, {', '.join(METHODS)}, or a setting such as scd@16:commit=4")
    graphs: str = option("auto", f"auto, {', '.join(RUNNERS)}")
    dtype: str = option(
        "auto",
        "number format of the weights: auto, bfloat16, float16, float32, as the device supports",
    )
    script: Path | None = option(
        None, "Python program to lint instead of the decode step", metavar="FILE.py"
    )
    args: tuple[str, ...] = option((), "arguments of the program")
    profile: str = option(
        "lazy", "`lazy` mode with HPU graphs, or `compile`: PT_HPU_LAZY_MODE=0 and torch.compile"
    )
    timeout: float = option(600.0, "time limit in seconds, for the program or each method")
    strict: bool = option(
        False, "exit with code 1 on errors, and on warnings that mean one compilation per input"
    )
    all: bool = option(False, "also show notes")
    json: bool = option(False, "print findings and counts as JSON")

    def __post_init__(self) -> None:
        require(self.timeout > 0, "timeout", self.timeout, "more than 0")
        require(self.profile in PROFILES, "profile", self.profile, choices(PROFILES))
        if self.method != "all":
            Setting.parse(self.method)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "lantern-hpu lint",
        description="Run code on an emulated Gaudi and report violations of its rules.",
    )
    add_fields(parser, LintRequest)
    what = f"release of Gaudi's software: {', '.join([*RELEASES, BOTH])} ({DEFAULT.name})"
    parser.add_argument("--bridge", metavar="RELEASE", help=what, default=DEFAULT.name)
    return parser


def lint_here(asked: LintRequest, bridge: str) -> LintRun:
    """The program or the model under one release, in this process."""
    release = release_named(bridge).name
    if asked.script:
        lazy = asked.profile == "lazy"
        card, ended = lint_script(asked.script, asked.args, lazy, asked.timeout, release)
        return LintRun.of(release, [card], ended)
    from lantern_lab.lint_model import lint_model

    compiles = asked.graphs == "auto" and asked.profile == "compile"
    cards, ended = lint_model(
        asked.model,
        list(METHODS) if asked.method == "all" else [asked.method],
        "compile" if compiles else asked.graphs,
        asked.dtype,
        asked.timeout,
        lambda line: print(line, file=sys.stderr),
        release,
    )
    return LintRun.of(release, cards, ended)


def lint_elsewhere(asked: LintRequest, bridge: str) -> LintRun:
    """The same in a process of its own: a program's imports and flags are those of one release."""
    fresh = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as process:
        try:
            return process.submit(lint_here, asked, bridge).result()
        except BrokenProcessPool:
            return LintRun(bridge, [], {}, "the process ended")


def lint_all(asked: LintRequest, bridge: str) -> int:
    """Print the findings. -> 1 if the program died, or there is what `--strict` refuses

    Raises:
        OptionError: the card had nothing to do.
    """
    if bridge == BOTH:
        runs = [lint_elsewhere(asked, name) for name in RELEASES]
    else:
        runs = [lint_here(asked, bridge)]
    from gaudi_emulator.rules import joined_over_releases  # which loads torch

    findings = joined_over_releases(run.findings for run in runs)
    if asked.json:
        print_json(runs, findings)
    else:
        print_text(runs, findings, asked.all)
    for run in runs:
        if run.ended is not None:
            under = f" under {run.release}" if len(runs) > 1 else ""
            print(f"the program ended{under} with {run.ended}", file=sys.stderr)
    recompiling = any(f.rule.id in RECOMPILING and f.severity == "warn" for f in findings)
    refused = recompiling or any(f.severity == "error" for f in findings)
    died = any(run.ended is not None for run in runs)
    if not died and not any(any(run.counts.values()) for run in runs):
        hint = "is the device of its tensors hpu, and is habana_frameworks.torch imported?"
        raise OptionError("nothing ran on hpu", "so nothing was checked", hint)
    return 1 if died or (asked.strict and refused) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The `lint` command: 0, 1 if the program died or `--strict` found an error, 2 for bad options."""
    args = make_parser().parse_args(argv)

    def command() -> int:
        asked = from_args(LintRequest, args)
        try:
            return lint_all(asked, args.bridge)
        except EmulatorError as error:
            raise OptionError(error.what, error.why, error.hint) from error

    return exit_code(command)
