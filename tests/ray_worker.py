"""What workers of a test do: draw as `generate` does, note it, and die once in the middle."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lantern_hpu.commands.generate_workers import open_job_worker
from lantern_hpu.pipeline import LanternPipeline


def open_mortal(args: Any, notes: str) -> Callable[[list[int]], tuple[int, list[str]]]:
    """The first of all workers that has drawn three images ends without a word."""
    real, folder = LanternPipeline.drawn, Path(notes)

    def drawn(self: LanternPipeline, done: Any, *rest: Any) -> Any:
        mine = list(folder.glob(f"{os.getpid()}-*"))
        if len(mine) >= 3:
            try:
                os.close(os.open(folder / "died", os.O_CREAT | os.O_EXCL))
                os._exit(1)
            except FileExistsError:
                pass
        found = real(self, done, *rest)
        (folder / f"{os.getpid()}-{done.request.seed}").touch()
        return found

    LanternPipeline.drawn = drawn  # type: ignore[method-assign, assignment]
    return open_job_worker(args)
