"""The raw files of a card's page: speed at LlamaGen-XL's sizes, one image and eight, in the card's best graph mode.

    python -m lantern_lab.measure.card --name rtx3090     # xl-rtx3090.json and xl-rtx3090-batches.json
    python -m lantern_lab.measure.card --device cpu --model builtin --num-images 1 --output tried

It widens the embedded model (with `--model` it takes another one as it is), and measures settings in turns. A file that
is there is not made again. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIZES = "llamagen-xl"
SETTINGS = "ar,scd@8,scd@16,eagle@chain,eagle@naive_extend_57,lantern++@chain"
XL = "xl"  # the folder of the widened model


def commands(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Each file or folder with the command that makes it; they run in its folder, so that reports name no path."""
    model = args.model or XL
    if args.model is None:
        yield XL, f"models stretch {SIZES} --output {XL}"
    first, start = args.batch_sizes.partition(",")[0], Path(model).name
    for sizes, ending in ((first, ""), (args.batch_sizes, "-batches")):
        file = f"{start}-{args.name}{ending}.json"
        bench = f"bench --model {model} --device {args.device} --method {SETTINGS} --graphs auto"
        yield (
            file,
            f"{bench} --batch-sizes {sizes} --num-images {args.num_images} --interleave --output {file}",
        )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Make the raw files of a card's page.")
    add = parser.add_argument
    add("--name", default="card", help="of the card, in the names of files")
    add("--device", default="cuda")
    add("--model", help=f"measured in place of the embedded one at the sizes of {SIZES}")
    add("--batch-sizes", default="1,8", help="the first alone in one file, all in the other")
    add("--num-images", type=int, default=8, help="timed images of each row")
    add("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the files")
    add("--data-dir", type=Path, default=Path("data"), help="folder of the widened model")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    args.data_dir.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    for made, command in commands(args):
        goal = args.data_dir / made if made == XL else args.output / made
        if goal.exists():
            print(f"{goal} is there", file=sys.stderr)
            continue
        print(f"lantern-hpu {command}", file=sys.stderr, flush=True)
        run = [sys.executable, "-m", "lantern_hpu", *command.split()]
        done = subprocess.run(run, cwd=args.data_dir, env=os.environ | {"PYTHONPATH": path})
        if done.returncode:
            return done.returncode
        if made != XL:
            args.output.mkdir(parents=True, exist_ok=True)
            shutil.move(args.data_dir / made, goal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
