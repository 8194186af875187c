"""Reports of `lantern-hpu bench`: read one, and say clearly why it cannot be used. Needs no torch.

`assets/bench.schema.json` is the contract, a JSON Schema of the draft 2020-12.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from lantern_hpu.errors import OptionError, needing
from lantern_hpu.files import ASSETS, parse_json

SCHEMA = ASSETS / "bench.schema.json"
KIND, VERSION = "lantern_hpu.bench", 2
SHOWN = 3  # problems that an error lists
LONGEST = 120  # characters of one
AGAIN = "measure again: lantern-hpu bench --output FILE.json"
Report = dict[str, Any]


@cache
def schema() -> dict[str, Any]:
    """The schema of a report."""
    result: dict[str, Any] = json.loads(SCHEMA.read_text())
    return result


def schema_errors(data: Any) -> list[str]:
    """What in a report breaks the schema, each with its place.

    Raises:
        OptionError: jsonschema is not installed.
    """
    with needing("jsonschema", "it checks reports", "compare"):
        from jsonschema import Draft202012Validator
    result = []
    for error in Draft202012Validator(schema()).iter_errors(data):
        place = error.json_path.removeprefix("$").removeprefix(".")
        text = f"{place or 'the report'}: {error.message}"
        result.append(text if len(text) <= LONGEST else text[: LONGEST - 3] + "...")
    return result


def check_report(data: Any, name: str) -> Report:
    """A report, if it is one of this version.

    Raises:
        OptionError: of another kind or version, or against the schema.
    """
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind != KIND:
        why = f"its kind is {kind!r}, not {KIND!r}" if kind else "it does not say so"
        raise OptionError(f"{name} is not a report of {KIND}", why, AGAIN)
    version = data.get("version", 1)
    if version != VERSION:
        what = f"{name} is a report of version {version!r}, and this program reads {VERSION}"
        newer = isinstance(version, int) and version > VERSION
        hint = "a newer lantern_hpu, as wrote it" if newer else AGAIN
        raise OptionError(what, "a newer program wrote it" if newer else "it is too old", hint)
    result = schema_errors(data)
    if result:
        more = f"; and {len(result) - SHOWN} more" if len(result) > SHOWN else ""
        raise OptionError(f"{name} is damaged", "; ".join(result[:SHOWN]) + more, AGAIN)
    return dict(data)


def refuse_constant(name: str) -> Any:
    """JSON has no NaN and no infinity, whatever Python's reader takes."""
    raise ValueError(f"{name} is no number of JSON")


def read_report(path: Path) -> Report:
    """The report in a file.

    Raises:
        OptionError: unreadable, empty, cut off, or see `check_report`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot read {path}", error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not a report of {KIND}", "it is not text", AGAIN) from error
    if not text.strip():
        raise OptionError(f"{path} is empty", "its run was cut off, or wrote elsewhere", AGAIN)
    try:
        data = parse_json(text, parse_constant=refuse_constant)
    except ValueError as error:
        raise OptionError(f"{path} is cut off, or is not JSON", str(error), AGAIN) from error
    return check_report(data, str(path))
