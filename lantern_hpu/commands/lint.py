"""What Gaudi would say to this code, on a machine without one.

    lantern-hpu lint --strict                 the embedded model, every method
    lantern-hpu lint --script my_model.py     your own code

Code runs on the emulated card, `backends/hpu/emulator`; `rules.py` there has the rules. Each that is broken is printed
with the line that broke it, why it matters, and what to write instead. A script may `import habana_frameworks.torch`
and call `lantern_hpu.backends.hpu.lint.warmed_up()` once every shape has occurred: from then on a compilation is an
error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lantern_hpu.backends.hpu.lint import RECOMPILING, lint_counts, lint_script, merged, text
from lantern_hpu.backends.hpu.releases import choose_release, emulated
from lantern_hpu.commands.options import add_bridge_option
from lantern_hpu.errors import LanternError, OptionError, choices, exit_code, require
from lantern_hpu.graphs import RUNNERS
from lantern_hpu.methods.table import METHODS

PROFILES = ("lazy", "compile")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern-hpu lint",
        description="Run code on an emulated Gaudi and name every rule that it breaks.",
    )
    add = parser.add_argument
    add("--model", default="builtin", help="`builtin`, or a model folder (builtin)")
    add("--method", default="all", help=f"all, {', '.join(METHODS)} (all)")
    add("--graphs", default="auto", help=f"auto, {', '.join(RUNNERS)} (auto)")
    add("--dtype", default="auto", help="auto, or one the device offers (auto)")
    add("--script", type=Path, metavar="FILE.py", help="a program of your own")
    add("--args", nargs="*", default=[], help="what the program gets")
    profile = "`lazy` mode with HPU graphs, or `compile`: PT_HPU_LAZY_MODE=0 and torch.compile"
    add("--profile", default="lazy", help=f"{profile} (lazy)")
    add_bridge_option(parser)
    timeout = "seconds that the program, or each method, may take (600)"
    add("--timeout", type=float, default=600.0, help=timeout)
    strict = "exit code 1 on any error, and on any warning that means a compilation for each input"
    add("--strict", action="store_true", help=strict)
    add("--all", action="store_true", help="show what is merely worth knowing too")
    add("--json", action="store_true", help="findings and counts, for programs")
    return parser


def check_lint_options(args: argparse.Namespace) -> None:
    """Raise an OptionError if an option is out of range."""
    require(args.timeout > 0, "--timeout", args.timeout, "more than 0")
    require(args.profile in PROFILES, "--profile", args.profile, choices(PROFILES))
    if args.method not in ("all", *METHODS):
        raise OptionError(f"unknown method {args.method!r}", hint=choices(["all", *METHODS]))


def lint_all(args: argparse.Namespace) -> int:
    """Print the findings. -> 1 if the program died, or there is what `--strict` refuses"""
    if args.script:
        card, ended = lint_script(args.script, args.args, args.profile == "lazy", args.timeout)
        cards = [card]
    else:
        from lantern_hpu.lab.lint import lint_model

        compiles = args.graphs == "auto" and args.profile == "compile"
        cards, ended = lint_model(
            args.model,
            list(METHODS) if args.method == "all" else [args.method],
            "compile" if compiles else args.graphs,
            args.dtype,
            args.timeout,
            lambda line: print(line, file=sys.stderr),
        )
    findings, counts, release = merged(cards), lint_counts(cards), emulated()
    if args.json:
        rows = [finding.as_dict() for finding in findings]
        print(json.dumps({"release": release.name, "findings": rows, "counts": counts}, indent=2))
    else:
        shown = [f for f in findings if args.all or f.severity != "info"]
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
    return 1 if ended is not None or (args.strict and refused) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The `lint` command: 0, 1 if the program died or `--strict` found an error, 2 for bad options."""
    args = make_parser().parse_args(argv)
    refused = 0

    def work() -> None:
        nonlocal refused
        check_lint_options(args)
        choose_release(args.bridge)
        refused = lint_all(args)

    code = exit_code(work)
    return code or refused
