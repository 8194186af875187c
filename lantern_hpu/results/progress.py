"""How far a run is: a bar, and previews on the way."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lantern_hpu.console import Console
from lantern_hpu.core import Event
from lantern_hpu.files import write_file
from lantern_hpu.results.images import encode, grid

LINES = 4  # of a log, after the first
PAUSE = 30.0  # seconds after which it has another one
SILENT = 2.0  # seconds of a warm-up that say nothing


class ProgressBar(tqdm):
    """tqdm's bar on a terminal; in a file or a pipe a line at each quarter, and after each half minute."""

    def __init__(self, total: int = 0, unit: str = "part", **options: Any) -> None:
        """
        Args:
            options: of tqdm; `disable` given says nothing anywhere.
        """
        self.out = Console(sys.stderr)
        self.log = "disable" not in options and not self.out.isatty()
        self.next, self.due = 0.0, 0.0  # share, and seconds, at which the next line is due
        self.began, self.first = time.monotonic(), options.get("initial", 0)
        self.words = unit + ("es" if unit.endswith("ch") else "s")
        usual: dict[str, Any] = {"file": self.out, "dynamic_ncols": True, "disable": self.log}
        self.desc = options.get("desc") or ""
        self.postfix = ""  # which tqdm does not set where it is disabled
        super().__init__(total=total, unit=unit, **usual | options)

    def update(self, n: float | None = 1) -> bool | None:
        if self.log:
            self.n += n or 0
            self.refresh()
        return super().update(n)

    def refresh(self, *args: Any, **options: Any) -> bool | None:
        share, now = self.n / self.total if self.total else -1.0, time.monotonic()
        if self.log and (share >= self.next or (share > 0 and now >= self.due)):
            self.next, self.due = math.floor(share * LINES + 1) / LINES, now + PAUSE
            what = (self.desc or "").rstrip(": ") or "done"
            said = [f"{what}: {self.n:g} of {self.total:g} {self.words}"]
            said += [self.postfix] if self.postfix else []
            new, spent = self.n - self.first, now - self.began  # a run may go on with another's
            if share < 1 and spent * new > 0.1 * self.total:  # or too little was seen of it
                said.append(f"{tqdm.format_interval(spent * (self.total - self.n) / new)} left")
            print(*said, sep=", ", file=self.out, flush=True)
        return super().refresh(*args, **options)


class Bar:
    """Progress in image rows, and previews on the way."""

    def __init__(
        self,
        preview: Path | None = None,
        every: int = 1,
        slow: Callable[[], str] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            preview: a file to draw into, after `every` rows. options: of tqdm.
            slow: is asked for a line where the warm-up takes more than two seconds.
        """
        self.file, self.every, self.shown = preview, every, 0  # rows at the last preview
        self.bar = ProgressBar(unit="row", **options)
        self.bar.set_description_str("warming up")
        self.waiting = threading.Timer(
            SILENT, lambda: slow and self.bar.write(slow(), self.bar.out)
        )
        self.waiting.daemon = True
        if slow:
            self.waiting.start()

    def __call__(self, event: Event) -> None:
        self.waiting.cancel()
        if self.bar.total == 0:
            self.bar.began = time.monotonic()  # without the warm-up
        self.bar.set_description_str("drawing", refresh=False)
        self.bar.total, self.bar.n = event.total_rows, event.rows
        self.bar.set_postfix_str(f"{event.tokens_per_step:.2f} tokens a step", refresh=False)
        self.bar.refresh()
        if self.file and event.running and event.rows - self.shown >= self.every * event.running:
            self.shown = event.rows
            write_file(self.file, encode(grid(event.preview())), force=True)

    def close(self) -> None:
        self.waiting.cancel()
        self.bar.close()
