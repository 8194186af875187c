"""Files of measurements: what each says about how it came about, and how it is shown. Needs no torch."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.files import write_file

if TYPE_CHECKING:
    from lantern_hpu.pipeline import LanternPipeline


def heading(module: str, pipeline: LanternPipeline, argv: Sequence[str]) -> dict[str, Any]:
    """What every file of measurements says about how it came about.

    Args:
        module: the command's, which is the kind of the file. argv: what the command was given.
    """
    from lantern_hpu.backends.base import named

    return {
        "kind": module,
        "date": datetime.date.today().isoformat(),
        "command": f"lantern-hpu {module.partition('.')[2]} " + " ".join(argv),
        "model": pipeline.model.name,
        "dtype": named(pipeline.model.target.dtype),
        "environment": pipeline.environment(),
    }


def show(result: dict[str, Any], text: str, output: Path | None, force: bool) -> None:
    """Print the tables, and write the whole result where a file is named.

    Args:
        force: whether an existing file is replaced.

    Raises:
        OutputError: the file exists, or cannot be written.
    """
    print(text)
    if output:
        write_file(output, json.dumps(result, indent=2).encode(), force)
        print(f"wrote {output}")
