"""Slots of an engine: images come and go, and the host looks when one may be done.

A run, whose images begin together or take the slots of those that are done, and a server are clients of the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lantern_hpu.backends.base import own_defaults
from lantern_hpu.core import Event, ImageRecord, Request, RunStats
from lantern_hpu.decode.engine import Engine, read_records
from lantern_hpu.models.text.prefix import Prefix

Encode = Callable[[Sequence[Request]], Prefix]
Preview = Callable[[NDArray[np.int64], Sequence[int]], list[Image.Image]]


@dataclass
class Slot:
    request: Request
    known: int = 1  # tokens, at the last host read
    step: int = 1  # number of its next step, which its noise depends on
    pending: int = 0  # steps asked for that `known` does not tell of
    preview_at: int = 0  # tokens at which it is to be read before it is done; past that, it is not

    @property
    def steps(self) -> int:
        """Taken, as far as is known."""
        return self.step - 1 - self.pending


class Batch:
    """Images that go on each by itself, from admission to finish, in the slots of one engine.

    An image's tokens do not depend on when it came, in which slot it is, or on the other images.
    """

    @own_defaults()
    def __init__(self, engine: Engine, encode: Encode, stats: RunStats | None = None) -> None:
        """The engine is warmed up if it is not warm.

        Args:
            encode: gives the prefix of requests.
            stats: what is spent on text, prefill and steps is added here. Admission while images run is not waited
                for, and uniforms and host reads belong to the steps.
        """
        if not engine.warm:
            engine.warm_up(Request("warm-up"))
        self.engine, self.encode = engine, encode
        self.stats = stats or RunStats()
        self.slots: dict[int, Slot] = {}  # those that hold an image
        self.size = engine.spec.images
        self.total = engine.target.config.tokens  # N
        self.queued = 0  # steps asked for
        self.steps = 0  # those of them that are known to be done
        engine.mark_finished(self.free)

    # -- what is here

    @property
    def free(self) -> list[int]:
        """Slots without an image. What runs there is not read, so the device need not know."""
        return [slot for slot in range(self.size) if slot not in self.slots]

    @property
    def slots_or_none(self) -> list[Slot | None]:
        """[B] of each slot what it holds."""
        return [self.slots.get(slot) for slot in range(self.size)]

    @property
    def known(self) -> list[int]:
        """[B] tokens known of each image, 0 where there is none."""
        return [0 if one is None else one.known for one in self.slots_or_none]

    @property
    def unfinished(self) -> list[Slot]:
        return [one for one in self.slots.values() if one.known < self.total]

    @property
    def running(self) -> bool:
        """Whether some image is not done."""
        return bool(self.unfinished)

    # -- coming and going

    @own_defaults()
    def admit(self, requests: Sequence[Request]) -> list[int]:
        """Begin images in free slots: all at once if no slot is taken, or one by one while others run.

        Returns the slot of each.
        """
        slots = self.free[: len(requests)]
        assert len(slots) == len(requests), "more images than free slots"
        # A few images cost less one by one than as a whole batch
        whole = not self.engine.spec.open or 2 * len(slots) > self.size
        together = whole and not self.slots
        self.slots |= {slot: Slot(one) for slot, one in zip(slots, requests, strict=True)}
        if together:  # in slots left over the last image is begun as well, and not read
            padded = [*requests, *[requests[-1]] * (self.size - len(requests))]
            prefix = self.encode_timed(padded)
            with self.stats.adding("prefill_s"):
                self.engine.prefill_batch(prefix, padded)
            self.engine.mark_finished(self.free)
            return slots
        for slot, request in zip(slots, requests, strict=True):
            prefix = self.encode_timed([request])
            with self.stats.adding("prefill_s"):
                self.engine.prefill_slot(prefix, request, slot)
        return slots

    def encode_timed(self, requests: Sequence[Request]) -> Prefix:
        with self.stats.adding("text_s"):
            return self.encode(requests)

    def release(self, slot: int) -> None:
        """Give up an image; its slot is free at once."""
        self.slots.pop(slot, None)
        self.engine.mark_finished([slot])

    # -- going on

    @own_defaults()
    def advance(self, until_first_done: bool = False, max_steps: int | None = None) -> None:
        """As many steps as are needed for sure, up to a block; then a host read, unless the schedule is fixed.

        Args:
            until_first_done: needed until the next image is done, which lets another in; otherwise until all are.
            max_steps: no more steps than this; at 0 those that run are waited for.
        """
        with self.stats.adding("steps_s"):
            needs = [self.steps_needed(slot) for slot in self.unfinished]
            limit = (
                self.engine.spec.block
                if max_steps is None
                else min(max_steps, self.engine.spec.block)
            )
            count = max(0, min(min(needs) if until_first_done else max(needs), limit))
            known, pending = self.run_steps(count)
        for slot, one in self.slots.items():
            one.known, one.step, one.pending = known[slot], one.step + count, pending
        self.queued += count
        done = self.queued - pending
        self.stats.steps += done - self.steps
        self.steps = done
        self.engine.check_captures()

    def steps_needed(self, one: Slot) -> int:
        """Steps to launch before an image can be done, or is to be read, if each adds as many tokens as it can."""
        goal = one.preview_at if one.preview_at > one.known else self.total
        steps = -(-(goal - one.known) // self.engine.spec.max_step_tokens)  # rounded up
        return steps - one.pending

    def run_steps(self, count: int) -> tuple[list[int], int]:
        """n steps of all slots. -> [B] tokens known, and the steps launched that they do not include

        Of no step: what is on its way is waited for, which may be all that is needed.
        """
        engine = self.engine
        if not count:
            assert engine.known is not None
            return engine.read(engine.known), 0
        seeds = [None if one is None else one.request.seed for one in self.slots_or_none]
        first = [1 if one is None else one.step for one in self.slots_or_none]
        if engine.spec.tree.commit:
            engine.run_steps(seeds, first, count)
            added = count * engine.spec.max_step_tokens
            return [min(tokens + added, self.total) for tokens in self.known], 0
        ahead = engine.backend.transfers.runs_ahead and count > 1
        return engine.run_steps_and_read(seeds, first, count, ahead), int(ahead)

    @own_defaults()
    def finished(self) -> list[tuple[int, ImageRecord]]:
        """Images that are done, in the order of their slots, which they leave."""
        done = {
            slot: one.request for slot, one in sorted(self.slots.items()) if one.known >= self.total
        }
        if not done:
            return []
        # On a fixed schedule the only time that the host waits for its steps
        waits = self.engine.spec.tree.commit
        with self.stats.adding("steps_s") if waits else nullcontext():
            records = read_records(self.engine, done)
        for slot in done:
            self.release(slot)
        return list(zip(done, records, strict=True))

    def event(self, done: Sequence[ImageRecord], images: int, preview: Preview) -> Event:
        """How far a run of images is, of which some are done and have left.

        The preview draws tokens [b, N], of which [b] are known.
        """
        config, here = self.engine.target.config, dict(sorted(self.slots.items()))
        rows, known = config.grid[0], [one.known for one in here.values()]
        gained = sum(known) - len(known) + (self.total - 1) * len(done)
        taken = sum(one.steps for one in here.values()) + sum(one.steps for one in done)
        return Event(
            rows=sum(map(config.rows_known, known)) + rows * len(done),
            total_rows=rows * images,
            running=len(here),
            tokens_per_step=gained / taken if taken else 0.0,
            steps=self.steps,
            tokens=gained + len(here) + len(done),
            preview=lambda: preview(self.engine.read_tokens()[list(here)], known),
        )
