"""Prompts in, images out: what a user calls."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save
from torch import Tensor

from lantern_hpu.backends import DeviceOptions
from lantern_hpu.backends.base import dtype_name, own_defaults
from lantern_hpu.core import Event, Request, Sampling, size_of
from lantern_hpu.decode.pixels import hidden_states
from lantern_hpu.decode.spec import batch_size_for
from lantern_hpu.errors import (
    Arg,
    InvalidImageError,
    OptionError,
    choices,
    nearest_keyword,
    require,
    words,
)
from lantern_hpu.fields import MAX_IMAGES, given_params, only
from lantern_hpu.files import write_file
from lantern_hpu.generator import ImageGenerator
from lantern_hpu.loading import Check, device_name, load_model, write_folder
from lantern_hpu.methods.request import per_prompt, prompts_of, seeds_of
from lantern_hpu.methods.setting import AUTO, Setting
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.pictures import DiffusionPixels
from lantern_hpu.models.text.frames import check_sources
from lantern_hpu.results.images import GenerationResult, OutputType
from lantern_hpu.results.progress import Bar
from lantern_hpu.results.sources import sources_of

Source = str | Path | Image.Image  # of a picture
Sources = Source | Sequence[Source] | Sequence[Sequence[Source]]
StepEnd = Callable[["LanternPipeline", int, int, dict[str, Any]], object]


class LanternPipeline(ImageGenerator):
    """A model on a device, ready to generate, with the calls that users of diffusers know.

    Calls from several threads wait for each other, and one within a callback of another has an engine of its own; their
    images are those of calls made one by one.
    """

    bar_options: Mapping[str, Any] = {"disable": None}  # None: shown on a terminal alone

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
        given: PartOverrides = PartOverrides(),
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
            drafter: a folder or a known name, in place of the model's own, as in `given=PartOverrides(drafter=...)`.
            graphs: `auto` or one of the device's graph modes.
            kernels: `auto`, the device's fused kernels where they agree with the plain ones; or `plain`.
            given: parts in place of the model's own: drafter, VQ tokenizer, text encoder.
            keep_text: where a text encoder stays once prompts are encoded: `device`, `host` or `free`; `auto`: `host`,
                but `device` in a server where it fits.
            quantize: `int8` or `int4` for the matrices of target and drafter.
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
        given: PartOverrides = PartOverrides(),
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
        hint = "docs/guides/coming-from.md has what other libraries' names are here"
        raise AttributeError(f"a LanternPipeline has no attribute {name!r}: {hint}")

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
        self.check_reloadable()
        write_folder(self.model.source, Path(folder), dtype_name(dtype), self.given)

    @nearest_keyword
    def to(
        self,
        device: str | torch.device | torch.dtype | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> LanternPipeline:
        """Move to a device or a number format by loading the weights again; nothing is done if it is there already.

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

    def reload(self, options: DeviceOptions, given: PartOverrides) -> LanternPipeline:
        """Load the model again with other options or parts; it stays as it is if that fails."""
        pictures = self.model.vq is not None or self.diffusion is not None
        with self.lock:
            self.check_reloadable()
            other = type(self).load(self.model.source, options, given, pictures)
            self.close()
            self.hold(other.model, other.fit, other.options, other.given)
            self.diffusion = other.diffusion
            self.load_seconds = other.load_seconds
        return self

    def set_progress_bar_config(self, **options: Any) -> None:
        """Arguments of tqdm for the bar of a call, such as `disable=True`; by default a terminal alone shows one."""
        self.bar_options = {"disable": None} | options

    @nearest_keyword
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        height: int | None = None,
        width: int | None = None,
        seed: int | Sequence[int] | None = None,
        method: str | Setting = AUTO,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        batch_size: int | None = None,
        logprobs: bool = False,
        image: Sources | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: OutputType = "pil",
        callback_on_step_end: StepEnd | None = None,
        return_dict: bool = True,
        keep_invalid: bool = False,
    ) -> GenerationResult:
        """Draw `num_images_per_prompt` images of each prompt.

        Args:
            negative_prompt: for models that read one (Emu3). num_images_per_prompt: up to 100,000 in all.
            height, width: in pixels, for models with variable sizes; one alone is a square.
            seed: of the first image, up to 2^63 - 1; image i uses seed + i; -1 is random.
            method: a decoding method, or a setting METHOD[:RELAXATION][@TREE]: "scd@8", "lantern++:lambda=5:k=10".
            guidance_scale: classifier-free guidance, 1 (off) to 100.
            temperature: 0 (greedy), or 0.01 to 10. top_k: sample from so many of the most probable tokens; 0 is off.
            top_p: sample from the most probable tokens of this probability, 1e-06 to 1 (off).
            batch_size: images decoded together, at most 8 if not set; it does not change the images.
            logprobs: of lossless methods: keep the tokens' in `result.logprobs` and `result.model_logprobs`.
            image: a picture to draw from, of PIL or the path of one, for models that read some; a list is several
                sources of one image, and a list of lists has those of each prompt.
            generator: its initial seed in place of `seed`; of a list, one for each image.
            output_type: of `result.images`: "pil", "np" [B, H, W, 3] and "pt" [B, 3, H, W] of float32 in 0 to 1, or
                "tokens" [B, N], which decodes no pixels.
            callback_on_step_end: called after each host read, about once in 16 steps, with the pipeline, the decode
                steps so far, the tokens so far of all images, and {"event": `Event`}. `pipe._interrupt = True` in it
                ends the run: the result has the images that are done.
            return_dict: of no effect: `result[0]` is `result.images`, as of diffusers' tuple.
            keep_invalid: return images that were computed with NaN or infinite numbers as well, with a warning.

        A list of negative prompts, or of seeds, has one for each prompt, or for each image.

        Raises:
            LanternError: an option is out of range.
            InvalidImageError: images hold NaN or infinite numbers; `result` has the others.
        """
        asked = given_params(locals(), "python")
        each = asked.get("num_images", 1)
        together = asked.get("batch_size")
        kinds = get_args(OutputType)
        require(output_type in kinds, "output_type", output_type, choices(kinds))
        prompts = prompts_of(prompt)
        negatives = per_prompt("negative_prompt", negative_prompt, len(prompts))
        count = len(prompts) * each
        of_one_call = words(Arg("num_images_per_prompt"), "of one call")
        require(count <= MAX_IMAGES, of_one_call, count, f"at most {MAX_IMAGES}")
        sampling = replace(self.model.sampling, **only(Sampling, asked))
        setting = self.resolve(method or AUTO, batch_size_for(count, together))
        size = size_of(height, width)
        sources = sources_of(image, len(prompts))
        check_sources(self.model.config, self.model.name, len(sources[0]))
        seeds = iter(seeds_of(asked.get("seed"), generator, count))
        requests = [
            Request(text, next(seeds), sampling, setting.relaxation, other, own, source, logprobs)
            for text, other, source in zip(prompts, negatives, sources, strict=True)
            for own in [size or self.model.size_of_sources(source)]
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
                draw = partial(self.draw, decode=output_type != "tokens", keep_invalid=keep_invalid)
                result = draw(requests, setting, together, show)
            except InvalidImageError as error:
                error.result.output_type = output_type
                raise
            finally:
                self._interrupt = outer
        result.output_type = output_type
        return result

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
            self.backend.transfers.flush()
            return hidden_states(self.model, sizes, prompt, tokens, self.fit.keys_by_head)

    def save_states(self, result: GenerationResult, file: str | Path, force: bool = False) -> None:
        """Write tokens and hidden states of the images of a result, in their order: `0.input_ids` [T] int64 and
        `0.hidden_states` [T, H] in the model's number format, then `1.`; `images` of the metadata has the prompt, the
        seed, the grid and the number of tokens of each.

        Raises:
            LanternError: as from `hidden_states`, an image was drawn from pictures, or the file is there or cannot be
                written.
        """
        write_file(Path(file), states_file(self, result), force)


def states_file(pipeline: LanternPipeline, result: GenerationResult) -> bytes:
    """The content of `save_states`."""
    if any(record.request.sources for record in result.records):
        why = "states are of a prompt of words alone"
        raise OptionError("images drawn from pictures have no states to save", why)
    tensors = dict[str, Tensor]()
    images = []
    for number, record in enumerate(result.records):
        size = record.request.size or (None, None)
        ids, states = pipeline.hidden_states(record.prompt, record.token_ids, *size)
        tensors |= {f"{number}.input_ids": ids, f"{number}.hidden_states": states}
        about = {"prompt": record.prompt, "seed": record.seed, "grid": result.code_grid}
        images.append(about | {"tokens": len(record.token_ids)})
    model = pipeline.model
    metadata = {"model": model.name, "fingerprint": model.fingerprint}
    return save(tensors, metadata | {"images": json.dumps(images)})
