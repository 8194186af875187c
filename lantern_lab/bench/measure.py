"""Time drawing: whole images, steps, the parts of a step, and the least that a step can take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lantern_hpu.backends.base import Backend
from lantern_hpu.core import Event, ImageRecord, Request, RunStats, check_valid
from lantern_hpu.decode.engine import Engine
from lantern_hpu.models.text.prefix import Prefix
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.plan.floors import Rates, StepPasses, floor
from lantern_hpu.results.images import mean_tv, tokens_per_step
from lantern_lab.bench.cases import Case, has_long_steps
from lantern_lab.bench.columns import PARTS, SpeedRow


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


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median and the 95th percentile of a figure, between neighbours in proportion."""
    return {f"p{p}_{name}": float(np.percentile(values, p)) for p in (50, 95)}


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
    """Bytes a second of one tensor copied to another: each byte is read once and written once."""
    source = torch.ones(COPIED // 4, dtype=torch.float32, device=backend.device)
    goal = torch.zeros_like(source)
    return 2 * COPIED / least_seconds(backend, lambda: goal.copy_(source))


@torch.no_grad()
def matrix_rate(backend: Backend, dtype: torch.dtype) -> float:
    """Operations a second of a square matrix product; the size grows until a product takes long enough."""
    size, best = 256, 0.0
    while True:
        left = torch.ones(size, size, dtype=dtype, device=backend.device)
        right, product = torch.ones_like(left), torch.empty_like(left)

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
            "how": f"fastest of {TIMES}: one tensor of {COPIED // 2**20} MiB copied to another, counted as read "
            f"and written; square matrix products of growing size up to {LARGEST}",
        }


# ------------------------------------------------------------------------------------ the meter

WARM_STEPS = 16  # of the first batch, after capture and replay, before anything is timed
UNTIMED, SPLIT_STEPS = 2, 16  # eager steps before and while their parts are timed
BRIEF_STEPS = 4  # in place of `SPLIT_STEPS` with a large model on a processor, and no `WARM_STEPS`: its steps are long
BRIEF_WARM_UP = (
    "text, prefill, step and pixels twice each, which records and replays what is recorded"
)
WARM_UP = f"{BRIEF_WARM_UP}; then {WARM_STEPS} steps of the first batch"


def step_alone(engine: Engine, prefix: Prefix, requests: Sequence[Request], most: int) -> float:
    """Milliseconds of a step, of `most` at most that follow each other at once: nothing is fed or read between them."""
    engine.prefill_batch(prefix, requests)
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
    ends, seconds = [waiting()], []
    for step in islice(engine.trace(prefix, requests, waiting), UNTIMED + most):
        seconds.append(step.seconds)
        ends.append(waiting())
    untimed = min(UNTIMED, len(seconds) - 1)
    timed = seconds[untimed:]
    parts = {part: sum(each.get(part, 0.0) for each in timed) for part in PARTS}
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
        """`requests` are whole batches; importing and loading took `startup_s` seconds; `show` gets the progress."""
        began = time.perf_counter()
        self.pipeline, self.case, self.rates, self.startup_s = pipeline, case, rates, startup_s
        self.show = show
        size = case.batch
        self.batches = [requests[i : i + size] for i in range(0, len(requests), size)]
        self.engine = pipeline.engines.get(pipeline.spec(requests, case.setting.tree, size))
        pipeline.prepare(self.engine, requests, RunStats())
        is_long = has_long_steps(pipeline)
        self.split = BRIEF_STEPS if is_long else SPLIT_STEPS
        self.begin()
        self.run_steps(0 if is_long else WARM_STEPS)
        self.begin()
        self.warmup_s = time.perf_counter() - began
        self.batch_seconds: list[float] = []
        self.pixel_seconds = 0.0  # of them, what made pictures of tokens
        self.records: list[ImageRecord] = []

    def begin(self) -> None:
        """Count and time from here on."""
        self.timing, self.runs, self.before = RunStats(), 0, self.engine.report()
        self.blocks: list[tuple[float, int]] = []  # seconds and steps between two host reads
        self.seen = 0.0, 0  # seconds and steps at the last of them

    def read(self, event: Event) -> None:
        """Callback of a run: a host read is done. Steps under way belong to the block that is read with them."""
        (seconds, steps), timing = self.seen, self.timing
        if timing.steps > steps:
            self.blocks.append((timing.steps_s - seconds, timing.steps - steps))
            self.seen = timing.steps_s, timing.steps
        self.show(f"{timing.steps} steps")

    def run(self, requests: Sequence[Request], most: int | None = None) -> list[ImageRecord]:
        """The images of a batch, or at most `most` steps of it."""
        stream = self.pipeline.stream(self.engine, requests, self.timing, self.read, most)
        self.runs += 1
        images = [image for _, image in sorted(stream, key=lambda numbered: numbered[0])]
        check_valid(images)
        return images

    def run_steps(self, count: int) -> None:
        """At least `count` steps of the first batch, which is drawn again where it is done earlier."""
        until = self.timing.steps + count
        while self.timing.steps < until:
            self.run(self.batches[0], until - self.timing.steps)

    def draw(self) -> None:
        """The next batch of images, from the prompt to pixels."""
        began = time.perf_counter()
        finished = self.run(self.batches[len(self.batch_seconds)])
        tokens_done = time.perf_counter()
        self.pipeline.pixels(np.stack([record.token_ids for record in finished]))
        done = time.perf_counter()
        self.batch_seconds.append(done - began)
        self.pixel_seconds += done - tokens_done
        self.records += finished

    # -- the row

    def row(self) -> SpeedRow:
        """The case with what is known of the batches drawn."""
        case, setting = self.case, self.case.setting
        memory = self.pipeline.backend.memory()
        counted = self.engine.report()  # without the steps that are taken for their parts
        reads = counted.host_reads - self.before.host_reads
        figures = self.image_figures() | self.acceptance() | self.step_figures()
        stats = self.engine.report()
        return SpeedRow(
            method=setting.method,
            tree=setting.tree.name,
            relaxation=setting.relaxation.as_json(),
            graphs=case.mode,
            batch_size=case.batch,
            host_reads=reads,
            host_reads_per_image=reads / len(self.records),
            graph_replays=counted.replays - self.before.replays,
            recompiles_after_warmup=stats.recompiles_after_warmup,
            warmup_s=self.warmup_s,
            capture_s=stats.capture_seconds,
            startup_s=self.startup_s + self.warmup_s,
            state_bytes=sum(tensor.nbytes for tensor in self.engine.state.tensors().values()),
            peak_memory_bytes=memory.peak,
            **figures,
        )

    def image_figures(self) -> dict[str, Any]:
        batches, images, size = self.batch_seconds, len(self.records), self.case.batch
        each = [seconds / size for seconds in batches]
        return {
            "images": images,
            "batch_seconds": batches,
            "seconds_per_image": sum(batches) / images,
            **percentiles("seconds_per_image", each),
            **percentiles("batch_s", batches),
            "images_per_second": images / sum(batches),
            "prefill_s_per_image": self.timing.prefill_s / self.runs / size,
            "steps_s_per_image": sum(seconds for seconds, _ in self.blocks) / images,
            "vq_decode_s_per_image": self.pixel_seconds / images,
        }

    def acceptance(self) -> dict[str, Any]:
        records = self.records
        images, steps = len(records), sum(record.steps for record in records)
        by_depth = zip(*(record.accepted_by_depth for record in records), strict=True)
        accepted = [sum(counts) for counts in by_depth]
        return {
            "tokens_per_step": tokens_per_step(records),
            "accepted_per_step": sum(accepted) / steps,
            "accepted_by_depth": [count / steps for count in accepted],
            # Of the steps that accepted the depth before; None where there were none
            "accept_rate_by_depth": [
                now / last if last else None
                for now, last in zip(accepted, [steps, *accepted], strict=False)
            ],
            "relaxed_accepts_per_image": sum(record.relaxed_accepts for record in records) / images,
            "tv_per_token": mean_tv(records),
        }

    def step_figures(self) -> dict[str, Any]:
        """Times of steps, and the least that they can take."""
        engine, requests = self.engine, self.batches[0]
        # Of each step; all of a block alike
        each = [1000 * seconds / steps for seconds, steps in self.blocks for _ in range(steps)]
        prefix, mean = self.pipeline.prefix(engine, requests), sum(each) / len(each)
        alone = step_alone(engine, prefix, requests, self.split)
        parts = split_step(engine, prefix, requests, self.split)
        passes = StepPasses.of(self.case.setting.tree)
        least = floor(self.pipeline.model.config, passes, engine.spec.rows, self.rates)
        return {
            "steps": len(each),
            "ms_per_step": mean,
            **percentiles("ms_per_step", each),
            "step_alone_ms": alone,
            "host_share": max(0.0, 1 - alone / mean),
            "eager_step_ms": parts,
            "step_passes": passes._asdict(),
            "floor_ms": 1000 * least.step,
            "floor_ratio": 1000 * least.step / mean,
            "verify_floor_ms": 1000 * least.verify,
            "verify_floor_ratio": 1000 * least.verify / parts["verify"],
            "floor_bound": least.bound,
        }
