"""The `train` command.

    python -m lantern_hpu.train drafter --data prompts.txt --output my-drafter
    torchrun --nproc_per_node 4 -m lantern_hpu.train drafter --data prompts.txt --output my-drafter

The target draws images of the prompts at its own sampling settings, the drafter learns from them, and the weights
with the most accepted drafts on held-out prompts are kept. `generate --drafter my-drafter` uses them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from lantern_hpu.backends import BACKENDS, prepare
from lantern_hpu.config import require
from lantern_hpu.errors import OptionError, OutputError, exit_code
from lantern_hpu.generate import read_prompts

NEEDED = ("accelerate", "matplotlib")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lantern_hpu.train", description="Train a drafter.")
    commands = parser.add_subparsers(dest="command", required=True)
    drafter = commands.add_parser("drafter", help="for a target, from prompts alone")
    drafter.add_argument("--model", default="builtin", help="whose drafter it is to be (builtin)")
    drafter.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="prompts: .txt, .tsv or .json"
    )
    drafter.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    drafter.add_argument("--resume", action="store_true", help="go on with what lies in --output")
    drafter.add_argument("--device", default="auto", help=f"auto, {', '.join(BACKENDS)} (auto)")
    drafter.add_argument("--dtype", default="auto", help="of the target (auto)")
    drafter.add_argument(
        "--mixed-precision", default="no", choices=["no", "bf16", "fp16"], help="(no)"
    )
    drafter.add_argument("--samples", type=int, default=1024, help="images to learn from (1024)")
    drafter.add_argument("--steps", type=int, default=2000, help="(2000)")
    drafter.add_argument("--batch", type=int, default=4, help="images a step and process (4)")
    drafter.add_argument("--unroll", type=int, default=3, help="drafts deep (3)")
    drafter.add_argument("--lr", type=float, default=1e-3, help="(0.001)")
    drafter.add_argument("--measure-every", type=int, default=250, help="steps (250)")
    drafter.add_argument("--measured", type=int, default=8, help="held-out images drawn for it (8)")
    drafter.add_argument("--seed", type=int, default=0, help="(0)")
    return parser


def check(args: argparse.Namespace) -> list[str]:
    """Refuse what can be refused before torch is loaded. -> the prompts"""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        hint = 'pip install -e ".[train]"'
        raise OptionError(f"training needs {' and '.join(missing)}", "not installed", hint)
    for name in ("samples", "steps", "batch", "unroll", "measure_every", "measured"):
        value = getattr(args, name)
        require(value >= 1, "--" + name.replace("_", "-"), value, "1 or more")
    require(0 < args.lr <= 1, "--lr", args.lr, "above 0, up to 1")
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
    return read_prompts(args.data)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """The whole command after parsing."""
    prompts = check(args)
    prepare(args.device, "eager")
    from accelerate import Accelerator

    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.train import samples, wiring
    from lantern_hpu.train.drafter import DrafterTraining, Options

    learned, held_out = samples.split(prompts)
    pipeline = LanternPipeline.from_pretrained(args.model, args.device, args.dtype, "eager")
    with closing(pipeline):
        on_host = pipeline.backend.is_host
        accelerator = Accelerator(cpu=on_host, mixed_precision=args.mixed_precision)
        more = wiring.check(pipeline, prompts[0])
        said = f"{more} steps more than the fewest" if more else "all of its drafts accepted"
        if accelerator.is_main_process:
            print(f"wiring: the target as its own drafter, {said}", file=sys.stderr)
        options = Options(
            args.steps,
            args.batch,
            args.unroll,
            args.lr,
            args.measure_every,
            args.measured,
            args.seed,
        )
        drawn = samples.draw(
            pipeline, learned, args.samples, args.output / "samples", accelerator, seed=args.seed
        )
        run = DrafterTraining(pipeline, drawn, held_out, args.output, options, accelerator)
        if args.resume:
            run.resume()
        return run.run()


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
    if report := train(args):  # only the main process has one
        print(summary(report, args.output))


def main(argv: Sequence[str] | None = None) -> int:
    """The `train` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
