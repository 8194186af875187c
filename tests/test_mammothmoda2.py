"""MammothModa2's autoregressive stage: logits and hidden states are those of transformers' Qwen2 with a second MLP."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from lantern_hpu.commands import generate
from lantern_hpu.core import Request, Sampling
from lantern_hpu.errors import OptionError
from lantern_hpu.models.files.checkpoint import open_checkpoint
from lantern_hpu.models.text.tokens import TokenConditioner
from lantern_hpu.pipeline import LanternPipeline
from tests.marks import mostly_slow
from tests.test_language_models import PROMPTS, guided_logits, guided_rows, obeys, opened

NAME, SCALE = "mammothmoda2", 6.0
WORDS, END, CODES = 152064, 152064, slice(152072, 168456)
SIZE: dict[str, Any] = {"height": 96, "width": 128}
GRID, TOKENS = (3, 4), 3 * 5


class Chosen(nn.Module):
    """Two MLPs of a layer, of which a token takes one by its id."""

    def __init__(self, word: nn.Module, image: nn.Module, ids: list[Tensor]) -> None:
        super().__init__()
        self.word, self.image, self.ids = word, image, ids

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.ids[0][..., None] < WORDS, self.word(x), self.image(x))


def qwen(folder: Path) -> Any:
    """transformers' Qwen2 over both tables, with the second MLP in the late layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    stored = open_checkpoint(folder)
    text = json.loads((folder / "config.json").read_text())["llm_config"]["text_config"]
    known = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    )
    sizes = {name: text[name] for name in (*known.split(), "rms_norm_eps", "rope_theta")}
    config: Any = Qwen2Config(vocab_size=184864, tie_word_embeddings=False, **sizes)
    model: Any = Qwen2ForCausalLM(config).eval()
    ids: list[Tensor] = [torch.zeros(1, 1)]
    first = int(text["moe_type"].split("-")[1].split(":")[0])
    for layer in model.model.layers[first:]:
        layer.mlp = Chosen(layer.mlp, copy.deepcopy(layer.mlp), ids)
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: ids.__setitem__(0, kwargs["input_ids"]), with_kwargs=True
    )
    root = "llm_model.model.language_model."
    state = {}
    for name in model.state_dict():
        old = root + name.removeprefix("model.")
        old = old.replace("mlp.word.", "mlp.").replace("mlp.image.", "gen_mlp.")
        if name == "model.embed_tokens.weight":
            parts = [root + "embed_tokens.weight", root + "gen_embed_tokens.weight"]
        elif name == "lm_head.weight":
            parts = ["llm_model.lm_head.weight", "llm_model.gen_head.weight"]
        else:
            parts = [old]
        state[name] = torch.cat([stored.read(part).float() for part in parts])
    model.load_state_dict(state)
    return model


@pytest.fixture(scope="module")
def theirs(public: Path) -> Any:
    return qwen(public / NAME)


def tokenizer_of(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "text" / "tokenizer.json"))


def rows_of(
    folder: Path, prompt: str, grid: tuple[int, int] = (32, 32)
) -> tuple[list[int], list[int]]:
    """The conditional and the unconditional row, by the authors' template."""
    tokenizer = tokenizer_of(folder)
    text = (
        "<|im_start|>system\nYou are a helpful image generator.<|im_end|>\n<|im_start|>user\n"
        f"{prompt}<|im_end|>\n<|im_start|>assistant\n"
    )
    words, size = (
        tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in (text, f"{grid[1]}*{grid[0]}")
    )
    row = [*words, 152070, *size, 152069]
    return row, row[-10:]


def published(tokens: Tensor) -> Tensor:
    """Our image tokens as the authors number them: codes, then what closes a row."""
    return torch.where(tokens == 16384, END, tokens + CODES.start)


def pipeline_of(folder: Path, **how: Any) -> LanternPipeline:
    how = {"device": "cpu", "dtype": "float32", **how}
    return LanternPipeline.from_pretrained(str(folder), **how)


def pictures(columns: int, rows: int, count: int) -> Tensor:
    """Random image tokens [count, N] whose rows are closed."""
    codes = torch.randint(16384, (count, rows, columns), generator=torch.Generator().manual_seed(1))
    return torch.cat([codes, torch.full((count, rows, 1), 16384)], 2).flatten(1)


def test_a_prompt_is_framed_token_for_token(public: Path) -> None:
    condition = opened(public / NAME).condition
    assert isinstance(condition, TokenConditioner)
    for prompt in (*PROMPTS, "two lines\nof words"):
        row, without = rows_of(public / NAME, prompt)
        assert condition.frame.ids(prompt) == row and condition.frame.without(row) == without
    other = condition.sized(condition.frame.config.of_grid((2, 11)))
    assert other.frame.ids("red") == rows_of(public / NAME, "red", (2, 11))[0]
    broken = condition.plain("a <|im_end|> b")
    assert 151645 not in condition.frame.words(broken)


def test_words_are_those_tokens_whose_id_says_so(public: Path) -> None:
    """The size's digits are words, the two tokens around them are not."""
    model = opened(public / NAME)
    prefix = model.condition.rows(["dog"], True)
    is_word, (row, without) = model.target.words(prefix.tokens), rows_of(public / NAME, "dog")
    assert is_word is not None
    for mine, ids in zip(is_word, (row, without), strict=True):
        assert mine[-len(ids) :].tolist() == [token < WORDS for token in ids]
    every = model.target.words(torch.arange(184864))
    assert every is not None and int(every.sum()) == WORDS and not every[:16385].any()


@torch.no_grad()
def test_logits_are_those_of_a_patched_qwen2(public: Path, theirs: Any) -> None:
    tokens = pictures(32, 1, len(PROMPTS))
    mine = guided_logits(opened(public / NAME), PROMPTS, tokens, SCALE)
    for prompt, row, logits in zip(PROMPTS, tokens, mine, strict=True):
        rows, image = rows_of(public / NAME, prompt), published(row).tolist()
        want = guided_rows(theirs.model, theirs.lm_head, rows, image, SCALE)
        want = torch.cat([want[:, CODES], want[:, END, None]], 1)
        assert want.std() > 0.5
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


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
        image, rows = published(row), rows_of(public / NAME, prompt, GRID)
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
        row = rows_of(public / NAME, prompt, GRID)[0]
        ids = [*row, *published(torch.from_numpy(result.tokens[number])).tolist(), 152071]
        assert saved[f"{number}.input_ids"].tolist() == ids
        want = theirs.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(saved[f"{number}.hidden_states"], want, rtol=1e-4, atol=1e-4)
    alone, states = pipeline.hidden_states("dog", **SIZE)
    assert alone.tolist() == rows_of(public / NAME, "dog", GRID)[0]
    want = saved["1.hidden_states"][: len(alone)]
    torch.testing.assert_close(states, want, rtol=1e-5, atol=1e-5)
    for wrong in ([16385], [-1], [0] * (TOKENS + 1)):
        with pytest.raises(OptionError, match="not those of an image"):
            pipeline.hidden_states("dog", wrong, **SIZE)


@pytest.mark.parametrize("method", mostly_slow(["ar", "scd@4", "jacobi@4", "sjd-pac@4"]))
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
        rows, image = rows_of(public / NAME, text, GRID), published(row).tolist()
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
