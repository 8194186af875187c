"""`generate` of transformers, drawn here: `model.generate(**inputs, custom_generate=generate, method="scd@8")`.

Of GLM-Image, Chameleon with Anole's weights, and Emu3; Janus overrides `generate`, and `generate_janus` takes its
place. An image's tokens are drawn, and what ends it follows, as far as `max_new_tokens` allows: no other token has a
probability.

A tensor that is as the model has it is shared. What is put together of several (queries, keys, values) or packed (on a
processor all matrices, for the native decoder) is memory of its own.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lantern_hpu.backends import DeviceOptions
from lantern_hpu.backends.base import dtype_name, get_backend
from lantern_hpu.core import Request, Sampling
from lantern_hpu.decode.spec import batch_size_for
from lantern_hpu.errors import DeviceError, OptionError, WeightsError
from lantern_hpu.loading import device_name, fill_model
from lantern_hpu.methods.request import seeds_of
from lantern_hpu.models.families.base import Files
from lantern_hpu.models.families.glm_image import SPARE
from lantern_hpu.models.files.checkpoint import Checkpoint, unwrapped
from lantern_hpu.models.files.load import OpenedModel, open_files
from lantern_hpu.models.files.names import Parts, check_plain
from lantern_hpu.models.text.prefix import FramedPrompt
from lantern_hpu.pipeline import LanternPipeline

# By frame: what begins an image, where that is not the first token behind the codes, and what ends it
BEGINS = {"anole": 8197, "emu3": 151851, "janus": 100016}
ENDS = {"anole": (8196,), "emu3": (151847, 151853, 151850), "janus": ()}
PREFIX, PREFIXES = 1024, (64, 256)  # tokens of a prompt at most, and classes of shorter ones
# Processors that are honoured, in the order in which they are applied, and what is read of each
PROCESSORS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": ("guidance_scale", "unconditional_context"),
    "PrefixConstrainedLogitsProcessor": ("_prefix_allowed_tokens_fn",),
    "SuppressTokensLogitsProcessor": ("suppress_tokens",),
    "TemperatureLogitsWarper": ("temperature",),
    "TopKLogitsWarper": ("top_k",),
    "TopPLogitsWarper": ("top_p",),
}
WITHOUT_EFFECT = "MinLength MinNewTokensLength InfNanRemove".split()  # on codes
CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
# Fields of a GenerationConfig that ask for what a step of several tokens does not have
REFUSED = "output_scores output_logits output_attentions output_hidden_states token_healing".split()
# Inputs of a model that are an image's prompt, and those that do not change what is drawn
PROMPT = "attention_mask image_grid_thw images_per_sample pixel_values mm_encoder_outputs".split()
OTHERS = "position_ids past_key_values use_cache logits_to_keep cache_position".split()
Grid = tuple[int, int]
PIPELINES: WeakKeyDictionary[Any, tuple[Any, LanternPipeline]] = WeakKeyDictionary()


def not_honoured(name: str, why: str, hint: str = "leave it out") -> OptionError:
    return OptionError(f"{name} cannot be honoured", why, hint)


# ---------------------------------------------------------------------------------------- weights


def open_weights(model: Any) -> tuple[OpenedModel, torch.dtype]:
    """A model of transformers, opened as its files would be, and the number format of its weights.

    Raises:
        LanternError: its family is not known, or its weights are quantised, of several formats, or not on one device.
    """
    name, what = type(model).__name__, f"the weights of {type(model).__name__} cannot be used"
    state = {unwrapped(key): tensor for key, tensor in model.state_dict().items()}
    check_plain(Path(name), state)
    devices = {str(tensor.device) for tensor in state.values()}
    if len(devices) > 1 or "meta" in devices:
        hint = "one device for all; of the ways to offload, pipe.enable_model_cpu_offload()"
        raise DeviceError(what, f"they are on {' and '.join(sorted(devices))}", hint)
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    settings = json.loads(model.config.to_json_string(use_diff=False))
    parts = Parts(name, name, Path(name), optional=("vq", "pixels", "text"))
    opened = open_files(Files(Checkpoint(Path(name), shapes, state.__getitem__), settings, parts))
    if opened.config.condition.frame not in ("glm-image", *BEGINS):
        raise WeightsError(what, "known are GLM-Image, Chameleon with Anole's weights, Emu3, Janus")
    target = replace(opened.config.target, top_p_first=False)  # transformers takes top-k first
    if not target.prefixes:
        target = replace(target, prefix=PREFIX, prefixes=PREFIXES)
    stored = opened.weights().target
    names = {name for source in (stored.recipe or {}).values() for name in source.names}
    there = names & stored.checkpoint.shapes.keys() - {SPARE}
    dtypes = {stored.checkpoint.read(name).dtype for name in there}
    if len(dtypes) > 1:
        formats = " and ".join(sorted(map(dtype_name, dtypes)))
        raise WeightsError(what, f"they are of {formats}", "model.to(torch.bfloat16)")
    return replace(opened, config=replace(opened.config, target=target)), dtypes.pop()


@contextmanager
def pipeline_of(model: Any, asked: torch.device) -> Iterator[LanternPipeline]:
    """A pipeline with a model's weights, kept for the next call unless they change.

    Where hooks of accelerate offload the model, its memory on the device is given back at the end, as theirs is.

    Args:
        asked: where the prompt is.
    """
    home = next(model.parameters()).device
    hook = getattr(model, "_hf_hook", None)
    device = torch.device(getattr(hook, "execution_device", None) or home)
    if asked.type != device.type and home.type != "meta":
        what = f"the prompt is on {asked.type}, the model on {device.type}"
        raise DeviceError(what, hint=f'inputs.to("{device.type}")')
    tensors = chain(model.parameters(), model.buffers())
    stamp = [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]
    known, pipeline = PIPELINES.pop(model, (None, None))
    if pipeline is not None and known != stamp:
        pipeline.close()
    if pipeline is None or known != stamp:
        opened, dtype = open_weights(model)
        options = DeviceOptions(device=device_name(device), dtype=dtype_name(dtype))
        backend = get_backend(options.device)
        with backend.errors():
            fit = backend.fit(opened.config.target, options)
            pipeline = LanternPipeline(*fill_model(opened, fit, options, framed=True), options)
    try:
        yield pipeline
    finally:
        if device.type == home.type:
            PIPELINES[model] = stamp, pipeline
        else:
            pipeline.close()


def draw_framed(
    pipeline: LanternPipeline,
    prompts: Sequence[FramedPrompt],
    sampling: Sampling,
    size: Grid | None,
    method: str = "auto",
    batch_size: int | None = None,
    generator: Any = None,
    negatives: Sequence[FramedPrompt | None] = (),
    model: Any = None,
    report: dict[str, Any] | None = None,
    logprobs: bool = False,
) -> tuple[list[list[int]], Any]:
    """An image's tokens [N] of each prompt, as the model's authors number them, and their log-probabilities.

    Args:
        size: height and width in pixels. model: whose weights are shared. report: is filled with what drawing took.
        generator: of torch, or one for each prompt: their initial seeds. None: torch's own generator draws seeds.
    """
    began, count = time.perf_counter(), len(prompts)
    setting = pipeline.resolve(method, batch_size_for(count, batch_size))
    drawn = torch.randint(1 << 53, (count,)).tolist() if generator is None else None
    each = zip(prompts, seeds_of(drawn, generator, count), negatives or [None] * count, strict=True)
    requests = [
        Request(prompt, seed, sampling, setting.relaxation, negative, size, logprobs=logprobs)
        for prompt, seed, negative in each
    ]
    result = pipeline.draw(requests, setting, batch_size, decode=False)
    kept = None if result.logprobs is None else torch.from_numpy(result.logprobs)  # [R, N]
    if report is not None:
        steps = sum(record.steps for record in result.records)
        tokens = result.tokens.size
        report |= {
            "method": str(setting),
            "sampling": result.settings[0]["sampling"],
            "seeds": [record.seed for record in result.records],
            "seconds": time.perf_counter() - began,
            "tokens": tokens,
            "steps": steps,
            "tokens_per_step": round((tokens - count) / max(steps, 1), 4),
            "logprobs": kept,
            **weight_bytes(pipeline, model),
        }
    condition: Any = pipeline.model.condition
    return [condition.as_published(row.tolist()) for row in result.tokens], kept


def weight_bytes(pipeline: LanternPipeline, model: Any) -> dict[str, int]:
    """Bytes of a pipeline's weights: those that are a model's own, and those that are memory of their own."""
    parts = [*pipeline.model.stepping, *pipeline.model.condition.parts().values()]
    held = {t.data_ptr(): t.nbytes for p in parts for t in chain(p.parameters(), p.buffers())}
    theirs = set() if model is None else {t.data_ptr() for t in model.state_dict().values()}
    shared = sum(size for place, size in held.items() if place in theirs)
    return {"shared_bytes": shared, "own_bytes": sum(held.values()) - shared}


# --------------------------------------------------------------------------------------- settings


def read_settings(config: Any, processors: Sequence[Any]) -> tuple[Sampling, dict[str, Any]]:
    """Sampling, and what the processors hold that transformers made of a `GenerationConfig`.

    Raises:
        OptionError: an image cannot be drawn so.
    """
    known = vars(import_module("transformers").GenerationConfig()).keys() | {"generation_kwargs"}
    unknown = [name for name in vars(config) if not name.startswith("_") and name not in known]
    for name in (*unknown, *(name for name in REFUSED if getattr(config, name, None))):
        raise not_honoured(name, "generation_config has it, and images are not drawn so")
    mode = config.get_generation_mode().value
    if mode not in ("sample", "greedy_search"):
        raise not_honoured(mode, "images are sampled, or greedy", "num_beams=1")
    found = {type(one).__name__: one for one in processors}
    free = {f"{name}LogitsProcessor" for name in WITHOUT_EFFECT}
    for name, one in found.items():
        if name not in {*PROCESSORS, *free} or getattr(one, "min_tokens_to_keep", 1) > 1:
            raise not_honoured(name, "images are drawn without such a logits processor")
    order = [type(one).__name__ for one in processors if type(one).__name__ not in free]
    if order != [name for name in PROCESSORS if name in found]:
        raise not_honoured(
            ", ".join(order), f"each is applied once, in the order {', '.join(PROCESSORS)}"
        )
    values = {field: getattr(found[name], field) for name in order for field in PROCESSORS[name]}
    scale = values.get("guidance_scale", 1.0)
    if not config.do_sample or values.get("top_k") == 1:
        return Sampling(scale, 0.0), values
    asked = (values.get("temperature", 1.0), values.get("top_k", 0), values.get("top_p", 1.0))
    return Sampling(scale, *asked), values


def check_constraints(
    values: dict[str, Any], ids: Tensor, drawn: list[int], codes: set[int], columns: int
) -> None:
    """Raise an OptionError where a caller forbids codes, or allows other tokens than an image of these columns has.

    Args:
        ids: [P] of a prompt. drawn: [N] the tokens of its image.
    """
    if lost := codes.intersection(map(int, values.get("suppress_tokens", ()))):
        raise not_honoured("suppress_tokens", f"it has {len(lost)} codes of images")
    if (function := values.get("_prefix_allowed_tokens_fn")) is None:
        return
    for place in (0, columns - 1):
        allowed = set(map(int, function(0, torch.cat([ids, ids.new_tensor(drawn[:place])]))))
        if allowed != (codes if drawn[place] in codes else {drawn[place]}):
            why = f"it allows {len(allowed)} tokens at place {place} of an image, which are not the model's"
            raise not_honoured("prefix_allowed_tokens_fn", why)


# ---------------------------------------------------------------------------------------- prompts


def prompt_rows(ids: Tensor, mask: Tensor | None) -> list[FramedPrompt]:
    """Prompts [R, P] without their pads."""
    kept = torch.ones_like(ids) if mask is None else mask
    return [FramedPrompt(row[keep.bool()].tolist()) for row, keep in zip(ids, kept, strict=True)]


def with_codes(ids: Sequence[int], grids: Sequence[Grid], codes: Iterator[int]) -> FramedPrompt:
    """A prompt of GLM-Image with the codes of its pictures, which come first, in their places."""
    row, at = list(ids), 0
    for height, width in grids:
        if row[at] != row[-1]:
            raise OptionError("a picture stands behind words", "GLM-Image reads pictures first")
        row[at + 1 : at + 1 + height * width] = islice(codes, height * width)
        at += height * width + 2
    return FramedPrompt(row, grids)


def glm_prompts(
    model: Any, ids: Tensor, given: dict[str, Any], copies: int = 1
) -> tuple[list[FramedPrompt], Grid]:
    """Prompts of GLM-Image, and height and width in pixels of what is drawn.

    Args:
        model: makes codes of pictures. copies: images of each prompt; each tensor of `given` is repeated so often.
    """
    rows = prompt_rows(ids, given.get("attention_mask"))
    pixels: Any = given.get("pixel_values")
    if (grids := given.get("image_grid_thw")) is None:
        raise OptionError("image_grid_thw is missing", "it says the size", "the processor's inputs")
    grids = grids[::copies]
    counts = given.get("images_per_sample")
    own_counts = [len(grids)] if counts is None else counts[::copies].tolist()
    samples = [part[:, 1:].tolist() for part in grids.split(own_counts)]
    features = (given.get("mm_encoder_outputs") or {}).get("image")
    edits = features is not None or pixels is not None
    if edits and copies > 1:
        why = "transformers mixes up the pictures of copies"
        raise not_honoured("num_return_sequences", why, "the same prompt several times")
    target = samples[0][-1 if edits else 0]
    if any(sample[-1 if edits else 0] != target for sample in samples):
        raise not_honoured("image_grid_thw", "images of one call have one size", "a call for each")
    if edits:
        own = [[tuple(grid) for grid in sample[:-1]] for sample in samples]
        places = torch.tensor([[1, *grid] for part in own for grid in part], device=ids.device)
        if features is None:
            features = model.get_image_features(pixels, places)
        parts = features.pooler_output  # [h w, C] each, or [C, h, w] in later releases
        found = model.get_image_tokens(parts if parts[0].dim() == 3 else torch.cat(parts), places)
        codes = iter(found.flatten().tolist())
        rows = [with_codes(row.ids, sizes, codes) for row, sizes in zip(rows, own, strict=True)]
    return rows, (32 * target[0], 32 * target[1])


def emu3_size(image_sizes: Any) -> Grid:
    """Height and width in pixels, of sizes [R, 2] in codes, as Emu3's processor returns them."""
    sizes = {(8 * int(h), 8 * int(w)) for h, w in ([] if image_sizes is None else image_sizes)}
    if len(sizes) != 1:
        why = f"image_sizes has {len(sizes)} sizes, where all images have one"
        raise OptionError(
            "the size of images is not known", why, "image_sizes as the processor returns it"
        )
    return sizes.pop()


# --------------------------------------------------------------------------------------- generate


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Sequence[Any] = (),
    generation_config: Any = None,
    method: str = "auto",
    batch_size: int | None = None,
    generator: Any = None,
    image_sizes: Any = None,
    report: dict[str, Any] | None = None,
    logprobs: bool = False,
    **model_kwargs: Any,
) -> Any:
    """Draw an image of each prompt: transformers calls this where `custom_generate` is it.

    Args:
        input_ids: [R, P], padded on the left. method: as of `LanternPipeline`. batch_size: rows decoded together.
        generator: see `draw_framed`. image_sizes: see `emu3_size`. report: is filled with what the run took.
        logprobs: of the image's tokens [R, N], in the output of `return_dict_in_generate` and in the report.

    Returns [R, P + N and what ends an image], or an output of transformers with it as `sequences`.

    Raises:
        LanternError: an argument cannot be honoured, or the model's family is not known.
    """
    if generation_config is None:
        hint = "model.generate(**inputs, custom_generate=generate)"
        raise OptionError("generate is called by transformers alone", hint=hint)
    given = {name: value for name, value in model_kwargs.items() if value is not None}
    rules = {type(rule).__name__ for rule in stopping_criteria}
    for name in (given.keys() - {*PROMPT, *OTHERS}) | (rules - set(CRITERIA)):
        raise not_honoured(name, "an image has a prompt, and ends when it is whole")
    sampling, values = read_settings(generation_config, logits_processor)
    context = values.get("unconditional_context", {})
    with pipeline_of(model, input_ids.device) as pipeline:
        frame, codes, size = pipeline.model.config.condition.frame, pipeline.model.codes, None
        rows = prompt_rows(input_ids, given.get("attention_mask"))
        if frame == "janus":
            raise not_honoured(
                "custom_generate", "Janus overrides generate", "generate_janus(model, ...)"
            )
        if frame == "glm-image":
            if context:
                raise not_honoured(
                    "guidance_scale", "GLM-Image's first stage is drawn without guidance"
                )
            copies = generation_config.num_return_sequences or 1
            rows, size = glm_prompts(model, input_ids, given, copies)
        elif "pixel_values" in given or given.get("mm_encoder_outputs"):
            raise not_honoured("pixel_values", f"{type(model).__name__} draws from words alone")
        elif frame == "emu3":
            size = emu3_size(image_sizes)
        begin = BEGINS.get(frame, codes)
        if any(row.ids[-1] != begin for row in rows):
            raise OptionError("a prompt begins no image", f"its last token is not {begin}")
        negatives = []
        if context.get("input_ids") is not None:
            negatives = prompt_rows(context["input_ids"], context["attention_mask"])
            negatives = [row for row in negatives for _ in range(len(rows) // len(negatives))]
        how = (method, batch_size, generator, negatives, model, report, logprobs)
        drawn, kept_logprobs = draw_framed(pipeline, rows, sampling, size, *how)
        condition: Any = pipeline.model.condition
        every = set(condition.as_published(range(codes)))
        check_constraints(values, input_ids[0], drawn[0], every, pipeline.model.sized(size).columns)
    new = [[*row, *ENDS.get(frame, (codes + 1,))] for row in drawn]
    return answer(generation_config, input_ids, new, kept_logprobs)


def answer(config: Any, prompts: Tensor, new: list[list[int]], logprobs: Any) -> Any:
    """What transformers returns of prompts [R, P], or [R, 0], and the tokens behind them."""
    rows, length = torch.tensor(new, device=prompts.device), prompts.shape[1]
    if max(config.min_new_tokens or 0, (config.min_length or 0) - length) > rows.shape[1]:
        raise not_honoured(
            "min_new_tokens", f"an image has {rows.shape[1]} tokens, its end included"
        )
    most = config.max_length - length if length else rows.shape[1]
    if most < rows.shape[1]:
        warnings.warn(f"an image has {rows.shape[1]} tokens, {most} are asked for", stacklevel=2)
    sequences = torch.cat([prompts, rows[:, :most]], 1)
    if not config.return_dict_in_generate:
        return sequences
    output = import_module("transformers.generation").GenerateDecoderOnlyOutput(sequences=sequences)
    output.logprobs = logprobs
    return output


@torch.no_grad()
def generate_janus(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    logits_processor: Sequence[Any] = (),
    generation_mode: str = "image",
    method: str = "auto",
    batch_size: int | None = None,
    generator: Any = None,
    report: dict[str, Any] | None = None,
    logprobs: bool = False,
    **kwargs: Any,
) -> Any:
    """In place of `model.generate(**inputs, generation_mode="image")` of Janus: tokens [R, N], without the prompt.

    Args: see `generate`. kwargs: fields of a `GenerationConfig`, or one as `generation_config`.
    """
    if generation_mode != "image":
        raise not_honoured(
            f"generation_mode={generation_mode}", "images are drawn here", "model.generate"
        )
    config, rest = model._prepare_generation_config(kwargs.pop("generation_config", None), **kwargs)
    for name in (name for name, value in rest.items() if value is not None):
        raise not_honoured(name, "an image has a prompt, and ends when it is whole")
    scale = config.guidance_scale or 5.0  # as there
    config.guidance_scale = None
    model._prepare_special_tokens(config, attention_mask is not None, device=input_ids.device)
    processors = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=input_ids.shape[1],
        encoder_input_ids=input_ids,
        prefix_allowed_tokens_fn=None,
        logits_processor=logits_processor,
        device=input_ids.device,
    )
    sampling, values = read_settings(config, processors)
    rows = prompt_rows(input_ids, attention_mask)
    rows = [row for row in rows for _ in range(config.num_return_sequences or 1)]
    kept = {config.bos_token_id, BEGINS["janus"]}
    pad = config.pad_token_id
    negatives = [FramedPrompt([t if t in kept else pad for t in row.ids]) for row in rows]
    with pipeline_of(model, input_ids.device) as pipeline:
        how = (method, batch_size, generator, negatives, model, report, logprobs)
        drawn, kept_logprobs = draw_framed(
            pipeline, rows, replace(sampling, cfg_scale=scale), None, *how
        )
        check_constraints(values, input_ids[0], drawn[0], set(range(pipeline.model.codes)), 1)
    return answer(config, input_ids.new_empty(len(drawn), 0), drawn, kept_logprobs)


def from_hub(model: Any, **arguments: Any) -> Any:
    """`generate` as a repository on the Hub is called, with each argument of `model.generate`."""
    for name in ("streamer", "assistant_model", "synced_gpus", "use_model_defaults"):
        if arguments.pop(name, None):
            raise not_honoured(name, "an image is returned when it is whole")
    return model.generate(**arguments, custom_generate=generate)
