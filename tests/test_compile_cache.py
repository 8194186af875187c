"""Compiled steps are kept for the next process, and never taken up if they are not as they were written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lantern_hpu.backends import compile_cache
from lantern_hpu.backends.compile_cache import CompileCache

COMPILE = """
import torch
from torch import nn

from lantern_hpu.backends.compile_cache import keep_compiled
from lantern_hpu.backends.base import compile_whole
from torch._dynamo.utils import counters  # which has torch name its own folder

class Step(nn.Module):
    def forward(self, x):
        return (x.sin() * 2 + x).sum(-1)

print(compile_whole(Step())(torch.arange(64.0).reshape(4, 16)).tolist())
keep_compiled()
"""


def filled(home: Path) -> CompileCache:
    """With two files that are listed, and one that is not."""
    cache = CompileCache(home)
    for name in ("a.so", "deep/b.cpp"):
        (cache.folder / name).parent.mkdir(exist_ok=True)
        (cache.folder / name).write_text(name)
    cache.keep()
    (cache.folder / "half.so").write_text("a killed process left it")
    (cache.folder / "half.so.lock").write_text("")
    return cache


def left(cache: CompileCache) -> list[str]:
    return sorted(cache.name(file) for file in cache.files())


def test_what_is_as_listed_is_kept_and_all_else_deleted(tmp_path: Path) -> None:
    filled(tmp_path).lock.close()
    again = CompileCache(tmp_path)
    assert left(again) == ["a.so", "deep/b.cpp"] and again.cleared == 1
    (again.folder / "a.so").write_text("a.sO")
    again.lock.close()
    again = CompileCache(tmp_path)
    assert left(again) == ["deep/b.cpp"] and again.cleared == 1
    again.list.write_text("[" * 100_000)
    again.lock.close()
    assert left(CompileCache(tmp_path)) == []


def test_nothing_is_deleted_under_another_process(tmp_path: Path) -> None:
    first = filled(tmp_path)
    second = CompileCache(tmp_path)  # a lock of its own, as another process has
    assert left(second) == ["a.so", "deep/b.cpp", "half.so"]
    (first.folder / "a.so").write_text("damaged")
    with pytest.raises(OSError, match=r"a\.so is damaged, and another process uses it"):
        CompileCache(tmp_path)


def test_cache_that_cannot_be_used_is_left_out_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compile_cache.VARIABLE, "put back afterwards")
    monkeypatch.setattr(compile_cache, "GIVEN", None)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LANTERN_HPU_CACHE", str(tmp_path / "file"))
    compile_cache.open_cache.cache_clear()
    with pytest.warns(UserWarning, match="compiled anew, and not kept in") as said:
        assert compile_cache.open_cache() is None and compile_cache.open_cache() is None
    assert len(said) == 1
    assert Path(os.environ[compile_cache.VARIABLE]).is_dir()
    compile_cache.open_cache.cache_clear()


def test_folder_that_the_user_names_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "GIVEN", str(tmp_path))
    monkeypatch.setenv("LANTERN_HPU_CACHE", str(tmp_path))
    compile_cache.open_cache.cache_clear()
    assert compile_cache.open_cache() is None and list(tmp_path.iterdir()) == []
    compile_cache.open_cache.cache_clear()


@pytest.mark.slow
def test_damaged_machine_code_is_compiled_again(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != compile_cache.VARIABLE}
    environment |= {"LANTERN_HPU_CACHE": str(tmp_path)}

    def run() -> tuple[str, str]:
        command = [sys.executable, "-c", COMPILE]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    wanted, _ = run()
    libraries = {file: file.read_bytes() for file in tmp_path.rglob("*.so")}
    assert libraries
    written = {file: file.stat().st_mtime_ns for file in libraries}
    assert run() == (wanted, "")
    assert {file: file.stat().st_mtime_ns for file in libraries} == written  # nothing compiled
    for file, content in libraries.items():
        file.write_bytes(content[: len(content) // 2])
    drawn, said = run()
    assert drawn == wanted and "damaged or unfinished files" in said
    assert {file: file.read_bytes() for file in libraries} == libraries
