"""Defaults of options from a TOML file and from environment variables. Needs no torch.

The command line wins over variables, and variables win over the file. A key is the name of an option with underscores:
`slots = 4` in the file of `--config`, or `LANTERN_HPU_SLOTS=4`. Some options of a command are keys alone.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PREFIX = "LANTERN_HPU_"
UNSET = ("help", "version", "config")  # no keys
# As a variable it is what `auto` takes, which a command's --device may replace
AUTO_DEVICE = "device"


def words_of(parser: argparse.ArgumentParser, args: Sequence[str]) -> list[str]:
    """What the file and the variables give, as words of a command line, to stand in front of those of the user.

    Raises:
        ValueError: of a file that cannot be read, has an unknown key, or a value of another type.
    """
    options = {
        name[2:].replace("-", "_"): action
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    }
    options = {key: action for key, action in options.items() if key not in UNSET}
    variables = {key: os.environ.get(PREFIX + key.upper(), "") for key in options}
    given = read_values(args, options) | {key: text for key, text in variables.items() if text}
    if variables.get(AUTO_DEVICE):
        del given[AUTO_DEVICE]
    words = [words_of_option(options[key], key, value) for key, value in given.items()]
    # Those of several values first, so that the next one is no positional argument
    flat = [word for several in sorted(words, key=len, reverse=True) for word in several]
    return [*flat, "--config="] if flat else []


def read_values(args: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the file of `--config` among some words; nothing without one."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", nargs="?")
    name = finder.parse_known_args(args)[0].config
    if not name:
        return {}
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        given = tomllib.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{name} cannot be read: {why}") from error
    for key in given.keys() - known.keys():
        near = difflib.get_close_matches(key, known, 1, 0.0)
        raise ValueError(f"{name} has an unknown key {key}\n  try: {near[0]}")
    return given


def words_of_option(action: argparse.Action, key: str, value: Any) -> list[str]:
    """An option of the command line with a value of TOML, or with the text of a variable."""
    name = action.option_strings[-1]
    if action.nargs == 0:
        switches = {"true": [name], "1": [name], "false": [], "0": []}
        if str(value).lower() not in switches:
            raise ValueError(f"{key} is {value!r}\n  try: true or false")
        return switches[str(value).lower()]
    values = value if isinstance(value, list) else [value]
    if any(isinstance(each, bool | dict | list) for each in values):
        raise ValueError(f"{key} is {value!r}\n  try: text, a number, or a list of them")
    texts = [str(each) for each in values]
    if isinstance(action, argparse._AppendAction):
        return [f"{name}={text}" for text in texts]
    if action.nargs is None:
        return [f"{name}={','.join(texts)}"]
    several = value.split() if isinstance(value, str) else texts
    return [name, *several] if several else []
