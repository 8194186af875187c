"""How many threads a step takes on a processor: the fastest number by the clock, looked at again when steps slow down.

A step opens some hundred parallel regions, and at the end of each the threads wait for one another. Where other
programs want the same cores, a thread that must wait for its turn holds up all, hundreds of times a step: one thread
is then many times faster than two. Arithmetic does not tell when that is so; a clock does.

Threads can change the last bit of a float: a product that is cut into fewer rows a thread is summed in another order.
The same seed is to be the same image, so a number of threads that rounds otherwise than the process's own has to be
several times faster to be taken: on cores that nobody else wants it is not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from math import inf
from statistics import median

import torch
from torch import Tensor

from lantern_hpu.backends.base import Pace

OTHER_BITS = 3.0  # times faster than all threads, to be taken although it rounds otherwise
LESS = 0.85  # of the time with more threads, to take fewer: short trials are off by a tenth
WORSE = 1.1  # times the best: past it, still fewer threads are not tried
TIMES = 5  # steps of a trial in the warm-up
ENOUGH = 0.25  # seconds of one: it need not be longer
SLOW = 2.5  # times what a step took when the threads were chosen: they are chosen anew
LAST = 3  # steps whose median is looked at
PATIENCE = 100  # more threads are tried again after so many times what trying took

Search = Generator[int, float, tuple[int, float]]


def search(most: int) -> Search:
    """Halve the threads while that helps. Yields counts, each of which is sent the seconds of a step with it.

    Returns the best count, and its seconds.
    """
    best, least = most, (yield most)
    count = most // 2
    while count:
        took = yield count
        if took < LESS * least:
            best, least = count, took
        elif took > WORSE * least:
            break
        count //= 2
    return best, least


def median_seconds(step: Callable[[], object], clock: Callable[[], float]) -> float:
    """Median seconds of a few steps."""
    taken: list[float] = []
    while len(taken) < TIMES and sum(taken) < ENOUGH:
        began = clock()
        step()
        taken.append(clock() - began)
    return median(taken)


class ThreadPace(Pace):
    """Chooses the threads of one engine's steps, also within an image.

    Attributes:
        most: threads that the process may use; they are what is tried first. count: those of a step.
        unlike: counts that round otherwise than `most`.
    """

    def __init__(
        self,
        notify: Callable[[int, str], None] = lambda count, why: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            notify: is given what was chosen and why, each time.
        """
        self.most = self.count = torch.get_num_threads()
        self.notify, self.clock = notify, clock
        self.unlike = set[int]()
        self.usual = inf  # seconds of a step with what was chosen
        self.last = deque[float](maxlen=LAST)  # seconds of steps
        self.search: Search | None = None  # under way, by the steps of an image
        self.tried: dict[int, float] = {}  # seconds of a step, by count
        self.again = inf  # when more threads are tried once more

    def fit(self, step: Callable[[], object], bits: Callable[[], object]) -> None:
        """Choose by trials of a step that nobody waits for."""
        self.begin()
        want: object = None
        while self.search is not None:
            with self.held():
                took, found = median_seconds(step, self.clock), bits()
            if self.count == self.most:
                want = found
            elif found != want:
                self.unlike.add(self.count)
            self.answer(took, "in the warm-up")

    def __call__(self, step: Callable[[], Tensor]) -> Tensor:
        if self.most == 1:
            return step()
        began = self.clock()
        with self.held():
            found = step()
        self.note(self.clock() - began)
        return found

    @contextmanager
    def held(self) -> Iterator[None]:
        before = torch.get_num_threads()
        if before == self.count:
            yield
            return
        torch.set_num_threads(self.count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def note(self, took: float) -> None:
        """A step of an image took so long: go on with a search, or begin one if it is time to."""
        if self.search is not None:
            self.answer(took, "while drawing")
            return
        self.last.append(took)
        lately = median(self.last) if len(self.last) == LAST else self.usual
        if lately > SLOW * self.usual or (self.count < self.most and self.clock() > self.again):
            self.begin()
        self.usual = min(self.usual, lately)

    def begin(self) -> None:
        """Begin a search; there is none where there is one thread."""
        if self.most > 1:
            self.search, self.tried = search(self.most), {}
            self.count = next(self.search)

    def answer(self, took: float, when: str) -> None:
        """What a step took with the threads that are being tried."""
        assert self.search is not None
        self.tried[self.count] = took
        try:
            self.count = self.search.send(took * (OTHER_BITS if self.count in self.unlike else 1))
        except StopIteration as done:
            count, _ = done.value
            self.usual = self.tried[count]
            self.again = self.clock() + PATIENCE * sum(self.tried.values())
            self.count, self.search = count, None
            self.last.clear()
            times = ", ".join(f"{1000 * s:.1f} ms with {n}" for n, s in self.tried.items())
            self.notify(count, f"chosen {when}, where a step took {times}" + self.caution(count))

    def caution(self, count: int) -> str:
        """What is to be said of the bits of a choice."""
        if count in self.unlike:
            return f"; it rounds otherwise than {self.most}"
        passed = [str(n) for n in self.tried if n in self.unlike]
        return f"; {', '.join(passed)} would round otherwise" if passed else ""
