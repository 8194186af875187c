"""Find the static tree, or the window, that draws fastest with this model on this device.

    lantern-hpu tune
    python -m lantern_hpu.generate --tree auto --prompt "a red apple"

`ar` and the named trees, or windows of a few widths (`--method scd`), draw the same prompts and seeds in turns. The
fastest is saved for `--tree auto`, with a note if `ar` is faster still. Of a large model on a processor, whose images
take long, smaller trees are measured, with fewer images each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from lantern_hpu.backends import DeviceOptions, prepare
from lantern_hpu.commands.options import (
    Parser,
    add_device_options,
    add_fields,
    add_short_forms,
    from_args,
    given_fields,
)
from lantern_hpu.errors import DeviceError, exit_code
from lantern_hpu.files import check_free, write_file
from lantern_hpu.methods import tuned_trees
from lantern_hpu.methods.setting import Setting
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.results.prompts import read_prompts
from lantern_lab.bench.cases import has_long_steps
from lantern_lab.tune.options import LARGE, TuneOptions

if TYPE_CHECKING:
    from lantern_lab.tune.result import TuningResult


def make_parser() -> argparse.ArgumentParser:
    about = "Find the draft tree or window that is fastest for a model on this device."
    parser = Parser("lantern-hpu tune", description=about)
    what = parser.add_argument_group("what to tune for")
    add_fields(what, TuneOptions, "model")
    add_fields(what, PartOverrides)
    add_device_options(what)
    add_fields(what, DeviceOptions, "quantize")
    add_fields(what, TuneOptions, "method", "batch_size")
    add_short_forms(what)
    how = parser.add_argument_group("how to measure")
    add_fields(how, TuneOptions, "prompts", "images", "seed")
    where = parser.add_argument_group("where it goes")
    add_fields(where, TuneOptions, "output", "report", "force")
    return parser


def save_fastest(
    tuning: TuningResult, situation: tuned_trees.Situation, args: argparse.Namespace
) -> None:
    """Keep the fastest tree for `--tree auto`, and print the command that draws with it."""
    from lantern_lab.tune.result import fastest_command

    gain = tuning.best.times_as_fast(tuning.rows[0])
    file = tuned_trees.save_tree(situation, tuned_trees.TunedTree(tuning.best.tree, gain))
    command = fastest_command(tuning, situation, vars(args))
    print(f"saved {file}\nto draw with the fastest:\n  {command}")


def tune_options(args: argparse.Namespace, **usual: int) -> TuneOptions:
    """What was given, else what is `usual`."""
    given = given_fields(TuneOptions, args)
    method = given.get("method", TuneOptions.method)
    setting = Setting.of(method, args.relax, args.tree, args.window)
    return TuneOptions(**{**usual, **given, "method": str(setting)})


def tune_trees(args: argparse.Namespace, argv: Sequence[str]) -> None:
    options = tune_options(args)
    check_free([file for file in (options.output, options.report) if file], options.force)
    prompts = read_prompts(options.prompts) if options.prompts else []
    device = from_args(DeviceOptions, args)
    prepare(device.device, device.graphs)  # before torch is imported
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_lab.tune.result import tuning_text
    from lantern_lab.tune.tuner import check_model, run_tuning, tuning_report

    given = from_args(PartOverrides, args)
    loaded = LanternPipeline.from_pretrained(options.model, given=given, **vars(device))
    with closing(loaded) as pipeline:
        situation = pipeline.situation(str(options.setting), options.batch_size)
        check_model(pipeline, situation)
        if has_long_steps(pipeline):
            options = tune_options(args, images=LARGE["images"])
        tuning = run_tuning(pipeline, options, prompts)
        print(tuning_text(tuning))
        if tuning.doubt:
            hint = "the same command when nothing else runs here"
            raise DeviceError("nothing is saved", tuning.doubt, hint)
        whole = tuning_report(pipeline, options, tuning, situation, argv)
    tree, report = tuned_trees.tree_file(tuning.best.tree), json.dumps(whole, indent=1).encode()
    for file, data in ((options.output, tree), (options.report, report)):
        if file is not None:
            write_file(file, data, options.force)
            print(f"wrote {file}")
    save_fastest(tuning, situation, args)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)
    return exit_code(lambda: tune_trees(args, given))
