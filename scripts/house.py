"""How large the code is: lines, files and functions of each package, options, and the files that one prompt enters.

    python -m scripts.house                   print every figure
    python -m scripts.house --against main    and how much a package has gained since it left that branch
    python -m scripts.house --files           and name each file that `generate --prompt "a red apple"` enters

`tests/test_architecture.py` holds these figures below its limits.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

from scripts import ROOT

PRODUCT = ("lantern_hpu", "backends", "graphs")
PARTS = (*PRODUCT, "gaudi_emulator", "lantern_lab", "comfyui", "scripts", "docs")  # no tests
PYTHON, NATIVE, SCRIPT = (".py",), (".c", ".h"), (".js",)  # names of files end with
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Runs `generate` and writes the project's files whose functions were entered, in any thread.
TRACED = """
import sys, threading
from inspect import CO_OPTIMIZED
from pathlib import Path
output, root, *args = sys.argv[1:]
entered = set()
def note(frame, event, arg):
    code = frame.f_code  # of a function: no module or class body, nor a comprehension in one
    if event == "call" and code.co_flags & CO_OPTIMIZED and not code.co_name.startswith("<"):
        if code.co_filename.startswith(root):
            entered.add(code.co_filename)
sys.path.insert(0, root)
from lantern_hpu.cli import main
threading.setprofile(note)
sys.setprofile(note)
code = main(args)
sys.setprofile(None)
Path(output).write_text("\\n".join(sorted(str(Path(name).resolve()) for name in entered)))
sys.exit(code)
"""


def sources(part: str, endings: tuple[str, ...] = PYTHON, root: Path = ROOT) -> list[Path]:
    """The files of a package at the top of the repository; nothing behind a link counts twice."""
    return [
        file
        for folder, folders, names in os.walk(root / part)
        for file in (Path(folder) / name for name in names if name.endswith(endings))
    ]


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def lines_of(part: str, endings: tuple[str, ...] = PYTHON) -> int:
    files = sources(part, endings)
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def size_of(part: str, root: Path = ROOT) -> Counter[str]:
    """Lines, files and functions of a package."""
    size = Counter[str]()
    for file in sources(part, root=root):
        size["lines"] += len(file.read_text(encoding="utf-8").splitlines())
        size["files"] += 1
        size["functions"] += sum(isinstance(node, FUNCTIONS) for node in ast.walk(parsed(file)))
    return size


def size_of_all(parts: tuple[str, ...]) -> Counter[str]:
    return sum(map(size_of, parts), Counter[str]())


def gains(branch: str) -> dict[str, Counter[str]]:
    """How much each package has gained since the commit at which the branches parted."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout

    base = git("merge-base", "HEAD", branch).decode().strip()
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "-x", "-C", folder], input=git("archive", base), check=True)
        for part in (*PARTS, "tests"):
            result[part] = size_of(part)
            result[part].subtract(size_of(part, Path(folder)))
    return result


def function_lengths(part: str) -> Iterator[tuple[int, str]]:
    """(lines, where) of every function, without its decorators."""
    for file in sources(part):
        for node in ast.walk(parsed(file)):
            if isinstance(node, FUNCTIONS):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                yield length, f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"


def option_names(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a command and of its subcommands; what a file of `--config` alone gives is none."""
    names = set[str]()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            names.update(*map(option_names, action.choices.values()))
        if action.help != argparse.SUPPRESS:
            names.update(action.option_strings[-1:])
    return names - {"--help", "--version", "--config"}  # those of every command


def options() -> dict[str, int]:
    """How many options each command has."""
    from lantern_hpu.cli import COMMANDS, OF_MODELS, module_of

    parsers = {
        name: import_module(module_of(name)).make_parser() for name in (*COMMANDS, *OF_MODELS)
    }
    return {name: len(option_names(parser)) for name, parser in parsers.items()}


def files_of_a_prompt() -> list[str]:
    """The files whose functions run for README's first command, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "files.txt"
        args = ["generate", "--prompt", "a red apple", "--output", str(Path(folder) / "apple.png")]
        command = [sys.executable, "-c", TRACED, str(output), str(ROOT), *args]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            raise RuntimeError(done.stderr)
        files = (Path(line).relative_to(ROOT) for line in output.read_text().splitlines())
        return [str(file) for file in files if file.parts[0] in PARTS]  # not of a `.venv` here


def print_sizes(against: str | None) -> None:
    gained = gains(against) if against else {}
    for part in (*PARTS, "tests"):
        figures = [f"{number:>6} {name}" for name, number in size_of(part).items()]
        change = ", ".join(f"{n:+d} {name}" for name, n in gained.get(part, {}).items() if n)
        print(f"{part:<16}{' '.join(figures)}{change and f' ({change})'}")
    for name, parts in (("product", PRODUCT), ("all but tests", PARTS)):
        figures = [f"{number:>6} {name}" for name, number in size_of_all(parts).items()]
        print(f"{name:<16}{' '.join(figures)}")
    for name, endings in (("C", NATIVE), ("JavaScript", SCRIPT)):
        print(f"{name:<16}{sum(lines_of(part, endings) for part in PRODUCT):>6} lines")
    for path in sorted((ROOT / "lantern_hpu").iterdir()):
        if path.is_dir() and not path.is_symlink() and lines_of(f"lantern_hpu/{path.name}"):
            print(f"    {path.name:<12}{lines_of(f'lantern_hpu/{path.name}'):>6} lines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", action="store_true", help="name the files that a prompt enters")
    parser.add_argument("--against", metavar="BRANCH", help="compare with where it was left")
    args = parser.parse_args()
    print_sizes(args.against)
    lengths = sorted(length for part in PRODUCT for length, _ in function_lengths(part))
    print(f"lines of a function: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}")
    counts = options()
    several = ", ".join(f"{name} {number}" for name, number in counts.items())
    print(f"options: {sum(counts.values())} of {len(counts)} commands ({several})")
    files = files_of_a_prompt()
    print(f"files that a prompt enters: {len(files)}")
    if args.files:
        print("\n".join(f"    {name}" for name in files))


if __name__ == "__main__":
    main()
