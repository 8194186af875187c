"""Prompts in, images out."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import lantern_hpu
from lantern_hpu.backends import get_backend
from lantern_hpu.backends.base import Backend, named
from lantern_hpu.choice import Choice, fitted, tuned
from lantern_hpu.config import AUTO, MAX_SEED, Request, Sampling, choose_method, in_turn
from lantern_hpu.decode.batch import Batch
from lantern_hpu.decode.engine import Decoded, Engine, EngineCache, GraphReport
from lantern_hpu.decode.memory import check_room
from lantern_hpu.decode.spec import Spec, together
from lantern_hpu.errors import OptionError, require
from lantern_hpu.graphs import check_mode
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.files.parts import Given
from lantern_hpu.models.model import ImageModel, Placement
from lantern_hpu.models.quantize import quantize as quantize_weights
from lantern_hpu.models.text.prefix import Prefix
from lantern_hpu.pictures import decode_pixels, preview
from lantern_hpu.relaxation import Relaxation
from lantern_hpu.results import GenerationResult, ImageRecord, RunTiming
from lantern_hpu.tree import DraftTree, Tree
from lantern_hpu.zoo.resolve import resolve


@dataclass
class Event:
    """A progress event, for a callback.

    Attributes:
        rows, total_rows: image rows known in the slowest image of the batch.
        tokens_per_step: mean over the batch so far.
        preview: draws what is known so far, grey where nothing is; a host read.
    """

    batch: int
    batches: int
    rows: int
    total_rows: int
    tokens_per_step: float
    preview: Callable[[], list[Image.Image]]


class LanternPipeline:
    """A model on a device, ready to draw.

    Engines are built when first needed and the last ones kept, so that only the first call of a kind warms up.
    """

    def __init__(
        self,
        model: ImageModel,
        backend: Backend,
        graphs: str = "auto",
        *,
        given: Given = Given(),
        quantize: str | None = None,
    ) -> None:
        self.model, self.backend, self.graphs = model, backend, check_mode(backend, graphs)
        self.engines = EngineCache(model, backend, self.graphs)
        self.given, self.quantize, self.load_seconds = given, quantize, 0.0

    @classmethod
    def from_pretrained(
        cls,
        model: str = "builtin",
        *,
        device: str = "auto",
        dtype: str = "auto",
        graphs: str = "auto",
        kernels: str = "auto",
        emulate: bool = False,
        given: Given = Given(),
        keep_text: str = "host",
        quantize: str | None = None,
    ) -> LanternPipeline:
        """Load a model.

        Args:
            model: `builtin`, a known name, a Hub id, a folder or a weights file: see `zoo.resolve`.
            device: `auto` or a backend's name.
            dtype: `auto` or one the device offers.
            graphs: `auto` or one of the device's graph modes.
            kernels: `auto`, the device's fused kernels where they agree with the plain ones; or `plain`.
            emulate: stand in for a device that is not here (`hpu`); `close` ends that.
            given: parts in place of the model's own: drafter, VQ tokenizer, text encoder, neighbours.
            keep_text: where a text encoder stays once prompts are encoded: `device`, `host` or `free`.
            quantize: `int8` for the target's weights, where the device offers it.

        Raises:
            LanternError: unknown or unusable model, device, dtype or graph mode.
        """
        began = time.perf_counter()
        backend = get_backend(device, graphs, emulate)
        try:
            check_mode(backend, graphs)
            if quantize is not None:
                backend.check_quantized(quantize)
            opened, number = open_model(resolve(model, given)), backend.dtype(dtype)
            check_room(model, opened.config, backend, named(number), keep_text, quantize)
            with backend.errors():
                chosen = backend.kernels(kernels, number)
                place = Placement(number, backend.device, chosen, keep_text=keep_text)
                loaded = opened.load(place)
                if quantize is not None:
                    quantize_weights(loaded.target, quantize)
            pipeline = cls(loaded, backend, graphs, given=given.resolved(), quantize=quantize)
            pipeline.load_seconds = time.perf_counter() - began
            return pipeline
        except BaseException:
            backend.close()
            raise

    def close(self) -> None:
        """Give the device back; only an emulated one must be."""
        self.engines.shrink(0)
        self.backend.close()

    def __call__(
        self,
        prompt: str | Sequence[str],
        *,
        num_images: int = 1,
        seed: int = 0,
        generator: torch.Generator | None = None,
        method: str = AUTO,
        tree: str | None = None,
        relaxation: Relaxation | None = None,
        sampling: Sampling | None = None,
        batch_size: int | None = None,
        callback: Callable[[Event], None] | None = None,
    ) -> GenerationResult:
        """Draw `num_images` of each prompt.

        Args:
            seed: of the first image; each further image takes the next number.
            generator: its initial seed is used instead of `seed`.
            method: see `choose`. tree: name, file or `auto`, for methods that draft.
            relaxation: for relaxed methods.
            sampling: the model's defaults if not given.
            batch_size: images decoded together, at most 8 if not given. It does not change the images.
            callback: called after each host read.

        Raises:
            LanternError: an option is out of range.
        """
        require(num_images >= 1, "--num-images", num_images, "1 or more")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        first = generator.initial_seed() % (MAX_SEED + 1) if generator is not None else seed
        wanted = [text for text in prompts for _ in range(num_images)]
        chosen = self.choose(method, tree, relaxation, together(len(wanted), batch_size))
        settings = sampling or self.model.sampling
        requests = in_turn(wanted, range(len(wanted)), first, settings, chosen.relaxation)
        return self.draw(requests, chosen.tree, chosen.method, batch_size, callback)

    # -- what is needed to draw

    def choose(
        self,
        method: str,
        tree: str | None = None,
        relaxation: Relaxation | None = None,
        size: int = 1,
    ) -> Choice:
        """A method's name, draft tree and relaxation, where some are left to us.

        `auto` is the fastest method measured with this model on this device; a tree or a relaxation, or
        a device without a measurement, makes it `lantern++`. The tree `auto` is the one tuned for this model
        and device; if one token a step was faster and neither method nor relaxation is given, it is `ar`.

        Args:
            size: images decoded together, for which a tree was tuned.
        """
        best: str | Tree | None = tree
        if tree == AUTO:
            method, best = tuned(self.situation(method, size), method, relaxation is not None)
        elif method == AUTO:
            method = "lantern++"
            if tree is None and relaxation is None:
                method, best = self.model.fastest.get(self.backend.measured_as, (method, None))
                method = method if self.model.drafter else "ar"
        chosen, bounds = choose_method(method, best, relaxation)
        return Choice(method, chosen, relaxation or fitted(bounds, self.model))

    def situation(self, method: str, size: int) -> dict[str, Any]:
        """What decides which tree is best here: a tuned tree is found again by it."""
        about, files = self.backend.describe(), self.model.files
        drafter = [digest for name, digest in files.items() if name.startswith("drafter")]
        return {
            "target": self.model.fingerprint,
            "drafter": drafter[0] if drafter else None,
            "device": self.backend.measured_as,
            "hardware": about.get("card") or about.get("processor"),
            "dtype": named(self.model.target.dtype),
            "quantize": self.quantize,
            "graphs": self.graphs,
            "method": method,
            "batch_size": size,
        }

    def spec(self, requests: Sequence[Request], tree: Tree, size: int) -> Spec:
        """What fixes the graph for these requests.

        Raises:
            OptionError: they cannot share one, or the tree needs a drafter and there is none.
        """
        if tree.depth and self.model.drafter is None:
            why = f"{self.model.name} has no drafter"
            raise OptionError("only --method ar can draw", why, "--method ar, or --drafter FOLDER")
        model = self.model
        return Spec.of(requests, tree, size, model.target.config, model.listed_neighbours)

    def warm_up(self, engine: Engine, request: Request) -> None:
        """Whatever the device compiles for these shapes - text, prefill, step, pixels - is compiled here."""
        if engine.warm:
            return
        tokens, images = self.model.target.config.tokens, engine.spec.images
        with self.backend.errors(), self.backend.warming_up(), torch.no_grad():
            self.backend.flush()
            engine.place(self.prefix(engine, [request] * images))
            engine.warm_up()
            engine.result()
            self.pixels(np.zeros((1, tokens), np.int64))

    def prefix(self, engine: Engine, requests: Sequence[Request]) -> Prefix:
        """The condition of a batch, as the engine takes it."""
        texts = [request.prompt for request in requests]
        return self.model.condition.rows(texts, engine.spec.guidance)

    def pixels(self, tokens: NDArray[np.int64]) -> list[Image.Image]:
        """Images of finished tokens [b, N]."""
        return decode_pixels(self.model, self.backend, tokens)

    def notes(self, requests: Sequence[Request]) -> list[tuple[str, str]]:
        """Each prompt with what the model cannot do with it, once."""
        prompts = dict.fromkeys(request.prompt for request in requests)
        return [(text, note) for text in prompts for note in self.model.condition.notes(text)]

    # -- drawing

    def draw(
        self,
        requests: Sequence[Request],
        tree: Tree,
        method: str,
        batch_size: int | None = None,
        callback: Callable[[Event], None] | None = None,
    ) -> GenerationResult:
        """Draw any mix of requests with one tree; settings may differ from image to image.

        Args:
            method: only a name for reports; tree and relaxation decide.
        """
        if not requests:
            raise OptionError("nothing to draw", "no prompt was given", '--prompt "a red apple"')
        size = together(len(requests), batch_size)
        engine = self.engines.get(self.spec(requests, tree, size))
        timing = RunTiming(load_s=self.load_seconds)
        self.prepare(engine, requests, timing)
        before, counted = engine.report(), self.backend.counters()
        images: list[Image.Image] = []
        records: list[ImageRecord] = []
        tokens: list[NDArray[np.int64]] = []
        batches = [requests[i : i + size] for i in range(0, len(requests), size)]
        for index, batch in enumerate(batches):
            decoded = self.draw_batch(engine, batch, timing, callback, (index, len(batches)))
            tokens.append(decoded.tokens[: len(batch)])
            began = time.perf_counter()
            images += self.pixels(tokens[-1])
            timing.decode_s += time.perf_counter() - began
            records += self.records(batch, decoded)
        return GenerationResult(
            images=images,
            records=records,
            tokens=np.concatenate(tokens),
            timing=timing,
            graph=self.graph_report(engine, before, counted),
            settings=[
                {"sampling": asdict(r.sampling), "relaxation": r.relaxation.as_json()}
                for r in requests
            ],
            config=self.describe(tree, method),
            environment=self.environment(),
            notes=[note for _, note in self.notes(requests)],
        )

    def prepare(self, engine: Engine, requests: Sequence[Request], timing: RunTiming) -> None:
        """Whatever is done once, before the first batch."""
        began = time.perf_counter()
        with self.backend.errors(), torch.no_grad():
            self.model.condition.prepare([request.prompt for request in requests])
        timing.text_s = time.perf_counter() - began
        began = time.perf_counter()
        self.warm_up(engine, requests[0])
        timing.warmup_s = time.perf_counter() - began

    def draw_batch(
        self,
        engine: Engine,
        requests: Sequence[Request],
        timing: RunTiming | None = None,
        callback: Callable[[Event], None] | None = None,
        place: tuple[int, int] = (0, 1),
    ) -> Decoded:
        """One batch through text encoding and the engine; a short batch is padded with its last image.

        Args:
            timing: what is spent is added here. place: number of the batch, and how many there are.
        """
        timing = RunTiming() if timing is None else timing
        began = time.perf_counter()
        self.backend.flush()
        padded = [*requests, *[requests[-1]] * (engine.spec.images - len(requests))]
        with torch.no_grad():
            prefix = self.prefix(engine, padded)
            text = time.perf_counter()
            called = 0.0  # seconds in the callback are not ours
            batch = Batch(engine, prefix, padded)
            for _ in batch.run():
                if callback is not None:
                    start = time.perf_counter()
                    callback(self.event(batch, len(requests), place))
                    called += time.perf_counter() - start
        decoded = batch.result()
        timing.text_s += text - began
        timing.generate_s += time.perf_counter() - text - called
        timing.prefill_s += batch.timing.prefill
        timing.steps_s += batch.timing.steps
        timing.steps += batch.timing.count
        return decoded

    def event(self, batch: Batch, count: int, place: tuple[int, int]) -> Event:
        """How far the first `count` images of a batch are."""
        rows, columns = self.model.target.config.grid
        known, steps = batch.known[:count], batch.timing.count
        gained = sum(min(k, batch.total) - 1 for k in known) / count

        def draw() -> list[Image.Image]:
            return preview(self.model, self.backend, batch.engine.partial()[:count], known)

        rate = gained / steps if steps else 0.0
        return Event(*place, min(min(known) // columns, rows), rows, rate, draw)

    # -- reporting

    def records(self, requests: Sequence[Request], decoded: Decoded) -> Iterator[ImageRecord]:
        total = self.model.target.config.tokens
        for i, request in enumerate(requests):
            steps = decoded.steps[i]
            yield ImageRecord(
                file=None,
                prompt=request.prompt,
                seed=request.seed,
                tokens=total,
                steps=steps,
                tokens_per_step=round((total - 1) / max(steps, 1), 4),
                accepted_by_depth=decoded.accepted[i],
                relaxed_accepts=decoded.relaxed[i],
            )

    def graph_report(
        self, engine: Engine, before: GraphReport, counted: dict[str, int]
    ) -> dict[str, Any]:
        """What runners, host and device did since; `counted` by the device."""
        after, now = engine.report(), self.backend.counters()
        return asdict(after) | {
            "host_reads": after.host_reads - before.host_reads,
            "replays": after.replays - before.replays,
            "batch_size": engine.spec.images,
            # What the device itself counted while drawing, where it does
            "device": {name: now[name] - counted[name] for name in now},
            "kernels": self.model.target.kernels.names(),
        }

    def describe(self, tree: Tree, method: str) -> dict[str, Any]:
        """Settings that all images of a run share; with an image's own they draw it again."""
        # A dynamic tree's name says all there is to know.
        paths = tree.paths[1:] if isinstance(tree, DraftTree) else ()
        return {
            "model": self.model.source,
            "parts": {name: value for name, value in asdict(self.given).items() if value},
            "weights": self.model.files,
            "method": method,
            "tree": tree.name,
            "tree_paths": [list(path) for path in paths],
            "dtype": named(self.model.target.dtype),
            "quantize": self.quantize,
            "device": self.backend.name,
            "graphs": self.graphs,
        }

    def environment(self) -> dict[str, Any]:
        return {
            "lantern_hpu": lantern_hpu.__version__,
            "python": platform.python_version(),
            **self.backend.describe(),
            "peak_memory_bytes": self.backend.memory().peak,
        }
