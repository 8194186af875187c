"""Everything that shows the embedded model, made anew: sheets, animation, figures, tables.

    python -m scripts.measure.renew                          # after scripts.embedded_model.export has written a model
    python -m scripts.measure.renew --only sheets,tables

One step after the other, each a command that can be run alone. A step that was done with these weights is left out,
and evaluation and TV go on where they were stopped. `race` and `bench` are timed: nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from lantern_hpu.files import ASSETS, sha256, write_file
from scripts import ROOT

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


@dataclass(frozen=True)
class Task:
    """A command, and where its files belong.

    Attributes:
        module: of the command, with its options. files: from the working folder to the repository.
    """

    module: str
    options: tuple[str, ...] = ()
    files: dict[str, Path] = field(default_factory=dict)


def tasks(images: int, processor: str) -> dict[str, Task]:
    """All of them, in order; they run in the working folder, so that their reports name no path of a machine.

    Args:
        images: captions drawn once by each setting that is evaluated.
        processor: ending of the benchmark's file.
    """
    bench = f"embedded-{processor}.json"
    evaluate = ("evaluate", "--preset", "scenes", "--rows", EVALUATED, "--images", str(images))
    workers = ("--workers", "2", "--threads", "1", "--batch-size", "8")
    rows = ("--batch-sizes", "1", "--graphs", "eager", "--methods", MEASURED, "--interleave")
    return {
        "sheets": Task("scripts.docs.readme_pictures", ("--output", str(IMAGES / "examples.png"))),
        "race": Task("scripts.docs.race", ("--output", str(IMAGES / "race.gif"), "--force")),
        "evaluate": Task(
            "lantern_hpu",
            (*evaluate, *workers, "--output", "pictures"),
            {
                "pictures/evaluation.json": RESULTS / "pictures-embedded.json",
                "pictures/quality-tokens.png": IMAGES / "quality.png",
                "pictures/quality-tv.png": IMAGES / "pictures-tv.png",
            },
        ),
        "tv": Task(
            "scripts.measure.frontier",
            ("--output", "tv.json", "--plot", "tv.png"),
            {"tv.json": RESULTS / "tv-embedded.json", "tv.png": IMAGES / "tv.png"},
        ),
        "bench": Task(
            "lantern_hpu",
            ("bench", "--device", "cpu", *rows, "--output", bench, "--force"),
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
    command = [sys.executable, "-m", task.module, *task.options]
    subprocess.run(command, check=True, cwd=work, env=os.environ | {"PYTHONPATH": path})
    for name, goal in task.files.items():
        shutil.copyfile(work / name, goal)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make all that shows the embedded model anew.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--only", help="names of steps, with commas between")
    parser.add_argument("--images", type=int, default=1000, help="captions of the evaluation")
    parser.add_argument("--processor", default="cpu", help="ends the name of the benchmark's file")
    arguments = parser.parse_args()
    work = (arguments.data_dir / "renewed" / weights()).resolve()
    work.mkdir(parents=True, exist_ok=True)
    known = tasks(arguments.images, arguments.processor)
    wanted = arguments.only.split(",") if arguments.only else list(known)
    if unknown := sorted(set(wanted) - set(known)):
        print(
            f"--only: no step {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr
        )
        return 2
    done = work / "done.json"
    finished = json.loads(done.read_text()) if done.exists() else []
    for name in tqdm([name for name in known if name in wanted], unit="step"):
        if name in finished and not arguments.only:
            continue
        tqdm.write(f"{name}: {known[name].module} {' '.join(known[name].options)}", sys.stderr)
        run(known[name], work)
        finished = sorted({*finished, name})
        write_file(done, json.dumps(finished).encode(), force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
