"""Time drawing: whole images, or steps alone; where a step's time goes; what it keeps in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np

from lantern_hpu.decode.batch import Finished
from lantern_hpu.decode.engine import Engine
from lantern_hpu.lab.bench.cases import Case
from lantern_hpu.lab.bench.columns import PARTS, SpeedRow
from lantern_hpu.lab.bench.roofline import Rates, StepPasses, floor
from lantern_hpu.lab.clock import StepClock, device_time, quantile, seconds_of
from lantern_hpu.methods.request import Request
from lantern_hpu.models.text.prefix import Prefix
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import ImageRecord, RunStats, mean_tv, tokens_per_step
from lantern_hpu.tree import DynamicTree

WARM_STEPS = 16  # of the first batch, after capture and replay, before anything is timed
UNTIMED, SPLIT_STEPS = 2, 16  # eager steps before and while their parts are timed
BRIEF_STEPS = (
    4  # in place of `SPLIT_STEPS` with a stretched model, and no `WARM_STEPS`: its steps are long
)
BRIEF_WARM_UP = (
    "text, prefill, step and pixels twice each, which records and replays what is recorded"
)
WARM_UP = f"{BRIEF_WARM_UP}; then {WARM_STEPS} steps of the first batch"


def conditional(taken: Sequence[int], steps: int) -> list[float | None]:
    """How often a depth was accepted where the one before it was; None where that never happened."""
    before = [steps, *taken]
    return [now / last if last else None for now, last in zip(taken, before, strict=False)]


def step_alone(engine: Engine, prefix: Prefix, requests: Sequence[Request], most: int) -> float:
    """Milliseconds of a step that follows the one before at once: nothing is fed or read between them.

    Args:
        most: steps.
    """
    engine.start(prefix, requests)
    count = min(most, engine.spec.block)
    engine.upload_uniforms([request.seed for request in requests], 1, count)
    with engine.pace.held():
        return 1000 * seconds_of(engine.backend, engine.step, count)


def split_step(
    engine: Engine, prefix: Prefix, requests: Sequence[Request], most: int
) -> dict[str, float]:
    """Milliseconds of each part of an eager step; `tables` are those of dynamic trees.

    The step is run as it stands, past the recording, so that each part can be waited for. `host` is what is left of
    the whole: random numbers, reads, and Python between the parts.

    Args:
        most: timed steps.
    """
    waiting = partial(device_time, engine.backend)
    ends, seconds = [waiting()], []
    for step in islice(engine.trace(prefix, requests, waiting), UNTIMED + most):
        seconds.append(step.seconds)
        ends.append(waiting())
    untimed = min(UNTIMED, len(seconds) - 1)
    timed = seconds[untimed:]
    parts = {part: sum(each.get(part, 0.0) for each in timed) for part in PARTS}
    if not isinstance(engine.spec.tree, DynamicTree):  # constants, and hardly any time
        parts["draft"] += parts["tables"]
        parts["tables"] = 0.0
    parts["host"] = max(ends[-1] - ends[untimed] - sum(parts.values()), 0.0)
    return {part: 1000 * spent / len(timed) for part, spent in parts.items()}


class RunMeter:
    """Measures one case. Its engine is warmed up as `WARM_UP` says, and that is timed as well."""

    def __init__(
        self,
        pipeline: LanternPipeline,
        case: Case,
        requests: Sequence[Request],
        rates: Rates,
        startup_s: float,
        show: Callable[[str], object] = str,
    ) -> None:
        """
        Args:
            requests: whole batches of them.
            rates: measured, for the floor of the step.
            startup_s: importing and loading, in seconds.
            show: is called with the progress of a batch.
        """
        began = time.perf_counter()
        self.pipeline, self.case, self.rates, self.startup_s = pipeline, case, rates, startup_s
        size = case.batch
        self.batches = [requests[i : i + size] for i in range(0, len(requests), size)]
        self.engine = pipeline.engines.get(pipeline.spec(requests, case.setting.tree, size))
        pipeline.prepare(self.engine, requests, RunStats())
        is_long = pipeline.model.stretched is not None
        self.split = min(BRIEF_STEPS, SPLIT_STEPS) if is_long else SPLIT_STEPS
        self.begin(show)
        self.run_steps(0 if is_long else WARM_STEPS)
        self.begin(show)
        self.warmup_s = time.perf_counter() - began
        self.batch_seconds: list[float] = []
        self.pixel_seconds: list[float] = []  # of them, those that made pictures of tokens
        self.records: list[ImageRecord] = []

    def begin(self, show: Callable[[str], object]) -> None:
        """Count and time from here on."""
        self.clock, self.runs, self.before = StepClock(show), 0, self.engine.report()

    def run(self, requests: Sequence[Request], most: int | None = None) -> list[Finished]:
        """The images of a batch, or so many steps of it."""
        clock = self.clock
        stream = self.pipeline.stream(self.engine, requests, clock.timing, clock.read, most)
        self.runs += 1
        return [image for _, image in sorted(stream, key=lambda numbered: numbered[0])]

    def run_steps(self, count: int) -> None:
        """At least so many steps of the first batch; of the batch again where it is done before."""
        until = self.clock.timing.steps + count
        while self.clock.timing.steps < until:
            self.run(self.batches[0], until - self.clock.timing.steps)

    # -- rows

    def draw(self) -> None:
        """The next batch of images, from the prompt to pixels."""
        began = time.perf_counter()
        finished = self.run(self.batches[len(self.batch_seconds)])
        tokens_done = time.perf_counter()
        self.pipeline.pixels(np.stack([done.tokens for done in finished]))
        done = time.perf_counter()
        self.batch_seconds.append(done - began)
        self.pixel_seconds.append(done - tokens_done)
        self.records += map(self.pipeline.record, finished)

    def images(self) -> SpeedRow:
        """The case with what is known of the batches drawn."""
        return with_images(self.row(), self.batch_seconds, self.pixel_seconds, self.records)

    def row(self) -> SpeedRow:
        """The case with what is known of its steps, however they were run."""
        case, engine, requests = self.case, self.engine, self.batches[0]
        counted, peak = engine.report(), self.pipeline.backend.memory().peak
        prefix, each = self.pipeline.prefix(engine, requests), self.clock.step_ms
        mean, alone = sum(each) / len(each), step_alone(engine, prefix, requests, self.split)
        parts = split_step(engine, prefix, requests, self.split)
        passes = StepPasses.of(case.setting.tree)
        least = floor(self.pipeline.model.config, passes, engine.spec.rows, self.rates)
        stats = engine.report()
        return SpeedRow(
            method=case.setting.method,
            tree=case.setting.tree.name,
            relaxation=case.setting.relaxation.as_json(),
            graphs=case.mode,
            batch_size=case.batch,
            prefill_s_per_image=self.clock.timing.prefill_s / self.runs / case.batch,
            steps=len(each),
            ms_per_step=mean,
            p50_ms_per_step=quantile(each, 0.5),
            p95_ms_per_step=quantile(each, 0.95),
            step_alone_ms=alone,
            host_share=max(0.0, 1 - alone / mean),
            eager_step_ms=parts,
            step_passes=passes.as_json(),
            floor_ms=1000 * least.step,
            floor_ratio=1000 * least.step / mean,
            verify_floor_ms=1000 * least.verify,
            verify_floor_ratio=1000 * least.verify / parts["verify"],
            floor_bound=least.bound,
            host_reads=counted.host_reads - self.before.host_reads,
            graph_replays=counted.replays - self.before.replays,
            recompiles_after_warmup=stats.recompiles_after_warmup,
            warmup_s=self.warmup_s,
            capture_s=stats.capture_seconds,
            startup_s=self.startup_s + self.warmup_s,
            state_bytes=sum(tensor.nbytes for tensor in engine.state.tensors().values()),
            peak_memory_bytes=peak,
        )


def with_images(
    row: SpeedRow, seconds: list[float], pixels: list[float], records: Sequence[ImageRecord]
) -> SpeedRow:
    """A row of steps, with what is known of the images whose steps they were.

    Args:
        seconds: of each batch. pixels: of them, those that made pictures of tokens.
    """
    images, steps = len(records), sum(record.steps for record in records)
    by_depth = zip(*(record.accepted_by_depth for record in records), strict=True)
    taken, each = [sum(counts) for counts in by_depth], [s / row.batch_size for s in seconds]
    return replace(
        row,
        images=images,
        batch_seconds=seconds,
        seconds_per_image=sum(seconds) / images,
        p50_seconds_per_image=quantile(each, 0.5),
        p95_seconds_per_image=quantile(each, 0.95),
        p50_batch_s=quantile(seconds, 0.5),
        p95_batch_s=quantile(seconds, 0.95),
        images_per_second=images / sum(seconds),
        steps_s_per_image=row.steps * row.ms_per_step / 1000 / images,
        vq_decode_s_per_image=sum(pixels) / images,
        tokens_per_step=tokens_per_step(records),
        accepted_per_step=sum(taken) / steps,
        accepted_by_depth=[count / steps for count in taken],
        accept_rate_by_depth=conditional(taken, steps),
        relaxed_accepts_per_image=sum(record.relaxed_accepts for record in records) / images,
        tv_per_token=mean_tv(records),
        host_reads_per_image=row.host_reads / images,
    )
