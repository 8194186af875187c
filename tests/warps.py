"""Triton programs as four warps, one ahead of the others, and launches from their end: what a card may do, and Triton's
interpreter never does.

Every warp computes the whole program, as a card's threads do with scalars and with what is replicated, and stores the
elements that are its own, in blocks of 32 as they lie in memory. It runs until `tl.debug_barrier()`, then the next one
does. Barriers that reductions need on a card are left out, which allows more than a card does.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from threading import Semaphore, Thread, local
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

WARPS, LANES = 4, 32
FIRST_AHEAD, LAST_AHEAD = (0, 1, 2, 3), (3, 2, 1, 0)


class Turns:
    """The one turn there is, which goes from warp to warp."""

    def __init__(self, order: Sequence[int]) -> None:
        self.waiting = deque(order)
        self.given = {warp: Semaphore(0) for warp in order}
        self.returned: list[Any] = []  # by the program's atomics

    def give(self) -> None:
        if self.waiting:
            self.given[self.waiting.popleft()].release()

    def wait(self, warp: int) -> None:
        """Until all others are as far."""
        self.waiting.append(warp)
        self.give()
        self.given[warp].acquire()


class Program:
    """A program of a kernel, in the place of the function that the interpreter calls."""

    here = local()  # the running warp, and the turns of its program

    def __init__(self, function: Callable[..., None], order: Sequence[int]) -> None:
        update_wrapper(self, function)
        self.__signature__ = inspect.signature(function)
        self.__globals__ = function.__globals__
        self.function, self.order = function, order

    def __call__(self, **given: Any) -> None:
        turns, errors = Turns(self.order), list[Exception]()

        def run(warp: int) -> None:
            turns.given[warp].acquire()
            self.here.warp, self.here.turns, self.here.atomics = warp, turns, 0
            try:
                self.function(**given)
            except Exception as error:
                errors.append(error)
            turns.give()

        threads = [Thread(target=run, args=(warp,)) for warp in self.order]
        for thread in threads:
            thread.start()
        turns.give()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def store_own(builder: Any, places: Any, values: Any, mask: Any, *hints: Any) -> None:
    """The elements of the running warp."""
    element = np.arange(places.data.size).reshape(places.data.shape)
    own = element // LANES % WARPS == Program.here.warp
    there = np.ascontiguousarray(mask.data.astype(bool) & own)
    interpreter._interpreter.store(places.data, values.data, there)


@contextmanager
def warps_apart(order: Sequence[int], barriers: bool = True) -> Iterator[None]:
    """Inside, warps run in this order from barrier to barrier; without barriers, to their ends."""
    launch = interpreter.GridExecutor.__call__
    atomic = interpreter.InterpreterBuilder.create_atomic_rmw

    def launch_apart(grid: Any, *given: Any, **named: Any) -> None:
        grid.fn = Program(grid.fn, order)
        launch(grid, *given, **named)

    def wait(builder: Any) -> None:
        if barriers:
            Program.here.turns.wait(Program.here.warp)

    def once(builder: Any, *given: Any) -> Any:
        """An atomic of one number is the first thread's, and all wait for what it returns."""
        here = Program.here
        if here.warp == 0:
            here.turns.returned.append(atomic(builder, *given))
        here.turns.wait(here.warp)
        here.atomics += 1
        return here.turns.returned[here.atomics - 1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_atomic_rmw", once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_apart)
        patch.setattr(interpreter.InterpreterBuilder, "create_masked_store", store_own)
        patch.setattr(interpreter.InterpreterBuilder, "create_barrier", wait)
        yield


@contextmanager
def programs_backwards() -> Iterator[None]:
    """Inside, the last program of a launch runs first."""
    place = interpreter.InterpreterBuilder.set_grid_idx

    def mirrored(builder: Any, *index: int) -> None:
        sizes = zip(builder.grid_dim, index, strict=True)
        place(builder, *(size - 1 - i for size, i in sizes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", mirrored)
        yield
