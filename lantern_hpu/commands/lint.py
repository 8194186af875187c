"""What Gaudi would say to this code, on a machine without one.

    lantern-hpu lint --strict                 the embedded model, every method
    lantern-hpu lint --script my_model.py     your own code

Code runs on the emulated card, `backends/hpu/emulator`; `lint_rules.py` there has the rules. Each that is broken is
printed with the line that broke it, why it matters, and what to write instead. A script may
`import habana_frameworks.torch` and call `lantern_hpu.backends.hpu.lint.warmed_up()` once every shape has occurred:
from then on a compilation is an error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lantern_hpu.backends.hpu.lint import RECOMPILING, lint_counts, lint_script, merged, text
from lantern_hpu.backends.hpu.releases import choose_release, emulated
from lantern_hpu.commands.options import add_bridge_option, add_fields, filled
from lantern_hpu.errors import LanternError, OptionError, choices, exit_code, option, require
from lantern_hpu.graphs import RUNNERS
from lantern_hpu.methods.table import METHODS

PROFILES = ("lazy", "compile")


@dataclass(frozen=True)
class LintRequest:
    """What is run on the emulated card, and what is shown of it.

    Raises:
        OptionError: an option is out of range.
    """

    model: str = option("builtin", "`builtin`, or a model folder")
    method: str = option("all", f"all, {', '.join(METHODS)}")
    graphs: str = option("auto", f"auto, {', '.join(RUNNERS)}")
    dtype: str = option("auto", "auto, or one the device offers")
    script: Path | None = option(None, "a program of your own", metavar="FILE.py")
    args: tuple[str, ...] = option((), "what the program gets")
    profile: str = option(
        "lazy", "`lazy` mode with HPU graphs, or `compile`: PT_HPU_LAZY_MODE=0 and torch.compile"
    )
    timeout: float = option(600.0, "seconds that the program, or each method, may take")
    strict: bool = option(
        False,
        "exit code 1 on any error, and on any warning that means a compilation for each input",
    )
    all: bool = option(False, "show what is merely worth knowing too")
    json: bool = option(False, "findings and counts, for programs")

    def __post_init__(self) -> None:
        require(self.timeout > 0, "--timeout", self.timeout, "more than 0")
        require(self.profile in PROFILES, "--profile", self.profile, choices(PROFILES))
        if self.method not in ("all", *METHODS):
            raise OptionError(f"unknown method {self.method!r}", hint=choices(["all", *METHODS]))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern-hpu lint",
        description="Run code on an emulated Gaudi and name every rule that it breaks.",
    )
    add_fields(parser, LintRequest)
    add_bridge_option(parser)
    return parser


def lint_all(asked: LintRequest) -> int:
    """Print the findings. -> 1 if the program died, or there is what `--strict` refuses"""
    if asked.script:
        card, ended = lint_script(asked.script, asked.args, asked.profile == "lazy", asked.timeout)
        cards = [card]
    else:
        from lantern_hpu.lab.lint import lint_model

        compiles = asked.graphs == "auto" and asked.profile == "compile"
        cards, ended = lint_model(
            asked.model,
            list(METHODS) if asked.method == "all" else [asked.method],
            "compile" if compiles else asked.graphs,
            asked.dtype,
            asked.timeout,
            lambda line: print(line, file=sys.stderr),
        )
    findings, counts, release = merged(cards), lint_counts(cards), emulated()
    if asked.json:
        rows = [finding.as_dict() for finding in findings]
        print(json.dumps({"release": release.name, "findings": rows, "counts": counts}, indent=2))
    else:
        shown = [f for f in findings if asked.all or f.severity != "info"]
        if shown:
            print(text(shown))
        kinds = [f.severity for f in findings]
        errors, warnings, notes = (kinds.count(kind) for kind in ("error", "warn", "info"))
        print(f"{errors} errors, {warnings} warnings, {notes} notes ({release})")
        print(", ".join(f"{value} {name.replace('_', ' ')}" for name, value in counts.items()))
    if ended is not None:
        # Without the hint of an error of ours: it may advise to run the lint.
        message = f"{ended.what}: {ended.why}" if isinstance(ended, LanternError) else str(ended)
        print(f"the program ended with {type(ended).__name__}: {message}", file=sys.stderr)
    recompiling = any(f.rule.id in RECOMPILING and f.severity == "warn" for f in findings)
    refused = recompiling or any(f.severity == "error" for f in findings)
    return 1 if ended is not None or (asked.strict and refused) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The `lint` command: 0, 1 if the program died or `--strict` found an error, 2 for bad options."""
    args = make_parser().parse_args(argv)

    def command() -> int:
        asked = filled(LintRequest, args)
        choose_release(args.bridge)
        return lint_all(asked)

    return exit_code(command)
