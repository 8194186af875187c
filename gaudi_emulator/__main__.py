"""A program on an emulated card, or the lint of one; `gaudi-emulator` is the same.

python -m gaudi_emulator [--bridge RELEASE] SCRIPT.py ...      or -m MODULE ...
python -m gaudi_emulator lint [--strict] SCRIPT.py ...         or -m MODULE ..., such as -m pytest tests/
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import gaudi_emulator
from gaudi_emulator import lint
from gaudi_emulator.releases import EmulatorError


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return lint.main(words[1:]) if words[:1] == ["lint"] else run(words)
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
    lint.run_program(words[0], words[1:], bool(args.module))
    return 0


if __name__ == "__main__":
    sys.exit(main())
