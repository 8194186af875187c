"""Measure methods side by side, with the same weights, sampler, seeds and batch, in one run.

    python -m lantern_hpu.bench --output bench.json

Every figure is measured on this machine. Each (method, graph mode, batch size) is warmed up - captured and
replayed - before its images are timed, and the warm-up is reported, not hidden. The ratio of each row is
against `ar` in the same graph mode and batch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import prepare
from lantern_hpu.config import GROWING, METHODS, Request, in_turn
from lantern_hpu.errors import OptionError, choices, exit_code
from lantern_hpu.tree import DynamicTree, Tree, load_tree

if TYPE_CHECKING:
    from lantern_hpu.backends.base import Backend
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


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.bench",
        description="Measure methods side by side on one device.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="builtin", help="`builtin`, or a model folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument("--tree", default=None, help="for methods that draft")
    parser.add_argument("--graphs", default="eager", help="comma-separated graph modes")
    parser.add_argument("--batch-sizes", default="1,8", help="comma-separated")
    parser.add_argument("--images", type=int, default=8, help="timed images of each row, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, metavar="FILE.json")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    return parser


def split(text: str, name: str) -> list[str]:
    """A comma-separated option."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise OptionError(f"{name} is empty")
    return parts


def trees_for(methods: Sequence[str], tree: str | None) -> dict[str, str | None]:
    """The tree that was asked for, for each method that drafts trees of its kind.

    Raises:
        OptionError: it is for none of them.
        TreeError: see `load_tree`.
    """
    if tree is None:
        return dict.fromkeys(methods)
    grows = isinstance(load_tree(tree), DynamicTree)
    fits = [method != "ar" and (method in GROWING) == grows for method in methods]
    if not any(fits):
        raise OptionError(f"--tree {tree} fits none of {', '.join(methods)}")
    return {m: tree if fit else None for m, fit in zip(methods, fits, strict=True)}


def sizes_of(text: str) -> list[int]:
    """`--batch-sizes` as numbers."""
    try:
        sizes = [int(part) for part in split(text, "--batch-sizes")]
    except ValueError as error:
        raise OptionError(f"--batch-sizes is {text!r}", "expected numbers such as 1,8") from error
    if min(sizes) < 1:
        raise OptionError(f"--batch-sizes is {text!r}", "a batch holds 1 image or more")
    return sizes


PARTS = ("draft", "tables", "verify", "accept", "commit")


class Stopwatch:
    """Seconds spent in the parts of a step, the device waited for before and after each."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.seconds = backend, dict.fromkeys(PARTS, 0.0)

    def watch(self, owner: Any, method: str, part: str) -> None:
        """From now on, time this method."""
        inner = getattr(owner, method)

        def timed(*args: Any) -> Any:
            self.backend.synchronize()
            began = time.perf_counter()
            result = inner(*args)
            self.backend.synchronize()
            self.seconds[part] += time.perf_counter() - began
            return result

        setattr(owner, method, timed)


def split_step(
    pipeline: LanternPipeline, requests: Sequence[Request], tree: Tree
) -> dict[str, float]:
    """Milliseconds of each part of an eager step; `tables`, of dynamic trees, is not part of `draft`."""
    engine = pipeline.make_engine(pipeline.plan(requests, tree, len(requests)), "eager")
    pipeline.warm_up(engine, requests[0])
    watch, step = Stopwatch(pipeline.backend), engine.step.function
    for part in ("draft", "verify", "accept", "commit"):
        watch.watch(step, part, part)
    if isinstance(tree, DynamicTree):
        watch.watch(step.drafting.tables, "forward", "tables")  # type: ignore[union-attr]
    pipeline.draw_batch(engine, requests, len(requests))
    watch.seconds["draft"] -= watch.seconds["tables"]
    return {part: 1000 * seconds / engine.timing.count for part, seconds in watch.seconds.items()}


def measure(
    pipeline: LanternPipeline, method: str, tree: str | None, batch: int, images: int, seed: int
) -> dict[str, Any]:
    """One row of the table: `images` images (rounded up to whole batches) of one method."""
    from lantern_hpu.results import tokens_per_step

    _, chosen, relaxation = pipeline.choose(method, tree)
    count = -(-images // batch) * batch
    requests = in_turn(PROMPTS, range(count), seed, pipeline.model.sampling, relaxation)
    began = time.perf_counter()
    # Warm-up: capture, and a whole batch of replays
    pipeline.draw(requests[:batch], chosen, method, batch)
    warm = time.perf_counter() - began
    seconds, records, timings, reads, captures = [], [], [], 0, 0
    for start in range(0, count, batch):
        began = time.perf_counter()
        result = pipeline.draw(requests[start : start + batch], chosen, method, batch)
        seconds.append(time.perf_counter() - began)
        records += result.records
        reads += result.graph["host_reads"]
        captures += result.graph["recompiles_after_warmup"]
        timings.append(result.timing)
    steps = sum(record.steps for record in records)
    spent = {name: sum(t[name] for t in timings) for name in timings[0]}
    depth = len(records[0].accepted_by_depth)
    return {
        "method": method,
        "tree": chosen.name,
        "graphs": pipeline.graphs,
        "batch_size": batch,
        "images": count,
        "warmup_s": warm,
        "batch_seconds": seconds,
        "seconds_per_image": sum(seconds) / count,
        "p50_batch_s": statistics.median(seconds),
        "images_per_second": count / sum(seconds),
        "prefill_s_per_image": spent["prefill_s"] / count,
        "steps_s_per_image": spent["steps_s"] / count,
        "vq_decode_s_per_image": spent["decode_s"] / count,
        "tokens_per_step": tokens_per_step(records),
        "ms_per_step": 1000 * spent["steps_s"] / spent["steps"],
        "accepted_by_depth": [
            sum(r.accepted_by_depth[d] for r in records) / steps for d in range(depth)
        ],
        "relaxed_accepts_per_image": sum(r.relaxed_accepts for r in records) / count,
        "host_reads_per_image": reads / count,
        "recompiles_after_warmup": captures,
        "eager_step_ms": split_step(pipeline, requests[:batch], chosen),
    }


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Speed against `ar` of the same graph mode and batch; None where `ar` was not measured."""
    base = {
        (r["graphs"], r["batch_size"]): r["seconds_per_image"] for r in rows if r["method"] == "ar"
    }
    for row in rows:
        against = base.get((row["graphs"], row["batch_size"]))
        row["speed_against_ar"] = against / row["seconds_per_image"] if against else None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| method | graphs | batch | s an image | images/s | tokens a step | ms a step | x ar | host reads |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = row["speed_against_ar"]
        lines.append(
            f"| {row['method']} | {row['graphs']} | {row['batch_size']} "
            f"| {row['seconds_per_image']:.2f} | {row['images_per_second']:.2f} "
            f"| {row['tokens_per_step']:.2f} | {row['ms_per_step']:.1f} "
            f"| {'' if ratio is None else f'{ratio:.2f}'} | {row['host_reads_per_image']:.1f} |"
        )
    return "\n".join(lines)


def split_table(rows: Sequence[dict[str, Any]]) -> str:
    """Where the time of an eager step goes, as a Markdown table; each row once, whatever its graphs."""
    lines = [
        f"| method | batch | eager step, ms | {' | '.join(PARTS)} |",
        "|---|---|---|" + "---|" * len(PARTS),
    ]
    for row in {(r["method"], r["batch_size"]): r for r in rows}.values():
        parts = row["eager_step_ms"]
        total = sum(parts.values())
        shares = " | ".join(f"{100 * parts[part] / total:.0f} %" for part in PARTS)
        lines.append(f"| {row['method']} | {row['batch_size']} | {total:.1f} | {shares} |")
    return "\n".join(lines)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """All rows, with a line of progress each."""
    methods, modes = split(args.methods, "--methods"), split(args.graphs, "--graphs")
    sizes = sizes_of(args.batch_sizes)
    for method in methods:
        if method not in METHODS:
            raise OptionError(f"unknown method {method!r}", hint=choices(METHODS))
    trees = trees_for(methods, args.tree)
    for parts in (methods, modes, list(map(str, sizes))):
        if len(set(parts)) < len(parts) or ("auto" in parts and len(parts) > 1):
            why = "each row is measured once, and `auto` is one of the modes"
            raise OptionError(f"{','.join(parts)} names something twice", why)
    if args.images < 1:
        raise OptionError(f"--images is {args.images}", "allowed: 1 or more")
    if args.output:
        from lantern_hpu.results import check_free

        check_free([args.output], args.force)
    from tqdm import tqdm

    prepare(args.device, modes[0])  # before torch is imported
    from lantern_hpu.pipeline import LanternPipeline

    rows: list[dict[str, Any]] = []
    bar = tqdm(total=len(modes) * len(sizes) * len(methods), unit="row", file=sys.stderr)
    for mode in modes:
        pipeline = LanternPipeline.from_pretrained(args.model, args.device, args.dtype, mode)
        with closing(pipeline):
            for size in sizes:
                for method in methods:
                    bar.set_description(f"{method}, {mode}, batch {size}")
                    rows.append(
                        measure(pipeline, method, trees[method], size, args.images, args.seed)
                    )
                    bar.update()
            head = heading("lantern_hpu.bench", pipeline, argv)
    bar.close()
    add_ratios(rows)
    return head | {"rows": rows}


def heading(module: str, pipeline: LanternPipeline, argv: Sequence[str]) -> dict[str, Any]:
    """What every file of measurements says about how it came about."""
    return {
        "kind": module,
        "date": datetime.date.today().isoformat(),
        "command": f"python -m {module} " + " ".join(argv),
        "model": pipeline.model.name,
        "dtype": str(pipeline.model.target.head.weight.dtype).removeprefix("torch."),
        "environment": pipeline.environment(),
    }


def show(result: dict[str, Any], text: str, args: argparse.Namespace) -> None:
    """Print the tables, and write the whole result if asked."""
    print(text)
    if args.output:
        from lantern_hpu.results import write_file

        write_file(args.output, json.dumps(result, indent=2).encode(), args.force)
        print(f"wrote {args.output}")


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Both tables."""
    return f"{table(rows)}\n\n{split_table(rows)}"


def main(argv: Sequence[str] | None = None) -> int:
    """The `bench` command; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)

    def command() -> None:
        result = run(args, given)
        show(result, tables(result["rows"]), args)

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
