"""A new folder that takes its name when all of it is written, so that a killed run leaves none that is half."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from lantern_hpu.errors import OutputError
from lantern_hpu.files import lock_file

UNFINISHED = ".converting"  # ends the name of a folder that is being written


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A lock on a folder that ends with its process, however that ends; where there are no such locks, none.

    Raises:
        OSError: another process holds it.
    """
    if os.name != "posix":  # a folder can be neither opened nor locked there
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        lock_file(opened)
        yield
    finally:
        os.close(opened)


def clear_killed(output: Path) -> None:
    """Remove what runs that were killed left beside an output; folders that another run still fills are held."""
    for folder in output.parent.glob(f".{escape(output.name)}.*{UNFINISHED}"):
        with suppress(OSError), held(folder):
            shutil.rmtree(folder)


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A new folder beside the output, which takes its name when all is written, and is removed otherwise.

    Raises:
        OutputError: it cannot be written.
    """
    from safetensors import SafetensorError

    folder = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        clear_killed(output)
        folder = Path(tempfile.mkdtemp(UNFINISHED, f".{output.name}.", output.parent))
        with held(folder):
            yield folder
        mask = os.umask(0)
        os.umask(mask)
        folder.chmod(0o777 & ~mask)
        for file in folder.iterdir():  # some libraries write for their user alone
            file.chmod(0o666 & ~mask)
        os.replace(folder, output)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"cannot write {output}", why, "another folder or disk") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
