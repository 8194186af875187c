"""Measure how far each method moves the distribution of the next token.

    lantern-hpu fidelity --num-images 64 --output fidelity.json
    lantern-hpu fidelity --quantize int8 --method ar

The second measures what the smaller weights cost, too. What is measured, and how: `lantern_lab/measure/fidelity.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from lantern_hpu.backends import DeviceOptions, prepare
from lantern_hpu.commands.options import (
    Parser,
    add_device_options,
    add_fields,
    add_method_options,
    file_path,
    from_args,
    settings_of,
)
from lantern_hpu.errors import OptionError, exit_code
from lantern_hpu.files import check_free
from lantern_hpu.methods.relaxation import EXACT
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.results.tables import markdown
from lantern_lab.evaluate.quality_rows import plus_minus
from lantern_lab.measure.options import FidelityOptions
from lantern_lab.measure.reports import heading, show_report

DEFAULT_ROWS = (
    "ar,eagle,eagle2,lantern:delta-0.1,lantern:delta-0.2,lantern:delta-0.4,"
    "lantern++:lambda-5,lantern++:lambda-20,lantern++:omega-2,"
    "jacobi,scd,scd:delta-0.2,scd:lambda-5,scd:omega-2,sjd-pac,sjd-pac:delta-0.2,sjd-pac:lambda-5,sjd-pac:omega-2"
)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "lantern-hpu fidelity",
        description="Measure each method's total variation distance to the target distribution.",
    )
    parser.add_argument("--model", default="builtin", help="`builtin`, or a model folder (builtin)")
    add_device_options(parser, graphs=False)
    add_fields(parser, DeviceOptions, "quantize")
    add_method_options(parser, DEFAULT_ROWS)
    add_fields(parser, FidelityOptions, "images", "draws", "timed")
    parser.add_argument("--output", type=file_path, default=None, metavar="FILE.json")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    return parser


def fidelity_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("method", "setting", "tokens a step", "ms an image", "TV of the next token")
    lines = []
    for row in rows:
        method = row["method"]
        left_open = "default" if METHODS[method].relaxation else "exact"
        setting = row["row"].removeprefix(method).lstrip(":") or left_open
        figures = f"{row['tokens_per_step']:.2f}", f"{row['ms_per_image']:.0f}"
        lines.append((method, setting, *figures, tv_text(row)))
    return markdown(head, lines)


def weights_text(kind: str, cost: dict[str, Any]) -> str:
    """What smaller weights cost, in a line."""
    mean = plus_minus(cost["tv"], cost["tv_interval"], 4)
    over = f"over {cost['tokens']:,} tokens of {cost['images']} images"
    largest = f"{cost['tv_largest']:.3f} at most"
    return f"{kind} weights: TV of the next token {mean} on average, {largest}, {over}"


def tv_text(row: dict[str, Any]) -> str:
    """The figure with its interval; an exact method's is what the estimate's noise leaves."""
    figure = plus_minus(row["tv"], row["tv_interval"])
    if row["method"] in ("ar", "jacobi"):  # draws from the target's own distribution
        return "0"
    return f"0 (measured {figure})" if row["relaxation"] == EXACT.as_json() else figure


def measure_fidelity(args: argparse.Namespace, argv: Sequence[str]) -> None:
    settings = settings_of(args, DEFAULT_ROWS)
    options = from_args(FidelityOptions, args)
    if args.output:
        check_free([args.output], args.force)
    device = replace(from_args(DeviceOptions, args), graphs="eager")
    prepare(device.device, device.graphs)  # before torch is imported
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.results.progress import ProgressBar
    from lantern_lab.measure.fidelity import fidelity_rows, images_total, weights_cost

    load = partial(LanternPipeline.from_pretrained, args.model)
    with closing(load(**vars(device))) as pipeline:
        more, lines = dict[str, Any](), list[str]()
        if device.quantize:
            whole = load(**vars(replace(device, quantize=None)))
            if whole.model.quantize:
                why = f"its matrices are {whole.model.quantize} already"
                hint = "the folder that it was converted from"
                raise OptionError(f"{args.model} has nothing to compare with", why, hint)
            with closing(whole), ProgressBar(options.images, "image") as bar:
                more["weights"] = weights_cost(whole, pipeline, options, bar)
            lines = [weights_text(device.quantize, more["weights"]), ""]
        with ProgressBar(images_total(pipeline, settings, options), "image") as bar:
            found = fidelity_rows(pipeline, settings, options, bar)
            rows = [row.as_json() for row in found]
        sizes = {name: value for name, value in asdict(options).items() if name != "seed"}
        result = heading("lantern_hpu.fidelity", pipeline, argv) | sizes | {"rows": rows} | more
    show_report(result, "\n".join([*lines, fidelity_table(rows)]), args.output, args.force)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)
    return exit_code(lambda: measure_fidelity(args, given))
