"""Draws with trees or windows in turns, and times them. Needs torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import torch

from lantern_hpu.core import Request, RunStats
from lantern_hpu.decode.engine import Engine
from lantern_hpu.errors import Arg, OptionError, words
from lantern_hpu.files import check_free
from lantern_hpu.methods import tuned_trees
from lantern_hpu.methods.relaxation import EXACT
from lantern_hpu.methods.request import in_turn
from lantern_hpu.methods.setting import METHODS, WINDOWS, Setting, one_of
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.results.prompts import usual_prompts
from lantern_hpu.tree import DraftTree, Window, load_static
from lantern_hpu.tree.named import NAMED
from lantern_hpu.tree.window import Rule
from lantern_lab.bench.cases import has_long_steps
from lantern_lab.bench.report import heading
from lantern_lab.tune.options import HELD_OUT, LARGE, TuneOptions
from lantern_lab.tune.result import Figures, TunedRow, TuningResult

WIDTHS = (8, 16, 32, 64)  # of windows
# On a device that has little arithmetic to spare, as processors: with guidance, the first two fill the 6 and 12 rows
# that its native decoder multiplies at once
SMALL_WIDTHS = (2, 5, 8, 16)


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

    def requests(self, count: int, tree: DraftTree) -> list[Request]:
        """n images, with seeds that are not drawn otherwise."""
        rule = self.relaxation if tree.depth else EXACT
        seed, sampling = self.options.seed + HELD_OUT, self.pipeline.model.sampling
        return in_turn(self.prompts, range(count), seed, sampling, rule)

    def engine(self, requests: Sequence[Request], tree: DraftTree) -> Engine:
        """An engine that decodes batches of these requests, warmed up."""
        pipeline = self.pipeline
        engine = pipeline.engines.get(pipeline.spec(requests, tree, self.options.batch_size))
        pipeline.warm_up(engine, requests[0])
        return engine

    @property
    def batches(self) -> int:
        """How many are drawn with each tree."""
        return -(-self.options.images // self.options.batch_size)

    def draw(self, trees: Sequence[DraftTree]) -> tuple[list[TunedRow], float]:
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
        for tree, batches, times in zip(trees, drawn, each, strict=True):
            step = statistics.median(times)
            run = sum(timing.steps for _, timing in batches)
            rate = tokens / sum(steps for steps, _ in batches)
            rows.append(TunedRow(tree, Figures(rate, step, step * run / tokens)))
        return rows, max(statistics.median(times) / min(times) for times in each)

    def draw_batch(self, tree: DraftTree, number: int) -> tuple[int, RunStats]:
        """One batch with a tree. -> steps of its images, and its timing"""
        size, timing = self.options.batch_size, RunStats()
        requests = self.requests(self.batches * size, tree)
        with self.measuring(f"drawing, {tree.name if tree.depth else 'ar'}"):
            finished = self.pipeline.draw_batch(
                self.engine(requests, tree),
                requests[number * size : (number + 1) * size],
                timing,
                lambda event: self.show_row(event.rows // size),
            )
        return sum(done.steps for done in finished), timing

    def tune(self) -> TuningResult:
        """Draw with `ar` and the named trees; where steps are long, with the small ones."""
        most = LARGE["max_nodes"] if self.is_long else inf
        trees = [DraftTree.root_only(), *(t for t in map(load_static, NAMED) if t.size <= most)]
        self.bar.total = self.batches * len(trees)
        return TuningResult(*self.draw(trees))

    def tune_windows(self, rule: Rule) -> TuningResult:
        """Draw with `ar` and with windows of each width that fits, or of the longest."""
        idle = self.pipeline.drafting_defaults.idle_arithmetic
        most = self.sizes.tokens - 1
        widths = [w for w in (WIDTHS if idle else SMALL_WIDTHS) if w <= most] or [most]
        trees = [DraftTree.root_only(), *(Window.of(rule, width) for width in widths)]
        self.bar.total = self.batches * len(trees)
        return TuningResult(*self.draw(trees))


# ------------------------------------------------------------------------------------ a run


def check_model(pipeline: LanternPipeline, situation: tuned_trees.Situation) -> None:
    """Raise an error if the model cannot draft this method's trees, or the tree could not be saved."""
    method = situation["method"]
    if METHODS[Setting.parse(method).method].needs_drafter and pipeline.model.drafter is None:
        hint = words(Arg("drafter"), ", or", one_of("method", WINDOWS))
        raise OptionError(f"{pipeline.model.name} has no drafter", f"{method} needs one", hint)
    check_free([tuned_trees.file_of(situation)], force=True)


def run_tuning(
    pipeline: LanternPipeline, options: TuneOptions, prompts: Sequence[str]
) -> TuningResult:
    """The tuning of trees, or of windows for a method that has them, with a bar."""
    with ProgressBar() as bar:
        tuner = Tuner(pipeline, options, prompts, bar)
        rule = METHODS[options.setting.method].rule
        return tuner.tune() if rule is None else tuner.tune_windows(rule)


def tuning_report(
    pipeline: LanternPipeline,
    options: TuneOptions,
    tuning: TuningResult,
    situation: tuned_trees.Situation,
    argv: Sequence[str],
) -> dict[str, Any]:
    """What the report file holds."""
    return heading("lantern_hpu.tune", pipeline, argv) | {
        "situation": situation,
        "images": options.images,
        "seed": options.seed,
        "rows": [row.as_json() for row in tuning.rows],
        "fastest": tuning.fastest,
    }
