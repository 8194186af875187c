"""Text before the steps and pixels after them: tasks of the decode thread, or of threads of their own.

What passes between them and the steps is on the host: prompts' features, and tokens.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lantern_hpu.core import ImageRecord
from lantern_hpu.decode.pixels import preview
from lantern_hpu.errors import OptionError
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.serve.calls import translated
from lantern_hpu.serve.metrics import Metrics
from lantern_hpu.serve.protocol import ApiError
from lantern_hpu.serve.queue import Done, Job, JobQueue, Partial, average, failed
from lantern_hpu.serve.served import ServedModel

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
    """What is done for an image before and after its steps. An error of it is answered, and harms no other image.

    Attributes:
        pixels_s: seconds that the pixels of an image take, on average.
    """

    def __init__(
        self, pipeline: LanternPipeline, served: ServedModel, queue: JobQueue, metrics: Metrics
    ) -> None:
        self.pipeline, self.served, self.queue, self.metrics = pipeline, served, queue, metrics
        self.text = TaskQueue("text", queue.changed)
        self.pixels = TaskQueue("pixels", queue.changed)
        self.described: dict[str, dict[str, Any]] = {}  # what images of a method share
        self.environment: dict[str, Any] = {}
        self.pixels_s = 0.0

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
            self.pixels_s = average(self.pixels_s, now - began)
            done = Done(
                drawn,
                queue=job.admitted - job.queued - job.text + began - job.drawn,
                text=job.text,
                prefill=job.begun - job.admitted,
                decode=job.drawn - job.begun,
                pixels=now - began,
            )
            self.metrics.count_image(self.served.methods[job.method].setting, record)
            self.metrics.add("e2e_request_latency_seconds", now - job.queued)
            for stage in ("text", "prefill", "decode", "pixels"):
                self.metrics.add(f"request_{stage}_time_seconds", getattr(done, stage))
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
