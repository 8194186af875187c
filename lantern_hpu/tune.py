"""Find the static tree that draws fastest with this model on this device.

    python -m lantern_hpu.tune
    python -m lantern_hpu.generate --tree auto --prompt "a red apple"

What a step costs is measured over trees of different shapes, in the graph mode that will draw; which drafts are
accepted, on images drawn with the method's own relaxation, first with a wide tree and then with the best tree that
follows, as a tree also decides where steps begin. `tree.search` puts the two together. What it expects is then
measured, on other seeds, beside `ar` and the named trees. The fastest tree is saved for `--tree auto`, with a note if
`ar` is faster still.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import BACKENDS, prepare
from lantern_hpu.config import (
    EXACT,
    MAX_SEED,
    TUNABLE,
    Relaxation,
    Request,
    in_turn,
    require,
)
from lantern_hpu.errors import OptionError, choices, exit_code
from lantern_hpu.generate import add_part_options, given_parts, read_prompts
from lantern_hpu.graphs import RUNNERS
from lantern_hpu.tree import DRAWS, NAMED, DraftTree, load_static
from lantern_hpu.tree.search import (
    KINDS,
    Costs,
    Rates,
    best_tree,
    estimate,
    expected_steps,
    fit_costs,
    gain_law,
    likeliest_tree,
    probes,
    together,
)

if TYPE_CHECKING:
    from tqdm import tqdm

    from lantern_hpu.engine import Engine
    from lantern_hpu.pipeline import Event, LanternPipeline

Row = dict[str, Any]
KIND = "lantern_hpu.tune"
MOST_NODES, MOST_DEPTH = 96, 12
PROFILED = 64  # nodes of the first tree that acceptance is measured with
TIMED, STEPS = 5, 4  # timings of each tree, and steps of each timing
HELD_OUT = 1_000_000  # added to the seeds of images that check what was expected
# Typical chances by rank, of children of a first child and of others: they shape the first tree, nothing more
TYPICAL = (
    (0.55, 0.12, 0.07, 0.05, 0.04, 0.03, 0.025, 0.02, 0.018, 0.015),
    (0.33, 0.12, 0.08, 0.05, 0.04, 0.03, 0.025, 0.02, 0.018, 0.015),
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.tune",
        description="Find the static tree that draws fastest with this model on this device.",
    )
    what = parser.add_argument_group("what to tune for")
    what.add_argument("--model", default="builtin", help="as for generate (builtin)")
    add_part_options(what)
    what.add_argument("--device", default="auto", help=f"auto, {', '.join(BACKENDS)} (auto)")
    what.add_argument("--dtype", default="auto", help="auto, or one the device offers (auto)")
    what.add_argument("--quantize", default=None, metavar="int8", help="the target's weights")
    what.add_argument("--graphs", default="auto", help=f"auto, {', '.join(RUNNERS)} (auto)")
    what.add_argument("--method", default="lantern++", help=f"{', '.join(TUNABLE)} (lantern++)")
    what.add_argument("--batch-size", type=int, default=1, help="images decoded together (1)")
    limits = parser.add_argument_group("which trees")
    limits.add_argument(
        "--max-nodes", type=int, default=64, help=f"with the root, 2 to {MOST_NODES} (64)"
    )
    limits.add_argument(
        "--max-depth", type=int, default=6, help=f"drafts in a row, 1 to {MOST_DEPTH} (6)"
    )
    how = parser.add_argument_group("how to measure")
    how.add_argument(
        "--prompts", type=Path, metavar="FILE", help=".txt, .tsv or .json (eight simple ones)"
    )
    how.add_argument("--images", type=int, default=8, help="drawn with each tree, at least (8)")
    how.add_argument("--seed", type=int, default=0, help="of the first image (0)")
    how.add_argument(
        "--profile", type=Path, metavar="FILE.json", help="acceptance from an earlier --report"
    )
    where = parser.add_argument_group("where it goes")
    where.add_argument("--output", type=Path, metavar="TREE.json", help="the tree, for --tree")
    where.add_argument("--report", type=Path, metavar="FILE.json", help="all that was measured")
    where.add_argument("--force", action="store_true", help="replace existing files")
    return parser


def check(args: argparse.Namespace) -> tuple[list[str], dict[str, Any] | None]:
    """Refuse what can be refused before torch is loaded. -> prompts and profile, where given"""
    if args.method not in TUNABLE:
        raise OptionError(f"--method {args.method} cannot be tuned", hint=choices(TUNABLE))
    ranges = {"max_nodes": (2, MOST_NODES), "max_depth": (1, MOST_DEPTH)}
    for name, (least, most) in ranges.items():
        value, option = getattr(args, name), "--" + name.replace("_", "-")
        require(least <= value <= most, option, value, f"{least} to {most}")
    for name in ("batch_size", "images"):
        option = "--" + name.replace("_", "-")
        require(getattr(args, name) >= 1, option, getattr(args, name), "1 or more")
    last = MAX_SEED - HELD_OUT - args.images - args.batch_size
    require(0 <= args.seed <= last, "--seed", args.seed, f"0 to {last}")
    for file in (args.output, args.report):
        if file is not None and file.suffix != ".json":
            raise OptionError(f"cannot write {file}", "it will be JSON", "a name ending in .json")
    from lantern_hpu.results import check_free

    check_free([file for file in (args.output, args.report) if file is not None], args.force)
    prompts = read_prompts(args.prompts) if args.prompts else []
    return prompts, read_profile(args.profile) if args.profile else None


def read_profile(file: Path) -> dict[str, Any]:
    """The counts of an earlier run, from its report.

    Raises:
        OptionError: unreadable, or without counts.
    """
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["profile"]
        estimate(found)
        found["situation"].items()
    except OSError as error:
        raise OptionError(f"cannot read {file}", str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        why = "expected the --report of an earlier run"
        raise OptionError(f"{file} holds no profile", why) from error
    return found


# ------------------------------------------------------------------------------------ measuring


@dataclass
class Tuner:
    """A model on a device, and what is measured with it."""

    pipeline: LanternPipeline
    relaxation: Relaxation
    prompts: Sequence[str]
    batch: int
    images: int
    seed: int
    bar: tqdm[Any]
    kept: list[Engine] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of an image that steps add; prefill draws the first."""
        return self.pipeline.model.target.config.tokens - 1

    def requests(self, count: int, tree: DraftTree, first: int = 0) -> list[Request]:
        """So many images, with seeds from the `first` one on."""
        rule = self.relaxation if tree.depth else EXACT
        sampling = self.pipeline.model.sampling
        return in_turn(self.prompts, range(count), self.seed + first, sampling, rule)

    def engine(self, requests: Sequence[Request], tree: DraftTree) -> Engine:
        """A new engine that decodes a batch of these requests.

        The first one is kept: recorded graphs share memory, which would go with the last of them.
        """
        plan = self.pipeline.plan(requests, tree, self.batch)
        engine = self.pipeline.make_engine(plan, self.pipeline.graphs)
        self.kept = self.kept or [engine]
        return engine

    def rows(self, event: Event) -> None:
        """Show how far a batch is."""
        self.bar.set_postfix_str(f"row {event.rows} of {event.total_rows}")

    def done(self) -> None:
        """One part is measured."""
        self.bar.set_postfix_str("", refresh=False)
        self.bar.update()

    def step_ms(self, tree: DraftTree) -> float:
        """Milliseconds of a step with a tree: the median of a few timings of a few steps each."""
        import torch

        requests = self.requests(self.batch, tree)
        engine, backend = self.engine(requests, tree), self.pipeline.backend
        seeds = [request.seed for request in requests]
        with backend.errors(), torch.no_grad():
            prefix = self.pipeline.prefix(engine, requests)
            with backend.warming_up():
                backend.flush()
                engine.place(prefix)
                engine.warm_up()
            engine.start(prefix, requests)
            seconds = []
            for number in range(TIMED + 1):  # the first is not counted
                began = time.perf_counter()
                engine.advance(seeds, 1 + number * STEPS, STEPS)
                seconds.append(time.perf_counter() - began)
        return 1000 * statistics.median(seconds[1:]) / STEPS

    def costs(self, trees: Sequence[DraftTree]) -> Costs:
        """What steps of any shape cost, from those of some trees."""
        alone, *measured = [self.timed(tree) for tree in (DraftTree.root_only(), *trees)]
        return fit_costs(alone, trees, measured)

    def timed(self, tree: DraftTree) -> float:
        self.bar.set_description(f"step over {tree.size} nodes, depth {tree.depth}")
        found = self.step_ms(tree)
        self.done()
        return found

    def profile(self, tree: DraftTree, first: int) -> dict[str, Any]:
        """Acceptance in images drawn with a tree."""
        from lantern_hpu.pipeline import MAX_BATCH
        from lantern_hpu.profile import profile

        self.bar.set_description(f"acceptance, {tree.name}")
        requests = self.requests(self.images, tree, first)
        # Acceptance does not depend on the batch: many at once take less time.
        size = self.pipeline.together(self.images, min(self.images, max(self.batch, MAX_BATCH)))
        with self.pipeline.backend.errors():
            found = profile(self.pipeline, requests, tree, size=size, callback=self.rows)
        self.done()
        return found

    def draw(self, tree: DraftTree) -> Row:
        """Whole batches of images with a tree; the time of a step is the median of the batches'."""
        from lantern_hpu.pipeline import SPENT

        self.bar.set_description(f"drawing, {tree.name if tree.depth else 'ar'}")
        count = -(-self.images // self.batch) * self.batch
        requests = self.requests(count, tree, HELD_OUT)
        engine = self.engine(requests, tree)
        self.pipeline.warm_up(engine, requests[0])
        taken, run, each = 0, 0.0, []  # steps of the images, and of their batches
        with self.pipeline.backend.errors():
            for start in range(0, count, self.batch):
                batch, timing = requests[start : start + self.batch], dict.fromkeys(SPENT, 0.0)
                decoded = self.pipeline.draw_batch(engine, batch, self.batch, timing, self.rows)
                taken, run = taken + sum(decoded.steps), run + timing["steps"]
                each.append(1000 * timing["steps_s"] / timing["steps"])
        self.done()
        tokens, step = count * self.tokens, statistics.median(each)
        return figures(tokens / taken, step, step * run / tokens)

    def expect(self, tree: DraftTree, rates: Rates, costs: Costs) -> Row:
        """What drawing with a tree should come to."""
        law, step = gain_law(tree, rates), costs.step(tree)
        slowest = expected_steps(law, self.tokens, self.batch)
        each = slowest if self.batch == 1 else expected_steps(law, self.tokens)
        return figures(self.tokens / each, step, step * slowest / (self.batch * self.tokens))


def figures(tokens_per_step: float, ms_per_step: float, ms_per_token: float) -> Row:
    """Of a tree; the time of a token is that of the whole batch, divided by its tokens."""
    return {
        "tokens_per_step": tokens_per_step,
        "ms_per_step": ms_per_step,
        "ms_per_token": ms_per_token,
    }


def tune(
    tuner: Tuner, nodes: int, depth: int, given: dict[str, Any] | None
) -> tuple[DraftTree, dict[str, Any], Costs]:
    """The best tree, the counts it rests on, and the costs."""
    costs = tuner.costs(probes(nodes, depth, DRAWS))

    def best(counts: dict[str, Any]) -> DraftTree:
        tuner.bar.set_description("searching")
        return best_tree(estimate(counts)[:depth], costs, nodes)

    if given is not None:
        return best(given), given, costs
    wide = likeliest_tree("wide", [TYPICAL] * depth, PROFILED)
    counts = tuner.profile(wide, 0)
    # Easy places are passed within a step and hard ones begin steps, the more so the larger the tree is.
    counts = together(counts, tuner.profile(best(counts), tuner.images))
    return best(counts), counts, costs


def compare(tuner: Tuner, tree: DraftTree, rates: Rates, costs: Costs) -> list[Row]:
    """What is expected and measured of `ar`, the tuned tree and the named ones, in this order."""
    return [
        {
            "tree": each.name if each.depth else "ar",
            "nodes": each.size,
            "depth": each.depth,
            "expected": tuner.expect(each, rates, costs),
            "measured": tuner.draw(each),
        }
        for each in (DraftTree.root_only(), tree, *map(load_static, NAMED))
    ]


# ------------------------------------------------------------------------------------ saying it


def faster(row: Row, other: Row, how: str) -> float:
    """How many times as fast the first is, `expected` or `measured`."""
    return other[how]["ms_per_token"] / row[how]["ms_per_token"]


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table; every figure as expected, then as measured."""
    lines = [
        "| expected -> measured | nodes | depth | tokens a step | ms a step | ms a token | x ar "
        f"| {rows[1]['tree']} is x |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def pair(before: float, after: float, digits: int = 2) -> str:
        return f"{before:.{digits}f} -> {after:.{digits}f}"

    for row in rows:
        cells = [
            *(pair(row["expected"][name], row["measured"][name]) for name in row["measured"]),
            pair(faster(row, rows[0], "expected"), faster(row, rows[0], "measured")),
            pair(faster(rows[1], row, "expected"), faster(rows[1], row, "measured")),
        ]
        lines.append(f"| {row['tree']} | {row['nodes']} | {row['depth']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def costs_text(costs: Costs) -> str:
    """What steps cost."""
    verify = ", ".join(
        f"{ms:.2f} ({width})" for width, ms in zip(costs.widths, costs.verify, strict=True)
    )
    return (
        f"ms of a step: {costs.alone:.2f} for ar; with drafts {verify} nodes verified,\n"
        f"and {costs.level:.2f} each level, {costs.node:.2f} each node with children, "
        f"{costs.child:.2f} each child tried in turn"
    )


def rates_text(rates: Rates) -> str:
    """Acceptance by depth and rank."""
    lines = ["chance of each child, once its parent was accepted:"]
    for depth, rows in enumerate(rates, 1):
        for name, row in zip(KINDS, rows, strict=True):
            if depth > 1 or name == KINDS[0]:
                parent = "the root" if depth == 1 else f"a {name} child"
                shown = " ".join(f"{chance:.2f}" for chance in row)
                lines.append(f"  depth {depth}, of {parent}: {shown}")
    return "\n".join(lines)


def verdict(rows: Sequence[Row]) -> tuple[Row, bool, str]:
    """The fastest tree as measured, whether `ar` is faster still, and both in words."""
    ar, tuned = rows[0], rows[1]
    best = min(rows[1:], key=lambda row: row["measured"]["ms_per_token"])
    wins = ar["measured"]["ms_per_token"] <= best["measured"]["ms_per_token"]
    gain, hoped = faster(best, ar, "measured"), faster(best, ar, "expected")
    lines = []
    if wins:
        lines.append(
            f"ar wins: the fastest tree, {best['tree']}, draws {gain:.2f} times as fast "
            f"(expected {hoped:.2f})"
        )
    else:
        lines.append(f"{best['tree']} draws {gain:.2f} times as fast as ar (expected {hoped:.2f})")
    if best is not tuned:
        lead = faster(best, tuned, "measured")
        lines.append(
            f"{best['tree']} was measured {lead:.2f} times as fast as {tuned['tree']}, the best expected"
        )
    return best, wins, "\n".join(lines)


# ------------------------------------------------------------------------------------ the command


def same_model(profile: dict[str, Any], situation: dict[str, Any], file: Path) -> None:
    """Raise an OptionError unless a profile is of this model, drafter and method."""
    for name in ("target", "drafter", "method"):
        if profile["situation"].get(name) != situation[name]:
            raise OptionError(f"the profile in {file} cannot be used", f"it is of another {name}")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measure, search, measure again; print, save and write."""
    prompts, given = check(args)
    prepare(args.device, args.graphs)  # before torch is imported
    from tqdm import tqdm

    from lantern_hpu import tuned
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.results import check_free

    pipeline = LanternPipeline.from_pretrained(
        args.model,
        args.device,
        args.dtype,
        args.graphs,
        given=given_parts(args),
        quantize=args.quantize,
    )
    with closing(pipeline):
        if pipeline.model.drafter is None:
            why = "without one, ar is all it can do"
            raise OptionError(f"{pipeline.model.name} has no drafter", why, "--drafter")
        situation = pipeline.situation(args.method, args.batch_size)
        check_free([tuned.file_of(situation)], force=True)
        if given is not None:
            same_model(given, situation, args.profile)
        parts = len(probes(args.max_nodes, args.max_depth, DRAWS)) + 1
        parts += (0 if given else 2) + 2 + len(NAMED)
        with tqdm(total=parts, unit="part", file=sys.stderr, dynamic_ncols=True) as bar:
            tuner = make_tuner(pipeline, args, prompts, bar)
            tree, counts, costs = tune(tuner, args.max_nodes, args.max_depth, given)
            deepest = max(tree.depth, *(load_static(name).depth for name in NAMED))
            rates = estimate(counts, deepest)
            rows = compare(tuner, tree, rates, costs)
        best, ar_wins, words = verdict(rows)
        chosen = tree if best is rows[1] else load_static(best["tree"])
        print("\n\n".join([costs_text(costs), rates_text(estimate(counts)), table(rows), words]))
        report = {
            "kind": KIND,
            "date": datetime.date.today().isoformat(),
            "command": f"python -m {KIND} " + " ".join(argv),
            "situation": situation,
            "images": args.images,
            "seed": args.seed,
            "costs": asdict(costs),
            "profile": {**counts, "situation": situation},
            "rows": rows,
            "fastest": "ar" if ar_wins else chosen.name,
            "environment": pipeline.environment(),
        }
        write(args, chosen, ar_wins, situation, report)


def make_tuner(
    pipeline: LanternPipeline, args: argparse.Namespace, prompts: list[str], bar: tqdm[Any]
) -> Tuner:
    """What measures this model."""
    import torch

    from lantern_hpu.bench import prompts_of

    drawn = prompts or prompts_of(pipeline)
    with pipeline.backend.errors(), torch.no_grad():
        pipeline.model.condition.prepare(list(drawn))
    _, _, relaxation = pipeline.choose(args.method)
    return Tuner(pipeline, relaxation, drawn, args.batch_size, args.images, args.seed, bar)


def write(
    args: argparse.Namespace,
    tree: DraftTree,
    ar_wins: bool,
    situation: dict[str, Any],
    report: dict[str, Any],
) -> None:
    """Save the choice for `--tree auto`, and write what was asked for."""
    from lantern_hpu import tuned
    from lantern_hpu.results import write_file

    files = {
        args.output: tuned.tree_file(tree),
        args.report: json.dumps(report, indent=1).encode(),
    }
    for file, data in files.items():
        if file is not None:
            write_file(file, data, args.force)
            print(f"wrote {file}")
    saved = tuned.save(situation, tuned.Choice(tree, ar_wins))
    auto = "with --method auto draws with ar" if ar_wins else f"draws with {tree.name}"
    print(f"saved {saved}: --tree auto {auto} in batches of {args.batch_size}")


def main(argv: Sequence[str] | None = None) -> int:
    """The `tune` command; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)
    return exit_code(lambda: run(args, given))


if __name__ == "__main__":
    sys.exit(main())
