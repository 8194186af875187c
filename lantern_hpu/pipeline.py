"""Text in, images out."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

import lantern_hpu
from lantern_hpu import codebook, tuned
from lantern_hpu.backends import get_backend
from lantern_hpu.backends.base import Backend, named
from lantern_hpu.config import (
    AUTO,
    MAX_SEED,
    Relaxation,
    Request,
    Sampling,
    check_tunable,
    choose_method,
    require,
)
from lantern_hpu.engine import Decoded, Engine, Progress
from lantern_hpu.errors import OptionError
from lantern_hpu.graphs import check_mode
from lantern_hpu.layout import Plan
from lantern_hpu.memory import check_room, of_files
from lantern_hpu.models.condition import Prefix
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.folder import ImageModel, Placement
from lantern_hpu.models.load import load
from lantern_hpu.models.quantize import quantize as quantized
from lantern_hpu.parts import Given, resolve
from lantern_hpu.results import GenerationResult, ImageRecord
from lantern_hpu.state import Shapes
from lantern_hpu.tree import DraftTree, Tree

MAX_BATCH = 8  # images decoded together unless asked otherwise
# What the report says about time; `steps` is a count.
SPENT = (
    *("import_s", "load_s", "warmup_s", "text_s", "generate_s", "decode_s"),
    *("ms_per_step", "prefill_s", "steps_s", "steps"),
)
BLOCK = 16  # most steps between two host reads


def tree_paths(tree: Tree) -> list[list[int]]:
    """A static tree's drafts; a dynamic one's name says all there is to know."""
    return [list(path) for path in tree.paths[1:]] if isinstance(tree, DraftTree) else []


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


def to_images(pixels: Tensor) -> list[Image.Image]:
    """[B, 3, H, W] in [-1, 1] to RGB pictures."""
    array = (
        ((pixels.clamp(-1, 1) + 1) * 127.5)
        .round()
        .to(torch.uint8)
        .permute(0, 2, 3, 1)
        .cpu()
        .numpy()
    )
    return [Image.fromarray(image) for image in array]


class LanternPipeline:
    """A model on a device, ready to draw.

    Engines are built when first needed and kept, so that only the first call of a kind warms up.
    """

    def __init__(self, model: ImageModel, backend: Backend, graphs: str = "auto") -> None:
        self.model, self.backend, self.graphs = model, backend, check_mode(backend, graphs)
        self.engines: dict[Plan, Engine] = {}
        self.neighbours: dict[int, Tensor] = {}
        self.load_seconds, self.given = 0.0, Given()
        self.quantize: str | None = None

    @classmethod
    def from_pretrained(
        cls,
        model: str = "builtin",
        device: str = "auto",
        dtype: str = "auto",
        graphs: str = "auto",
        kernels: str = "auto",
        emulate: bool = False,
        given: Given = Given(),  # noqa: B008
        keep_text: str = "host",
        quantize: str | None = None,
    ) -> LanternPipeline:
        """Load a model.

        Args:
            model: `builtin`, a known name, a Hub id, a folder or a weights file: see `parts`.
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
            parts, number = resolve(model, given), backend.dtype(dtype)
            room = (named(number), keep_text, quantize, backend.quantized)
            check_room(model, lambda: of_files(parts), backend, *room)
            with backend.errors():
                chosen = backend.kernels(kernels, number)
                placement = Placement(number, backend.device, chosen, keep_text=keep_text)
                loaded = load(parts, placement)
                if quantize is not None:
                    quantized(loaded.target, quantize)
            pipeline = cls(loaded, backend, graphs)
        except BaseException:
            backend.close()
            raise
        pipeline.load_seconds, pipeline.given = time.perf_counter() - began, given.resolved()
        pipeline.quantize = quantize
        return pipeline

    def close(self) -> None:
        """Give the device back; only an emulated one must be."""
        self.engines.clear()
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
        size = self.together(len(wanted), batch_size)
        method, chosen, bounds = self.choose(method, tree, relaxation, size)
        settings = sampling or self.model.sampling
        requests = [Request(p, first + i, settings, bounds) for i, p in enumerate(wanted)]
        return self.draw(requests, chosen, method, batch_size, callback)

    def choose(
        self,
        method: str,
        tree: str | None = None,
        relaxation: Relaxation | None = None,
        size: int = 1,
    ) -> tuple[str, Tree, Relaxation]:
        """A method's name, draft tree and relaxation.

        `auto` is the fastest method measured with this model on this device; a tree or a relaxation, or
        a device without a measurement, makes it `lantern++`. The tree `auto` is the one tuned for this model
        and device; if one token a step was faster and neither method nor relaxation is given, it is `ar`.

        Args:
            size: images decoded together, for which a tree was tuned.
        """
        best: str | Tree | None = tree
        if tree == AUTO:
            method, best = self.find_tuned(method, relaxation is not None, size)
        elif method == AUTO:
            method = "lantern++"
            if tree is None and relaxation is None:
                method, best = self.model.fastest.get(self.backend.measured_as, (method, None))
                method = method if self.model.drafter else "ar"
        chosen, bounds = choose_method(method, best, relaxation)
        return method, chosen, self.fitted(bounds) if relaxation is None else bounds

    def find_tuned(self, method: str, relaxes: bool, size: int) -> tuple[str, DraftTree | None]:
        """The method and the tree that `lantern_hpu.tune` found best for so many images together.

        Raises:
            OptionError: it found none yet, or the method takes none.
        """
        drafting = "lantern++" if method == AUTO else method
        check_tunable(drafting)
        choice = tuned.find(self.situation(drafting, size))
        if choice.ar_wins and method == AUTO and not relaxes:
            return "ar", None
        return drafting, choice.tree

    def situation(self, method: str, size: int) -> tuned.Situation:
        """What decides which tree is best: a tuned tree is found again by it."""
        model, about = self.model, self.backend.describe()
        drafter = [digest for name, digest in model.files.items() if name.startswith("drafter")]
        return {
            "target": model.fingerprint,
            "drafter": drafter[0] if drafter else None,
            "device": self.backend.measured_as,
            "hardware": about.get("card") or about.get("processor"),
            "dtype": named(model.target.head.weight.dtype),
            "quantize": self.quantize,
            "graphs": self.graphs,
            "method": method,
            "batch_size": size,
        }

    def fitted(self, relaxation: Relaxation) -> Relaxation:
        """A published setting with no more neighbours than this codebook has."""
        return replace(relaxation, k=min(relaxation.k, self.model.target.config.vocab_size - 1))

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
        engine, size = self.engine(requests, tree, batch_size)
        timing = dict.fromkeys(SPENT, 0.0) | {"load_s": self.load_seconds}
        began = time.perf_counter()
        with self.backend.errors(), torch.no_grad():
            self.model.condition.prepare([request.prompt for request in requests])
        timing["text_s"] = time.perf_counter() - began
        began = time.perf_counter()
        self.warm_up(engine, requests[0])
        timing["warmup_s"] = time.perf_counter() - began
        before, counted = engine.report(), self.backend.counters()
        images: list[Image.Image] = []
        records: list[ImageRecord] = []
        tokens: list[NDArray[np.int64]] = []
        batches = [requests[i : i + size] for i in range(0, len(requests), size)]
        for index, batch in enumerate(batches):
            decoded = self.draw_batch(engine, batch, size, timing, callback, (index, len(batches)))
            tokens.append(decoded.tokens[: len(batch)])
            began = time.perf_counter()
            images += self.pixels(tokens[-1])
            timing["decode_s"] += time.perf_counter() - began
            records += self.records(batch, decoded)
        timing["ms_per_step"] = 1000 * timing["steps_s"] / max(timing["steps"], 1)
        after = engine.report()
        now = self.backend.counters()
        graph = asdict(after) | {
            "host_reads": after.host_reads - before.host_reads,
            "replays": after.replays - before.replays,
            "batch_size": size,
            # What the device itself counted while drawing, where it does
            "device": {name: now[name] - counted[name] for name in now},
            "kernels": self.model.target.kernels.names(),
        }
        return GenerationResult(
            images,
            records,
            np.concatenate(tokens),
            {name: round(value, 4) for name, value in timing.items()},
            graph,
            [
                {"sampling": asdict(r.sampling), "relaxation": asdict(r.relaxation)}
                for r in requests
            ],
            self.describe(tree, method),
            self.environment(),
            [note for _, note in self.notes(requests)],
        )

    def warm_up(self, engine: Engine, request: Request) -> None:
        """Whatever the device compiles for these shapes - text, prefill, step, pixels - is compiled here."""
        if engine.warm:
            return
        config, shapes = self.model.target.config, engine.plan.shapes
        with self.backend.errors(), self.backend.warming_up(), torch.no_grad():
            self.backend.flush()
            engine.place(self.prefix(engine, [request] * shapes.images))
            engine.warm_up()
            engine.result()
            self.pixels(np.zeros((1, config.tokens), np.int64))

    def prefix(self, engine: Engine, requests: Sequence[Request]) -> Prefix:
        """The condition of a batch, as the engine takes it."""
        texts = [request.prompt for request in requests]
        return self.model.condition.rows(texts, engine.plan.shapes.guidance)

    def notes(self, requests: Sequence[Request]) -> list[tuple[str, str]]:
        """Each prompt with what the model cannot do with it, once."""
        prompts = dict.fromkeys(request.prompt for request in requests)
        return [(text, note) for text in prompts for note in self.model.condition.notes(text)]

    def draw_batch(
        self,
        engine: Engine,
        batch: Sequence[Request],
        size: int,
        timing: dict[str, float] | None = None,
        callback: Callable[[Event], None] | None = None,
        place: tuple[int, int] = (0, 1),
    ) -> Decoded:
        """One batch through text encoding and the engine; a short batch is padded with its last image.

        Args:
            timing: what is spent is added here. place: number of the batch, and how many there are.
        """
        timing = dict.fromkeys(SPENT, 0.0) if timing is None else timing
        began = time.perf_counter()
        self.backend.flush()
        padded = [*batch, *[batch[-1]] * (size - len(batch))]
        with torch.no_grad():
            prefix = self.prefix(engine, padded)
        text = time.perf_counter()
        called = 0.0  # seconds in the callback are not ours
        for progress in engine.run(prefix, padded):
            if callback is not None:
                start = time.perf_counter()
                callback(self.event(engine, progress, len(batch), place))
                called += time.perf_counter() - start
        decoded = engine.result()
        timing["text_s"] += text - began
        timing["generate_s"] += time.perf_counter() - text - called
        timing["prefill_s"] += engine.timing.prefill
        timing["steps_s"] += engine.timing.steps
        timing["steps"] += engine.timing.count
        return decoded

    def engine(
        self, requests: Sequence[Request], tree: Tree, batch_size: int | None
    ) -> tuple[Engine, int]:
        """The engine that serves these requests, and the images it decodes together."""
        if batch_size is not None:
            require(batch_size >= 1, "--batch-size", batch_size, "1 or more")
        if tree.depth and self.model.drafter is None:
            why = f"{self.model.name} has no drafter"
            raise OptionError("only --method ar can draw", why, "--method ar, or --drafter FOLDER")
        size = self.together(len(requests), batch_size)
        plan = self.plan(requests, tree, size)
        if plan not in self.engines:
            self.engines[plan] = self.make_engine(plan, self.graphs)
        return self.engines[plan], size

    @staticmethod
    def together(count: int, batch_size: int | None) -> int:
        """How many of so many images are decoded together."""
        # Ten images in batches of at most eight are two batches of five, not eight and a padded two.
        return batch_size or math.ceil(count / max(1, math.ceil(count / MAX_BATCH)))

    def make_engine(self, plan: Plan, graphs: str, drafter: Drafter | None = None) -> Engine:
        """An engine of its own, for looking into; `drafter` in place of the model's."""
        model, near = self.model, self.nearest(plan.neighbours)
        draft = model.drafter if drafter is None else drafter
        return Engine(model.target, draft, plan, self.backend, graphs, near)

    def plan(self, requests: Sequence[Request], tree: Tree, size: int) -> Plan:
        """What the requests need from a step; whatever none of them uses is left out."""
        samplings = [r.sampling for r in requests]
        relaxed = [r.relaxation for r in requests]
        active = [r for r in relaxed if r.lends]
        vocabulary = self.model.target.config.vocab_size
        residuals = {r.residual for r in active} or {"sound"}
        if len(residuals) > 1:
            raise OptionError("two residuals in one batch", "the residual is part of the graph")
        most = max((r.k for r in active), default=0)
        require(
            most < vocabulary, "--relax-k", most, f"0 to {vocabulary - 1}, the neighbours of a code"
        )
        children = tree.max_children
        require(
            children <= vocabulary, "--tree", tree.name, f"at most {vocabulary} children of a node"
        )
        limited = [s.top_k for s in samplings if 0 < s.top_k < vocabulary and not s.greedy]
        return Plan(
            Shapes(size, any(s.cfg_scale != 1 for s in samplings), tree, BLOCK),
            max_top_k=max(limited, default=0),
            use_top_p=any(s.top_p < 1 and not s.greedy for s in samplings),
            use_greedy=any(s.greedy for s in samplings),
            use_sampled=not all(s.greedy for s in samplings),
            # The published residual looks one neighbour further than the bound.
            neighbours=min(most + 1, vocabulary - 1) if most else 0,
            annealed=any(r.weighs for r in relaxed),
            residual=residuals.pop(),
        )

    def nearest(self, k: int) -> Tensor | None:
        """The neighbour table, or None when nothing is relaxed."""
        if not k:
            return None
        if k not in self.neighbours:
            table = self.model.neighbours
            near = (
                codebook.kept_nearest(self.model.codebook, k)
                if table is None
                else codebook.read_table(table, k)
            )
            self.neighbours[k] = near.to(self.backend.device)
        return self.neighbours[k]

    def pixels(self, tokens: NDArray[np.int64]) -> list[Image.Image]:
        """Images of finished tokens [b, N], one at a time to keep memory low."""
        images: list[Image.Image] = []
        for row in torch.from_numpy(tokens.astype(np.int32)).split(1):
            self.backend.flush()  # the same graph for each image
            with torch.no_grad():
                images += to_images(self.model.vq.decode_codes(row.to(self.backend.device)))
        return images

    def event(
        self, engine: Engine, progress: Progress, count: int, place: tuple[int, int]
    ) -> Event:
        rows, columns = self.model.target.config.grid
        known = progress.known[:count]
        gained = sum(min(k, progress.total) - 1 for k in known) / count

        def preview() -> list[Image.Image]:
            return self.preview(engine.partial()[:count], known)

        rate = gained / progress.step if progress.step else 0.0
        return Event(*place, min(min(known) // columns, rows), rows, rate, preview)

    def preview(self, tokens: NDArray[np.int64], known: Sequence[int]) -> list[Image.Image]:
        """Images of the whole rows known so far; the rest is grey."""
        rows, columns = self.model.target.config.grid
        full = [min(k // columns, rows) for k in known]
        held = tokens.copy()
        for image, count in enumerate(full):
            # What lies below is not decided: repeat the last known token so that the seam stays clean.
            held[image, count * columns :] = held[image, max(count * columns - 1, 0)]
        images = self.pixels(held)
        for picture, count in zip(images, full, strict=True):
            edge = picture.height * count // rows
            picture.paste((200, 200, 200), (0, edge, picture.width, picture.height))
        return images

    def records(self, batch: Sequence[Request], decoded: Decoded) -> Iterator[ImageRecord]:
        total = self.model.target.config.tokens
        for i, request in enumerate(batch):
            steps = decoded.steps[i]
            rate = round((total - 1) / max(steps, 1), 4)
            yield ImageRecord(
                None,
                request.prompt,
                request.seed,
                total,
                steps,
                rate,
                decoded.accepted[i],
                decoded.relaxed[i],
            )

    def describe(self, tree: Tree, method: str) -> dict[str, Any]:
        """Settings that all images of a run share; with an image's own they draw it again."""
        return {
            "model": self.model.source,
            "parts": {name: value for name, value in asdict(self.given).items() if value},
            "weights": self.model.files,
            "method": method,
            "tree": tree.name,
            "tree_paths": tree_paths(tree),
            "dtype": named(self.model.target.head.weight.dtype),
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
