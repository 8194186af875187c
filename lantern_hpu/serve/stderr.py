"""Standard error that holds nobody up: what is said there is written by a thread of its own. Needs no torch."""

from __future__ import annotations

import io
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

KEPT = 4096  # texts that wait for somebody to read them; later ones are lost
CLOSING = 1.0  # seconds in which the last ones have to be read


class Unhurried(io.TextIOBase):
    """A stream into a file descriptor, for all threads; writing to it never waits."""

    def __init__(self, descriptor: int, encoding: str = "utf-8") -> None:
        self.descriptor, self.code, self.lost = descriptor, encoding, 0
        self.waiting = queue.Queue[bytes](KEPT)
        threading.Thread(target=self.run, name="stderr", daemon=True).start()

    def write(self, text: str) -> int:
        if self.closed:  # the descriptor may be another file's by now
            return 0
        try:
            self.waiting.put_nowait(text.encode(self.code, "backslashreplace"))
        except queue.Full:
            self.lost += 1
        return len(text)

    def run(self) -> None:
        while True:
            data = self.waiting.get()
            lost, self.lost = self.lost, 0
            if lost:
                data += b"(%d lines are lost: nobody read them)\n" % lost
            with suppress(OSError):  # the reader is gone, or the disk full
                while data:
                    data = data[os.write(self.descriptor, data) :]
            self.waiting.task_done()

    def flush(self) -> None:
        """Does nothing: who logs a line flushes it."""

    def close(self) -> None:
        end = time.monotonic() + CLOSING
        while self.waiting.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)
        super().close()

    def fileno(self) -> int:
        return self.descriptor

    def isatty(self) -> bool:
        return os.isatty(self.descriptor)


@contextmanager
def unhurried_stderr() -> Iterator[None]:
    """What this process says on standard error meanwhile holds nothing up, its end neither.

    For what is imported within, too: torch's loggers keep the stream that they find.
    """
    before = sys.stderr
    try:
        made = Unhurried(before.fileno(), before.encoding)
    except (AttributeError, OSError, ValueError):  # there is none, or it is in memory
        yield
        return
    sys.stderr = made
    try:
        yield
    finally:
        made.close()
        sys.stderr = before
