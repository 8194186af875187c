"""The `train` command.

    lantern-hpu train drafter --data prompts.txt --output my-drafter
    torchrun --nproc_per_node 4 -m lantern_hpu.train drafter --data prompts.txt --output my-drafter

The target draws images of the prompts at its own sampling settings, the drafter learns from them - and from pictures as
tokens, if there are any - and the weights with the most accepted drafts on held-out images are kept. `generate
--drafter my-drafter` uses them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import HOST, prepare
from lantern_hpu.commands.options import (
    add_device_options,
    add_part_options,
    device_options,
    given_parts,
    taken,
)
from lantern_hpu.errors import OptionError, OutputError, exit_code, require
from lantern_hpu.results.prompts import read_prompts
from lantern_hpu.train.options import TrainOptions

if TYPE_CHECKING:
    from lantern_hpu.pipeline import LanternPipeline

NEEDED = ("accelerate", "matplotlib")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lantern-hpu train", description="Train a drafter.")
    commands = parser.add_subparsers(dest="command", required=True)
    drafter = commands.add_parser("drafter", help="for a target, from prompts alone")
    drafter.add_argument("--model", default="builtin", help="whose drafter it is to be (builtin)")
    drafter.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="prompts: .txt, .tsv or .json"
    )
    drafter.add_argument(
        "--tokens", type=Path, metavar="FILE", help="learn from these pictures too: .npz of tokens"
    )
    drafter.add_argument(
        "--finetune",
        action="store_true",
        help="begin with the drafter that the model has, or with that of --drafter",
    )
    drafter.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    drafter.add_argument("--resume", action="store_true", help="go on with what lies in --output")
    add_device_options(drafter, graphs=False)
    add_part_options(drafter)
    drafter.add_argument(
        "--mixed-precision", default="no", choices=["no", "bf16", "fp16"], help="(no)"
    )
    drafter.add_argument("--samples", type=int, default=1024, help="images to learn from (1024)")
    drafter.add_argument("--steps", type=int, default=2000, help="(2000)")
    drafter.add_argument("--batch", type=int, default=4, help="images a step and process (4)")
    drafter.add_argument("--unroll", type=int, default=3, help="drafts deep (3)")
    drafter.add_argument("--lr", type=float, default=1e-3, help="(0.001)")
    drafter.add_argument("--measure-every", type=int, default=250, help="steps (250)")
    drafter.add_argument("--measured", type=int, default=8, help="held-out images (8)")
    drafter.add_argument("--seed", type=int, default=0, help="(0)")
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuse what can be refused before torch is loaded."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        hint = 'pip install -e ".[train]"'
        raise OptionError(f"training needs {' and '.join(missing)}", "not installed", hint)
    least = int(args.tokens is None)
    require(args.samples >= least, "--samples", args.samples, f"{least} or more")
    state = args.output / "state.pt"
    if state.exists() and not args.resume:
        why = "a training run lies there"
        raise OutputError(f"{args.output} is taken", why, "--resume, or another --output")
    if args.resume and not state.exists():
        why = f"there is no {state.name}"
        hint = "without --resume; samples that lie there are used again"
        raise OutputError(f"nothing to resume in {args.output}", why, hint)
    if args.output.exists() and not args.output.is_dir():
        raise OutputError(f"{args.output} is a file", "a folder was to be written there")


def train(args: argparse.Namespace) -> dict[str, Any]:
    """The whole command after parsing; only the main process has a report."""
    check(args)
    options = TrainOptions(**taken(TrainOptions, args))
    prompts = read_prompts(args.data)
    device = replace(device_options(args), graphs="eager", layout="plain")
    prepare(device.device, device.graphs)
    from accelerate import Accelerator

    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.train import samples
    from lantern_hpu.train.drafter import DrafterTraining, begin

    learned, held_out = samples.split(prompts)
    given = given_parts(args)
    with closing(
        LanternPipeline.from_pretrained(args.model, given=given, **vars(device))
    ) as pipeline:
        target = pipeline.model.target.config
        known = args.tokens and samples.read_tokens(args.tokens, target, held_out)
        start = begin(pipeline.model, args.finetune, options.seed)
        precision = args.mixed_precision
        accelerator = Accelerator(cpu=pipeline.backend.name == HOST, mixed_precision=precision)
        check_wiring(pipeline, prompts[0], accelerator.is_main_process)

        def drawn(prompts: Sequence[str], count: int, folder: str) -> samples.Samples:
            place = args.output / folder
            return samples.draw(pipeline, prompts, count, place, accelerator, seed=options.seed)

        lessons = drawn(learned, args.samples, "samples")
        if known:
            lessons += known
        measured = drawn(held_out, options.measured, "held-out")
        run = DrafterTraining(pipeline, start, lessons, measured, args.output, options, accelerator)
        if args.resume:
            run.resume()
        return run.run()


def check_wiring(pipeline: LanternPipeline, prompt: str, shown: bool) -> None:
    """Raise a WeightsError if the target does not agree with itself; say how well it does."""
    from lantern_hpu.train import wiring

    more = wiring.check(pipeline, prompt)
    if shown:
        said = f"{more} steps more than the fewest" if more else "all of its drafts accepted"
        print(f"wiring: the target as its own drafter, {said}", file=sys.stderr)


def summary(report: dict[str, Any], folder: Path) -> str:
    """What came out, in a few lines."""
    exact, relaxed = report["eagle"], report["lantern++"]
    depths = ", ".join(f"{share:.2f}" for share in exact["by_depth"])
    return (
        f"tokens a step on held-out prompts: eagle {exact['tokens_per_step']:.2f}, "
        f"lantern++ {relaxed['tokens_per_step']:.2f}; accepted by depth {depths}\n"
        f"kept step {report['kept_step']} -> {folder}"
    )


def run(args: argparse.Namespace) -> None:
    if report := train(args):
        print(summary(report, args.output))


def main(argv: Sequence[str] | None = None) -> int:
    """The `train` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: run(args))
