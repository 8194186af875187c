"""Images that clients wait for, from arrival to answer: which begin next, which engine runs, how long the others wait.

Nothing here starts a thread or calls an engine.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any, NamedTuple, TypeVar

from lantern_hpu.core import Request
from lantern_hpu.errors import LanternError
from lantern_hpu.results.images import Drawn
from lantern_hpu.serve.protocol import ApiError
from lantern_hpu.serve.served import ONE_SHAPE, Shape

E = TypeVar("E", bound=Hashable)  # an engine
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


def average(before: float, now: float) -> float:
    """Of the last ones: each counts less than the next; 0 is none."""
    return 0.8 * before + 0.2 * now if before else now


def seconds_until_room(places: int, left: Sequence[float], each: float, slots: int) -> float:
    """When `places` waiting images have begun, if those in slots end after `left`, and each takes `each` at most."""
    ends = sorted([*left, *[0.0] * (slots - len(left))])
    rounds, slot = divmod(places - 1, len(ends))
    return ends[slot] + rounds * each


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
