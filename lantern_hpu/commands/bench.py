"""Measure methods side by side, with the same weights, sampler, seeds and batch, in one run.

    lantern-hpu bench --output bench.json
    lantern-hpu bench --random-weights anole-7b --output anole.json

Every figure is measured on this machine. Each (method, tree, graph mode, batch size) is warmed up - captured,
replayed, and run for a few steps - before anything is timed, and the warm-up is reported, not hidden. Speed is given
against `ar` in the same graph mode and batch, and against the method's own eager run. The report follows
`assets/bench.schema.json`; `lantern_hpu.lab.compare` puts several of them together.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

from lantern_hpu.backends import prepare
from lantern_hpu.bench.cases import (
    GRAPHS,
    RANDOM,
    USUAL,
    BenchRequest,
    find_entry,
    settings_for,
)
from lantern_hpu.bench.columns import show_report, tables
from lantern_hpu.commands.options import (
    add_device_options,
    add_fields,
    add_processor_options,
    file_path,
    taken,
)
from lantern_hpu.errors import OptionError, exit_code, listed, require
from lantern_hpu.files import check_free
from lantern_hpu.graphs import RUNNERS
from lantern_hpu.methods.setting import AUTO, FORM
from lantern_hpu.models.options import DeviceOptions


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern-hpu bench",
        description="Measure methods and graph modes side by side on one device.",
    )
    add = parser.add_argument
    sizes = f"time steps at the sizes of a known model, with random weights: {', '.join(RANDOM)}"
    trees = "comma-separated draft trees, each for methods that use its kind; auto is the tuned one (method default)"
    modes = f"comma-separated graph modes; `auto` is the device's best ({GRAPHS})"
    methods = USUAL["methods"]
    small = f"comma-separated, a name or {FORM} ({methods})"
    add_fields(parser, BenchRequest)
    add("--random-weights", metavar="NAME", help=sizes)
    add_device_options(parser, graphs=False)
    add_fields(parser, DeviceOptions, "kernels")
    add("--methods", help=small)
    add("--trees", "--tree", help=trees)
    add(
        "--relax",
        metavar="TEXT",
        help="relaxation for all methods that can be relaxed, windows included; see generate --help (method default)",
    )
    add("--graphs", help=modes)
    add_processor_options(parser)
    add("--batch-sizes", help="comma-separated (1,8)")
    add("--output", type=file_path, metavar="FILE.json")
    add("--force", action="store_true", help="replace an existing file")
    return parser


def fill_in(args: argparse.Namespace, usual: Mapping[str, object]) -> None:
    """Put in what was not given."""
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def bench_request(args: argparse.Namespace) -> BenchRequest:
    if args.model is not None and args.random_weights is not None:
        raise OptionError("--model and --random-weights exclude each other")
    fill_in(args, USUAL)
    methods = listed(args.methods, "--methods")
    trees = [] if args.trees is None else listed(args.trees, "--trees")
    sizes = listed(args.batch_sizes, "--batch-sizes")
    whole = all(size.isdecimal() and int(size) >= 1 for size in sizes)
    require(whole, "--batch-sizes", args.batch_sizes, "numbers from 1, such as 1,8")
    return BenchRequest(
        entry=None if args.random_weights is None else find_entry(args.random_weights),
        settings=settings_for(methods, trees, args.relax),
        modes=listed(args.graphs or GRAPHS, "--graphs", "graph mode", [AUTO, *RUNNERS]),
        by_name=args.graphs is not None,
        batches=[int(size) for size in sizes],
        **taken(BenchRequest, args),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The `bench` command; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)

    def command() -> None:
        wanted = bench_request(args)
        if args.output:
            check_free([args.output], args.force)
        began = time.perf_counter()
        prepare(wanted.device, wanted.mode)  # before torch is imported
        from lantern_hpu.bench.run_bench import run_bench

        result = run_bench(wanted, given, time.perf_counter() - began)
        show_report(result, tables(result), args.output, args.force)

    return exit_code(command)
