"""Find the static tree, or the window, that draws fastest with this model on this device.

    lantern-hpu tune
    python -m lantern_hpu.generate --method eagle@auto --prompt "a red apple"

`ar` and the named trees, or windows of a few widths (`--method scd`), draw the same prompts and seeds in turns. The
fastest is saved for `--method METHOD@auto`, with a note if `ar` is faster still. Of a large model on a processor,
whose images take long, smaller trees are measured, with fewer images each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing

from lantern_hpu.backends import DeviceOptions, prepare
from lantern_hpu.commands.options import (
    Parser,
    add_device_options,
    add_fields,
    from_args,
    given_fields,
)
from lantern_hpu.errors import DeviceError, exit_code
from lantern_hpu.files import check_free, write_file
from lantern_hpu.methods import tuned_trees
from lantern_hpu.methods.setting import Setting
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.results.prompts import read_prompts
from lantern_lab.measure.options import TUNE_LARGE, TuneOptions, has_long_steps


def make_parser() -> argparse.ArgumentParser:
    about = "Find the draft tree or window that is fastest for a model on this device."
    parser = Parser("lantern-hpu tune", description=about)
    add_fields(parser, TuneOptions)
    add_fields(parser, PartOverrides, "drafter", "text_encoder")
    add_device_options(parser)
    add_fields(parser, DeviceOptions, "quantize")
    parser.only_keys("text_encoder")
    return parser


def tune_options(args: argparse.Namespace, **usual: int) -> TuneOptions:
    """What was given, else what is `usual`."""
    given = given_fields(TuneOptions, args)
    method = str(Setting.parse(given.get("method", TuneOptions.method)))
    return TuneOptions(**{**usual, **given, "method": method})


def tune_trees(args: argparse.Namespace, argv: Sequence[str]) -> None:
    options = tune_options(args)
    check_free([file for file in (options.output, options.report) if file], options.force)
    prompts = read_prompts(options.prompts) if options.prompts else ()
    device = from_args(DeviceOptions, args)
    prepare(device.device, device.graphs)  # before torch is imported
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_lab.measure import tune
    from lantern_lab.measure.reports import heading

    given = from_args(PartOverrides, args)
    loaded = LanternPipeline.from_pretrained(options.model, given=given, **vars(device))
    with closing(loaded) as pipeline:
        situation = pipeline.situation(str(options.setting), options.batch_size)
        tune.check_model(pipeline, situation)
        if has_long_steps(pipeline):
            options = tune_options(args, images=TUNE_LARGE["images"])
        tuning = tune.tune(pipeline, options, prompts)
        print(tuning.text())
        if tuning.doubt:
            hint = "the same command when nothing else runs here"
            raise DeviceError("nothing is saved", tuning.doubt, hint)
        report = heading("lantern_hpu.tune", pipeline, argv)
    best, tree = tuning.rows[tuning.best], tuning.trees[tuning.best]
    report |= {
        "situation": situation,
        "images": options.images,
        "rows": [row.as_json() for row in tuning.rows],
        "fastest": "ar" if tuning.ar_wins else best.tree,
    }
    content = {
        options.output: tuned_trees.tree_file(tree),
        options.report: json.dumps(report, indent=1).encode(),
    }
    for file, data in content.items():
        if file is not None:
            write_file(file, data, options.force)
            print(f"wrote {file}")
    saved = tuned_trees.save_tree(situation, tuned_trees.TunedTree(tree, tuning.times_ar(best)))
    command = tune.fastest_command(tuning, situation, vars(args))
    print(f"saved {saved}\nto draw with the fastest:\n  {command}")


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)
    return exit_code(lambda: tune_trees(args, given))
