"""Images that clients wait for: which begin next, text before the steps and pixels after them, and metrics.

Tasks of text and pixels are those of the decode thread, or of threads of their own. What passes between them and the
steps is on the host: prompts' features, and tokens."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from traceback import walk_tb
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lantern_hpu.core import ImageRecord, Request
from lantern_hpu.decode.pixels import preview
from lantern_hpu.errors import LanternError, OptionError, needing
from lantern_hpu.methods.setting import METHODS, Resolved
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import Drawn
from lantern_hpu.serve.protocol import ONE_SHAPE, ApiError, ServedModel, Shape, translated

with needing("prometheus_client", "the server counts with it", "serve"):
    from prometheus_client import (
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        Info,
        disable_created_metrics,
        generate_latest,
    )

    disable_created_metrics()  # a series more for each counter and histogram

STAGES = ("text", "prefill", "decode", "pixels")
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
TV = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1)
STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
ACCEPTED, OF_A_TOKEN = "Drafts that were accepted", "Total variation of a token, mean of an image"
COST = "Total variation that relaxation cost, summed over the tokens of finished images"
# By name: what it is, its labels besides `model_name`, and a histogram's buckets
METRICS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "request_success": ("Images that were drawn", "method", ()),
    "request_failure": ("Requests without images", "status", ()),
    "request_cancelled": ("Images whose client went away", "", ()),
    "generation_tokens": ("Image tokens of finished images", "method", ()),
    "spec_decode_num_drafts": ("Trees that were verified", "method", ()),
    "spec_decode_num_draft_tokens": ("Drafts that were verified", "method", ()),
    "spec_decode_num_accepted_tokens": (ACCEPTED, "method", ()),
    "spec_decode_num_accepted_tokens_per_pos": (f"{ACCEPTED}, by depth", "method position", ()),
    "spec_decode_num_relaxed_tokens": ("Drafts accepted only thanks to relaxation", "method", ()),
    "spec_decode_tv": (COST, "method", ()),
    "tv_mean": (OF_A_TOKEN, "method", TV),
    "tv_max": ("The largest of an image's tokens", "method", TV),
    "request_queue_time_seconds": ("From arrival to a slot, text included", "", SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the picture", "", SECONDS),
    "request_text_time_seconds": ("Text of an image", "", SECONDS),
    "request_prefill_time_seconds": ("Its prefill", "", SECONDS),
    "request_decode_time_seconds": ("Its steps", "", SECONDS),
    "request_pixels_time_seconds": ("Its pixels, without waiting for them", "", SECONDS),
    "step_time_seconds": ("One step of all slots", "method", STEP),
}


class Metrics:
    """What one server counts and measures; each metric has the label `model_name`."""

    def __init__(self, model: str, versions: Mapping[str, str]) -> None:
        """`versions` of what serves, and the device."""
        self.registry, self.model = CollectorRegistry(), model
        build = Info("lantern:build", "What serves", ("model_name",), registry=self.registry)
        build.labels(model).info(dict(versions))
        self.known: dict[str, Counter | Histogram] = {}
        for name, (about, labels, buckets) in METRICS.items():
            kind = partial(Histogram, buckets=buckets) if buckets else Counter
            names = ("model_name", *labels.split())
            self.known[name] = kind(f"lantern:{name}", about, names, registry=self.registry)

    def add(self, name: str, value: float, *labels: str) -> None:
        """Count a number, or observe a number of seconds."""
        metric = self.known[name].labels(self.model, *labels)
        metric.inc(value) if isinstance(metric, Counter) else metric.observe(value)

    def count_image(self, setting: Resolved, record: ImageRecord) -> None:
        """What an image adds to the counters of its method."""
        values = {"request_success": 1.0, "generation_tokens": record.tokens}
        if METHODS[setting.method].drafts:
            values["spec_decode_num_drafts"] = record.steps
            values["spec_decode_num_draft_tokens"] = record.steps * (setting.tree.size - 1)
            values["spec_decode_num_accepted_tokens"] = sum(record.accepted_by_depth)
            values["spec_decode_num_relaxed_tokens"] = record.relaxed_accepts
            if record.tv_sum is not None and record.tv_mean is not None:
                values |= {"spec_decode_tv": record.tv_sum, "tv_mean": record.tv_mean}
                values["tv_max"] = record.tv_max or 0.0
            for position, count in enumerate(record.accepted_by_depth):
                name = "spec_decode_num_accepted_tokens_per_pos"
                self.add(name, count, setting.method, str(position))
        for name, value in values.items():
            self.add(name, value, setting.method)

    def watch(self, gauges: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        """Gauges that are read when they are asked for, by name: what each is, and its value."""
        for name, (about, value) in gauges.items():
            gauge = Gauge(f"lantern:{name}", about, ("model_name",), registry=self.registry)
            gauge.labels(self.model).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)


E = TypeVar("E", bound=Hashable)  # an engine
log = logging.getLogger("lantern_hpu.serve")


class Partial(NamedTuple):
    """A picture on its way."""

    image: Any  # a PIL image, grey where nothing is known
    rows: int
    tokens: int
    steps: int


class Done(NamedTuple):
    """A picture, and the seconds it took, under the names of `protocol.ImageMetrics`."""

    drawn: Drawn
    queue_s: float  # waiting: for its text, for a slot, and for its pixels
    text_s: float
    prefill_s: float
    steps_s: float  # shared with the other images of the batch
    decode_s: float  # from tokens to pixels


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
    alone: bool = False  # it gets a single slot, since a batch with it failed


class JobQueue:
    """Jobs that are not answered yet; all threads use it.

    Attributes:
        changed: held while one of the others is changed, and notified of what lets the decode thread go on.
        reading: images whose text is not encoded yet.
        waiting: for a slot.
        open_jobs: taken, and neither answered nor given up.
    """

    def __init__(self, timeout: float, count_cancelled: Callable[[], None]) -> None:
        """`timeout` is what errors say; each job has its deadline."""
        self.timeout, self.count_cancelled = timeout, count_cancelled
        self.changed = threading.Condition()
        self.reading = 0
        self.waiting: deque[Job] = deque()
        self.open_jobs: set[Job] = set()

    @property
    def queued(self) -> int:
        """Images that wait for their text or a slot."""
        return self.reading + len(self.waiting)

    def add(self, jobs: Sequence[Job]) -> None:
        """Jobs whose text is to be encoded."""
        self.reading += len(jobs)
        self.open_jobs.update(jobs)

    def text_is_done(self, jobs: Sequence[Job]) -> None:
        """Let those of a request wait for slots that are not answered."""
        with self.changed:
            self.reading -= len(jobs)
            self.waiting.extend(job for job in jobs if job in self.open_jobs)
            self.changed.notify()

    def wait_first(self, jobs: Sequence[Job]) -> None:
        """Put jobs that had begun in front of the others."""
        with self.changed:
            self.waiting.extendleft(reversed(jobs))

    def next_jobs(
        self, engine_for: Callable[[Job], E], room: Callable[[E], int]
    ) -> dict[E, list[Job]]:
        """Jobs that can begin now, by engine, where each has room for some; the others wait on, in their order."""
        chosen: dict[E, list[Job]] = {}
        left: deque[Job] = deque()
        for job in self.waiting:
            if self.is_answered(job):
                continue
            engine = engine_for(job)
            if len(chosen.get(engine, [])) < room(engine):
                chosen.setdefault(engine, []).append(job)
            else:
                left.append(job)
        self.waiting = left
        return chosen

    def answer(self, job: Job, event: Done | ApiError | None) -> None:
        """Send the last event of a job, once; None where the client left."""
        with self.changed:
            if job not in self.open_jobs:
                return
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

    def is_answered(self, job: Job) -> bool:
        """Whether a job needs nothing more; one that was cancelled or is past its deadline is answered here."""
        with self.changed:  # two threads may ask at the same time
            if job not in self.open_jobs:
                return True
            if job.cancelled:
                self.count_cancelled()
                self.answer(job, None)
            elif time.monotonic() > job.deadline:
                what = f"the image was not done within {self.timeout:g} s"
                self.answer(job, ApiError(504, what, None, "timeout"))
            return job not in self.open_jobs


class FairShare:
    """Which engine runs next: the one that has had the least time.

    Turns would not be fair: one may be a step of a window, another sixteen steps of `ar`.
    """

    def __init__(self) -> None:
        self.spent: dict[Hashable, float] = defaultdict(float)  # seconds of the decode thread
        self.busy: set[Hashable] = set()  # those that had images at the last choice

    def choose(self, busy: Sequence[E]) -> E | None:
        """Of those that have images; one that had none until now does not make up for the time that it did not use."""
        others = [self.spent[one] for one in busy if one in self.busy]
        least = min(others) if others else max(self.spent.values(), default=0.0)
        for one in busy:
            if one not in self.busy:
                self.spent[one] = max(self.spent[one], least)
        self.busy = set(busy)
        return min(busy, key=self.spent.__getitem__, default=None)


def failed(job: Job, stage: str, error: Exception) -> ApiError:
    """What a job is answered that failed by itself; the log says more, but no prompt."""
    number = f"err-{secrets.token_hex(8)}"
    log_error("failure", stage, error, id=number, seed=job.request.seed)
    what = f"the image failed at {stage}; the server's log says why under {number}"
    return ApiError(500, what, None, "image_failed")


def log_error(event: str, stage: str, error: Exception, **more: Any) -> None:
    """A line in the log: what an error is and where, but no prompt, which errors of text may quote."""
    frames = [f"{f.f_code.co_filename}:{line}" for f, line in walk_tb(error.__traceback__)]
    line = {"event": event, "stage": stage, "error": type(error).__name__, "at": frames[-4:]}
    if stage != "text" and isinstance(error, LanternError | RuntimeError | MemoryError):
        line["why"] = str(error)[:200]
    log.error(json.dumps(line | more))


MakeContext = Callable[[], AbstractContextManager[object]]


class TaskQueue:
    """Does tasks one after the other, in the order in which they come.

    Where the device overlaps them with the steps, in a thread that ends when there are no more; else the decode thread
    does one between two steps (`do_here`), since two threads on the same cores slow each other down.

    Attributes:
        tasks: those to do; the first may be under way. began: when it did, by the monotonic clock.
        make_context: makes what a task of another thread runs in, such as a stream; None: the decode thread does them.
        thread: the last one that was started.
    """

    def __init__(self, name: str, changed: threading.Condition) -> None:
        """`changed` guards the tasks, and is notified when one has come or is done."""
        self.name, self.changed = name, changed
        self.tasks: deque[Callable[[], None]] = deque()
        self.began: float | None = None
        self.make_context: MakeContext | None = None
        self.thread: threading.Thread | None = None

    def put(self, task: Callable[[], None]) -> None:
        """Add a task, which must not raise; from any thread.

        Raises:
            RuntimeError: there can be no thread for it.
        """
        with self.changed:
            if not self.tasks and self.make_context is not None:
                thread = threading.Thread(target=self.run, name=self.name, daemon=True)
                thread.start()
                self.thread = thread
            self.tasks.append(task)
            self.changed.notify()

    @property
    def waits_here(self) -> bool:
        """Whether the decode thread has a task to do."""
        return self.make_context is None and bool(self.tasks)

    def do_here(self) -> None:
        """Do one task, if that is this thread's to do."""
        if self.waits_here:
            self.do_first(nullcontext())

    def run(self) -> None:
        assert self.make_context is not None
        while self.do_first(self.make_context()):
            pass

    def do_first(self, context: AbstractContextManager[object]) -> bool:
        """Do a task. -> whether another waits"""
        with self.changed:  # `put` has added it by then
            task, self.began = self.tasks[0], time.monotonic()
        try:
            with context, torch.no_grad():
                task()
        finally:
            with self.changed:
                self.tasks.popleft()
                self.began = None
                self.changed.notify()
                others = bool(self.tasks)  # before `put` may start a thread for its own
        return others


class ImageTasks:
    """What is done for an image before and after its steps. An error of it is answered, and harms no other image."""

    def __init__(
        self, pipeline: LanternPipeline, served: ServedModel, queue: JobQueue, metrics: Metrics
    ) -> None:
        self.pipeline, self.served, self.queue, self.metrics = pipeline, served, queue, metrics
        self.text = TaskQueue("text", queue.changed)
        self.pixels = TaskQueue("pixels", queue.changed)
        self.described: dict[str, dict[str, Any]] = {}  # what images of a method share
        self.environment: dict[str, Any] = {}

    def begin(self) -> None:
        """Once the engines are there: with threads of their own where the device overlaps them with the steps."""
        self.environment = self.pipeline.environment()
        for name, method in self.served.methods.items():
            self.described[name] = self.pipeline.describe(method.setting)
        if self.pipeline.backend.overlaps:
            for queue in (self.text, self.pixels):
                queue.make_context = self.pipeline.backend.own_stream()

    def do_here(self) -> None:
        """One task of each kind, where they are the decode thread's to do."""
        self.text.do_here()
        self.pixels.do_here()

    @property
    def waits_here(self) -> bool:
        return self.text.waits_here or self.pixels.waits_here

    def read(self, jobs: Sequence[Job]) -> None:
        """Encode the prompts of a request. Its images then wait for slots; those whose prompt fails are answered."""
        for job in jobs:
            if not self.queue.is_answered(job):
                with self.answering(job, "text"):
                    began = time.monotonic()
                    self.pipeline.model.condition.prepare([job.request])
                    job.text = time.monotonic() - began
        self.queue.text_is_done(jobs)

    @contextmanager
    def answering(self, job: Job, stage: str) -> Iterator[None]:
        """An error within is what the job is answered."""
        try:
            with self.pipeline.backend.errors():
                yield
        except Exception as error:
            if stage == "text" and isinstance(error, OptionError):  # it means nothing to this model
                event = translated(error)
                event.param = "prompt"
            else:
                event = failed(job, stage, error)
            self.queue.answer(job, event)

    def paint(self, job: Job, record: ImageRecord) -> None:
        """Make the pixels of an image, and answer its job."""
        if self.queue.is_answered(job):
            return
        began = time.monotonic()
        with self.answering(job, "pixels"):
            drawn = self.pipeline.drawn(record, self.described[job.method], self.environment)
            if record.invalid:
                what = f"the image is invalid: {record.invalid}"
                self.queue.answer(job, ApiError(500, what, None, "image_invalid"))
                return
            now = time.monotonic()
            done = Done(
                drawn,
                queue_s=job.admitted - job.queued - job.text + began - job.drawn,
                text_s=job.text,
                prefill_s=job.begun - job.admitted,
                steps_s=job.drawn - job.begun,
                decode_s=now - began,
            )
            self.metrics.count_image(self.served.methods[job.method].setting, record)
            self.metrics.add("e2e_request_latency_seconds", now - job.queued)
            for stage, seconds in zip(STAGES, done[2:], strict=True):
                self.metrics.add(f"request_{stage}_time_seconds", seconds)
            self.queue.answer(job, done)

    def paint_partly(self, job: Job, tokens: NDArray[np.int64], known: int, steps: int) -> None:
        """Send the rows known so far of tokens [1, N]. Where that fails, the image leaves its slot."""
        if self.queue.is_answered(job):
            return
        model = self.pipeline.model
        with self.answering(job, "preview"):
            config = model.sizes([job.request])
            (picture,) = preview(model, config, self.pipeline.backend, tokens, [known])
            rows = known // config.columns
            job.send(Partial(picture, rows, known, steps))
