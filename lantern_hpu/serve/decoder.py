"""The decode loop: one thread that owns the engines, admits images to their slots and runs their steps.

Each method has two engines for each shape: one of all slots, and one of a single slot for an image that comes while
nothing else runs, which then takes no longer than it does alone. All are captured before the first request."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from lantern_hpu.core import Request, Sampling
from lantern_hpu.decode.engine import Engine
from lantern_hpu.decode.spec import Spec, why_no_logprobs
from lantern_hpu.errors import Arg, CaptureError, DeviceError, OptionError, shell, words
from lantern_hpu.files import VERSION, amount
from lantern_hpu.methods.relaxation import PRESETS, Relaxation
from lantern_hpu.methods.setting import AUTO, METHODS, Resolved, verified
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.models.text.frames import reads_pictures, takes_negative
from lantern_hpu.models.text.t5 import T5Conditioner
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.prompts import usual_prompts
from lantern_hpu.results.sources import read_picture
from lantern_hpu.serve.options import SGLANG, ServeOptions
from lantern_hpu.serve.protocol import ApiError, ServedMethod, ServedModel, Shape
from lantern_hpu.serve.queue import (
    FairShare,
    ImageTasks,
    Job,
    JobQueue,
    Metrics,
    failed,
    log_error,
)


def make_served_model(pipeline: LanternPipeline, options: ServeOptions) -> ServedModel:
    """What this model can serve, with what the options allow."""
    model, config = pipeline.model, pipeline.model.target.config
    if model.vq is None and pipeline.diffusion is None and not options.sglang:
        what, why = f"{model.name} cannot be served", "nothing decodes its tokens"
        raise OptionError(what, why, Arg("vq"))
    served: dict[str, ServedMethod] = {}
    asked_as: dict[str, str] = {}
    for asked in options.settings:
        setting = pipeline.resolve(asked, options.slots)
        if setting.method in served:
            if AUTO in (asked.method, asked_as[setting.method]):
                continue  # `auto` may be one that is named as well
            what = words(Arg("method"), f"has {setting.method} twice")
            raise OptionError(what, "a request names the method alone", "one setting of each")
        asked_as[setting.method] = asked.method
        served[setting.method] = serve_method(pipeline, setting, options)
    for name in PRESETS.keys() & set(options.allow):
        if not any(METHODS[method].takes_relaxation(PRESETS[name]) for method in served):
            what, why = f"{name} cannot be allowed", f"none of {', '.join(served)} takes it"
            raise OptionError(what, why, Arg("method", "scd,ar"))

    return ServedModel(
        names=options.served_model_name or (model.name,),
        takes_negative=takes_negative(model.config.condition),
        sizes=options.sizes or (model.config.image_size,),
        by_request=config.code_pixels > 0,
        sources=min(options.sources, reads_pictures(model.config)),
        rows=config.grid[0] if pipeline.diffusion is None else 1,
        vocabulary=config.vocab_size,
        codes=model.codes,
        sampling=usual_sampling(pipeline, options),
        methods=served,
        spec_of=lambda asked, tree: pipeline.spec([asked], tree, 1),
    )


def usual_sampling(pipeline: LanternPipeline, options: ServeOptions) -> Sampling:
    """Of requests that do not say another: the model's own, or what SGLang asks for."""
    if options.sglang and not options.model_sampling:
        return SGLANG
    usual = pipeline.model.sampling
    return replace(usual, top_k=min(usual.top_k, pipeline.model.vocabulary))


def source_prefixes(config: ModelConfig, sources: int) -> tuple[int, ...]:
    """One for each picture that a request may have, and at least up to one for the largest picture."""
    prefixes, vision = config.target.source_prefixes, config.vision
    largest = (vision.most // vision.step) ** 2 if vision else 0  # in codes
    holding = 1 + sum(prefix < largest for prefix in prefixes)
    return prefixes[: max(sources, holding)] if sources else ()


def serve_method(
    pipeline: LanternPipeline, setting: Resolved, options: ServeOptions
) -> ServedMethod:
    """A setting whose step does all that the options allow."""
    model, config = pipeline.model, pipeline.model.target.config
    usual = usual_sampling(pipeline, options)
    rules = {
        name: verified(preset.fit(model.codes), setting.tree, setting.relaxation.verify)
        for name, preset in PRESETS.items()
        if METHODS[setting.method].takes_relaxation(preset)
    }
    filters = {
        "greedy": replace(usual, temperature=0.0),
        "top_k": replace(usual, top_k=config.vocab_size - 1),
        "top_p": replace(usual, top_p=0.9),
    }
    allowed = [filters[name] for name in options.allow if name in filters]
    requests = [Request("any", 0, each, setting.relaxation) for each in (usual, *allowed)]
    requests += [Request("any", 0, usual, rules[name]) for name in options.allow if name in rules]
    if "logprobs" in options.allow and not why_no_logprobs(setting.tree, setting.relaxation):
        requests.append(replace(requests[0], logprobs=True))
    specs = [
        pipeline.spec([replace(r, size=size) for r in requests], setting.tree, options.slots)
        for size in options.sizes or (None,)
    ]
    words = (*config.prefixes, config.prefix) if config.prefixes else (None,)
    prefixes = (*words, *source_prefixes(model.config, options.sources))
    shapes = tuple((spec.grid, prefix) for spec in specs for prefix in prefixes)

    def served(rule: Relaxation) -> bool:
        need = pipeline.spec([Request("any", 0, usual, rule)], setting.tree, 1)
        return not specs[0].first_missing(need)

    relaxations = () if setting.commit else tuple(n for n, rule in rules.items() if served(rule))
    return ServedMethod(setting, specs[0], shapes, relaxations)


PROBED = 3  # steps of a recording that are compared with the step uncaptured


class EngineSlots:
    """The slots of one engine, and the jobs in them."""

    def __init__(
        self, pipeline: LanternPipeline, engine: Engine, served: ServedMethod, sampling: Sampling
    ) -> None:
        """Captures the engine, and compares it with itself uncaptured."""
        condition = pipeline.model.condition
        prompt = usual_prompts(condition.classes)[0]
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
    least = words(
        Arg("method", "ar"), Arg("slots", 1), ", or", shell("models plan", Arg("slots", 8))
    )
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
    prompt = usual_prompts(pipeline.model.condition.classes)[0]
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


IDLE = 0.5  # seconds between two heartbeats where nothing is to be drawn


def gauges_of(decoder: DecodeThread) -> dict[str, tuple[str, Callable[[], float]]]:
    """What `/metrics` reads when it is asked."""
    running = "Images in slots, and those whose pixels are not made yet"
    pictures = "Pictures whose pixels are to be made, partial ones included"
    taken = "Slots taken, of those of a method's engine"
    peak, memory = "Most bytes of device memory in use so far", decoder.pipeline.backend.memory

    def recompiles() -> int:
        reports = (slots.engine.report() for slots in decoder.all_slots)
        return sum(report.recompiles_after_warmup for report in reports)

    return {
        "num_requests_running": (running, lambda: decoder.running + decoder.unpainted),
        "num_requests_waiting": ("Images in the queue", lambda: decoder.queue.queued),
        "num_pictures_waiting": (pictures, lambda: len(decoder.tasks.pixels.tasks)),
        "slots_in_use_ratio": (taken, lambda: decoder.running / decoder.options.slots),
        "recompiles_after_readiness": ("Captures that should not be", recompiles),
        "device_memory_peak_bytes": (peak, lambda: memory().peak or 0),
    }


def not_taking(decoder: DecodeThread) -> ApiError:
    """Why a decode thread takes no jobs."""
    what = "about to stop" if decoder.draining else "not ready yet"
    return ApiError(503, f"the server is {what}", headers={"Retry-After": "5"})


class DecodeThread:
    """Takes jobs from any thread; steps happen in its own.

    Attributes:
        engines: of each method and shape, the one of a single slot first.
        image_s: seconds that an image is in its slot, on average; later ones count more.
        failure: what ended the thread, if it was not asked to end.
    """

    def __init__(self, pipeline: LanternPipeline, options: ServeOptions) -> None:
        self.pipeline, self.options = pipeline, options
        self.served = make_served_model(pipeline, options)
        if self.served.sources:
            read_a_picture(pipeline)  # before memory is counted
        check_engines(pipeline, self.served, options.slots)
        build = {"version": VERSION, "torch": torch.__version__, "device": pipeline.backend.name}
        self.metrics = Metrics(self.served.name, build)
        self.queue = JobQueue(options.timeout, partial(self.metrics.add, "request_cancelled", 1))
        self.tasks = ImageTasks(pipeline, self.served, self.queue, self.metrics)
        self.engines: dict[tuple[str, Shape], list[EngineSlots]] = {}
        self.share = FairShare()
        self.clock = time.perf_counter
        self.image_s = 0.0
        self.thread = threading.Thread(target=self.run, name="decode", daemon=True)
        self.heartbeat_at = time.monotonic()
        self.ready = False
        self.draining = False
        self.stopping = False
        self.failure: BaseException | None = None
        self.metrics.watch(gauges_of(self))

    # Called by other threads

    def start(self, wait: bool = False) -> None:
        """Begin to record, and then to draw; with `wait`, return when it is ready, or has failed."""
        if self.thread.ident is None:
            self.thread.start()
        while wait and not self.ready and self.failure is None and not self.stopping:
            time.sleep(0.05)

    def stop(self, drain: float = 0.0, wait: float | None = None) -> int:
        """Take no more jobs, draw on for up to `drain` seconds, and answer all that are left with an error.

        Steps under way have `wait` seconds to end; None: as long as they take. Returns how many images were left.
        """
        until = time.monotonic() + drain
        open_jobs = self.queue.open_jobs
        with self.queue.changed:
            self.draining = True
        while open_jobs and self.failure is None and time.monotonic() < until:
            time.sleep(0.05)
        left = len(open_jobs)
        with self.queue.changed:
            self.stopping = True
            self.queue.changed.notify()
        self.queue.answer_all(ApiError(503, "the server stopped"))
        for thread in self.alive:
            thread.join(wait)
        return left

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the images of a request, all or none."""
        with self.queue.changed:
            if self.draining or not self.ready:
                raise not_taking(self)
            queued, most = self.queue.queued, self.options.queue
            places = queued + len(jobs) - most
            if places > 0:
                what = f"{queued} images wait, {most} may"
                seconds = math.ceil(places * self.image_s / self.options.slots)
                headers = {"Retry-After": str(max(1, seconds))}
                raise ApiError(429, what, None, "queue_full", headers)
            self.tasks.text.put(partial(self.tasks.read, jobs))  # begins once the lock is free
            self.queue.add(jobs)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Give jobs up: their slots are free at the next host read, their text and pixels are not made."""
        for job in jobs:
            job.cancelled = True

    @property
    def seconds_since_heartbeat(self) -> float:
        """Since the oldest sign of life of its threads."""
        tasks = (self.tasks.text.began, self.tasks.pixels.began)
        begun = [began for began in tasks if began is not None]
        return time.monotonic() - min([self.heartbeat_at, *begun])

    @property
    def alive(self) -> list[threading.Thread]:
        """Threads that have not ended."""
        threads = (self.thread, self.tasks.text.thread, self.tasks.pixels.thread)
        return [thread for thread in threads if thread is not None and thread.is_alive()]

    @property
    def all_slots(self) -> list[EngineSlots]:
        return [slots for several in list(self.engines.values()) for slots in several]

    @property
    def running(self) -> int:
        """Images in slots."""
        return sum(len(slots.jobs) for slots in self.all_slots)

    @property
    def unpainted(self) -> int:
        """Images whose tokens are there, and whose pixels are not."""
        return max(0, len(self.queue.open_jobs) - self.queue.queued - self.running)

    @property
    def has_room(self) -> bool:
        """Whether images may begin: not where two batches of them wait for their pixels."""
        return self.unpainted < 2 * self.options.slots

    # In the thread

    def run(self) -> None:
        event = ApiError(503, "the server stopped")
        try:
            with ExitStack() as held, self.pipeline.backend.errors(), torch.no_grad():
                self.capture(held)
                self.ready = True
                while not self.stopping:
                    self.schedule_once()
        except BaseException as error:
            self.failure = error
            event = ApiError(500, f"the server failed: {error}")
        finally:
            self.ready = False
            with self.queue.changed:
                self.draining = True
                self.queue.waiting.clear()
            for slots in self.all_slots:
                slots.jobs.clear()
            self.queue.answer_all(event)

    def capture(self, held: ExitStack) -> None:
        """Capture and check every engine; `held` keeps them."""
        engines = self.pipeline.engines
        specs = specs_to_capture(self.served.methods, self.options.slots)
        engines.kept = max(engines.kept, sum(map(len, specs.values())))
        for (method, shape), several in specs.items():
            made = self.engines[method, shape] = []
            for spec in several:
                engine = engines.get(spec)
                served = self.served.methods[method]
                made.append(EngineSlots(self.pipeline, engine, served, self.served.sampling))
                held.enter_context(engine.pinned())
                self.heartbeat_at = time.monotonic()
        keep_encoder(self.pipeline)
        self.tasks.begin()

    def schedule_once(self) -> None:
        """Admit the jobs that have room, and run one engine until its next host read."""
        self.heartbeat_at = time.monotonic()
        self.tasks.do_here()
        with self.queue.changed:  # some may wait too long for another thread
            for job in [*self.queue.open_jobs]:
                self.queue.is_answered(job)
        if self.has_room:
            self.join()
        for slots, jobs in self.next_jobs().items():
            self.run_isolated(slots, partial(self.admit, slots, jobs), jobs)
        chosen = self.share.choose([slots for slots in self.all_slots if slots.jobs])
        if chosen is not None:
            began = self.clock()
            self.run_isolated(chosen, partial(self.advance, chosen))
            self.share.spent[chosen] += self.clock() - began

    def run_isolated(
        self, slots: EngineSlots, act: Callable[[], None], coming: Iterable[Job] = ()
    ) -> None:
        """Do something with all slots of an engine. Where that fails, only the image that causes it fails.

        All of them begin again, each alone, with the same tokens; an image that fails again on its own is reported as
        failed.
        """
        try:
            with self.pipeline.backend.errors():
                act()
        except Exception as error:
            jobs = [*dict.fromkeys([*slots.empty(), *coming])]
            jobs = [job for job in jobs if job in self.queue.open_jobs]
            slots.check_usable()
            if slots.batch.size == 1:
                for job in jobs:
                    self.queue.answer(job, failed(job, "decode", error))
                return
            log_error("restart", "decode", error, images=len(jobs))
            for job in jobs:
                job.alone = True
            self.queue.wait_first(jobs)

    def join(self) -> None:
        """An image that began alone begins again among others that wait for its method, if less than half is done.

        Two engines in turn would be slower for all of them; its tokens are the same in either.
        """
        with self.queue.changed:
            wanted = {(job.method, job.shape) for job in self.queue.waiting}
            for kind, (single, *shared) in self.engines.items():
                if not shared or kind not in wanted:
                    continue
                for slot, job in list(single.jobs.items()):
                    if not job.alone and single.part_done(slot) < 0.5:
                        self.queue.wait_first([single.leave(slot)])

    def next_jobs(self) -> dict[EngineSlots, list[Job]]:
        """Jobs that have a slot now; where there is nothing to do, after a while."""
        with self.queue.changed:
            can_begin = self.queue.waiting and self.has_room
            if not (can_begin or self.tasks.waits_here or self.running or self.stopping):
                self.queue.changed.wait(IDLE)
            alone = self.queue.queued == 1 and not self.running
            has_room = self.has_room

            def slots_for(job: Job) -> EngineSlots:
                return self.engines[job.method, job.shape][0 if alone or job.alone else -1]

            return self.queue.next_jobs(slots_for, lambda slots: slots.room if has_room else 0)

    def admit(self, slots: EngineSlots, jobs: list[Job]) -> None:
        began = time.monotonic()
        slots.admit(jobs)
        begun = time.monotonic()
        for job in jobs:
            if not job.admitted:  # else it began alone and begins again among others
                job.admitted, job.begun = began, begun
                self.metrics.add("request_queue_time_seconds", began - job.queued)

    def advance(self, slots: EngineSlots) -> None:
        """Run steps until the next host read, and hand on what is done."""
        batch = slots.batch
        if batch.running:
            before, seconds = batch.steps, batch.stats.steps_s
            batch.advance(until_first_done=True)
            if steps := batch.steps - before:
                each = (batch.stats.steps_s - seconds) / steps
                self.metrics.add("step_time_seconds", each, slots.served.setting.method)
        for slot, job in list(slots.jobs.items()):
            if self.queue.is_answered(job):
                slots.leave(slot)
        for slot, record in batch.finished():
            job = slots.jobs[slot]
            job.drawn = time.monotonic()
            taken = job.drawn - job.admitted
            self.image_s = 0.8 * self.image_s + 0.2 * taken if self.image_s else taken
            self.tasks.pixels.put(partial(self.tasks.paint, job, record))
            del slots.jobs[slot]  # not before: what raises finds it
        for due in slots.due_previews():
            self.tasks.pixels.put(partial(self.tasks.paint_partly, *due))
