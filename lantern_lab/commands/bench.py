"""Measure methods side by side, with the same weights, sampler, seeds and batch, in one run.

    lantern-hpu bench --output bench.json

Every figure is measured on this machine. Each (method, tree, graph mode, batch size) is warmed up - captured,
replayed, and run for a few steps - before anything is timed, and the warm-up is reported, not hidden. Speed is given
against `ar` in the same graph mode and batch, and against the method's own eager run. `measure/rows.py` has the
figures of the report; `lantern-hpu compare` puts several of them together.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing

from lantern_hpu.backends import DeviceOptions, prepare
from lantern_hpu.commands import options
from lantern_hpu.errors import Arg, OptionError, exit_code, listed, require, words
from lantern_hpu.files import check_free
from lantern_hpu.graphs import RUNNERS
from lantern_hpu.methods.setting import AUTO
from lantern_lab.measure.options import (
    GRAPHS,
    LARGE,
    RANDOM,
    USUAL,
    BenchRequest,
    has_long_steps,
    large,
)
from lantern_lab.measure.reports import show_report
from lantern_lab.measure.rows import speed_tables


def make_parser() -> argparse.ArgumentParser:
    about = "Measure methods and graph modes side by side on one device."
    parser = options.Parser("lantern-hpu bench", description=about)
    add = parser.add_argument
    modes = f"comma-separated graph modes; `auto` is the device's best ({GRAPHS})"
    usual = f"{USUAL['batch_sizes']}, up to --num-images; {LARGE['batch_sizes']} of a large model on a CPU"
    options.add_fields(parser, BenchRequest)
    options.add_device_options(parser, graphs=False)
    options.add_fields(parser, DeviceOptions, "kernels", "quantize")
    options.add_method_options(parser, USUAL["methods"])
    add("--graphs", help=modes)
    options.add_fields(parser, DeviceOptions, "threads")
    add("--batch-sizes", help=f"comma-separated ({usual})")
    add("--output", type=options.file_path, metavar="FILE.json")
    add("--force", action="store_true", help="replace an existing file")
    parser.only_keys("threads")
    return parser


def bench_request(args: argparse.Namespace, usual: Mapping[str, str] = USUAL) -> BenchRequest:
    """What was asked for; else what is `usual`."""
    sizes = listed(args.batch_sizes or usual["batch_sizes"], "batch_sizes")
    if args.num_images and not args.batch_sizes:  # no more than was asked for is drawn together
        sizes = [size for size in sizes if int(size) <= args.num_images] or sizes[:1]
    whole = all(size.isdecimal() and int(size) >= 1 for size in sizes)
    require(whole, "batch_sizes", args.batch_sizes, "numbers from 1, such as 1,8")
    given = {"images": int(usual["images"])} if "images" in usual else {}
    return BenchRequest(
        options=options.from_args(DeviceOptions, args),
        settings=options.settings_of(args, usual["methods"]),
        modes=listed(
            args.graphs or usual.get("graphs", GRAPHS), "graphs", "graph mode", [AUTO, *RUNNERS]
        ),
        by_name=args.graphs is not None,
        batches=[int(size) for size in sizes],
        **given | options.given_fields(BenchRequest, args),
    )


def time_first_stage(args: argparse.Namespace, given: Sequence[str]) -> None:
    """`bench` of a model without its files."""
    for name in ("num_images", "interleave"):
        if getattr(args, name):
            what = words(Arg("random_weights", True), "has no", Arg(name))
            raise OptionError(what, "no image is drawn")
    wanted = bench_request(args, RANDOM)
    for setting in wanted.settings:
        allowed = "methods without a drafter, as random weights have none"
        require(not setting.needs_drafter, "method", str(setting), allowed)
    require(len(wanted.modes) == 1, "graphs", args.graphs, "one graph mode with random weights")
    from lantern_lab.measure.first_stage import measure, tables

    report = measure(wanted, given)
    show_report(report, tables(report), args.output, args.force)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)

    def command() -> None:
        wanted = bench_request(args)
        if args.output:
            check_free([args.output], args.force)
        began = time.perf_counter()
        prepare(wanted.options.device, wanted.mode)  # before torch is imported
        if wanted.random_weights:
            time_first_stage(args, given)
            return
        from lantern_lab.measure.bench import open_pipeline, run_bench

        import_s = time.perf_counter() - began
        with closing(open_pipeline(wanted)) as pipeline:
            if has_long_steps(pipeline):
                wanted = bench_request(args, large(pipeline))
            report = run_bench(pipeline, wanted, given, import_s)
        show_report(report, speed_tables(report), args.output, args.force)

    return exit_code(command)
