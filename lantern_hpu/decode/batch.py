"""Slots of an engine: images come and go, and the host looks when one may be done.

The closed batch of a run, where all images begin together, and the open one of a server are clients of the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lantern_hpu.decode.engine import Decoded, Engine
from lantern_hpu.decode.spec import is_scheduled
from lantern_hpu.methods.request import Request
from lantern_hpu.models.text.prefix import Prefix

Encode = Callable[[Sequence[Request]], Prefix]


@dataclass
class Timing:
    """Seconds of a batch."""

    text: float = 0.0  # encoding of prompts
    prefill: float = (
        0.0  # admission of images to empty slots; beside running ones it is not waited for
    )
    steps: float = 0.0  # uniforms, replays and host reads


@dataclass
class SlotState:
    """An image in its slot."""

    request: Request
    known: int = 1  # tokens, at the last host read
    step: int = 1  # number of its next step, which its noise depends on
    pending: int = 0  # steps asked for that `known` does not tell of
    preview_at: int = (
        0  # tokens at which somebody wants to look before it is done; past that, nobody does
    )


@dataclass
class Finished:
    """An image that is done."""

    slot: int
    request: Request
    tokens: NDArray[np.int64]  # [N]
    steps: int
    accepted: list[int]  # [D]
    relaxed: int
    spent: tuple[float, float] | None  # see `Decoded`


class Batch:
    """Images that go on each by itself, from admission to finish, in the slots of one engine.

    An image's tokens do not depend on when it came, where it sits, or who sits beside it.
    """

    def __init__(self, engine: Engine, encode: Encode) -> None:
        """The engine is warmed up if it is not warm.

        Args:
            encode: gives the prefix of requests.
        """
        engine.warm_up()
        self.engine, self.encode = engine, encode
        self.slots: list[SlotState | None] = [None] * engine.spec.images
        self.timing = Timing()
        self.total = engine.target.config.tokens  # N
        self.queued = 0  # steps asked for
        self.steps = 0  # those of them that are known to be done

    # -- who is here

    @property
    def active(self) -> list[bool]:
        """[B] which slots hold an image. What runs in the others is not looked at, so the device need not know."""
        return [state is not None for state in self.slots]

    @property
    def free(self) -> list[int]:
        """Slots that hold none."""
        return [slot for slot, state in enumerate(self.slots) if state is None]

    @property
    def known(self) -> list[int]:
        """[B] tokens known of each image, 0 where there is none."""
        return [0 if state is None else state.known for state in self.slots]

    @property
    def running(self) -> bool:
        """Whether some image is not done."""
        return any(state is not None and state.known < self.total for state in self.slots)

    # -- coming and going

    def admit(self, requests: Sequence[Request]) -> list[int]:
        """Begin images in free slots: all at once if no slot is taken, or one by one beside those that run.

        Returns the slot of each.
        """
        slots = self.free[: len(requests)]
        assert len(slots) == len(requests), "more images than free slots"
        empty = not any(self.active)
        for slot, request in zip(slots, requests, strict=True):
            self.slots[slot] = SlotState(request)
        # A few images cost less one by one than as a whole batch
        if empty and (not self.engine.spec.open or 2 * len(slots) > len(self.slots)):
            self.begin(requests)
        else:
            for slot, request in zip(slots, requests, strict=True):
                self.join(slot, request)
        return slots

    def begin(self, requests: Sequence[Request]) -> None:
        """The first slots at once; in those left over the last image is begun as well, and not looked at."""
        padded = [*requests, *[requests[-1]] * (len(self.slots) - len(requests))]
        prefix = self.encoded(padded)
        began = time.perf_counter()
        self.engine.start(prefix, padded)
        self.timing.prefill += time.perf_counter() - began

    def join(self, slot: int, request: Request) -> None:
        prefix = self.encoded([request])
        began = time.perf_counter()
        self.engine.admit(prefix, request, slot)
        self.timing.prefill += time.perf_counter() - began

    def encoded(self, requests: Sequence[Request]) -> Prefix:
        began = time.perf_counter()
        prefix = self.encode(requests)
        self.timing.text += time.perf_counter() - began
        return prefix

    def release(self, slot: int) -> None:
        """Give up an image; its slot is free at once."""
        self.slots[slot] = None

    # -- going on

    def advance(self, soon: bool = False, most: int | None = None) -> None:
        """As many steps as are needed for sure, up to a block; then a host read, unless the schedule is fixed.

        Args:
            soon: needed until the next image is done, which lets another in; otherwise until all are.
            most: no more steps than this.
        """
        began = time.perf_counter()
        needs = [self.steps_needed(s) for s in self.slots if s is not None and s.known < self.total]
        block = self.engine.spec.block
        count = max(0, min(min(needs) if soon else max(needs), block, most or block))
        known, pending = self.run_steps(count) if count else (self.wait(), 0)
        for state, tokens in zip(self.slots, known, strict=True):
            if state is not None:
                state.known, state.step, state.pending = tokens, state.step + count, pending
        self.queued += count
        self.steps = self.queued - pending
        self.timing.steps += time.perf_counter() - began
        self.engine.check_captures()

    def steps_needed(self, state: SlotState) -> int:
        """Steps to launch before an image can be done, or be looked at, if each adds as many tokens as it can."""
        goal = state.preview_at if state.preview_at > state.known else self.total
        steps = -(-(goal - state.known) // self.engine.spec.max_step_tokens)  # rounded up
        return steps - state.pending

    def run_steps(self, count: int) -> tuple[list[int], int]:
        """So many steps of all slots. -> [B] tokens known, and the steps launched that they do not tell of"""
        engine = self.engine
        seeds = [None if state is None else state.request.seed for state in self.slots]
        first = [1 if state is None else state.step for state in self.slots]
        if is_scheduled(engine.spec.tree):
            engine.launch(seeds, first, count)
            added = count * engine.spec.max_step_tokens
            return [min(tokens + added, self.total) for tokens in self.known], 0
        ahead = engine.backend.queue.runs_ahead and count > 1
        return engine.advance(seeds, first, count, ahead), int(ahead)

    def wait(self) -> list[int]:
        """For what is on its way, which may be all that is needed. -> [B] tokens known"""
        assert self.engine.known is not None
        return self.engine.read(self.engine.known)

    def finished(self) -> list[Finished]:
        """Images that are done, in the order of their slots; they leave."""
        slots = [
            slot
            for slot, state in enumerate(self.slots)
            if state is not None and state.known >= self.total
        ]
        if not slots:
            return []
        began = time.perf_counter()
        result, done = self.engine.result(slots), []
        if is_scheduled(self.engine.spec.tree):  # the only time that the host waits for its steps
            self.timing.steps += time.perf_counter() - began
        for i, slot in enumerate(slots):
            state = self.slots[slot]
            assert state is not None
            counts = (result.steps[i], result.accepted[i], result.relaxed[i])
            spent = None if result.spent is None else result.spent[i]
            done.append(Finished(slot, state.request, result.tokens[i], *counts, spent))
            self.release(slot)
        return done


def decode(engine: Engine, encode: Encode, requests: Sequence[Request]) -> Decoded:
    """Images that fit into the slots, begun together, to their end."""
    batch = Batch(engine, encode)
    batch.admit(requests)
    while batch.running:
        batch.advance()
    return engine.result(range(len(requests)))
