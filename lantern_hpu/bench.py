"""Measure methods side by side, with the same weights, sampler, seeds and batch, in one run.

    python -m lantern_hpu.bench --output bench.json
    python -m lantern_hpu.bench --random-weights anole-7b --output anole.json

Every figure is measured on this machine; what is not stands below `projected`. Each (method, tree, graph mode,
batch size) is warmed up - captured, replayed, and run for a few steps - before anything is timed, and the warm-up is
reported, not hidden. Speed is given against `ar` in the same graph mode and batch, and against the method's own
eager run. The report follows `assets/bench.schema.json`; `lantern_hpu.compare` puts several of them together.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu import registry
from lantern_hpu.backends import get_backend, prepare
from lantern_hpu.config import AUTO, GROWING, METHODS, TUNABLE, Request, in_turn, require
from lantern_hpu.errors import DeviceError, OptionError, choices, exit_code
from lantern_hpu.graphs import RUNNERS, check_mode
from lantern_hpu.measure import EAGER, PARTS, WARM_UP, Case, Row, measure_images, measure_steps
from lantern_hpu.report import KIND, VERSION
from lantern_hpu.roofline import Rates, Shape, Sizes, floor
from lantern_hpu.tree import DynamicTree, load_tree

if TYPE_CHECKING:
    from lantern_hpu.backends.base import Backend
    from lantern_hpu.models.drafter import Drafter
    from lantern_hpu.models.transformer import Target
    from lantern_hpu.pipeline import LanternPipeline

PROMPTS = (
    "a red apple",
    "a sun",
    "a fish",
    "a cat face",
    "a smiling face",
    "a soccer ball",
    "a purple heart",
    "a pizza",
)
# For models that draw by class
CLASSES = (
    "golden retriever",
    "volcano",
    "balloon",
    "macaw",
    "lakeside",
    "cheeseburger",
    "steam locomotive",
    "daisy",
)
GRAPHS = "eager,auto"
RANDOM = {  # --random-weights: the known model whose sizes are meant
    "llamagen-xl": "llamagen-t2i-256",
    "llamagen-3b": "llamagen-c2i-3b-384",
    "anole-7b": "anole-7b",
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.bench",
        description="Measure methods and graph modes side by side on one device.",
    )
    parser.add_argument(
        "--model", help="`builtin`, a known model, a Hub id or a model folder (builtin)"
    )
    parser.add_argument(
        "--random-weights",
        metavar="NAME",
        help=f"a known model's sizes without its files, to time steps: {', '.join(RANDOM)}",
    )
    parser.add_argument("--device", default="auto", help="(auto)")
    parser.add_argument("--dtype", default="auto", help="(auto)")
    parser.add_argument(
        "--methods", default=",".join(METHODS), help=f"comma-separated ({','.join(METHODS)})"
    )
    parser.add_argument(
        *("--trees", "--tree"),
        default=None,
        help="comma-separated, each for the methods that draft its kind; auto is the tuned one "
        "(each method's own)",
    )
    parser.add_argument(
        "--graphs",
        default=None,
        help=f"comma-separated graph modes; `auto` is the device's best ({GRAPHS})",
    )
    parser.add_argument(
        "--kernels",
        default="auto",
        help="auto: the device's own where they agree with the plain ones; or plain (auto)",
    )
    parser.add_argument("--batch-sizes", default="1,8", help="comma-separated (1,8)")
    parser.add_argument("--images", type=int, default=8, help="timed images of a row, at least (8)")
    parser.add_argument(
        "--steps", type=int, default=64, help="timed steps of a row with --random-weights (64)"
    )
    parser.add_argument(
        "--tokens-per-step",
        default="1.5,2,2.5,3,4",
        help="with --random-weights: tokens a step whose speed-up is to be projected (1.5,2,2.5,3,4)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first image (0)")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE.json")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    return parser


# ------------------------------------------------------------------------------------ options


@dataclass(frozen=True)
class Wanted:
    """The options, checked."""

    entry: registry.Entry | None  # whose sizes get random weights
    pairs: list[tuple[str, str | None]]  # methods with their trees; None for the method's own
    modes: list[str]
    by_name: bool  # whether the modes were asked for, not ours
    batches: list[int]
    given: list[float]  # tokens a step to project with


def split(text: str, name: str) -> list[str]:
    """A comma-separated option."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise OptionError(f"{name} is empty")
    return parts


def once(parts: Sequence[str], name: str) -> list[str]:
    """The parts of an option, if none is there twice."""
    twice = [part for part in parts if parts.count(part) > 1]
    if twice:
        raise OptionError(f"{name} names {twice[0]} twice", "each row is measured once")
    return list(parts)


def pairs_for(methods: Sequence[str], trees: Sequence[str]) -> list[tuple[str, str | None]]:
    """Each method with each tree of its kind; with its own tree where none of its kind was asked for.

    Raises:
        OptionError: a tree is for none of the methods.
        TreeError: see `load_tree`.
    """
    drafting = {tree: methods_for(tree) for tree in trees}
    pairs: list[tuple[str, str | None]] = []
    for method in methods:
        fitting = [tree for tree in trees if method in drafting[tree]]
        pairs += [(method, tree) for tree in fitting] or [(method, None)]
    for tree in trees:
        if not any(tree == other for _, other in pairs):
            raise OptionError(f"--trees {tree} fits none of {', '.join(methods)}")
    return pairs


def methods_for(tree: str) -> Sequence[str]:
    """The methods that can draft a tree."""
    if tree == AUTO:
        return TUNABLE
    grows = isinstance(load_tree(tree), DynamicTree)
    return [method for method in METHODS if method != "ar" and (method in GROWING) == grows]


def numbers(text: str, name: str, kind: type[int] | type[float]) -> list[Any]:
    """A comma-separated option as numbers, 1 or more each."""
    try:
        found = [kind(part) for part in split(text, name)]
    except ValueError as error:
        raise OptionError(f"{name} is {text!r}", "expected numbers such as 1,8") from error
    require(all(1 <= value < float("inf") for value in found), name, text, "numbers from 1")
    return found


def entry_of(name: str | None) -> registry.Entry | None:
    """The known model that `--random-weights` means."""
    if name is None:
        return None
    found = registry.find(RANDOM.get(name, name))
    if found is None:
        hint = choices([*RANDOM, *registry.entries()])
        raise OptionError(f"no sizes are known of {name!r}", "--random-weights", hint)
    return found


def check(args: argparse.Namespace) -> Wanted:
    """Refuse what can be refused before torch is loaded."""
    methods = once(split(args.methods, "--methods"), "--methods")
    for method in methods:
        if method not in METHODS:
            raise OptionError(f"unknown method {method!r}", hint=choices(METHODS))
    trees = once(split(args.trees, "--trees"), "--trees") if args.trees is not None else []
    modes = once(split(args.graphs or GRAPHS, "--graphs"), "--graphs")
    for mode in modes:
        if mode not in ("auto", *RUNNERS):
            raise OptionError(f"unknown graph mode {mode!r}", hint=choices(["auto", *RUNNERS]))
    require(args.images >= 1, "--images", args.images, "1 or more")
    require(args.steps >= 1, "--steps", args.steps, "1 or more")
    if args.model is not None and args.random_weights is not None:
        raise OptionError("--model and --random-weights exclude each other")
    batches = numbers(args.batch_sizes, "--batch-sizes", int)
    once([str(size) for size in batches], "--batch-sizes")
    wanted = Wanted(
        entry_of(args.random_weights),
        pairs_for(methods, trees),
        modes,
        args.graphs is not None,
        batches,
        numbers(args.tokens_per_step, "--tokens-per-step", float),
    )
    Request(PROMPTS[0], args.seed)
    if args.output:
        from lantern_hpu.results import check_free

        check_free([args.output], args.force)
    return wanted


def settle(backend: Backend, modes: Sequence[str], by_name: bool) -> tuple[list[str], list[str]]:
    """The graph modes to measure, and what to say about those that are not.

    Raises:
        DeviceError: the device does not offer a mode that was asked for by name.
    """
    best = check_mode(backend, "auto")
    found: list[str] = []
    notes = []
    for mode in modes:
        real = best if mode == "auto" else mode
        if real in found:
            notes.append(f"`auto` is `{real}` on this device: measured once")
        elif real in backend.graph_modes:
            found.append(real)
        elif by_name:
            hint = choices(["auto", *backend.graph_modes])
            why = f"beside {best}, in one process"
            raise DeviceError(f"{backend.name} has no graph mode {real!r}", why, hint)
        else:
            notes.append(
                f"`{real}` is not offered beside `{best}` in one process: measure it with --graphs {real} "
                "into a second file; lantern_hpu.compare takes both"
            )
    return found, notes


# ------------------------------------------------------------------------------------ the run


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """The report.

    Raises:
        DeviceError: not a single row could be measured.
    """
    wanted = check(args)
    # What a device can record may be settled while its software is loaded: for its best mode, if that is asked for.
    first = "auto" if "auto" in wanted.modes else wanted.modes[0]
    began = time.perf_counter()
    prepare(args.device, first)  # before torch is imported
    import_module("lantern_hpu.pipeline")
    imported = time.perf_counter() - began
    from lantern_hpu.rates import measure_rates

    with closing(open_pipeline(args, wanted, first)) as pipeline:
        modes, notes = settle(pipeline.backend, wanted.modes, wanted.by_name)
        cases = cases_of(pipeline, wanted, modes)
        rates = measure_rates(pipeline.backend, dtype_of(pipeline))
        rows, missed = measure_all(pipeline, args, wanted, cases)
        if not rows:
            hint = "a smaller --batch-sizes"
            raise DeviceError("nothing could be measured", "; ".join(missed), hint)
        report = {
            **heading(KIND, pipeline, argv),
            "version": VERSION,
            **about(pipeline, args, wanted),
            "rates": rates,
            "startup": {"import_s": imported, "load_s": pipeline.load_seconds},
            "graphs": {
                "asked": wanted.modes,
                "measured": modes,
                "best": check_mode(pipeline.backend, "auto"),
            },
            "notes": notes + missed + silences(pipeline, wanted),
        }
    finish(rows, report, wanted.given)
    peaks = [row["peak_memory_bytes"] for row in rows if row["peak_memory_bytes"] is not None]
    report["environment"]["peak_memory_bytes"] = max(peaks, default=None)
    return report | {"rows": rows}


def cases_of(pipeline: LanternPipeline, wanted: Wanted, modes: Sequence[str]) -> list[Case]:
    """What each row is of. A tuned tree is the one found for the mode that the pipeline is in, in all modes.

    Raises:
        OptionError: no tree was tuned for a method and batch, or two trees have one name.
    """
    found: dict[tuple[str, str, int], Case] = {}
    for batch in wanted.batches:
        for method, tree in wanted.pairs:
            _, chosen, relaxation = pipeline.choose(method, tree, size=batch)
            key, case = (method, chosen.name, batch), Case(method, chosen, relaxation, EAGER, batch)
            # The tuned tree may be a named one that is asked for as well.
            if found.setdefault(key, case) != case:
                why = f"--trees has two different ones of the name {chosen.name!r}"
                raise OptionError("rows are told apart by the names of trees", why)
    return [replace(case, mode=mode) for mode in modes for case in found.values()]


def measure_all(
    pipeline: LanternPipeline, args: argparse.Namespace, wanted: Wanted, cases: Sequence[Case]
) -> tuple[list[Row], list[str]]:
    """All rows, with a line of progress each, and what to say about those that the device refused."""
    from tqdm import tqdm

    rows, missed = [], []
    with tqdm(cases, unit="row", file=sys.stderr) as bar:
        for case in bar:
            name = f"{case.method}, {case.tree.name}, {case.mode}, batch {case.batch}"
            bar.set_description(name)
            if case.mode != pipeline.graphs:
                pipeline.engines.clear()
                pipeline.graphs = case.mode
            try:
                rows.append(measure(pipeline, args, wanted, case))
            except DeviceError as error:  # too little memory for one row says nothing of the others
                missed.append(f"not measured: {name}: {error.what}: {error.why}")
                pipeline.engines = {p: e for p, e in pipeline.engines.items() if e.warm}
    return rows, missed


def open_pipeline(args: argparse.Namespace, wanted: Wanted, mode: str) -> LanternPipeline:
    """The model on its device."""
    from lantern_hpu.pipeline import LanternPipeline

    if wanted.entry is None:
        model = args.model or "builtin"
        return LanternPipeline.from_pretrained(model, args.device, args.dtype, mode, args.kernels)
    from lantern_hpu.random_weights import random_pipeline

    began = time.perf_counter()
    backend = get_backend(args.device, mode)
    try:
        pipeline = random_pipeline(wanted.entry, backend, args.dtype, mode, args.kernels)
    except BaseException:
        backend.close()
        raise
    pipeline.load_seconds = time.perf_counter() - began
    return pipeline


def prompts_of(pipeline: LanternPipeline) -> tuple[str, ...]:
    """What this model can draw."""
    return CLASSES if pipeline.model.condition.takes_classes else PROMPTS


def measure(pipeline: LanternPipeline, args: argparse.Namespace, wanted: Wanted, case: Case) -> Row:
    """One row: images, or with random weights steps."""
    images = case.batch if wanted.entry else -(-args.images // case.batch) * case.batch
    requests = in_turn(
        prompts_of(pipeline), range(images), args.seed, pipeline.model.sampling, case.relaxation
    )
    with pipeline.backend.errors():
        if wanted.entry:
            row = measure_steps(pipeline, case, requests, args.steps)
        else:
            row = measure_images(pipeline, case, requests)
    return row | {"step_passes": Shape.of(case.tree).as_json()}


def dtype_of(pipeline: LanternPipeline) -> str:
    from lantern_hpu.backends.base import named

    return named(pipeline.model.target.head.weight.dtype)


def heading(module: str, pipeline: LanternPipeline, argv: Sequence[str]) -> dict[str, Any]:
    """What every file of measurements says about how it came about."""
    return {
        "kind": module,
        "date": datetime.date.today().isoformat(),
        "command": f"python -m {module} " + " ".join(argv),
        "model": pipeline.model.name,
        "dtype": dtype_of(pipeline),
        "environment": pipeline.environment(),
    }


def about(pipeline: LanternPipeline, args: argparse.Namespace, wanted: Wanted) -> dict[str, Any]:
    """What else a report says: which weights, which machine, which settings."""
    from lantern_hpu.backends.cpu import processor_name

    model, environment = pipeline.model, pipeline.environment()
    processor = processor_name()
    digests = [digest for name, digest in model.files.items() if "drafter" in name]
    modules = [model.target, *([model.drafter] if model.drafter else [])]
    weights = [p for module in modules for p in module.parameters()]
    return {
        "device_title": device_title(environment, processor),
        "host": {
            "processor": processor,
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "random_weights": wanted.entry.name if wanted.entry else None,
        "weights": {
            "target": model.fingerprint,
            "drafter": digests[0] if digests else None,
        },
        "weights_bytes": sum(p.numel() * p.element_size() for p in weights),
        "settings": {
            "sampling": asdict(model.sampling),
            "seed": args.seed,
            "prompts": list(prompts_of(pipeline)),
            "images": None if wanted.entry else args.images,
            "steps": args.steps if wanted.entry else None,
            "kernels": args.kernels,
            "warm_up": WARM_UP,
        },
        "sizes": asdict(roofline_sizes(model.target, model.drafter, model.sampling.cfg_scale != 1)),
    }


def device_title(environment: Mapping[str, Any], processor: str) -> str:
    """What a reader calls the device: the card, or the processor and how many of its threads were used."""
    card = environment.get("card")
    if card:
        return str(card)
    plain = re.sub(r"\s+", " ", re.sub(r"\((R|TM)\)", "", processor)).strip()
    threads = environment.get("threads")
    name = plain or str(environment["device"])
    return f"{name}, {threads} thread{'s' * (threads != 1)}" if threads else name


def roofline_sizes(target: Target, drafter: Drafter | None, guidance: bool) -> Sizes:
    """A model as a roofline sees it; its weights may lie on `meta`."""
    config, head = target.config, target.head.weight
    own = 0
    if drafter is not None:
        table = drafter.embed.weight.numel()
        own = sum(p.numel() for p in drafter.parameters()) - table
    return Sizes(
        body=sum(p.numel() for p in target.layers.parameters()),
        head=head.numel(),
        drafter=own,
        layers=config.layers,
        width=config.heads * config.head_dim,
        kv_width=config.kv * config.head_dim,
        prefix=config.prefix,
        tokens=config.tokens,
        rows_per_image=2 if guidance else 1,
        number_bytes=head.element_size(),
    )


def silences(pipeline: LanternPipeline, wanted: Wanted) -> list[str]:
    """What the figures leave out."""
    found = []
    if wanted.entry is not None:
        found.append(
            "random weights: steps were timed; images and tokens a step mean nothing, so none are given, and "
            "text encoding and pixels were left out"
        )
        if wanted.entry.geometry.drafter is None:
            found.append(
                f"no drafter is published for {wanted.entry.name}: one of LlamaGen's kind was made, at its width"
            )
    if pipeline.backend.memory().peak is None:
        found.append("the device does not tell its peak of memory")
    return found


# ------------------------------------------------------------------------------------ what follows from the rows


def finish(rows: list[Row], report: Mapping[str, Any], given: Sequence[float]) -> None:
    """Add what needs the whole: start-up, floors, speeds, and projections of random weights."""
    for row in rows:
        row["startup_s"] = sum(report["startup"].values()) + row["warmup_s"]
        row |= floors(row, report)
    add_speeds(rows)
    tokens = report["sizes"]["tokens"] if report["random_weights"] else None
    for row in rows:
        row["projected"] = projections(row, rows, given, tokens) if tokens else []


def floors(row: Row, report: Mapping[str, Any]) -> Row:
    """The least time of the row's step, and how near it came."""
    rates = report["rates"]
    least = floor(
        Sizes(**report["sizes"]),
        Shape.from_json(row["step_passes"]),
        row["batch_size"],
        Rates(rates["copy_bytes_per_s"], rates["operations_per_s"]),
    )
    return {
        "floor_ms": 1000 * least.step,
        "floor_ratio": 1000 * least.step / row["ms_per_step"],
        "verify_floor_ms": 1000 * least.verify,
        "verify_floor_ratio": 1000 * least.verify / row["eager_step_ms"]["verify"],
        "floor_bound": least.bound,
    }


def cost(row: Row) -> float:
    """What the row's speed is about: seconds an image, or with random weights of a step."""
    seconds: float | None = row["seconds_per_image"]
    return row["ms_per_step"] / 1000 if seconds is None else seconds


def add_speeds(rows: list[Row]) -> None:
    """Speed against `ar` of the same graph mode and batch, and against the own eager run; None without it.

    With random weights there is no speed against `ar`: it depends on the tokens a step.
    """
    base = {(r["graphs"], r["batch_size"]): cost(r) for r in rows if r["method"] == "ar"}
    eager = {own(r): cost(r) for r in rows if r["graphs"] == "eager"}
    for row in rows:
        against = base.get((row["graphs"], row["batch_size"]))
        real = row["seconds_per_image"] is not None
        row["speed_against_ar"] = against / cost(row) if against and real else None
        before = eager.get(own(row))
        row["speed_against_eager"] = before / cost(row) if before else None


def own(row: Row) -> tuple[str, str, int]:
    """What rows of one method in several graph modes share."""
    return row["method"], row["tree"], row["batch_size"]


def projections(
    row: Row, rows: Sequence[Row], given: Sequence[float], tokens: int
) -> list[dict[str, Any]]:
    """What given tokens a step would make of the measured steps; nothing here is measured."""
    longest = len(row["step_passes"]["draft"]) + 1  # one token a level, and the bonus token
    same = (row["graphs"], row["batch_size"])
    base = [r for r in rows if r["method"] == "ar" and (r["graphs"], r["batch_size"]) == same]
    found = []
    for rate in [1.0] if row["method"] == "ar" else [g for g in given if g <= longest]:
        steps = (tokens - 1) / rate
        found.append(
            {
                "label": "projected",
                "tokens_per_step": rate,
                "steps_s_per_image": steps * row["ms_per_step"] / 1000 / row["batch_size"],
                "speed_against_ar": rate * base[0]["ms_per_step"] / row["ms_per_step"]
                if base
                else None,
            }
        )
    return found


# ------------------------------------------------------------------------------------ tables


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rule = "|" + "---|" * len(head)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(x)} |" for x in lines)])


def times(value: float | None) -> str:
    """A ratio; empty where there is none."""
    return "" if value is None else f"{value:.2f}"


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    if rows[0]["seconds_per_image"] is None:
        return steps_table(rows)
    head = (
        "method | tree | graphs | batch | s an image | p50 | p95 | images/s | tokens a step | ms a step | x ar "
        "| x eager | host | floor ms | reached | host reads"
    ).split(" | ")
    lines = [
        [
            *(row["method"], row["tree"], row["graphs"], str(row["batch_size"])),
            f"{row['seconds_per_image']:.3g}",
            f"{row['p50_seconds_per_image']:.3g}",
            f"{row['p95_seconds_per_image']:.3g}",
            f"{row['images_per_second']:.3g}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['ms_per_step']:.3g}",
            times(row["speed_against_ar"]),
            times(row["speed_against_eager"]),
            f"{100 * row['host_share']:.0f} %",
            f"{row['floor_ms']:.3g}",
            f"{100 * row['floor_ratio']:.0f} %",
            f"{row['host_reads_per_image']:.1f}",
        ]
        for row in rows
    ]
    return markdown(head, lines)


def steps_table(rows: Sequence[Row]) -> str:
    """Rows of random weights: steps, and what they would make of given tokens a step."""
    head = "method | tree | graphs | batch | ms a step | p50 | p95 | x eager | host | floor ms | reached"
    lines = [
        [
            *(row["method"], row["tree"], row["graphs"], str(row["batch_size"])),
            f"{row['ms_per_step']:.3g}",
            f"{row['p50_ms_per_step']:.3g}",
            f"{row['p95_ms_per_step']:.3g}",
            times(row["speed_against_eager"]),
            f"{100 * row['host_share']:.0f} %",
            f"{row['floor_ms']:.3g}",
            f"{100 * row['floor_ratio']:.0f} %",
        ]
        for row in rows
    ]
    told = (
        "method | tree | graphs | batch | tokens a step (given) | s an image, steps alone (projected) "
        "| x ar (projected)"
    )
    projected = [
        [
            *(row["method"], row["tree"], row["graphs"], str(row["batch_size"])),
            f"{entry['tokens_per_step']:g}",
            f"{entry['steps_s_per_image']:.3g}",
            times(entry["speed_against_ar"]),
        ]
        for row in rows
        for entry in row["projected"]
    ]
    parts = [markdown(head.split(" | "), lines), markdown(told.split(" | "), projected)]
    return "\n\n".join(parts)


def square_table(rows: Sequence[Row]) -> str:
    """{ar, method} x {eager, recorded}: what each costs, and all against `ar` run eagerly."""
    modes = list(dict.fromkeys(row["graphs"] for row in rows))
    if len(modes) < 2:
        return ""
    unit = "ms a step" if rows[0]["seconds_per_image"] is None else "s an image"
    cells = {(own(row), row["graphs"]): cost(row) for row in rows}
    scale = 1000 if unit == "ms a step" else 1
    head = ["method", "tree", "batch", *(f"{mode}, {unit}" for mode in modes)]
    head += [f"{mode} x {modes[0]}" for mode in modes[1:]]
    lines = []
    for key in dict.fromkeys(own(row) for row in rows):
        each = [cells[key, mode] for mode in modes]
        gains = [times(each[0] / other) for other in each[1:]]
        lines.append([key[0], key[1], str(key[2]), *(f"{scale * e:.3g}" for e in each), *gains])
    return markdown(head, lines)


def split_table(rows: Sequence[Row]) -> str:
    """Where the time of an eager step goes, as a Markdown table; each row once, whatever its graphs."""
    head = ["method", "tree", "batch", "eager step, ms", *PARTS, "verify floor, ms", "reached"]
    lines = []
    for row in {own(row): row for row in rows}.values():
        parts = row["eager_step_ms"]
        total = sum(parts.values())
        lines.append(
            [
                *(row["method"], row["tree"], str(row["batch_size"]), f"{total:.3g}"),
                *(f"{100 * parts[part] / total:.0f} %" for part in PARTS),
                f"{row['verify_floor_ms']:.3g}",
                f"{100 * row['verify_floor_ratio']:.0f} %",
            ]
        )
    return markdown(head, lines)


def reference_lines(report: Mapping[str, Any]) -> str:
    """The device's two measured rates."""
    rates, dtype = report["rates"], report["dtype"]
    said = [f"copies {rates['copy_bytes_per_s'] / 1e9:.3g} GB/s (read and written)"]
    matrices = {"bfloat16": rates["bf16_operations_per_s"], dtype: rates["operations_per_s"]}
    said += [f"{name} matrices {v / 1e12:.3g} TFLOP/s" for name, v in matrices.items() if v]
    return f"{report['device_title']}: {'; '.join(said)}"


def tables(report: Mapping[str, Any]) -> str:
    """All that is printed."""
    rows = report["rows"]
    notes = "\n".join(f"note: {note}" for note in report["notes"])
    parts = [reference_lines(report), table(rows), square_table(rows), split_table(rows), notes]
    return "\n\n".join(part for part in parts if part)


def show(result: dict[str, Any], text: str, args: argparse.Namespace) -> None:
    """Print the tables, and write the whole result if asked."""
    print(text)
    if args.output:
        from lantern_hpu.results import write_file

        write_file(args.output, json.dumps(result, indent=2).encode(), args.force)
        print(f"wrote {args.output}")


def main(argv: Sequence[str] | None = None) -> int:
    """The `bench` command; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)

    def command() -> None:
        result = run(args, given)
        show(result, tables(result), args)

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
