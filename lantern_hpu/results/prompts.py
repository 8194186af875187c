"""Prompts: those of measurements, and lists as people and programs save them. Needs no torch."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lantern_hpu.core import IMAGENET_CLASSES, check_text
from lantern_hpu.errors import OptionError
from lantern_hpu.files import MOST_TEXT, parse_json, read_text, text_of

# What measurements draw
PROMPTS = (
    "a red apple, snowy mountains at sunrise, a lighthouse in a storm, a sailboat on the sea at sunset, "
    "a red balloon over green hills, a cactus in the desert, a house by a lake at night, pine trees on a foggy morning"
).split(", ")
# For models that draw by class of ImageNet
CLASSES = (
    "golden retriever, volcano, balloon, macaw, lakeside, cheeseburger, steam locomotive, daisy"
).split(", ")

NAMES = ("prompt", "prompts", "text", "texts", "caption", "captions")  # of a column or field
STDIN = Path("-")  # as a file: standard input, a prompt a line
HOLDERS = ("annotations", "data")  # of a list of objects; the first is COCO's
OR = "prompt, text or caption"
MARKS = {".csv": ",;\t", ".tsv": "\t,;"}  # between cells, the usual one first


def usual_prompts(classes: int) -> list[str]:
    """What a measurement draws with a model of so many classes, 0 of one that reads texts."""
    if classes == IMAGENET_CLASSES:
        return CLASSES
    return [str(index) for index in range(min(classes, len(CLASSES)))] or PROMPTS


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file: see `numbered_prompts`."""
    return list(numbered_prompts(file).values())


def numbered_prompts(file: Path) -> dict[int, str]:
    """Prompts by their place: a blank entry of a table or of JSON is not drawn, and keeps its number.

    Text (one a line), a table (.tsv or .csv; a column `prompt`, `text` or `caption`, or no other column), JSON or lines
    of JSON: texts, objects with such a field, objects or lists of those, COCO's captions.

    Raises:
        OptionError: the file cannot be read, or what it means is not certain.
    """
    readers: dict[str, Callable[[str], list[str]]] = {
        ".txt": lambda text: [line for line in text.split("\n") if line.strip()],
        ".json": of_json,
        ".jsonl": of_json,
        **{kind: partial(of_table, marks=marks) for kind, marks in MARKS.items()},
    }
    piped = file == STDIN
    read = readers.get(".txt" if piped else file.suffix.lower())
    if read is None:
        what = f"{file} is of an unknown format"
        raise OptionError(what, f"expected {', '.join(readers)}", "one prompt a line in a .txt")
    try:
        text = text_of(sys.stdin.buffer.read(MOST_TEXT + 1)) if piped else read_text(file)
        entries = [entry.strip() for entry in read(text)]
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read prompts from {file}", str(error)) from error
    prompts = {place: entry for place, entry in enumerate(entries) if entry}
    if not prompts:
        raise OptionError(f"{file} holds no prompts")
    for place, prompt in prompts.items():
        check_text(f"prompt {place} of {file}", prompt)
    return prompts


def of_json(text: str) -> list[str]:
    """The texts of one value, or of one a line."""
    try:
        return list(texts_in(parse_json(text, object_pairs_hook=once_each), "it"))
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
    result = list[str]()
    for number, line in enumerate(text.split("\n"), 1):
        try:
            value = parse_json(line or "[]", object_pairs_hook=once_each)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: {error.msg}") from error
        result += texts_in(value, f"line {number}")
    return result


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict[str, Any]()
    for name, value in pairs:
        if name in result:
            raise ValueError(f"an object has {name!r} twice")
        result[name] = value
    return result


def texts_in(data: Any, where: str, within: bool = False) -> Iterator[str]:
    """The texts that a value of JSON means; `where` it is, for messages, and whether it is within a list already."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, list) and not within:
        for place, entry in enumerate(data):
            yield from texts_in(entry, f"entry {place}", True)
    elif isinstance(data, dict):
        fields = {name.strip().lower(): value for name, value in data.items()}
        named = next((name for name in (*NAMES, *HOLDERS) if name in fields), None)
        if named is not None:
            yield from texts_in(fields[named], f"{named!r} of {where}")
        elif not all(isinstance(data[name], dict) or name.isdigit() for name in data):
            raise ValueError(f"{where} has {', '.join(data)[:200]}, and no {OR}")
        else:  # a name or number each, as LANTERN's script and pandas write them
            for name, value in data.items():
                yield from texts_in(value, repr(name), True)
    else:
        raise ValueError(f"{where} is not text: {json.dumps(data)[:60]}")


def of_table(text: str, marks: str) -> list[str]:
    if text.startswith("sep="):  # Excel's
        text = text.partition("\n")[2]
    for mark in marks:
        rows = rows_of(text, mark)
        head = [cell.strip().lower() for cell in rows[0]] if rows else []
        column = next((head.index(name) for name in NAMES if name in head), None)
        if column is None:
            continue
        for number, row in enumerate(rows, 1):
            if any(row[len(head) :]):
                why = f"row {number} has {len(row)} cells, the first has {len(head)}"
                raise ValueError(f"{why}: put cells with {mark!r} in quotes")
        return [row[column] if len(row) > column else "" for row in rows[1:]]
    rows = rows_of(text, marks[0])
    if any(len(row) > 1 for row in rows):
        raise ValueError(f"its first row names no column {OR}: {rows[0]}"[:300])
    return [row[0] for row in rows]


def rows_of(text: str, mark: str) -> list[list[str]]:
    """The cells of each row that is not an empty line; a quote without its pair makes all quotes text."""
    file = io.StringIO(text, newline="")
    try:
        rows = [*csv.reader(file, delimiter=mark, skipinitialspace=mark != "\t", strict=True)]
    except csv.Error:
        rows = [row.split(mark) for row in text.split("\n") if row]
    return [row for row in rows if row]
