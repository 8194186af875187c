"""The doctor says what is there and what is wrong, whatever is broken, and prepares flags before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern_hpu.backends import BACKENDS, DEVICE_VARIABLE, GAUDI, WITHOUT
from lantern_hpu.backends.base import Memory
from lantern_hpu.backends.candidates import Candidate
from lantern_hpu.backends.cuda import kernels
from lantern_hpu.backends.cuda.backend import CUDABackend
from lantern_hpu.backends.hpu import env as hpu_env
from lantern_hpu.commands import doctor
from lantern_hpu.errors import DeviceError

ROOT = Path(__file__).parent.parent


class Fake:
    """A backend as the contract has it; a test breaks the method named by `broken`."""

    name = "fake"
    dtypes = {"bfloat16": "fast", "float32": "exact"}
    graph_modes = {"record": "fastest", "eager": "always"}
    broken = ""
    error: Exception = RuntimeError("no reason")

    def __init__(self) -> None:
        self.check("__init__")

    def check(self, name: str) -> None:
        if name == self.broken:
            raise self.error

    def available(self) -> tuple[bool, str]:
        self.check("available")
        return True, "a card is free"

    def memory(self) -> Memory:
        self.check("memory")
        return Memory(96 * 2**30, 48 * 2**30, None)

    def try_kernel(self) -> str | None:
        return None

    def describe(self) -> dict[str, object]:
        self.check("describe")
        return {"device": "FAKE9", "driver": "1.24", "flags": {"A": "1"}}


class Absent(Fake):
    def available(self) -> tuple[bool, str]:
        return False, "no card; no driver"


FAKE, ABSENT = f"{__name__}:Fake", f"{__name__}:Absent"


@pytest.fixture(autouse=True)
def no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hpu_env, "plugin_folder", lambda: None)


def devices(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    """These backends are all there are, in this order."""
    monkeypatch.delenv(DEVICE_VARIABLE)
    for name in list(BACKENDS):
        monkeypatch.delitem(BACKENDS, name)
    for name, target in targets.items():
        monkeypatch.setitem(BACKENDS, name, target)


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert doctor.main(args) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def facts(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(printed(capsys, "--json"))


def test_this_machine_is_described_and_nothing_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    text = printed(capsys)
    assert dict(os.environ) == before
    assert all(name in text for name in ("lantern_hpu", "python", "torch", *BACKENDS))
    assert all(check.name in text for check in hpu_env.checks())
    assert text.splitlines()[-1].startswith("default: ")
    assert "error" not in text


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    said = facts(capsys)
    assert set(said) == {
        *("lantern_hpu", "python", "platform", "torch", "torchvision", "devices", "gaudi"),
        *("default", "methods"),
    }
    needy = [name for name, method in said["methods"].items() if method["needs_drafter"]]
    assert needy == ["eagle", "eagle2", "lantern", "lantern++"]
    assert list(said["devices"]) == list(BACKENDS)
    assert said["devices"][said["default"]["device"]]["available"]
    assert said["gaudi"]["flags"]["active"] is False
    assert said["gaudi"]["flags"]["why"]


def test_a_device_is_shown_with_memory_modes_and_versions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices(monkeypatch, fake=FAKE)
    (section,) = [part for part in printed(capsys).split("\n\n") if part.startswith("fake: ")]
    assert section.splitlines() == [
        "fake: available, a card is free",
        "  device       FAKE9",
        "  driver       1.24",
        "  memory       96.0 GiB total, 48.0 GiB free",
        "  dtypes       bfloat16, float32",
        "  graph modes  record, eager",
    ]


def test_a_card_is_shown_with_whether_its_kernels_can_be_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks() -> Any:
        raise RuntimeError("Failed to find C compiler.")

    candidate = Candidate(lacks, [], 0.0)
    good = Candidate(lambda: torch.abs, [([torch.ones(1)], [torch.ones(1)] * 2)], 0.0)
    backend = CUDABackend()
    monkeypatch.setattr(kernels, "triton_candidates", lambda *_: {"swiglu": candidate})
    assert backend.try_kernel() == ("plain ones serve: RuntimeError: Failed to find C compiler.")
    monkeypatch.setattr(kernels, "triton_candidates", lambda *_: {"swiglu": good})
    monkeypatch.setattr(Fake, "try_kernel", lambda self: backend.try_kernel())
    devices(monkeypatch, fake=FAKE)
    assert "  kernels      Triton builds them here\n" in printed(capsys)


def test_auto_is_the_first_that_is_available_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices(monkeypatch, first=ABSENT, second=FAKE, third=FAKE)
    last = printed(capsys).splitlines()[-1]
    assert last == "default: second, because a card is free; first is not available"
    monkeypatch.setenv(DEVICE_VARIABLE, "third")
    assert (
        printed(capsys).splitlines()[-1] == f"default: third, because {DEVICE_VARIABLE} names third"
    )
    monkeypatch.setenv(DEVICE_VARIABLE, "toaster")
    assert f"{DEVICE_VARIABLE} names the unknown device 'toaster'" in printed(capsys)
    monkeypatch.setenv(DEVICE_VARIABLE, "auto")  # as if it were not set
    assert DEVICE_VARIABLE not in printed(capsys)
    monkeypatch.setenv(DEVICE_VARIABLE, "first")
    assert printed(capsys).splitlines()[-1].startswith("default: no device")


def test_a_device_that_is_not_there_says_why_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Absent, "name", GAUDI)
    devices(monkeypatch, fake=ABSENT)
    (section,) = [part for part in printed(capsys).split("\n\n") if part.startswith("fake: ")]
    assert section.splitlines()[:3] == [
        "fake: not available",
        "  why          no card",
        "               no driver",
    ]
    assert section.endswith(f"  try          {WITHOUT[GAUDI]}")


def test_no_device_at_all_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices(monkeypatch, first=ABSENT)
    assert printed(capsys).splitlines()[-1].startswith("default: no device, because first is not")
    assert facts(capsys)["default"]["device"] is None


@pytest.mark.parametrize("broken", ["__init__", "available", "memory", "describe"])
def test_a_broken_backend_breaks_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    monkeypatch.setattr(Absent, "__init__", lambda self: None)
    monkeypatch.setattr(Fake, "broken", broken)
    monkeypatch.setattr(Fake, "error", RuntimeError("synStatus=20 [Device already acquired]"))
    devices(monkeypatch, fake=FAKE, other=ABSENT)
    text = printed(capsys)
    assert "RuntimeError: synStatus=20" in text
    assert "already taken" in text
    assert "hl-smi" in text
    assert "other: not available\n" in text


@pytest.mark.parametrize("target", ["lantern_hpu.no_such_module:X", f"{__name__}:NoSuchClass"])
def test_a_backend_that_cannot_be_imported_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    devices(monkeypatch, fake=target, other=FAKE)
    said = facts(capsys)
    assert "Error: " in said["devices"]["fake"]["error"]
    assert said["default"]["device"] == "other"


def test_our_own_errors_are_shown_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Fake, "broken", "available")
    monkeypatch.setattr(Fake, "error", DeviceError("what is wrong", "why", "this"))
    devices(monkeypatch, fake=FAKE)
    text = printed(capsys)
    assert "error  what is wrong: why\n" in text
    assert "try    this\n" in text
    assert text.count("what is wrong") == 1


WITH_PLUGIN = """
import sys
from lantern_hpu.backends import BACKENDS
BACKENDS.clear()
BACKENDS["fake"] = "fake_device:Device"
from lantern_hpu.commands import doctor
sys.exit(doctor.main(sys.argv[1:]))
"""
DEVICE = """
import os, sys
assert "torch" not in sys.modules
SEEN = os.environ["PT_HPU_LAZY_MODE"]
class Device:
    dtypes = graph_modes = {}
    def available(self):
        return True, f"imported with PT_HPU_LAZY_MODE={SEEN}"
    def memory(self):
        raise ImportError("x")
    describe = memory
"""


@pytest.fixture
def gaudi(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with a plugin (built for another torch) and a device."""
    torch = tmp_path / "habana_frameworks" / "torch"
    torch.mkdir(parents=True)
    (torch / "required_version.txt").write_text("2.4.0a0+git1234567")
    (tmp_path / "fake_device.py").write_text(DEVICE)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PT_", DEVICE_VARIABLE))
    }
    return {**kept, "PYTHONPATH": str(tmp_path)}


def run(environ: dict[str, str], *args: str) -> str:
    command = [sys.executable, "-c", WITH_PLUGIN, *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_flags_are_set_before_a_device_is_imported_and_reported(gaudi: dict[str, str]) -> None:
    said = json.loads(run({**gaudi, "PT_HPU_WEIGHT_SHARING": "1"}, "--json"))
    flags = said["gaudi"]["flags"]
    assert flags["active"] is True
    assert flags["chosen"]["PT_HPU_LAZY_MODE"] == "0"
    assert flags["respected"] == {"PT_HPU_WEIGHT_SHARING": "1"}
    assert said["default"]["why"] == "imported with PT_HPU_LAZY_MODE=0"


def test_flags_and_a_replaced_torch_are_called_out(gaudi: dict[str, str]) -> None:
    text = run({**gaudi, "PT_HPU_LAZY_MODE": "1"})
    assert "mode     lazy: PT_HPU_LAZY_MODE=1 was set already" in text
    assert "set      PT_HPU_WEIGHT_SHARING=0: it wraps parameters" in text
    assert "yours    PT_HPU_LAZY_MODE=1, as it would be set: HPU graphs need lazy mode" in text
    assert "--  REPLACED: " in text and "built for 2.4.0a0+git1234567" in text


def test_a_setting_of_the_users_is_kept_and_what_it_does_is_said(gaudi: dict[str, str]) -> None:
    flag = "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE"
    text = run({**gaudi, "PT_HPU_LAZY_MODE": "0"})
    assert f"set      {flag}=0: memory that is reused between compiled parts" in text
    text = run({**gaudi, "PT_HPU_LAZY_MODE": "0", flag: "1"})
    assert f"yours    {flag}=1, kept; 0 would be set: " in text
    assert "1 saves memory, and a step that is cut in parts may read overwritten state" in text


def test_a_fatal_flag_is_named_before_anything_is_loaded(gaudi: dict[str, str]) -> None:
    text = run({**gaudi, "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES": "yes"})
    assert "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES=yes would end Gaudi's software" in text
    assert "it takes 0, 1, true, false alone" in text
