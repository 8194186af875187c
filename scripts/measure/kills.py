"""Kill commands at random moments, run them again, and compare what they leave with an unbroken run's.

    python -m scripts.measure.kills --model MODEL --times 20

Each kill is a SIGKILL after a random share of the time that the unbroken run took. What counts is the same bytes: of
pictures, of a drafter's weights, of a converted folder, of a model's files. Files whose names begin with a dot must be
gone. Downloads, into a folder and into the cache, are from a Hub of this machine alone: `scripts/measure/local_hub.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.measure.local_hub import local_hub


@dataclass(frozen=True)
class Command:
    """One that is killed.

    Attributes:
        words: it is run with; OUT is its folder. again: more words, once there is what they ask for.
        kept: patterns of files whose bytes are compared. may_resume: whether `again` can be given.
    """

    words: str
    kept: tuple[str, ...]
    again: str = ""
    may_resume: Callable[[Path], bool] = Path.exists


TRAINING = "--samples 24 --batch 4 --measure-every 10 --measured 4 --lr 0.01 --steps 120"
COMMANDS = {
    "generate": Command(
        "generate --model MODEL --prompt apple --num-images 12 --batch-size 2 --output OUT/out",
        ("out/*.png",),
        "--resume",
    ),
    "convert": Command("convert MODEL OUT/ours", ("ours/*",)),
    "evaluate": Command(
        "evaluate --model MODEL --preset scenes --images 65 --panels 2 --fresh 70 --rounds 10 --no-floor --rows ar "
        "--output OUT/out",
        ("out/pictures/**/*.png",),
    ),
    "train": Command(
        "train drafter --model MODEL --data OUT/prompts.txt --output OUT/out TRAINING",
        ("out/drafter.safetensors",),
        "--resume",
        lambda out: (out / "out" / "state.pt").exists(),
    ),
    "download": Command("download anole-7b --to OUT/out", ("out/**/*",)),
    "download-cache": Command("download anole-7b", ("home/hub/models--*/**/*",)),
}
HELD = "held"
LOCKS = ".locks"  # huggingface_hub's own, in its cache


def started(words: str, model: str, out: Path, hub: str = "") -> subprocess.Popen[bytes]:
    """A command that says nothing.

    Args:
        hub: the address it downloads from.
    """
    things = [f"{a} {b} {c}" for a in ("red", "blue") for b in ("apple", "cat") for c in "abc"]
    (out / "prompts.txt").write_text("\n".join(things))
    text = words.replace("TRAINING", TRAINING).replace("MODEL", model).replace("OUT", str(out))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if hub:
        environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(out / "home"), "HF_HUB_OFFLINE": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "lantern_hpu", *text.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )


def kept(command: Command, out: Path) -> dict[str, bytes]:
    files = [file for pattern in command.kept for file in sorted(out.glob(pattern))]
    return {str(file.relative_to(out)): file.read_bytes() for file in files if file.is_file()}


def leftovers(out: Path) -> list[str]:
    """What a killed run left that no run will ever take up."""
    hidden = (path.relative_to(out) for path in out.rglob(".*"))
    return [str(path) for path in hidden if LOCKS not in path.parts]


def trial(name: str, model: str, whole: dict[str, bytes], seconds: float, hub: str) -> str:
    """Kill once and go on. -> that it `HELD`, or what did not"""
    command = COMMANDS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        running = started(command.words, model, out, hub)
        time.sleep(seconds)
        running.kill()
        running.wait()
        before = kept(command, out)
        if before != whole:
            resumes = command.again and command.may_resume(out)
            words = f"{command.words} {command.again if resumes else ''}"
            again = started(words, model, out, hub)
            if again.wait():
                return f"{name}: run again, it ended with {again.returncode}"
        if kept(command, out) != whole:
            found = kept(command, out)
            others = [file for file in {**whole, **found} if whole.get(file) != found.get(file)]
            return f"{name}: other files after a kill at {seconds:.2f} s: {', '.join(others)}"
        left = leftovers(out)
        return f"{name}: left {left}" if left else f"{name}: {HELD}"


def unbroken(name: str, model: str, hub: str) -> tuple[dict[str, bytes], float]:
    """What a run leaves that nothing breaks off, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        if started(COMMANDS[name].words, model, Path(folder), hub).wait():
            raise SystemExit(f"{name} does not run unbroken")
        return kept(COMMANDS[name], Path(folder)), time.perf_counter() - began


def kill_often(model: str, times: int, names: Sequence[str], seed: int) -> dict[str, Any]:
    """So many kills, over the commands in turn."""
    rng, wholes, found = random.Random(seed), {}, Counter[str]()
    with ExitStack() as open_while:
        downloads = any(name.startswith("download") for name in names)
        hub = open_while.enter_context(local_hub()) if downloads else ""
        for number in range(times):
            name = names[number % len(names)]
            if name not in wholes:
                wholes[name] = unbroken(name, model, hub)
            whole, took = wholes[name]
            verdict = trial(name, model, whole, rng.uniform(0.2, 1.0) * took, hub)
            found[verdict] += 1
            print(number + 1, verdict, file=sys.stderr, flush=True)
    return {"model": model, "kills": times, "commands": list(names), "found": dict(found)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("scripts.measure.kills", description=__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    result = kill_often(args.model, args.times, args.only, args.seed)
    print(json.dumps(result, indent=1))
    return int(not all(verdict.endswith(HELD) for verdict in result["found"]))


if __name__ == "__main__":
    sys.exit(main())
