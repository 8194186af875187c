"""Prompts in, images out."""

from __future__ import annotations

import json
import platform
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save
from torch import Tensor

import lantern_hpu
from lantern_hpu.backends import DeviceOptions, DraftingDefaults
from lantern_hpu.backends.base import Fit, dtype_name, own_defaults
from lantern_hpu.core import Event, ImageRecord, Request, RunStats, Sampling, size_of
from lantern_hpu.decode.batch import Batch
from lantern_hpu.decode.engine import Engine, EngineCache
from lantern_hpu.decode.pixels import codes_of, decode_codes, hidden_states, preview
from lantern_hpu.decode.spec import Spec, batch_size_for
from lantern_hpu.errors import (
    ELSEWHERE,
    Arg,
    NotHereError,
    OptionError,
    choices,
    nearest_keyword,
    require,
    words,
)
from lantern_hpu.fields import MAX_IMAGES, ImageParams, given_params, only, takes_image_params
from lantern_hpu.files import write_file
from lantern_hpu.loading import Check, device_name, load_model, write_folder
from lantern_hpu.methods.request import per_prompt, prompts_of, seeds_of
from lantern_hpu.methods.setting import (
    AUTO,
    ResolveContext,
    Resolved,
    Setting,
    lacks_drafter,
    resolve,
    setting_of,
)
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.diffusion import DiffusionPixels
from lantern_hpu.models.files.names import Given
from lantern_hpu.models.model import ImageModel, grid_by_size
from lantern_hpu.models.text.frames import no_negative
from lantern_hpu.models.text.prefix import Prefix
from lantern_hpu.models.text.tokens import TokenConditioner
from lantern_hpu.models.transformer import Drafter
from lantern_hpu.results.images import Drawn, GenerationResult, OutputType
from lantern_hpu.results.progress import Bar
from lantern_hpu.tree import Tree

if TYPE_CHECKING:
    from typing_extensions import Unpack

StepEnd = Callable[["LanternPipeline", int, int, dict[str, Any]], object]


class LanternPipeline:
    """A model on a device, ready to draw.

    Engines are built when first needed and the last ones kept, so that only the first call of a kind warms up.
    Calls from several threads wait for each other, and one within a callback of another has an engine of its own; their
    images are those of calls made one by one.
    """

    def __init__(
        self,
        model: ImageModel,
        fit: Fit,
        options: DeviceOptions = DeviceOptions(),
        given: Given = Given(),
    ) -> None:
        """
        Args:
            fit: how the model runs on its device, as `options` ask. given: parts in place of the model's own.
        """
        self.model, self.fit, self.backend = model, fit, fit.backend
        self.options, self.given, self.load_seconds = options, given, 0.0
        self.engines = EngineCache(model, fit)
        self.bar_options: dict[str, Any] = {"disable": None}  # None: shown on a terminal alone
        self.lock = threading.RLock()
        self.diffusion: DiffusionPixels | None = None  # makes pictures where no tokenizer does
        # Set by a callback, as in diffusers: the run ends with the images that are done
        self._interrupt = False

    @classmethod
    @nearest_keyword
    def from_pretrained(
        cls,
        model: str = "builtin",
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        torch_dtype: str | torch.dtype | None = None,
        drafter: str | None = None,
        graphs: str = "auto",
        kernels: str = "auto",
        given: Given = Given(),
        keep_text: str = "auto",
        quantize: str | None = None,
        pictures: bool = True,
        layout: str = "auto",
        threads: int = 0,
        size: tuple[int, int] | None = None,
        check: Check | None = None,
    ) -> LanternPipeline:
        """Load a model.

        Args:
            model: `builtin`, a known name, a Hub id, a folder or a weights file: see `zoo.find`.
            device: `auto` or a backend's name.
            dtype: `auto` or one the device offers. torch_dtype: the same, as diffusers calls it.
            drafter: a folder or a known name, in place of the model's own; short for `given=Given(drafter=...)`.
            graphs: `auto` or one of the device's graph modes.
            kernels: `auto`, the device's fused kernels where they agree with the plain ones; or `plain`.
            given: parts in place of the model's own: drafter, VQ tokenizer, text encoder, neighbours.
            keep_text: where a text encoder stays once prompts are encoded: `device`, `host` or `free`; `auto`: `host`,
                but `device` in a server where it fits.
            quantize: `int8` for the target's weights, where the device offers it.
            pictures: False if tokens are enough, so that a model without its tokenizer of pictures loads too.
            layout: of the matrices: `auto`, the fastest, or one the device offers; for training `plain`.
            threads: of the processor; 0 for the fastest number.
            size: height and width of pictures to come, refused before weights are read where they cannot be drawn.
            check: called before weights are read with what is known by then, to refuse the model.

        Raises:
            LanternError: unknown or unusable model, device, dtype or graph mode.
        """
        if torch_dtype is not None:
            require(dtype == "auto", "torch_dtype", torch_dtype, "not together with dtype")
            dtype = torch_dtype
        options = DeviceOptions(
            device=device_name(device),
            dtype=dtype_name(dtype),
            graphs=graphs,
            kernels=kernels,
            keep_text=keep_text,
            quantize=quantize,
            layout=layout,
            threads=threads,
        )
        given = given if drafter is None else replace(given, drafter=drafter)
        return cls.load(model, options, given, pictures, size, check)

    from_single_file = from_pretrained  # a weights file is a model as well

    @classmethod
    @own_defaults()
    def load(
        cls,
        name: str,
        options: DeviceOptions,
        given: Given = Given(),
        pictures: bool = True,
        size: tuple[int, int] | None = None,
        check: Check | None = None,
    ) -> LanternPipeline:
        """`from_pretrained` with the device's options in one."""
        began = time.perf_counter()
        model, fit = load_model(name, options, given, pictures, size, check)
        pipeline = cls(model, fit, options, given.resolved())
        if pictures and model.pixels_by is not None:
            pipeline.diffusion = DiffusionPixels(model.pixels_by, fit.dtype, fit.backend.device)
        pipeline.load_seconds = time.perf_counter() - began
        return pipeline

    def __getattr__(self, name: str) -> Any:
        what = f"a LanternPipeline has no attribute {name!r}"
        raise NotHereError(what, hint=ELSEWHERE.get(name, ""))

    def __repr__(self) -> str:
        settings = f"device={self.backend.name}, dtype={dtype_name(self.fit.dtype)}"
        return f"LanternPipeline({self.model.source}, {settings}, method={self.resolve(AUTO)})"

    @property
    def device(self) -> torch.device:
        return self.model.target.device

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the target's weights."""
        return self.model.target.dtype

    @property
    def components(self) -> dict[str, Any]:
        """The parts of the model; None where it has none."""
        model = self.model
        parts = {"target": model.target, "drafter": model.drafter, "vq": model.vq}
        return parts | {"condition": model.condition}

    @nearest_keyword
    def save_pretrained(self, folder: str | Path, dtype: str | torch.dtype = "auto") -> None:
        """Write a model folder that `from_pretrained` reads, from the files that this model was loaded from.

        Args:
            folder: must not exist. dtype: of the files; `auto`: as they are stored.

        Raises:
            LanternError: the folder exists or cannot be written.
        """
        write_folder(self.model.source, Path(folder), dtype_name(dtype), self.given)

    def close(self) -> None:
        """Give the device's memory back."""
        self.engines.close()

    @nearest_keyword
    def to(
        self,
        device: str | torch.device | torch.dtype | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> LanternPipeline:
        """Move to a device or a number format by loading the weights anew; nothing is done if it is there already.

        Raises:
            LanternError: as from `from_pretrained`.
        """
        if isinstance(device, torch.dtype):  # diffusers takes either in the first place
            device, dtype = None, device
        options = self.options
        if device is not None and device_name(device) != self.backend.name:
            options = replace(options, device=device_name(device), layout="auto")
        if dtype is not None and dtype_name(dtype) != dtype_name(self.fit.dtype):
            options = replace(options, dtype=dtype_name(dtype))
        return self if options == self.options else self.reload(options, self.given)

    def load_drafter(self, drafter: str) -> LanternPipeline:
        """Draft with another drafter, which `lantern-hpu train drafter` wrote or which was published.

        Args:
            drafter: folder, file or known name.

        Raises:
            LanternError: there is none, or it does not fit the model.
        """
        return self.reload(self.options, replace(self.given, drafter=drafter))

    def reload(self, options: DeviceOptions, given: Given) -> LanternPipeline:
        """Load the model anew with other options or parts; it stays as it is if that fails."""
        pictures = self.model.vq is not None or self.diffusion is not None
        with self.lock:
            if any(engine.pins for engine in self.engines.engines.values()):
                why = "a run that has not ended draws with it"
                hint = "end that run first, or another from_pretrained"
                raise OptionError("the model cannot be loaded anew", why, hint)
            other = type(self).load(self.model.source, options, given, pictures)
            kept = {"bar_options": self.bar_options, "lock": self.lock}
            self.close()
            self.__dict__.update(vars(other) | kept)
        return self

    def set_progress_bar_config(self, **options: Any) -> None:
        """Arguments of tqdm for the bar of a call, such as `disable=True`; by default a terminal alone shows one."""
        self.bar_options = {"disable": None} | options

    @nearest_keyword
    @takes_image_params
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: OutputType = "pil",
        callback_on_step_end: StepEnd | None = None,
        return_dict: bool = True,
        **params: Unpack[ImageParams],
    ) -> GenerationResult:
        """Draw `num_images_per_prompt` images of each prompt.

        Args:
            {params}
            generator: its initial seed in place of `seed`; of a list, one for each image.
            output_type: of `result.images`: "pil", "np" [B, H, W, 3] and "pt" [B, 3, H, W] of float32 in 0 to 1, or
                "tokens" [B, N], which decodes no pixels.
            callback_on_step_end: called after each host read, about once in 16 steps, with the pipeline, the decode
                steps so far, the tokens so far of all images, and {"event": `Event`}. `pipe._interrupt = True` in it
                ends the run: the result has the images that are done.
            return_dict: of no effect: `result[0]` is `result.images`, as of diffusers' tuple.

        A list of negative prompts, or of seeds, has one for each prompt, or for each image.

        Raises:
            LanternError: an option is out of range.
        """
        asked = given_params(params, "python")
        each = asked.get("num_images", 1)
        kinds = get_args(OutputType)
        require(output_type in kinds, "output_type", output_type, choices(kinds))
        prompts = prompts_of(prompt)
        negatives = per_prompt("negative_prompt", asked.get("negative_prompt"), len(prompts))
        count = len(prompts) * each
        require(
            count <= MAX_IMAGES,
            words(Arg("num_images"), "of one call"),
            count,
            f"at most {MAX_IMAGES}",
        )
        sampling = replace(self.model.sampling, **only(Sampling, asked))
        setting = self.resolve(setting_of(asked), batch_size_for(count, asked.get("batch_size")))
        size = size_of(asked.get("height"), asked.get("width"))
        seeds = iter(seeds_of(asked.get("seed"), generator, count))
        requests = [
            Request(text, next(seeds), sampling, setting.relaxation, negative, size)
            for text, negative in zip(prompts, negatives, strict=True)
            for _ in range(each)
        ]
        for text, note in self.notes(requests):
            warnings.warn(f"{text!r}: {note}", stacklevel=3)
        with self.lock, closing(Bar(**self.bar_options)) as bar:

            def show(event: Event) -> None:
                bar(event)
                if callback_on_step_end is not None:
                    callback_on_step_end(self, event.steps, event.tokens, {"event": event})

            outer, self._interrupt = self._interrupt, False  # of a call whose callback calls
            try:
                decode = output_type != "tokens"
                result = self.draw(requests, setting, asked.get("batch_size"), show, decode=decode)
            finally:
                self._interrupt = outer
        result.output_type = output_type
        return result

    # -- what is needed to draw

    def resolve(self, setting: Setting | str, size: int = 1) -> Resolved:
        """What a setting draws with, for `size` images decoded together; see `methods.setting.resolve`.

        Raises:
            OptionError: it cannot be read, or no tree was tuned for `auto`.
        """
        asked = Setting.of(setting) if isinstance(setting, str) else setting
        device, known = self.backend.name, self.model.fastest
        config = self.model.target.config
        return resolve(
            asked,
            ResolveContext(
                codes=self.model.codes,
                tokens=config.tokens,
                has_drafter=self.model.drafter is not None,
                fastest=known.get(f"{device}:{size}") or known.get(device),
                situation=self.situation(asked.drafting, size),
                defaults=self.drafting_defaults,
                images=size,
            ),
        )

    @property
    def drafting_defaults(self) -> DraftingDefaults:
        return self.backend.drafting_defaults(self.model.config.target.parameters)

    def situation(self, method: str, size: int) -> dict[str, Any]:
        """What decides which tree is best here: a tuned tree is found again by it."""
        about, files = self.backend.describe(), self.model.files
        drafter = [digest for name, digest in files.items() if name.startswith("drafter")]
        return {
            "target": self.model.fingerprint,
            "drafter": drafter[0] if drafter else None,
            "device": self.backend.name,
            "hardware": about.get("card") or about.get("processor"),
            "dtype": dtype_name(self.model.target.dtype),
            "quantize": self.options.quantize,
            "layout": self.fit.layout,
            "graphs": self.fit.graphs,
            "method": method,
            "batch_size": size,
        }

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
        return Spec.of(requests, tree, size, model.sizes(requests), model.listed_neighbours)

    @own_defaults()
    def warm_up(self, engine: Engine, request: Request) -> None:
        """What the device compiles for these shapes - text, prefill, step, pixels - is compiled here."""
        if engine.warm:
            return
        config = engine.target.config
        try:
            with self.backend.errors(), torch.no_grad():
                for entry in engine.entries:
                    prefix = self.prefix(engine, [request] * len(entry.slot))
                    engine.upload_prefix(prefix, entry)
                engine.warm_up()
                engine.result({})
                self.pixels(np.zeros((1, config.tokens), np.int64), config)
        except BaseException:  # it keeps no memory from a smaller batch that is tried next
            self.engines.discard(engine)
            raise

    @own_defaults()
    @torch.no_grad()
    def prefix(self, engine: Engine, requests: Sequence[Request]) -> Prefix:
        """The condition of a batch, as the engine takes it; a graph of its own where the device gathers operators."""
        self.backend.queue.flush()
        texts = [request.prompt for request in requests]
        condition = self.model.condition.sized(engine.target.config)
        if all(request.negative is None for request in requests):
            return condition.rows(texts, engine.spec.guidance)
        if not (isinstance(condition, TokenConditioner) and condition.takes_negative):
            raise no_negative(self.model.name)
        negatives = [request.negative for request in requests]
        return condition.rows(texts, engine.spec.guidance, negatives)

    def pixels(
        self, tokens: NDArray[np.int64], config: TransformerConfig | None = None
    ) -> list[Image.Image]:
        """Images of finished tokens [b, N], of the model's own size if `config` does not say another."""
        config = config or self.model.target.config
        return decode_codes(self.model.vq, config, self.backend, codes_of(config, tokens))

    @own_defaults()
    def picture(self, record: ImageRecord) -> Image.Image | None:
        """Of an image that is done; None where nothing makes it."""
        model, request = self.model, record.request
        grid = grid_by_size(model.target.config, request.size, model.name)
        config, tokens = model.target.config.of_grid(grid), record.token_ids[None]
        if self.diffusion is None:
            pictures = self.pixels(tokens, config)
        else:
            with self.backend.errors():
                pictures = self.diffusion(tokens, config, [request.prompt], [request.seed])
        return pictures[0] if pictures else None

    def hidden_states(
        self,
        prompt: str,
        tokens: Sequence[int] | NDArray[np.int64] = (),
        height: int | None = None,
        width: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What a diffusion stage elsewhere reads: see `decode.pixels.hidden_states`.

        Args:
            tokens: [N] of an image, as `result.tokens` has them; without any, those of the prompt alone.

        Raises:
            OptionError: the model does not read prompts as tokens, or the size is not drawn.
        """
        sizes = self.model.sizes([Request(prompt, size=size_of(height, width))])
        with self.lock, self.backend.errors():
            self.backend.queue.flush()
            return hidden_states(self.model, sizes, prompt, tokens, self.fit.keys_by_head)

    def save_states(self, result: GenerationResult, file: str | Path, force: bool = False) -> None:
        """Write tokens and hidden states of the images of a result, in their order: `0.input_ids` [T] int64 and
        `0.hidden_states` [T, H] in the model's number format, then `1.`; `images` of the metadata has the prompt, the
        seed, the grid and the number of tokens of each.

        Raises:
            LanternError: as from `hidden_states`, or the file is there or cannot be written.
        """
        tensors, images = dict[str, Tensor](), []
        for number, record in enumerate(result.records):
            size = record.request.size or (None, None)
            ids, states = self.hidden_states(record.prompt, record.token_ids, *size)
            tensors |= {f"{number}.input_ids": ids, f"{number}.hidden_states": states}
            about = {"prompt": record.prompt, "seed": record.seed, "grid": result.code_grid}
            images.append(about | {"tokens": len(record.token_ids)})
        metadata = {"model": self.model.name, "fingerprint": self.model.fingerprint}
        content = save(tensors, metadata | {"images": json.dumps(images)})
        write_file(Path(file), content, force)

    def notes(self, requests: Sequence[Request]) -> list[tuple[str, str]]:
        """Each prompt, and each negative one, with what the model cannot do with it, once; a scale with its first."""
        condition = self.model.condition
        prompts = dict.fromkeys(request.prompt for request in requests)
        notes = [(text, note) for text in prompts for note in condition.notes(text)]
        if isinstance(condition, TokenConditioner):
            negatives = dict.fromkeys(r.negative for r in requests if r.negative is not None)
            notes += [(text, note) for text in negatives for note in condition.negative_notes(text)]
            scales = {request.sampling.cfg_scale: request.prompt for request in reversed(requests)}
            for scale, text in scales.items():
                notes += [(text, note) for note in condition.frame.scale_notes(scale)]
        return notes

    # -- drawing

    def draw(
        self,
        requests: Sequence[Request],
        setting: Resolved,
        batch_size: int | None = None,
        callback: Callable[[Event], None] | None = None,
        keep: Callable[[int, Drawn], None] | None = None,
        decode: bool = True,
    ) -> GenerationResult:
        """Draw any mix of requests with one tree; sampling and relaxation may differ from image to image.

        An image that is done leaves its place to the next at the next host read.

        Args:
            setting: its tree is drafted; each request has its own relaxation, and the method is a name in reports.
            keep: called with each image and its number as soon as it is there.
            decode: False leaves the pixels out.
        """
        if not requests:
            raise OptionError(
                "nothing to draw", "no prompt was given", Arg("prompt", "a red apple")
            )
        with self.lock:
            size = batch_size_for(len(requests), batch_size)
            spec = replace(self.spec(requests, setting.tree, size), open=len(requests) > size)
            engine, config = self.engines.get(spec), self.describe(setting)
            stats = RunStats(load_s=self.load_seconds)
            self.prepare(engine, requests, stats)
            before, counted = engine.report(), self.backend.queue.counters()
            environment = self.environment(setting)
            drawn: dict[int, Drawn] = {}
            for index, record in self.stream(engine, requests, stats, callback):
                with stats.adding("decode_s"):
                    drawn[index] = self.drawn(record, config, environment, decode)
                if keep is not None:
                    keep(index, drawn[index])
            now = self.backend.queue.counters()
            return GenerationResult(
                drawn=[drawn[index] for index in sorted(drawn)],  # all, unless it was interrupted
                timing=stats,
                graph=engine.report().since(before)
                | {
                    "batch_size": engine.spec.images,
                    # What the device itself counted while drawing, where it does
                    "device": {name: now[name] - counted[name] for name in now},
                    "kernels": self.model.target.kernels.names(),
                },
                config=config,
                environment=self.environment(setting),
                notes=[note for _, note in self.notes(requests)],
                tokenizer=self.model.vq_fingerprint,
                preview_tokens=engine.target.config.preview_tokens,
                code_grid=engine.target.config.grid,
            )

    def drawn(
        self,
        record: ImageRecord,
        config: dict[str, Any],
        environment: dict[str, Any],
        decode: bool = True,
    ) -> Drawn:
        """An image that is done with its pixels, unless `decode` is False, and all that is needed to draw it again.

        `config` is what `describe` says of the run.
        """
        picture = self.picture(record) if decode else None
        return Drawn(picture, record, config | record.settings, environment)

    @own_defaults()
    def prepare(self, engine: Engine, requests: Sequence[Request], stats: RunStats) -> None:
        """What is done once, before the first batch."""
        with stats.adding("text_s"), self.backend.errors(), torch.no_grad():
            self.model.condition.prepare([request.prompt for request in requests])
        with stats.adding("warmup_s"):
            self.warm_up(engine, requests[0])

    def draw_batch(
        self,
        engine: Engine,
        requests: Sequence[Request],
        stats: RunStats | None = None,
        callback: Callable[[Event], None] | None = None,
    ) -> list[ImageRecord]:
        """Images that fit into an engine's slots, or more if its spec is open; in their order: see `stream`."""
        result = dict(self.stream(engine, requests, stats, callback))
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
        done, show = list[ImageRecord](), partial(preview, self.model, self.backend)
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
                        batch.advance(soon=bool(waiting), most=left)
                    finished = batch.finished()
                stats.generate_s += time.perf_counter() - began - (stats.text_s - text)
                done += [record for _, record in finished]
                if callback is not None:
                    callback(batch.event(done, len(requests), show))
                yield from ((numbers[slot], record) for slot, record in finished)
                if self._interrupt:
                    return

    # -- reporting

    def describe(self, setting: Resolved) -> dict[str, Any]:
        """What all images of a run share; with an image's own sampling and relaxation it draws the image again."""
        return {
            "model": self.model.source,
            "parts": {name: value for name, value in asdict(self.given).items() if value},
            "weights": self.model.files,
            **setting.as_json(),
            "dtype": dtype_name(self.model.target.dtype),
            "quantize": self.options.quantize,
            "layout": self.fit.layout,
            "kernels": self.options.kernels,
            "device": self.backend.name,
            "graphs": self.fit.graphs,
        }

    def environment(self, setting: Resolved | None = None) -> dict[str, Any]:
        """What images depend on beside their settings, and what was decided: the method too, if `auto` chose it."""
        decided = dict(self.fit.decided)
        if setting is not None and setting.why:
            decided["method"] = f"{setting}: {setting.why}"
        return {
            "lantern_hpu": lantern_hpu.__version__,
            "python": platform.python_version(),
            **self.backend.describe(),
            "decided": decided,
            "peak_memory_bytes": self.backend.memory().peak,
        }
