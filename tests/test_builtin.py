"""The embedded model: whole, checked, and drawing what it was asked for."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from lantern_hpu.files import ASSETS
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.models.files.names import read_config
from lantern_hpu.models.vq import VQModel
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import GenerationResult, tokens_per_step
from lantern_lab.embedded.pictures import FRESH, painted, to_float

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pipeline(all_cores: None) -> LanternPipeline:
    return LanternPipeline.from_pretrained("builtin")


def share(image: np.ndarray, colour: str) -> float:
    """The share of pixels whose strongest channel, by a clear margin, is this one."""
    channel = "rgb".index(colour)
    value = image.astype(int)
    others = np.delete(value, channel, axis=-1).max(-1)
    return float((value[..., channel] > others + 60).mean())


def test_files_match_their_checksums() -> None:
    about, _ = read_config(ASSETS / "builtin")
    assert set(about["files"]) == {"target.safetensors", "drafter.safetensors", "vq.safetensors"}


def test_torchs_compiler_is_not_loaded_to_draw() -> None:
    """It takes longer than the rest of the default command, and a careless initialisation calls for it."""
    code = "from lantern_hpu import LanternPipeline as P; P.from_pretrained('builtin')('a lemon'); import sys"
    code += "; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.fixture(scope="module")
def apples(pipeline: LanternPipeline) -> dict[str, GenerationResult]:
    """An image of each kind of method; the exact ones have the distribution of `ar`, tested elsewhere."""
    return {m: pipeline("a red apple", method=m) for m in ("ar", "lantern", "lantern++")}


def test_red_apple_is_red(apples: dict[str, GenerationResult]) -> None:
    for method, result in apples.items():
        for image in map(np.asarray, result.images):
            assert share(image, "r") > 0.05, method


def test_speculation_pays_in_steps(apples: dict[str, GenerationResult]) -> None:
    rates = {method: tokens_per_step(result.records) for method, result in apples.items()}
    assert rates.pop("ar") == 1
    for (
        method,
        rate,
    ) in rates.items():  # a dynamic tree has one draft by default, where arithmetic is scarce
        assert rate > (1 if METHODS[method].tree == "dynamic" else 1.5), method


def test_four_seeds_are_four_pictures(pipeline: LanternPipeline) -> None:
    result = pipeline("a sailboat on the sea at sunset", num_images_per_prompt=4, method="ar")
    same = [float((a == b).mean()) for a, b in combinations(result.tokens, 2)]
    assert max(same) < 0.5


def test_night_is_darker_than_noon(pipeline: LanternPipeline) -> None:
    prompts = [f"mountains {time}" for time in ("at night", "at noon") for _ in range(3)]
    images = [np.asarray(image).mean() for image in pipeline(prompts, method="ar").images]
    assert max(images[:3]) < min(images[3:])


def test_the_tokenizer_draws_128_pixels_a_side(pipeline: LanternPipeline) -> None:
    """Fresh paintings come through it, and half of their roughness."""
    vq = pipeline.model.vq
    assert isinstance(vq, VQModel)
    real = to_float(painted(FRESH, 32).pixels)  # [32, 3, 128, 128]
    with torch.no_grad():
        drawn = vq.decode_codes(vq.encode(real).flatten(1), pipeline.model.target.config.grid)
    assert drawn.shape == real.shape
    assert -10 * (drawn - real).square().mean().div(4).log10() > 26
    rough = [x.diff(dim=-1).abs().mean() for x in (drawn, real)]
    assert rough[0] > 0.5 * rough[1]
