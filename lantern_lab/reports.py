"""Reports of `lantern-hpu bench` as they are read: their schema, and what is wrong with a file. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from lantern_hpu.errors import Arg, OptionError, needing, shell, words
from lantern_hpu.files import reading
from lantern_lab.bench.columns import SpeedRow
from lantern_lab.bench.report import KIND, VERSION

SHOWN = 3  # problems that an error lists
LONGEST = 120  # characters of one
AGAIN = words("measure again:", shell("bench", Arg("output", "FILE.json")))
TYPES = {str: "string", int: "integer", float: "number", list: "array", NoneType: "null"}
Report = dict[str, Any]
# A report's fields by their types; a dictionary stands for an object, a tuple for what is allowed
REPORT = {
    "kind": (KIND,),
    "version": (VERSION,),
    "date": str,
    "command": str,
    "model": str,
    "dtype": str,
    "weights": {"target": str, "drafter": str | None},  # digests
    "environment": {"lantern_hpu": str, "python": str, "device": str, "torch": str, "...": None},
    "host": {"processor": str, "cores": int | None, "system": str},
    "device_title": str,  # what a reader calls the device
    "settings": {
        "sampling": dict.fromkeys(("cfg_scale", "temperature", "top_k", "top_p"), float),
        "seed": int,
        "prompts": list[str],
        "images": int | None,  # timed ones of each row, at least
        "warm_up": str,
        "...": None,
    },
    "sizes": dict.fromkeys(
        "body head drafter layers width kv_width prefix tokens rows_per_image number_bytes".split(),
        int,
    ),
    "weights_bytes": int,
    "rates": {
        "copy_bytes_per_s": float,
        "bf16_operations_per_s": float | None,
        "operations_per_s": float,  # in the run's own number format
        "how": str,
    },
    "startup": {"import_s": float, "load_s": float},
    "graphs": {"asked": list[str], "measured": list[str], "best": str},
    "notes": list[str],
}
OLDER = ("random_weights", "stretched")  # fields that earlier programs wrote


# ------------------------------------------------------------------------------------ the schema


def type_schema(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a value: a type, a union with None, a list, or a dictionary of these."""
    if isinstance(kind, tuple):
        return {"enum": [*kind]}
    if isinstance(kind, dict):
        known = {name: type_schema(value) for name, value in kind.items() if name != "..."}
        more = "..." in kind  # others are allowed, too
        object_of = {"type": "object", "properties": known, "required": [*known]}
        return object_of | {"additionalProperties": more}
    if get_origin(kind) is list:
        return {"type": "array", "items": type_schema(get_args(kind)[0])}
    kinds = get_args(kind) or (kind,)
    names = [TYPES[one] for one in kinds]
    least = {"minimum": 0} if {int, float} & {*kinds} else {}
    return {"type": names if len(names) > 1 else names[0], **least}


def row_schema() -> dict[str, Any]:
    """Of a row, from the fields of `SpeedRow`."""
    types, known, needed = get_type_hints(SpeedRow), {}, []
    for part in fields(SpeedRow):
        known[part.name] = type_schema(part.metadata.get("kind", types[part.name]))
        about = part.metadata.get("about")
        known[part.name] |= {"description": about} if about else {}
        if part.metadata.get("above_zero"):
            known[part.name] |= {"exclusiveMinimum": known[part.name].pop("minimum")}
        needed += [part.name] if not part.metadata.get("newer") else []
    older = {"projected": {"description": "of earlier programs; not read"}}
    every = {"type": "object", "properties": known | older, "required": needed}
    return every | {"additionalProperties": False}


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a report."""
    result = type_schema(REPORT)
    result["properties"] |= {name: {} for name in OLDER}
    result["properties"]["rows"] = {"type": "array", "items": row_schema(), "minItems": 1}
    result["required"].append("rows")
    about = "Seconds, bytes and counts; ms where a name says so. Every figure was measured."
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A report of {KIND}",
        "description": about,
        **result,
    }


def schema_errors(data: Any) -> list[str]:
    """What in a report breaks the schema, each with its place."""
    with needing("jsonschema", "it checks reports", "compare"):
        from jsonschema import Draft202012Validator
    result = []
    for error in Draft202012Validator(schema()).iter_errors(data):
        place = error.json_path.removeprefix("$").removeprefix(".")
        text = f"{place or 'the report'}: {error.message}"
        result.append(text if len(text) <= LONGEST else text[: LONGEST - 3] + "...")
    return result


# ------------------------------------------------------------------------------------ reading


def check_report(data: Any, name: str) -> Report:
    """A report, if it is one of this version."""
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind != KIND:
        why = f"its kind is {kind!r}, not {KIND!r}" if kind else "it does not say so"
        raise OptionError(f"{name} is not a report of {KIND}", why, AGAIN)
    version = data.get("version", 1)
    if version != VERSION:
        what = f"{name} is a report of version {version!r}, and this program reads {VERSION}"
        newer = isinstance(version, int) and version > VERSION
        hint = "the lantern_hpu that wrote it" if newer else AGAIN
        raise OptionError(what, "a newer program wrote it" if newer else "it is too old", hint)
    result = schema_errors(data)
    if result:
        more = f"; and {len(result) - SHOWN} more" if len(result) > SHOWN else ""
        raise OptionError(f"{name} is damaged", "; ".join(result[:SHOWN]) + more, AGAIN)
    return dict(data)


def read_report(path: Path) -> Report:
    with reading(path, AGAIN) as data:
        json.dumps(data, allow_nan=False)  # JSON has no NaN, though Python's reader takes it
        return check_report(data, str(path))
