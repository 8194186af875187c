"""A batch of images on its way through an engine: how far it is, and when the host has to look."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lantern_hpu.config import Request
from lantern_hpu.decode.engine import Decoded, Engine
from lantern_hpu.models.text.prefix import Prefix


@dataclass
class Timing:
    """Seconds of a batch."""

    prefill: float = 0.0
    steps: float = 0.0  # uniforms, replays and host reads
    count: int = 0  # steps that are known to be done


class Batch:
    """Images that begin together; each goes on by itself until the slowest is done."""

    def __init__(self, engine: Engine, prefix: Prefix, requests: Sequence[Request]) -> None:
        """Prefills; the engine is warmed up first if it is not warm.

        Args:
            requests: one an image of the engine's spec.
        """
        engine.warm_up()
        began = time.perf_counter()
        self.engine, self.seeds = engine, [request.seed for request in requests]
        self.known = engine.start(prefix, requests)  # [B] tokens known of each image
        self.timing = Timing(prefill=time.perf_counter() - began)
        self.total = engine.target.config.tokens  # N
        self.queued = 0  # steps asked for, of which `timing.count` are known to be done

    @property
    def finished(self) -> bool:
        return min(self.known) >= self.total

    def advance(self) -> None:
        """As many steps as are needed for sure, up to a block; then a host read.

        Raises:
            CaptureError: something was captured again after warm-up.
        """
        began, engine, timing = time.perf_counter(), self.engine, self.timing
        needed = min(-(-(self.total - min(self.known)) // engine.longest), engine.spec.block)
        # Counted from the steps that `known` tells of; some may be on their way already.
        count, first = timing.count + needed - self.queued, self.queued + 1
        if count < 1:  # what is on its way may be all that is needed: wait for it
            assert engine.known is not None
            self.known, timing.count = engine.read(engine.known), self.queued
        else:
            ahead = engine.backend.runs_ahead and count > 1
            self.known = engine.advance(self.seeds, first, count, ahead)
            timing.count = self.queued + count - ahead
        self.queued += max(count, 0)
        timing.steps += time.perf_counter() - began
        engine.check_captures()

    def run(self) -> Iterator[Batch]:
        """Decode to the end, giving itself after the prefill and after each host read."""
        yield self
        while not self.finished:
            self.advance()
            yield self

    def result(self) -> Decoded:
        """Tokens and statistics, once finished."""
        return self.engine.result()
