"""Reports of `lantern_hpu.bench`: read one, and say clearly why it cannot be used. Needs no torch.

`assets/bench.schema.json` is the contract, a JSON Schema of the draft 2020-12. What it uses of that language is
small, so a reader for that much is here, and errors name the place in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lantern_hpu.errors import OptionError
from lantern_hpu.hub import ASSETS

SCHEMA = ASSETS / "bench.schema.json"
KIND, VERSION = "lantern_hpu.bench", 2
SHOWN = 3  # problems that an error lists
AGAIN = "measure again: python -m lantern_hpu.bench --output FILE.json"
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
Report = dict[str, Any]


@cache
def schema() -> dict[str, Any]:
    """The schema of a report."""
    found: dict[str, Any] = json.loads(SCHEMA.read_text())
    return found


def problems(value: Any, rule: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """What in a value breaks a rule of the schema, with its place."""
    place = where or "the report"
    if "const" in rule and value != rule["const"]:
        yield f"{place} is {shown(value)}, not {shown(rule['const'])}"
    if "enum" in rule and value not in rule["enum"]:
        yield f"{place} is {shown(value)}, not one of {', '.join(map(str, rule['enum']))}"
    if "type" in rule and not has_type(value, rule["type"]):
        names = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
        yield f"{place} is {shown(value)}, not of type {' or '.join(names)}"
        return
    if isinstance(value, dict):
        yield from of_object(value, rule, where)
    elif isinstance(value, list):
        if len(value) < rule.get("minItems", 0):
            yield f"{place} has {len(value)} entries, fewer than {rule['minItems']}"
        for index, entry in enumerate(value):
            yield from problems(entry, rule.get("items", {}), f"{where}[{index}]")
    elif isinstance(value, int | float):
        if value < rule.get("minimum", value):
            yield f"{place} is {value}, below {rule['minimum']}"
        if "exclusiveMinimum" in rule and value <= rule["exclusiveMinimum"]:
            yield f"{place} is {value}, not above {rule['exclusiveMinimum']}"


def of_object(value: Mapping[str, Any], rule: Mapping[str, Any], where: str) -> Iterator[str]:
    """What in an object breaks its rule."""
    known = rule.get("properties", {})
    for name in rule.get("required", ()):
        if name not in value:
            yield f"{where or 'the report'} lacks {name}"
    for name, entry in value.items():
        below = f"{where}.{name}" if where else name
        if name in known:
            yield from problems(entry, known[name], below)
        elif rule.get("additionalProperties") is False:
            yield f"{below} is unknown"


def has_type(value: Any, names: str | list[str]) -> bool:
    """Whether a value is of one of the types; a truth value is no number."""
    wanted = [names] if isinstance(names, str) else names
    return not isinstance(value, bool) and any(isinstance(value, TYPES[name]) for name in wanted)


def shown(value: Any) -> str:
    """A value in an error message."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def check_report(data: Any, name: str) -> Report:
    """A report, if it is one of this version.

    Raises:
        OptionError: of another kind or version, or against the schema.
    """
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind != KIND:
        why = f"its kind is {shown(kind)}, not {shown(KIND)}" if kind else "it does not say so"
        raise OptionError(f"{name} is no report of {KIND}", why, AGAIN)
    version = data.get("version", 1)
    if version != VERSION:
        what = f"{name} is a report of version {shown(version)}, and this program reads {VERSION}"
        newer = isinstance(version, int) and version > VERSION
        hint = "a newer lantern_hpu, as wrote it" if newer else AGAIN
        raise OptionError(what, "a newer program wrote it" if newer else "it is too old", hint)
    found = list(problems(data, schema()))
    if found:
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        why = "; ".join(found[:SHOWN]) + more
        raise OptionError(f"{name} is damaged", why, AGAIN)
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
        raise OptionError(f"{path} is no report of {KIND}", "it is not text", AGAIN) from error
    if not text.strip():
        raise OptionError(f"{path} is empty", "its run was cut off, or wrote elsewhere", AGAIN)
    try:
        data = json.loads(text, parse_constant=refuse_constant)
    except ValueError as error:
        raise OptionError(f"{path} is cut off, or is not JSON", str(error), AGAIN) from error
    return check_report(data, str(path))
