"""Commands as a user without rights: root's tests would write where users of a container cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOBODY = (
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "--bounding-set=-all",
    "--inh-caps=-all",
)


@cache
def prefix() -> list[str]:
    """What a command begins with to run as such a user: nothing where this process is one."""
    if os.getuid():
        return []
    setpriv = shutil.which("setpriv")
    return [] if setpriv is None else [setpriv, *NOBODY]


@cache
def python() -> str:
    """An interpreter that such a user may run with the packages of this one."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (sys.executable, f"/usr/bin/{version}"):
        with home() as folder:
            # From a shell: setpriv itself still has root's way to an interpreter in root's home
            done = run(["sh", "-c", f"{path} -c 'import torch, lantern_hpu'"], folder, {})
        if done.returncode == 0:
            return path
    pytest.skip("no interpreter that another user may run")


@contextmanager
def home() -> Iterator[Path]:
    """A folder that such a user owns, as pytest's own belong to this one."""
    folder = Path(tempfile.mkdtemp())
    try:
        give(folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def give(folder: Path) -> None:
    """Make such a user the owner of a folder and all in it."""
    for path in (folder, *folder.rglob("*")) if not os.getuid() else ():
        os.chown(path, 65534, 65534, follow_symlinks=False)


def packages(ours: Path) -> str:
    """PYTHONPATH of a checkout with the packages of this interpreter."""
    return os.pathsep.join([str(ours), sysconfig.get_path("purelib")])


def run(
    command: list[str], folder: Path, environ: Mapping[str, str], timeout: float = 900
) -> subprocess.CompletedProcess[str]:
    """A command of such a user in a folder of its own, which is its home; of this environment PATH alone is left."""
    if not os.getuid() and not prefix():
        pytest.skip("root, without setpriv")
    given = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": packages(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        **environ,
    }
    return subprocess.run(
        [*prefix(), *command],
        cwd=folder,
        env=given,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
