"""Each command that a page shows is one that its program takes: the options are parsed, nothing is run.

What is run besides: README and docs/recipes.md in test_readme.py, the tutorial in test_site.py.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lantern_hpu import cli

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "llms.txt")),
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if "generated" not in p.parts),
]
FENCED, INDENTED = r"^```(?:bash|shell|console)\n(.*?)^```", r"(?:^ {4}\S.*\n(?: {8}.*\n)*)+"
# Of a name alone no option is parsed
INLINE = r"(?<!`)`((?:lantern-hpu [^`]+ --|python -m (?:scripts|lantern_hpu)\.)[^`]+)`(?!`)"
STARTS = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(lantern-hpu|gaudi|python -m (?:lantern_hpu\.generate|scripts\.[\w.]+)) "
)
VARIABLES = {"$TREES": "--trees chain,broad_7", "$card": "3", "${card}": "3"}  # that the pages set


class ParsedError(Exception):
    """The arguments are fine."""


def commands(page: Path) -> list[list[str]]:
    """The words of each command of ours on a page, in blocks and in lines."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(FENCED, text, re.M | re.S) + re.findall(INDENTED, text, re.M)
    lines = [line.strip() for b in blocks for line in b.replace("\\\n", " ").splitlines()]
    lines += [re.sub(r"\s+", " ", found) for found in re.findall(INLINE, text)]
    parts = (part.strip() for line in lines for part in re.split(r"&&|\||&$", line))
    ours = dict.fromkeys(part for part in parts if STARTS.match(f"{part} "))
    return [words(part) for part in ours if "COMMAND" not in part]


def words(command: str) -> list[str]:
    """A program, as a module, and its arguments."""
    for name, value in VARIABLES.items():
        command = command.replace(name, value)
    given = shlex.split(command, comments=True)
    while re.match(r"[A-Z_]+=", given[0]):
        given.pop(0)
    if given[0] == "python":
        return given[2:] if given[2] != "lantern_hpu.generate" else ["generate", *given[3:]]
    return given[1:]


LISTED = [(page, given) for page in PAGES for given in commands(page)]


def test_pages_have_the_commands_that_are_looked_for() -> None:
    by_page = {page.name: len(commands(page)) for page in PAGES}
    assert by_page["tutorial.md"] >= 10 and by_page["models.md"] >= 20 and by_page["README.md"] >= 6
    assert ["generate", "--device", "hpu", "--prompt", "a red apple", "--output", "apple.png"] in [
        given for page, given in LISTED if page.name == "gaudi.md"
    ], "also one that a shell function of the page hands on"


@pytest.mark.parametrize(
    ("page", "given"), LISTED, ids=[f"{page.name}: {' '.join(given)}" for page, given in LISTED]
)
def test_command_of_a_page_is_parsed(
    page: Path, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = argparse.ArgumentParser.parse_args

    def parse_args(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        real(self, *args, **kwargs)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    name, *rest = given
    if not name.startswith("scripts."):
        assert name in cli.COMMANDS, page
        with pytest.raises(ParsedError):
            cli.main(given)
        return
    monkeypatch.setattr(sys, "argv", [name, *rest])
    main = import_module(name).main
    with pytest.raises(ParsedError):
        main()
