"""transformers' own classes for the language models that draw, and prompts framed by their published tokenizers."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from scipy.stats import chi2
from torch import Tensor, nn

from lantern_hpu.core import Request, Sampling
from lantern_hpu.decode.common import sampling_params
from lantern_hpu.models.families.llama import EMU35
from lantern_hpu.models.files.checkpoint import open_checkpoint
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.model import ImageModel, Placement
from lantern_hpu.models.text.prefix import Prefix
from lantern_hpu.models.transformer import rope_table
from lantern_hpu.ops.buffers import additive_mask, prefix_mask
from lantern_hpu.ops.sampling import apply_guidance
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.zoo.find import find_parts

SIMPLEAR, LUMINA2, MAMMOTH = "simplear", "lumina-mgpt-2.0", "mammothmoda2"
JANUS, HUB_JANUS, LUMINA = "janus-pro", "janus-pro-hub", "lumina-mgpt"
ANOLE, SWIN = "anole", "a Chameleon with norms behind its parts"
EMU3, AUTHORS_EMU3 = "emu3", "emu3-authors"
EMU35_IMAGE, U0 = "emu3.5-image", "u0-4b"
LEAST = 40.0  # draws expected of a class
Rows = tuple[list[int], list[int]]  # ids with a prompt, and without
PROMPTS = ("a red apple on the tree", "dog", "the photo of a green house and a blue sky, " * 3)


def opened(folder: Path) -> ImageModel:
    return open_model(find_parts(str(folder))).load(Placement())


def pipeline_of(folder: Path, **how: Any) -> LanternPipeline:
    return LanternPipeline.from_pretrained(str(folder), device="cpu", dtype="float32", **how)


def turns(model: ImageModel, prefix: Prefix, length: int) -> Tensor:
    """Rotations of each row's first positions [R, length, 2, hd / 2]; pads are counted by LlamaGen alone."""
    config = model.target.config
    pads = (~prefix.valid).sum(1, keepdim=True) if config.rope == "1d" else 0
    slot = (torch.arange(length).expand(len(prefix.valid), -1) - pads).clamp(min=0)
    return rope_table(config, length)[slot]


def one_pass(model: ImageModel, prefix: Prefix, tokens: Tensor) -> Tensor:
    """The target's features [R, P + T, H] of a prefix and tokens [R, T], without a cache."""
    x = torch.cat([prefix.embeddings, model.target.embed(tokens)], 1)
    length = x.shape[1]
    valid = torch.cat([prefix.valid, torch.ones_like(tokens, dtype=torch.bool)], 1)
    mask = prefix_mask(valid, torch.ones(length, length, dtype=torch.bool).tril())
    words = model.target.words(torch.cat([prefix.tokens, tokens], 1))
    rope = turns(model, prefix, length)
    return model.target(x, rope, additive_mask(mask, x.dtype), words=words)


def drafted(model: ImageModel, prefix: Prefix, hidden: Tensor, tokens: Tensor) -> Tensor:
    """The drafter's guesses over a whole sequence of tokens [R, T]; hidden [R, E, H]."""
    drafter, entries = model.drafter, hidden.shape[1]
    assert drafter is not None
    ids = torch.cat([prefix.tokens, tokens], 1)[:, drafter.shift :][:, :entries]
    below = torch.ones(entries, entries, dtype=torch.bool).tril()
    valid = torch.cat([prefix.valid, torch.ones_like(tokens, dtype=torch.bool)], 1)
    seen = prefix_mask(valid[:, :entries], below)
    mask = below.expand_as(seen) if drafter.sees_pads else seen
    rope = turns(model, prefix, entries + 1)[:, 1:]
    return drafter(ids, hidden, rope, additive_mask(mask, hidden.dtype))


def guided_logits(
    model: ImageModel, prompts: Sequence[str], tokens: Tensor, scale: float
) -> Tensor:
    """Of every token of these pictures [B, N], in one pass without a cache: [B, N, V]."""
    prefix = model.condition.rows(list(map(Request, prompts)), True)
    hidden = one_pass(model, prefix, torch.cat([tokens, tokens])[:, :-1])
    logits = model.target.head(hidden[:, model.target.config.prefix - 1 :])
    params = sampling_params([Sampling(scale)] * len(tokens), logits.shape[-1])
    return apply_guidance(logits, params, True)


@torch.no_grad()
def guided_rows(
    run: Any, head: Any, rows: tuple[list[int], list[int]], image: list[int], scale: float
) -> Tensor:
    """Guided logits of an image's tokens [N, all tokens], from one pass over each row without any pads."""
    found = []
    for row in rows:
        hidden = run(input_ids=torch.tensor([row + image[:-1]])).last_hidden_state
        found.append(head(hidden[0, len(row) - 1 :]))
    return found[1] + scale * (found[0] - found[1])


def reference_order(logits: Tensor, sampling: Sampling) -> Tensor:
    """transformers' own: temperature, top-k, then top-p of what that leaves. -> probs [n, V]"""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    none = torch.zeros(len(logits), 1, dtype=torch.long)
    scores = logits
    for warper in (
        TemperatureLogitsWarper(sampling.temperature),
        TopKLogitsWarper(sampling.top_k),
        TopPLogitsWarper(sampling.top_p),
    ):
        scores = warper(none, scores)
    return scores.softmax(-1)


def p_value(probs: Tensor, tokens: Tensor) -> float:
    """By chi-square over the rank of each token among the probs of its place.

    Neighbouring ranks are one class until it is expected often enough; what no place expects is part of the last.

    Args:
        probs: [n, V]. tokens: [n].
    """
    ordered = probs.double().sort(descending=True)
    ranks = (ordered.indices == tokens[:, None]).int().argmax(1)  # [n]
    expected = ordered.values.sum(0).tolist()
    observed = torch.bincount(ranks, minlength=len(expected)).tolist()
    classes = [[0.0, 0.0]]
    for want, got in zip(expected, observed, strict=True):
        if classes[-1][0] >= LEAST:
            classes.append([0.0, 0.0])
        classes[-1][0] += want
        classes[-1][1] += got
    if classes[-1][0] < LEAST:
        want, got = classes.pop()
        classes[-1][0] += want
        classes[-1][1] += got
    assert len(classes) > 3
    distance = sum((got - want) ** 2 / want for want, got in classes)
    return float(chi2.sf(distance, len(classes) - 1))


def obeys(logits: Tensor, columns: int, end: int | None, codes: slice) -> Tensor:
    """Greedy tokens [N] under the grammar, by hand: the row's end where it must stand, the best code elsewhere."""
    best = logits[:, codes].argmax(-1) + codes.start
    if end is None:
        return best
    at_end = torch.arange(1, len(logits) + 1) % (columns + 1) == 0
    return torch.where(at_end, end, best)


def a_row_a_head(state: dict[str, Tensor], heads: int = 2) -> dict[str, Tensor]:
    """Query and key norms as transformers has them; Lumina-mGPT's authors save one row for all heads."""
    return {n: t.repeat(heads, 1) if t.shape[:1] == (1,) else t for n, t in state.items()}


def lumina_state(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def lumina(folder: Path) -> Any:
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    model: Any = ChameleonForConditionalGeneration(ChameleonConfig.from_pretrained(folder))
    state = lumina_state(folder)
    assert state["model.layers.0.self_attn.q_norm.weight"].shape == (1, 16)
    model.load_state_dict(a_row_a_head(state))
    return model.float().eval()


def words_of(folder: Path, text: str) -> list[int]:
    """A text's ids by the published tokenizer, without those of its ends."""
    ids: list[int] = tokenizer_of(folder)(text, add_special_tokens=False)["input_ids"]
    return ids


@cache
def tokenizer_of(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def lumina_ids(folder: Path, prompt: str) -> Rows:
    """By the ids and words of the authors' description."""
    text = f"Generate an image of 512x512 according to the following prompt:\n{prompt}"
    image = [8197, 8804 + 16, 8804 + 16]
    return [0, *words_of(folder, text), 8710, *image], image


def emu3(folder: Path) -> Any:
    from transformers import Emu3ForConditionalGeneration

    return Emu3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def emu3_ids(folder: Path, text: str, grid: str = "8*8") -> list[int]:
    """As the authors' processor writes a prompt that is to be drawn."""
    return words_of(folder, f"<|extra_203|>{text}<|image start|>{grid}<|image token|>")


def emu3_rows(folder: Path, prompt: str, grid: str = "8*8") -> Rows:
    return emu3_ids(folder, prompt + PRAISE, grid), emu3_ids(folder, NEGATIVE, grid)


PRAISE = " masterpiece, film grained, best quality."
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)


@dataclass(frozen=True)
class Theirs:
    """transformers' network, the rows of a prompt by the published tokenizer, and its authors' numbers of tokens."""

    run: Any
    head: Any
    rows: Callable[[str], Rows]
    codes: slice
    end: int | None = None  # what closes a row

    def numbered(self, tokens: Tensor) -> Tensor:
        """Ours as the authors number them."""
        known = self.codes.stop - self.codes.start
        end = -1 if self.end is None else self.end
        return torch.where(tokens == known, end, tokens + self.codes.start)


def their_anole(folder: Path) -> Theirs:
    from transformers import ChameleonForConditionalGeneration

    model: Any = ChameleonForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)

    def rows(prompt: str) -> Rows:
        return [0, *words_of(folder, prompt), 8710, 8197], [0, 8197]

    return Theirs(model.model.eval(), model.lm_head, rows, slice(4, 8196))


def their_lumina(folder: Path) -> Theirs:
    model = lumina(folder)
    rows = partial(lumina_ids, folder)
    return Theirs(model.model, model.lm_head, rows, slice(4, 8196), 8803)


def their_emu3(folder: Path) -> Theirs:
    model, rows = emu3(folder), partial(emu3_rows, folder)
    return Theirs(model.model.text_model, model.lm_head, rows, slice(151854, 184622), 151846)


def janus(folder: Path) -> Any:
    from transformers import JanusForConditionalGeneration

    return JanusForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def their_janus(folder: Path) -> Theirs:
    """Codes have a table and a head of their own: here they are numbered behind the words."""
    model = janus(folder)
    first = model.config.text_config.vocab_size

    def run(input_ids: Tensor) -> Any:
        words = model.get_input_embeddings()(input_ids.clamp(max=first - 1))
        codes = model.prepare_embeddings_for_image_generation((input_ids - first).clamp(min=0))
        x = torch.where(input_ids[..., None] < first, words, codes)
        return model.model.language_model(inputs_embeds=x)

    def head(hidden: Tensor) -> Tensor:
        return F.pad(model.model.generation_head(hidden), (first, 0))

    def rows(prompt: str) -> Rows:
        """The conversation as deepseek-ai's processor writes it; pads take the place of its inside."""
        begin = "<｜begin▁of▁sentence｜>"
        text = f"{begin}<|User|>: {prompt.strip()}\n\n<|Assistant|>:<begin_of_image>"
        ids = words_of(folder, text)
        return ids, [100000, *[100015] * (len(ids) - 2), 100016]

    return Theirs(run, head, rows, slice(first, first + 64))


def with_settings(folder: Path, goal: Path, **settings: Any) -> Path:
    """A checkpoint without a drafter, whose config.json says something else."""
    drafter = shutil.ignore_patterns("drafter")
    shutil.copytree(folder, goal, ignore=drafter, copy_function=lambda a, b: Path(b).symlink_to(a))
    about = json.loads((folder / "config.json").read_text())
    (goal / "config.json").unlink()
    (goal / "config.json").write_text(json.dumps(about | settings))
    return goal


SIMPLEAR_NEGATIVE = (
    "An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, "
    "bad eyes, bad limbs, distortion"
)


def simplear_rows(folder: Path, prompt: str, negative: str = SIMPLEAR_NEGATIVE) -> Rows:
    """By the authors' templates."""
    given = words_of(folder, f"<|t2i|>A highly realistic image of {prompt}<|soi|>")
    return given, words_of(folder, f"<|t2i|>{negative}<|soi|>")


def simplear(folder: Path) -> Any:
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def lumina2_rows(folder: Path, prompt: str, height: int = 768, width: int = 768) -> Rows:
    """By the ids and words of the authors' description."""
    text = f"Generate an image of {width}x{height} according to the following prompt:\n{prompt}<reserved08706>"
    names = [f"<reserved{8800 + side // 32:05d}>" for side in (height, width)]
    image = [151665, *(tokenizer_of(folder).get_vocab()[name] for name in names)]
    return [151643, *words_of(folder, text), *image], image


def lumina2(folder: Path) -> Any:
    """transformers' network, of which the text is read alone; 2.0's names and its norms of one row."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    config = ChameleonConfig.from_pretrained(folder, vocabulary_map={})
    model: Any = ChameleonForConditionalGeneration(config)
    state = lumina_state(folder)
    assert state["model.layers.0.self_attn.q_norm.weight"].shape == (1, 8)
    lacks, unknown = model.load_state_dict(a_row_a_head(state), strict=False)
    assert not unknown and all(name.startswith("model.vqmodel.") for name in lacks)
    return model.float().eval()


class Chosen(nn.Module):
    """Two MLPs of a layer, of which a token takes one by its id."""

    def __init__(self, word: nn.Module, image: nn.Module, ids: list[Tensor]) -> None:
        super().__init__()
        self.word, self.image, self.ids = word, image, ids

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.ids[0][..., None] < 152064, self.word(x), self.image(x))


def mammoth(folder: Path) -> Any:
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
    tables = {
        "model.embed_tokens.weight": [
            f"{root}embed_tokens.weight",
            f"{root}gen_embed_tokens.weight",
        ],
        "lm_head.weight": ["llm_model.lm_head.weight", "llm_model.gen_head.weight"],
    }
    state = {}
    for name in model.state_dict():
        old = root + name.removeprefix("model.")
        old = old.replace("mlp.word.", "mlp.").replace("mlp.image.", "gen_mlp.")
        parts = tables.get(name, [old])
        state[name] = torch.cat([stored.read(part).float() for part in parts])
    model.load_state_dict(state)
    return model


def mammoth_rows(folder: Path, prompt: str, grid: tuple[int, int] = (32, 32)) -> Rows:
    """By the authors' template."""
    text = (
        "<|im_start|>system\nYou are a helpful image generator.<|im_end|>\n<|im_start|>user\n"
        f"{prompt}<|im_end|>\n<|im_start|>assistant\n"
    )
    words, size = (words_of(folder / "text", part) for part in (text, f"{grid[1]}*{grid[0]}"))
    row = [*words, 152070, *size, 152069]
    return row, row[-10:]


def their_simplear(folder: Path) -> Theirs:
    model = simplear(folder)
    return Theirs(model.model, model.lm_head, partial(simplear_rows, folder), slice(151672, 215672))


def their_lumina2(folder: Path) -> Theirs:
    model = lumina2(folder)
    rows = partial(lumina2_rows, folder)
    return Theirs(model.model, model.lm_head, rows, slice(155000, 171384), 151670)


def their_mammoth(folder: Path) -> Theirs:
    model = mammoth(folder)
    rows = partial(mammoth_rows, folder)
    return Theirs(model.model, model.lm_head, rows, slice(152072, 168456), 152064)


def emu35_rows(folder: Path, of: str, prompt: str, grid: tuple[int, int] = (64, 64)) -> Rows:
    """By the authors' templates; `of` tells of what the unconditional row is."""
    size = words_of(folder / "text", "*".join(map(str, grid)))

    def row(helps: str, text: str) -> list[int]:
        written = f"You are a helpful assistant{helps}. USER: {text} ASSISTANT: "
        words = words_of(folder / "text", written)
        return [151849, *words, 151746, 151852, *size, 151851]

    return row(" for t2i task", prompt), row(of, "")


def their_emu35(folder: Path, of: str = "") -> Theirs:
    """transformers' Qwen3 is the same network."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    about = json.loads((folder / "config.json").read_text())
    grid = open_model(find_parts(str(folder))).config.target.grid
    names = ("architectures", "model_type", "torch_dtype")
    config: Any = Qwen3Config(**{n: value for n, value in about.items() if n not in names})
    assert config.head_dim * config.num_attention_heads != config.hidden_size
    model: Any = Qwen3ForCausalLM(config)
    model.load_state_dict({name: tensor.float() for name, tensor in lumina_state(folder).items()})
    rows = partial(emu35_rows, folder, of, grid=grid)
    return Theirs(model.model.eval(), model.lm_head, rows, slice(151854, 282926), 151846)


def small_pictures(monkeypatch: pytest.MonkeyPatch, *grids: tuple[int, int]) -> None:
    """Emu3.5's published sizes are thousands of codes: others in their place."""
    monkeypatch.setitem(EMU35.sizes, "grid", grids[0])
    monkeypatch.setitem(EMU35.sizes, "grids", grids)


THEIRS: dict[str, Callable[[Path], Theirs]] = {
    ANOLE: their_anole,
    SWIN: their_anole,
    HUB_JANUS: their_janus,
    LUMINA: their_lumina,
    EMU3: their_emu3,
    SIMPLEAR: their_simplear,
    LUMINA2: their_lumina2,
    MAMMOTH: their_mammoth,
    EMU35_IMAGE: their_emu35,
    U0: partial(their_emu35, of=" for t2i task"),
}
