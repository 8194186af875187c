"""A training run from its options to its report. Torch is loaded once they are checked."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import HOST, prepare
from lantern_hpu.errors import OptionError, OutputError
from lantern_hpu.results.prompts import read_prompts
from lantern_hpu.train.options import TrainRequest

if TYPE_CHECKING:
    from lantern_hpu.pipeline import LanternPipeline

NEEDED = ("accelerate", "matplotlib")


def check_training(wanted: TrainRequest) -> None:
    """Refuse what can be refused before torch is loaded.

    Raises:
        OptionError: a package is missing. OutputError: the folder cannot be trained in.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        hint = 'pip install "lantern-hpu[train]"'
        raise OptionError(f"training needs {' and '.join(missing)}", "not installed", hint)
    state = wanted.output / "state.pt"
    if state.exists() and not wanted.resume:
        why = "it holds an earlier training run"
        raise OutputError(f"{wanted.output} is in use", why, "--resume, or another --output")
    if wanted.resume and not state.exists():
        why = f"there is no {state.name}"
        hint = "without --resume; samples that lie there are used again"
        raise OutputError(f"nothing to resume in {wanted.output}", why, hint)
    if wanted.output.exists() and not wanted.output.is_dir():
        raise OutputError(f"{wanted.output} is a file", "a folder cannot be written there")


def train(wanted: TrainRequest) -> dict[str, Any]:
    """Draw, train, measure; only the main process has a report, the others an empty one.

    Raises:
        LanternError: see `check_training`, `samples.read_encoded` and `DrafterTraining`.
    """
    check_training(wanted)
    options = wanted.options
    prompts = read_prompts(wanted.data)
    device = replace(wanted.device, graphs="eager", layout="plain", invariant="off")
    prepare(device.device, device.graphs)
    from accelerate import Accelerator

    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.train import samples
    from lantern_hpu.train.drafter_training import DrafterTraining, begin

    learned, held_out = samples.split(prompts)
    with closing(
        LanternPipeline.from_pretrained(wanted.model, given=wanted.given, **vars(device))
    ) as pipeline:
        target = pipeline.model.target.config
        known = wanted.tokens and samples.read_encoded(wanted.tokens, target, held_out)
        aux_layers = options.read_layers()
        start = begin(pipeline.model, wanted.finetune, options.seed, aux_layers)
        precision = wanted.mixed_precision
        accelerator = Accelerator(cpu=pipeline.backend.name == HOST, mixed_precision=precision)
        check_wiring(pipeline, prompts[0], accelerator.is_main_process)

        def drawn(prompts: Sequence[str], count: int, folder: str) -> samples.Samples:
            place = wanted.output / folder
            return samples.draw_samples(
                pipeline, prompts, count, place, accelerator, seed=options.seed
            )

        lessons = drawn(learned, wanted.samples, "samples")
        if known:
            lessons += known
        measured = drawn(held_out, options.measured, "held-out")
        run = DrafterTraining(
            pipeline, start, lessons, measured, wanted.output, options, accelerator
        )
        if wanted.resume:
            run.resume()
        return run.run()


def check_wiring(pipeline: LanternPipeline, prompt: str, shown: bool) -> None:
    """Raise a WeightsError if the target does not agree with itself; print how well it does."""
    from lantern_hpu.train import wiring

    more = wiring.wasted_steps(pipeline, prompt)
    if shown:
        result = f"{more} steps more than the fewest" if more else "all of its drafts accepted"
        print(f"wiring: the target as its own drafter, {result}", file=sys.stderr)
