"""A program on an emulated card, or the lint of one; `gaudi-emulator` is the same.

python -m gaudi_emulator [--bridge RELEASE] SCRIPT.py ...      or -m MODULE ...
python -m gaudi_emulator lint [--strict] SCRIPT.py ...         or -m MODULE ..., such as -m pytest tests/
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import gaudi_emulator
from gaudi_emulator.lint import (
    BOTH,
    PROFILES,
    add_options,
    asked_program,
    check_options,
    lint,
    run_program,
)
from gaudi_emulator.releases import EmulatorError


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return lint_command(words[1:]) if words[:1] == ["lint"] else run(words)
    except EmulatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(argv: Sequence[str]) -> int:
    about = "Run a Python program on an emulated Gaudi; `gaudi-emulator lint` reports the rules that it violates."
    parser = argparse.ArgumentParser("gaudi-emulator", description=about)
    add, rest = parser.add_argument, argparse.REMAINDER
    add("--bridge", metavar="RELEASE", help="release of Gaudi's software: 1.24 or 1.19 (1.24)")
    add("-m", nargs=rest, dest="module", help="MODULE ARGUMENTS: run a module")
    add("program", nargs=rest, metavar="SCRIPT.py ARGUMENTS", help="run a file")
    args = parser.parse_args(argv)
    words = args.module or args.program
    if not words:
        parser.error("name a program")
    gaudi_emulator.install(args.bridge)
    run_program(words[0], words[1:], bool(args.module))
    return 0


def lint_command(argv: Sequence[str]) -> int:
    """0, 1 if the program died or `--strict` found an error, 2 for bad options."""
    about = "Run a program on an emulated Gaudi and report violations of its rules."
    parser = argparse.ArgumentParser("gaudi-emulator lint", description=about)
    add_options(parser)
    args = parser.parse_args(argv)
    if args.transformers:
        return lint_transformers(args)
    linted = asked_program(args)
    if linted is None:
        parser.error("name a program: FILE.py, or -m MODULE")
    return lint(linted, args)


def lint_transformers(args: argparse.Namespace) -> int:
    """`lint` of a model of transformers, mode by mode."""
    from gaudi_emulator.transformers_models import lint_model_type

    check_options(args)
    args.bridge = args.bridge or BOTH
    profiles = [args.profile] if args.profile else PROFILES
    if args.format == "json" and len(profiles) > 1:
        raise EmulatorError(
            "--format json is of one mode", hint="--profile lazy, --profile compile"
        )
    codes = []
    for profile in profiles:
        if args.format == "text":
            print(f"{args.transformers}, {profile} mode", flush=True)
        linted = partial(lint_model_type, args.transformers, profile == "lazy", args.timeout)
        codes.append(lint(linted, args))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
