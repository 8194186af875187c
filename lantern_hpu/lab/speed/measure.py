"""Time drawing: whole images, or steps alone; where a step's time goes; what it keeps in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np

from lantern_hpu.backends.base import Backend
from lantern_hpu.decode.batch import Batch
from lantern_hpu.decode.engine import Engine
from lantern_hpu.errors import LanternError
from lantern_hpu.lab.speed.cases import Case
from lantern_hpu.lab.speed.report import EAGER, PARTS, Row
from lantern_hpu.lab.speed.roofline import Rates, StepPasses, floor
from lantern_hpu.methods.methods import Request
from lantern_hpu.models.text.prefix import Prefix
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import ImageRecord, tokens_per_step
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


def quantile(values: Sequence[float], share: float) -> float:
    """What this share of the values does not exceed, between neighbours in proportion."""
    return float(np.quantile(values, share))


def conditional(taken: Sequence[int], steps: int) -> list[float | None]:
    """How often a depth was accepted where the one before it was; None where that never happened."""
    before = [steps, *taken]
    return [now / last if last else None for now, last in zip(taken, before, strict=False)]


def clock(backend: Backend) -> float:
    """The time when everything asked for so far is done."""
    backend.flush()
    backend.synchronize()
    return time.perf_counter()


def ready(pipeline: LanternPipeline, case: Case, requests: Sequence[Request]) -> Engine:
    """An engine for these requests, recorded and replayed; those of earlier cases are given up.

    But where steps are recorded, the first engine stays, a small one as batch sizes grow: recorded graphs share
    memory, which must not go with the last of them while another is to come.
    """
    engines = pipeline.engines
    for first in list(engines.engines)[:1]:
        engines.get(first)
    engines.shrink(0 if case.mode == EAGER else 1)
    pipeline.backend.reset_peak()
    spec = pipeline.spec(requests, case.tree, case.batch)
    engine = engines.get(spec)
    pipeline.model.condition.prepare([request.prompt for request in requests])
    try:
        pipeline.warm_up(engine, requests[0])
    except LanternError:
        engines.discard(spec)
        raise
    return engine


def step_alone(engine: Engine, prefix: Prefix, requests: Sequence[Request], most: int) -> float:
    """Milliseconds of a step that follows the one before at once: nothing is fed or read between them.

    Args:
        most: steps.
    """
    engine.start(prefix, requests)
    count = min(most, engine.spec.block)
    engine.feed([request.seed for request in requests], 1, count)
    began = clock(engine.backend)
    with engine.pace.held():
        for _ in range(count):
            engine.step()
    return 1000 * (clock(engine.backend) - began) / count


def split_step(
    engine: Engine, prefix: Prefix, requests: Sequence[Request], most: int
) -> dict[str, float]:
    """Milliseconds of each part of an eager step; `tables` are those of dynamic trees.

    The step is run as it stands, past the recording, so that each part can be waited for. `host` is what is left of
    the whole: random numbers, reads, and Python between the parts.

    Args:
        most: timed steps.
    """
    waiting = partial(clock, engine.backend)
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


class Meter:
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
            startup_s: what went before: importing and loading.
            show: is told how far a batch is.
        """
        began = time.perf_counter()
        self.pipeline, self.case, self.rates, self.startup_s = pipeline, case, rates, startup_s
        self.show = show
        size = case.batch
        self.batches = [requests[i : i + size] for i in range(0, len(requests), size)]
        self.engine = ready(pipeline, case, requests)
        self.forget()
        is_long = pipeline.model.stretched is not None
        self.split = min(BRIEF_STEPS, SPLIT_STEPS) if is_long else SPLIT_STEPS
        self.steps_of(0 if is_long else WARM_STEPS)
        self.warmup_s = time.perf_counter() - began
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.blocks: list[tuple[float, int]] = []  # seconds and steps between two host reads
        self.prefills: list[float] = []  # seconds of each batch's
        self.before = self.engine.report()

    # -- running

    def prefix(self, requests: Sequence[Request]) -> Prefix:
        self.pipeline.backend.flush()  # what goes before is no part of it
        return self.pipeline.prefix(self.engine, requests)

    def run(self, requests: Sequence[Request], most: int | None = None) -> Batch:
        """A batch to its end, or at least so many steps of it."""
        batch = Batch(self.engine, self.prefix)
        batch.admit(requests)
        seconds, count = 0.0, 0
        while batch.running and (most is None or count < most):
            batch.advance()
            self.show(f"{batch.timing.count} steps")
            now = batch.timing
            if now.count > count:  # what is on its way belongs to the block that is read with it
                self.blocks.append((now.steps - seconds, now.count - count))
                seconds, count = now.steps, now.count
        self.prefills.append(batch.timing.prefill)
        return batch

    def steps_of(self, count: int) -> None:
        """At least so many steps of the first batch; of the batch again where it is done before."""
        while count > 0:
            count -= self.run(self.batches[0], count).timing.count

    # -- rows

    def steps(self, count: int) -> Row:
        """Steps of one batch alone: for weights whose images and acceptance mean nothing."""
        self.steps_of(count)
        return self.row()

    def images(self) -> Row:
        """Whole batches of images, from the prompt to pixels."""
        seconds, pixels = [], []
        records: list[ImageRecord] = []
        for requests in self.batches:
            began = time.perf_counter()
            finished = self.run(requests).finished()
            tokens_done = time.perf_counter()
            self.pipeline.pixels(np.stack([done.tokens for done in finished]))
            done = time.perf_counter()
            seconds.append(done - began)
            pixels.append(done - tokens_done)
            records += map(self.pipeline.record, finished)
        return with_images(self.row(), seconds, pixels, records)

    def row(self) -> Row:
        """The case with what is known of its steps, however they were run."""
        case, engine, requests = self.case, self.engine, self.batches[0]
        counted, peak = engine.report(), self.pipeline.backend.memory().peak
        prefix = self.prefix(requests)
        each = [1000 * seconds / n for seconds, n in self.blocks for _ in range(n)]
        mean, alone = sum(each) / len(each), step_alone(engine, prefix, requests, self.split)
        parts = split_step(engine, prefix, requests, self.split)
        passes = StepPasses.of(case.tree)
        least = floor(self.pipeline.model.config, passes, engine.spec.rows, self.rates)
        stats = engine.report()
        return Row(
            method=case.method,
            tree=case.tree.name,
            relaxation=case.relaxation.as_json(),
            graphs=case.mode,
            batch_size=case.batch,
            prefill_s_per_image=sum(self.prefills) / len(self.prefills) / case.batch,
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
    row: Row, seconds: list[float], pixels: list[float], records: Sequence[ImageRecord]
) -> Row:
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
        host_reads_per_image=row.host_reads / images,
    )
