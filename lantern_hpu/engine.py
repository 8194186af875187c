"""The loop around the captured functions: prefill, steps, and the rare host reads.

This file holds no tensor mathematics; `step.py` holds no loop and no host read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lantern_hpu import noise
from lantern_hpu.backends.base import Backend
from lantern_hpu.config import Request
from lantern_hpu.draft import Drafts
from lantern_hpu.errors import CaptureError
from lantern_hpu.graphs import check_mode, make_runner
from lantern_hpu.layout import Plan, settings_of
from lantern_hpu.models.condition import Prefix
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.transformer import Target
from lantern_hpu.state import DecodeState
from lantern_hpu.step import Step, build


@dataclass
class Progress:
    """Where a batch stands after a host read."""

    step: int
    known: list[int]  # [B] tokens known of each image
    total: int  # N


@dataclass
class Decoded:
    """The tokens and counts of a finished batch."""

    tokens: NDArray[np.int64]  # [B, N]
    steps: list[int]  # [B]
    accepted: list[list[int]]  # [B][D]
    relaxed: list[int]  # [B]


@dataclass
class GraphReport:
    """What the runners and the host did, for the report."""

    runner: str
    why: str  # the backend's reason for the runner's place among its modes
    captures: int
    replays: int
    recompiles_after_warmup: int
    host_reads: int
    capture_seconds: float


@dataclass
class Timing:
    """Seconds of the last batch."""

    prefill: float = 0.0
    steps: float = 0.0  # uniforms, replays and host reads
    count: int = 0


@dataclass
class Engine:
    """Decodes batches of one plan; everything it needs is allocated and captured once."""

    target: Target
    drafter: Drafter | None
    plan: Plan
    backend: Backend
    mode: str = "auto"
    neighbours: Tensor | None = None
    known: Tensor = field(init=False)  # [B] what the last step returned
    host_reads: int = 0
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        self.mode = check_mode(self.backend, self.mode)
        weight = self.target.head.weight
        self.state = DecodeState.allocate(
            self.target.config, self.plan.shapes, weight.dtype, weight.device
        )
        prefill, step = build(self.target, self.drafter, self.plan, self.neighbours)
        self.prefill = make_runner(prefill, self.state, self.backend, self.mode)
        self.step = make_runner(step, self.state, self.backend, self.mode)
        self.warm_captures = -1

    @property
    def warm(self) -> bool:
        """Whether the warm-up is behind it."""
        return self.warm_captures >= 0

    @property
    def captures(self) -> int:
        return self.prefill.stats.captures + self.step.stats.captures

    @property
    def block(self) -> int:
        """Most steps between two host reads."""
        return self.plan.shapes.block

    @property
    def longest(self) -> int:
        """D + 1, most tokens that one step can add."""
        return self.plan.shapes.tree.depth + 1

    @torch.no_grad()
    def warm_up(self) -> None:
        """Capture both functions and replay each once; from here on a capture is an error."""
        if self.warm:
            return
        blank = Request("warm-up")
        self.load([blank] * self.plan.shapes.images)
        for runner in (self.prefill, self.step):
            self.feed([blank.seed] * self.plan.shapes.images, 1, 1)
            runner()
            runner()
        self.backend.synchronize()
        self.warm_captures = self.captures

    def load(self, requests: Sequence[Request]) -> None:
        """Copy the settings of a batch into the state."""
        settings = settings_of([r.sampling for r in requests], self.target.config.vocab_size)
        for item in fields(settings):
            getattr(self.state.settings, item.name).copy_(getattr(settings, item.name))
        bounds, relaxation = self.state.bounds, [request.relaxation for request in requests]

        def put(goal: Tensor, values: Sequence[float] | Sequence[Sequence[float]]) -> None:
            goal.copy_(torch.tensor(values, dtype=goal.dtype))

        put(bounds.k, [r.k for r in relaxation])
        put(bounds.delta, [r.delta for r in relaxation])
        put(bounds.factor, [r.factor for r in relaxation])
        put(bounds.weight, [r.weights(self.longest - 1) for r in relaxation])
        first = [noise.uniforms(request.seed, 0, 1)[0] for request in requests]
        put(self.state.first_uniform, first)

    def place(self, prefix: Prefix) -> None:
        """Copy a batch's condition into the state."""
        embeddings, valid, tokens = prefix
        self.state.prefix.copy_(embeddings)
        self.state.prefix_tokens.copy_(tokens)
        self.state.pads.copy_((~valid).sum(1, dtype=torch.int32))
        # Slots past the prefix are never padding.
        width = self.state.valid.shape[1] - valid.shape[1]
        self.state.valid.copy_(F.pad(valid, (0, width), value=True))
        self.backend.flush()

    @torch.no_grad()
    def run(self, prefix: Prefix, requests: Sequence[Request]) -> Iterator[Progress]:
        """Decode a batch, yielding after each host read; `result()` has the tokens afterwards.

        Args:
            requests: one an image.

        Raises:
            CaptureError: something was captured again after warm-up.
        """
        self.warm_up()
        began = time.perf_counter()
        known = self.start(prefix, requests)
        self.timing = Timing(prefill=time.perf_counter() - began)
        total, done, queued = self.target.config.tokens, 0, 0
        yield Progress(done, known, total)
        seeds = [request.seed for request in requests]
        while min(known) < total:
            began = time.perf_counter()
            # Steps needed for sure after the `done` ones that `known` tells of; some may be on their way already.
            count = min(done + self.steps_before_read(total - min(known)) - queued, self.block)
            known, done, queued = self.queue(seeds, queued, count)
            self.timing.steps += time.perf_counter() - began
            self.timing.count = done
            self.check_captures()
            yield Progress(done, known, total)

    def start(self, prefix: Prefix, requests: Sequence[Request]) -> list[int]:
        """Prefill of a batch; see `run`. -> [B] tokens known"""
        self.warm_up()
        self.place(prefix)
        self.load(requests)
        self.known = self.prefill()
        return self.read(self.known)

    def queue(self, seeds: Sequence[int], queued: int, count: int) -> tuple[list[int], int, int]:
        """Add steps to the `queued` ones and read how far the images are.

        Where the device runs on by itself, the read is asked for one step early, so that this step keeps the
        device busy while the host decides on the next ones.

        Returns tokens known [B], after how many steps, and the steps queued now.
        """
        if count < 1:  # what is on its way may be all that is needed: wait for it
            return self.read(self.known), queued, queued
        if not self.backend.runs_ahead or count < 2:
            return self.advance(seeds, queued + 1, count), queued + count, queued + count
        self.feed(seeds, queued + 1, count)
        for _ in range(count - 1):
            self.known = self.step()
        asked = self.backend.ask(self.known)
        self.known = self.step()
        self.host_reads += 1
        return asked(), queued + count - 1, queued + count

    def advance(self, seeds: Sequence[int], first: int, count: int) -> list[int]:
        """Steps `first`, `first` + 1, ... of a batch. -> [B] tokens known"""
        self.feed(seeds, first, count)
        for _ in range(count):
            self.known = self.step()
        return self.read(self.known)

    def draft(self, seeds: Sequence[int], number: int) -> Drafts:
        """The trees that step `number` would verify; nothing moves on. For looking at, not for speed."""
        step = self.step.function
        assert isinstance(step, Step)
        self.feed(seeds, number, 1)
        drafts = step.draft(self.state)[2]
        self.state.cursor.zero_()
        return drafts

    def steps_before_read(self, remaining: int) -> int:
        """As many steps as are needed for sure, up to a block."""
        return min(self.block, -(-remaining // self.longest))

    def feed(self, seeds: Sequence[int], first: int, count: int) -> None:
        """Uniforms for the next steps, in one copy of one size, whatever the count."""
        block = np.zeros(self.state.uniforms.shape, np.float32)
        block[:count] = noise.block(seeds, first, count, self.plan.shapes.draws)
        self.backend.upload(torch.from_numpy(block), self.state.uniforms)
        self.state.cursor.zero_()

    def read(self, known: Tensor) -> list[int]:
        """A host read: waits for the device."""
        self.host_reads += 1
        return [int(n) for n in known.tolist()]

    def check_captures(self) -> None:
        if self.captures != self.warm_captures:
            why = f"{self.captures - self.warm_captures} captures after warm-up"
            raise CaptureError("the step was recorded again while decoding", why)

    def partial(self) -> NDArray[np.int64]:
        """The tokens so far [B, N]; those past an image's known ones mean nothing. A host read."""
        self.backend.flush()
        self.host_reads += 1
        rows = self.state.tokens.unflatten(0, (self.plan.shapes.images, -1))
        return rows[:, : self.target.config.tokens].cpu().numpy().astype(np.int64)

    def result(self) -> Decoded:
        """Tokens and statistics of the batch that just ended."""
        tokens = self.partial()
        state = self.state
        counts = torch.cat(
            [state.steps[:, None], state.relaxed[:, None], state.accepted], 1
        ).tolist()
        self.host_reads += 1
        return Decoded(
            tokens, [c[0] for c in counts], [c[2:] for c in counts], [c[1] for c in counts]
        )

    def report(self) -> GraphReport:
        """Counts since the engine was built."""
        stats = (self.prefill.stats, self.step.stats)
        return GraphReport(
            self.mode,
            self.backend.graph_modes[self.mode],
            self.captures,
            sum(s.replays for s in stats),
            self.captures - max(self.warm_captures, 0),
            self.host_reads,
            sum(s.capture_seconds for s in stats),
        )
