"""Steps that inductor compiled, kept on this machine so that the next process starts in seconds.

torch keeps what it compiles and loads it again unchecked: a damaged library ends in an error, or computes something
else. So it gets a folder of ours, one for each torch and processor, beside a list of sha256 digests. What is not as
listed is deleted before torch reads it, and compiled again.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from lantern_hpu.backends.host import cpuinfo, processor_name
from lantern_hpu.errors import LanternError
from lantern_hpu.files import cache_folder, lock_file, parse_json, sha256, write_file

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # where torch looks
# By the user; torch sets it as well, once its compiler is imported
GIVEN = os.environ.get(VARIABLE)
LIST = "sha256.json"


class CompileCache:
    """A checked folder, which no other process clears while this one runs.

    Attributes:
        folder: of files that torch wrote. cleared: how many were not as listed, and are deleted.
    """

    def __init__(self, home: Path) -> None:
        self.list, self.folder = home / LIST, home / "files"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(home / ".lock", "ab")  # noqa: SIM115 - held until the process ends
        alone, listed = locked(self.lock.fileno()), self.listed()
        damaged, unlisted = [], []
        for file in self.files():
            if self.name(file) not in listed:
                unlisted.append(file)
            elif sha256(file) != listed[self.name(file)]:
                damaged.append(file)
        if damaged and not alone:
            raise OSError(f"{self.name(damaged[0])} is damaged, and another process uses it")
        # What is not listed was left by a process that was killed, or is what another compiles now
        wrong = [*damaged, *unlisted] if alone else []
        self.cleared = len(wrong)
        for file in wrong:
            file.unlink()

    def name(self, file: Path) -> str:
        return file.relative_to(self.folder).as_posix()

    def files(self) -> Iterator[Path]:
        """What torch wrote, without its locks."""
        return (f for f in self.folder.rglob("*") if f.is_file() and f.suffix != ".lock")

    def listed(self) -> dict[str, str]:
        """Digests by name; a list that cannot be read lists nothing."""
        try:
            return dict(parse_json(self.list.read_bytes()))
        except (OSError, ValueError, TypeError):
            return {}

    def keep(self) -> None:
        """List what was compiled since; if that fails, the next process compiles it again."""
        listed = self.listed()
        try:
            new = {self.name(f): sha256(f) for f in self.files() if self.name(f) not in listed}
            write_file(self.list, json.dumps(listed | new, indent=0).encode(), force=True)
        except LanternError as error:
            warnings.warn(f"compiled steps are not kept: {error}", stacklevel=2)


def locked(file: int) -> bool:
    """Take a lock that ends with the process, alone or together with others that did. -> whether alone"""
    try:
        lock_file(file)
        alone = True
    except OSError:
        alone = False
    lock_file(file, shared=True)
    return alone


def machine() -> str:
    """Code for one processor may stop another, and a home folder may serve both."""
    about = [processor_name(), platform.machine(), cpuinfo("flags"), cpuinfo("Features")]
    return f"torch-{torch.__version__}-{hashlib.sha256(repr(about).encode()).hexdigest()[:8]}"


@cache
def open_cache() -> CompileCache | None:
    """Has torch keep what this process compiles in our cache.

    None where the user names another folder, and where ours cannot be used, which is logged once.
    """
    home = cache_folder() / "compiled" / machine()
    if GIVEN not in (None, str(home / "files")):  # a worker inherits ours
        return None
    try:
        result = CompileCache(home)
    except (OSError, LanternError) as error:
        warnings.warn(f"steps are compiled anew, and not kept in {home}: {error}", stacklevel=2)
        os.environ[VARIABLE] = tempfile.mkdtemp(prefix="lantern-hpu-compiled-")
        atexit.register(shutil.rmtree, os.environ[VARIABLE], ignore_errors=True)
        return None
    if result.cleared:
        text = f"{result.cleared} damaged or unfinished files in {home} are compiled again"
        warnings.warn(text, stacklevel=2)
    os.environ[VARIABLE] = str(result.folder)
    return result


def keep_compiled() -> None:
    """List what was compiled since, if this process keeps it."""
    if open_cache.cache_info().currsize and (opened := open_cache()) is not None:
        opened.keep()
