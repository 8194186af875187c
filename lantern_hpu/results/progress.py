"""How far a run is: what a callback gets, and a bar with previews that shows it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from lantern_hpu.files import write_file
from lantern_hpu.results.images import encode, grid

LINES = 4  # of a log, beside the first


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
        self.log = not options and not sys.stderr.isatty()  # a file or a pipe gets lines
        self.next = 0.0  # share of the rows at which the next line is due
        options |= {"disable": True} if self.log else {}
        self.bar = tqdm(total=0, **usual | options)
        self.bar.set_description_str("warming up")

    def __call__(self, event: Event) -> None:
        self.bar.set_description_str("drawing", refresh=False)
        self.bar.total, self.bar.n = event.total_rows, event.rows
        self.bar.set_postfix_str(f"{event.tokens_per_step:.2f} tokens a step", refresh=False)
        self.bar.refresh()
        share = event.rows / max(event.total_rows, 1)
        if self.log and share >= self.next:
            self.next = math.floor(share * LINES + 1) / LINES
            said = f"{event.rows} of {event.total_rows} rows, {event.tokens_per_step:.2f} tokens a step"
            print(f"drawing: {said}", file=sys.stderr, flush=True)
        if self.file and event.running and event.rows - self.shown >= self.every * event.running:
            self.shown = event.rows
            write_file(self.file, encode(grid(event.preview())), force=True)

    def close(self) -> None:
        self.bar.close()
