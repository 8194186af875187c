"""diffusers' `GlmImagePipeline` with its autoregressive stage drawn here: `accelerate(pipe, method="scd@8")`."""

from __future__ import annotations

import time
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.backends.base import dtype_name
from lantern_hpu.bridges.transformers import (
    PROMPT,
    draw_framed,
    generate,
    glm_prompts,
    not_honoured,
)
from lantern_hpu.core import Sampling
from lantern_hpu.errors import DeviceError, OptionError, choices, needing
from lantern_hpu.models.pictures import GlmImageReader
from lantern_hpu.pipeline import LanternPipeline

# What three programs draw GLM-Image's tokens with; "file" is what generation_config.json says
SAMPLINGS: dict[str, dict[str, Any]] = {
    "file": {},
    "sglang": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "vllm-omni": {"temperature": 0.9, "top_k": 16512, "top_p": 0.75},
}


def accelerate(
    pipe: Any,
    method: str = "auto",
    *,
    folder: str | None = None,
    sampling: str = "file",
    batch_size: int | None = None,
    logprobs: bool = False,
) -> Any:
    """Draw the first stage of a `GlmImagePipeline` here from now on; its calls stay as they are.

    `pipe.lantern_report` has what the last call took: seconds of the first stage and of all others, tokens, steps,
    and the bytes of weights that are shared with the pipeline (`shared_bytes`) and that are not (`own_bytes`).

    Args:
        method: a decoding method as of `LanternPipeline`: "scd@8".
        folder: of the model, where the pipeline was loaded with `vision_language_encoder=None`, so that the stage's
            weights are read once.
        sampling: "file", as generation_config.json says; or what "sglang" or "vllm-omni" draw with.
        batch_size: prompts decoded together.
        logprobs: keep those of the first stage's tokens [B, N] in the report.

    Returns the pipeline.

    Raises:
        LanternError: another pipeline, or an argument that cannot be honoured.
    """
    with needing("diffusers", "the pipeline is one of its", "glm"):
        known = import_module("diffusers").GlmImagePipeline
    if not isinstance(pipe, known):
        what = f"{type(pipe).__name__} cannot be accelerated"
        raise OptionError(what, "no stage of it draws tokens one by one", "GlmImagePipeline")
    if sampling not in SAMPLINGS:
        raise OptionError(f"sampling is {sampling!r}", hint=choices(SAMPLINGS, sampling))
    encoder = getattr(pipe.vision_language_encoder, "_orig_mod", pipe.vision_language_encoder)
    if isinstance(encoder, FolderStage):
        encoder = None
    if (encoder is None) == (folder is None):
        why = (
            "it is of a pipeline that was loaded with vision_language_encoder=None, and of no other"
        )
        raise OptionError("folder is missing" if encoder is None else "folder is given", why)
    report: dict[str, Any] = {}
    how: dict[str, Any] = {"method": method, "batch_size": batch_size, "report": report}
    how["logprobs"] = logprobs
    if encoder is None:
        pipe.vision_language_encoder = FolderStage(pipe, str(folder), SAMPLINGS[sampling], how)
    else:
        how |= {"custom_generate": generate, **SAMPLINGS[sampling]}
        encoder.generate = partial(type(encoder).generate, encoder, **how)
        encoder.get_image_features = partial(image_features, encoder)
        encoder.get_image_tokens = partial(image_tokens, encoder)
    kind = type(pipe)
    if not issubclass(kind, Timed):
        pipe.__class__ = type(kind.__name__, (Timed, kind), {"__module__": kind.__module__})
    pipe.lantern_report = report
    return pipe


class Timed:
    """A pipeline whose report has the seconds of its stages."""

    lantern_report: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.lantern_report.clear()
        began = time.perf_counter()
        result = super().__call__(*args, **kwargs)  # type: ignore[misc]
        whole = time.perf_counter() - began
        first = self.lantern_report.pop("seconds", 0.0)
        self.lantern_report |= {"first_stage_s": first, "other_stages_s": whole - first}
        return result


def image_features(encoder: Any, *args: Any, **kwargs: Any) -> Any:
    """As the encoder's own, [h w, C] of each picture as diffusers reads them; of later releases they are [C, h, w]."""
    features = type(encoder).get_image_features(encoder, *args, **kwargs)
    parts = features.pooler_output
    features.pooler_output = [p.flatten(1).T if p.dim() == 3 else p for p in parts]
    return features


def image_tokens(encoder: Any, features: Tensor, grids: Tensor) -> Tensor:
    """Codes [n] of pictures by features [n, C], as the encoder's own finds them."""
    vqmodel = encoder.model.vqmodel
    sizes = [(int(h), int(w)) for _, h, w in grids]
    parts = features.split([h * w for h, w in sizes])
    maps = [part.T.unflatten(1, size)[None] for part, size in zip(parts, sizes, strict=True)]
    return torch.cat([vqmodel.encode(one).image_tokens.flatten() for one in maps])


class FolderStage:
    """Takes the place of a pipeline's `vision_language_encoder`, with the weights of a folder."""

    def __init__(
        self, pipe: Any, folder: str, sampling: dict[str, Any], how: dict[str, Any]
    ) -> None:
        self.device, self.dtype = pipe._execution_device, pipe.transformer.dtype
        place = {"device": self.device, "dtype": dtype_name(self.dtype)}
        self.lantern = LanternPipeline.from_pretrained(folder, pictures=False, **place)
        own = self.lantern.model.sampling
        self.sampling = Sampling(**{**vars(own), **sampling})
        self.how = how

    def to(self, *_: Any, **__: Any) -> FolderStage:
        return self

    @property
    def reader(self) -> GlmImageReader:
        reader = self.lantern.model.condition.reader
        if not isinstance(reader, GlmImageReader):
            raise OptionError("the folder's first stage reads no pictures")
        return reader

    def get_image_features(self, pixel_values: Tensor, grids: Tensor) -> Any:
        """Features [h w, C] of pictures whose patches [n, 3 p p] lie one behind another."""
        side = self.reader.config.patch
        parts = pixel_values.split(grids.prod(-1).tolist())
        sizes = [(int(h), int(w)) for _, h, w in grids]
        maps = [
            part.view(h, w, 3, side, side).permute(2, 0, 3, 1, 4).reshape(1, 3, h * side, w * side)
            for part, (h, w) in zip(parts, sizes, strict=True)
        ]
        found = [self.reader.features(one.float()).flatten(0, 1) for one in maps]
        return SimpleNamespace(pooler_output=found)

    def get_image_tokens(self, features: Tensor, grids: Tensor) -> Tensor:
        return self.reader.nearest(features)

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, max_new_tokens: int, do_sample: bool = True, **given: Any
    ) -> Tensor:
        """As the encoder's own, of the one call that the pipeline makes: [R, P + N + 1]."""
        for name in given.keys() - set(PROMPT):
            raise not_honoured(name, "the pipeline does not give it")
        if input_ids.device.type != self.lantern.device.type:
            what = f"the pipeline is on {input_ids.device.type}, its first stage on {self.device}"
            raise DeviceError(what, hint="accelerate(pipe, ...) behind pipe.to(...)")
        rows, size = glm_prompts(self, input_ids, given)
        sampling = self.sampling if do_sample else Sampling(1.0, 0.0)
        drawn, _ = draw_framed(self.lantern, rows, sampling, size, **self.how)
        end = self.lantern.model.codes + 1
        new = torch.tensor([[*row, end] for row in drawn], device=input_ids.device)
        return torch.cat([input_ids, new[:, :max_new_tokens]], 1)
