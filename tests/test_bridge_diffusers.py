"""diffusers' GlmImagePipeline with its first stage drawn here: the same call, and the same picture where it must be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lantern_hpu.bridges.diffusers import SAMPLINGS, accelerate
from lantern_hpu.errors import LanternError
from tests.marks import mostly_slow

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers.models.glm_image")

SIZE: dict[str, Any] = {"height": 64, "width": 96, "num_inference_steps": 2}
PROMPTS = ["the photo of a green house", "dog"]
METHOD = "scd@4"


def painted(height: int, width: int) -> Image.Image:
    random = np.random.default_rng(height + width)
    return Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8))


def pipeline(folder: Path, greedy: bool = False, **parts: Any) -> Any:
    pipe = diffusers.GlmImagePipeline.from_pretrained(folder, torch_dtype=torch.float32, **parts)
    pipe.set_progress_bar_config(disable=True)
    if greedy and pipe.vision_language_encoder is not None:
        settings = pipe.vision_language_encoder.generation_config
        settings.top_k = 1
        settings.suppress_tokens = list(range(64, 192))  # all that are no codes
    return pipe


def opened(folder: Path, greedy: bool = False, **how: Any) -> Any:
    return accelerate(pipeline(folder, greedy), METHOD, **how)


def of_folder(folder: Path, greedy: bool = False, **how: Any) -> Any:
    pipe = accelerate(
        pipeline(folder, vision_language_encoder=None), METHOD, folder=str(folder), **how
    )
    if greedy:
        from lantern_hpu.core import Sampling

        pipe.vision_language_encoder.sampling = Sampling(1.0, 0.0)
    return pipe


WAYS = [opened, of_folder]


def pictures(pipe: Any, seed: int = 5, prompt: Any = PROMPTS[1], **how: Any) -> list[bytes]:
    random = torch.Generator().manual_seed(seed)
    return [image.tobytes() for image in pipe(prompt, **SIZE, generator=random, **how).images]


@cache
def theirs(folder: Path) -> list[bytes]:
    return pictures(pipeline(folder, greedy=True), prompt=PROMPTS)


@pytest.fixture(scope="module")
def folder(public: Path) -> Path:
    return public / "glm-image"


@pytest.mark.parametrize("way", WAYS)
def test_greedy_pictures_are_those_of_diffusers(folder: Path, way: Callable[..., Any]) -> None:
    """Byte for byte, of two prompts padded on the left; the report has what it took."""
    pipe = way(folder, greedy=True)
    assert pictures(pipe, prompt=PROMPTS) == theirs(folder)
    report = pipe.lantern_report
    assert report["method"] == METHOD and report["tokens"] == 2 * (19 * 13 + 6)
    assert 1 < report["tokens_per_step"] <= 4 and report["steps"] < report["tokens"]
    assert min(report["first_stage_s"], report["other_stages_s"]) > 0
    assert (report["shared_bytes"] > 0) == (way is opened)


def sources() -> list[Image.Image]:
    return [painted(64, 96), painted(96, 64)]


def edited_by_their_own_parts(folder: Path) -> list[bytes]:
    """diffusers' edit with the tokens of transformers' `generate`, which later releases of both do not do together."""
    pipe = pipeline(folder, greedy=True)
    encoder = pipe.vision_language_encoder
    accelerate(pipe, METHOD)

    def generate(**inputs: Any) -> Any:
        del encoder.get_image_features, encoder.get_image_tokens
        return type(encoder).generate(encoder, **inputs)

    encoder.generate = generate
    return pictures(pipe, image=sources())


@pytest.mark.parametrize("way", WAYS)
def test_edits_with_two_pictures_are_those_of_diffusers(
    folder: Path, way: Callable[..., Any]
) -> None:
    want = edited_by_their_own_parts(folder)
    pipe = way(folder, greedy=True, logprobs=True)
    assert pictures(pipe, image=sources()) == want
    assert pipe.lantern_report["tokens"] == 6
    assert pipe.lantern_report["logprobs"].shape == (1, 6)
    assert pictures(pipe, image=sources()[:1]) != want


@pytest.mark.parametrize("way", mostly_slow(WAYS, opened))
def test_a_generator_seeds_the_first_stage(folder: Path, way: Callable[..., Any]) -> None:
    """As diffusers does: the same seed, the same picture; of a list the first; images of a prompt share its tokens."""
    edit: dict[str, Any] = {"image": sources()[:1]}
    pipe = way(folder)
    first = pictures(pipe, **edit)
    seeds = pipe.lantern_report["seeds"]
    assert pictures(pipe, **edit) == first and pipe.lantern_report["seeds"] == seeds
    pictures(pipe, seed=6, **edit)
    assert pipe.lantern_report["seeds"] != seeds
    both = [torch.Generator().manual_seed(seed) for seed in (5, 9)]
    one, other = pipe(PROMPTS[1], **SIZE, generator=both, num_images_per_prompt=2, **edit).images
    assert pipe.lantern_report["seeds"] == seeds and one.tobytes() != other.tobytes()


def test_callbacks_guidance_and_interruption_are_diffusers(folder: Path) -> None:
    pipe, steps = opened(folder, greedy=True), list[int]()

    def end(own: Any, step: int, sigma: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        own._interrupt = True
        return kwargs

    usual = pictures(pipe, image=sources()[:1])
    assert usual != pictures(pipe, image=sources()[:1], guidance_scale=1.0)
    assert usual != pictures(pipe, image=sources()[:1], callback_on_step_end=end)
    assert steps == [0]


@pytest.mark.parametrize("way", mostly_slow(WAYS, opened))
@pytest.mark.parametrize("sampling", mostly_slow([*SAMPLINGS], "sglang"))
def test_samplings_in_use_are_offered_by_name(
    folder: Path, way: Callable[..., Any], sampling: str
) -> None:
    pipe = way(folder, sampling=sampling)
    pictures(pipe, image=sources()[:1])
    file = {"temperature": 0.9, "top_k": 50, "top_p": 0.75}
    asked = pipe.lantern_report["sampling"]
    assert {name: asked[name] for name in file} == file | SAMPLINGS[sampling]


def test_weights_that_change_are_drawn_with(folder: Path) -> None:
    """Trained in place or loaded anew; the second call of an unchanged model makes nothing again."""
    pipe = opened(folder, greedy=True)
    first = pictures(pipe, image=sources()[:1])
    with torch.no_grad():
        for name, tensor in pipe.vision_language_encoder.named_parameters():
            if "lm_head" in name:
                tensor.copy_(tensor.flip(0))
    assert pictures(pipe, image=sources()[:1]) != first


def test_offloaded_weights_are_given_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of accelerate name the device to draw on; what is on none is refused."""
    accelerator = pytest.importorskip("accelerate")
    pipe = opened(folder, greedy=True)
    want = pictures(pipe, image=sources()[:1])
    encoder = pipe.vision_language_encoder
    _, hook = accelerator.cpu_offload_with_hook(encoder, torch.device("cpu"))
    assert pictures(pipe, image=sources()[:1]) == want
    hook.remove()
    accelerator.cpu_offload(encoder, torch.device("cpu"))
    with pytest.raises(LanternError, match=r"meta\n.*enable_model_cpu_offload"):
        pictures(pipe)


def mixed(pipe: Any) -> Any:
    pipe.vision_language_encoder.model.language_model.layers[0].mlp.to(torch.bfloat16)
    return accelerate(pipe)


def unloaded(pipe: Any) -> Any:
    pipe.vision_language_encoder = None
    return accelerate(pipe)


REFUSED: Sequence[tuple[Callable[[Any], Any], str]] = [
    (lambda pipe: accelerate(object()), "object cannot be accelerated"),
    (lambda pipe: accelerate(pipe, sampling="vllm"), "sampling is 'vllm'"),
    (lambda pipe: accelerate(pipe, folder="x"), "folder is given"),
    (unloaded, "folder is missing"),
    (lambda pipe: accelerate(pipe, "sdc@4"), "sdc"),
    (mixed, "they are of bfloat16 and float32"),
]


@pytest.mark.parametrize(
    ("call", "why"),
    mostly_slow(REFUSED, *REFUSED[:2], REFUSED[-1]),
    ids=[why for _, why in REFUSED],
)
def test_what_cannot_be_honoured_is_refused(
    folder: Path, call: Callable[[Any], Any], why: str
) -> None:
    with pytest.raises(LanternError, match=why):
        pictures(call(pipeline(folder)), image=sources()[:1])
