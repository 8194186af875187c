"""A server in a process of its own, on a free port of the loopback address."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lantern_hpu.errors import OptionError

PATIENCE = 300  # seconds for it to be ready, to answer, and to stop


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=PATIENCE):
            return True
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def serving(
    command: Sequence[str | Path], log: Path, **options: Any
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address and the process of `command --port PORT`, once it is ready; it is ended afterwards.

    Args:
        log: what it prints. options: of the process.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, command = f"http://127.0.0.1:{port}", [*command, "--port", str(port)]
    with log.open("w") as lines:
        process = subprocess.Popen(command, stdout=lines, stderr=subprocess.STDOUT, **options)
    try:
        until = time.monotonic() + PATIENCE
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > until:
                raise OptionError("the server did not become ready", log.read_text()[-2000:])
            time.sleep(0.2)
        yield url, process
    finally:
        process.kill()
        process.wait()
