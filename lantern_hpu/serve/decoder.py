"""The decode loop: one thread that owns the device and its engines, and decides whose turn it is.

Each method that is served has two engines: one of all slots, and one of a single slot for an image that comes while
nothing else runs, which then takes no longer than it does alone. All are captured before the first request.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from traceback import walk_tb
from typing import Any, NamedTuple

import torch

from lantern_hpu.decode.batch import Batch
from lantern_hpu.decode.engine import Engine
from lantern_hpu.decode.pixels import preview
from lantern_hpu.decode.spec import Spec
from lantern_hpu.errors import CaptureError, DeviceError, LanternError, OptionError
from lantern_hpu.methods.request import Request
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import Drawn, ImageRecord
from lantern_hpu.results.tables import amount, usual_prompts
from lantern_hpu.serve.calls import translated
from lantern_hpu.serve.menu import ONE_SHAPE, Menu, Served, Shape, make_menu
from lantern_hpu.serve.metrics import Metrics
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.serve.protocol import ApiError

PROBED = 3  # steps of a recording that are compared with the step uncaptured
IDLE = 0.5  # seconds between two heartbeats where nothing is to be drawn
log = logging.getLogger("lantern_hpu.serve")


class Partial(NamedTuple):
    """A picture on its way."""

    image: Any  # a PIL image, grey where nothing is known
    rows: int
    tokens: int
    steps: int


class Done(NamedTuple):
    """A picture, and the seconds it took."""

    drawn: Drawn
    queue: float
    prefill: float
    decode: float  # the steps, shared with the other images of the batch
    pixels: float


@dataclass(eq=False)
class Job:
    """One image that a client waits for."""

    request: Request
    method: str
    deadline: float  # by the monotonic clock
    shows: tuple[int, ...]  # rows at which a partial picture is wanted, rising
    send: Callable[
        [Partial | Done | ApiError], None
    ]  # called with each event, usually in the decode thread
    shape: Shape = ONE_SHAPE
    queued: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    begun: float = 0.0
    cancelled: bool = False
    alone: bool = False  # it is drawn by itself, after an error beside others


class Lane:
    """The slots of one engine, and the jobs in them."""

    def __init__(self, served: Served, batch: Batch, usual: Request) -> None:
        """`usual` is what it was warmed up with."""
        self.served, self.batch, self.usual = served, batch, usual
        self.jobs: dict[int, Job] = {}  # of a slot
        self.spent, self.idle = 0.0, True  # seconds of the decode thread, for fair turns

    @property
    def room(self) -> int:
        return len(self.batch.free)

    def leave(self, slot: int) -> Job:
        self.batch.release(slot)
        return self.jobs.pop(slot)

    def empty(self) -> list[Job]:
        """Give all slots up. -> the jobs that were in them"""
        left = list(self.jobs.values())
        self.jobs.clear()
        self.batch.slots.clear()
        return left


class DecodeThread:
    """Takes jobs from any thread; everything else happens in its own."""

    def __init__(self, pipeline: LanternPipeline, options: ServeOptions) -> None:
        self.pipeline, self.options = pipeline, options
        self.menu = make_menu(pipeline, options)
        self.metrics = Metrics(self.menu.model)
        self.lanes: dict[tuple[str, Shape], list[Lane]] = {}  # the single slot first
        self.waiting: deque[Job] = deque()
        self.open_jobs: set[Job] = set()  # taken, and neither done nor given up
        self.clock, self.seconds = time.perf_counter, 0.0  # of an image in its slot, on average
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self.run, name="decode", daemon=True)
        self.beat, self.ready, self.draining, self.stopping = time.monotonic(), False, False, False
        self.failure: BaseException | None = None
        self.held = ExitStack()  # the lanes' engines, as long as the thread runs
        check_engines(pipeline, self.menu, options.slots)
        self.watch()

    # Called by other threads

    def start(self, wait: bool = False) -> None:
        """Begin to record, and then to draw.

        Args:
            wait: return when it is ready, or has failed.
        """
        if self.thread.ident is None:
            self.thread.start()
        while wait and not self.ready and self.failure is None and not self.stopping:
            time.sleep(0.05)

    def stop(self, drain: float = 0.0, wait: float | None = None) -> int:
        """Take no more jobs, draw on for up to `drain` seconds, and answer all that are left with an error.

        Args:
            wait: seconds for the steps under way to end; None: as long as they take.

        Returns how many were left.
        """
        until = time.monotonic() + drain
        with self.changed:
            self.draining = True
            self.changed.notify()
        while self.open_jobs and self.failure is None and time.monotonic() < until:
            time.sleep(0.05)
        left, self.stopping = len(self.open_jobs), True
        with self.changed:
            self.changed.notify()
        self.answer_all(ApiError(503, "the server stopped"))
        if self.thread.is_alive():
            self.thread.join(wait)
        return left

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the images of a request, all or none."""
        with self.changed:
            if self.draining or not self.ready:
                what = "about to stop" if self.draining else "not ready yet"
                raise ApiError(503, f"the server is {what}", headers={"Retry-After": "5"})
            if len(self.waiting) + len(jobs) > self.options.queue:
                what = f"{len(self.waiting)} images wait, {self.options.queue} may"
                places = len(self.waiting) + len(jobs) - self.options.queue
                headers = {"Retry-After": str(self.retry_after(places))}
                raise ApiError(429, what, None, "queue_full", headers)
            self.waiting.extend(jobs)
            self.open_jobs.update(jobs)
            self.changed.notify()

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Give jobs up; their slots are free at the next host read."""
        for job in jobs:
            job.cancelled = True

    @property
    def running(self) -> int:
        return sum(len(lane.jobs) for lane in self.all_lanes())

    def retry_after(self, places: int) -> int:
        """About how many seconds until so many images have left the queue for a slot: at least one."""
        now = time.monotonic()
        left, each = [], self.seconds
        for lane in self.all_lanes():
            for slot, job in list(lane.jobs.items()):
                done = max(lane.batch.known[slot], 1) / lane.batch.total
                each = each or (now - job.begun) / done  # nothing was finished yet
                left.append(each * (1 - done))
        return max(1, math.ceil(seconds_until_room(places, left, each, self.options.slots)))

    def all_lanes(self) -> list[Lane]:
        return [lane for lanes in list(self.lanes.values()) for lane in lanes]

    def watch(self) -> None:
        def recompiles() -> int:
            engines = [lane.batch.engine.report() for lane in self.all_lanes()]
            return sum(report.recompiles_after_warmup for report in engines)

        backend, slots, watch = self.pipeline.backend, self.options.slots, self.metrics.watch
        watch("num_requests_running", "Images in slots", lambda: self.running)
        watch("num_requests_waiting", "Images in the queue", lambda: len(self.waiting))
        taken = "Slots taken, of those of a method's engine"
        watch("slots_in_use_ratio", taken, lambda: self.running / slots)
        watch("recompiles_after_readiness", "Captures that should not be", recompiles)
        memory = "Most bytes of device memory in use so far"
        watch("device_memory_peak_bytes", memory, lambda: backend.memory().peak or 0)

    # In the thread

    def run(self) -> None:
        event = ApiError(503, "the server stopped")
        try:
            with self.held, self.pipeline.backend.errors(), torch.no_grad():
                self.capture()
                self.ready = True
                while not self.stopping:
                    self.turn()
        except BaseException as error:
            self.failure = error
            event = ApiError(500, f"the server failed: {error}")
        finally:
            self.ready = False
            with self.changed:
                self.draining = True
                self.waiting.clear()
            for lane in self.all_lanes():
                lane.jobs.clear()
            self.answer_all(event)

    def answer(self, job: Job, event: Done | ApiError | None) -> None:
        """Send the last event of a job, once; None where the client left."""
        with self.changed:
            if job in self.open_jobs:
                try:
                    if event is not None:
                        job.send(event)
                except Exception as error:
                    with suppress(Exception):
                        job.send(failed(job, "send", error))
                self.open_jobs.remove(job)

    def answer_all(self, event: ApiError) -> None:
        for job in list(self.open_jobs):
            self.answer(job, event)

    def capture(self) -> None:
        """Capture every engine, and compare each with itself uncaptured."""
        engines, specs = self.pipeline.engines, lane_specs(self.menu.methods, self.options.slots)
        engines.kept = max(engines.kept, sum(map(len, specs.values())))
        for (method, shape), several in specs.items():
            served = self.menu.methods[method]
            self.lanes[method, shape] = [self.lane(served, spec) for spec in several]
        self.described = {
            name: self.pipeline.describe(served.setting)
            for name, served in self.menu.methods.items()
        }
        self.environment = self.pipeline.environment()

    def lane(self, served: Served, spec: Spec) -> Lane:
        """An engine that is captured and checked."""
        engine = self.pipeline.engines.get(spec)
        prompt = usual_prompts(self.pipeline.model.condition.takes_classes)[0]
        request = Request(prompt, 0, self.menu.sampling, served.setting.relaxation)
        self.pipeline.model.condition.prepare([request.prompt])
        self.pipeline.warm_up(engine, request)
        check_replay(self.pipeline, engine, request)
        self.beat = time.monotonic()
        self.held.enter_context(engine.pinned())
        return Lane(served, self.pipeline.batch(engine), request)

    def turn(self) -> None:
        """Admit the jobs that have room, and run the engine that has had the least time until its next host read.

        Turns one after the other would not be fair: one may be a step of a window, another sixteen steps of `ar`.
        """
        self.beat = time.monotonic()
        self.join()
        for lane, jobs in self.next_ones():
            if good := [job for job in jobs if self.read_text(job)]:
                self.within(lane, partial(self.admit, lane, good), good)
        for lane in self.all_lanes():
            lane.idle = not lane.jobs
        if taken := [lane for lane in self.all_lanes() if lane.jobs]:
            lane = min(taken, key=lambda lane: lane.spent)
            began = self.clock()
            self.within(lane, partial(self.advance, lane))
            lane.spent += self.clock() - began

    def within(self, lane: Lane, act: Callable[[], None], coming: Iterable[Job] = ()) -> None:
        """Do something with all slots of a lane. Where that fails, the one whose error it is fails, and no other.

        All of them begin again, each alone, with the same tokens; what fails alone has itself to blame.
        """
        try:
            with self.pipeline.backend.errors():
                act()
        except Exception as error:
            jobs = [j for j in dict.fromkeys([*lane.empty(), *coming]) if j in self.open_jobs]
            self.check_usable(lane)
            if lane.batch.size == 1:
                for job in jobs:
                    self.answer(job, failed(job, "decode", error))
                return
            note("restart", "decode", error, images=len(jobs))
            with self.changed:
                for job in jobs:
                    job.alone = True
                self.waiting.extendleft(reversed(jobs))

    def check_usable(self, lane: Lane) -> None:
        """Raise where an empty lane draws nothing any more: that is the device's error, and ends the process."""
        engine, requests = lane.batch.engine, [lane.usual] * lane.batch.size
        with self.pipeline.backend.errors():
            self.pipeline.model.condition.prepare([lane.usual.prompt])
            engine.start(self.pipeline.prefix(engine, requests), requests)
            engine.advance([0] * lane.batch.size, 1, 1)
            engine.check_captures()

    def join(self) -> None:
        """An image that began alone begins again among others that wait for its method, if less than half is done.

        Two engines in turn would be slower for all of them; its tokens are the same in either.
        """
        with self.changed:
            for kind, (alone, *shared) in self.lanes.items():
                if not shared or all((job.method, job.shape) != kind for job in self.waiting):
                    continue
                for slot, job in list(alone.jobs.items()):
                    if not job.alone and alone.batch.known[slot] < alone.batch.total // 2:
                        self.waiting.appendleft(alone.leave(slot))

    def next_ones(self) -> list[tuple[Lane, list[Job]]]:
        """Jobs that have a slot now, by lane; the others wait on, in their order."""
        with self.changed:
            if not self.waiting and not self.running and not self.stopping:
                self.changed.wait(IDLE)
            chosen: dict[Lane, list[Job]] = {}
            left: deque[Job] = deque()
            alone = len(self.waiting) == 1 and not self.running
            for job in self.waiting:
                if self.gone(job):
                    continue
                lanes = self.lanes[job.method, job.shape]
                lane = lanes[0] if alone or job.alone else lanes[-1]
                if len(chosen.get(lane, [])) < lane.room:
                    chosen.setdefault(lane, []).append(job)
                else:
                    left.append(job)
            self.waiting = left
        return list(chosen.items())

    def gone(self, job: Job) -> bool:
        """Whether a job was cancelled, or took too long, which it is answered with."""
        if job.cancelled:
            self.metrics.cancelled.labels(self.menu.model).inc()
            self.answer(job, None)
        elif time.monotonic() > job.deadline:
            what = f"the image was not done within {self.options.timeout:g} s"
            self.answer(job, ApiError(504, what, None, "timeout"))
        else:
            return False
        return True

    def read_text(self, job: Job) -> bool:
        """Whether a job's prompt could be read; else it is answered."""
        try:
            with self.pipeline.backend.errors():
                self.pipeline.model.condition.prepare([job.request.prompt])
            return True
        except OptionError as error:  # it means nothing to this model
            answer = translated(error)
            answer.param = "prompt"
            self.answer(job, answer)
        except Exception as error:
            self.answer(job, failed(job, "text", error))
        return False

    def admit(self, lane: Lane, jobs: list[Job]) -> None:
        if lane.idle:  # what it did not use meanwhile is not saved up
            others = [other.spent for other in self.all_lanes() if other.jobs]
            least = min(others) if others else max(each.spent for each in self.all_lanes())
            lane.spent = max(lane.spent, least)
        began = time.monotonic()
        slots = lane.batch.admit([job.request for job in jobs])
        begun = time.monotonic()
        for slot, job in zip(slots, jobs, strict=True):
            lane.jobs[slot] = job
            self.schedule_preview(lane, slot)
            if not job.admitted:  # else it began alone and begins again among others
                job.admitted, job.begun = began, begun
                self.metrics.queue.labels(self.menu.model).observe(began - job.queued)

    def advance(self, lane: Lane) -> None:
        batch, method = lane.batch, lane.served.setting.method
        if batch.running:
            before, seconds = batch.steps, batch.stats.steps_s
            batch.advance(soon=True)
            if steps := batch.steps - before:
                each = (batch.stats.steps_s - seconds) / steps
                self.metrics.step.labels(self.menu.model, method).observe(each)
        for slot in [slot for slot, job in lane.jobs.items() if self.gone(job)]:
            lane.leave(slot)
        for slot, record in batch.finished():
            job = lane.jobs.pop(slot)
            try:
                self.finish(lane, job, record)
            except Exception as error:
                self.answer(job, failed(job, "pixels", error))
        self.show(lane)

    def show(self, lane: Lane) -> None:
        """Send the partial pictures that are due."""
        columns = self.pipeline.model.target.config.columns
        wanted = []
        for slot, job in lane.jobs.items():
            rows = lane.batch.known[slot] // columns
            due = [row for row in job.shows if row <= rows]
            if due:
                job.shows = job.shows[len(due) :]
                wanted.append(slot)
        if not wanted:
            return
        tokens, known = lane.batch.engine.partial(), lane.batch.known
        for slot in wanted:
            job, steps = lane.jobs[slot], lane.batch.slots[slot].steps
            try:
                pictures = preview(
                    self.pipeline.model, self.pipeline.backend, tokens[[slot]], [known[slot]]
                )
                job.send(Partial(pictures[0], known[slot] // columns, known[slot], steps))
                self.schedule_preview(lane, slot)
            except Exception as error:
                self.answer(lane.leave(slot), failed(job, "preview", error))

    def schedule_preview(self, lane: Lane, slot: int) -> None:
        """Have the host read when the next partial picture of a slot may be due."""
        shows, columns = lane.jobs[slot].shows, self.pipeline.model.target.config.columns
        if slot in lane.batch.slots:
            lane.batch.slots[slot].preview_at = shows[0] * columns if shows else 0

    def finish(self, lane: Lane, job: Job, record: ImageRecord) -> None:
        began = time.monotonic()
        drawn = self.pipeline.drawn(record, self.described[job.method], self.environment)
        now = time.monotonic()
        self.count(lane, record)
        self.metrics.latency.labels(self.menu.model).observe(now - job.queued)
        spent = now - job.admitted
        self.seconds = 0.8 * self.seconds + 0.2 * spent if self.seconds else spent
        times = (job.admitted - job.queued, job.begun - job.admitted, began - job.begun)
        self.answer(job, Done(drawn, *times, now - began))

    def count(self, lane: Lane, record: ImageRecord) -> None:
        model, method, metrics = self.menu.model, lane.served.setting.method, self.metrics
        metrics.success.labels(model, method).inc()
        metrics.tokens.labels(model, method).inc(record.tokens)
        if METHODS[method].drafts:
            metrics.drafts.labels(model, method).inc(record.steps)
            verified = record.steps * (lane.served.setting.tree.size - 1)
            metrics.draft_tokens.labels(model, method).inc(verified)
            metrics.accepted.labels(model, method).inc(sum(record.accepted_by_depth))
            metrics.relaxed.labels(model, method).inc(record.relaxed_accepts)
            if record.tv_sum is not None and record.tv_mean is not None:
                metrics.tv.labels(model, method).inc(record.tv_sum)
                metrics.tv_mean.labels(model, method).observe(record.tv_mean)
                metrics.tv_max.labels(model, method).observe(record.tv_max or 0.0)
            for position, accepted in enumerate(record.accepted_by_depth):
                metrics.per_pos.labels(model, method, str(position)).inc(accepted)


def failed(job: Job, stage: str, error: Exception) -> ApiError:
    """What a job is answered whose own error it is; the log says more, but no prompt."""
    number = f"err-{secrets.token_hex(8)}"
    note("failure", stage, error, id=number, seed=job.request.seed)
    what = f"the image failed at {stage}; the server's log says why under {number}"
    return ApiError(500, what, None, "image_failed")


def note(event: str, stage: str, error: Exception, **more: Any) -> None:
    """A line in the log: what an error is and where, but no prompt, which errors of text may quote."""
    frames = [f"{f.f_code.co_filename}:{line}" for f, line in walk_tb(error.__traceback__)]
    line = {"event": event, "stage": stage, "error": type(error).__name__, "at": frames[-4:]}
    if stage != "text" and isinstance(error, LanternError | RuntimeError | MemoryError):
        line["why"] = str(error)[:200]
    log.error(json.dumps(line | more))


def lane_specs(methods: Mapping[str, Served], slots: int) -> dict[tuple[str, Shape], list[Spec]]:
    """What is captured of each method and shape: the step of a single slot first, then that of all."""
    return {
        (name, (grid, prefix)): [
            replace(served.spec, grid=grid, prefix=prefix, images=size, open=size > 1)
            for size in dict.fromkeys((1, slots))
        ]
        for name, served in methods.items()
        for grid, prefix in served.shapes
    }


def check_engines(pipeline: LanternPipeline, menu: Menu, slots: int) -> None:
    """Refuse, before anything is captured, engines that do not fit beside each other.

    Raises:
        DeviceError: it says how much is lacking, and what would fit.
    """

    def lacking(methods: int, slots: int) -> int:
        chosen = dict(list(menu.methods.items())[:methods])
        return pipeline.engines.lacking([*chain(*lane_specs(chosen, slots).values())])

    count = len(menu.methods)
    if (more := lacking(count, slots)) <= 0:
        return
    fewer = (n for n in range(slots - 1, 0, -1) if lacking(count, n) <= 0)
    fitting = [f"--slots {n}" for n in islice(fewer, 1)]
    some = (n for n in range(count - 1, 0, -1) if lacking(n, slots) <= 0)
    fitting += [f"--methods {','.join(list(menu.methods)[:n])}" for n in islice(some, 1)]
    free, name = pipeline.backend.memory().free or 0, pipeline.backend.name
    what = f"the engines of {', '.join(menu.methods)} with {slots} slots do not fit together"
    why = f"they need {amount(free + more)} beside the weights, {amount(free)} are free on {name}"
    hint = " or ".join(fitting) + " fits" if fitting else "--methods ar --slots 1, or plan --serve"
    raise DeviceError(what, why, hint)


def seconds_until_room(places: int, left: Sequence[float], each: float, slots: int) -> float:
    """When so many waiting images have begun, if those in slots end after `left` and each takes `each` seconds."""
    ends = [*left, *[0.0] * (slots - len(left))]
    heapq.heapify(ends)
    begun = 0.0
    for _ in range(places):
        begun = heapq.heappop(ends)
        heapq.heappush(ends, begun + each)
    return begun


def check_replay(pipeline: LanternPipeline, engine: Engine, request: Request) -> None:
    """Compare the recordings of an engine with the same functions uncaptured, over a few steps."""
    requests = [replace(request, seed=seed) for seed in range(engine.spec.images)]
    seeds = [each.seed for each in requests]
    traced = engine.trace(pipeline.prefix(engine, requests), requests)
    want = [step.known for step in islice(traced, PROBED)]
    expected = engine.partial()
    engine.start(pipeline.prefix(engine, requests), requests)
    got = [engine.advance(seeds, 1 + number, 1) for number in range(len(want))]
    tokens = engine.partial()
    ends = want[-1] if want else []
    same = got == want and all(
        tokens[i, :end].tolist() == expected[i, :end].tolist() for i, end in enumerate(ends)
    )
    if not same:
        what = f"the recording by {engine.mode} draws other tokens than the step uncaptured"
        raise CaptureError(what, hint="--graphs eager, or --kernels plain")
