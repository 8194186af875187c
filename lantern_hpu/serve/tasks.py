"""A thread beside the one that decodes: text before it, pixels after it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch

Inside = Callable[[], AbstractContextManager[object]]


class Turns:
    """One thread at a time; one that has had its turn lets another that waits have the next."""

    def __init__(self) -> None:
        self.next, self.one = threading.Lock(), threading.Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.next:  # who has had its turn and asks again waits here
            self.one.acquire()
        try:
            yield
        finally:
            self.one.release()


class TaskQueue:
    """Does tasks one after the other, in the order in which they come.

    A thread ends with its task. On a processor the thread's OpenMP threads end with it: left idle, they and those of
    the steps would be more than the cores, and the waits in a step become system calls.

    Attributes:
        tasks: those to do; the first is under way.
        inside: makes what a task runs in, such as a stream of the device. turn: the same, to wait for.
        thread: the last one that was started.
    """

    def __init__(self, name: str, changed: threading.Condition) -> None:
        """`changed` guards the tasks, and is notified when one is done."""
        self.name, self.changed = name, changed
        self.tasks: deque[Callable[[], None]] = deque()
        self.inside: Inside = nullcontext
        self.turn: Inside = nullcontext
        self.thread: threading.Thread | None = None

    def put(self, task: Callable[[], None]) -> None:
        """Add a task, which must not raise; from any thread.

        Raises:
            RuntimeError: there can be no thread for it.
        """
        with self.changed:
            if not self.tasks:
                self.start()
            self.tasks.append(task)

    def start(self) -> None:
        thread = threading.Thread(target=self.run, name=self.name, daemon=True)
        thread.start()
        self.thread = thread

    def run(self) -> None:
        while self.do_first():
            pass

    def do_first(self) -> bool:
        """Do a task. -> whether this thread does the next one too, as no other could be started"""
        with self.changed:  # `put` has added it by then
            task = self.tasks[0]
        try:
            with self.turn(), self.inside(), torch.no_grad():
                task()
        finally:
            with self.changed:
                self.tasks.popleft()
                self.changed.notify()
                goes_on = bool(self.tasks)
                if goes_on:
                    with suppress(RuntimeError):
                        self.start()
                        goes_on = False
        return goes_on
