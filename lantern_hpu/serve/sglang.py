"""`POST /generate` as SGLang Diffusion 0.5.23 sends it: framed prompts of GLM-Image in, image tokens out.

SGLang's server of pictures (`--srt-encoder-url`) leaves the autoregressive stage to a server like this one, and makes
pixels of what that draws. Its client: sglang/multimodal_gen/runtime/pipelines_core/stages/model_specific_stages/
glm_image.py; it gives up where no answer comes for 100 s, or `--srt-encoder-timeout`.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Annotated, Any

from lantern_hpu.core import Request, Sampling
from lantern_hpu.decode.spec import Spec
from lantern_hpu.errors import Arg, LanternError, as_option, needing
from lantern_hpu.fields import MAX_SEED
from lantern_hpu.models.text.prefix import FramedPrompt
from lantern_hpu.serve.decoder import DecodeThread
from lantern_hpu.serve.protocol import (
    ApiError,
    ParsedRequest,
    check_graph,
    parsed,
    refuse,
    translated,
)
from lantern_hpu.serve.queue import Done

with needing("fastapi", "the server is built on it", "serve"):
    from pydantic import BaseModel, ConfigDict, FailFast, Field

PLACES = ("/generate", "//generate")  # the second where the option's address ends in a slash
MAX_BODY = 1 << 20  # bytes; a prompt of 1024 tokens has 7,000


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ImageGrids(Closed):
    """Rows [1, height, width] in codes: of the picture, then of its preview."""

    image_grid_thw: list[list[int]]


class AskedSampling(Closed):
    """Of one image; `top_k` is off at -1."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = True
    sampling_seed: int | None = Field(None, ge=0, le=MAX_SEED)


class GenerateRequest(Closed):
    """A list of each field; a body with one prompt has its values alone."""

    # The first wrong token is enough: a megabyte has room for half a million
    input_ids: list[Annotated[list[int], FailFast()]] = Field(min_length=1)
    image_data: list[list[ImageGrids]]
    sampling_params: list[AskedSampling]


def read_generate(body: dict[str, Any], decoder: DecodeThread) -> tuple[ParsedRequest, bool]:
    """What is to be drawn, and whether the body has several prompts; raises an ApiError for another picture."""
    ids = body.get("input_ids")
    several = isinstance(ids, list) and isinstance(next(iter(ids), None), list)
    try:
        return read_framed(body if several else {n: [body[n]] for n in body}, decoder), several
    except ApiError as error:
        if not several:  # each value was the only one of a list
            error.message = error.message.replace(f"{error.param}.0", str(error.param), 1)
        raise


def read_framed(body: dict[str, Any], decoder: DecodeThread) -> ParsedRequest:
    """A list of each field; raises an ApiError for what would be another picture than SGLang expects."""
    asked, menu = parsed(GenerateRequest, body), decoder.served
    lists = (asked.input_ids, asked.image_data, asked.sampling_params)
    counts = [len(one) for one in lists]
    if len(set(counts)) > 1:
        raise refuse("image_data", counts, "as many values of each field")
    served = next(iter(menu.methods.values()))
    if counts[0] > decoder.options.queue:
        raise refuse("input_ids", counts[0], f"up to {decoder.options.queue} prompts")
    requests, needs = list[Request](), list[Spec]()
    for ids, grids, params in zip(*lists, strict=True):
        size = sent_size(grids, params.max_new_tokens, decoder)
        check_ids(ids, size, decoder)
        seed = secrets.randbelow(1 << 53) if params.sampling_seed is None else params.sampling_seed
        rule, sampling = served.setting.relaxation, sent_sampling(params, decoder)
        requests.append(Request(FramedPrompt(ids), seed, sampling, rule, size=size))
        needs.append(menu.spec_of(requests[-1], served.setting.tree))
        check_graph(needs[-1], served, params.model_dump())
    return ParsedRequest(served, requests, False, (), size, needs, ("png", 100), (), ())


def sent_size(grids: list[ImageGrids], count: int, decoder: DecodeThread) -> tuple[int, int]:
    """Height and width in pixels, from which the preview and the number of tokens follow."""
    rows = [row for each in grids for row in each.image_grid_thw]
    for size in decoder.served.sizes:
        config = decoder.pipeline.model.sized(size)
        if rows == [[1, *config.grid], [1, *config.preview_grid]]:
            if count != config.tokens + 1:
                raise refuse("max_new_tokens", count, f"{config.tokens + 1}")
            return size
    sizes = " or ".join(f"{width}x{height}" for height, width in decoder.served.sizes)
    more = f"more where the server has {as_option(Arg('sizes'))}"
    raise refuse("image_data", rows, f"picture and preview of {sizes}; {more}")


def check_ids(ids: list[int], size: tuple[int, int], decoder: DecodeThread) -> None:
    """Raise an ApiError unless tokens are a prompt, then the sizes and what begins a picture."""
    config = decoder.pipeline.model.sized(size)
    condition: Any = decoder.pipeline.model.condition.sized(config)
    ending, rows = condition.frame.after, config.embed_rows or config.vocab_size
    if len(ids) > config.prefix:
        raise refuse("input_ids", f"{len(ids)} long", f"up to {config.prefix} tokens")
    if ids[-len(ending) :] != ending:
        raise refuse("input_ids", ids[-len(ending) :], f"those that end in {ending}, the size")
    if wrong := [token for token in ids if not 0 <= token < rows]:
        raise refuse("input_ids", wrong[0], f"tokens of 0 to {rows - 1}")


def sent_sampling(params: AskedSampling, decoder: DecodeThread) -> Sampling:
    """What is asked for, or the model's own where the server prefers that."""
    usual = decoder.served.sampling
    if decoder.options.model_sampling:
        return usual
    top_k = min(max(params.top_k, 0), decoder.served.vocabulary)
    try:
        return replace(usual, temperature=params.temperature, top_p=params.top_p, top_k=top_k)
    except LanternError as error:
        raise translated(error) from error


def image_answer(request_id: str, done: Done, codes: int) -> dict[str, Any]:
    """Tokens of preview and picture, and the one that ends them; the names are those of SGLang's own servers."""
    record = done.drawn.record
    prompt = record.request.prompt
    assert isinstance(prompt, FramedPrompt)
    tokens = [*record.token_ids.tolist(), codes + 1]
    about = {
        "id": request_id,
        "finish_reason": {"type": "length", "length": len(tokens)},
        "prompt_tokens": len(prompt.ids),
        "completion_tokens": len(tokens),
        "cached_tokens": 0,
        "sampling_seed": record.seed,
        "spec_verify_ct": record.steps,
        "spec_accept_length": record.tokens_per_step,
    }
    return {"text": "", "output_ids": tokens, "meta_info": about}
