"""What decodes batches of one spec: the captured functions, the host's part of the state, and the host reads.

Engines of a model are built when first needed, and the last used ones kept.

This file holds no tensor mathematics; `admit.py` and `step.py` hold no loop and no host read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lantern_hpu.backends.base import Backend, dtype_name
from lantern_hpu.decode.accept import Bounds
from lantern_hpu.decode.drafting import Drafts, make_drafting
from lantern_hpu.decode.memory import batch_bytes, check_batch
from lantern_hpu.decode.sampler import sampling_params
from lantern_hpu.decode.scheduled_step import ScheduledStep
from lantern_hpu.decode.spec import Spec, is_scheduled
from lantern_hpu.decode.state import DecodeState, Entry, bits_digest
from lantern_hpu.decode.step import Accepted, Admit, Step
from lantern_hpu.errors import CaptureError
from lantern_hpu.graphs import check_mode, make_runner
from lantern_hpu.graphs.base import Runner
from lantern_hpu.methods.request import Request
from lantern_hpu.models.model import ImageModel
from lantern_hpu.models.text.prefix import Prefix
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.ops.sampling import ROUNDS

# ------------------------------------------------------------------------------------------- noise

# Randomness as an input: uniforms from a counter-based generator, made on the host.
#
# Every number is a function of (seed, step, index) alone: it does not depend on the device, the batch, or
# the numbers drawn before it. The generator is Philox 4x64 (Salmon et al., SC 2011).

STREAM = 0x6C616E7465726E  # the second half of the key: keeps this use of a seed apart from others
PLACES = 0x77696E646F77  # the same, for noise that belongs to a place and not to a step


def uniforms(seed: int, step: int, count: int) -> NDArray[np.float32]:
    """Uniform numbers of one image and step.

    Args:
        seed: the image's seed, 0 to 2**64 - 1.
        step: 0 for prefill, then 1, 2, ...
        count: how many numbers; the i-th is the same whatever it is.

    Returns [count] float32 in [0, 1).
    """
    key = np.array([seed, STREAM], dtype=np.uint64)  # a list of mixed sizes would become float64
    generator = np.random.Philox(key=key, counter=[0, step, 0, 0])
    # 24 bits fill a float32 exactly, so that 1.0 cannot come out by rounding.
    return (generator.random_raw(count) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def uniform_block(
    seeds: Sequence[int | None], first: int | Sequence[int], steps: int, count: int
) -> NDArray[np.float32]:
    """Uniforms of several steps for a batch: [steps, B, count] float32.

    Args:
        seeds: of each image; None where there is none, whose numbers are 0.
        first: number of the first of these steps, for all images or each one's own.
    """
    first = [first] * len(seeds) if isinstance(first, int) else first
    result = np.zeros((steps, len(seeds), count), np.float32)
    for image, (seed, begin) in enumerate(zip(seeds, first, strict=True)):
        if seed is not None:
            for step in range(steps):
                result[step, image] = uniforms(seed, begin + step, count)
    return result


def noise_keys(seed: int, places: int) -> NDArray[np.int32]:
    """Keys of the fixed noise of `ops/race.py`, a function of (seed, place).

    Returns [places, ROUNDS] int32, 16 bits each.
    """
    key = np.array([seed, PLACES], dtype=np.uint64)
    raw = np.random.Philox(key=key).random_raw(places * ROUNDS) >> np.uint64(48)
    return raw.astype(np.int32).reshape(places, ROUNDS)


# ------------------------------------------------------------------------------------------ engine

MAX_ENGINES = 8  # engines of a model: two sizes of pictures and three of prefixes are six


@dataclass
class Decoded:
    """The tokens and counts of n images."""

    tokens: NDArray[np.int64]  # [n, N]
    steps: list[int]  # [n]
    accepted: list[list[int]]  # [n][D]
    relaxed: list[int]  # [n]
    spent: list[tuple[float, float]] | None  # [n] sum and largest of `Meter`; None: not metered


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
class StepTrace:
    """What one step made, to be looked at; valid until the next one."""

    before: list[int]  # [B] tokens known before it
    drafts: Drafts
    accepted: Accepted
    known: list[int]  # [B] tokens known after it
    seconds: dict[str, float]  # of each stage, where there was a clock


class Engine:
    """Everything it needs is allocated and captured once."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        spec: Spec,
        backend: Backend,
        mode: str = "auto",
        neighbours: Tensor | None = None,
        codes: Tensor | None = None,
    ) -> None:
        """
        Args:
            drafter: for specs whose tree has drafts.
            mode: how the device records: one of the backend's `graph_modes`, or `auto`.
            neighbours: [V, K or more] int32, for specs with neighbours.
            codes: [V, dim] float32, for specs with clusters.
        """
        self.target = target = target.sized(spec.sizes(target.config))
        self.spec, self.backend = spec, backend
        self.mode, device = check_mode(backend, mode), target.device
        drafting = make_drafting(target, drafter, spec)
        form = target.dtype, device
        by_head = backend.tuning.keys_by_head(target.dtype)
        drafting_state = None if drafting is None else drafting.allocate(*form, by_head)
        self.state = DecodeState.allocate(target.config, spec, *form, drafting_state, by_head)
        table = None if neighbours is None else neighbours[:, : spec.neighbours]
        self.prefill_function = Admit(target, drafting, spec).to(device).eval()
        kind = ScheduledStep if is_scheduled(spec.tree) else Step
        self.step_function = kind(target, drafting, spec, table, codes).to(device).eval()
        self.prefill = make_runner(self.prefill_function, self.state, backend, self.mode)
        self.step = make_runner(self.step_function, self.state, backend, self.mode)
        # The same function once more, for one image beside those that run: recorded over a state with a smaller entry
        self.one_image: DecodeState | None = None
        self.prefill_one: Runner | None = None
        if spec.open:
            entry = Entry.allocate(target.config, spec, 1, target.dtype, device)
            self.one_image = replace(self.state, entry=entry)
            self.prefill_one = make_runner(
                self.prefill_function, self.one_image, backend, self.mode
            )
        self.pace = backend.tuning.pace()  # of steps
        self.known: Tensor | None = None  # [B] what the last captured call returned
        self.host_reads, self.warm_captures = 0, -1

    @property
    def warm(self) -> bool:
        """Whether the warm-up is behind it."""
        return self.warm_captures >= 0

    @property
    def runners(self) -> list[Runner]:
        """What is captured."""
        one = [self.prefill_one] if self.prefill_one is not None else []
        return [self.prefill, *one, self.step]

    @property
    def captures(self) -> int:
        return sum(runner.stats.captures for runner in self.runners)

    def close(self) -> None:
        """Give back what the device holds for its recordings; the engine is of no use after that."""
        for runner in self.runners:
            runner.close()

    # -- the captured functions

    @torch.no_grad()
    def warm_up(self) -> None:
        """Capture each function and replay it once; from here on a capture is an error."""
        if self.warm:
            return
        blank = Request("warm-up")
        self.upload_settings([blank] * self.spec.images, self.state.entry)
        if self.one_image is not None:
            self.upload_settings([blank], self.one_image.entry)
        for runner in self.runners:
            self.upload_uniforms([blank.seed] * self.spec.images, 1, 1)
            runner()
            runner()
        self.pace.fit(partial(self.try_step, {}), self.bits)
        self.backend.synchronize()
        self.warm_captures = self.captures

    def try_step(self, begun: dict[str, Tensor]) -> None:
        """A step of blank images, always from the same state.

        Args:
            begun: that state; empty at the first call.
        """
        now = self.state.restorable()
        if not begun:
            self.state.cursor.zero_()
            self.state.settle()
            begun.update({name: tensor.clone() for name, tensor in now.items()})
        for name, tensor in now.items():
            tensor.copy_(begun[name])
        self.step()

    def bits(self) -> list[int]:
        """What tells the state from one that differs in a bit."""
        return [bits_digest(tensor) for tensor in self.state.tensors().values()]

    @torch.no_grad()
    def start(self, prefix: Prefix, requests: Sequence[Request]) -> list[int]:
        """Begin an image in each slot. -> [B] tokens known"""
        self.warm_up()
        self.upload_prefix(prefix, self.state.entry)
        self.upload_settings(requests, self.state.entry)
        with self.pace.held():
            self.known = self.prefill()
        # On a fixed schedule nobody need look
        return [1] * self.spec.images if is_scheduled(self.spec.tree) else self.read(self.known)

    @torch.no_grad()
    def admit(self, prefix: Prefix, request: Request, slot: int) -> None:
        """Begin one image in a slot while the others go on; no host read, as one token of it is known for sure."""
        assert self.one_image is not None and self.prefill_one is not None, "the spec is not open"
        self.upload_prefix(prefix, self.one_image.entry)
        self.upload_settings([request], self.one_image.entry)
        self.backend.queue.upload(
            torch.tensor([slot], dtype=torch.int32), self.one_image.entry.slot
        )
        with self.pace.held():
            self.known = self.prefill_one()

    @torch.no_grad()
    def advance(
        self,
        seeds: Sequence[int | None],
        first: int | Sequence[int],
        count: int,
        ahead: bool = False,
    ) -> list[int]:
        """So many steps of all slots. -> [B] tokens known

        Args:
            seeds, first: see `upload_uniforms`.
            ahead: read what is known before the last step, which keeps the device busy while the host decides what
                comes next.
        """
        self.launch(seeds, first, count, count - ahead)
        assert self.known is not None
        if not ahead:
            return self.read(self.known)
        asked = self.backend.queue.read(self.known)
        self.known = self.pace(self.step)
        self.host_reads += 1
        return asked()

    @torch.no_grad()
    def launch(
        self,
        seeds: Sequence[int | None],
        first: int | Sequence[int],
        count: int,
        steps: int | None = None,
    ) -> None:
        """Steps of all slots, and no host read.

        Args:
            seeds, first, count: see `upload_uniforms`. steps: so many of them; all if not given.
        """
        self.upload_uniforms(seeds, first, count)
        for _ in range(count if steps is None else steps):
            self.known = self.pace(self.step)

    def check_captures(self) -> None:
        """Raise a CaptureError if anything was captured since the warm-up."""
        if self.captures != self.warm_captures:
            why = f"{self.captures - self.warm_captures} captures after warm-up"
            raise CaptureError("the step was recorded again while decoding", why)

    # -- the host's part of the state

    def upload_settings(self, requests: Sequence[Request], entry: Entry) -> None:
        """Copy the settings of images to where they are admitted from, behind what was launched before."""
        upload = self.backend.queue.upload
        sampling = sampling_params([r.sampling for r in requests], self.target.config.vocab_size)
        bounds = Bounds.of([request.relaxation for request in requests], self.spec.tree.depth)
        for goal, values in ((entry.sampling, sampling), (entry.bounds, bounds)):
            for item in fields(values):
                room = getattr(goal, item.name)
                if room is not None:  # of a rule that no image of the spec has
                    upload(getattr(values, item.name), room)
        first = [uniforms(request.seed, 0, 1)[0] for request in requests]
        upload(torch.tensor(first, dtype=torch.float32), entry.first_uniform)
        if entry.keys is not None:
            keys = [noise_keys(request.seed, self.target.config.tokens) for request in requests]
            upload(torch.from_numpy(np.stack(keys)), entry.keys)

    def upload_prefix(self, prefix: Prefix, entry: Entry) -> None:
        """Copy the condition of images to where they are admitted from."""
        embeddings, valid, tokens = prefix
        entry.prefix.copy_(embeddings)
        entry.prefix_tokens.copy_(tokens)
        entry.pads.copy_((~valid).sum(1, dtype=torch.int32))
        # Positions past the prefix are never padding.
        width = entry.valid.shape[1] - valid.shape[1]
        entry.valid.copy_(F.pad(valid, (0, width), value=True))
        self.backend.queue.flush()

    def upload_uniforms(
        self, seeds: Sequence[int | None], first: int | Sequence[int], count: int
    ) -> None:
        """Uniforms for the next steps, in one copy of one size, whatever the count.

        Args:
            seeds: of each slot's image; None where there is none. first: number of the next step, of all or each.
        """
        block = np.zeros(self.state.uniforms.shape, np.float32)
        block[:count] = uniform_block(seeds, first, count, self.spec.draws)
        self.backend.queue.upload(torch.from_numpy(block), self.state.uniforms)
        self.state.cursor.zero_()

    def read(self, known: Tensor) -> list[int]:
        """A host read: waits for the device."""
        self.host_reads += 1
        return [int(n) for n in known.tolist()]

    def partial(self) -> NDArray[np.int64]:
        """The tokens so far [B, N]; those past an image's known ones mean nothing. A host read."""
        self.backend.queue.flush()
        self.host_reads += 1
        rows = self.state.tokens.unflatten(0, (self.spec.images, -1))
        return rows[:, : self.target.config.tokens].cpu().numpy().astype(np.int64)

    def result(self, slots: Sequence[int] | None = None) -> Decoded:
        """Tokens and statistics of images that are done; of all slots if none are named. One host read."""
        self.backend.queue.flush()
        self.host_reads += 1
        state, total = self.state, self.target.config.tokens
        rows = state.tokens.unflatten(0, (self.spec.images, -1))[:, :total]
        columns = [rows, state.steps[:, None], state.relaxed[:, None], state.accepted]
        whole = torch.cat(columns, 1)  # [B, N + 2 + D]
        if state.meter is not None:  # in one read: below 2^24 float32 holds every whole number
            spent = torch.stack([state.meter.total, state.meter.largest], 1)
            whole = torch.cat([spent, whole.float()], 1)
        read = whole.cpu().numpy()
        read = read if slots is None else read[list(slots)]
        costs = None
        if state.meter is not None:
            costs = [(float(sum_), float(most)) for sum_, most in read[:, :2]]
            read = read[:, 2:].astype(np.int64)
        steps, relaxed, accepted = read[:, total], read[:, total + 1], read[:, total + 2 :]
        tokens = read[:, :total].astype(np.int64)
        return Decoded(tokens, steps.tolist(), accepted.tolist(), relaxed.tolist(), costs)

    # -- looking inside

    @torch.no_grad()
    def trace(
        self,
        prefix: Prefix,
        requests: Sequence[Request],
        clock: Callable[[], float] | None = None,
    ) -> Iterator[StepTrace]:
        """Decode a batch uncaptured, step by step, and show what draft, verify, accept and commit made.

        The tokens are those of a captured run.

        Args:
            clock: waits for the device and tells the time; the stages of a step are then timed by it.
        """
        self.upload_prefix(prefix, self.state.entry)
        self.upload_settings(requests, self.state.entry)
        known = self.read(self.prefill_function(self.state))
        seeds, number = [request.seed for request in requests], 0
        while min(known) < self.target.config.tokens:
            if number % self.spec.block == 0:
                self.upload_uniforms(seeds, number + 1, self.spec.block)
            with self.pace.held():
                step = self.trace_step(known, clock)
            known, number = step.known, number + 1
            yield step

    def trace_step(self, before: list[int], clock: Callable[[], float] | None) -> StepTrace:
        """`Step.forward`, with a look between its stages."""
        step, state = self.step_function, self.state
        seconds: dict[str, float] = {}
        last = clock() if clock else 0.0

        def done(stage: str) -> None:
            nonlocal last
            if clock:
                now = clock()
                seconds[stage], last = now - last, now

        proposed = step.propose(state, done)
        accepted, known = step.finish_traced(state, *proposed, done)
        return StepTrace(before, proposed[2], accepted, self.read(known), seconds)

    def report(self) -> GraphReport:
        """Counts since the engine was built."""
        stats = [runner.stats for runner in self.runners]
        return GraphReport(
            self.mode,
            self.backend.graph_modes[self.mode],
            self.captures,
            sum(s.replays for s in stats),
            self.captures - max(self.warm_captures, 0),
            self.host_reads,
            sum(s.capture_seconds for s in stats),
        )


class EngineCache:
    """At most so many engines; what is evicted gives its memory back.

    The one in use is never the one evicted. Where recorded graphs share memory, that memory goes with the last of
    them; so the last is evicted only if there is no room for another beside it.
    """

    def __init__(
        self, model: ImageModel, backend: Backend, mode: str, kept: int = MAX_ENGINES
    ) -> None:
        self.model, self.backend, self.mode, self.kept = model, backend, mode, kept
        self.engines: OrderedDict[Spec, Engine] = OrderedDict()

    def get(self, spec: Spec) -> Engine:
        """The engine of a spec, now the youngest."""
        if spec not in self.engines:
            self.make_room(spec)
            self.engines[spec] = self.make(spec)
        self.engines.move_to_end(spec)
        return self.engines[spec]

    def make(self, spec: Spec, mode: str | None = None, drafter: Drafter | None = None) -> Engine:
        """An engine of its own, which is not kept.

        Args:
            mode: graph mode in place of the usual one. drafter: in place of the model's.
        """
        model = self.model
        self.check_room(spec)
        table, codes = model.code_tables(spec.neighbours, spec.ranks)
        drafter = drafter or model.drafter
        return Engine(model.target, drafter, spec, self.backend, mode or self.mode, table, codes)

    def make_room(self, spec: Spec) -> None:
        """Evict the oldest until there are few enough, and until there is memory for the state of a new one."""
        self.shrink(self.kept - 1)
        while self.engines and not self.fits(spec):
            self.shrink(len(self.engines) - 1)

    def fits(self, spec: Spec) -> bool:
        """Whether the device says that it has room for a batch; one that does not say is taken to have it."""
        free = self.backend.memory().free
        need = batch_bytes(self.model.config, spec, dtype_name(self.model.target.dtype))
        return free is None or need <= free

    def check_room(self, spec: Spec) -> None:
        """Raise a DeviceError where the host has too little memory for an engine."""
        model = self.model
        check_batch(model.config, spec, self.backend, dtype_name(model.target.dtype))

    def shrink(self, count: int) -> None:
        """Leave the youngest `count` engines."""
        while len(self.engines) > max(count, 0):
            _, engine = self.engines.popitem(last=False)
            engine.close()

    def discard(self, spec: Spec) -> None:
        """Forget one, if it is there: its warm-up failed, say."""
        engine = self.engines.pop(spec, None)
        if engine is not None:
            engine.close()
