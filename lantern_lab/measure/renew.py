"""Everything that shows the embedded model, made again: sheets, figures, tables.

    python -m lantern_lab.measure.renew                          # after lantern_lab.embedded.export has written a model
    python -m lantern_lab.measure.renew --only sheets,tables

One step after the other, each a command that can be run alone. A step that was done with these weights is left out,
and evaluation and TV go on where they were stopped. `bench` is timed: nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lantern_hpu.files import ASSETS, sha256, write_file

ROOT = Path(__file__).parents[2]
IMAGES, RESULTS = ROOT / "docs" / "images", ROOT / "benchmarks" / "results"
EVALUATED = (
    "ar,eagle@deep_7,lantern++:lambda=2@deep_7,lantern++:lambda-5@deep_7,lantern++:lambda-20@deep_7,"
    "lantern:delta-0.1@dynamic:4x3x12,lantern:delta-0.4@dynamic:4x3x12,"
    "scd@16,scd:tv=0.16@16,scd:lambda-5@16"
)
MEASURED = (
    "ar,eagle@chain_2,eagle@deep_7,eagle2@dynamic:1x0x1,lantern@dynamic:1x0x1,lantern++@chain_2,lantern++@deep_7,"
    "jacobi@4,scd@2,scd@4,scd@8,scd@16,sjd-pac@4:2x1,sjd-pac@8:3x1"
)


class Task(NamedTuple):
    """A command, and where its files belong: from the working folder to the repository."""

    command: str
    files: Mapping[str, Path] = {}


def tasks(images: int, processor: str) -> dict[str, Task]:
    """All of them, in order; they run in the working folder, so that their reports name no path of a machine.

    Args:
        images: captions drawn once by each setting that is evaluated.
        processor: ending of the benchmark's file.
    """
    bench = f"embedded-{processor}.json"
    pictures = {"pictures/evaluation.json": RESULTS / "pictures-embedded.json"}
    tv = {"tv.json": RESULTS / "tv-embedded.json"}
    return {
        "sheets": Task("scripts.docs.readme_pictures", {"examples.png": IMAGES / "examples.png"}),
        "evaluate": Task(
            f"lantern_hpu evaluate --preset scenes --method {EVALUATED} --num-images {images} "
            "--workers 2 --threads 1 --batch-size 8 --output pictures",
            pictures,
        ),
        "tv": Task("lantern_lab.measure.frontier --output tv.json", tv),
        "bench": Task(
            f"lantern_hpu bench --device cpu --batch-sizes 1 --graphs eager --method {MEASURED} "
            f"--interleave --output {bench} --force",
            {bench: RESULTS / bench},
        ),
        "tables": Task("scripts.docs.figures"),
    }


def weights() -> str:
    """A name for the embedded weights."""
    return sha256(ASSETS / "builtin" / "model.json")[:12]


def run(task: Task, work: Path) -> None:
    """Run a command and put its files where they belong."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", *task.command.split()]
    subprocess.run(command, check=True, cwd=work, env=os.environ | {"PYTHONPATH": path})
    for name, goal in task.files.items():
        shutil.copyfile(work / name, goal)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make all that shows the embedded model again.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--only", help="names of steps, with commas between")
    parser.add_argument("--num-images", type=int, default=1000, help="captions of the evaluation")
    parser.add_argument("--processor", default="cpu", help="ends the name of the benchmark's file")
    args = parser.parse_args()
    work = (args.data_dir / "renewed" / weights()).resolve()
    work.mkdir(parents=True, exist_ok=True)
    known = tasks(args.num_images, args.processor)
    wanted = args.only.split(",") if args.only else list(known)
    if unknown := sorted(set(wanted) - set(known)):
        names = ", ".join(unknown)
        print(f"--only: no step {names}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    done = work / "done.json"
    finished = json.loads(done.read_text()) if done.exists() else []
    for name in tqdm([name for name in known if name in wanted], unit="step"):
        if args.only or name not in finished:
            tqdm.write(f"{name}: {known[name].command}", sys.stderr)
            run(known[name], work)
            finished = sorted({*finished, name})
            write_file(done, json.dumps(finished).encode(), force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
