"""GLM-Image: equal to transformers' own class on small random weights, in sizes by request, with pixels by diffusers;
sampled tokens are distributed as transformers draws them, by windows too, and relaxed by its own codes.

The files are those of `tests/checkpoints/glm_image.py`; the loader does not know them, transformers wrote them.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lantern_hpu.commands import generate, pixels
from lantern_hpu.core import Request, Sampling
from lantern_hpu.errors import InvalidImageError, OptionError, WeightsError
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.files.load import OpenedModel, open_model
from lantern_hpu.models.model import ImageModel, Placement, nearest_codes
from lantern_hpu.models.pictures import DiffusionPixels, check_diffusers, prior_token_ids
from lantern_hpu.models.transformer import Rotary
from lantern_hpu.ops.buffers import additive_mask, prefix_mask
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.tree import DraftTree
from lantern_hpu.zoo.find import find_parts
from tests.emulated import emulated, rules
from tests.marks import mostly_slow
from tests.published import p_value, reference_order

pytest.importorskip("transformers.models.glm_image")

PROMPTS = ("a red apple on the tree", "dog", 'the photo of a green house that says "sky"')
GRIDS = ((4, 6), (7, 3), (5, 5))
RELAXED = ("scd:lambda=3:k=8@8", "scd:tv=0.2@8", "sjd-pac:lambda=20:k=8@8")


@pytest.fixture(scope="session")
def folder(public: Path) -> Path:
    return public / "glm-image"


@cache
def opened(folder: Path) -> ImageModel:
    return open_model(find_parts(str(folder))).load(Placement())


@cache
def reference(folder: Path) -> tuple[Any, Any]:
    """transformers' model and processor."""
    from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

    model: Any = GlmImageForConditionalGeneration.from_pretrained(
        folder / "vision_language_encoder", dtype=torch.float32
    )
    processor: Any = GlmImageProcessor.from_pretrained(folder / "processor")
    return model.eval(), processor


def inputs_of(
    processor: Any,
    prompts: Sequence[str],
    grid: tuple[int, int],
    pictures: Sequence[Sequence[Image.Image]] | None = None,
) -> Any:
    """What transformers' processor makes of prompts, each behind its pictures, padded on the left."""
    messages = []
    for prompt, own in zip(prompts, pictures or [()] * len(prompts), strict=True):
        content: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in own]
        content.append({"type": "text", "text": prompt})
        messages.append([{"role": "user", "content": content}])
    return processor.apply_chat_template(
        messages,
        tokenize=True,
        padding=True,
        target_h=32 * grid[0],
        target_w=32 * grid[1],
        return_dict=True,
        return_tensors="pt",
    )


def sized(model: ImageModel, grid: tuple[int, int], prefix: int = 64) -> TransformerConfig:
    return replace(model.target.config, grid=grid, prefix=prefix)


def their_logits(model: Any, inputs: Any, tokens: Tensor) -> Tensor:
    """Of each of these tokens [B, N], over whole sequences and with transformers' own positions: [B, N, V]."""
    stack = model.model
    first, _ = stack.get_rope_index(
        inputs["input_ids"],
        inputs["image_grid_thw"],
        inputs["images_per_sample"],
        inputs["attention_mask"],
    )
    drawn = stack._cached_decode_position_ids[:, :, : tokens.shape[1] - 1]  # [B, 3, N - 1]
    at = torch.cat([first, drawn.movedim(1, 0)], 2)  # [3, B, P + N - 1]
    rows = torch.cat([inputs["input_ids"], tokens[:, :-1]], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(tokens[:, :-1])], 1)
    out = stack.language_model(
        input_ids=rows, attention_mask=mask, position_ids=at, use_cache=False
    )
    return model.lm_head(out[0][:, inputs["input_ids"].shape[1] - 1 :])


def my_logits(
    model: ImageModel, config: TransformerConfig, prompts: Sequence[str], tokens: Tensor
) -> Tensor:
    """The same by ours, in one pass without a cache."""
    prefix = model.condition.sized(config).rows(list(map(Request, prompts)), False)
    x = torch.cat([prefix.embeddings, model.target.embed(tokens[:, :-1])], 1)
    valid = torch.cat([prefix.valid, torch.ones_like(tokens[:, :-1], dtype=torch.bool)], 1)
    length = x.shape[1]
    mask = prefix_mask(valid, torch.ones(length, length, dtype=torch.bool).tril())
    place = torch.arange(length).expand(len(x), -1)
    rope = Rotary(config, length)(place, (~prefix.valid).sum(1))
    hidden = model.target(x, rope, additive_mask(mask, x.dtype))
    return model.target.head(hidden[:, config.prefix - 1 :])


@pytest.mark.parametrize("grid", GRIDS)
def test_logits_are_those_of_transformers(folder: Path, grid: tuple[int, int]) -> None:
    """Of every token of preview and picture, of prompts of different lengths in one batch and alone."""
    model, (theirs, processor) = opened(folder), reference(folder)
    config = sized(model, grid)
    random = torch.Generator().manual_seed(3)
    for prompts in (PROMPTS, PROMPTS[:1]):
        tokens = torch.randint(config.codes, (len(prompts), config.tokens), generator=random)
        with torch.no_grad():
            want = their_logits(theirs, inputs_of(processor, prompts, grid), tokens)
            got = my_logits(model, config, prompts, tokens)
        assert want.std() > 0.5
        torch.testing.assert_close(
            got[..., : config.codes], want[..., : config.codes], atol=1e-4, rtol=0
        )
        assert (got[..., config.codes :] < -1e29).all()


# ------------------------------------------------------------------------------------ drawing


@cache
def pipeline_of(folder: Path) -> LanternPipeline:
    return LanternPipeline.from_pretrained(
        str(folder), device="cpu", dtype="float32", pictures=False
    )


def drawn(
    pipeline: LanternPipeline,
    prompts: Sequence[str],
    size: tuple[int, int],
    method: str = "ar",
    sampling: Sampling | None = None,
    batch: int | None = None,
) -> Any:
    settings = sampling or pipeline.model.sampling
    setting = pipeline.resolve(method)
    requests = [
        Request(p, i, settings, setting.relaxation, size=size) for i, p in enumerate(prompts)
    ]
    return pipeline.draw(requests, setting, batch, decode=False)


GREEDY = Sampling(1.0, 0.0)


def test_greedy_pictures_are_those_of_transformers(folder: Path) -> None:
    """To the last token of preview and picture, of prompts of different lengths in one batch, and of one alone."""
    pipeline, (theirs, processor) = pipeline_of(folder), reference(folder)
    for prompts, grid in ((PROMPTS, (4, 6)), (PROMPTS[:1], (7, 3))):
        config = sized(pipeline.model, grid)
        want = theirs.generate(
            **(inputs := inputs_of(processor, prompts, grid)),
            max_new_tokens=config.tokens,
            do_sample=False,
            suppress_tokens=list(range(config.codes, config.vocab_size)),
        )
        want = want[:, inputs["input_ids"].shape[1] :]
        result = drawn(pipeline, prompts, (32 * grid[0], 32 * grid[1]), sampling=GREEDY)
        assert torch.equal(torch.from_numpy(result.tokens), want)
        assert len(want.unique()) > 4


@pytest.mark.slow
def test_nothing_is_captured_anew_for_lengths_and_sizes_seen_before(folder: Path) -> None:
    """Ten prompts of ten lengths in two sizes, after one prompt of each class in each size."""
    pipeline = LanternPipeline.from_pretrained(
        str(folder), device="cpu", dtype="float32", graphs="strict", pictures=False
    )
    sizes = ((64, 96), (96, 64))
    word = ("apple " * 300).split()
    for size in sizes:
        for words in (20, 100, 280):
            drawn(pipeline, [" ".join(word[:words])], size)
    before = {spec: engine.captures for spec, engine in pipeline.engines.engines.items()}
    assert len(before) == 6
    for i in range(10):
        result = drawn(pipeline, [" ".join(word[: 3 + 28 * i])], sizes[i % 2])
        assert result.graph["recompiles_after_warmup"] == 0
    after = {spec: engine.captures for spec, engine in pipeline.engines.engines.items()}
    assert after == before


def test_a_short_prompt_takes_the_shortest_prefix(folder: Path) -> None:
    pipeline = pipeline_of(folder)
    for words, prefix in ((3, 64), (100, 256), (300, 1024)):
        request = Request("apple " * words, 0, GREEDY, size=(64, 96))
        spec = pipeline.spec([request], DraftTree.root_only(), 1)
        assert (spec.prefix, spec.grid) == (prefix, (2, 3))


@pytest.mark.parametrize("method", mostly_slow(["jacobi", "scd", "sjd-pac"], "scd"))
def test_windows_draw_what_ar_draws_where_they_must(folder: Path, method: str) -> None:
    """Greedy pictures."""
    pipeline = pipeline_of(folder)
    want = drawn(pipeline, PROMPTS, (64, 96), sampling=GREEDY)
    got = drawn(pipeline, PROMPTS, (64, 96), method, GREEDY)
    assert (got.tokens == want.tokens).all()


WINDOWED = ("jacobi", "sjd-pac@4", "scd:tv=0.3@4", "scd:lambda-20@4", "scd@4:commit=2")


@pytest.mark.parametrize("graphs", mostly_slow(["strict", "hpu_graph"]))
@pytest.mark.parametrize("method", mostly_slow(WINDOWED, "scd:lambda-20@4"))
def test_windows_draw_the_same_on_every_device(folder: Path, method: str, graphs: str) -> None:
    """Neighbours are those of its own codebook; what relaxation costs is metered."""
    device = "hpu" if graphs == "hpu_graph" else "cpu"
    settings = Sampling(1.0, 1.8, 8, 0.8)
    want = drawn(pipeline_of(folder), PROMPTS[:2], (64, 96), method, settings)
    with emulated(folder, graphs, device=device, pictures=False) as (pipeline, card):
        got = drawn(pipeline, PROMPTS[:2], (64, 96), method, settings)
        assert got.graph["recompiles_after_warmup"] == 0
        assert card.counts.fallbacks.total() == 0 and not rules(card, "error", "warn")
    assert (got.tokens == want.tokens).all()
    costs = sum(record.tv_sum for record in got.records)
    assert (costs > 0) == (":" in method)


# ------------------------------------------------------------------------------------ distribution


def kept(probs: Tensor, keep: Tensor) -> Tensor:
    """Probs [.., V] of what is kept alone."""
    rest = probs * keep
    return rest / rest.sum(-1, keepdim=True)


def of_top_k(probs: Tensor, k: int) -> Tensor:
    return kept(probs, probs >= probs.sort(descending=True).values[..., k - 1 : k])


def of_top_p(probs: Tensor, mass: float) -> Tensor:
    ordered = probs.sort(descending=True)
    before = ordered.values.cumsum(-1) - ordered.values
    keep = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, ordered.indices, before < mass)
    return kept(probs, keep)


def top_p_first(logits: Tensor, sampling: Sampling) -> Tensor:
    probs = (logits / sampling.temperature).softmax(-1)
    return of_top_k(of_top_p(probs, sampling.top_p), sampling.top_k)


def temperature_last(logits: Tensor, sampling: Sampling) -> Tensor:
    probs = of_top_p(of_top_k(logits.softmax(-1), sampling.top_k), sampling.top_p)
    return (probs.log() / sampling.temperature).softmax(-1)


@cache
def sampled(folder: Path, method: str, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens [n] of eight pictures, and transformers' logits [n, codes] of their places."""
    prompts = [f"{PROMPTS[i % 3]} {i}" for i in range(8)]
    pipeline, (theirs, processor) = pipeline_of(folder), reference(folder)
    tokens = torch.from_numpy(drawn(pipeline, prompts, (64, 96), method, sampling).tokens)
    with torch.no_grad():
        logits = their_logits(theirs, inputs_of(processor, prompts, (2, 3)), tokens)
    return tokens.flatten(), logits[..., : pipeline.model.codes].flatten(0, 1)


PUBLISHED, FLAT = Sampling(1.0, 0.9, 50, 0.75), Sampling(1.0, 2.0, 10, 0.8)


AR = [("ar", PUBLISHED), ("ar", FLAT)]


@pytest.mark.parametrize(
    ("method", "sampling"),
    mostly_slow([*AR, ("scd@8", PUBLISHED), ("jacobi", FLAT), ("sjd-pac@8", FLAT)], AR[1]),
)
def test_tokens_are_distributed_as_transformers_draws_them(
    folder: Path, method: str, sampling: Sampling
) -> None:
    tokens, logits = sampled(folder, method, sampling)
    assert p_value(reference_order(logits, sampling), tokens) > 1e-3


@pytest.mark.parametrize("wrong", [top_p_first, temperature_last])
def test_another_order_of_filters_would_be_noticed(
    folder: Path, wrong: Callable[[Tensor, Sampling], Tensor]
) -> None:
    """The test above can fail: the same tokens are not those of another order."""
    tokens, logits = sampled(folder, "ar", FLAT)
    assert p_value(wrong(logits, FLAT), tokens) < 1e-6


# ------------------------------------------------------------------------------------ every method


def test_neighbours_are_those_of_the_codes_at_length_1(folder: Path) -> None:
    """As the tokenizer looks codes up: long codes are no farther away."""
    model = pipeline_of(folder).model
    raw = model.code_vectors_alone
    assert raw is not None
    unit = raw.double() / raw.double().norm(dim=1, keepdim=True)
    alike = (unit @ unit.T).fill_diagonal_(-2)  # [codes, codes] cosines
    best = alike.sort(descending=True).indices[:, :5]
    assert torch.equal(model.nearest(5)[: model.codes].long(), best)
    assert not torch.equal(nearest_codes(raw, 5).long(), best)


@pytest.mark.parametrize("method", mostly_slow(RELAXED))
def test_relaxed_windows_draw_codes_in_fewer_steps(folder: Path, method: str) -> None:
    """In fewer steps than the exact window takes."""
    pipeline = pipeline_of(folder)
    chosen = pipeline.resolve(method)
    exact = pipeline.resolve(f"{chosen.method}@8")
    drawn, steps = [], []
    for one in (chosen, exact):
        requests = [Request(PROMPTS[0], s, FLAT, one.relaxation, size=(64, 96)) for s in range(6)]
        drawn.append(pipeline.draw(requests, one, decode=False))
        steps.append(sum(record.steps for record in drawn[-1].records))
    assert drawn[0].tokens.max() < pipeline.model.codes
    assert all(record.relaxed_accepts > 0 for record in drawn[0].records)
    assert steps[0] < steps[1]
    assert not any(record.relaxed_accepts for record in drawn[1].records)


@pytest.mark.parametrize("method", mostly_slow(("scd:lambda=1:k=8@8", "scd:tv=0@8")))
def test_relaxation_of_nothing_is_exact(folder: Path, method: str) -> None:
    pipeline = pipeline_of(folder)
    want = drawn(pipeline, PROMPTS, (64, 96), "scd@8", PUBLISHED).tokens
    assert (drawn(pipeline, PROMPTS, (64, 96), method, PUBLISHED).tokens == want).all()


# ------------------------------------------------------------------------------------ pixels


@pytest.fixture(scope="module")
def whole(folder: Path) -> LanternPipeline:
    """With its diffusion model, in few steps."""
    pytest.importorskip("diffusers")
    pipeline = LanternPipeline.from_pretrained(str(folder), device="cpu", dtype="float32")
    assert pipeline.diffusion is not None
    pipeline.diffusion.options = {"num_inference_steps": 2}
    return pipeline


def test_pictures_are_those_of_diffusers_where_tokens_are(
    whole: LanternPipeline, folder: Path
) -> None:
    """diffusers draws its own tokens, greedily, and its picture of them; ours are the same."""
    from diffusers import GlmImagePipeline

    theirs: Any = GlmImagePipeline.from_pretrained(folder, torch_dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    config = whole.model.target.config
    settings = theirs.vision_language_encoder.generation_config
    settings.top_k, settings.suppress_tokens = 1, list(range(config.codes, config.vocab_size))
    seed, size = 5, (64, 96)
    want = theirs(
        prompt=PROMPTS[2],
        height=size[0],
        width=size[1],
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(seed),
        output_type="pil",
    ).images[0]
    result = whole(
        PROMPTS[2], height=size[0], width=size[1], seed=seed, temperature=0.0, method="ar"
    )
    assert result.images[0].size == want.size == (96, 64)
    assert result.images[0].tobytes() == want.tobytes()
    assert len(set(want.tobytes())) > 50
    other = whole(PROMPTS[1], height=size[0], width=size[1], seed=seed, temperature=0.0)
    assert other.images[0].tobytes() != want.tobytes()


def test_tokens_go_to_a_pipeline_elsewhere(folder: Path, whole: LanternPipeline) -> None:
    """Ours as the autoregressive stage, in the lines of the documentation."""
    result = pipeline_of(folder)(PROMPTS[0], height=64, width=96, output_type="tokens")
    ids = prior_token_ids(result.tokens, (2, 3))
    assert whole.diffusion is not None
    picture = whole.diffusion.pipe(
        prompt=PROMPTS[0],
        height=64,
        width=96,
        prior_token_ids=ids,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    mine = whole(PROMPTS[0], height=64, width=96)
    assert mine.images[0].tobytes() == picture.tobytes()


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the diffusion model, wherever it is loaded."""
    pytest.importorskip("diffusers")
    real = DiffusionPixels.__init__

    def init(self: DiffusionPixels, *args: Any) -> None:
        real(self, *args, num_inference_steps=2)

    monkeypatch.setattr(DiffusionPixels, "__init__", init)


@pytest.mark.slow
def test_saved_tokens_become_the_pictures_that_generate_makes(
    folder: Path, tmp_path: Path, few_steps: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Byte for byte; tokens of no known grid, of another grid, or beyond the codes are refused."""
    file, whole = tmp_path / "tokens.npz", tmp_path / "whole.png"
    model = ["--model", str(folder), "--device", "cpu", "--dtype", "float32"]
    draw = ["--prompt", PROMPTS[2], "--height", "64", "--width", "96", "--seed", "4"]
    for how in (["--save-tokens", str(file)], ["--output", str(whole)]):
        assert generate.main([*model, *draw, *how]) == 0
    again = tmp_path / "again.png"
    assert pixels.main([str(file), *model, "--output", str(again)]) == 0
    assert Image.open(again).tobytes() == Image.open(whole).tobytes()
    saved = dict(np.load(file))
    for changes, why in (
        ({"grid": ()}, "grid and seeds are not known"),
        ({"grid": (4, 6)}, "the grid has 4 x 6"),
        ({"grid": -saved["grid"]}, "grid is (-"),
        ({"tokens": saved["tokens"] + 64}, "codes from 0 to 63"),
    ):
        np.savez(file, **saved | {name: np.asarray(value) for name, value in changes.items()})
        assert pixels.main([str(file), *model, "--output", str(tmp_path / "no.png")]) == 2
        assert why in capsys.readouterr().err


def test_classes_that_a_folder_names_are_not_loaded(
    whole: LanternPipeline, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from a file in it, nor from a module in the working folder."""
    copy, ran = tmp_path / "copy", tmp_path / "ran"
    shutil.copytree(folder, copy)
    code = f"open({str(ran)!r}, 'w')\nclass AutoencoderKL: pass\n"
    for place in (copy / "vae", tmp_path):
        (place / "evil.py").write_text(code)
    index = json.loads((copy / "model_index.json").read_text())
    index |= {"vae": ["evil", "AutoencoderKL"], "_class_name": ["evil", "AutoencoderKL"]}
    (copy / "model_index.json").write_text(json.dumps(index))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert whole.diffusion is not None
    again = DiffusionPixels(copy, torch.float32, torch.device("cpu"))
    assert not ran.exists() and type(again.pipe.vae) is type(whole.diffusion.pipe.vae)


ODD_PARTS = {
    "vae, a number for a list": ("vae/config.json", {"block_out_channels": 5}),
    "vae, a text": ("vae/config.json", {"latent_channels": "many"}),
    "transformer, nothing": ("transformer/config.json", {"num_layers": None}),
    "transformer, a list": ("transformer/config.json", {"attention_head_dim": [1, 2]}),
    "text encoder, a text": ("text_encoder/config.json", {"d_model": "wide"}),
    "scheduler, a text": ("scheduler/scheduler_config.json", {"num_train_timesteps": "x"}),
}


@pytest.mark.parametrize("case", ODD_PARTS)
def test_settings_of_diffusers_parts_have_any_type(case: str, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    name, wrong = ODD_PARTS[case]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    settings = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps(settings | wrong))
    with pytest.raises(WeightsError, match=r"the diffusion model in .* cannot be read"):
        DiffusionPixels(copy, torch.float32, torch.device("cpu"))


@pytest.mark.slow
def test_pixels_of_a_spoiled_diffusion_model_are_an_error(
    whole: LanternPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert whole.diffusion is not None
    config = whole.model.target.config
    tokens = np.zeros((1, config.tokens), np.int64)
    vae = whole.diffusion.pipe.vae
    real = vae.decode
    monkeypatch.setattr(vae, "decode", lambda *a, **b: (real(*a, **b)[0] * torch.nan,))
    with pytest.raises(InvalidImageError, match="its pixels are NaN") as caught:
        whole.diffusion(tokens, config, ["cat"], [0])
    assert len(caught.value.images) == 1


def test_codes_are_doubled_as_diffusers_does(folder: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    tokens = np.arange(4 * 6 + 6)[None]
    want = diffusers.GlmImagePipeline._upsample_token_ids(torch.as_tensor(tokens[:, 6:]), 4, 6)
    assert torch.equal(prior_token_ids(tokens, (4, 6)), want)


def test_without_diffusers_nothing_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.setattr(OpenedModel, "load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(OptionError, match="diffusers is not installed"):
        LanternPipeline.from_pretrained(str(folder), device="cpu")


def test_releases_of_diffusers_that_do_not_fit_are_refused(folder: Path) -> None:
    for version in ("0.36.0", "0.39.0", "0.40.1", "0.43.0", "1.0.0"):
        with pytest.raises(OptionError, match=version):
            check_diffusers(version)
    for version in ("0.41.0", "0.42.1"):
        check_diffusers(version)


def test_prompts_that_are_too_long_are_refused(folder: Path) -> None:
    """What a prompt says of the picture may stand at its end, so none is cut."""
    with pytest.raises(OptionError, match="up to 1009"):
        pipeline_of(folder)("zq" * 600, height=64, output_type="tokens")
