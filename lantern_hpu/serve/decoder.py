"""The decode loop: one thread that owns the engines, admits images to their slots and runs their steps.

A prompt's text is encoded before, and an image's pixels are made after the steps, by `ImageTasks`. All engines are
captured before the first request.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from lantern_hpu.core import ImageRecord
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.serve.engines import (
    EngineSlots,
    check_engines,
    keep_encoder,
    read_a_picture,
    specs_to_capture,
)
from lantern_hpu.serve.metrics import Metrics
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.serve.protocol import ApiError
from lantern_hpu.serve.queue import (
    FairShare,
    Job,
    JobQueue,
    average,
    failed,
    log_error,
    seconds_until_room,
)
from lantern_hpu.serve.served import Shape, make_served_model
from lantern_hpu.serve.tasks import ImageTasks

IDLE = 0.5  # seconds between two heartbeats where nothing is to be drawn


def not_taking(decoder: DecodeThread) -> ApiError:
    """Why a decode thread takes no jobs."""
    what = "about to stop" if decoder.draining else "not ready yet"
    return ApiError(503, f"the server is {what}", headers={"Retry-After": "5"})


class DecodeThread:
    """Takes jobs from any thread; steps happen in its own.

    Attributes:
        engines: of each method and shape, the one of a single slot first.
        image_s: seconds that an image is in its slot, on average.
        failure: what ended the thread, if it was not asked to end.
    """

    def __init__(self, pipeline: LanternPipeline, options: ServeOptions) -> None:
        self.pipeline, self.options = pipeline, options
        self.served = make_served_model(pipeline, options)
        if self.served.sources:
            read_a_picture(pipeline)  # before memory is counted
        check_engines(pipeline, self.served, options.slots)
        self.metrics = Metrics(self.served.name)
        self.queue = JobQueue(options.timeout, partial(self.metrics.add, "request_cancelled", 1))
        self.tasks = ImageTasks(pipeline, self.served, self.queue, self.metrics)
        self.engines: dict[tuple[str, Shape], list[EngineSlots]] = {}
        self.share = FairShare()
        self.clock = time.perf_counter
        self.image_s = 0.0
        self.thread = threading.Thread(target=self.run, name="decode", daemon=True)
        self.heartbeat_at = time.monotonic()
        self.ready = False
        self.draining = False
        self.stopping = False
        self.failure: BaseException | None = None
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
        open_jobs = self.queue.open_jobs
        with self.queue.changed:
            self.draining = True
        while open_jobs and self.failure is None and time.monotonic() < until:
            time.sleep(0.05)
        left = len(open_jobs)
        with self.queue.changed:
            self.stopping = True
            self.queue.changed.notify()
        self.queue.answer_all(ApiError(503, "the server stopped"))
        for thread in self.alive:
            thread.join(wait)
        return left

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the images of a request, all or none."""
        with self.queue.changed:
            if self.draining or not self.ready:
                raise not_taking(self)
            queued, most = self.queue.queued, self.options.queue
            places = queued + len(jobs) - most
            if places > 0:
                what = f"{queued} images wait, {most} may"
                headers = {"Retry-After": str(self.retry_after(places))}
                raise ApiError(429, what, None, "queue_full", headers)
            self.tasks.text.put(partial(self.tasks.read, jobs))  # begins once the lock is free
            self.queue.add(jobs)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Give jobs up: their slots are free at the next host read, their text and pixels are not made."""
        for job in jobs:
            job.cancelled = True

    @property
    def seconds_since_heartbeat(self) -> float:
        """Since the oldest sign of life of its threads."""
        tasks = (self.tasks.text.began, self.tasks.pixels.began)
        begun = [began for began in tasks if began is not None]
        return time.monotonic() - min([self.heartbeat_at, *begun])

    @property
    def alive(self) -> list[threading.Thread]:
        """Threads that have not ended."""
        threads = (self.thread, self.tasks.text.thread, self.tasks.pixels.thread)
        return [thread for thread in threads if thread is not None and thread.is_alive()]

    @property
    def all_slots(self) -> list[EngineSlots]:
        return [slots for several in list(self.engines.values()) for slots in several]

    @property
    def running(self) -> int:
        """Images in slots."""
        return sum(len(slots.jobs) for slots in self.all_slots)

    @property
    def unpainted(self) -> int:
        """Images whose tokens are there, and whose pixels are not."""
        return max(0, len(self.queue.open_jobs) - self.queue.queued - self.running)

    @property
    def has_room(self) -> bool:
        """Whether images may begin: not where two batches of them wait for their pixels."""
        return self.unpainted < 2 * self.options.slots

    def retry_after(self, places: int) -> int:
        """About how many seconds until this many images have left the queue for a slot: at least one."""
        now, each = time.monotonic(), self.image_s
        left = []
        for slots in self.all_slots:
            for slot, job in list(slots.jobs.items()):
                done = slots.part_done(slot)
                each = each or (now - job.begun) / done  # nothing was finished yet
                left.append(each * (1 - done))
        size = self.options.slots
        pictures = places + self.running + self.unpainted - 3 * size  # before there is room
        seconds = max(seconds_until_room(places, left, each, size), pictures * self.tasks.pixels_s)
        return max(1, math.ceil(seconds))

    def watch(self) -> None:
        """What `/metrics` reads when it is asked."""
        queue, slots, watch = self.queue, self.options.slots, self.metrics.watch
        running = "Images in slots, and those whose pixels are not made yet"
        watch("num_requests_running", running, lambda: self.running + self.unpainted)
        watch("num_requests_waiting", "Images in the queue", lambda: queue.queued)
        pictures = "Pictures whose pixels are to be made, partial ones included"
        watch("num_pictures_waiting", pictures, lambda: len(self.tasks.pixels.tasks))
        taken = "Slots taken, of those of a method's engine"
        watch("slots_in_use_ratio", taken, lambda: self.running / slots)
        more = "Captures that should not be", lambda: sum(s.recompiles for s in self.all_slots)
        watch("recompiles_after_readiness", *more)
        memory, backend = "Most bytes of device memory in use so far", self.pipeline.backend
        watch("device_memory_peak_bytes", memory, lambda: backend.memory().peak or 0)

    # In the thread

    def run(self) -> None:
        event = ApiError(503, "the server stopped")
        try:
            with ExitStack() as held, self.pipeline.backend.errors(), torch.no_grad():
                self.capture(held)
                self.ready = True
                while not self.stopping:
                    self.schedule_once()
        except BaseException as error:
            self.failure = error
            event = ApiError(500, f"the server failed: {error}")
        finally:
            self.ready = False
            with self.queue.changed:
                self.draining = True
                self.queue.waiting.clear()
            for slots in self.all_slots:
                slots.jobs.clear()
            self.queue.answer_all(event)

    def capture(self, held: ExitStack) -> None:
        """Capture and check every engine; `held` keeps them."""
        engines = self.pipeline.engines
        specs = specs_to_capture(self.served.methods, self.options.slots)
        engines.kept = max(engines.kept, sum(map(len, specs.values())))
        for (method, shape), several in specs.items():
            made = self.engines[method, shape] = []
            for spec in several:
                engine = engines.get(spec)
                served = self.served.methods[method]
                made.append(EngineSlots(self.pipeline, engine, served, self.served.sampling))
                held.enter_context(engine.pinned())
                self.heartbeat_at = time.monotonic()
        keep_encoder(self.pipeline)
        self.tasks.begin()

    def schedule_once(self) -> None:
        """Admit the jobs that have room, and run one engine until its next host read."""
        self.heartbeat_at = time.monotonic()
        self.tasks.do_here()
        with self.queue.changed:  # some may wait too long for another thread
            for job in [*self.queue.open_jobs]:
                self.queue.is_answered(job)
        if self.has_room:
            self.join()
        for slots, jobs in self.next_jobs().items():
            self.run_isolated(slots, partial(self.admit, slots, jobs), jobs)
        chosen = self.share.choose([slots for slots in self.all_slots if slots.jobs])
        if chosen is not None:
            began = self.clock()
            self.run_isolated(chosen, partial(self.advance, chosen))
            self.share.spent[chosen] += self.clock() - began

    def run_isolated(
        self, slots: EngineSlots, act: Callable[[], None], coming: Iterable[Job] = ()
    ) -> None:
        """Do something with all slots of an engine. Where that fails, only the image that causes it fails.

        All of them begin again, each alone, with the same tokens; an image that fails again on its own is reported as
        failed.
        """
        try:
            with self.pipeline.backend.errors():
                act()
        except Exception as error:
            jobs = [*dict.fromkeys([*slots.empty(), *coming])]
            jobs = [job for job in jobs if job in self.queue.open_jobs]
            slots.check_usable()
            if slots.batch.size == 1:
                for job in jobs:
                    self.queue.answer(job, failed(job, "decode", error))
                return
            log_error("restart", "decode", error, images=len(jobs))
            for job in jobs:
                job.alone = True
            self.queue.wait_first(jobs)

    def join(self) -> None:
        """An image that began alone begins again among others that wait for its method, if less than half is done.

        Two engines in turn would be slower for all of them; its tokens are the same in either.
        """
        with self.queue.changed:
            wanted = {(job.method, job.shape) for job in self.queue.waiting}
            for kind, (single, *shared) in self.engines.items():
                if not shared or kind not in wanted:
                    continue
                for slot, job in list(single.jobs.items()):
                    if not job.alone and single.part_done(slot) < 0.5:
                        self.queue.wait_first([single.leave(slot)])

    def next_jobs(self) -> dict[EngineSlots, list[Job]]:
        """Jobs that have a slot now; where there is nothing to do, after a while."""
        with self.queue.changed:
            can_begin = self.queue.waiting and self.has_room
            if not (can_begin or self.tasks.waits_here or self.running or self.stopping):
                self.queue.changed.wait(IDLE)
            alone = self.queue.queued == 1 and not self.running
            has_room = self.has_room

            def slots_for(job: Job) -> EngineSlots:
                return self.engines[job.method, job.shape][0 if alone or job.alone else -1]

            return self.queue.next_jobs(slots_for, lambda slots: slots.room if has_room else 0)

    def admit(self, slots: EngineSlots, jobs: list[Job]) -> None:
        began = time.monotonic()
        slots.admit(jobs)
        begun = time.monotonic()
        for job in jobs:
            if not job.admitted:  # else it began alone and begins again among others
                job.admitted, job.begun = began, begun
                self.metrics.add("request_queue_time_seconds", began - job.queued)

    def advance(self, slots: EngineSlots) -> None:
        """Run steps until the next host read, and hand on what is done."""
        batch = slots.batch
        if batch.running:
            before, seconds = batch.steps, batch.stats.steps_s
            batch.advance(until_first_done=True)
            if steps := batch.steps - before:
                each = (batch.stats.steps_s - seconds) / steps
                self.metrics.add("step_time_seconds", each, slots.served.setting.method)
        for slot, job in list(slots.jobs.items()):
            if self.queue.is_answered(job):
                slots.leave(slot)
        for slot, record in batch.finished():
            self.finish(slots, slots.jobs[slot], record)
            del slots.jobs[slot]  # not before: what raises finds it
        for due in slots.due_previews():
            self.tasks.pixels.put(partial(self.tasks.paint_partly, *due))

    def finish(self, slots: EngineSlots, job: Job, record: ImageRecord) -> None:
        """Hand the tokens of an image on."""
        job.drawn = time.monotonic()
        self.image_s = average(self.image_s, job.drawn - job.admitted)
        self.tasks.pixels.put(partial(self.tasks.paint, job, record))
