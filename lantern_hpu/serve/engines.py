"""The engines of a server: what is captured before the first request, and the slots that images occupy.

Each method has two engines for each shape: one of all slots, and one of a single slot for an image that comes while
nothing else runs, which then takes no longer than it does alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from lantern_hpu.core import Request, Sampling
from lantern_hpu.decode.engine import Engine
from lantern_hpu.decode.spec import Spec
from lantern_hpu.errors import Arg, CaptureError, DeviceError, shell, words
from lantern_hpu.files import amount
from lantern_hpu.models.text.t5 import T5Conditioner
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.prompts import usual_prompts
from lantern_hpu.results.sources import read_picture
from lantern_hpu.serve.queue import Job
from lantern_hpu.serve.served import ServedMethod, ServedModel, Shape

PROBED = 3  # steps of a recording that are compared with the step uncaptured


class EngineSlots:
    """The slots of one engine, and the jobs in them."""

    def __init__(
        self, pipeline: LanternPipeline, engine: Engine, served: ServedMethod, sampling: Sampling
    ) -> None:
        """Captures the engine, and compares it with itself uncaptured."""
        condition = pipeline.model.condition
        prompt = usual_prompts(condition.takes_classes)[0]
        usual = Request(prompt, 0, sampling, served.setting.relaxation)
        condition.prepare([usual])
        pipeline.warm_up(engine, usual)
        check_replay(pipeline, engine, usual)
        self.pipeline, self.engine, self.served = pipeline, engine, served
        self.usual = usual  # what it was warmed up with
        self.batch = pipeline.batch(engine)
        self.columns = engine.target.config.columns
        self.jobs: dict[int, Job] = {}  # of a slot

    @property
    def room(self) -> int:
        return len(self.batch.free)

    @property
    def recompiles(self) -> int:
        return self.engine.report().recompiles_after_warmup

    def admit(self, jobs: Sequence[Job]) -> None:
        """Begin jobs in free slots."""
        slots = self.batch.admit([job.request for job in jobs])
        for slot, job in zip(slots, jobs, strict=True):
            self.jobs[slot] = job
            self.schedule_preview(slot)

    def leave(self, slot: int) -> Job:
        self.batch.release(slot)
        return self.jobs.pop(slot)

    def empty(self) -> list[Job]:
        """Give all slots up. -> the jobs that were in them"""
        left = list(self.jobs.values())
        self.jobs.clear()
        self.batch.slots.clear()
        return left

    def part_done(self, slot: int) -> float:
        """The part of an image that is drawn: above 0, and 1 in the end."""
        return max(self.batch.known[slot], 1) / self.batch.total

    def due_previews(self) -> Iterator[tuple[Job, NDArray[np.int64], int, int]]:
        """Partial pictures that are due: job, tokens [1, N], how many of them are known, and the steps so far."""
        known = self.batch.known
        tokens: NDArray[np.int64] | None = None
        for slot, job in self.jobs.items():
            due = [row for row in job.shows if row <= known[slot] // self.columns]
            if due:
                job.shows = job.shows[len(due) :]
                tokens = self.engine.read_tokens() if tokens is None else tokens
                yield job, tokens[[slot]], known[slot], self.batch.slots[slot].steps
                self.schedule_preview(slot)

    def schedule_preview(self, slot: int) -> None:
        """Have the host read when the next partial picture of a slot may be due."""
        shows = self.jobs[slot].shows
        if slot in self.batch.slots:
            self.batch.slots[slot].preview_at = shows[0] * self.columns if shows else 0

    def check_usable(self) -> None:
        """Raise where its empty slots draw nothing any more: that is the device's error, and ends the process."""
        size, engine = self.batch.size, self.engine
        requests = [self.usual] * size
        with self.pipeline.backend.errors():
            self.pipeline.model.condition.prepare([self.usual])
            engine.prefill_batch(self.pipeline.prefix(engine, requests), requests)
            engine.run_steps_and_read([0] * size, 1, 1)
            engine.check_captures()


def specs_to_capture(
    methods: Mapping[str, ServedMethod], slots: int
) -> dict[tuple[str, Shape], list[Spec]]:
    """What is captured of each method and shape: the step of a single slot first, then that of all."""
    return {
        (name, (grid, prefix)): [
            replace(served.spec, grid=grid, prefix=prefix, images=size, open=size > 1)
            for size in dict.fromkeys((1, slots))
        ]
        for name, served in methods.items()
        for grid, prefix in served.shapes
    }


def check_engines(pipeline: LanternPipeline, model: ServedModel, slots: int) -> None:
    """Refuse, before anything is captured, engines that do not fit in memory together.

    Raises:
        DeviceError: it says how much is lacking, and what would fit.
    """

    def lacking(methods: int, slots: int) -> int:
        chosen = dict(list(model.methods.items())[:methods])
        return pipeline.engines.lacking([*chain(*specs_to_capture(chosen, slots).values())])

    count = len(model.methods)
    more = lacking(count, slots)
    if more <= 0:
        return
    fewer = (n for n in range(slots - 1, 0, -1) if lacking(count, n) <= 0)
    fitting = [Arg("slots", n) for n in islice(fewer, 1)]
    some = (n for n in range(count - 1, 0, -1) if lacking(n, slots) <= 0)
    fitting += [Arg("method", ",".join(list(model.methods)[:n])) for n in islice(some, 1)]
    free, name = pipeline.backend.memory().free or 0, pipeline.backend.name
    what = f"the engines of {', '.join(model.methods)} with {slots} slots do not fit together"
    why = f"they need {amount(free + more)} besides the weights, {amount(free)} are free on {name}"
    least = words(Arg("method", "ar"), Arg("slots", 1), ", or", shell("plan", Arg("serve", True)))
    hint = words(*[part for one in fitting for part in (one, "or")][:-1], "fits")
    raise DeviceError(what, why, hint if fitting else least)


def keep_encoder(pipeline: LanternPipeline) -> None:
    """Let a text encoder stay on the device, if that is left to us and there is room for it next to the engines."""
    text, engines = getattr(pipeline.model.condition, "text", None), pipeline.engines
    if isinstance(text, T5Conditioner) and text.keep == "auto" and engines.lacking_for_text() <= 0:
        text.keep = "device"
        pipeline.fit.decided["text encoder"] = "device: there is room for it next to the engines"


def read_a_picture(pipeline: LanternPipeline) -> None:
    """Load what reads pictures, and compile it, before a request waits for that."""
    prompt = usual_prompts(pipeline.model.condition.takes_classes)[0]
    blank = read_picture(Image.new("RGB", (512, 512)))
    with torch.no_grad():
        pipeline.model.condition.prepare([Request(prompt, sources=(blank,))])


def check_replay(pipeline: LanternPipeline, engine: Engine, request: Request) -> None:
    """Compare the recordings of an engine with the same functions uncaptured, over a few steps."""
    requests = [replace(request, seed=seed) for seed in range(engine.spec.images)]
    seeds = [each.seed for each in requests]
    traced = engine.trace(pipeline.prefix(engine, requests), requests)
    want = [step.known for step in islice(traced, PROBED)]
    expected = engine.read_tokens()
    engine.prefill_batch(pipeline.prefix(engine, requests), requests)
    got = [engine.run_steps_and_read(seeds, 1 + number, 1) for number in range(len(want))]
    tokens = engine.read_tokens()
    ends = want[-1] if want else []
    same = got == want and all(
        tokens[i, :end].tolist() == expected[i, :end].tolist() for i, end in enumerate(ends)
    )
    if not same:
        what = f"the recording by {engine.mode} draws other tokens than the step uncaptured"
        hint = words(Arg("graphs", "eager"), "or", Arg("kernels", "plain"))
        raise CaptureError(what, hint=hint)
