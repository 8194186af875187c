"""`python -m gaudi_emulator [--bridge RELEASE] SCRIPT.py ...` or `... -m MODULE ...`: a program on an emulated card."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

import gaudi_emulator
from gaudi_emulator.releases import EmulatorError


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m gaudi_emulator", description="Run a Python program on an emulated Gaudi."
    )
    add, rest = parser.add_argument, argparse.REMAINDER
    add("--bridge", metavar="RELEASE", help="release of Gaudi's software: 1.24 or 1.19 (1.24)")
    add("-m", nargs=rest, metavar=("MODULE", "ARGUMENTS"), dest="module", help="run a module")
    add("program", nargs=rest, metavar="SCRIPT.py ARGUMENTS", help="run a file")
    args = parser.parse_args()
    program = args.module or args.program
    if not program:
        parser.error("name a program")

    try:
        gaudi_emulator.install(args.bridge)
    except EmulatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sys.argv = program
    if args.module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
