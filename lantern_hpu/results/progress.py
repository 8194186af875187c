"""How far a run is: what a callback gets, and a bar with previews that shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from lantern_hpu.files import write_file
from lantern_hpu.results.images import encode, grid


@dataclass
class Event:
    """A progress event, for a callback.

    Attributes:
        rows, total_rows: image rows known, of all images of the run.
        running: images that are being drawn.
        tokens_per_step: of an image, mean so far.
        steps: decode steps of the batch so far. tokens: known so far, of all images.
        preview: draws what is known so far of those, grey where nothing is; a host read.
    """

    rows: int
    total_rows: int
    running: int
    tokens_per_step: float
    steps: int
    tokens: int
    preview: Callable[[], list[Image.Image]]


class Bar:
    """Progress in image rows, and previews on the way."""

    def __init__(self, preview: Path | None = None, every: int = 1, **options: Any) -> None:
        """
        Args:
            preview: a file to draw into, after `every` rows. options: of tqdm.
        """
        self.file, self.every, self.shown = preview, every, 0  # rows at the last preview
        usual = {"unit": "row", "file": sys.stderr, "dynamic_ncols": True, "leave": True}
        self.bar = tqdm(total=0, **usual | options)
        self.bar.set_description_str("warming up")

    def __call__(self, event: Event) -> None:
        self.bar.set_description_str("drawing", refresh=False)
        self.bar.total, self.bar.n = event.total_rows, event.rows
        self.bar.set_postfix_str(f"{event.tokens_per_step:.2f} tokens a step", refresh=False)
        self.bar.refresh()
        if self.file and event.running and event.rows - self.shown >= self.every * event.running:
            self.shown = event.rows
            write_file(self.file, encode(grid(event.preview())), force=True)

    def close(self) -> None:
        self.bar.close()
