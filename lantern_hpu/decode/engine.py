"""What decodes batches of one spec: the captured functions, the host's part of the state, and the host reads.

Engines of a model are built when first needed, and the last used ones kept. This file holds no tensor mathematics;
`step.py` holds no loop and no host read.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lantern_hpu.backends.base import DevicePlan, dtype_name, own_defaults
from lantern_hpu.core import ImageRecord, Request
from lantern_hpu.decode.common import Drafts, sampling_params
from lantern_hpu.decode.memory import Setup, check_batch, encoding, engine_bytes, summed
from lantern_hpu.decode.spec import Spec
from lantern_hpu.decode.state import Bounds, DecodeState, PrefillInput, paired
from lantern_hpu.decode.step import Accepted, Prefill, ScheduledStep, Step, make_drafting
from lantern_hpu.errors import CaptureError, DeviceError, OptionError
from lantern_hpu.graphs import make_runner
from lantern_hpu.models.model import ImageModel
from lantern_hpu.models.text.prefix import Prefix
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.ops.sampling import noise_keys, uniform_block, uniforms

UNRECORDED = ("eager", "strict")  # graph modes that keep no memory of their own
MAX_ENGINES = 8  # engines of a model: two sizes of pictures and three of prefixes are six


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

    def since(self, before: GraphReport) -> dict[str, Any]:
        """By name; replays and reads are those after another report."""
        reads, replays = self.host_reads - before.host_reads, self.replays - before.replays
        return asdict(self) | {"host_reads": reads, "replays": replays}


@dataclass
class StepTrace:
    """What one step made, to be looked at; valid until the next one."""

    before: list[int]  # [B] tokens known before it
    drafts: Drafts
    accepted: Accepted
    known: list[int]  # [B] tokens known after it
    seconds: dict[str, float]  # of each stage, where there was a clock


class Engine:
    """Runs the prefill and the step of one `Spec`; allocates and captures once."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        spec: Spec,
        fit: DevicePlan,
        neighbours: Tensor | None = None,
        codes: Tensor | None = None,
    ) -> None:
        """
        Args:
            drafter: for specs whose tree has drafts.
            neighbours, codes: [V, K or more] int32 and the embedding [V, H], for specs with neighbours or clusters.
        """
        target = target.sized(spec.sizes(target.config))
        self.target = target
        self.spec = spec
        self.backend = fit.backend
        self.mode = fit.graphs
        form = (target.dtype, target.device)
        drafting = make_drafting(target, drafter, spec)
        drafting_state = drafting and drafting.allocate(*form, fit.keys_by_head)
        self.state = DecodeState.allocate(
            target.config, spec, *form, drafting_state, fit.keys_by_head
        )
        table = None if neighbours is None else neighbours[:, : spec.neighbours]
        self.prefill_function = Prefill(target, drafting, spec).to(target.device).eval()
        kind = ScheduledStep if spec.tree.commit else Step
        self.step_function = kind(target, drafting, spec, table, codes).to(target.device).eval()
        # Recorded for all slots, and once more for one image while the others run
        self.prefill_inputs = [self.state.prefill]
        if spec.open:
            self.prefill_inputs.append(PrefillInput.allocate(target.config, spec, 1, *form))
        states = [replace(self.state, prefill=inputs) for inputs in self.prefill_inputs]
        capture = partial(make_runner, backend=self.backend, mode=self.mode)
        self.prefill_runners = [capture(self.prefill_function, state) for state in states]
        self.step = capture(self.step_function, self.state)
        self.runners = [*self.prefill_runners, self.step]
        self.tuner = fit.tuner()  # of steps
        self.known: Tensor | None = None  # [B] what the last captured call returned
        self.host_reads = 0
        self.pins = 0  # see `pinned`: a cache closes none that is
        self.warm_captures: int | None = None  # of the warm-up, once that is done

    @property
    def warm(self) -> bool:
        """Whether the warm-up is done."""
        return self.warm_captures is not None

    @property
    def captures(self) -> int:
        return sum(runner.stats.captures for runner in self.runners)

    def close(self) -> None:
        """Give back what the device holds for its recordings; the engine is of no use after that."""
        for runner in self.runners:
            runner.close()

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Something holds it inside, a batch or a lane of a server: its state is of one run at a time.

        Raises:
            OptionError: another run that has not ended holds it.
        """
        if self.pins:
            why = "a run that has not ended holds its state"
            hint = "end that run, or take another one of pipeline.engines.get"
            raise OptionError("the engine is in use", why, hint)
        self.pins += 1
        try:
            yield
        finally:
            self.pins -= 1

    # -- the captured functions

    @torch.no_grad()
    def warm_up(self, request: Request) -> None:
        """Capture each function and replay it once, with the settings of any request; from here on a capture is an
        error."""
        if self.warm:
            return
        for inputs in self.prefill_inputs:
            upload_settings(self, [request] * len(inputs.slot), inputs)
        for runner in self.runners:
            self.upload_uniforms([request.seed] * self.spec.images, 1, 1)
            runner()
            runner()
        self.tuner.fit(partial(next, self.replay_same_state()))
        self.backend.synchronize()
        self.warm_captures = self.captures

    def replay_same_state(self) -> Iterator[Tensor]:
        """Steps of blank images, each from the same state."""
        for _ in self.state.rewinds():
            yield self.step()

    def mark_finished(self, slots: Sequence[int]) -> None:
        """Let a decoder that skips finished images skip these slots."""
        if self.target.decoder is not None and slots:
            self.state.count[list(slots)] = self.target.config.tokens - 1

    @torch.no_grad()
    def prefill_batch(self, prefix: Prefix, requests: Sequence[Request]) -> list[int]:
        """Begin an image in each slot. -> [B] tokens known"""
        self.warm_up(requests[0])
        known = self.prefill_into(0, prefix, requests)
        # On a fixed schedule it is known
        return [1] * self.spec.images if self.spec.tree.commit else self.read(known)

    @torch.no_grad()
    def prefill_slot(self, prefix: Prefix, request: Request, slot: int) -> None:
        """Begin one image in a slot while the others go on; no host read, as one token of it is known for sure."""
        assert self.spec.open
        goal = self.prefill_inputs[1].slot
        self.backend.transfers.upload(torch.tensor([slot], dtype=torch.int32), goal)
        self.prefill_into(1, prefix, [request])

    def prefill_into(self, number: int, prefix: Prefix, requests: Sequence[Request]) -> Tensor:
        """Prefill by one of the recordings. -> [B] tokens known, on the device"""
        upload_prefix(self, prefix, self.prefill_inputs[number])
        upload_settings(self, requests, self.prefill_inputs[number])
        with self.tuner.with_threads():
            self.known = self.prefill_runners[number]()
        return self.known

    @torch.no_grad()
    def run_steps(
        self, seeds: Sequence[int | None], first: int | Sequence[int], count: int
    ) -> None:
        """`count` steps of all slots and no host read; for seeds and the first step see `upload_uniforms`."""
        self.upload_uniforms(seeds, first, count)
        self.replay_steps(count)

    @torch.no_grad()
    def run_steps_and_read(
        self,
        seeds: Sequence[int | None],
        first: int | Sequence[int],
        count: int,
        ahead: bool = False,
    ) -> list[int]:
        """The same, and a host read. -> [B] tokens known

        With `ahead` before the last step, which keeps the device busy while the host decides what comes next.
        """
        self.upload_uniforms(seeds, first, count)
        self.replay_steps(count - ahead)
        assert self.known is not None
        if not ahead:
            return self.read(self.known)
        asked = self.backend.transfers.read(self.known)
        self.replay_steps(1)
        self.host_reads += 1
        return asked()

    def replay_steps(self, count: int) -> None:
        for _ in range(count):
            self.known = self.tuner(self.step)

    def check_captures(self) -> None:
        """Raise a CaptureError if anything was captured since the warm-up."""
        if count := self.recompiles:
            why = f"{count} captures after warm-up"
            raise CaptureError("the step was recorded again while decoding", why)

    @property
    def recompiles(self) -> int:
        """Captures since the warm-up; before it all there are."""
        return self.captures - (self.warm_captures or 0)

    # -- the host's part of the state

    def upload_uniforms(
        self, seeds: Sequence[int | None], first: int | Sequence[int], count: int
    ) -> None:
        """Uniforms for the next steps, in one copy of one size.

        They are of the images with these seeds (None where there is none), from the `first` step on, of all or each.
        """
        block = np.zeros(self.state.uniforms.shape, np.float32)
        block[:count] = uniform_block(seeds, first, count, self.spec.draws)
        self.backend.transfers.upload(torch.from_numpy(block), self.state.uniforms)
        self.state.cursor.zero_()

    def read(self, known: Tensor) -> list[int]:
        """A host read: waits for the device."""
        self.host_reads += 1
        return [int(n) for n in known.tolist()]

    def read_tokens(self) -> NDArray[np.int64]:
        """The tokens so far [B, N]; those past an image's known ones mean nothing. A host read."""
        self.backend.transfers.flush()
        self.host_reads += 1
        return self.token_rows().cpu().numpy().astype(np.int64)

    def token_rows(self) -> Tensor:
        """[B, N] int32"""
        rows = self.state.tokens.unflatten(0, (self.spec.images, -1))
        return rows[:, : self.target.config.tokens]

    @torch.no_grad()
    def trace(
        self, prefix: Prefix, requests: Sequence[Request], clock: Callable[[], float] | None = None
    ) -> Iterator[StepTrace]:
        """Decode a batch uncaptured, step by step, and show what draft, verify, accept and commit made.

        The tokens are those of a captured run. A `clock` waits for the device, and times the stages of each step.
        """
        with self.pinned():
            upload_prefix(self, prefix, self.state.prefill)
            upload_settings(self, requests, self.state.prefill)
            known = self.read(self.prefill_function(self.state))
            seeds = [request.seed for request in requests]
            number = 0
            while min(known) < self.target.config.tokens:
                if number % self.spec.block == 0:
                    self.upload_uniforms(seeds, number + 1, self.spec.block)
                number += 1
                before = known
                made = dict[str, Any]()
                seconds = dict[str, float]()
                with self.tuner.with_threads():
                    last = clock() if clock else 0.0
                    for stage, result in self.step_function.stages(self.state):
                        made[stage] = result
                        if clock:
                            seconds[stage] = clock() - last
                            last += seconds[stage]
                    known = self.read(made["commit"])
                drafts = made.get("tables", made["draft"])
                yield StepTrace(before, drafts, made["accept"], known, seconds)

    def report(self) -> GraphReport:
        """Counts since the engine was built."""
        stats = [runner.stats for runner in self.runners]
        return GraphReport(
            self.mode,
            self.backend.graph_modes[self.mode],
            self.captures,
            sum(s.replays for s in stats),
            self.recompiles,
            self.host_reads,
            sum(s.capture_seconds for s in stats),
        )


def upload_prefix(engine: Engine, prefix: Prefix, inputs: PrefillInput) -> None:
    """Copy the condition of images to where they are admitted from."""
    inputs.prefix.copy_(prefix.embeddings)
    inputs.prefix_tokens.copy_(prefix.tokens)
    inputs.pads.copy_(prefix.pads)
    if inputs.axes is not None and prefix.axes is not None:
        inputs.axes.copy_(prefix.axes)
    # Positions past the prefix are never padding.
    width = inputs.valid.shape[1] - prefix.valid.shape[1]
    inputs.valid.copy_(F.pad(prefix.valid, (0, width), value=True))
    engine.backend.transfers.flush()


def upload_settings(engine: Engine, requests: Sequence[Request], inputs: PrefillInput) -> None:
    """Copy the settings of images to where they are admitted from, behind what was launched before."""
    upload = engine.backend.transfers.upload
    config = engine.target.config
    sampling = sampling_params([request.sampling for request in requests], config.vocab_size)
    for value, goal in paired(sampling, inputs.sampling):
        upload(value, goal)
    if inputs.bounds is not None:
        bounds = Bounds.of([request.relaxation for request in requests], engine.spec.tree.depth)
        for value, goal in paired(bounds, inputs.bounds):
            upload(value, goal)
    first = [uniforms(request.seed, 0, 1)[0] for request in requests]
    upload(torch.tensor(first, dtype=torch.float32), inputs.first_uniform)
    if inputs.keys is not None:
        keys = [noise_keys(request.seed, config.tokens) for request in requests]
        upload(torch.from_numpy(np.stack(keys)), inputs.keys)


def read_records(engine: Engine, images: Mapping[int, Request]) -> list[ImageRecord]:
    """Tokens and counts of images that are done, by their slots. One host read."""
    engine.backend.transfers.flush()
    engine.host_reads += 1
    state = engine.state
    total = engine.target.config.tokens
    counts = torch.stack([state.steps, state.relaxed, state.spoiled], 1)  # [B, 3]
    table = torch.cat([engine.token_rows(), counts, state.accepted], 1)  # [B, N + 3 + D]
    width = table.shape[1]
    reals = list[Tensor]()
    if state.meter is not None:
        reals.append(torch.stack([state.meter.total, state.meter.largest], 1))  # [B, 2]
    if state.logprobs is not None:
        every = state.logprobs.unflatten(0, (engine.spec.images, -1))
        reals.append(every[:, :total].transpose(1, 2).flatten(1))  # [B, 2 N]
    if reals:  # in one read: below 2^24 float32 holds every whole number
        table = torch.cat([table.float(), *reals], 1)
    read = table.cpu().numpy()
    result = []
    for slot, request in images.items():
        row = read[slot, :width].astype(np.int64)
        steps, relaxed, spoiled, *accepted = row[total:].tolist()
        invalid = f"probabilities were NaN in {spoiled} of {steps} steps" if spoiled else ""
        metered = state.meter is not None
        tv_sum, tv_max = read[slot, width : width + 2].tolist() if metered else (0.0, 0.0)
        if request.relaxation.active and not request.relaxation.metered:
            tv_sum = tv_max = None
        record = ImageRecord(request, row[:total], steps, accepted, relaxed, tv_sum, tv_max)
        record.invalid = invalid
        if request.logprobs:
            record.logprobs, record.model_logprobs = read[slot, -2 * total :].reshape(2, total)
        result.append(record)
    return result


class EngineCache:
    """The engines of a model, up to a limit; what is evicted gives its memory back.

    One that is pinned is never evicted, nor given to another run: that one gets a second engine. Where recorded graphs
    share memory, that memory goes with the last of them; so the last is evicted only if there is no room for another
    next to it.
    """

    def __init__(self, model: ImageModel, fit: DevicePlan) -> None:
        self.model, self.fit, self.backend, self.kept = model, fit, fit.backend, MAX_ENGINES
        self.engines: OrderedDict[tuple[Spec, int], Engine] = OrderedDict()  # by spec and number
        self.process = os.getpid()

    def get(self, spec: Spec) -> Engine:
        """An engine of a spec that nothing holds, now the youngest.

        Raises:
            DeviceError: this is a forked child, whose operators would wait for threads that were not forked.
        """
        if os.getpid() != self.process and torch.get_num_threads() > 1:
            why = "its operators would wait for ever for threads that stayed in the parent"
            hint = (
                "use spawn: multiprocessing.get_context('spawn'), and load the model in the child"
            )
            raise DeviceError("the model was loaded before this process was forked", why, hint)
        key = self.free_key(spec)
        if key not in self.engines:
            self.shrink(self.kept - 1)
            while self.lacking([spec]) > 0 and self.shrink(len(self.engines) - 1):
                pass
            self.engines[key] = self.make(spec)
        self.engines.move_to_end(key)
        return self.engines[key]

    def free_key(self, spec: Spec) -> tuple[Spec, int]:
        """Where the first engine of a spec is, or is to be, that nothing holds."""
        keys = ((spec, number) for number in range(len(self.engines) + 1))
        return next(key for key in keys if key not in self.engines or not self.engines[key].pins)

    @own_defaults()
    def make(self, spec: Spec, mode: str | None = None, drafter: Drafter | None = None) -> Engine:
        """An engine of its own, which is not kept, in a graph mode or with a drafter in place of the usual ones.

        Raises a DeviceError where the host has too little memory for it.
        """
        model = self.model
        drafter = drafter or model.drafter
        drafts = None if drafter is None else drafter.drafter_config
        config = replace(model.config, drafter=drafts)
        check_batch(config, spec, self.backend, dtype_name(model.target.dtype))
        table, codes = model.code_tables(spec.neighbours, spec.ranks)
        fit = self.fit if mode is None else replace(self.fit, graphs=mode)
        return Engine(model.target, drafter, spec, fit, table, codes)

    def lacking(self, specs: Sequence[Spec]) -> int:
        """Bytes that the device lacks for more engines than those here; none (0 or less) where it does not say."""
        free = self.backend.memory().free
        if free is None:
            return 0
        model, dtype = self.model.config, dtype_name(self.model.target.dtype)
        how = (dtype, self.fit.graphs not in UNRECORDED, self.backend.shares_pool)
        here = [spec for spec, _ in self.engines]
        missing = [spec for spec in specs if self.free_key(spec) not in self.engines]
        wanted = sum(engine_bytes(model, [*here, *missing], *how))
        return wanted - engine_bytes(model, here, *how)[0] - free

    def lacking_for_text(self) -> int:
        """Bytes that the device lacks for a text encoder next to the engines here; none: 0 or less."""
        model, dtype = self.model.config, dtype_name(self.model.target.dtype)
        needed = [summed(encoding(model, Setup(spec, dtype))) for spec, _ in self.engines]
        return self.lacking([]) + max(needed)

    def shrink(self, count: int) -> bool:
        """Close the oldest that nothing holds until `count` are left; whether any was."""
        idle = [key for key, engine in self.engines.items() if not engine.pins]
        closed = idle[: max(len(self.engines) - max(count, 0), 0)]
        for key in closed:
            self.engines.pop(key).close()
        return bool(closed)

    def discard(self, engine: Engine) -> None:
        """Forget one, if it is there: its warm-up failed, say."""
        for key in [key for key, kept in self.engines.items() if kept is engine]:
            self.engines.pop(key).close()

    def close(self) -> None:
        """Close all of them."""
        while self.engines:
            self.engines.popitem()[1].close()
