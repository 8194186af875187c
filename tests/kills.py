"""Commands killed at random moments and run again: what they leave is what an unbroken run leaves, byte for byte."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT
from tests.local_hub import local_hub


class Command(NamedTuple):
    """One that is killed.

    Attributes:
        words: it is run with; OUT is its folder. kept: patterns of files whose bytes are compared.
        again: one more word, once the file `after` is there.
    """

    words: str
    kept: str
    again: str = ""
    after: str = "."


TRAINING = "--samples 24 --batch 4 --measure-every 10 --measured 4 --lr 0.01 --steps 120"
COMMANDS = {
    "generate": Command(
        "generate --model MODEL --prompt apple --num-images 12 --batch-size 2 --output OUT/out",
        "out/*.png",
        "--resume",
    ),
    "convert": Command("models convert MODEL OUT/ours", "ours/*"),
    "evaluate": Command(
        "evaluate --model MODEL --preset scenes --quick --num-images 65 --method ar --output OUT/out",
        "out/pictures/**/*.png",
    ),
    "train": Command(
        "train drafter --model MODEL --data OUT/prompts.txt --output OUT/out TRAINING",
        "out/drafter.safetensors",
        "--resume",
        after="out/state.pt",
    ),
    "download": Command("models download anole-7b --to OUT/out", "out/**/*"),
    "download-cache": Command("models download anole-7b", "home/hub/models--*/**/*"),
}
HELD = "held"
LOCKS = ".locks"  # huggingface_hub's own, in its cache


def start(words: str, model: str, out: Path, hub: str = "") -> subprocess.Popen[bytes]:
    """Start a command, which downloads from the address `hub`; only its errors can be read."""
    things = [f"{a} {b} {c}" for a in ("red", "blue") for b in ("apple", "cat") for c in "abc"]
    (out / "prompts.txt").write_text("\n".join(things))
    text = words.replace("TRAINING", TRAINING).replace("MODEL", model).replace("OUT", str(out))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if hub:
        environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(out / "home"), "HF_HUB_OFFLINE": "0"}
        # A machine that stood still for its ten seconds has not lost the network
        environment |= {"HF_HUB_ETAG_TIMEOUT": "600", "HF_HUB_DOWNLOAD_TIMEOUT": "600"}
    command = [sys.executable, "-m", "lantern_hpu", *text.split()]
    with open(out / "errors.txt", "wb") as errors:  # a pipe that nobody empties would stop it
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)


def read_kept(command: Command, out: Path) -> dict[str, bytes]:
    files = sorted(file for file in out.glob(command.kept) if file.is_file())
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


def leftovers(out: Path) -> list[str]:
    """What a killed run left that no run will take up."""
    hidden = (path.relative_to(out) for path in out.rglob(".*"))
    return [str(path) for path in hidden if LOCKS not in path.parts]


def kill_once(name: str, model: str, whole: dict[str, bytes], seconds: float, hub: str) -> str:
    """Kill once and go on. -> that it `HELD`, or what did not"""
    command = COMMANDS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        running = start(command.words, model, out, hub)
        time.sleep(seconds)
        running.kill()
        running.wait()
        if read_kept(command, out) != whole:
            again = command.again if (out / command.after).exists() else ""
            code = start(f"{command.words} {again}", model, out, hub).wait()
            if code:
                said = (out / "errors.txt").read_text(errors="replace").strip()
                return f"run again, it ended with {code}: {said[-500:]}"
        found = read_kept(command, out)
        if found != whole:
            others = [file for file in {**whole, **found} if whole.get(file) != found.get(file)]
            return f"other files after a kill at {seconds:.2f} s: {', '.join(others)}"
        left = leftovers(out)
        return f"left {left}" if left else HELD


def run_unbroken(name: str, model: str, hub: str) -> tuple[dict[str, bytes], float]:
    """What a run leaves that nothing breaks off, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        if start(COMMANDS[name].words, model, Path(folder), hub).wait():
            raise SystemExit(f"{name} does not run unbroken")
        return read_kept(COMMANDS[name], Path(folder)), time.perf_counter() - began


def kill_often(name: str, model: str, times: int, seed: int) -> Counter[str]:
    """How often a command `HELD`, or what else came of a kill."""
    rng, found = random.Random(seed), Counter[str]()
    with local_hub() as local:
        hub = local.address
        whole, took = run_unbroken(name, model, hub)
        for _ in range(times):
            found[kill_once(name, model, whole, rng.uniform(0.2, 1.0) * took, hub)] += 1
    return found
