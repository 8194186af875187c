"""Compiled steps are kept on the machine for the next process, in the user's cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each compiles in processes of its own
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
COMPILE = """
import torch
from torch import nn

from lantern_hpu.backends.base import compile_whole
from torch._dynamo.utils import counters  # which has torch name its own folder

class Step(nn.Module):
    def forward(self, x):
        return (x.sin() * 2 + x).sum(-1)

print(compile_whole(Step())(torch.arange(64.0).reshape(4, 16)).tolist())
print(counters["inductor"]["fxgraph_cache_hit"])
"""


def compile_in(cache: Path, **environment: str) -> tuple[str, int]:
    """What a process computes, and how many graphs it found compiled."""
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= inherited | {"LANTERN_HPU_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True
    )
    result, hits = done.stdout.splitlines()
    return result, int(hits)


def test_a_second_process_takes_what_the_first_compiled(tmp_path: Path) -> None:
    first, hits = compile_in(tmp_path / "cache")
    assert hits == 0 and list((tmp_path / "cache" / "compiled").glob("torch-*"))
    assert compile_in(tmp_path / "cache") == (first, 1)


def test_a_folder_of_the_users_own_is_kept(tmp_path: Path) -> None:
    compile_in(tmp_path / "cache", **{VARIABLE: str(tmp_path / "own")})
    assert any((tmp_path / "own").iterdir()) and not any((tmp_path / "cache").rglob("*.so"))


def test_a_cache_that_cannot_be_written_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    compile_in(tmp_path / "file", **{"TMPDIR": str(tmp_path)})
    assert (tmp_path / "file").read_text() == "no folder"
