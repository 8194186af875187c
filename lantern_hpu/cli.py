"""The `lantern-hpu` program: finds the command and hands over to its module.

    lantern-hpu generate --prompt "a red apple"

Each command is a module with a `main(argv)` of its own and also runs as `python -m lantern_hpu.<command>`.
A command's module is imported only when it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from lantern_hpu import __version__
from lantern_hpu.errors import OptionError, choices


@dataclass(frozen=True)
class Command:
    """Where a command lives, and its line in `--help`."""

    module: str
    help: str


COMMANDS = {
    "generate": Command("lantern_hpu.generate", "draw images from prompts"),
    "decode": Command("lantern_hpu.decode.__main__", "make pictures of saved tokens"),
    "models": Command(
        "lantern_hpu.models.__main__", "list the known models, and what of them is here"
    ),
    "download": Command("lantern_hpu.download", "fetch a known model"),
    "convert": Command("lantern_hpu.convert", "turn published checkpoints into one model folder"),
    "plan": Command("lantern_hpu.plan.__main__", "count the memory that a model takes"),
    "bench": Command("lantern_hpu.bench.__main__", "compare methods and graph modes"),
    "compare": Command(
        "lantern_hpu.compare.__main__", "put benchmarks beside each other: table, plots, a page"
    ),
    "doctor": Command("lantern_hpu.doctor", "show what this machine offers and what is wrong"),
    "lint": Command("lantern_hpu.lint", "name the rules of Gaudi that code breaks"),
    "verify": Command("lantern_hpu.verify.__main__", "ask a device whether it is as expected"),
    "evaluate": Command(
        "lantern_hpu.evaluate.__main__", "score what methods draw: quality against speed"
    ),
    "fidelity": Command("lantern_hpu.fidelity", "measure how far methods move what is drawn"),
    "serve": Command("lantern_hpu.serve.__main__", "serve a model over HTTP"),
    "train": Command("lantern_hpu.train.__main__", "train a drafter for a target"),
    "tree": Command("lantern_hpu.tree.__main__", "list and draw draft trees"),
    "tune": Command("lantern_hpu.tune.__main__", "find the draft tree that is fastest here"),
}


def help_text() -> str:
    """What `--help` prints."""
    lines = [f"  {name:<12}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lantern-hpu [--help] [--version] COMMAND ...",
            "",
            "Fast drawing with visual autoregressive models.",
            "",
            "commands:",
            *lines,
            "",
            "lantern-hpu COMMAND --help has the options of a command.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args:
        print(help_text(), file=sys.stderr)
        return 2
    name, *rest = args
    if name in ("-h", "--help"):
        print(help_text())
        return 0
    if name == "--version":
        print(f"lantern_hpu {__version__}")
        return 0
    if name not in COMMANDS:
        error = OptionError(f"unknown command {name!r}", hint=choices(COMMANDS))
        print(f"error: {error}", file=sys.stderr)
        return 2
    code: int = import_module(COMMANDS[name].module).main(rest)
    return code


if __name__ == "__main__":
    sys.exit(main())
