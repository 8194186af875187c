"""The raw files of a card's page: speed in its best graph mode, of one image and of eight, in 16, 8 and 4 bits.

    python -m lantern_lab.measure.card --name rtx3090     # xl-rtx3090.json and seven more
    python -m lantern_lab.measure.card --name rtx3090 --minutes 9
    python -m lantern_lab.measure.card --device cpu --model builtin --num-images 1 --output tried

It widens the embedded model to LlamaGen-XL's sizes and times GLM-Image with random weights, or takes the model of
`--model` alone, and measures settings in turns. `verify` comes last. A file that is there is not made again, so the
same command goes on after its `--minutes`. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

from lantern_hpu.backends import QUANTIZED

ROOT = Path(__file__).parents[2]
SIZES = "llamagen-xl"
SETTINGS = "ar,scd@8,scd@16,eagle@chain,eagle@naive_extend_57,lantern++@chain"
FEW_SETTINGS = "ar,scd@8,scd@16"  # with small matrices and random weights
XL = "xl"  # the folder of the widened model
STAGE = "glm-image"  # the model whose first stage is timed


def commands(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Each file or folder with the command that makes it; they run in its folder, so that reports name no path."""
    model = args.model or XL
    if args.model is None:
        yield XL, f"models stretch {SIZES} --output {XL}"
    first, start = args.batch_sizes.partition(",")[0], Path(model).name
    on = f"--device {args.device} --graphs auto"
    images = f"--num-images {args.num_images} --interleave"
    several = f"--batch-sizes {args.batch_sizes}"
    bench = f"bench --model {model} {on} {images} --method"
    few = f"{bench} {FEW_SETTINGS} {several}"
    stage = f"bench --model {STAGE} --random-weights {on} --method {FEW_SETTINGS} {several}"
    found = {
        f"{start}-{args.name}": f"{bench} {SETTINGS} --batch-sizes {first}",
        f"{start}-{args.name}-batches": f"{bench} {SETTINGS} {several}",
        **{f"{start}-{args.name}-{form}": f"{few} --quantize {form}" for form in QUANTIZED},
    }
    if args.model is None:
        found[f"{STAGE}-{args.name}"] = stage
        found |= {f"{STAGE}-{args.name}-{form}": f"{stage} --quantize {form}" for form in QUANTIZED}
    found[f"verify-{args.name}"] = f"verify --model {model} --device {args.device} --minutes 2"
    for name, command in found.items():
        yield f"{name}.json", f"{command} --output {name}.json"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Make the raw files of a card's page.")
    add = parser.add_argument
    add("--name", default="card", help="of the card, in the names of files")
    add("--device", default="cuda")
    add("--model", help=f"measured in place of the embedded one at the sizes of {SIZES}")
    add("--batch-sizes", default="1,8", help="the first alone in one file, all in the other")
    add("--num-images", type=int, default=8, help="timed images of each row")
    add("--minutes", type=float, default=inf, help="what is not made by then is left for later")
    add("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the files")
    add("--data-dir", type=Path, default=Path("data"), help="folder of the widened model")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    end = time.monotonic() + 60 * args.minutes
    args.data_dir.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    for made, command in commands(args):
        goal = args.data_dir / made if made == XL else args.output / made
        if goal.exists():
            print(f"{goal} is there", file=sys.stderr)
            continue
        print(f"lantern-hpu {command}", file=sys.stderr, flush=True)
        run = [sys.executable, "-m", "lantern_hpu", *command.split()]
        environment = os.environ | {"PYTHONPATH": path}
        left = None if end == inf else max(0, end - time.monotonic())
        try:
            done = subprocess.run(run, cwd=args.data_dir, env=environment, timeout=left)
        except subprocess.TimeoutExpired:
            print(f"{made} and what follows is left for the next time", file=sys.stderr)
            return 0
        if done.returncode:
            return done.returncode
        if made != XL:
            args.output.mkdir(parents=True, exist_ok=True)
            shutil.move(args.data_dir / made, goal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
