"""Reports of measurements: what each begins with, and how they are written. Needs no torch."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.files import write_file

if TYPE_CHECKING:
    from lantern_hpu.pipeline import LanternPipeline

KIND, VERSION = "lantern_hpu.bench", 2


def heading(kind: str, pipeline: LanternPipeline, argv: Sequence[str]) -> dict[str, Any]:
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
