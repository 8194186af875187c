"""The loop that all measurements share: settings are warmed up, then draw a batch each in turns, and are timed.

Below it: the parts of a step, and how fast a device copies and multiplies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lantern_hpu.backends.base import Backend
from lantern_hpu.core import Event, ImageRecord, Request, RunStats, check_valid
from lantern_hpu.decode.engine import Engine
from lantern_hpu.methods.request import in_turn
from lantern_hpu.models.text.prefix import Prefix
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.results.prompts import usual_prompts
from lantern_lab.measure.options import has_long_steps
from lantern_lab.measure.rows import PARTS, Case

WARM_STEPS = 16  # of the first batch, after capture and replay, before anything is timed
UNTIMED, SPLIT_STEPS = 2, 16  # eager steps before and while their parts are timed
BRIEF_STEPS = 4  # in place of `SPLIT_STEPS` with a large model on a processor, and no `WARM_STEPS`: its steps are long
BRIEF_WARM_UP = (
    "text, prefill, step and pixels twice each, which records and replays what is recorded"
)
WARM_UP = f"{BRIEF_WARM_UP}; then {WARM_STEPS} steps of the first batch"


@dataclass
class TimedBatch:
    """A batch that was drawn.

    Attributes:
        stats: seconds of its phases. seconds: prompt to pixels; pixel_seconds: of them, pixels.
        reads: at each host read: seconds since the start, tokens known, seconds of steps, steps.
    """

    stats: RunStats = field(default_factory=RunStats)
    seconds: float = 0.0
    pixel_seconds: float = 0.0
    records: list[ImageRecord] = field(default_factory=list)
    pictures: list[Image.Image] = field(default_factory=list)
    reads: list[tuple[float, int, float, int]] = field(default_factory=list)

    @property
    def blocks(self) -> list[tuple[float, int]]:
        """Seconds and steps between host reads. Steps under way belong to the block that is read with them."""
        found = list[tuple[float, int]]()
        seconds = 0.0
        steps = 0
        for _, _, spent, taken in self.reads:
            if taken > steps:
                found.append((spent - seconds, taken - steps))
                seconds = spent
                steps = taken
        return found

    @property
    def image_steps(self) -> int:
        """Steps of all of its images."""
        return sum(record.steps for record in self.records)


def usual_requests(
    pipeline: LanternPipeline, case: Case, images: int, seed: int, prompts: Sequence[str] = ()
) -> list[Request]:
    """Whole batches of at least so many images of the prompts, in turn; of the usual ones without any."""
    texts = prompts or usual_prompts(pipeline.model.condition.classes)
    count = -(-images // case.batch) * case.batch
    rule = case.setting.relaxation
    sampling = pipeline.model.sampling
    return in_turn(texts, range(count), seed, sampling, rule)


class Meter:
    """Draws batches of one setting and times them; it begins with a warm-up, which is timed as well."""

    def __init__(
        self,
        pipeline: LanternPipeline,
        case: Case,
        requests: Sequence[Request],
        warm_steps: int | None = None,
        show: Callable[[str], object] = str,
    ) -> None:
        """
        Args:
            requests: whole batches. show: is called with how far a run is.
            warm_steps: that are taken after the capture, of the first batch; None: as bench does.
        """
        began = time.perf_counter()
        self.pipeline = pipeline
        self.case = case
        self.requests = requests
        self.show = show
        self.batches: list[TimedBatch] = []
        self.spec = pipeline.spec(requests, case.setting.tree, case.batch)
        self.is_long = has_long_steps(pipeline)
        if warm_steps is None:
            warm_steps = 0 if self.is_long else WARM_STEPS
        pipeline.prepare(pipeline.engines.get(self.spec), requests, RunStats())
        self.run_steps(warm_steps)
        self.before = self.engine.report()
        self.warmup_s = time.perf_counter() - began

    @property
    def engine(self) -> Engine:
        """Recorded and replayed; made again where others needed its memory."""
        engine = self.pipeline.engines.get(self.spec)
        self.pipeline.warm_up(engine, self.requests[0])
        return engine

    def batch_of(self, number: int) -> Sequence[Request]:
        size = self.case.batch
        return self.requests[number * size : (number + 1) * size]

    def run(self, requests: Sequence[Request], most: int | None = None) -> TimedBatch:
        """The tokens of a batch, or of at most `most` steps of it."""
        engine = self.engine
        batch = TimedBatch()
        began = time.perf_counter()
        stats = batch.stats

        def read(event: Event) -> None:
            now = time.perf_counter() - began
            batch.reads.append((now, event.tokens, stats.steps_s, stats.steps))
            self.show(f"{event.tokens_per_step:.2f} tokens a step, {stats.steps} steps")

        stream = self.pipeline.stream(engine, requests, stats, read, most)
        batch.records = [image for _, image in sorted(stream, key=lambda numbered: numbered[0])]
        batch.seconds = time.perf_counter() - began
        check_valid(batch.records)
        return batch

    def run_steps(self, count: int) -> list[TimedBatch]:
        """So many steps of the first batch, which is drawn again where it is done earlier."""
        done: list[TimedBatch] = []
        while count > 0:
            done.append(self.run(self.batch_of(0), count))
            count -= done[-1].stats.steps
        return done

    def draw(self, pixels: bool = True) -> None:
        """The next batch, from the prompt to pixels."""
        batch = self.run(self.batch_of(len(self.batches)))
        if pixels:
            began = time.perf_counter()
            if self.pipeline.diffusion is None:
                tokens = np.stack([record.token_ids for record in batch.records])
                batch.pictures = self.pipeline.pixels(tokens)
            else:
                made = map(self.pipeline.picture, batch.records)
                batch.pictures = [picture for picture in made if picture is not None]
            batch.pixel_seconds = time.perf_counter() - began
            batch.seconds += batch.pixel_seconds
        self.batches.append(batch)


def take_turns(meters: Sequence[Meter], turns: int, bar: ProgressBar, pixels: bool = True) -> None:
    """A batch of each, then the next of each, so that a drift of the machine's speed affects all alike."""
    for _ in range(turns):
        for meter in meters:
            bar.set_description(str(meter.case.setting))
            with meter.pipeline.backend.errors(), torch.no_grad():
                meter.draw(pixels)
            bar.update()


# ------------------------------------------------------------------------------------ parts of a step


def device_time(backend: Backend) -> float:
    """The time in seconds when everything asked for so far is done."""
    backend.transfers.flush()  # a lazy device would drop or postpone it
    backend.synchronize()
    return time.perf_counter()


def seconds_of(backend: Backend, function: Callable[[], object], calls: int = 1) -> float:
    """Mean seconds of a call, of several in a row: waiting for the device then hardly counts."""
    began = device_time(backend)
    for _ in range(calls):
        function()
        backend.transfers.flush()
    return (device_time(backend) - began) / calls


def step_alone(
    engine: Engine, prefix: Prefix, requests: Sequence[Request], most: int, known: int = 0
) -> float:
    """Milliseconds of a step, of `most` at most that follow each other at once: nothing is fed or read between them.

    With `known`, they are steps of images of which so many tokens are known, whatever those are.
    """
    engine.prefill_batch(prefix, requests)
    if known:
        engine.state.count.fill_(known)
    count = min(most, engine.spec.block)
    engine.upload_uniforms([request.seed for request in requests], 1, count)
    with engine.tuner.with_threads():
        return 1000 * seconds_of(engine.backend, engine.step, count)


def split_step(
    engine: Engine, prefix: Prefix, requests: Sequence[Request], most: int
) -> dict[str, float]:
    """Milliseconds of each part of an eager step, over `most` timed ones; `tables` are those of dynamic trees.

    The step is run past the recording, so that each part can be waited for. `host` is what is left of
    the whole: random numbers, reads, and Python between the parts.
    """
    waiting = partial(device_time, engine.backend)
    ends = [waiting()]
    seconds = []
    for step in islice(engine.trace(prefix, requests, waiting), UNTIMED + most):
        seconds.append(step.seconds)
        ends.append(waiting())
    untimed = min(UNTIMED, len(seconds) - 1)
    timed = seconds[untimed:]
    parts = {part: sum(each.get(part, 0.0) for each in timed) for part in PARTS}
    parts["host"] = max(ends[-1] - ends[untimed] - sum(parts.values()), 0.0)
    return {part: 1000 * spent / len(timed) for part, spent in parts.items()}


# ------------------------------------------------------------------------------------ rates of a device

COPIED = 256 * 2**20  # bytes of the copied tensor: more than a cache holds
LARGEST = 8192  # rows and columns of the largest product tried
ENOUGH = 0.02  # seconds of one timing; products that take as long are large enough
TIMES = 5  # timings of each; the fastest is kept, as a floor is what can be reached


def least_seconds(backend: Backend, function: Callable[[], object]) -> float:
    """Least time of a call; short ones are timed several in a row."""
    seconds_of(backend, function)
    calls = max(1, round(ENOUGH / seconds_of(backend, function)))
    return min(seconds_of(backend, function, calls) for _ in range(TIMES))


@torch.no_grad()
def copy_bandwidth(backend: Backend) -> float:
    """Bytes a second that are read and written, of one tensor copied to another or increased in place.

    A processor's cache reads what a copy overwrites, which is not counted: there the second is faster.
    """
    source = torch.ones(COPIED // 4, dtype=torch.float32, device=backend.device)
    goal = torch.zeros_like(source)
    runs = (lambda: goal.copy_(source), lambda: goal.add_(1))
    return 2 * COPIED / min(least_seconds(backend, run) for run in runs)


@torch.no_grad()
def matrix_rate(backend: Backend, dtype: torch.dtype) -> float:
    """Operations a second of a square matrix product; the size grows until a product takes long enough."""
    size = 256
    best = 0.0
    while True:
        left = torch.ones(size, size, dtype=dtype, device=backend.device)
        right = torch.ones_like(left)
        product = torch.empty_like(left)

        def multiply(a: Tensor = left, b: Tensor = right, out: Tensor = product) -> Tensor:
            return torch.mm(a, b, out=out)

        taken = least_seconds(backend, multiply)
        best = max(best, 2 * size**3 / taken)
        if taken >= ENOUGH or size >= LARGEST:
            return best
        size *= 2


def measure_rates(backend: Backend, dtype: torch.dtype) -> dict[str, Any]:
    """How fast a device copies memory and multiplies matrices, in the run's format among others, as reports have it."""
    with backend.errors():
        matrices = matrix_rate(backend, dtype)
        bf16: float | None = matrices
        if dtype != torch.bfloat16:
            known = "bfloat16" in backend.dtypes
            bf16 = matrix_rate(backend, torch.bfloat16) if known else None
        return {
            "copy_bytes_per_s": copy_bandwidth(backend),
            "bf16_operations_per_s": bf16,  # None where the device has no bfloat16
            "operations_per_s": matrices,
            "how": f"fastest of {TIMES}: one tensor of {COPIED // 2**20} MiB copied to another or increased in "
            f"place, counted as read and written; square matrix products of growing size up to {LARGEST}",
        }
