"""Draws with trees or windows in turns, and finds the fastest. Needs torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from lantern_hpu.errors import Arg, OptionError, shell, words
from lantern_hpu.files import check_free
from lantern_hpu.methods import tuned_trees
from lantern_hpu.methods.setting import AUTO, METHODS, WINDOWS, Resolved, Setting, one_of, typed
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.results.tables import Table
from lantern_hpu.tree import NAMED, DraftTree, Window, load_static
from lantern_lab.measure import rows
from lantern_lab.measure.meter import Meter, take_turns, usual_requests
from lantern_lab.measure.options import HELD_OUT, TUNE_LARGE, TuneOptions, has_long_steps
from lantern_lab.measure.rows import Case, Row

WIDTHS = (8, 16, 32, 64)  # of windows
# On a device that has little arithmetic to spare, as processors: with guidance, the first two fill the 6 and 12 rows
# that its native decoder multiplies at once
SMALL_WIDTHS = (2, 5, 8, 16)


@dataclass(frozen=True)
class Tuning:
    """All results.

    Attributes:
        rows: `ar` and the named trees, or the windows by width; the time of a token is that of the whole batch.
        trees: of the rows.
        spread: how many times as long as a row's fastest batch the median one took a step, at most.
    """

    rows: Sequence[Row]
    trees: Sequence[DraftTree]
    spread: float = 1.0

    @property
    def doubt(self) -> str:
        """Why these figures say nothing about the machine, or nothing."""
        ar, *others = self.rows
        for row in others:
            if why := rows.doubtful_step(row["nodes"], row["ms_per_step"], ar["ms_per_step"]):
                return f"{shown(row)}: {why}"
        if self.spread > rows.MOST_SPREAD:
            took = f"the median of equal steps took {self.spread:.1f} times as long as the fastest"
            return f"{took}: the machine was busy"
        return ""

    @property
    def best(self) -> int:
        """The number of the fastest row with drafts."""
        return min(range(1, len(self.rows)), key=lambda i: float(self.rows[i]["ms_per_token"]))

    def times_ar(self, row: Row) -> float:
        return float(self.rows[0]["ms_per_token"] / row["ms_per_token"])

    @property
    def ar_wins(self) -> bool:
        """Whether one token a step was measured to be faster still."""
        return self.times_ar(self.rows[self.best]) <= 1

    def text(self) -> str:
        """The rows as a Markdown table, and which is fastest unless that is in doubt."""
        names = ("tokens_per_step", "ms_per_step", "ms_per_token")
        lines = [
            [
                shown(row),
                str(row["nodes"]),
                *(f"{value:.2f}" for value in (*(row[n] for n in names), self.times_ar(row))),
            ]
            for row in self.rows
        ]
        head = "drafts, nodes, tokens a step, ms a step, ms a token, x ar".split(", ")
        table = Table(head, lines).markdown()
        return table if self.doubt else f"{table}\n\n{self.verdict()}"

    def verdict(self) -> str:
        best = self.rows[self.best]
        name = shown(best)
        gain = f"{self.times_ar(best):.2f} times as fast"
        if self.ar_wins:
            return f"ar wins: the fastest of the others, {name}, draws {gain}"
        return f"{name} draws {gain} as ar"


def shown(row: Row) -> str:
    """A window as the setting that draws with it."""
    return "ar" if row.method == "ar" else typed(row.tree)


def check_model(pipeline: LanternPipeline, situation: tuned_trees.Situation) -> None:
    """Raise an error if the model cannot draft this method's trees, or the tree could not be saved."""
    method = situation["method"]
    if METHODS[Setting.parse(method).method].needs_drafter and pipeline.model.drafter is None:
        hint = words(Arg("drafter"), ", or", one_of("method", WINDOWS))
        raise OptionError(f"{pipeline.model.name} has no drafter", f"{method} needs one", hint)
    check_free([tuned_trees.file_of(situation)], force=True)


def candidates(pipeline: LanternPipeline, setting: Setting) -> list[DraftTree]:
    """Windows of each width that fits, or of the longest; else the named trees, the small ones where steps are long."""
    rule = METHODS[setting.method].rule
    if rule is None:
        few = max(TUNE_LARGE["max_nodes"], pipeline.drafting_defaults.window + 1)
        most = few if has_long_steps(pipeline) else inf
        return [tree for tree in map(load_static, NAMED) if tree.size <= most]
    idle = pipeline.drafting_defaults.idle_arithmetic
    longest = pipeline.model.target.config.tokens - 1
    widths = [w for w in (WIDTHS if idle else SMALL_WIDTHS) if w <= longest] or [longest]
    return [Window.of(rule, width) for width in widths]


def tune(pipeline: LanternPipeline, options: TuneOptions, prompts: Sequence[str] = ()) -> Tuning:
    """Draw whole batches of the prompts, or of the usual ones, with `ar` and each candidate, in turns."""
    asked = pipeline.resolve(options.setting)
    size = options.batch_size
    trees = [DraftTree.root_only(), *candidates(pipeline, options.setting)]
    settings = [Resolved("ar"), *(replace(asked, tree=tree) for tree in trees[1:])]
    turns = -(-options.images // size)
    with ProgressBar(turns * len(trees), "batch") as bar:
        meters = []
        for setting in settings:
            bar.set_description(f"warming up, {setting}")
            case = Case(setting, pipeline.fit.graphs, size)
            requests = usual_requests(pipeline, case, options.images, HELD_OUT, prompts)
            meters.append(Meter(pipeline, case, requests, show=bar.set_postfix_str))
        take_turns(meters, turns, bar, pixels=False)
    return tuning_of(meters, trees)


def tuning_of(meters: Sequence[Meter], trees: Sequence[DraftTree]) -> Tuning:
    """Rows by the median of a tree's batches."""
    result = list[Row]()
    spread = 1.0
    for meter in meters:
        batches = meter.batches
        each = [batch.stats.ms_per_step for batch in batches]
        step = statistics.median(each)
        # Prefill draws the first token of an image
        tokens = sum(record.tokens - 1 for batch in batches for record in batch.records)
        run = sum(batch.stats.steps for batch in batches)
        figures = {
            "nodes": meter.case.setting.tree.size,
            "tokens_per_step": tokens / sum(batch.image_steps for batch in batches),
            "ms_per_step": step,
            "ms_per_token": step * run / tokens,
        }
        result.append(Row.of(meter.case, figures))
        spread = max(spread, step / min(each))
    return Tuning(result, trees, spread)


def fastest_command(tuning: Tuning, situation: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The `generate` command that draws as was measured to be fastest, with options of the model and the device that
    `tune` was given."""
    names = ("model", "device", "dtype", "quantize", "graphs", "drafter")
    usual = (None, "auto", "builtin")
    args = [Arg(name, given[name]) for name in names if given.get(name) not in usual]
    method = "ar" if tuning.ar_wins else f"{situation['method']}@{AUTO}"
    args.append(Arg("method", method))
    size = int(situation["batch_size"])
    args += [Arg("num_images", size)] if size > 1 else []
    return shell("generate", *args, Arg("prompt", "a red apple"))
