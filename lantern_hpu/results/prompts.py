"""Prompts: from files, and those that measurements draw. Needs no torch."""

from __future__ import annotations

import csv
from pathlib import Path

from lantern_hpu.errors import OptionError
from lantern_hpu.files import parse_json

PROMPTS = (
    "a red apple, snowy mountains at sunrise, a lighthouse in a storm, a sailboat on the sea at sunset, "
    "a red balloon over green hills, a cactus in the desert, a house by a lake at night, pine trees on a foggy morning"
).split(", ")
# For models that draw by class
CLASSES = (
    "golden retriever, volcano, balloon, macaw, lakeside, cheeseburger, steam locomotive, daisy"
).split(", ")


def usual_prompts(takes_classes: bool) -> list[str]:
    """What a measurement draws with a model where nothing else is asked for."""
    return CLASSES if takes_classes else PROMPTS


def read_prompts(file: Path) -> list[str]:
    """Prompts of a text file (one a line), a TSV (column `prompt`/`Prompt`, else the first) or a JSON list.

    Raises:
        OptionError: unreadable, of another kind, or without prompts.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            data = parse_json(text)
            rows = [row["prompt"] if isinstance(row, dict) else row for row in data]
            odd = [place for place, row in enumerate(rows) if not isinstance(row, str)]
            if odd:
                raise ValueError(f"entry {odd[0]} is no text")
        elif file.suffix == ".tsv":
            lines = list(csv.reader(text.splitlines(), delimiter="\t"))
            head = [cell.strip().lower() for cell in lines[0]] if lines else []
            column = head.index("prompt") if "prompt" in head else 0
            rows = [line[column] for line in lines[1 if "prompt" in head else 0 :] if line]
        elif file.suffix == ".txt":
            rows = text.splitlines()
        else:
            raise OptionError(f"{file} is of an unknown format", "expected .txt, .tsv or .json")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise OptionError(f"cannot read prompts from {file}", str(error)) from error
    prompts = [row.strip() for row in rows if row.strip()]
    if not prompts:
        raise OptionError(f"{file} holds no prompts")
    return prompts
