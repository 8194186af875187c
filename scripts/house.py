"""How large the code is: lines a package, dataclasses, options of `generate`, and the files that one prompt enters.

    python -m scripts.house                   print every figure
    python -m scripts.house --against main    and how many lines a package has gained since it left that branch
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
from collections.abc import Iterator
from pathlib import Path

from scripts import ROOT

PRODUCT = ("lantern_hpu", "backends", "graphs")
PARTS = (*PRODUCT, "gaudi_emulator", "lantern_lab", "scripts", "docs")
PYTHON, NATIVE, SCRIPT = (".py",), (".c", ".h"), (".js",)  # names of files end with

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


def lines_of(part: str, endings: tuple[str, ...] = PYTHON, root: Path = ROOT) -> int:
    files = sources(part, endings, root)
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def lines_since(branch: str) -> dict[str, int]:
    """Lines of Python that each package gained since the commit at which the branches parted."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout

    base = git("merge-base", "HEAD", branch).decode().strip()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "-x", "-C", folder], input=git("archive", base), check=True)
        before = {part: lines_of(part, root=Path(folder)) for part in (*PARTS, "tests")}
    return {part: lines_of(part) - count for part, count in before.items()}


def is_dataclass(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def dataclasses_of(part: str) -> int:
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in sources(part))
    return sum(is_dataclass(node) for tree in trees for node in ast.walk(tree))


def function_lengths(part: str) -> Iterator[tuple[int, str]]:
    """(lines, where) of every function, without its decorators."""
    for file in sources(part):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                yield length, f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"


def options_of_generate() -> int:
    from lantern_hpu.commands.generate import make_parser

    names = [
        action.option_strings[-1] for action in make_parser()._actions if action.option_strings
    ]
    return len(set(names) - {"--help", "--version", "--config"})  # those of every command


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", action="store_true", help="name the files that a prompt enters")
    parser.add_argument("--against", metavar="BRANCH", help="compare with where it was left")
    args = parser.parse_args()
    gained = lines_since(args.against) if args.against else {}
    for part in (*PARTS, "tests"):
        change = f" ({gained[part]:+d})" if gained else ""
        print(f"{part:<16}{lines_of(part):>7} lines{change}, {dataclasses_of(part)} dataclasses")
    for name, endings in (("C", NATIVE), ("JavaScript", SCRIPT)):
        print(f"{name:<16}{sum(lines_of(part, endings) for part in PRODUCT):>7}")
    folders = sorted(path.name for path in (ROOT / "lantern_hpu").iterdir() if path.is_dir())
    for name in folders:
        print(f"    {name:<12}{lines_of(f'lantern_hpu/{name}'):>7}")
    product = sum(map(lines_of, PRODUCT))
    print(f"{'product':<16}{product:>7}; all but tests {sum(map(lines_of, PARTS))}")
    lengths = sorted(length for part in PRODUCT for length, _ in function_lengths(part))
    print(f"functions: median {lengths[len(lengths) // 2]}, 90th percentile ", end="")
    print(f"{lengths[len(lengths) * 9 // 10]}, longest {lengths[-1]}")
    print(f"options of generate: {options_of_generate()}")
    files = files_of_a_prompt()
    print(f"files that a prompt enters: {len(files)}")
    if args.files:
        print("\n".join(f"    {name}" for name in files))


if __name__ == "__main__":
    main()
