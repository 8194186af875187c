"""Requests that a script makes: drawn as they say or refused, nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.serve.decoder import make_served_model
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.serve.protocol import ApiError, ImagesRequest, read_call
from tests.test_serve import served

FIELDS: dict[str, tuple[Any, ...]] = {
    "prompt": ("red cat", "café 🦁", "a\u2028b", "", " ", "\ud83d", "x\x1b", 7, None),
    "model": ("dall-e-3", "tiny", "gpt-5", None, 3),
    "n": (1, 2, 0, 11, "1", None),
    "size": ("auto", "8x8", "1024x1024", "", None),
    "quality": ("auto", "hd", "best", None),
    "style": ("vivid", "natural", "none", None),
    "background": ("auto", "transparent", None),
    "user": ("me", "", 5, None),
    "seed": (0, 7, -1, 2**63, 1.5, None),
    "response_format": ("b64_json", "url", "base64", None),
    "output_format": ("png", "jpeg", "webp", "gif", None),
    "output_compression": (100, 0, 101, -1, None),
    "negative_prompt": ("dog", "", None),
    "stream": (False, True, "yes", None),
    "top_k": (0, 5, 10**9, None),
    "temperature": (1.0, 0.0, 1e9, None),
    "steps": (20,),
}


def body_of(seed: int) -> dict[str, Any]:
    """A prompt and up to four fields, values that mean something more often than others."""
    rng = random.Random(seed)
    names = rng.sample([name for name in FIELDS if name != "prompt"], rng.randint(0, 4))
    chosen = {name: rng.choice(FIELDS[name][: 2 + rng.randint(0, 3)]) for name in names}
    return {"prompt": rng.choice(FIELDS["prompt"][: rng.choice([3, 3, 9])]), **chosen}


@pytest.fixture(scope="module")
def options(model: Path) -> ServeOptions:
    names = ("tiny", "dall-e-3")
    return ServeOptions(str(model), served_model_name=names, methods=("ar",), slots=2)


@pytest.mark.parametrize("seed", range(60))
def test_a_body_is_drawn_as_it_says_or_refused(
    seed: int, pipeline: LanternPipeline, options: ServeOptions
) -> None:
    body = body_of(seed)
    try:
        call = read_call(ImagesRequest.model_validate(body), make_served_model(pipeline, options))
    except (ApiError, ValidationError):
        return
    given = {name: value for name, value in body.items() if value is not None}
    (first, *others) = call.requests
    assert (first.prompt, 1 + len(others)) == (body["prompt"], given.get("n", 1))
    assert given.get("seed", -1) in (first.seed, -1)
    assert first.sampling.top_k == given.get("top_k", first.sampling.top_k)
    assert first.sampling.temperature == given.get("temperature", first.sampling.temperature)
    assert call.output == (given.get("output_format", "png"), given.get("output_compression", 100))
    assert call.kinds == ((given["response_format"],) if "response_format" in given else call.kinds)
    assert call.stream == given.get("stream", False) and not given.get("negative_prompt")
    idle = [n for n in ("quality", "style", "background", "user") if given.get(n, "auto") != "auto"]
    assert all(any(name in said for said in call.warnings) for name in idle)


@pytest.mark.slow
def test_no_body_is_answered_with_a_servers_error(options: ServeOptions) -> None:
    with served(options) as running:
        for seed in range(60):
            body = {name: v for name, v in body_of(seed).items() if v != "\ud83d"}
            answer = running.post(**body)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
