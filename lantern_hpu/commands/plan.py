"""Whether a model fits on a device, before anything is loaded; without a model, which of the known ones do.

    lantern-hpu models plan llamagen-t2i-512 --memory 24GB --batch-size 4
    lantern-hpu models plan anole-7b --memory 24GB --method scd,ar --slots 4
    lantern-hpu models plan --device rtx3090

`lantern_hpu/decode/requirements.py` finds model and device; `lantern_hpu/decode/memory.py` counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import BYTES, QUANTIZED, DeviceOptions, prepare
from lantern_hpu.commands.options import Parser, add_fields, from_args
from lantern_hpu.errors import OptionError, as_option, exit_code, listed, shell, spelled
from lantern_hpu.files import amount
from lantern_hpu.methods.setting import AUTO, METHODS, typed
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.results.tables import WIDTH, Table, aligned, between, figure
from lantern_hpu.serve.options import DEFAULT
from lantern_hpu.zoo.registry import entries

if TYPE_CHECKING:
    from lantern_hpu.decode.accelerators import Accelerator
    from lantern_hpu.decode.memory import DeviceMemory, Setup
    from lantern_hpu.decode.requirements import Counted
    from lantern_hpu.models.config import ModelConfig

Facts = dict[str, Any]
NAME_MEMORY = "  try: --memory 24GB says whether it fits"
OF_ONE_MODEL = ("method", "slots", "drafter", "vq", "text_encoder", "neighbours", "image_size")


def make_parser() -> Parser:
    about = "Show how much memory generation with a model needs, without loading it."
    parser = Parser("lantern-hpu models plan", description=about)
    add = parser.add_argument
    name = "model name, Hub id, folder or weights file; without one, all known models"
    add("name", metavar="NAME", nargs="?", help=name)
    add("--device", default="auto", help="auto, a device or a card (auto)")
    add("--memory", metavar="24GB", help="its memory, instead of asking it")
    add("--batch-size", type=int, default=1, help="images decoded together (1)")
    add("--cfg-scale", type=float, help="guidance scale; 1 turns it off and halves the rows")
    add("--dtype", default="auto", help=f"auto, {', '.join(BYTES)} (auto)")
    add_fields(parser, DeviceOptions, "quantize", "keep_text")
    served = f"with --slots, comma-separated ({','.join(DEFAULT)})"
    add("--method", help=f"{', '.join(METHODS)} (auto); {served}")
    slots = "count a server of so many slots, whose engines exist together"
    add("--slots", type=int, help=slots)
    add("--json", action="store_true", help="print as JSON")
    add_fields(parser, PartOverrides)
    parser.only_keys("drafter", "vq", "image_size")
    return parser


def print_plan(args: argparse.Namespace) -> None:
    prepare(args.device)  # before torch is loaded
    from lantern_hpu.decode.requirements import find_device, find_model, setup_of

    options: Facts = {
        "dtype": args.dtype,
        "batch_size": args.batch_size,
        "guidance": None if args.cfg_scale is None else args.cfg_scale != 1,
        "quantize": args.quantize,
        "keep_text": args.keep_text or DeviceOptions.keep_text,
    }
    if args.name is None:
        if any(getattr(args, name, None) is not None for name in OF_ONE_MODEL):
            why = "methods, servers and parts are those of one model"
            raise OptionError("no model is named", why, shell("models plan NAME"))
        names = ("builtin", *entries())
        rows = [plan_row(name, args.device, args.memory, options) for name in names]
        print(json.dumps(rows, indent=2) if args.json else plan_table(rows))
        return
    model = find_model(args.name, from_args(PartOverrides, args))
    device = find_device(args.device, args.memory, model, args.quantize)
    if args.slots is not None:
        methods = listed(args.method, "method") if args.method else DEFAULT
        setup = setup_of(model, device, **options)
        print("\n".join(serve_report(args.name, model, device, setup, methods, args.slots)))
        return
    setup = setup_of(model, device, method=args.method or AUTO, **options)
    if args.json:
        print(json.dumps(facts(model.config, setup, device), indent=2))
    else:
        print("\n".join(plan_report(args.name, model.config, setup, device)))


def facts(model: ModelConfig, setup: Setup, device: DeviceMemory) -> Facts:
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
        "ar_ms": least_ms(model, setup, device.card),
        "projected_ms": projected_steps(model, setup, device.card),
    }


def least_ms(model: ModelConfig, setup: Setup, card: Accelerator | None) -> float | None:
    """Of a step of `ar`, a bound by the card's rates; None where they are unknown."""
    from lantern_hpu.decode.accelerators import Rates, least_seconds

    if card is None:
        return None
    rates = Rates(card.bandwidth, card.rate, setup.bytes, QUANTIZED.get(setup.quantize or ""))
    return 1000 * max(least_seconds(model, rates, setup.spec.rows, 1, 1))


def projected_steps(
    model: ModelConfig, setup: Setup, card: Accelerator | None
) -> dict[str, tuple[float, float]]:
    """Milliseconds of a step of `ar` and with the tree, from and to; empty where no speeds are published."""
    from lantern_hpu.decode.accelerators import projected_ms
    from lantern_hpu.tree import DraftTree

    spec = setup.spec
    if card is None or card.speeds is None or spec.images > 1 or setup.dtype != "bfloat16":
        return {}
    trees = {"ar": DraftTree.root_only()} | ({spec.tree.name: spec.tree} if spec.tree.depth else {})
    return {name: projected_ms(card, model, tree, spec.rows) for name, tree in trees.items()}


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
    yield f"{name}, {dtype}, {images}, {guided}, tree {typed(spec.tree.name)}, {positions} positions a row"
    rows = found["bytes"] | {f"total while {found['phase']}": found["total"]}
    others = {name: need for name, need in found["phases"].items() if name != found["phase"]}
    rows |= {f"(while {other}": need for other, need in others.items()}
    width = max(map(len, rows))
    for label, count in rows.items():
        yield f"  {label:<{width}}  {amount(count):>9}" + ")" * label.startswith("(")
    if model.lacks_text:
        yield "  the text encoder is not here and not counted: --text-encoder FOLDER"
    steps = [f"{typed(tree)} {between(ms)} ms" for tree, ms in found["projected_ms"].items()]
    if steps:
        yield f"  a step, projected and not measured: {', '.join(steps)}"
    if least := found["ar_ms"]:
        tokens, seconds = model.target.tokens, least * model.target.tokens / 1000
        yield f"  a step of ar is no shorter than {least:.2g} ms, so {tokens} tokens take {seconds:.2g} s at least"
    if device.memory is None:
        yield from (spelled(device.where, as_option), NAME_MEMORY)
        return
    verdict, *less = fit_report(model, setup, device, device.memory)
    yield verdict
    yield from (f"  {spelled(line, as_option)}" for line in less)


def serve_report(
    name: str,
    model: Counted,
    device: DeviceMemory,
    setup: Setup,
    methods: Sequence[str],
    slots: int,
) -> Iterator[str]:
    """What a server needs; where that does not fit, the most slots and the most methods that do."""
    from lantern_hpu.decode.requirements import server_bytes

    def need(methods: Sequence[str], slots: int) -> int:
        return server_bytes(model, device, setup, methods, slots)

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
    first = (methods[:n] for n in range(len(methods) - 1, 0, -1))
    fewer_slots = ((f"--slots {n}", need(methods, n)) for n in range(slots - 1, 0, -1))
    fewer_methods = ((f"--method {','.join(some)}", need(some, slots)) for some in first)
    nothing = True
    for options in (fewer_slots, fewer_methods):
        for option, size in islice((one for one in options if one[1] <= memory), 1):
            nothing = False
            yield f"  {option}: {amount(size)}, fits"
    if nothing:
        yield "  neither fewer slots nor fewer methods make it fit"


def plan_row(name: str, where: str, memory: str | None, options: Facts) -> Facts:
    """A known model on a device: its memory, and the least time of a step where the card's rates are known."""
    from lantern_hpu.decode.requirements import find_device, find_model, setup_of

    model = find_model(name, PartOverrides())
    device = find_device(where, memory, model, options["quantize"])
    setup = setup_of(model, device, **options)
    card = device.card
    found = facts(model.config, setup, device)
    return {
        "model": name,
        **{key: found[key] for key in ("total", "memory", "memory_from", "fits", "ar_ms")},
        "card": card and card.name,
        "measured": card and card.measured.get(name),
    }


def plan_table(rows: Sequence[Facts]) -> str:
    """Of all models, and what its columns mean."""
    from lantern_hpu.decode.accelerators import accelerators

    columns = {
        "model": lambda row: row["model"],
        "memory": lambda row: amount(row["total"]),
        "fits": lambda row: {True: "yes", False: "no", None: "?"}[row["fits"]],
        "least ar step, ms": lambda row: figure(row["ar_ms"]) or "-",
        "measured steps": lambda row: row["measured"] or "-",
    }
    found, first = Table.of(columns, rows), rows[0]
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
        about += " Measured steps: benchmarks/results, and docs/performance.md on them."
    cells = [found.head, *found.lines]
    same = {name: of[0] for name, *of in zip(*cells, strict=True) if len({*of}) == 1}
    if same:
        said = {"-": "none", "?": "unknown"}
        about += " In each line: "
        about += ", ".join(f"{name} {said.get(cell, cell)}" for name, cell in same.items()) + "."
    shown = [place for place, name in enumerate(found.head) if name not in same]
    table = aligned([[line[place] for place in shown] for line in cells])
    return "\n".join([table, "", *wrap(about, WIDTH, break_on_hyphens=False)])


def main(argv: Sequence[str] | None = None) -> int:
    """The `models plan` command; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    return exit_code(lambda: print_plan(args), parser.spell)
