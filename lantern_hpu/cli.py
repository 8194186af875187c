"""The `lantern-hpu` program: finds the command and hands over to its module.

    lantern-hpu generate --prompt "a red apple"

`python -m lantern_hpu COMMAND` is the same. A command's module is imported only when it is asked for.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from lantern_hpu import __version__
from lantern_hpu.backends import BACKENDS
from lantern_hpu.console import open_streams
from lantern_hpu.errors import Arg, OptionError, as_option, choices, exit_code

# Each is a module of `lantern_hpu.commands` with a `main(argv)`, imported only when it is asked for.
COMMANDS = {
    "generate": "generate images from prompts",
    "serve": "serve a model over HTTP",
    "models": "list, show, plan, download, convert and stretch models",
    "pixels": "decode saved tokens to images",
    "doctor": "show what this machine offers and what is wrong",
    "train": "train a drafter for a target",
    "tune": "find the window or draft tree that is fastest here",
    "race": "draw one prompt with several methods: a table and a GIF",
    "bench": "compare methods and graph modes",
    "compare": "put benchmarks side by side: a table and a chart",
    "fidelity": "measure how far each method shifts the output distribution",
    "evaluate": "score what methods draw: quality against speed",
    "verify": "check a device against the expected results",
    "lint": "report the Gaudi rules that a program violates",
}
# What `models` does besides listing: the second word of a command
OF_MODELS = ("models plan", "models download", "models convert", "models stretch")
# Commands of the other packages, which the product does not import
OUTSIDE = {
    "bench": "lantern_lab.commands.bench",
    "tune": "lantern_lab.commands.tune",
    "train": "lantern_lab.commands.train",
    "compare": "lantern_lab.commands.compare",
    "fidelity": "lantern_lab.commands.fidelity",
    "race": "lantern_lab.commands.race",
    "models stretch": "lantern_lab.commands.stretch",
    "evaluate": "lantern_lab.commands.evaluate",
    "verify": "lantern_lab.commands.verify",
    "lint": "lantern_lab.commands.lint",
}
RENAMED = {name.removeprefix("models "): name for name in OF_MODELS}  # commands of earlier versions


def module_of(command: str) -> str:
    """Where a command is defined."""
    return OUTSIDE.get(command, f"lantern_hpu.commands.{command.removeprefix('models ')}")


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command that the words of a command line begin with, and the others."""
    first_two = " ".join(words[:2])
    count = 2 if first_two in OF_MODELS else 1
    return " ".join(words[:count]), list(words[count:])


def help_text() -> str:
    """What `--help` prints."""
    commands = "\n".join(f"  {name:<12}{text}" for name, text in COMMANDS.items())
    return f"""usage: lantern-hpu [--help] [--version] COMMAND ...

Fast drawing with visual autoregressive models.

commands:
{commands}

lantern-hpu COMMAND --help has the options of a command.
COMMAND --device hpu --emulate [--bridge RELEASE] runs it on an emulated Gaudi (1.24, 1.19)."""


def end_on_sigterm() -> None:
    """The first process of a container ignores SIGTERM until it has a handler: here it ends, as any other does."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    open_streams()
    end_on_sigterm()
    args = list(sys.argv[1:] if argv is None else argv)
    if not args:
        print(help_text(), file=sys.stderr)
        return 2
    name, rest = split_command(args)
    if name in ("-h", "--help"):
        print(help_text())
        return 0
    if name == "--version":
        print(f"lantern_hpu {__version__}")
        return 0
    if name not in (*COMMANDS, *OF_MODELS):
        error = OptionError(f"unknown command {name!r}", hint=choices(COMMANDS, name))
        if name in RENAMED:
            now = shlex.join(["lantern-hpu", *RENAMED[name].split(), *rest])
            error = OptionError(f"{name!r} is now {RENAMED[name]!r}", hint=now)
        print(f"error: {error.text(as_option)}", file=sys.stderr)
        return 2
    return run_emulated(name, rest) if "--emulate" in rest else run(name, rest)


def run(name: str, args: Sequence[str]) -> int:
    gc.set_threshold(50_000)  # torch makes 200,000 objects as it is imported, none of them garbage
    code: int = import_module(module_of(name)).main(args)
    return code


def run_emulated(name: str, args: Sequence[str]) -> int:
    """The same command, on the emulated Gaudi."""
    device = next(name for name, known in BACKENDS.items() if known.without)
    parser = argparse.ArgumentParser(f"lantern-hpu {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--bridge")
    parser.add_argument("--device", default=device)
    asked, rest = parser.parse_known_args(args)

    def command() -> int:
        if asked.device != device:
            raise OptionError(f"{asked.device} cannot be emulated", hint=Arg("device", device))
        try:
            emulation = import_module("gaudi_emulator").emulate(asked.bridge)
        except ValueError as error:
            raise OptionError(str(error)) from error
        with emulation:
            return run(name, [*rest, "--device", device])

    return exit_code(command)
