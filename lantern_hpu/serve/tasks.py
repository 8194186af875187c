"""Tasks beside the steps, in their thread or in one of their own: text before them, pixels after them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

MakeContext = Callable[[], AbstractContextManager[object]]


class TaskQueue:
    """Does tasks one after the other, in the order in which they come.

    Where the device runs them at the same time as the steps, each in a thread that ends with it; else the decode thread
    does one between two steps (`do_here`): threads of two kinds on the same cores slow both down.

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
                self.start()
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

    def start(self) -> None:
        thread = threading.Thread(target=self.run, name=self.name, daemon=True)
        thread.start()
        self.thread = thread

    def run(self) -> None:
        assert self.make_context is not None
        while self.do_first(self.make_context()):
            with self.changed, suppress(RuntimeError):  # without a further thread this one goes on
                self.start()
                return

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
