"""`generate` of transformers drawn here: its tokens where they are greedy, its distribution where they are sampled."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_hpu.bridges.transformers import generate, generate_janus
from lantern_hpu.core import Sampling
from lantern_hpu.errors import LanternError
from tests import published
from tests.test_bridge_diffusers import painted
from tests.test_glm_image import inputs_of, p_value, reference, reference_order

pytest.importorskip("transformers.models.glm_image")

ROOT = Path(__file__).parent.parent
METHOD = "scd@4"
EMU3_SIZE = (3, 4)
PROMPTS = ("dog", "a red apple on the tree")


def padded(rows: list[list[int]], pad: int) -> dict[str, Tensor]:
    """Rows of tokens, padded on the left."""
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def emu3_allows(batch: int, ids: Tensor) -> list[int]:
    """The grammar of an image, as transformers' page of Emu3 has it."""
    height, width = EMU3_SIZE
    place = len(ids) - int((ids == 151851).nonzero()[0, 0])
    behind = place - (width + 1) * height
    if place % (width + 1) == 0 and behind <= 0:
        return [151846]
    codes = list(range(151854, 184622))
    return codes if behind <= 0 else [{1: 151847, 2: 151853}.get(behind, 151850)]


@cache
def emu3(public: Path) -> tuple[Any, dict[str, Any]]:
    folder, grid = public / published.EMU3, "*".join(map(str, EMU3_SIZE))
    rows = [published.emu3_ids(folder, prompt, grid) for prompt in PROMPTS]
    negative = torch.tensor([published.emu3_ids(folder, "blurry", grid)] * 2)
    constraint = {"prefix_allowed_tokens_fn": emu3_allows, "max_new_tokens": 40}
    guidance = {"guidance_scale": 3.0, "negative_prompt_ids": negative}
    return published.emu3(folder), padded(rows, 151643) | constraint | guidance


@cache
def glm(public: Path) -> tuple[Any, dict[str, Any]]:
    model, processor = reference(public / "glm-image")
    pictures = [[painted(64, 96)], [painted(96, 64)]]
    inputs = inputs_of(processor, PROMPTS, (2, 3), pictures)
    forbidden = list(range(64, 192))  # all that are no codes
    return model, {**inputs, "max_new_tokens": 6, "suppress_tokens": forbidden}


@cache
def janus(public: Path) -> tuple[Any, dict[str, Any]]:
    folder = public / published.HUB_JANUS
    model = published.janus(folder)
    model.generation_config.generation_kwargs = {"boi_token_id": 100016}
    return model, padded([published.their_janus(folder).rows(p)[0] for p in PROMPTS], 100015)


def theirs(model: Any, call: dict[str, Any], **how: Any) -> Any:
    call = call | how
    if "generation_mode" not in call:
        return model.generate(**call)
    return model.generate(call.pop("input_ids"), **call)


def ours(model: Any, call: dict[str, Any], **how: Any) -> Any:
    if "generation_mode" in how:
        return generate_janus(model, **call, **how, method=METHOD)
    sizes = {"image_sizes": [EMU3_SIZE] * 2} if "prefix_allowed_tokens_fn" in call else {}
    return model.generate(**call, **how, **sizes, custom_generate=generate, method=METHOD)


FAMILIES: list[tuple[Callable[[Path], Any], dict[str, Any]]] = [
    (glm, {}),
    (emu3, {}),
    (janus, {"generation_mode": "image"}),
]


@pytest.mark.parametrize(("family", "mode"), FAMILIES, ids=["glm-image", "emu3", "janus"])
def test_greedy_tokens_are_those_of_transformers(
    public: Path, family: Callable[[Path], Any], mode: dict[str, Any]
) -> None:
    """Of two prompts padded on the left, with what ends an image, and as its output with sequences."""
    model, call = family(public)
    want = theirs(model, call, do_sample=False, **mode)
    report: dict[str, Any] = {}
    got = ours(model, call, do_sample=False, report=report, **mode)
    assert torch.equal(got, want) and len(want.unique()) > 4
    assert report["steps"] < report["tokens"] and report["method"] == METHOD
    whole = ours(model, call, do_sample=False, return_dict_in_generate=True, **mode)
    assert torch.equal(whole.sequences, want) and whole.scores is None


@pytest.mark.slow
@torch.no_grad()
def test_greedy_tokens_of_anole_are_transformers_own(public: Path) -> None:
    """By one pass of its class, whose `generate` forbids image tokens; guidance subtracts a prompt's last token."""
    folder = public / published.ANOLE
    stack = published.their_anole(folder)
    from transformers import ChameleonForConditionalGeneration

    model: Any = ChameleonForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    row = stack.rows(PROMPTS[0])[0]
    got = model.generate(
        torch.tensor([row]), max_new_tokens=1025, do_sample=False, guidance_scale=2.0,
        custom_generate=generate, method=METHOD,
    )[0, len(row) :].tolist()  # fmt: skip
    assert len(got) == 1025 and got[-1] == 8196
    logits = published.guided_rows(stack.run, stack.head, (row, row[-1:]), got[:-1], 2.0)
    assert torch.equal(logits[:, 4:8196].argmax(-1) + 4, torch.tensor(got[:-1]))


@torch.no_grad()
def test_sampled_tokens_are_distributed_as_transformers_draws_them(public: Path) -> None:
    """By chi-square over the tokens of eight images, given all that precedes each; seeds follow torch's generator."""
    model, call = janus(public)
    settings = Sampling(1.5, 2.0, 40, 0.95)
    drawn = [
        ours(model, call, do_sample=True, temperature=2.0, top_k=40, top_p=0.95, guidance_scale=1.5,
             num_return_sequences=4, generation_mode="image")
        for _ in map(torch.manual_seed, (3, 3, 4))
    ]  # fmt: skip
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    stack = published.their_janus(public / published.HUB_JANUS)
    logits = []
    for i, tokens in enumerate(drawn[0]):
        rows = stack.rows(PROMPTS[i // 4])
        image = (tokens + stack.codes.start).tolist()
        logits.append(published.guided_rows(stack.run, stack.head, rows, image, 1.5))
    probs = reference_order(torch.cat(logits)[:, stack.codes], settings)
    assert p_value(probs, drawn[0].flatten()) > 1e-3


@torch.no_grad()
def test_log_probabilities_are_those_of_the_distribution(public: Path) -> None:
    """After guidance, temperature and filters, by transformers' own pass over what was drawn."""
    model, call = janus(public)
    call = {name: tensor[1:, :] for name, tensor in call.items()}
    how = {"do_sample": True, "temperature": 2.0, "top_k": 40, "top_p": 0.95, "guidance_scale": 1.5}
    output = ours(
        model, call, **how, generation_mode="image", logprobs=True, return_dict_in_generate=True
    )
    stack = published.their_janus(public / published.HUB_JANUS)
    image = (output.sequences[0] + stack.codes.start).tolist()
    logits = published.guided_rows(stack.run, stack.head, stack.rows(PROMPTS[1]), image, 1.5)
    probs = reference_order(logits[:, stack.codes], Sampling(1.5, 2.0, 40, 0.95))
    want = probs.gather(1, output.sequences[0][:, None])[:, 0].log()
    torch.testing.assert_close(output.logprobs[0], want, atol=1e-4, rtol=0)


def test_the_folder_for_the_hub_draws_the_same(
    public: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    model, call = glm(public)
    want = ours(model, call, do_sample=False)
    how = {"custom_generate": str(ROOT / "bridges"), "trust_remote_code": True, "method": METHOD}
    assert torch.equal(model.generate(**call, do_sample=False, **how), want)
    card = (ROOT / "bridges" / "README.md").read_text()
    assert re.search(r"^tags:\n  - custom_generate$", card, re.M)


def test_generators_and_copies_of_a_prompt(public: Path) -> None:
    model, call = emu3(public)
    draw = partial(ours, model, call, do_sample=True, top_k=0, num_return_sequences=2)
    seeds = [torch.Generator().manual_seed(seed) for seed in (1, 2, 3, 4)]
    four = draw(generator=seeds)
    assert torch.equal(four, draw(generator=seeds, batch_size=1))
    width = call["input_ids"].shape[1]
    assert torch.equal(four[:, :width], call["input_ids"].repeat_interleave(2, 0))
    assert len({tuple(row.tolist()) for row in four[:, width:]}) == 4
    with pytest.raises(LanternError, match="generator has 2 values"):
        draw(generator=seeds[:2])


REFUSED: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "beam_s[a-z]* cannot": (glm, {"num_beams": 2}),
    "RepetitionPenalty": (glm, {"repetition_penalty": 1.2}),
    "MinPLogitsWarper": (glm, {"do_sample": True, "min_p": 0.1}),
    "output_scores": (glm, {"output_scores": True, "return_dict_in_generate": True}),
    "MaxTimeCriteria": (glm, {"max_time": 1.0}),
    "codes of images": (glm, {"suppress_tokens": [3]}),
    "guidance_scale": (glm, {"guidance_scale": 2.0}),
    "min_new_tokens": (glm, {"min_new_tokens": 50, "max_new_tokens": 60}),
    "prefix_allowed_tokens_fn": (glm, {"prefix_allowed_tokens_fn": lambda i, ids: [3, 4]}),
    "size of images": (emu3, {"image_sizes": [(3, 4), (4, 3)]}),
    "num_return_sequences": (glm, {"do_sample": True, "num_return_sequences": 2}),
    "begins no image": (emu3, {"cut": 1, "image_sizes": [EMU3_SIZE] * 2}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(public: Path, what: str) -> None:
    family, how = REFUSED[what]
    model, call = family(public)
    call = call | how
    if call.pop("cut", 0):
        for name in ("input_ids", "attention_mask"):
            call[name] = call[name][:, :-1]
    with pytest.raises(LanternError, match=what):
        model.generate(**call, custom_generate=generate)


PAGE = ROOT / "docs" / "guides" / "diffusers-and-transformers.md"
BLOCKS = re.findall(r"^```diff\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
SMALL = {  # models of the page are large, and so are its images
    "scd@8": "scd@4",
    "zai-org/GLM-Image": "{folder}",
    "torch.bfloat16": "torch.float32",
    'pipe.to("cuda")': "",
    'pipe("a red apple",': 'pipe("a red apple", height=64, width=96, num_inference_steps=2,',
    'custom_generate="bridges"': 'custom_generate=bridges, method="ar"',
}


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_blocks_of_the_page_run(
    public: Path, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    folder = public / "glm-image"
    lines = [line[1:] for line in BLOCKS[number].splitlines() if line[:1] != "-"]
    code = "\n".join(lines)
    for old, new in SMALL.items():
        code = code.replace(old, new.format(folder=folder))
    if "generate_janus" in code:
        model, inputs = janus(public)
    else:
        model, call = glm(public)
        inputs = {
            name: call[name] for name in call if name not in ("max_new_tokens", "suppress_tokens")
        }
    names = {
        "model": model,
        "inputs": inputs,
        "folder": str(folder),
        "bridges": str(ROOT / "bridges"),
    }
    exec("import torch; from diffusers import GlmImagePipeline", names)
    exec("from lantern_hpu.bridges.diffusers import accelerate", names)
    exec(code, names)
    assert names.keys() & {"image", "pipe", "output", "pixels"}
