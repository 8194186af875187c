"""Whether a model fits on a device, before anything is loaded; without a model, which of the known ones do.

    lantern-hpu plan llamagen-t2i-512 --memory 24GB --batch-size 4
    lantern-hpu plan anole-7b --memory 24GB --serve --method scd,ar --slots 4
    lantern-hpu plan --device rtx3090

See `lantern_hpu/decode/memory.py` for what is counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import BYTES, DeviceOptions, prepare
from lantern_hpu.commands.options import Parser, add_fields, from_args, names
from lantern_hpu.errors import OptionError, as_option, exit_code, require, shell, spelled
from lantern_hpu.files import amount
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.results.tables import WIDTH, Table, aligned, figure
from lantern_hpu.serve.options import DEFAULT, ServeOptions
from lantern_hpu.zoo.registry import entries

if TYPE_CHECKING:
    from lantern_hpu.decode.memory import DeviceMemory, Setup
    from lantern_hpu.models.config import ModelConfig
    from lantern_hpu.plan.requirements import Counted

NAME_MEMORY = "  try: --memory 24GB says whether it fits"


def make_parser() -> argparse.ArgumentParser:
    about = "Show how much memory generation with a model needs, without loading it."
    parser = Parser("lantern-hpu plan", description=about)
    add = parser.add_argument
    name = "model name, Hub id, folder or weights file; without one, all known models"
    add("name", metavar="NAME", nargs="?", help=name)
    add("--device", default="auto", help="auto, a device, a card or DEVICE:24GB (auto)")
    add("--memory", metavar="24GB", help="device memory, instead of asking the device")
    add("--batch-size", type=int, default=1, help="images decoded together (1)")
    add("--cfg-scale", type=float, help="guidance scale; 1 turns it off and halves the rows")
    add("--dtype", default="auto", help=f"auto, {', '.join(BYTES)} (auto)")
    add_fields(parser, DeviceOptions, "quantize", "keep_text")
    served = f"with --serve, comma-separated ({','.join(DEFAULT)})"
    add("--method", help=f"{', '.join(METHODS)} (auto); {served}")
    add("--tree", help="a named tree, or a .json file (the method's on the device)")
    serving = parser.add_argument_group("for a server, whose engines are there together")
    serving.add_argument("--serve", action="store_true", help="count what `serve` captures")
    serving.add_argument("--slots", type=int, default=ServeOptions.slots, help="its slots (8)")
    add("--json", action="store_true", help="print as JSON")
    add_fields(parser.add_argument_group("parts in place of the model's own"), PartOverrides)
    return parser


def print_plan(args: argparse.Namespace) -> None:
    prepare(args.device.partition(":")[0])  # before torch is loaded
    from lantern_hpu.plan.requirements import find_device, find_model, setup_of

    given = from_args(PartOverrides, args)
    options: dict[str, Any] = {
        "dtype": args.dtype,
        "batch_size": args.batch_size,
        "guidance": None if args.cfg_scale is None else args.cfg_scale != 1,
        "quantize": args.quantize,
        "keep_text": args.keep_text or DeviceOptions.keep_text,
    }
    if args.name is None:
        if args.serve or args.method or args.tree or given != PartOverrides():
            why = "methods, trees, servers and parts are those of one model"
            raise OptionError("no model is named", why, shell("plan NAME"))
        rows = [
            plan_row(name, args.device, args.memory, options) for name in ("builtin", *entries())
        ]
        print(json.dumps(rows, indent=2) if args.json else plan_table(rows))
        return
    model = find_model(args.name, given)
    device = find_device(args.device, args.memory, model, args.quantize)
    method = None if args.serve else args.method
    setup = setup_of(model, device, method=method, tree=args.tree, **options)
    if args.serve:
        methods = names(args.method, "method") or DEFAULT
        print("\n".join(serve_report(args.name, model, device, setup, methods, args.slots)))
    elif args.json:
        print(json.dumps(facts(model.config, setup, device), indent=2))
    else:
        print("\n".join(plan_report(args.name, model.config, setup, device)))


# ------------------------------------------------------------------------------------ one model


def plan_report(name: str, model: ModelConfig, setup: Setup, device: DeviceMemory) -> Iterator[str]:
    """The table of the phase that needs most, with its total and those of the others; and whether it fits."""
    from lantern_hpu.decode.memory import fit_report
    from lantern_hpu.decode.spec import capacity

    found = facts(model, setup, device)
    spec = setup.spec
    guided = "with guidance" if spec.guidance else "without guidance"
    images = f"{spec.images} image{'s' * (spec.images > 1)} at a time"
    positions = capacity(model.target, spec.tree)
    dtype = f"{setup.dtype}, {setup.quantize} matrices" if setup.quantize else setup.dtype
    yield f"{name}, {dtype}, {images}, {guided}, tree {spec.tree.name}, {positions} positions a row"
    rows = found["bytes"] | {f"total while {found['phase']}": found["total"]}
    others = {name: need for name, need in found["phases"].items() if name != found["phase"]}
    rows |= {f"(while {other}": need for other, need in others.items()}
    width = max(map(len, rows))
    for label, count in rows.items():
        yield f"  {label:<{width}}  {amount(count):>9}" + ")" * label.startswith("(")
    if model.lacks_text:
        yield "  the text encoder is not here and not counted: --text-encoder FOLDER"
    if device.memory is None:
        yield from (spelled(device.where, as_option), NAME_MEMORY)
        return
    verdict, *less = fit_report(model, setup, device, device.memory)
    yield verdict
    yield from (f"  {spelled(line, as_option)}" for line in less)


def facts(model: ModelConfig, setup: Setup, device: DeviceMemory) -> dict[str, Any]:
    """What the report says, for programs; `fits` is None where that is unknown."""
    from lantern_hpu.decode.memory import largest_phase, phases, summed

    phase, rows = largest_phase(model, setup)
    need, memory, unknown = summed(rows), device.memory, model.lacks_text
    fits = None if memory is None or (unknown and need <= memory) else need <= memory
    return {
        "phase": phase,
        "bytes": dict(rows),
        "total": need,
        "phases": {name: summed(result) for name, result in phases(model, setup).items()},
        "not_counted": ["text encoder weights"] if unknown else [],
        "memory": memory,
        "memory_from": device.where,
        "fits": fits,
    }


def serve_report(
    name: str,
    model: Counted,
    device: DeviceMemory,
    setup: Setup,
    methods: Sequence[str],
    slots: int,
) -> Iterator[str]:
    """What a server needs, and what would fit: each method has an engine of all slots and one of a single slot."""
    from lantern_hpu.decode.memory import engine_bytes, summed, text_weights, weights
    from lantern_hpu.plan.requirements import setup_of

    require(1 <= slots <= 256, "slots", slots, "1 to 256")
    text = text_weights(model.config, setup) if setup.text_stays else []
    alone = summed(weights(model.config, setup) + text)

    def need(methods: Sequence[str], slots: int) -> int:
        specs = {
            replace(one.spec, images=size, guidance=setup.spec.guidance)
            for size in (1, slots)
            for one in (setup_of(model, device, method=m, batch_size=size) for m in methods)
        }
        records = not device.is_host
        how = (setup.dtype, records, device.shares_pool)
        return alone + sum(engine_bytes(model.config, [*specs], *how))

    memory, whole = device.memory, need(methods, slots)
    yield f"{name}, {', '.join(methods)} served with {slots} slots: {amount(whole)}"
    if memory is None:
        yield from (spelled(device.where, as_option), NAME_MEMORY)
        return
    where = f"{amount(memory)} ({device.where})"
    if whole <= memory:
        yield f"fits in {where}, {amount(memory - whole)} left"
        return
    yield f"does not fit in {where}: {amount(whole - memory)} too much"
    fewer_slots = (n for n in range(slots - 1, 0, -1) if need(methods, n) <= memory)
    counts = range(len(methods) - 1, 0, -1)
    fewer = (methods[:n] for n in counts if need(methods[:n], slots) <= memory)
    fitting_slots, fitting_methods = next(fewer_slots, None), next(fewer, None)
    if fitting_slots is not None:
        yield f"  --slots {fitting_slots}: {amount(need(methods, fitting_slots))}, fits"
    if fitting_methods is not None:
        less = amount(need(fitting_methods, slots))
        yield f"  --method {','.join(fitting_methods)}: {less}, fits"
    if fitting_slots is None and fitting_methods is None:
        yield "  neither fewer slots nor fewer methods make it fit"


# ------------------------------------------------------------------------------------ all models


def plan_row(name: str, where: str, memory: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """A known model on a device: its memory, and the least time of a step where the device's rates are known."""
    from lantern_hpu.plan.floors import Rates, StepPasses, floor, projected
    from lantern_hpu.plan.requirements import accelerators, find_device, find_model, setup_of
    from lantern_hpu.tree import DraftTree, Tree

    model = find_model(name, PartOverrides())
    device = find_device(where, memory, model, options["quantize"])
    setup = setup_of(model, device, **options)
    card = accelerators().get(where.partition(":")[0]) or accelerators().get(device.name)

    def least_ms(tree: Tree) -> float | None:
        if card is None:
            return None
        rates = Rates(card.bandwidth, card.rate, setup.bytes, 1 if setup.quantize else None)
        return 1000 * floor(model.config, StepPasses.of(tree), setup.spec.rows, rates).step

    def projected_ms(tree: Tree) -> float | None:
        if card is None or card.launch is None:
            return None
        rates = Rates(card.copied or card.bandwidth, card.rate, setup.bytes)
        passes = StepPasses.of(tree)
        return 1000 * projected(model.config, passes, setup.spec.rows, rates, card.launch)

    found = facts(model.config, setup, device)
    return {
        "model": name,
        **{key: found[key] for key in ("total", "memory", "memory_from", "fits")},
        "card": card and card.name,
        "ar_ms": least_ms(DraftTree.root_only()),
        "tree": setup.spec.tree.name,
        "tree_ms": least_ms(setup.spec.tree),
        "ar_projected_ms": projected_ms(DraftTree.root_only()),
        "tree_projected_ms": projected_ms(setup.spec.tree),
        "measured": card and card.measured.get(name),
    }


def plan_table(rows: Sequence[dict[str, Any]]) -> str:
    """Of all models, and what its columns mean."""
    from lantern_hpu.plan.requirements import accelerators

    columns = {
        "model": lambda row: row["model"],
        "memory": lambda row: amount(row["total"]),
        "fits": lambda row: {True: "yes", False: "no", None: "?"}[row["fits"]],
        "ar, ms": lambda row: figure(row["ar_ms"]) or "-",
        "auto, ms": lambda row: figure(row["tree_ms"]) or "-",
        "auto drafts": lambda row: row["tree"].replace("root", "nothing"),
        "measured steps": lambda row: row["measured"] or "-",
    }
    first = rows[0]
    if first["ar_projected_ms"] is not None:
        columns["ar, projected"] = lambda row: figure(row["ar_projected_ms"])
        columns["auto, projected"] = lambda row: figure(row["tree_projected_ms"])
    found = Table.of(columns, rows)
    about = f"Memory is what one run needs; {first['memory_from']}: --memory 24GB says what fits."
    if first["memory"]:
        has = f"{amount(first['memory'])} ({first['memory_from']})"
        about = f"Memory is what one run needs; the device has {has}."
    card = accelerators().get(first["card"])
    if card is None:
        about += f" Least times of a step are known of --device {', '.join(accelerators())}."
    else:
        rates = f"{card.bandwidth / 1e12:.3g} TB/s and {card.rate / 1e12:.3g} TFLOPS"
        about += f" Least times of a step are bounds, not timings, from {rates} ({card.source})."
        if card.launch is not None:
            about += f" Projected: those of {card.copied:.3g} bytes a second, and {1e6 * card.launch:.3g} us a launch."
        about += " Measured steps: benchmarks/results, and docs/performance.md on them."
    return "\n".join(
        [aligned([found.head, *found.lines]), "", *wrap(about, WIDTH, break_on_hyphens=False)]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The `plan` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: print_plan(args))
