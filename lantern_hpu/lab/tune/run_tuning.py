"""A tuning from its options to its report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from lantern_hpu.decode.child_counts import ChildCounts
from lantern_hpu.errors import OptionError
from lantern_hpu.files import check_free
from lantern_hpu.lab.rows import heading
from lantern_hpu.lab.tune.options import TuneOptions
from lantern_hpu.lab.tune.result import TuningResult
from lantern_hpu.lab.tune.tuner import Tuner
from lantern_hpu.lab.tune.windows import SMALL_WIDTHS, WIDTHS, measured_windows
from lantern_hpu.methods.setting import Setting
from lantern_hpu.methods.table import METHODS, WINDOWS
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.tree import tuned_trees


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
        "stretched": pipeline.model.stretched,
        "images": options.images,
        "seed": options.seed,
        **measured,
        "rows": [row.as_json() for row in tuning.rows],
        "fastest": tuning.fastest,
    }
