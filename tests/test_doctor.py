"""The doctor says what is there and what is wrong, whatever is broken, and prepares flags before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern_hpu import backends
from lantern_hpu.backends import BACKENDS, DEVICE_VARIABLE, Device, base, examine
from lantern_hpu.backends.base import Candidate, Memory
from lantern_hpu.backends.cuda import forms, kernels
from lantern_hpu.backends.cuda.backend import CUDABackend
from lantern_hpu.backends.hpu import env as hpu_env
from lantern_hpu.commands import doctor
from lantern_hpu.errors import DeviceError
from tests.marks import mostly_slow

ROOT = Path(__file__).parent.parent
Patch = pytest.MonkeyPatch
Printed = pytest.CaptureFixture[str]


class Fake:
    """A backend as the contract has it; a test breaks the method named by `broken`."""

    dtypes = {"bfloat16": "fast", "float32": "exact"}
    graph_modes = {"record": "fastest", "eager": "always"}
    broken = ""
    error: Exception = RuntimeError("no reason")

    def __init__(self, graphs: str) -> None:
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
    def __init__(self, graphs: str) -> None:
        pass

    def available(self) -> tuple[bool, str]:
        return False, "no card; no driver"


FAKE, ABSENT = Device(f"{__name__}:Fake"), Device(f"{__name__}:Absent")


@pytest.fixture(autouse=True)
def no_plugin(monkeypatch: Patch) -> None:
    monkeypatch.setattr(hpu_env, "plugin_folder", lambda: None)


def devices(monkeypatch: Patch, **known: Device) -> None:
    """These devices are all there are, in this order."""
    monkeypatch.delenv(DEVICE_VARIABLE)
    for module in (backends, base, examine):
        monkeypatch.setattr(module, "BACKENDS", known)


def printed(capsys: Printed, *args: str) -> str:
    assert doctor.main(args) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def section(capsys: Printed, head: str) -> list[str]:
    """The lines of the section that begins with these words."""
    (found,) = [part for part in printed(capsys).split("\n\n") if part.startswith(head)]
    return found.splitlines()


def facts(capsys: Printed) -> Any:
    return json.loads(printed(capsys, "--json"))


def test_this_machine_is_described_and_nothing_is_set(capsys: Printed) -> None:
    before = dict(os.environ)
    text = printed(capsys)
    assert dict(os.environ) == before
    assert all(name in text for name in ("lantern_hpu", "python", "torch", *BACKENDS))
    assert all(check.name in text for check in hpu_env.checks())
    assert text.splitlines()[-1].startswith("default: ")
    assert "error" not in text


def test_json_has_everything(capsys: Printed) -> None:
    said = facts(capsys)
    assert set(said) == {
        *("lantern_hpu", "python", "platform", "torch", "torchvision", "devices", "gaudi"),
        *("default", "methods"),
    }
    needy = [name for name, method in said["methods"].items() if method["needs_drafter"]]
    assert needy == ["eagle", "eagle2", "lantern", "lantern++"]
    assert list(said["devices"]) == list(BACKENDS)
    assert said["devices"][said["default"]["device"]]["available"]
    flags = said["gaudi"]["flags"]
    assert flags["active"] is False and flags["why"]


def test_a_device_is_shown_with_what_it_has(monkeypatch: Patch, capsys: Printed) -> None:
    monkeypatch.setattr(Fake, "try_kernel", lambda self: "built here")
    devices(monkeypatch, fake=FAKE)
    assert section(capsys, "fake: ") == [
        "fake: available, a card is free",
        "  device       FAKE9",
        "  driver       1.24",
        "  memory       96.0 GiB total, 48.0 GiB free",
        "  kernels      built here",
        "  dtypes       bfloat16, float32",
        "  graph modes  record, eager",
    ]


def test_a_card_says_whether_its_kernels_can_be_built(monkeypatch: Patch) -> None:
    def lacks() -> Any:
        raise RuntimeError("Failed to find C compiler.")

    good = Candidate(lambda: torch.abs, [([torch.ones(1)], [torch.ones(1)] * 2)], 0.0)
    for candidate, said in (
        (Candidate(lacks, [], 0.0), "plain ones serve: RuntimeError: Failed to find C compiler."),
        (good, "Triton builds them here"),
    ):
        monkeypatch.setattr(kernels, "triton_candidates", lambda *_, one=candidate: {"swiglu": one})
        monkeypatch.setattr(forms.Card, "machine", lambda self: {"card": "none"})
        assert CUDABackend().try_kernel() == said


@pytest.mark.parametrize(
    ("variable", "last"),
    [
        (None, "second, because a card is free; first is not available"),
        ("auto", "second, because a card is free; first is not available"),
        ("third", f"third, because {DEVICE_VARIABLE} names third"),
        ("first", f"no device, because {DEVICE_VARIABLE} names first"),
        ("toaster", f"no device, because {DEVICE_VARIABLE} names the unknown device 'toaster'"),
    ],
)
def test_the_default_and_why(
    monkeypatch: Patch, capsys: Printed, variable: str | None, last: str
) -> None:
    devices(monkeypatch, first=ABSENT, second=FAKE, third=FAKE)
    if variable:
        monkeypatch.setenv(DEVICE_VARIABLE, variable)
    assert printed(capsys).splitlines()[-1] == f"default: {last}"


def test_a_device_that_is_not_there_says_why_and_what_to_do(
    monkeypatch: Patch, capsys: Printed
) -> None:
    devices(monkeypatch, fake=replace(ABSENT, without="lend one"))
    shown = section(capsys, "fake: ")
    assert shown[:3] == [
        "fake: not available",
        "  why          no card",
        "               no driver",
    ]
    assert shown[-1] == "  try          lend one"
    why = "no device, because fake is not available"
    assert printed(capsys).splitlines()[-1] == f"default: {why}"
    assert facts(capsys)["default"]["device"] is None


@pytest.mark.parametrize("broken", ["__init__", "available", "memory", "describe"])
def test_a_broken_backend_breaks_nothing_else(
    monkeypatch: Patch, capsys: Printed, broken: str
) -> None:
    monkeypatch.setattr(Fake, "broken", broken)
    devices(monkeypatch, fake=FAKE, other=ABSENT)
    monkeypatch.setattr(Fake, "error", RuntimeError("synStatus=20 [Device already acquired]"))
    text = printed(capsys)
    assert all(part in text for part in ("RuntimeError: synStatus=20", "already taken", "hl-smi"))
    assert "other: not available\n" in text
    monkeypatch.setattr(Fake, "error", DeviceError("what is wrong", "why", "this"))
    text = printed(capsys)  # our own errors are shown once
    assert "error  what is wrong: why\n" in text.replace("error        ", "error  ")
    assert text.count("what is wrong") == 1


@pytest.mark.parametrize("target", ["lantern_hpu.no_such_module:X", f"{__name__}:NoSuchClass"])
def test_a_backend_that_cannot_be_imported_is_shown(
    monkeypatch: Patch, capsys: Printed, target: str
) -> None:
    devices(monkeypatch, fake=Device(target), other=FAKE)
    said = facts(capsys)
    assert "Error: " in said["devices"]["fake"]["error"]
    assert said["default"]["device"] == "other"


WITH_PLUGIN = """
import sys
from lantern_hpu.backends import BACKENDS, Device
BACKENDS.clear()
BACKENDS["fake"] = Device("fake_device:Fake")
from lantern_hpu.commands import doctor
assert "torch" not in sys.modules  # which loads the plugin, after the flags are set
sys.exit(doctor.main(sys.argv[1:]))
"""
DEVICE = """
import os
SEEN = os.environ["PT_HPU_LAZY_MODE"]
class Fake:
    dtypes = graph_modes = {}
    def __init__(self, graphs):
        pass
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
    ours = ("PT_", DEVICE_VARIABLE)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
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


REUSE = "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE"
CUT = "1 saves memory, and a step that is cut in parts may read overwritten state"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (
            {"PT_HPU_LAZY_MODE": "1"},
            [
                "mode     lazy: PT_HPU_LAZY_MODE=1 was set already",
                "set      PT_HPU_WEIGHT_SHARING=0: it wraps parameters",
                "yours    PT_HPU_LAZY_MODE=1, as it would be set: HPU graphs need lazy mode",
                *("--  REPLACED: ", "built for 2.4.0a0+git1234567"),
            ],
        ),
        *mostly_slow(
            [
                (
                    {"PT_HPU_LAZY_MODE": "0"},
                    [f"set      {REUSE}=0: memory that is reused between compiled parts"],
                ),
                (
                    {"PT_HPU_LAZY_MODE": "0", REUSE: "1"},
                    [f"yours    {REUSE}=1, kept; 0 would be set: ", CUT],
                ),
                (  # named before anything is loaded
                    {"PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES": "yes"},
                    [
                        "DYNAMIC_SHAPES=yes would end Gaudi's software",
                        "it takes 0, 1, true, false alone",
                    ],
                ),
            ]
        ),
    ],
)
def test_flags_are_shown_with_what_they_do(
    gaudi: dict[str, str], given: dict[str, str], shown: list[str]
) -> None:
    text = run({**gaudi, **given})
    assert [part for part in shown if part not in text] == []
