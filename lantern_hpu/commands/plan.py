"""Whether a model fits on a device, before anything is loaded.

    lantern-hpu plan llamagen-t2i-512 --memory 24GB --batch-size 4
    lantern-hpu plan anole-7b --memory 24GB --serve --methods scd,ar --slots 4

See `lantern_hpu/decode/memory.py` for what is counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from lantern_hpu.backends import BYTES, DeviceOptions
from lantern_hpu.commands.options import Parser, add_fields, from_args
from lantern_hpu.commands.serve import names
from lantern_hpu.decode.memory import fit_report
from lantern_hpu.errors import exit_code
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.models.files.names import Given
from lantern_hpu.plan.requirements import (
    facts,
    find_device,
    find_model,
    plan_report,
    serve_report,
    setup_of,
)
from lantern_hpu.serve.options import DEFAULT, ServeOptions


def make_parser() -> argparse.ArgumentParser:
    about = "Show how much memory generation with a model needs, without loading it."
    parser = Parser("lantern-hpu plan", description=about)
    add = parser.add_argument
    add("name", metavar="NAME", help="model name, Hub id, folder or weights file")
    add("--device", default="auto", help="auto, a device, or DEVICE:24GB (auto)")
    add("--memory", metavar="24GB", help="device memory, instead of asking the device")
    add("--batch-size", type=int, default=1, help="images decoded together (1)")
    add("--cfg-scale", type=float, help="guidance scale; 1 turns it off and halves the rows")
    add("--dtype", default="auto", help=f"auto, {', '.join(BYTES)} (auto)")
    add_fields(parser, DeviceOptions, "quantize", "keep_text")
    add("--method", help=f"{', '.join(METHODS)} (auto)")
    add("--tree", help="a named tree, or a .json file (the method's on the device)")
    serving = parser.add_argument_group("for a server, whose engines are there together")
    serving.add_argument("--serve", action="store_true", help="count what `serve` captures")
    serving.add_argument("--methods", help=f"methods that it serves ({','.join(DEFAULT)})")
    serving.add_argument("--slots", type=int, default=ServeOptions.slots, help="its slots (8)")
    add("--json", action="store_true", help="print as JSON")
    add_fields(parser.add_argument_group("parts in place of the model's own"), Given)
    return parser


def print_plan(args: argparse.Namespace) -> None:
    model = find_model(args.name, from_args(Given, args))
    device = find_device(args.device, args.memory, model.config.target.parameters)
    setup = setup_of(
        model,
        device,
        args.dtype,
        args.method,
        args.tree,
        batch_size=args.batch_size,
        guidance=model.guided if args.cfg_scale is None else args.cfg_scale != 1,
        quantize=args.quantize,
        keep_text=args.keep_text or DeviceOptions.keep_text,
    )
    if args.serve:
        asked = names(args.methods, "--methods") or DEFAULT
        print("\n".join(serve_report(args.name, model, device, setup, asked, args.slots)))
        return
    if args.json:
        print(json.dumps(facts(model.config, setup, device), indent=2))
        return
    print(plan_report(args.name, model.config, setup))
    print("\n".join(fit_report(model.config, setup, device)))


def main(argv: Sequence[str] | None = None) -> int:
    """The `plan` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: print_plan(args))
