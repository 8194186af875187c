"""A test suite is linted, test by test: by pytest's plugin, over processes too, and from the emulator's own wheel."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from scripts.release.wheel import build, clean, environment, run

ROOT = Path(__file__).parent.parent
MODEL = """
import torch

def pick(x):
    return x[x > 0]  # H010
"""
SUITE = """
import habana_frameworks.torch.core as htcore
import torch
from gaudi_emulator import warmed_up
from model import pick

x = torch.ones(4, device="hpu")

def test_right():
    assert (x * 2).cpu().tolist() == [2] * 4
    warmed_up()

def test_fault():
    assert pick(x).cpu().tolist() == [1] * 4

def test_sizes(hpu):
    for n in range(1, 6):
        (torch.ones(n, device="hpu") * 3).sum().cpu()
    assert hpu.counts.launches and not hpu.warm
"""
PLAIN = """
import sys

def test_without_an_option_nothing_is_loaded():
    assert "torch" not in sys.modules and "gaudi_emulator.life" not in sys.modules

def test_host():
    pass
"""
FAULT = "test_suite.py::test_fault: model.py:5: error H010 dynamic-nonzero"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "test_plain.py").write_text(PLAIN)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


def said(command: list[str | Path], folder: Path, **flags: str) -> tuple[int, str, str]:
    """(exit code, output, errors) of a program in lazy mode, without the checkout."""
    there = clean() | {"PT_HPU_LAZY_MODE": "1", "PYTHONDONTWRITEBYTECODE": "1"} | flags
    done = subprocess.run(command, cwd=folder, env=there, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_lint_of_a_suite_judges_each_test_by_itself(suite: Path) -> None:
    """What one test declared warm is no recompilation in the next; what the suite prints is no output of the lint."""
    lint: list[str | Path] = [sys.executable, "-m", "gaudi_emulator", "lint", "--strict"]
    github = [*lint, "--format", "github", "-m", "pytest", "-q", "test_suite.py"]
    code, out, err = said(github, suite, PYTHONPATH=str(ROOT))
    assert code == 1 and FAULT in err and "3 passed" in err and "3 tests ran on hpu" in err
    first, *others = out.splitlines()
    assert first.startswith("::error file=model.py,line=5,title=H010 dynamic-nonzero::the shape")
    assert "%0Ainstead: where(" in first and not [line for line in others if line[:2] == "::"]


@pytest.mark.slow
def test_the_emulators_wheel_works_without_the_product(suite: Path, tmp_path: Path) -> None:
    programs = environment(sys.executable, tmp_path / "venv")
    wheel = build(tmp_path, part="gaudi_emulator")
    run([programs / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel])
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for package in Path(sysconfig.get_paths()["purelib"]).iterdir():  # torch and pytest, from here
        ours = package.name.startswith(("lantern", "gaudi_emulator", "__editable__"))
        if not ours and not (site / package.name).exists():
            (site / package.name).symlink_to(package)
    python, emulator = programs / "python", programs / "gaudi-emulator"
    assert said([python, "-c", "import lantern_hpu"], suite)[0] == 1

    code, out, err = said([emulator, "lint", "-m", "pytest", "-q", "test_suite.py"], suite)
    assert code == 0 and out.startswith("model.py:5: error H010 dynamic-nonzero") and FAULT in err
    tests: list[str | Path] = [python, "-m", "pytest", "-q"]
    for options, wanted in (
        (["--hpu"], 0),
        (["--hpu-strict"], 1),
        (["--hpu-strict", "-n", "2"], 1),
    ):
        code, out, _ = said([*tests, *options, "test_suite.py"], suite)
        assert code == wanted and FAULT in out and "3 passed" in out, out
    code, out, _ = said([*tests, "--hpu-strict", "-k", "host", "test_plain.py"], suite)
    assert code == 1 and "1 passed" in out and "nothing ran on hpu" in out
    assert said([*tests, "test_plain.py"], suite)[0] == 0
    assert (
        "'new': it is a release"
        in said([*tests, "--hpu", "--hpu-bridge", "new", "test_suite.py"], suite)[2]
    )
