"""TorchCTS, the public conformance suite for out-of-tree PyTorch devices, over the emulated Gaudi: a scorecard.

    pip install --no-deps torchcts expecttest
    python -m scripts.measure.conformance --output scorecard.json

Its operator tests run on the emulator and on the CPU, so that failures of the emulator alone are listed. `--no-deps`,
since TorchCTS 0.4 declares torch below 2.12.2; with a later one it prints a warning and runs.
It takes about four minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from lantern_hpu.errors import OptionError, exit_code
from lantern_hpu.files import write_file
from scripts import ROOT

NEEDED = ("torchcts", "expecttest")
SUITE = "operators"  # written by hand; the others are made from OpInfo, and take minutes to collect
LEVEL = "4"
DTYPES = ("float32", "bfloat16", "int32", "int64", "bool")
# The module that TorchCTS imports as the backend: the emulated card is there until the process ends
BACKEND = """
import gaudi_emulator

gaudi_emulator.install(lazy=False)
"""


def manifest(device: str) -> str:
    """How TorchCTS knows a device; each option that is not named is off."""
    from torchcts.core.manifest_schema import CAPABILITY_ORDER

    about = {
        "manifest_version": 1,
        "device_name": device,
        "backend_import": "emulated_gaudi" if device == "hpu" else None,
        "device_count": 1,
        "max_samples": 1,
        "semantic_level": int(LEVEL),
        "capabilities": {name: name == "inference" for name in CAPABILITY_ORDER},
    }
    dtypes = ", ".join(f"torch.{name}: True" for name in DTYPES)
    return f"import torch\n\nmanifest = {about!r}\nmanifest['supported_dtypes'] = {{{dtypes}}}\n"


def run_suite(device: str, suite: str = SUITE) -> dict[str, str]:
    """The outcome of each test that ran on a device: passed, failed or skipped, by its name.

    Args:
        suite: a folder or file of TorchCTS.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        hint = f"pip install --no-deps {' '.join(NEEDED)}"
        raise OptionError(f"{' and '.join(missing)} not installed", hint=hint)
    import torchcts

    tests = Path(torchcts.__file__).parent / suite
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "manifest.py").write_text(manifest(device))
        (folder / "emulated_gaudi.py").write_text(BACKEND)
        command = [sys.executable, "-m", "torchcts", "run", "--device", device, "--level", LEVEL]
        command += ["--non-interactive", "--adaptive-isolation", "off"]
        command += ["--known-segfault-policy", "off", "--junitxml", "results.xml", str(tests)]
        paths = os.pathsep.join([str(ROOT), name, os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        if not (folder / "results.xml").is_file():
            lines = (done.stdout + done.stderr).strip().splitlines()
            raise OptionError("TorchCTS ended without a result", lines[-1] if lines else "")
        return outcomes(ET.parse(folder / "results.xml").getroot())


def outcomes(root: ET.Element) -> dict[str, str]:
    """What became of each test case of a JUnit file."""
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    result = {}
    for case in root.iter("testcase"):
        found = [kinds[child.tag] for child in case if child.tag in kinds]
        place = str(case.get("classname")).rpartition("torchcts.")[2]
        result[f"{place}::{case.get('name')}"] = found[0] if found else "passed"
    return result


def scorecard(emulated: Mapping[str, str], cpu: Mapping[str, str]) -> dict[str, object]:
    """The counts of both devices, and the tests that fail on the emulator alone."""
    alone = [n for n, what in emulated.items() if what == "failed" and cpu.get(n) != "failed"]
    return {
        "suite": f"TorchCTS, {SUITE}, level {LEVEL}",
        "torch": torch.__version__,
        "hpu, emulated": dict(Counter(emulated.values())),
        "cpu": dict(Counter(cpu.values())),
        "failed on the emulator alone": sorted(alone),
    }


def main() -> int:
    parser = argparse.ArgumentParser("conformance", description="TorchCTS over the emulated Gaudi.")
    parser.add_argument("--output", type=Path, help="write the scorecard as JSON")
    args = parser.parse_args()

    def command() -> None:
        card = scorecard(run_suite("hpu"), run_suite("cpu"))
        text = json.dumps(card, indent=1)
        print(text)
        if args.output:
            write_file(args.output, text.encode(), force=True)

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
