"""`generate` of transformers drawn here: its tokens where they are greedy, its distribution where they are sampled."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency
from torch import Tensor

from lantern_hpu.bridges.transformers import generate, generate_janus
from lantern_hpu.core import Sampling
from lantern_hpu.errors import LanternError
from tests import published
from tests.marks import mostly_slow
from tests.published import p_value, reference_order

pytest.importorskip("transformers")

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
    pytest.importorskip("transformers.models.glm_image")  # of 5.0
    from tests.test_bridge_diffusers import painted
    from tests.test_glm_image import inputs_of, reference

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


@cache
def glm_of_words(
    public: Path, prompts: Sequence[str] = PROMPTS[:1] * 128
) -> tuple[Any, dict[str, Any]]:
    """Of prompts without pictures."""
    model, call = glm(public)
    from tests.test_glm_image import inputs_of, reference

    _, processor = reference(public / "glm-image")
    inputs = inputs_of(processor, prompts, (2, 3))
    return model, {name: call[name] for name in ("max_new_tokens", "suppress_tokens")} | {**inputs}


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


@cache
def anole(public: Path) -> tuple[Any, published.Rows]:
    """The model, and a prompt's row with the one that guidance takes away: its last token."""
    from transformers import ChameleonForConditionalGeneration

    folder = public / published.ANOLE
    model: Any = ChameleonForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    row = published.their_anole(folder).rows(PROMPTS[0])[0]
    return model.eval(), (row, row[-1:])


def image_of_anole(public: Path, **how: Any) -> tuple[list[int], Tensor]:
    """Tokens [1025] drawn here, and guided logits [1024, codes] by one pass of its class."""
    model, rows = anole(public)
    call: dict[str, Any] = {"max_new_tokens": 1025, "custom_generate": generate, "method": METHOD}
    ids = torch.tensor(rows[:1])
    image = model.generate(ids, **call, **how)[0, len(rows[0]) :].tolist()
    scale = how["guidance_scale"]
    logits = published.guided_rows(model.model, model.lm_head, rows, image[:-1], scale)
    return image, logits[:, 4:8196]


@pytest.mark.slow
def test_greedy_tokens_of_anole_are_transformers_own(public: Path) -> None:
    """By one pass of its class, whose `generate` forbids image tokens."""
    got, logits = image_of_anole(public, do_sample=False, guidance_scale=2.0)
    assert len(got) == 1025 and got[-1] == 8196
    assert torch.equal(logits.argmax(-1) + 4, torch.tensor(got[:-1]))


SETTINGS = Sampling(1.5, 2.0, 40, 0.95)
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 40, "top_p": 0.95}
GUIDED: dict[str, Any] = {"guidance_scale": 1.5}
Places = tuple[Tensor, Tensor]  # codes [n] drawn here, and transformers' logits [n, codes] of them


def places_of_anole(public: Path) -> Places:
    image, logits = image_of_anole(public, **SAMPLED, **GUIDED)
    return torch.tensor(image[:-1]) - 4, logits


def places_of_janus(public: Path) -> Places:
    """Of eight images."""
    model, call = janus(public)
    how = {"num_return_sequences": 4, "generation_mode": "image"}
    drawn = ours(model, call, **SAMPLED, **GUIDED, **how)
    stack = published.their_janus(public / published.HUB_JANUS)
    logits = []
    for i, tokens in enumerate(drawn):
        rows = stack.rows(PROMPTS[i // 4])
        image = (tokens + stack.codes.start).tolist()
        logits.append(published.guided_rows(stack.run, stack.head, rows, image, 1.5))
    return drawn.flatten(), torch.cat(logits)[:, stack.codes]


def places_of_emu3(public: Path) -> Places:
    """Of 32 images, but for the ends of their rows."""
    model, call = emu3(public)
    drawn = ours(model, call | GUIDED, **SAMPLED, num_return_sequences=16)
    height, width = EMU3_SIZE
    inside = torch.arange(height * (width + 1)) % (width + 1) != width
    negative = call["negative_prompt_ids"][0].tolist()
    codes, logits = [], []
    for i, row in enumerate(drawn):
        prompt, mask = call["input_ids"][i // 16], call["attention_mask"][i // 16].bool()
        image = row[len(prompt) :][: len(inside)]
        rows = (prompt[mask].tolist(), negative)
        stack = model.model.text_model
        guided = published.guided_rows(stack, model.lm_head, rows, image.tolist(), 1.5)
        logits.append(guided[inside, 151854:184622])
        codes.append(image[inside] - 151854)
    return torch.cat(codes), torch.cat(logits)


def places_of_glm(public: Path) -> Places:
    """Of 128 images of six codes."""
    model, call = glm_of_words(public)
    drawn = ours(model, call, **SAMPLED)[:, call["input_ids"].shape[1] :]
    from tests.test_glm_image import their_logits

    return drawn.flatten(), their_logits(model, call, drawn)[..., :64].flatten(0, 1)


PLACES = [places_of_glm, places_of_anole, places_of_emu3, places_of_janus]


@pytest.mark.parametrize("family", mostly_slow(PLACES, places_of_janus))
@torch.no_grad()
def test_sampled_tokens_are_distributed_as_transformers_draws_them(
    public: Path, family: Callable[[Path], Places]
) -> None:
    """By chi-square, given all that precedes each token, by one pass; seeds follow torch's generator."""
    (codes, logits), (again, _), (others, _) = (
        family(public) for _ in map(torch.manual_seed, (3, 3, 4))
    )
    assert torch.equal(codes, again) and not torch.equal(codes, others)
    assert p_value(reference_order(logits, SETTINGS), codes) > 1e-3
    assert p_value(reference_order(logits, Sampling(1.5, 1.4, 40, 0.95)), codes) < 1e-3


def first_codes(drawn: Tensor, call: dict[str, Any], mode: dict[str, Any]) -> list[tuple[int, ...]]:
    """The first two codes of each image; an output of Janus has no prompt."""
    length = 0 if mode else call["input_ids"].shape[1]
    return [tuple(row) for row in drawn[:, length : length + 2].tolist()]


def same_p_value(ones: Sequence[Any], others: Sequence[Any]) -> float:
    """By chi-square, that two samples are of one distribution; rare values are one class."""
    counts = Counter(ones), Counter(others)
    often = [value for value, count in Counter([*ones, *others]).items() if count >= 10]
    table = [[count[value] for value in often] for count in counts]
    table = [[*row, len(ones) - sum(row)] for row in table]
    kept = [column for column in zip(*table, strict=True) if sum(column)]
    assert len(kept) > 3
    return float(chi2_contingency(kept).pvalue)


def many(call: dict[str, Any], count: int) -> dict[str, Any]:
    """Its first prompt so often."""
    tensors = {name: value for name, value in call.items() if isinstance(value, Tensor)}
    return call | {name: value[:1].repeat(count, 1) for name, value in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mode"), [(glm_of_words, {}), *FAMILIES[1:]])
@torch.no_grad()
def test_first_codes_are_distributed_as_generate_of_transformers_draws_them(
    public: Path, family: Callable[[Path], Any], mode: dict[str, Any]
) -> None:
    """By chi-square of two samples, where transformers can be restricted to codes."""
    model, call = family(public)
    if len(call["input_ids"]) < 128:
        call = many(call, 128)
    how = {"do_sample": True, "temperature": 2.0, "top_k": 4, "top_p": 0.9, **mode}
    torch.manual_seed(3)
    short = {} if mode else {"max_new_tokens": 2}
    want = first_codes(theirs(model, call, **how, **short), call, mode)
    got = first_codes(ours(model, call, **how, batch_size=32), call, mode)
    assert same_p_value(got, want) > 1e-3


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


def test_copies_of_glm_image_are_its_prompts_repeated(public: Path) -> None:
    seeds = [torch.Generator().manual_seed(seed) for seed in (1, 2, 3, 4)]
    model, call = glm_of_words(public, PROMPTS)
    _, repeated = glm_of_words(public, tuple(prompt for prompt in PROMPTS for _ in range(2)))
    got = ours(model, call, do_sample=True, generator=seeds, num_return_sequences=2)
    assert torch.equal(got, ours(model, repeated, do_sample=True, generator=seeds))


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
def test_blocks_of_the_page_run_and_change_four_lines_at_most(
    public: Path, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    folder = public / "glm-image"
    block = BLOCKS[number].splitlines()
    assert sum(line[:1] in "+-" for line in block if line) <= 4
    lines = [line[1:] for line in block if line[:1] != "-"]
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
    if "GlmImagePipeline" in code:
        exec("import torch; from diffusers import GlmImagePipeline", names)
        exec("from lantern_hpu.bridges.diffusers import accelerate", names)
    exec(code, names)
    assert names.keys() & {"image", "pipe", "output", "pixels"}
