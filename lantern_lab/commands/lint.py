"""What Gaudi would say to this code, on a machine without one.

    lantern-hpu lint --strict                 the embedded model, every method
    lantern-hpu lint my_model.py              your own code; -m pytest tests/: your tests
    lantern-hpu lint --transformers llama     a model of transformers, small and random
    lantern-hpu lint --bridge both            under every release of Gaudi's software that was read

Code runs on the emulated card; `gaudi_emulator/rules.txt` has the rules. Each that is broken is printed with the
line that broke it, why it matters, and what to write instead. A script may `import habana_frameworks.torch` and call
`gaudi_emulator.warmed_up()` once every shape has occurred: from then on a compilation is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from gaudi_emulator.__main__ import lint_transformers
from gaudi_emulator.lint import Ended, add_options, asked_program, lint
from gaudi_emulator.releases import EmulatorError
from lantern_hpu.commands.options import Parser, add_fields, from_args
from lantern_hpu.errors import OptionError, exit_code
from lantern_hpu.fields import option
from lantern_hpu.graphs import RUNNERS
from lantern_hpu.methods.setting import METHODS, Setting

if TYPE_CHECKING:
    from gaudi_emulator.device import Device


@dataclass(frozen=True)
class ModelRequest:
    """What of a model is run on the emulated card, if no program is."""

    model: str = option("builtin", "`builtin`, or a model folder")
    method: str = option("all", f"all, {', '.join(METHODS)}, or a setting such as scd@16:commit=4")
    graphs: str = option("auto", f"auto, {', '.join(RUNNERS)}")
    dtype: str = option(
        "auto",
        "number format of the weights: auto, bfloat16, float16, float32, as the device supports",
    )

    def __post_init__(self) -> None:
        if self.method != "all":
            Setting.parse(self.method)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "lantern-hpu lint",
        description="Run code on an emulated Gaudi and report violations of its rules.",
    )
    add_fields(parser, ModelRequest)
    about = "Python program to lint instead of the decode step, as without this word"
    parser.add_argument("--script", metavar="FILE.py", help=about)
    add_options(parser)
    return parser


def lint_step(
    asked: ModelRequest, profile: str | None, timeout: float, release: str
) -> tuple[list[Device], Ended]:
    """The decode step under one release; see `lint_model`."""
    from lantern_lab.lint_model import lint_model

    return lint_model(
        asked.model,
        list(METHODS) if asked.method == "all" else [asked.method],
        "compile" if asked.graphs == "auto" and profile == "compile" else asked.graphs,
        asked.dtype,
        timeout,
        lambda line: print(line, file=sys.stderr),
        release,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The `lint` command: 0, 1 if the program died or `--strict` found an error, 2 for bad options."""
    args = make_parser().parse_args(argv)
    if args.script:
        args.program = [args.script, *args.program]

    def command() -> int:
        step = partial(lint_step, from_args(ModelRequest, args), args.profile, args.timeout)
        try:
            if args.transformers:
                return lint_transformers(args)
            return lint(asked_program(args) or step, args)
        except EmulatorError as error:
            raise OptionError(error.what, error.why, error.hint) from error

    return exit_code(command)
