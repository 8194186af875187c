"""Streams, events and step marks of `habana_frameworks.torch`, which end the graph that lazy mode gathers."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.compiler import is_compiling

from gaudi_emulator.device import current


def is_lazy() -> bool:
    return not is_compiling() and current().lazy  # the tracers do not enter the card


def lazy_only(function: Callable[..., object]) -> Callable[..., None]:
    """Runs in lazy mode and returns None; outside it warns once and does nothing."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        if is_compiling():
            return
        card = current()
        if card.lazy:
            function(*args, **kwargs)
        elif function.__name__ not in card.warned:
            card.warned.add(function.__name__)
            warnings.warn(f"{function.__name__} does nothing outside lazy mode", stacklevel=2)

    return call


closures: list[tuple[Callable[..., object], tuple[Any, ...]]] = []


@lazy_only
def mark_step(device_str: str = "", sync: bool = False) -> None:
    """End the gathered graph and launch it; then run the queued closures."""
    current().flush("mark_step")
    waiting, closures[:] = list(closures), []
    for closure, args in waiting:
        closure(*args)


@lazy_only
def iter_mark_step(device_str: str = "") -> None:
    mark_step(device_str)


@lazy_only
def add_step_closure(closure: Callable[..., object], args: tuple[Any, ...] = ()) -> None:
    closures.append((closure, args))


class Stream:
    made = 0

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.stream_id, self.device_index = Stream.made, 0
        self.is_capture = False
        Stream.made += 1

    def id(self) -> int:
        return self.stream_id

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        event_sync("stream query")
        return True

    def synchronize(self) -> None:
        event_sync("stream synchronize")


DEFAULT_STREAM = Stream()
streams = [DEFAULT_STREAM]


def current_stream(device: object = None) -> Stream:
    return streams[-1]


def default_stream(device: object = None) -> Stream:
    return DEFAULT_STREAM


def set_stream(stream: Stream | None) -> None:
    streams[-1] = stream or streams[-1]


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    streams.append(stream or streams[-1])
    try:
        yield
    finally:
        streams.pop()


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.time: float | None = None  # of its last record

    def record(self, stream: Stream | None = None) -> None:
        event_sync("event record")
        self.time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        if self.time is None or end.time is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 1000 * (end.time - self.time)

    def synchronize(self) -> None: ...


def event_sync(reason: str) -> None:
    card = current()
    card.findings.hit("H003", reason)
    card.flush(reason)


def synchronize() -> None:
    """A StepMarker and a wait; no value is read."""
    card = current()
    if card.recording is not None:
        card.findings.hit("H003", "synchronize")
    card.flush("synchronize")
