"""A release as users have it: in a clean environment each file draws, serves an image over HTTP, and stops on SIGINT.

    python -m scripts.release.wheel --python python3.10 --python python3.13 --dist dist

builds the wheel of this machine, the one without a native decoder for all others, and the source archive, and tries
each with each Python: a line of JSON each. Where the package index has torch for NVIDIA cards,
`PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` brings a smaller one.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from lantern_hpu.errors import OptionError, exit_code
from scripts import ROOT
from scripts.serving import PATIENCE, serving

SKIPPED = (".*", "data", "out", "build", "dist", "*.egg-info", "__pycache__")
PROMPT = "a red apple"
PNG = b"\x89PNG"
# What a release has: the native decoder, one wheel for all CPythons; no decoder, for other machines; the source
KINDS = {"native": "*-abi3-*.whl", "pure": "*-none-any.whl", "sdist": "*.tar.gz"}
COMPILED = re.compile(r"^\[\[tool\.setuptools\.ext-modules\]\]\n(?:.+\n)+", re.MULTILINE)
ABOUT = "import json, platform, torch; print(json.dumps([platform.python_version(), torch.__version__]))"


def build(out: Path, kind: str = "native", part: str = "") -> Path:
    """A file of a release, built from a copy so that no stale build folder takes part.

    Args:
        kind: of KINDS. part: a folder that is a project by itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*SKIPPED))
        if kind == "pure":
            project = copy / "pyproject.toml"
            project.write_text(COMPILED.sub("", project.read_text()))
        made = "--sdist" if kind == "sdist" else "--wheel"
        command = [sys.executable, "-m", "build", made, "--no-isolation", "--outdir"]
        run([*command, out, copy / part])
    (file,) = out.glob("*.whl" if part else KINDS[kind])
    return file


def run(command: Sequence[str | Path], folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, env=clean(), capture_output=True, text=True)
    if done.returncode:
        shown = " ".join(map(str, command))
        raise OptionError(
            f"{shown} ended with {done.returncode}", (done.stdout + done.stderr)[-2000:]
        )
    return done.stdout


def clean() -> dict[str, str]:
    """The environment without what would let a checkout take the wheel's place."""
    return {
        n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


def environment(python: str, folder: Path) -> Path:
    """A new virtual environment's programs."""
    run([python, "-m", "venv", folder])
    return folder / "bin"


def try_wheel(programs: Path, folder: Path) -> dict[str, Any]:
    """Draw, serve and stop, with the wheel that is installed in an environment."""
    version, torch = json.loads(run([programs / "python", "-c", ABOUT], folder))
    began = time.perf_counter()
    image = folder / "apple.png"
    run([programs / "lantern-hpu", "generate", "--prompt", PROMPT, "--output", image], folder)
    seconds = round(time.perf_counter() - began, 1)
    if not image.read_bytes().startswith(PNG):
        raise OptionError(f"{image} is not a PNG file")
    served, stopped = serve(programs, folder)
    about = {"python": version, "torch": torch, "seconds_to_draw": seconds}
    return about | {"bytes_served": served, "seconds_to_stop": round(stopped, 1)}


def serve(programs: Path, folder: Path) -> tuple[int, float]:
    """The size of an image that a server sends, and how long SIGINT takes to end it."""
    log, command = folder / "serve.log", [str(programs / "lantern-hpu"), "serve"]
    with serving(command, log, cwd=folder, env=clean()) as (url, server):
        image = ask(f"{url}/v1/images/generations")
        began = time.perf_counter()
        server.send_signal(signal.SIGINT)
        code, seconds = server.wait(PATIENCE), time.perf_counter() - began
    if code != 0 or not image.startswith(PNG):
        raise OptionError(f"the server ended with {code}", log.read_text()[-2000:])
    return len(image), seconds


def ask(url: str) -> bytes:
    """An image over HTTP."""
    body = json.dumps({"prompt": PROMPT, "seed": 7}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return base64.b64decode(json.load(answer)["data"][0]["b64_json"])


def main() -> int:
    parser = argparse.ArgumentParser("wheel", description="Build what a release has, and try it.")
    parser.add_argument(
        "--python", action="append", help="an interpreter; may be repeated (this one)"
    )
    parser.add_argument("--wheel", type=Path, help="a file that is built already, in place of all")
    parser.add_argument("--dist", type=Path, help="a folder that keeps the files")
    args = parser.parse_args()

    def command() -> None:
        with tempfile.TemporaryDirectory() as name:
            kept = (args.dist or Path(name)).resolve()
            kept.mkdir(exist_ok=True)
            files = [args.wheel.resolve()] if args.wheel else [build(kept, kind) for kind in KINDS]
            for number, (file, python) in enumerate(
                product(files, args.python or [sys.executable])
            ):
                folder = Path(name) / str(number)
                programs = environment(python, folder)
                run([programs / "python", "-m", "pip", "install", f"{file}[serve]"])
                tried = {"file": file.name, "mb": round(file.stat().st_size / 1e6, 1)}
                print(json.dumps(tried | try_wheel(programs, folder)), flush=True)

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
