"""What is measured of a model on a device, and the search that rests on it. Needs torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch

from lantern_hpu.bench.cases import has_long_steps
from lantern_hpu.bench.report import heading
from lantern_hpu.core import Request, RunStats
from lantern_hpu.decode.engine import Engine
from lantern_hpu.decode.spec import BATCHES
from lantern_hpu.errors import Arg, OptionError, words
from lantern_hpu.files import check_free
from lantern_hpu.methods import tuned_trees
from lantern_hpu.methods.relaxation import EXACT
from lantern_hpu.methods.request import in_turn
from lantern_hpu.methods.setting import METHODS, WINDOWS, Setting, one_of
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.results.prompts import usual_prompts
from lantern_hpu.train.acceptance_counts import ChildCounts, profile
from lantern_hpu.tree import DRAWS, DraftTree, Window, load_static
from lantern_hpu.tree.named import NAMED
from lantern_hpu.tree.window import Rule
from lantern_hpu.tune.options import HELD_OUT, TuneOptions
from lantern_hpu.tune.result import Figures, TunedRow, TuningResult
from lantern_hpu.tune.search import Costs, best_tree, estimate, fit_costs, most_reached, probes

PROFILED = 64  # nodes of the first tree that acceptance is measured with
TIMED, STEPS = 5, 4  # timings of each tree, and steps of each timing
FEW = 2  # of both where steps are long
COUNTED = 8  # images that acceptance is counted with, at least
WIDTHS = (8, 16, 32, 64)  # of windows
# On a device that has little arithmetic to spare, as processors: with guidance, the first two fill the 6 and 12 rows
# that its native decoder multiplies at once
SMALL_WIDTHS = (2, 5, 8, 16)
# Typical chances by rank, of children of a first child and of others: they shape the first tree, nothing more
TYPICAL = (
    (0.55, 0.12, 0.07, 0.05, 0.04, 0.03, 0.025, 0.02, 0.018, 0.015),
    (0.33, 0.12, 0.08, 0.05, 0.04, 0.03, 0.025, 0.02, 0.018, 0.015),
)


class Tuner:
    """A model on a device, and what is measured with it."""

    def __init__(
        self,
        pipeline: LanternPipeline,
        options: TuneOptions,
        prompts: Sequence[str],
        bar: ProgressBar,
    ) -> None:
        """Every tree draws the prompts, the usual ones if there are none; the bar counts what is measured."""
        self.pipeline, self.options, self.bar = pipeline, options, bar
        self.is_long = has_long_steps(pipeline)
        # Several images are counted together, which takes little longer than one
        self.counted = max(options.images, COUNTED) if self.is_long else options.images
        condition, self.sizes = pipeline.model.condition, pipeline.model.target.config
        self.prompts = list(prompts or usual_prompts(condition.takes_classes))
        self.relaxation = pipeline.resolve(options.setting).relaxation
        with pipeline.backend.errors(), torch.no_grad():
            condition.prepare(list(map(Request, self.prompts)))

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """One thing to measure: the bar names it and counts it."""
        self.bar.set_description(name)
        with self.pipeline.backend.errors(), torch.no_grad():
            yield
        self.bar.set_postfix_str("", refresh=False)
        self.bar.update()

    def show_row(self, row: int) -> None:
        self.bar.set_postfix_str(f"row {row} of {self.sizes.grid[0]}")

    def requests(self, count: int, tree: DraftTree, first: int = 0) -> list[Request]:
        """n images, with seeds from the `first` one on."""
        rule = self.relaxation if tree.depth else EXACT
        seed, sampling = self.options.seed + first, self.pipeline.model.sampling
        return in_turn(self.prompts, range(count), seed, sampling, rule)

    def engine(self, requests: Sequence[Request], tree: DraftTree) -> Engine:
        """An engine that decodes batches of these requests, warmed up."""
        pipeline = self.pipeline
        engine = pipeline.engines.get(pipeline.spec(requests, tree, self.options.batch_size))
        pipeline.warm_up(engine, requests[0])
        return engine

    def step_ms(self, tree: DraftTree) -> float:
        """Milliseconds of a step with a tree: the median of a few timings of a few steps each."""
        requests = self.requests(self.options.batch_size, tree)
        times, count = (FEW, FEW) if self.is_long else (TIMED, STEPS)
        with self.measuring(f"step over {tree.size} nodes, depth {tree.depth}"):
            engine = self.engine(requests, tree)
            timings = [RunStats() for _ in range(times + 1)]
            for timing in timings:
                list(self.pipeline.stream(engine, requests, timing, most=count))
        # The first is not counted
        return statistics.median(timing.ms_per_step for timing in timings[1:])

    def costs(self, trees: Sequence[DraftTree]) -> Costs:
        """What steps of any shape cost, from those of some trees."""
        alone, *measured = [self.step_ms(tree) for tree in (DraftTree.root_only(), *trees)]
        return fit_costs(alone, trees, measured)

    def counts(self, tree: DraftTree, first: int) -> ChildCounts:
        """Acceptance in images drawn with a tree."""
        images, pipeline, columns = self.counted, self.pipeline, self.sizes.columns
        requests = self.requests(images, tree, first)
        # Acceptance does not depend on the batch: many at once take less time.
        size = min(images, max(self.options.batch_size, BATCHES[-1]))
        with self.measuring(f"acceptance, {tree.name}"):
            engine = pipeline.engines.make(pipeline.spec(requests, tree, size), "eager")
            encode = partial(pipeline.prefix, engine)
            found = profile(engine, encode, requests, lambda n: self.show_row(n // columns))
        return found.counts

    @property
    def batches(self) -> int:
        """How many are drawn with each tree."""
        return -(-self.options.images // self.options.batch_size)

    def draw(
        self, trees: Sequence[DraftTree], expected: Sequence[Figures | None]
    ) -> tuple[list[TunedRow], float]:
        """Whole batches of images with each tree, in turns, so that a drift of the machine's speed meets all alike.

        Returns the rows, by the median of a tree's batches, and how many times as long as a tree's fastest batch
        that median is, at most.
        """
        drawn: list[list[tuple[int, RunStats]]] = [[] for _ in trees]  # steps of a batch's images
        for number in range(self.batches):
            for tree, batches in zip(trees, drawn, strict=True):
                batches.append(self.draw_batch(tree, number))
        each = [[timing.ms_per_step for _, timing in batches] for batches in drawn]
        # Prefill draws the first token of an image
        tokens = self.batches * self.options.batch_size * (self.sizes.tokens - 1)
        rows = []
        for tree, hoped, batches, times in zip(trees, expected, drawn, each, strict=True):
            step = statistics.median(times)
            run = sum(timing.steps for _, timing in batches)
            rate = tokens / sum(steps for steps, _ in batches)
            rows.append(TunedRow(tree, hoped, Figures(rate, step, step * run / tokens)))
        return rows, max(statistics.median(times) / min(times) for times in each)

    def draw_batch(self, tree: DraftTree, number: int) -> tuple[int, RunStats]:
        """One batch with a tree. -> steps of its images, and its timing"""
        size, timing = self.options.batch_size, RunStats()
        requests = self.requests(self.batches * size, tree, HELD_OUT)
        with self.measuring(f"drawing, {tree.name if tree.depth else 'ar'}"):
            finished = self.pipeline.draw_batch(
                self.engine(requests, tree),
                requests[number * size : (number + 1) * size],
                timing,
                lambda event: self.show_row(event.rows // size),
            )
        return sum(done.steps for done in finished), timing

    def best_tree(self, counts: ChildCounts, costs: Costs) -> DraftTree:
        self.bar.set_description("searching")
        options = self.options
        return best_tree(estimate(counts)[: options.max_depth], costs, options.max_nodes)

    def tune(self, counts: ChildCounts | None = None) -> TuningResult:
        """Find the best tree by counts, of an earlier run or measured, and draw with it, `ar` and the named ones."""
        options = self.options
        named = [load_static(name) for name in NAMED]  # where steps are long, the small ones
        named = [tree for tree in named if not self.is_long or tree.size <= options.max_nodes]
        timed = probes(options.max_nodes, options.max_depth, DRAWS)
        counting = 2 if counts is None else 0
        self.bar.total = 1 + len(timed) + counting + self.batches * (2 + len(named))
        costs = self.costs(timed)
        if counts is None:
            chances = np.array([TYPICAL] * options.max_depth)
            counts = self.counts(most_reached("typical", chances, PROFILED), 0)
            # Easy places are passed within a step and hard ones begin steps, the more so the larger the tree is.
            counts += self.counts(self.best_tree(counts, costs), self.counted)
        trees = [DraftTree.root_only(), self.best_tree(counts, costs), *named]
        chances = estimate(counts, max(tree.depth for tree in trees))
        shared = (chances, costs, self.sizes.tokens - 1, options.batch_size)
        rows, spread = self.draw(trees, [Figures.expected(tree, *shared) for tree in trees])
        return TuningResult(counts, costs, rows, spread)

    def tune_windows(self, rule: Rule) -> TuningResult:
        """Draw with `ar` and with windows of each width that fits, or of the longest."""
        idle = self.pipeline.drafting_defaults.idle_arithmetic
        most = self.sizes.tokens - 1
        widths = [w for w in (WIDTHS if idle else SMALL_WIDTHS) if w <= most] or [most]
        trees = [DraftTree.root_only(), *(Window.of(rule, width) for width in widths)]
        self.bar.total = self.batches * len(trees)
        return TuningResult(None, None, *self.draw(trees, [None] * len(trees)))


# ------------------------------------------------------------------------------------ a run


def check_model(pipeline: LanternPipeline, situation: tuned_trees.Situation) -> None:
    """Raise an error if the model cannot draft this method's trees, or the tree could not be saved."""
    method = situation["method"]
    if METHODS[Setting.parse(method).method].needs_drafter and pipeline.model.drafter is None:
        hint = words(Arg("drafter"), ", or", one_of("method", WINDOWS))
        raise OptionError(f"{pipeline.model.name} has no drafter", f"{method} needs one", hint)
    check_free([tuned_trees.file_of(situation)], force=True)


def run_tuning(
    pipeline: LanternPipeline,
    options: TuneOptions,
    prompts: Sequence[str],
    counts: ChildCounts | None,
) -> TuningResult:
    """The tuning of trees, or of windows for a method that has them, with a bar."""
    with ProgressBar() as bar:
        tuner = Tuner(pipeline, options, prompts, bar)
        rule = METHODS[options.setting.method].rule
        return tuner.tune(counts) if rule is None else tuner.tune_windows(rule)


def tuning_report(
    pipeline: LanternPipeline,
    options: TuneOptions,
    tuning: TuningResult,
    situation: tuned_trees.Situation,
    argv: Sequence[str],
) -> dict[str, Any]:
    """What the report file holds."""
    measured: dict[str, Any] = {}
    if tuning.counts is not None and tuning.costs is not None:
        profile = tuning.counts.as_json() | {"situation": situation}
        measured = {"costs": asdict(tuning.costs), "profile": profile}
    return heading("lantern_hpu.tune", pipeline, argv) | {
        "situation": situation,
        "images": options.images,
        "seed": options.seed,
        **measured,
        "rows": [row.as_json() for row in tuning.rows],
        "fastest": tuning.fastest,
    }
