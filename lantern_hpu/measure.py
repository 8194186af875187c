"""Time drawing: whole images, or steps alone; where a step's time goes; what it keeps in memory.

A row is a dict with the fields of a row of `assets/bench.schema.json`; this module fills in what is measured, and
`lantern_hpu.bench` what follows from several rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lantern_hpu.config import Relaxation, Request
from lantern_hpu.tree import DynamicTree, Tree

if TYPE_CHECKING:
    from lantern_hpu.backends.base import Backend
    from lantern_hpu.engine import Engine
    from lantern_hpu.pipeline import LanternPipeline

PARTS = ("draft", "tables", "verify", "accept", "commit", "host")
EAGER = "eager"
WARM_STEPS = 16  # of the first batch, after capture and replay, before anything is timed
SPLIT_STEPS = 16  # eager steps whose parts are timed, after two that are not
WARM_UP = (
    "text, prefill, step and pixels twice each, which records and replays what is recorded; "
    f"then {WARM_STEPS} steps of the first batch"
)
Row = dict[str, Any]
Blocks = list[tuple[float, int]]  # seconds and steps between two host reads


@dataclass(frozen=True)
class Case:
    """What one row measures."""

    method: str
    tree: Tree
    relaxation: Relaxation
    mode: str
    batch: int

    def described(self) -> Row:
        """The row's fields that say what it is of."""
        return {
            "method": self.method,
            "tree": self.tree.name,
            "relaxation": asdict(self.relaxation),
            "graphs": self.mode,
            "batch_size": self.batch,
        }


# ------------------------------------------------------------------------------------ clocks


class Stopwatch:
    """Seconds spent in the parts of a step, the device waited for before and after each."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.seconds = backend, dict.fromkeys(PARTS, 0.0)
        self.watched: list[tuple[Any, str]] = []

    def wait(self) -> float:
        """The time when everything asked for so far is done."""
        self.backend.flush()
        self.backend.synchronize()
        return time.perf_counter()

    def watch(self, owner: Any, method: str, part: str) -> None:
        """From now on, time this method."""
        inner = getattr(owner, method)

        def timed(*args: Any) -> Any:
            began = self.wait()
            result = inner(*args)
            self.seconds[part] += self.wait() - began
            return result

        setattr(owner, method, timed)
        self.watched.append((owner, method))

    def stop(self) -> None:
        """Leave the methods as they were."""
        for owner, method in self.watched:
            delattr(owner, method)

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)


@dataclass
class BlockMeter:
    """The steps between two host reads, as a callback of drawing."""

    engine: Engine
    blocks: Blocks = field(default_factory=list)
    before: tuple[float, int] = (0.0, 0)

    def __call__(self, event: object = None) -> None:
        now = (self.engine.timing.steps, self.engine.timing.count)
        if not now[1]:  # another batch begins
            self.before = now
        elif now[1] > self.before[1]:
            self.blocks.append((now[0] - self.before[0], now[1] - self.before[1]))
            self.before = now


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies, between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def per_step(blocks: Blocks) -> list[float]:
    """Milliseconds of each step; those of a block are alike, as the host sees only its end."""
    return [1000 * seconds / count for seconds, count in blocks for _ in range(count)]


# ------------------------------------------------------------------------------------ running


def ready(pipeline: LanternPipeline, case: Case, requests: Sequence[Request]) -> Engine:
    """An engine for these requests, warmed up as `WARM_UP` says; those of earlier cases are given up.

    But where steps are recorded, the mode's first engine stays, a small one as batch sizes grow: recorded graphs
    share memory, which must not go with the last of them while another is to come.
    """
    first = [] if case.mode == EAGER else list(pipeline.engines.items())[:1]
    pipeline.engines = dict(first)
    pipeline.backend.reset_peak()
    engine, _ = pipeline.engine(requests[: case.batch], case.tree, case.batch)
    pipeline.model.condition.prepare([request.prompt for request in requests])
    pipeline.warm_up(engine, requests[0])
    advance(pipeline, engine, requests[: case.batch], WARM_STEPS)
    return engine


def advance(
    pipeline: LanternPipeline, engine: Engine, requests: Sequence[Request], steps: int
) -> tuple[float, Blocks]:
    """The first steps of a batch, at least so many; of the batch again where it is done before.

    Returns seconds of the prefill, and the steps' blocks.
    """
    import torch

    meter, done, prefill = BlockMeter(engine), 0, 0.0
    with pipeline.backend.errors(), torch.no_grad():
        prefix = pipeline.prefix(engine, requests)
        while done < steps:
            for _ in engine.run(prefix, requests):
                meter()
                if engine.timing.count >= steps - done:
                    break
            prefill, done = engine.timing.prefill, done + engine.timing.count
    return prefill, meter.blocks


def alone(pipeline: LanternPipeline, engine: Engine, requests: Sequence[Request]) -> float:
    """Milliseconds of a step that follows the one before at once: nothing is fed or read between them."""
    import torch

    clock, seeds = Stopwatch(pipeline.backend), [request.seed for request in requests]
    with pipeline.backend.errors(), torch.no_grad():
        engine.start(pipeline.prefix(engine, requests), requests)
        count = min(SPLIT_STEPS, engine.block)
        engine.feed(seeds, 1, count)
        began = clock.wait()
        for _ in range(count):
            engine.step()
        return 1000 * (clock.wait() - began) / count


def split_step(
    pipeline: LanternPipeline, engine: Engine, requests: Sequence[Request]
) -> dict[str, float]:
    """Milliseconds of each part of an eager step; `tables`, of dynamic trees, is not part of `draft`.

    The step's function is called as it stands, past the recording, so that each part can be waited for. `host` is
    what is left of the whole: random numbers, the read at the end of a block, and Python between the parts.
    """
    import torch

    watch, step = Stopwatch(pipeline.backend), engine.step.function
    for part in ("draft", "verify", "accept", "commit"):
        watch.watch(step, part, part)
    if isinstance(engine.plan.shapes.tree, DynamicTree):
        watch.watch(step.drafting.tables, "forward", "tables")  # type: ignore[union-attr]
    seeds = [request.seed for request in requests]
    try:
        with pipeline.backend.errors(), torch.no_grad():
            engine.place(pipeline.prefix(engine, requests))
            engine.load(requests)
            engine.prefill.function(engine.state)
            run_eagerly(engine, seeds, 1, 2)
            watch.reset()
            began = watch.wait()
            run_eagerly(engine, seeds, 3, SPLIT_STEPS)
            whole = watch.wait() - began
    finally:
        watch.stop()
    seconds = watch.seconds
    named = sum(seconds[part] for part in ("draft", "verify", "accept", "commit"))
    seconds["draft"] -= seconds["tables"]
    seconds["host"] = max(whole - named, 0.0)
    return {part: 1000 * spent / SPLIT_STEPS for part, spent in seconds.items()}


def run_eagerly(engine: Engine, seeds: Sequence[int], first: int, count: int) -> None:
    """Steps without their runner, in one block."""
    engine.feed(seeds, first, count)
    for _ in range(count):
        known = engine.step.function(engine.state)
    engine.read(known)


# ------------------------------------------------------------------------------------ rows


def measure_images(pipeline: LanternPipeline, case: Case, requests: Sequence[Request]) -> Row:
    """Whole batches of images, from the prompt to pixels."""
    from lantern_hpu.results import tokens_per_step

    began = time.perf_counter()
    engine = ready(pipeline, case, requests)
    warm = time.perf_counter() - began
    before, meter = engine.report(), BlockMeter(engine)
    seconds, records, timings = [], [], []
    for start in range(0, len(requests), case.batch):
        began = time.perf_counter()
        batch = requests[start : start + case.batch]
        result = pipeline.draw(batch, case.tree, case.method, case.batch, meter)
        seconds.append(time.perf_counter() - began)
        records += result.records
        timings.append(result.timing)
    images = len(requests)
    spent = {name: sum(t[name] for t in timings) for name in timings[0]}
    steps = sum(record.steps for record in records)
    taken = [sum(r.accepted_by_depth[d] for r in records) for d in range(case.tree.depth)]
    each = [batch / case.batch for batch in seconds]
    after = engine.report()
    reads = after.host_reads - before.host_reads
    return {
        **case.described(),
        "images": images,
        "batch_seconds": seconds,
        "seconds_per_image": sum(seconds) / images,
        "p50_seconds_per_image": quantile(each, 0.5),
        "p95_seconds_per_image": quantile(each, 0.95),
        "p50_batch_s": quantile(seconds, 0.5),
        "p95_batch_s": quantile(seconds, 0.95),
        "images_per_second": images / sum(seconds),
        "prefill_s_per_image": spent["prefill_s"] / images,
        "steps_s_per_image": spent["steps_s"] / images,
        "vq_decode_s_per_image": spent["decode_s"] / images,
        "tokens_per_step": tokens_per_step(records),
        "accepted_per_step": sum(taken) / steps,
        "accepted_by_depth": [count / steps for count in taken],
        "accept_rate_by_depth": conditional(taken, steps),
        "relaxed_accepts_per_image": sum(r.relaxed_accepts for r in records) / images,
        "host_reads_per_image": reads / images,
        **step_figures(pipeline, engine, meter.blocks, requests[: case.batch], warm),
        "host_reads": reads,
        "graph_replays": after.replays - before.replays,
        "eager_step_ms": split_step(pipeline, engine, requests[: case.batch]),
    }


def measure_steps(
    pipeline: LanternPipeline, case: Case, requests: Sequence[Request], steps: int
) -> Row:
    """Steps of one batch alone: for weights whose images and acceptance mean nothing."""
    began = time.perf_counter()
    engine = ready(pipeline, case, requests)
    warm = time.perf_counter() - began
    before = engine.report()
    prefill, blocks = advance(pipeline, engine, requests, steps)
    after = engine.report()
    unknown = (
        "seconds_per_image p50_seconds_per_image p95_seconds_per_image p50_batch_s p95_batch_s images_per_second "
        "steps_s_per_image vq_decode_s_per_image tokens_per_step accepted_per_step relaxed_accepts_per_image "
        "host_reads_per_image"
    ).split()
    return {
        **case.described(),
        "images": 0,
        "batch_seconds": [],
        "accepted_by_depth": [],
        "accept_rate_by_depth": [],
        **dict.fromkeys(unknown),
        "prefill_s_per_image": prefill / case.batch,
        **step_figures(pipeline, engine, blocks, requests, warm),
        "host_reads": after.host_reads - before.host_reads,
        "graph_replays": after.replays - before.replays,
        "eager_step_ms": split_step(pipeline, engine, requests),
    }


def conditional(taken: Sequence[int], steps: int) -> list[float | None]:
    """How often a depth was accepted where the one before it was; None where that never happened."""
    before = [steps, *taken]
    return [now / last if last else None for now, last in zip(taken, before, strict=False)]


def step_figures(
    pipeline: LanternPipeline,
    engine: Engine,
    blocks: Blocks,
    requests: Sequence[Request],
    warm: float,
) -> Row:
    """What is known of the steps, however they were run."""
    count, total = sum(c for _, c in blocks), sum(seconds for seconds, _ in blocks)
    mean, bare = 1000 * total / count, alone(pipeline, engine, requests)
    stats, each = engine.report(), per_step(blocks)
    state = sum(t.numel() * t.element_size() for t in engine.state.tensors().values())
    return {
        "steps": count,
        "ms_per_step": mean,
        "p50_ms_per_step": quantile(each, 0.5),
        "p95_ms_per_step": quantile(each, 0.95),
        "step_alone_ms": bare,
        "host_share": max(0.0, 1 - bare / mean),
        "warmup_s": warm,
        "capture_s": stats.capture_seconds,
        "recompiles_after_warmup": stats.recompiles_after_warmup,
        "state_bytes": state,
        "peak_memory_bytes": pipeline.backend.memory().peak,
    }
