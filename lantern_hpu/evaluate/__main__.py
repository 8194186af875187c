"""What a method costs in pictures: draw a set of prompts with many settings, score them, put them in one table.

    python -m lantern_hpu.evaluate --model builtin --output evaluation

A run that was stopped goes on where it was; a further setting, or another metric, is added to what is there.
docs/evaluation.md has the protocols.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lantern_hpu import options
from lantern_hpu.backends import prepare
from lantern_hpu.errors import exit_code
from lantern_hpu.evaluate.options import EvaluateOptions, Setting
from lantern_hpu.options import listed, taken
from lantern_hpu.relaxation import PRESETS

DEFAULT_ROWS = (
    "ar,eagle,eagle2,lantern:delta-0.1,lantern:delta-0.2,lantern:delta-0.4,"
    "lantern++:lambda=2,lantern++:lambda-5,lantern++:lambda-20"
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.evaluate", description="What a method costs in pictures."
    )
    what = parser.add_argument_group("what is drawn")
    values = "lambda=, delta=, omega=, nu=, mu=, k="
    rows = f"comma-separated METHOD, METHOD:PRESET or METHOD:VALUE:VALUE, of {', '.join(PRESETS)} and {values}"
    what.add_argument("--model", default="builtin", help="as for `generate` (builtin)")
    options.add_part_options(what)
    what.add_argument("--rows", default=DEFAULT_ROWS, help=f"{rows} ({DEFAULT_ROWS})")
    what.add_argument("--tree", help="of the methods with a static tree (each method's own)")
    what.add_argument("--images", type=int, help="captions that are drawn once each (400)")
    what.add_argument("--panels", type=int, help="captions that are drawn four times (25)")
    what.add_argument("--seed", type=int, help="of the first picture (0)")
    what.add_argument(
        "--no-floor", action="store_true", help="draw `ar` with one set of seeds alone"
    )
    what.add_argument("--batch-size", type=int, help="images decoded together (8)")
    options.add_sampling_options(parser.add_argument_group("sampling (default: the model's own)"))
    score = parser.add_argument_group("how it is scored")
    score.add_argument("--reference", type=int, help="fresh pictures of the generator (4000)")
    score.add_argument("--rounds", type=int, help="of the bootstrap (200)")
    score.add_argument(
        "--places",
        type=int,
        help="where the law of the next token is measured; 0 leaves it out (0)",
    )
    how = parser.add_argument_group("how it runs")
    options.add_device_options(how)
    options.add_running_options(how)
    how.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="also to go on")
    return parser


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Check the options, draw, score, print and write."""
    settings = [Setting.parse(text) for text in listed(args.rows, "--rows")]
    chosen = EvaluateOptions(**taken(EvaluateOptions, args), floor=not args.no_floor)
    options.sampling_options(args, options.Sampling())
    device, given = options.device_options(args), options.given_parts(args)
    prepare(device.device, device.graphs)  # before torch is imported
    from contextlib import closing

    from lantern_hpu.evaluate.run import evaluate
    from lantern_hpu.measurements import heading
    from lantern_hpu.pipeline import LanternPipeline

    with closing(
        LanternPipeline.from_pretrained(args.model, given=given, **vars(device))
    ) as pipeline:
        sampling = options.sampling_options(args, pipeline.model.sampling)
        about = heading("lantern_hpu.evaluate", pipeline, argv)
        print(evaluate(pipeline, settings, chosen, sampling, args.output, about))
    print(f"wrote {args.output / 'evaluation.json'}, .md and the plots beside them")


def main(argv: Sequence[str] | None = None) -> int:
    """The `evaluate` command; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)
    return exit_code(lambda: run(args, given))


if __name__ == "__main__":
    sys.exit(main())
