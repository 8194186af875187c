"""The decode loop: one thread that owns the engines, and decides whose turn it is.

A prompt's text is encoded before it, and an image's pixels are made after it, by a `TaskQueue` each: images go on
meanwhile. What passes between them is on the host: prompts' features, and tokens.

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

import numpy as np
import torch
from numpy.typing import NDArray

from lantern_hpu.core import ImageRecord, Request
from lantern_hpu.decode.batch import Batch
from lantern_hpu.decode.engine import Engine
from lantern_hpu.decode.pixels import preview
from lantern_hpu.decode.spec import Spec
from lantern_hpu.errors import CaptureError, DeviceError, LanternError, OptionError
from lantern_hpu.files import amount
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.models.text.t5 import T5Conditioner
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import Drawn
from lantern_hpu.results.prompts import usual_prompts
from lantern_hpu.serve.calls import translated
from lantern_hpu.serve.menu import ONE_SHAPE, Menu, Served, Shape, make_menu
from lantern_hpu.serve.metrics import Metrics
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.serve.protocol import ApiError
from lantern_hpu.serve.tasks import TaskQueue

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
    queue: float  # waiting: for its text, for a slot, and for its pixels
    text: float
    prefill: float
    decode: float  # the steps, shared with the other images of the batch
    pixels: float


Event = Partial | Done | ApiError


@dataclass(eq=False)
class Job:
    """One image that a client waits for."""

    request: Request
    method: str
    deadline: float  # by the monotonic clock
    shows: tuple[int, ...]  # rows at which a partial picture is wanted, rising
    send: Callable[[Event], None]  # called with each event, usually in the thread that made it
    shape: Shape = ONE_SHAPE
    queued: float = field(default_factory=time.monotonic)
    text: float = 0.0  # seconds
    admitted: float = 0.0
    begun: float = 0.0
    drawn: float = 0.0  # when all its tokens were there
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
    """Takes jobs from any thread. Steps happen in its own; text and pixels between them, or in threads beside it."""

    def __init__(self, pipeline: LanternPipeline, options: ServeOptions) -> None:
        self.pipeline, self.options = pipeline, options
        self.menu = make_menu(pipeline, options)
        self.metrics = Metrics(self.menu.model)
        self.lanes: dict[tuple[str, Shape], list[Lane]] = {}  # the single slot first
        self.reading = 0  # images whose text is not encoded yet
        self.waiting: deque[Job] = deque()  # for a slot
        self.open_jobs: set[Job] = set()  # taken, and neither done nor given up
        self.clock = time.perf_counter
        self.seconds = self.painting = 0.0  # of an image in its slot, and of its pixels, on average
        self.changed = threading.Condition()
        self.text, self.pixels = (TaskQueue(name, self.changed) for name in ("text", "pixels"))
        self.thread = threading.Thread(target=self.run, name="decode", daemon=True)
        self.beat, self.ready, self.draining, self.stopping = time.monotonic(), False, False, False
        self.failure: BaseException | None = None
        self.held = ExitStack()  # the lanes' engines, as long as the thread runs
        check_engines(pipeline, self.menu, options.slots)
        self.watch()

    # Called by other threads

    def start(self, wait: bool = False) -> None:
        """Begin to record, and then to draw; with `wait`, return when it is ready, or has failed."""
        if self.thread.ident is None:
            self.thread.start()
        while wait and not self.ready and self.failure is None and not self.stopping:
            time.sleep(0.05)

    def stop(self, drain: float = 0.0, wait: float | None = None) -> int:
        """Take no more jobs, draw on for up to `drain` seconds, and answer all that are left with an error.

        Steps under way have `wait` seconds to end; None: as long as they take. Returns how many images were left.
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
        for thread in self.alive:
            thread.join(wait)
        return left

    @property
    def silent(self) -> float:
        """Seconds since the oldest sign of life of its threads."""
        begun = [queue.began for queue in (self.text, self.pixels) if queue.began is not None]
        return time.monotonic() - min([self.beat, *begun])

    @property
    def alive(self) -> list[threading.Thread]:
        """Threads that have not ended."""
        threads = (self.thread, self.text.thread, self.pixels.thread)
        return [thread for thread in threads if thread is not None and thread.is_alive()]

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the images of a request, all or none."""
        with self.changed:
            if self.draining or not self.ready:
                what = "about to stop" if self.draining else "not ready yet"
                raise ApiError(503, f"the server is {what}", headers={"Retry-After": "5"})
            if (places := self.queued + len(jobs) - self.options.queue) > 0:
                what = f"{self.queued} images wait, {self.options.queue} may"
                headers = {"Retry-After": str(self.retry_after(places))}
                raise ApiError(429, what, None, "queue_full", headers)
            self.text.put(partial(self.read, jobs))  # it begins once the lock is free
            self.reading += len(jobs)
            self.open_jobs.update(jobs)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Give jobs up: their slots are free at the next host read, their text and pixels are not made."""
        for job in jobs:
            job.cancelled = True

    @property
    def running(self) -> int:
        return sum(len(lane.jobs) for lane in self.all_lanes())

    @property
    def queued(self) -> int:
        """Images that wait for their text or a slot."""
        return self.reading + len(self.waiting)

    @property
    def has_room(self) -> bool:
        """Whether images may begin: not where two batches of them wait for their pixels."""
        return self.unpainted < 2 * self.options.slots

    @property
    def unpainted(self) -> int:
        """Images whose tokens are there, and whose pixels are not."""
        return max(0, len(self.open_jobs) - self.queued - self.running)

    def retry_after(self, places: int) -> int:
        """About how many seconds until so many images have left the queue for a slot: at least one."""
        now = time.monotonic()
        left, each = [], self.seconds
        for lane in self.all_lanes():
            for slot, job in list(lane.jobs.items()):
                done = max(lane.batch.known[slot], 1) / lane.batch.total
                each = each or (now - job.begun) / done  # nothing was finished yet
                left.append(each * (1 - done))
        slots = self.options.slots
        pictures = places + self.running + self.unpainted - 3 * slots  # before there is room
        seconds = max(seconds_until_room(places, left, each, slots), pictures * self.painting)
        return max(1, math.ceil(seconds))

    def all_lanes(self) -> list[Lane]:
        return [lane for lanes in list(self.lanes.values()) for lane in lanes]

    def watch(self) -> None:
        def recompiles() -> int:
            engines = [lane.batch.engine.report() for lane in self.all_lanes()]
            return sum(report.recompiles_after_warmup for report in engines)

        backend, slots, watch = self.pipeline.backend, self.options.slots, self.metrics.watch
        running = "Images in slots, and those whose pixels are not made yet"
        watch("num_requests_running", running, lambda: max(0, len(self.open_jobs) - self.queued))
        watch("num_requests_waiting", "Images in the queue", lambda: self.queued)
        pictures = "Pictures whose pixels are to be made, partial ones included"
        watch("num_pictures_waiting", pictures, lambda: len(self.pixels.tasks))
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
                if (backend := self.pipeline.backend).overlaps:  # text and pixels beside the steps
                    for queue in (self.text, self.pixels):
                        queue.make_context = backend.beside()
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
        keep_encoder(self.pipeline)
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
        for queue in (self.text, self.pixels):
            queue.do_here()
        with self.changed:  # some may wait too long for a thread beside this one
            for job in [*self.open_jobs]:
                self.gone(job)
        if self.has_room:
            self.join()
        for lane, jobs in self.next_ones():
            self.within(lane, partial(self.admit, lane, jobs), jobs)
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
            can_begin = self.waiting and self.has_room
            tasks = self.text.waits_here or self.pixels.waits_here
            if not (can_begin or tasks or self.running or self.stopping):
                self.changed.wait(IDLE)
            chosen: dict[Lane, list[Job]] = {}
            left: deque[Job] = deque()
            alone, has_room = self.queued == 1 and not self.running, self.has_room
            for job in self.waiting:
                if self.gone(job):
                    continue
                lanes = self.lanes[job.method, job.shape]
                lane = lanes[0] if alone or job.alone else lanes[-1]
                if has_room and len(chosen.get(lane, [])) < lane.room:
                    chosen.setdefault(lane, []).append(job)
                else:
                    left.append(job)
            self.waiting = left
        return list(chosen.items())

    def gone(self, job: Job) -> bool:
        """Whether a job was answered, was cancelled, or took too long, which it is answered with."""
        with self.changed:  # two threads may ask at the same time
            if job not in self.open_jobs:
                return True
            if job.cancelled:
                self.metrics.add("request_cancelled", 1)
                self.answer(job, None)
            elif time.monotonic() > job.deadline:
                what = f"the image was not done within {self.options.timeout:g} s"
                self.answer(job, ApiError(504, what, None, "timeout"))
            return job not in self.open_jobs

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
                self.metrics.add("request_queue_time_seconds", began - job.queued)

    def advance(self, lane: Lane) -> None:
        batch, method = lane.batch, lane.served.setting.method
        if batch.running:
            before, seconds = batch.steps, batch.stats.steps_s
            batch.advance(soon=True)
            if steps := batch.steps - before:
                each = (batch.stats.steps_s - seconds) / steps
                self.metrics.add("step_time_seconds", each, method)
        for slot in [slot for slot, job in lane.jobs.items() if self.gone(job)]:
            lane.leave(slot)
        for slot, record in batch.finished():
            self.finish(lane, lane.jobs[slot], record)
            del lane.jobs[slot]  # not before: what raises finds it
        self.show(lane)

    def show(self, lane: Lane) -> None:
        """Have the partial pictures made that are due."""
        columns, known = self.pipeline.model.target.config.columns, lane.batch.known
        tokens: NDArray[np.int64] | None = None
        for slot, job in lane.jobs.items():
            due = [row for row in job.shows if row <= known[slot] // columns]
            if due:
                job.shows = job.shows[len(due) :]
                tokens = lane.batch.engine.partial() if tokens is None else tokens
                steps = lane.batch.slots[slot].steps
                self.pixels.put(partial(self.paint_partly, job, tokens[[slot]], known[slot], steps))
                self.schedule_preview(lane, slot)

    def schedule_preview(self, lane: Lane, slot: int) -> None:
        """Have the host read when the next partial picture of a slot may be due."""
        shows, columns = lane.jobs[slot].shows, self.pipeline.model.target.config.columns
        if slot in lane.batch.slots:
            lane.batch.slots[slot].preview_at = shows[0] * columns if shows else 0

    def finish(self, lane: Lane, job: Job, record: ImageRecord) -> None:
        """Hand the tokens of an image on."""
        job.drawn = time.monotonic()
        self.seconds = average(self.seconds, job.drawn - job.admitted)
        self.pixels.put(partial(self.paint, lane, job, record))

    # Tasks between the steps, or in threads beside them

    def read(self, jobs: Sequence[Job]) -> None:
        """Encode the prompts of a request. Its images then wait for slots; those whose prompt fails are answered."""
        ready = [job for job in jobs if not self.gone(job) and self.read_text(job)]
        with self.changed:
            self.reading -= len(jobs)
            self.waiting.extend(ready)
            self.changed.notify()

    def read_text(self, job: Job) -> bool:
        """Whether a job's prompt could be read; else it is answered."""
        began = time.monotonic()
        try:
            with self.pipeline.backend.errors():
                self.pipeline.model.condition.prepare([job.request.prompt])
            job.text = time.monotonic() - began
            return True
        except OptionError as error:  # it means nothing to this model
            answer = translated(error)
            answer.param = "prompt"
            self.answer(job, answer)
        except Exception as error:
            self.answer(job, failed(job, "text", error))
        return False

    def paint(self, lane: Lane, job: Job, record: ImageRecord) -> None:
        """Make the pixels of an image, and answer its job."""
        if self.gone(job):
            return
        began = time.monotonic()
        try:
            with self.pipeline.backend.errors():
                drawn = self.pipeline.drawn(record, self.described[job.method], self.environment)
            now = time.monotonic()
            self.painting = average(self.painting, now - began)
            waited = job.admitted - job.queued - job.text + began - job.drawn
            times = (job.text, job.begun - job.admitted, job.drawn - job.begun, now - began)
            self.count(lane, record)
            self.metrics.add("e2e_request_latency_seconds", now - job.queued)
            for stage, seconds in zip(Done._fields[2:], times, strict=True):
                self.metrics.add(f"request_{stage}_time_seconds", seconds)
            self.answer(job, Done(drawn, waited, *times))
        except Exception as error:
            self.answer(job, failed(job, "pixels", error))

    def paint_partly(self, job: Job, tokens: NDArray[np.int64], known: int, steps: int) -> None:
        """Send the rows known so far of tokens [1, N]. Where that fails, the image leaves its slot."""
        if self.gone(job):
            return
        model, rows = self.pipeline.model, known // self.pipeline.model.target.config.columns
        try:
            with self.pipeline.backend.errors():
                (picture,) = preview(model, self.pipeline.backend, tokens, [known])
            job.send(Partial(picture, rows, known, steps))
        except Exception as error:
            self.answer(job, failed(job, "preview", error))

    def count(self, lane: Lane, record: ImageRecord) -> None:
        setting, accepted, add = lane.served.setting, record.accepted_by_depth, self.metrics.add
        values = {"request_success": 1.0, "generation_tokens": record.tokens}
        if METHODS[setting.method].drafts:
            values["spec_decode_num_drafts"] = record.steps
            values["spec_decode_num_draft_tokens"] = record.steps * (setting.tree.size - 1)
            values["spec_decode_num_accepted_tokens"] = sum(accepted)
            values["spec_decode_num_relaxed_tokens"] = record.relaxed_accepts
            if record.tv_sum is not None and record.tv_mean is not None:
                values |= {"spec_decode_tv": record.tv_sum, "tv_mean": record.tv_mean}
                values["tv_max"] = record.tv_max or 0.0
            for position, count in enumerate(accepted):
                name = "spec_decode_num_accepted_tokens_per_pos"
                add(name, count, setting.method, str(position))
        for name, value in values.items():
            add(name, value, setting.method)


def average(before: float, now: float) -> float:
    """Of the last ones: each counts less than the next; 0 is none."""
    return 0.8 * before + 0.2 * now if before else now


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


def keep_encoder(pipeline: LanternPipeline) -> None:
    """Let a text encoder stay on the device, if that is left to us and there is room for it beside the engines."""
    text, engines = getattr(pipeline.model.condition, "text", None), pipeline.engines
    if isinstance(text, T5Conditioner) and text.keep == "auto" and engines.lacking_for_text() <= 0:
        text.keep = "device"
        pipeline.fit.decided["text encoder"] = "device: there is room for it beside the engines"


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
