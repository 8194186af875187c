"""What is measured of a model on a device, and the search that rests on it. Needs torch."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from lantern_hpu.bench.cases import has_long_steps
from lantern_hpu.bench.report import heading
from lantern_hpu.decode.acceptance_counts import ChildCounts, profile
from lantern_hpu.decode.engine import Engine
from lantern_hpu.decode.spec import BATCHES
from lantern_hpu.errors import OptionError
from lantern_hpu.files import check_free
from lantern_hpu.methods.relaxation import EXACT
from lantern_hpu.methods.request import Request, in_turn
from lantern_hpu.methods.setting import METHODS, WINDOWS, Setting
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import RunStats
from lantern_hpu.results.tables import usual_prompts
from lantern_hpu.tree import DRAWS, DraftTree, Window, load_static, tuned_trees
from lantern_hpu.tree.named import NAMED
from lantern_hpu.tune.options import HELD_OUT, TuneOptions
from lantern_hpu.tune.result import Figures, TunedRow, TuningResult
from lantern_hpu.tune.search import (
    SMALL_WIDTHS,
    WIDTHS,
    Costs,
    best_tree,
    estimate,
    fit_costs,
    measured_windows,
    most_reached,
    probes,
)

# ------------------------------------------------------------------------------------------- tuner

PROFILED = 64  # nodes of the first tree that acceptance is measured with
TIMED, STEPS = 5, 4  # timings of each tree, and steps of each timing
FEW = 2  # of both where steps are long
COUNTED = 8  # images that acceptance is counted with, at least
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
        bar: tqdm[Any],
    ) -> None:
        """
        Args:
            prompts: drawn with every tree; none for the usual ones.
            bar: counts `parts`.
        """
        self.pipeline, self.options, self.bar = pipeline, options, bar
        self.is_long = has_long_steps(pipeline)
        condition = pipeline.model.condition
        self.prompts = list(prompts or usual_prompts(condition.takes_classes))
        self.relaxation = pipeline.resolve(options.setting).relaxation
        with pipeline.backend.errors(), torch.no_grad():
            condition.prepare(self.prompts)

    @property
    def tokens(self) -> int:
        """Tokens of an image that steps add; prefill draws the first."""
        return self.pipeline.model.target.config.tokens - 1

    @property
    def counted(self) -> int:
        """Images that acceptance is counted with: together, so that several take little longer than one."""
        return max(self.options.images, COUNTED) if self.is_long else self.options.images

    @property
    def named(self) -> list[DraftTree]:
        """The named trees that are drawn with: all, or where steps are long the small ones."""
        trees = [load_static(name) for name in NAMED]
        return [tree for tree in trees if not self.is_long or tree.size <= self.options.max_nodes]

    @property
    def probes(self) -> list[DraftTree]:
        """The trees whose steps are timed, beside `ar`."""
        return probes(self.options.max_nodes, self.options.max_depth, DRAWS)

    def parts(self, counted: bool) -> int:
        """How many things `tune` measures.

        Args:
            counted: whether it is given counts.
        """
        return 1 + len(self.probes) + (0 if counted else 2) + 2 + len(self.named)

    # -- what all measurements share

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """One thing to measure: the bar says which, and counts it."""
        self.bar.set_description(name)
        with self.pipeline.backend.errors(), torch.no_grad():
            yield
        self.bar.set_postfix_str("", refresh=False)
        self.bar.update()

    def show_row(self, row: int) -> None:
        """How far a batch is."""
        self.bar.set_postfix_str(f"row {row} of {self.pipeline.model.target.config.grid[0]}")

    def requests(self, count: int, tree: DraftTree, first: int = 0) -> list[Request]:
        """So many images, with seeds from the `first` one on."""
        rule = self.relaxation if tree.depth else EXACT
        seed, sampling = self.options.seed + first, self.pipeline.model.sampling
        return in_turn(self.prompts, range(count), seed, sampling, rule)

    def engine(self, requests: Sequence[Request], tree: DraftTree) -> Engine:
        """An engine that decodes batches of these requests, warmed up."""
        pipeline = self.pipeline
        engine = pipeline.engines.get(pipeline.spec(requests, tree, self.options.batch_size))
        pipeline.warm_up(engine, requests[0])
        return engine

    # -- measurements

    def step_ms(self, tree: DraftTree) -> float:
        """Milliseconds of a step with a tree: the median of a few timings of a few steps each."""
        requests = self.requests(self.options.batch_size, tree)
        timed, count = (FEW, FEW) if self.is_long else (TIMED, STEPS)
        with self.part(f"step over {tree.size} nodes, depth {tree.depth}"):
            engine = self.engine(requests, tree)
            timings = [RunStats() for _ in range(timed + 1)]
            for timing in timings:
                list(self.pipeline.stream(engine, requests, timing, most=count))
        # The first is not counted
        return statistics.median(timing.ms_per_step for timing in timings[1:])

    def costs(self) -> Costs:
        """What steps of any shape cost, from those of some trees."""
        trees = self.probes
        alone, *measured = [self.step_ms(tree) for tree in (DraftTree.root_only(), *trees)]
        return fit_costs(alone, trees, measured)

    def counts(self, tree: DraftTree, first: int) -> ChildCounts:
        """Acceptance in images drawn with a tree."""
        images, columns = self.counted, self.pipeline.model.target.config.columns
        requests = self.requests(images, tree, first)
        # Acceptance does not depend on the batch: many at once take less time.
        size = min(images, max(self.options.batch_size, BATCHES[-1]))
        with self.part(f"acceptance, {tree.name}"):
            pipeline = self.pipeline
            engine = pipeline.engines.make(pipeline.spec(requests, tree, size), "eager")
            encode = partial(pipeline.prefix, engine)
            result = profile(
                engine, encode, requests, lambda known: self.show_row(known // columns)
            )
        return result.counts

    def draw(self, tree: DraftTree) -> Figures:
        """Whole batches of images with a tree; the time of a step is the median of the batches'."""
        size = self.options.batch_size
        count = -(-self.options.images // size) * size
        requests = self.requests(count, tree, HELD_OUT)
        taken, run, each = 0, 0, []  # steps of the images, and of their batches
        with self.part(f"drawing, {tree.name if tree.depth else 'ar'}"):
            engine = self.engine(requests, tree)
            for start in range(0, count, size):
                batch, timing = requests[start : start + size], RunStats()
                finished = self.pipeline.draw_batch(
                    engine, batch, timing, lambda event: self.show_row(event.rows // size)
                )
                taken, run = taken + sum(done.steps for done in finished), run + timing.steps
                each.append(timing.ms_per_step)
        tokens, step = count * self.tokens, statistics.median(each)
        return Figures(tokens / taken, step, step * run / tokens)

    # -- all of it

    def best_tree(self, counts: ChildCounts, costs: Costs) -> DraftTree:
        self.bar.set_description("searching")
        options = self.options
        return best_tree(estimate(counts)[: options.max_depth], costs, options.max_nodes)

    def tune(self, counts: ChildCounts | None = None) -> TuningResult:
        """Find the best tree, and draw with it, with `ar` and with the named ones.

        Args:
            counts: of an earlier run; measured if not given.
        """
        costs = self.costs()
        if counts is None:
            chances = np.array([TYPICAL] * self.options.max_depth)
            counts = self.counts(most_reached("typical", chances, PROFILED), 0)
            # Easy places are passed within a step and hard ones begin steps, the more so the larger the tree is.
            counts += self.counts(self.best_tree(counts, costs), self.counted)
        trees = [DraftTree.root_only(), self.best_tree(counts, costs), *self.named]
        chances = estimate(counts, max(tree.depth for tree in trees))
        shared = (chances, costs, self.tokens, self.options.batch_size)
        rows = [TunedRow(t, Figures.expected(t, *shared), self.draw(t)) for t in trees]
        return TuningResult(counts, costs, rows)

    def tune_windows(self, windows: Sequence[Window]) -> TuningResult:
        """Draw with `ar` and with each of these."""
        trees = [DraftTree.root_only(), *windows]
        return TuningResult(None, None, [TunedRow(tree, None, self.draw(tree)) for tree in trees])


# -------------------------------------------------------------------------------------- run tuning

# A tuning from its options to its report.


def check_model(pipeline: LanternPipeline, situation: tuned_trees.Situation) -> None:
    """Raise an error if the model cannot draft this method's trees, or the tree could not be saved."""
    if (
        METHODS[Setting.parse(situation["method"]).method].needs_drafter
        and pipeline.model.drafter is None
    ):
        why, hint = f"{situation['method']} needs one", "--method " + " or ".join(WINDOWS)
        raise OptionError(f"{pipeline.model.name} has no drafter", why, f"--drafter, or {hint}")
    check_free([tuned_trees.file_of(situation)], force=True)


def measure_windows(
    pipeline: LanternPipeline, options: TuneOptions, prompts: Sequence[str]
) -> TuningResult:
    """All widths, with a bar."""
    widths = WIDTHS if pipeline.backend.tuning.idle_arithmetic else SMALL_WIDTHS
    trees = measured_windows(options.setting.method, pipeline.model.target.config.tokens, widths)
    with tqdm(total=len(trees) + 1, unit="part", file=sys.stderr, dynamic_ncols=True) as bar:
        return Tuner(pipeline, options, prompts, bar).tune_windows(trees)


def run_tuning(
    pipeline: LanternPipeline,
    options: TuneOptions,
    prompts: Sequence[str],
    counts: ChildCounts | None,
) -> TuningResult:
    """The tuning itself, with a bar."""
    with tqdm(unit="part", file=sys.stderr, dynamic_ncols=True) as bar:
        tuner = Tuner(pipeline, options, prompts, bar)
        bar.total = tuner.parts(counts is not None)
        return tuner.tune(counts)


def tuning_report(
    pipeline: LanternPipeline,
    options: TuneOptions,
    tuning: TuningResult,
    situation: tuned_trees.Situation,
    kind: str,
    argv: Sequence[str],
) -> dict[str, Any]:
    """The JSON contract of `--report`."""
    measured: dict[str, Any] = {}
    if tuning.counts is not None and tuning.costs is not None:
        profile = tuning.counts.as_json() | {"situation": situation}
        measured = {"costs": asdict(tuning.costs), "profile": profile}
    return heading(kind, pipeline, argv) | {
        "situation": situation,
        "images": options.images,
        "seed": options.seed,
        **measured,
        "rows": [row.as_json() for row in tuning.rows],
        "fastest": tuning.fastest,
    }
