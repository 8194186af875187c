"""Find the static tree, or the window, that draws fastest with this model on this device.

    lantern-hpu tune
    python -m lantern_hpu.generate --tree auto --prompt "a red apple"

What a step costs is measured over trees of different shapes, in the graph mode that will draw; which drafts are
accepted, on images drawn with the method's own relaxation, first with a typical tree and then with the best tree that
follows, as a tree also decides where steps begin. `tune/search.py` puts the two together. What it expects is then
measured, on other seeds, beside `ar` and the named trees. The fastest tree is saved for `--tree auto`, with a note if
`ar` is faster still. Windows (`--method scd`) are few: each width is drawn with. Of a large
model on a processor, whose images take minutes, fewer and smaller trees are measured, with an image each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from lantern_hpu.backends import DeviceOptions, prepare
from lantern_hpu.bench.cases import has_long_steps
from lantern_hpu.commands.options import (
    Parser,
    add_device_options,
    add_fields,
    add_part_options,
    device_options,
    file_path,
    given_fields,
    given_parts,
)
from lantern_hpu.errors import DeviceError, OptionError, exit_code, needing
from lantern_hpu.files import check_free, write_file
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.results.prompts import read_prompts
from lantern_hpu.tree import tuned_trees
from lantern_hpu.tune.options import LARGE, TuneOptions, check_profile, read_profile

if TYPE_CHECKING:
    from lantern_hpu.tune.result import TuningResult

KIND = "lantern_hpu.tune"


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "lantern-hpu tune",
        description="Find the draft tree or window that is fastest for a model on this device.",
    )
    what = parser.add_argument_group("what to tune for")
    what.add_argument(
        "--model", default="builtin", help="model name, Hub id, folder or weights file (builtin)"
    )
    add_part_options(what)
    add_device_options(what)
    add_fields(what, DeviceOptions, "quantize")
    add_fields(what, TuneOptions, "method", "batch_size")
    add_fields(parser.add_argument_group("which trees"), TuneOptions, "max_nodes", "max_depth")
    how = parser.add_argument_group("how to measure")
    how.add_argument(
        "--prompts",
        type=file_path,
        metavar="FILE",
        help="prompts: .txt, .tsv or .json (eight built-in prompts)",
    )
    add_fields(how, TuneOptions, "images", "seed")
    how.add_argument(
        "--profile",
        type=file_path,
        metavar="FILE.json",
        help="reuse the acceptance statistics of an earlier --report",
    )
    where = parser.add_argument_group("where it goes")
    where.add_argument(
        "--output",
        type=file_path,
        metavar="TREE.json",
        help="write the tree, for `generate --tree`",
    )
    where.add_argument(
        "--report", type=file_path, metavar="FILE.json", help="write all measurements"
    )
    where.add_argument("--force", action="store_true", help="replace existing files")
    return parser


def check_outputs(files: Sequence[Path | None], force: bool) -> None:
    """Raise an error if one of the files, where asked for, could not be written later."""
    asked = [file for file in files if file is not None]
    for file in asked:
        if file.suffix != ".json":
            raise OptionError(f"cannot write {file}", "it will be JSON", "a name ending in .json")
    check_free(asked, force)


def save_fastest(
    tuning: TuningResult, situation: tuned_trees.Situation, args: argparse.Namespace
) -> None:
    """Keep the fastest tree for `--tree auto`, and print the command that draws with it."""
    from lantern_hpu.tune.result import fastest_command

    best = tuning.best
    file = tuned_trees.save_tree(
        situation, tuned_trees.TunedTree(best.tree, tuning.ar_wins, best.measured.ms_per_token)
    )
    print(
        f"saved {file}\nto draw with the fastest:\n  {fastest_command(tuning, situation, vars(args))}"
    )


def tune_trees(args: argparse.Namespace, argv: Sequence[str]) -> None:
    options = TuneOptions(**given_fields(TuneOptions, args))
    check_outputs([args.output, args.report], args.force)
    prompts = read_prompts(args.prompts) if args.prompts else []
    is_window = METHODS[options.setting.method].rule is not None
    if is_window and args.profile:
        raise OptionError(f"--profile has no use for {options.method}", "each width is drawn with")
    counts, earlier = read_profile(args.profile) if args.profile else (None, None)
    device = device_options(args)
    if not is_window:
        with needing("scipy", "what steps cost is fitted with it", "tune"):
            import_module("scipy.optimize")
    prepare(device.device, device.graphs)  # before torch is imported
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.tune.result import tuning_text
    from lantern_hpu.tune.tuner import check_model, run_tuning, tuning_report

    loaded = LanternPipeline.from_pretrained(args.model, given=given_parts(args), **vars(device))
    with closing(loaded) as pipeline:
        situation = pipeline.situation(str(options.setting), options.batch_size)
        check_model(pipeline, situation)
        if has_long_steps(pipeline):
            options = TuneOptions(**LARGE | given_fields(TuneOptions, args))
        if earlier is not None:
            check_profile(earlier, situation, args.profile)
        tuning = run_tuning(pipeline, options, prompts, counts)
        print(tuning_text(tuning))
        if tuning.doubt:
            hint = "the same command when nothing else runs here, or more --images"
            raise DeviceError("nothing is saved", tuning.doubt, hint)
        whole = tuning_report(pipeline, options, tuning, situation, KIND, argv)
    tree = tuned_trees.tree_file(tuning.best.tree)
    for file, data in ((args.output, tree), (args.report, json.dumps(whole, indent=1).encode())):
        if file is not None:
            write_file(file, data, args.force)
            print(f"wrote {file}")
    save_fastest(tuning, situation, args)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)
    return exit_code(lambda: tune_trees(args, given))
