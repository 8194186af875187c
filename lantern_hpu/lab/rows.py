"""Reports of measurements: the fields that all of them share, and how they are printed and written. Needs no torch."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.files import write_file

if TYPE_CHECKING:
    from lantern_hpu.pipeline import LanternPipeline


def heading(kind: str, pipeline: LanternPipeline, argv: Sequence[str]) -> dict[str, Any]:
    """The fields that every report begins with.

    Args:
        kind: of the report, `lantern_hpu.` and the command's name. argv: the command's arguments.
    """
    from lantern_hpu.backends.base import dtype_name

    return {
        "kind": kind,
        "date": datetime.date.today().isoformat(),
        "command": f"lantern-hpu {kind.partition('.')[2]} " + " ".join(argv),
        "model": pipeline.model.name,
        "dtype": dtype_name(pipeline.model.target.dtype),
        "environment": pipeline.environment(),
    }


def write_rows(file: Path, report: Mapping[str, Any], force: bool = False) -> None:
    """Write a report as JSON.

    Raises:
        OutputError: the file exists and `force` is off, or it cannot be written.
    """
    write_file(file, json.dumps(report, indent=1).encode(), force)


def show_report(report: Mapping[str, Any], text: str, output: Path | None, force: bool) -> None:
    """Print the tables of a report, and write it where a file is named.

    Args:
        force: whether an existing file is replaced.

    Raises:
        OutputError: see `write_rows`.
    """
    print(text)
    if output:
        write_rows(output, report, force)
        print(f"wrote {output}")
