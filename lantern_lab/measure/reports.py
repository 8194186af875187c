"""Reports of measurements: what each begins with, how they are written and read. Needs no torch."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.errors import Arg, OptionError, shell, words
from lantern_hpu.files import reading, write_file
from lantern_lab.measure.rows import IDENTITY, NEWER, SPEED, Row, speed_tables

if TYPE_CHECKING:
    from lantern_hpu.pipeline import LanternPipeline

KIND, VERSION = "lantern_hpu.bench", 2
AGAIN = words("measure again:", shell("bench", Arg("output", "FILE.json")))
Report = dict[str, Any]


def heading(kind: str, pipeline: LanternPipeline, argv: Sequence[str]) -> Report:
    """The fields that every report begins with; its kind is `lantern_hpu.` and the command's name."""
    from lantern_hpu.backends.base import dtype_name

    return {
        "kind": kind,
        "date": datetime.date.today().isoformat(),
        "command": f"lantern-hpu {kind.partition('.')[2]} " + " ".join(argv),
        "model": pipeline.model.name,
        "dtype": dtype_name(pipeline.model.target.dtype),
        "environment": pipeline.environment(),
    }


def write_report(file: Path, report: Mapping[str, Any], force: bool = False) -> None:
    write_file(file, json.dumps(report, indent=1).encode(), force)


def show_report(report: Mapping[str, Any], text: str, output: Path | None, force: bool) -> None:
    """Print the tables of a report, and write it where a file is named."""
    print(text)
    if output:
        write_report(output, report, force)
        print(f"wrote {output}")


# ------------------------------------------------------------------------------------ reading those of `bench`

# What must be equal for reports to be compared at all: how it is called, and where it is found
SAME: dict[str, Callable[[Report], Any]] = {
    "model": lambda r: r["model"],
    "weights": lambda r: r["weights"]["target"],
    "drafter": lambda r: r["weights"]["drafter"],
    "tokens of an image": lambda r: r["sizes"]["tokens"],
    "sampling": lambda r: r["settings"]["sampling"],
    "seed": lambda r: r["settings"]["seed"],
    "prompts": lambda r: r["settings"]["prompts"],
}
# What may differ, and is named
NAMED: dict[str, tuple[Callable[[Report], Any], str]] = {
    "number format": (lambda r: r["dtype"], "their rows are apart; one dtype makes them alike"),
    "images": (lambda r: r["settings"]["images"], "the means are over other images"),
    "kernels": (lambda r: r["settings"].get("kernels", "auto"), "a device's own were switched off"),
    "lantern_hpu": (lambda r: r["environment"]["lantern_hpu"], "the code may differ"),
}


def damage_of(report: Report) -> str:
    """What a report of this version lacks, or which of its figures is no number; empty for a whole one."""
    try:
        for get in (*SAME.values(), *(get for get, _ in NAMED.values())):
            get(report)
        for group, name in (("graphs", "best"), ("settings", "warm_up")):
            report[group][name]
        if not report["rows"]:
            return "it has no rows"
        for number, row in enumerate(report["rows"]):
            if missing := [name for name in (*IDENTITY, *SPEED) if name not in NEWER | row]:
                return f"rows[{number}] lacks {missing[0]}"
        speed_tables(report)
        return ""
    except KeyError as error:
        return f"it lacks {error}"
    except (TypeError, ValueError, AttributeError, LookupError, OptionError) as error:
        return str(error)


def check_report(data: Report, name: str) -> Report:
    """A report of `bench`, if it is one of this version.

    Raises:
        OptionError: it is of another kind or version, or damaged.
    """
    kind = data.get("kind")
    if kind != KIND:
        why = f"its kind is {kind!r}, not {KIND!r}" if kind else "it does not say so"
        raise OptionError(f"{name} is not a report of {KIND}", why, AGAIN)
    version = data.get("version", 1)
    if version != VERSION:
        what = f"{name} is a report of version {version!r}, and this program reads {VERSION}"
        newer = isinstance(version, int) and version > VERSION
        hint = "the lantern_hpu that wrote it" if newer else AGAIN
        raise OptionError(what, "a newer program wrote it" if newer else "it is too old", hint)
    if damage := damage_of(data):
        raise OptionError(f"{name} is damaged", damage[:200], AGAIN)
    return data


def read_report(path: Path) -> Report:
    with reading(path, AGAIN) as data:
        json.dumps(data, allow_nan=False)  # JSON has no NaN, though Python's reader takes it
        return check_report(data, str(path))


def rows_of(report: Report) -> tuple[Row, ...]:
    return tuple(map(Row.from_json, report["rows"]))
