"""A loaded model, and what it generates: requests in, images with their records out."""

from __future__ import annotations

import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lantern_hpu.backends import DeviceOptions, DraftingDefaults
from lantern_hpu.backends.base import DevicePlan, dtype_name, own_defaults
from lantern_hpu.core import Event, ImageRecord, Request, RunStats, check_valid
from lantern_hpu.decode.batch import Batch
from lantern_hpu.decode.engine import Engine, EngineCache, read_records, upload_prefix
from lantern_hpu.decode.pixels import codes_of, decode_codes, preview
from lantern_hpu.decode.spec import Spec, batch_size_for
from lantern_hpu.errors import Arg, InvalidImageError, OptionError
from lantern_hpu.files import VERSION
from lantern_hpu.methods.setting import (
    ResolveContext,
    Resolved,
    Setting,
    lacks_drafter,
    resolve,
)
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.files.load import target_of
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.model import ImageModel
from lantern_hpu.models.pictures import DiffusionPixels
from lantern_hpu.models.text.frames import no_negative
from lantern_hpu.models.text.prefix import Conditioner, Prefix, TokenConditioner
from lantern_hpu.models.transformer import Drafter
from lantern_hpu.results.images import Drawn, GenerationResult
from lantern_hpu.tree import Tree


class LoadedModel:
    """A model on a device, with the engines that draw with it."""

    def __init__(
        self,
        model: ImageModel,
        fit: DevicePlan,
        options: DeviceOptions = DeviceOptions(),
        given: PartOverrides = PartOverrides(),
    ) -> None:
        """
        Args:
            fit: how the model runs on its device, as `options` ask. given: parts in place of the model's own.
        """
        self.lock = threading.RLock()
        # Set by a callback, as in diffusers: the run ends with the images that are done
        self._interrupt = False
        self.hold(model, fit, options, given)

    def hold(
        self, model: ImageModel, fit: DevicePlan, options: DeviceOptions, given: PartOverrides
    ) -> None:
        """Draw with this model from now on."""
        self.model = model
        self.fit = fit
        self.backend = fit.backend
        self.options = options
        self.given = given
        self.load_seconds = 0.0
        self.engines = EngineCache(model, fit)
        self.diffusion: DiffusionPixels | None = None  # makes pictures where no tokenizer does

    def close(self) -> None:
        """Give the device's memory back."""
        self.engines.close()

    def check_idle(self, what: str) -> None:
        """Raise an OptionError while a run draws, which says `what` cannot be done."""
        if any(engine.pins for engine in self.engines.engines.values()):
            why = "a run that has not ended draws with it"
            raise OptionError(what, why, "end that run first, or another from_pretrained")

    def check_reloadable(self) -> None:
        """Raise an OptionError while a run draws, or where the model's files are no longer its weights."""
        self.check_idle("the model cannot be loaded again")
        if self.model.updated:
            what = "the model's files cannot stand for it"
            why = "update_weights gave it other weights than they have"
            raise OptionError(what, why, "another from_pretrained, then update_weights")

    @own_defaults()
    def update_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Draw with other weights of the target from now on, as a trainer has them after a step.

        They are copied in place, so that recordings stay; matrices in 8 bits and the processor's own form are made
        again. The drafter stays as it is: what is drawn is exact with any (docs/guides/reinforcement-learning.md).

        Args:
            state_dict: all parameters of the target, by the names and shapes of
                `from_pretrained(..., layout="plain").components["target"].state_dict()`, on any device, of any floating
                number format.

        Raises:
            WeightsError: names are missing or unknown, or shapes differ: nothing was changed.
            OptionError: a run that has not ended draws with the model.
        """
        with self.lock, self.backend.errors():
            self.check_idle("the weights cannot be updated")
            fresh, digest = target_of(self.model, state_dict)
            if self.model.quantize is not None:
                self.fit.keep_quantized([fresh], self.model.quantize)
            self.backend.transfers.flush()
            with torch.no_grad():
                self.fit.refill(self.model.target, fresh)
            self.backend.synchronize()
            self.model.note_update(digest)
            for engine in [*self.engines.engines.values()]:
                if engine.spec.ranks:  # which keeps a copy of the embedding
                    self.engines.discard(engine)


class ImageGenerator(LoadedModel):
    """What draws with a model. Everything that generates goes through it: calls, commands, servers, benchmarks.

    Engines are built when first needed and the last ones kept, so that only the first run of a kind warms up.
    """

    def resolve(self, setting: Setting | str, size: int = 1) -> Resolved:
        """What a setting draws with, for `size` images decoded together; see `methods.setting.resolve`.

        Raises:
            OptionError: it cannot be read, or no tree was tuned for `auto`.
        """
        asked = setting if isinstance(setting, Setting) else Setting.parse(setting)
        device, known = self.backend.name, self.model.fastest
        return resolve(
            asked,
            ResolveContext(
                codes=self.model.codes,
                tokens=self.model.target.config.tokens,
                has_drafter=self.model.drafter is not None,
                fastest=known.get(f"{device}:{size}") or known.get(device),
                situation=self.situation(asked.drafting, size),
                defaults=self.drafting_defaults,
                images=size,
            ),
        )

    @property
    def drafting_defaults(self) -> DraftingDefaults:
        parameters = self.model.config.target.parameters
        return self.backend.drafting_defaults(parameters, self.model.quantize)

    def situation(self, method: str, size: int) -> dict[str, Any]:
        """What decides which tree is best here: a tuned tree is found again by it."""
        return tuning_situation(self, method, size)

    def spec(
        self, requests: Sequence[Request], tree: Tree, size: int, drafter: Drafter | None = None
    ) -> Spec:
        """What fixes the graph for these requests; with a drafter in place of the model's, if given.

        Raises:
            OptionError: they cannot share one, or the tree needs a drafter and there is none.
        """
        if tree.needs_drafter and (drafter or self.model.drafter) is None:
            raise lacks_drafter(self.model.name, f"the tree {tree.name}")
        model = self.model
        return Spec.of(requests, tree, size, model.sizes(requests))

    @own_defaults()
    def warm_up(self, engine: Engine, request: Request) -> None:
        """What the device compiles for these shapes - text, prefill, step, pixels - is compiled here."""
        if engine.warm:
            return
        config = engine.target.config
        try:
            with self.backend.errors(), torch.no_grad():
                for inputs in engine.prefill_inputs:
                    prefix = self.prefix(engine, [request] * len(inputs.slot))
                    upload_prefix(engine, prefix, inputs)
                engine.warm_up(request)
                read_records(engine, {})
                if not self.backend.is_host:  # which compiles nothing for pixels
                    self.pixels(np.zeros((1, config.tokens), np.int64), config, check=False)
        except BaseException:  # it keeps no memory from a smaller batch that is tried next
            self.engines.discard(engine)
            raise

    @own_defaults()
    @torch.no_grad()
    def prefix(self, engine: Engine, requests: Sequence[Request]) -> Prefix:
        """The condition of a batch, as the engine takes it; a graph of its own where the device gathers operators."""
        self.backend.transfers.flush()
        condition = self.model.condition.sized(engine.target.config)
        if any(r.negative is not None for r in requests) and not condition.takes_negative:
            raise no_negative(self.model.name)
        return condition.rows(requests, engine.spec.guidance)

    def pixels(
        self,
        tokens: NDArray[np.int64],
        config: TransformerConfig | None = None,
        check: bool = True,
    ) -> list[Image.Image]:
        """Images of finished tokens [b, N], of the model's own size without a `config`; see `decode_codes`."""
        config = config or self.model.target.config
        return decode_codes(self.model.vq, config, self.backend, codes_of(config, tokens), check)

    @own_defaults()
    def picture(self, record: ImageRecord) -> Image.Image | None:
        """Of an image that is done; None where nothing makes it."""
        model, request = self.model, record.request
        config = model.sizes([request])
        tokens = record.token_ids[None]
        if self.diffusion is None:
            pictures = self.pixels(tokens, config)
        else:
            reader, about = model.condition.reader, ([request.prompt], [request.seed])
            with self.backend.errors():
                read = [(reader.prepared(s), reader.codes(s)) for s in request.sources if reader]
                pictures = self.diffusion(tokens, config, *about, read)
        return pictures[0] if pictures else None

    def notes(self, requests: Sequence[Request]) -> list[tuple[str, str]]:
        """What the model cannot do with these requests: see `request_notes`."""
        return request_notes(self.model.condition, requests)

    def draw(
        self,
        requests: Sequence[Request],
        setting: Resolved,
        batch_size: int | None = None,
        callback: Callable[[Event], None] | None = None,
        keep: Callable[[int, Drawn], None] | None = None,
        decode: bool = True,
        keep_invalid: bool = False,
    ) -> GenerationResult:
        """Draw any mix of requests with one tree; sampling and relaxation may differ from image to image.

        An image that is done leaves its place to the next at the next host read.

        Args:
            setting: its tree is drafted; each request has its own relaxation, and the method is a name in reports.
            keep: called with each image and its number as soon as it is there.
            decode: False leaves the pixels out.
            keep_invalid: return images that hold NaN or infinite numbers as well, with a note; otherwise they are an
                InvalidImageError, once all are drawn, whose `result` has the others.
        """
        if not requests:
            hint = Arg("prompt", "a red apple")
            raise OptionError("nothing to draw", "no prompt was given", hint)
        with self.lock:
            size = batch_size_for(len(requests), batch_size)
            spec = replace(self.spec(requests, setting.tree, size), open=len(requests) > size)
            engine, config = self.engines.get(spec), self.describe(setting)
            stats = RunStats(load_s=self.load_seconds)
            self.prepare(engine, requests, stats)
            graph_since = graph_counter(engine)
            environment = self.environment(setting)
            drawn, records = dict[int, Drawn](), list[ImageRecord]()
            for index, record in self.stream(engine, requests, stats, callback):
                with stats.adding("decode_s"):
                    one = self.drawn(record, config, environment, decode)
                records.append(record)
                if record.invalid and not keep_invalid:
                    continue
                drawn[index] = one
                if keep is not None:
                    keep(index, one)
            notes = [note for _, note in self.notes(requests)]
            notes += [f"seed {r.seed} is invalid: {r.invalid}" for r in records if r.invalid]
            result = GenerationResult(
                drawn=[drawn[index] for index in sorted(drawn)],  # all, unless it was interrupted
                timing=stats,
                graph=graph_since(),
                config=config,
                environment=self.environment(setting),
                notes=notes,
                tokenizer=self.model.vq_fingerprint,
                preview_tokens=engine.target.config.preview_tokens,
                code_grid=engine.target.config.grid,
            )
            check_valid([] if keep_invalid else records, result)
            return result

    def drawn(
        self,
        record: ImageRecord,
        config: dict[str, Any],
        environment: dict[str, Any],
        decode: bool = True,
    ) -> Drawn:
        """An image that is done with its pixels, unless `decode` is False, and all that is needed to draw it again.

        `config` is what `describe` says of the run. The record says whether its pixels are invalid.
        """
        try:
            picture = self.picture(record) if decode else None
        except InvalidImageError as error:
            picture = error.images[0]
            record.invalid = record.invalid or str(error.why)
        return Drawn(picture, record, config | record.settings, environment)

    @own_defaults()
    def prepare(self, engine: Engine, requests: Sequence[Request], stats: RunStats) -> None:
        """What is done once, before the first batch."""
        with stats.adding("text_s"), self.backend.errors(), torch.no_grad():
            self.model.condition.prepare(requests)
        with stats.adding("warmup_s"):
            self.warm_up(engine, requests[0])

    def draw_batch(
        self,
        engine: Engine,
        requests: Sequence[Request],
        stats: RunStats | None = None,
        callback: Callable[[Event], None] | None = None,
    ) -> list[ImageRecord]:
        """Images that fit into an engine's slots, or more if its spec is open; in their order: see `stream`.

        Raises:
            InvalidImageError: some were computed with NaN.
        """
        result = dict(self.stream(engine, requests, stats, callback))
        check_valid(list(result.values()))
        return [result[index] for index in range(len(requests))]

    def batch(self, engine: Engine, stats: RunStats | None = None) -> Batch:
        """Empty slots of an engine; what is spent is added to `stats`."""
        return Batch(engine, partial(self.prefix, engine), stats)

    def stream(
        self,
        engine: Engine,
        requests: Sequence[Request],
        stats: RunStats | None = None,
        callback: Callable[[Event], None] | None = None,
        most: int | None = None,
    ) -> Iterator[tuple[int, ImageRecord]]:
        """Images through the slots of an engine, each with its number as soon as it is done.

        Args:
            stats: what is spent is added here, but for what the callback and the caller take meanwhile.
            most: steps after which the run ends, done or not, on every device; no limit if not given.

        Raises:
            OptionError: another run that has not ended holds the engine.
        """
        stats = stats or RunStats()
        waiting, numbers = deque(enumerate(requests)), dict[int, int]()  # image of a slot
        show = partial(preview, self.model, engine.target.config, self.backend)
        done: list[ImageRecord] = []
        with engine.pinned():
            batch = self.batch(engine, stats)
            while (waiting or batch.running) and (most is None or batch.steps < most):
                began, text = time.perf_counter(), stats.text_s
                with self.lock:
                    if waiting and batch.free:
                        news = [waiting.popleft() for _ in batch.free[: len(waiting)]]
                        slots = batch.admit([request for _, request in news])
                        numbers.update(zip(slots, (number for number, _ in news), strict=True))
                    elif batch.running:
                        left = None if most is None else most - batch.queued
                        batch.advance(until_first_done=bool(waiting), max_steps=left)
                    finished = batch.finished()
                stats.generate_s += time.perf_counter() - began - (stats.text_s - text)
                done += [record for _, record in finished]
                if callback is not None:
                    callback(batch.event(done, len(requests), show))
                yield from ((numbers[slot], record) for slot, record in finished)
                if self._interrupt:
                    return

    def describe(self, setting: Resolved) -> dict[str, Any]:
        """What all images of a run share; with an image's own sampling and relaxation it draws the image again."""
        return describe_run(self, setting)

    def environment(self, setting: Resolved | None = None) -> dict[str, Any]:
        """What images depend on besides their settings."""
        return describe_environment(self.fit, setting)


def describe_run(generator: ImageGenerator, setting: Resolved) -> dict[str, Any]:
    """Model, weights, device and setting, by the names of PNG files and reports."""
    model = generator.model
    return {
        "model": model.source,
        "parts": {name: value for name, value in asdict(generator.given).items() if value},
        "weights": model.files,
        **setting.as_json(),
        "dtype": dtype_name(model.target.dtype),
        "quantize": model.quantize,
        "layout": generator.fit.layout,
        "kernels": generator.options.kernels,
        "device": generator.backend.name,
        "graphs": generator.fit.graphs,
    }


def tuning_situation(generator: ImageGenerator, method: str, size: int) -> dict[str, Any]:
    """Model, device and settings of a method that draws `size` images together."""
    about = generator.backend.describe()
    files = generator.model.files.items()
    drafter = [digest for name, digest in files if name.startswith("drafter")]
    return {
        "target": generator.model.fingerprint,
        "drafter": drafter[0] if drafter else None,
        "device": generator.backend.name,
        "hardware": about.get("card") or about.get("processor"),
        "dtype": dtype_name(generator.model.target.dtype),
        "quantize": generator.model.quantize,
        "layout": generator.fit.layout,
        "graphs": generator.fit.graphs,
        "method": method,
        "batch_size": size,
    }


def graph_counter(engine: Engine) -> Callable[[], dict[str, Any]]:
    """Begins to count what an engine records and replays. -> what tells the counts so far"""
    before, counted = engine.report(), engine.backend.transfers.counters()

    def since() -> dict[str, Any]:
        now = engine.backend.transfers.counters()
        return engine.report().since(before) | {
            "batch_size": engine.spec.images,
            # What the device itself counted while drawing, where it does
            "device": {name: now[name] - counted[name] for name in now},
            "kernels": engine.target.kernels.names(),
        }

    return since


def describe_environment(fit: DevicePlan, setting: Resolved | None) -> dict[str, Any]:
    """Versions, the device, and what was decided: the method too, if `auto` chose it."""
    decided = dict(fit.decided)
    if setting is not None and setting.why:
        decided["method"] = f"{setting}: {setting.why}"
    return {
        "lantern_hpu": VERSION,
        "python": platform.python_version(),
        **fit.backend.describe(),
        "decided": decided,
        "peak_memory_bytes": fit.backend.memory().peak,
    }


def request_notes(condition: Conditioner, requests: Sequence[Request]) -> list[tuple[str, str]]:
    """Each prompt, and each negative one, with what the model cannot do with it, once; a scale with its first."""
    different = {(request.prompt, request.sources): request for request in requests}
    notes = [(r.prompt, note) for r in different.values() for note in condition.request_notes(r)]
    notes = list(dict.fromkeys(notes))
    if isinstance(condition, TokenConditioner):
        negatives = dict.fromkeys(r.negative for r in requests if r.negative is not None)
        notes += [(text, note) for text in negatives for note in condition.negative_notes(text)]
        scales = {request.sampling.cfg_scale: request.prompt for request in reversed(requests)}
        for scale, text in scales.items():
            notes += [(text, note) for note in condition.frame.scale_notes(scale)]
    return notes
