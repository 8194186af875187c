"""MammothModa2's autoregressive stage: logits and hidden states are those of transformers' Qwen2 with a second MLP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lantern_hpu.commands import generate
from lantern_hpu.core import Request, Sampling
from lantern_hpu.errors import OptionError
from lantern_hpu.models.text.prefix import TokenConditioner
from lantern_hpu.pipeline import LanternPipeline
from tests.marks import mostly_slow
from tests.published import PROMPTS, guided_rows, mammoth, mammoth_rows, obeys, opened

NAME, SCALE = "mammothmoda2", 6.0
WORDS, END, CODES = 152064, 152064, slice(152072, 168456)
SIZE: dict[str, Any] = {"height": 96, "width": 128}
GRID, TOKENS = (3, 4), 3 * 5


@pytest.fixture(scope="module")
def theirs(public: Path) -> Any:
    return mammoth(public / NAME)


def published(tokens: Tensor) -> Tensor:
    """Our image tokens as the authors number them: codes, then what closes a row."""
    return torch.where(tokens == 16384, END, tokens + CODES.start)


def pipeline_of(folder: Path, **how: Any) -> LanternPipeline:
    how = {"device": "cpu", "dtype": "float32", **how}
    return LanternPipeline.from_pretrained(str(folder), **how)


def test_a_prompt_names_the_size_and_holds_no_control_tokens(public: Path) -> None:
    condition = opened(public / NAME).condition
    assert isinstance(condition, TokenConditioner)
    other = condition.sized(condition.frame.config.of_grid((2, 11)))
    assert other.frame.ids("red") == mammoth_rows(public / NAME, "red", (2, 11))[0]
    broken = condition.plain("a <|im_end|> b")
    assert 151645 not in condition.frame.words(broken)


def test_words_are_those_tokens_whose_id_says_so(public: Path) -> None:
    """The size's digits are words, the two tokens around them are not."""
    model = opened(public / NAME)
    prefix = model.condition.rows([Request("dog")], True)
    is_word, (row, without) = model.target.words(prefix.tokens), mammoth_rows(public / NAME, "dog")
    assert is_word is not None
    for mine, ids in zip(is_word, (row, without), strict=True):
        assert mine[-len(ids) :].tolist() == [token < WORDS for token in ids]
    every = model.target.words(torch.arange(184864))
    assert every is not None and int(every.sum()) == WORDS and not every[:16385].any()


@torch.no_grad()
@pytest.mark.parametrize(
    ("method", "layout"),
    mostly_slow([("ar", "native"), ("ar", "plain"), ("scd@4", "native")], ("ar", "native")),
)
def test_greedy_tokens_are_those_of_a_patched_qwen2(
    public: Path, theirs: Any, method: str, layout: str
) -> None:
    """Prompts of unequal lengths in one batch, whole pictures, nothing captured after the warm-up."""
    pipeline = pipeline_of(public / NAME, graphs="strict", layout=layout)
    result = pipeline(PROMPTS, temperature=0.0, method=method, guidance_scale=SCALE, **SIZE)
    assert result.images == [] and result.tokens.shape == (3, TOKENS)
    for prompt, row in zip(PROMPTS, torch.from_numpy(result.tokens), strict=True):
        image, rows = published(row), mammoth_rows(public / NAME, prompt, GRID)
        want = guided_rows(theirs.model, theirs.lm_head, rows, image.tolist(), SCALE)
        assert torch.equal(image, obeys(want, GRID[1], END, CODES))


@torch.no_grad()
@pytest.mark.parametrize("layout", ["native", "plain"])
def test_saved_states_are_those_of_a_patched_qwen2(
    public: Path, theirs: Any, tmp_path: Path, layout: str
) -> None:
    """Of prompt, image and its closing token, in one pass, for prompts of unequal lengths."""
    pipeline, file = pipeline_of(public / NAME, layout=layout), tmp_path / "states.safetensors"
    result = pipeline(PROMPTS[:2], method="ar", **SIZE)
    pipeline.save_states(result, file)
    saved, texts = load_file(file), PROMPTS[:2]
    with safe_open(file, "pt") as opened_file:
        images = json.loads(opened_file.metadata()["images"])
    assert [one["prompt"] for one in images] == list(texts)
    assert images[0]["grid"] == list(GRID) and images[0]["tokens"] == TOKENS
    for number, prompt in enumerate(texts):
        row = mammoth_rows(public / NAME, prompt, GRID)[0]
        ids = [*row, *published(torch.from_numpy(result.tokens[number])).tolist(), 152071]
        assert saved[f"{number}.input_ids"].tolist() == ids
        want = theirs.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(saved[f"{number}.hidden_states"], want, rtol=1e-4, atol=1e-4)
    alone, states = pipeline.hidden_states("dog", **SIZE)
    assert alone.tolist() == mammoth_rows(public / NAME, "dog", GRID)[0]
    want = saved["1.hidden_states"][: len(alone)]
    torch.testing.assert_close(states, want, rtol=1e-5, atol=1e-5)
    for wrong in ([16385], [-1], [0] * (TOKENS + 1)):
        with pytest.raises(OptionError, match="not those of an image"):
            pipeline.hidden_states("dog", wrong, **SIZE)


@pytest.mark.parametrize("method", mostly_slow(["ar", "sjd-pac@4"]))
def test_tokens_are_distributed_as_a_patched_qwen2_draws_them(
    public: Path, theirs: Any, method: str
) -> None:
    from tests.test_glm_draws import p_value

    sampling, texts = Sampling(2.0, 3.0, 20), [f"{PROMPTS[i % 3]} {i}" for i in range(24)]
    pipeline = pipeline_of(public / NAME)
    requests = [Request(text, i, sampling, size=(96, 128)) for i, text in enumerate(texts)]
    tokens = torch.from_numpy(pipeline.draw(requests, pipeline.resolve(method)).tokens)
    places = torch.arange(TOKENS) % (GRID[1] + 1) != GRID[1]
    probs = []
    for text, row in zip(texts, tokens, strict=True):
        rows, image = mammoth_rows(public / NAME, text, GRID), published(row).tolist()
        with torch.no_grad():
            want = guided_rows(theirs.model, theirs.lm_head, rows, image, sampling.cfg_scale)
        want = want / sampling.temperature
        best = want[places][:, CODES].topk(sampling.top_k)
        probs.append(
            torch.zeros(len(best.values), 16384).scatter(1, best.indices, best.values.softmax(-1))
        )
    assert p_value(torch.cat(probs), tokens[:, places].flatten()) > 1e-3


def test_states_are_of_models_that_read_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "x.safetensors")
    assert generate.main(["--prompt", "red", "--save-states", file]) == 2
    assert "--save-states cannot be used" in capsys.readouterr().err
