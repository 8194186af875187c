"""Standard streams that may be missing, closed, full or unread, and delay nothing; a server's log. Needs no torch."""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import Any

KEPT = 4096  # texts that wait for a reader; later ones are lost
CLOSING = 1.0  # seconds in which the last ones have to be read


class Console(io.TextIOBase):
    """A stream for what may be lost: what it cannot take, as it is closed or its disk is full, is left out."""

    def __init__(self, stream: Any) -> None:
        """
        Args:
            stream: None where the process has none, as a program without a window or a daemon.
        """
        self.stream = stream

    def write(self, text: str) -> int:
        with suppress(AttributeError, OSError, ValueError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(AttributeError, OSError, ValueError):
            self.stream.flush()

    def isatty(self) -> bool:
        with suppress(AttributeError, ValueError):
            return bool(self.stream.isatty())
        return False

    def fileno(self) -> int:
        return super().fileno() if self.stream is None else int(self.stream.fileno())

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.stream, "encoding", None) or "utf-8"


def open_streams() -> None:
    """Let a process go on whose standard streams are closed or full.

    No file that is opened later takes the number of a closed one, which libraries write to.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if not isinstance(sys.stderr, Console):
        replace_unshown(sys.stderr)
        sys.stderr = Console(sys.stderr)
    if sys.stdout is None:
        sys.stdout = Console(None)


def replace_unshown(stream: Any) -> None:
    """What a console cannot show is written as an escape."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


class NonBlockingStream(io.TextIOBase):
    """A stream into a file descriptor, for all threads: writing to it never waits, as a thread of its own writes."""

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
                said = f"{lost} lines are lost: they were not read"
                data += f"{log_line(time.time(), 'WARNING', said)}\n".encode()
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
def nonblocking_stderr() -> Iterator[None]:
    """What this process says on standard error meanwhile holds nothing up, its end neither.

    For what is imported within, too: torch's loggers keep the stream that they find.
    """
    before = sys.stderr
    try:
        made = NonBlockingStream(before.fileno(), before.encoding)
    except (AttributeError, OSError, ValueError):  # there is none, or it is in memory
        yield
        return
    sys.stderr = made
    try:
        yield
    finally:
        made.close()
        sys.stderr = before


# ------------------------------------------------------------------------------------ the log of a server


def log_line(seconds: float, level: str, text: str, terminal: bool = False) -> str:
    """A line of the log, of JSON or for a terminal: `seconds` since 1970 as UTC, and a text or an object of JSON."""
    at = datetime.fromtimestamp(seconds, timezone.utc)
    shown = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if terminal:
        return f"{shown} {level.lower()} {text}"
    said = {"message": text}
    if text.startswith('{"'):
        with suppress(ValueError):  # of a library's line that only begins so
            said = json.loads(text)
    return json.dumps({"time": shown, "level": level.lower(), **said})


class LogFormatter(logging.Formatter):
    """`log_line` of each record."""

    terminal = False

    def format(self, record: logging.LogRecord) -> str:
        return log_line(record.created, record.levelname, super().format(record), self.terminal)


def start_log() -> None:
    """Let all loggers and warnings of this process write to standard error, each line in one form."""
    handler, form = logging.StreamHandler(sys.stderr), LogFormatter()
    form.terminal = sys.stderr.isatty()
    handler.setFormatter(form)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.captureWarnings(True)


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """`start_log`, and what was there before afterwards."""
    handlers, level = logging.root.handlers[:], logging.root.level
    logging.root.handlers = []  # or they would be closed
    start_log()
    try:
        yield
    finally:
        logging.captureWarnings(False)
        logging.basicConfig(level=level, handlers=handlers, force=True)
