"""transformers' own classes for the language models that draw, and prompts framed by their published tokenizers."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lantern_hpu.core import Request, Sampling
from lantern_hpu.decode.common import sampling_params
from lantern_hpu.models.families.llama import EMU35
from lantern_hpu.models.files.checkpoint import open_checkpoint
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.model import ImageModel, Placement
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


PROMPTS = ("a red apple on the tree", "dog", "the photo of a green house and a blue sky, " * 3)


def opened(folder: Path) -> ImageModel:
    return open_model(find_parts(str(folder))).load(Placement())


def pipeline_of(folder: Path, **how: Any) -> LanternPipeline:
    return LanternPipeline.from_pretrained(str(folder), device="cpu", dtype="float32", **how)


def guided_logits(
    model: ImageModel, prompts: Sequence[str], tokens: Tensor, scale: float
) -> Tensor:
    """Of every token of these pictures [B, N], in one pass without a cache: [B, N, V]."""
    prefix = model.condition.rows(list(map(Request, prompts)), True)
    rows = torch.cat([tokens, tokens])  # [R, N]
    x = torch.cat([prefix.embeddings, model.target.embed(rows[:, :-1])], 1)
    length = x.shape[1]
    valid = torch.cat([prefix.valid, torch.ones_like(rows[:, :-1], dtype=torch.bool)], 1)
    mask = prefix_mask(valid, torch.ones(length, length, dtype=torch.bool).tril())
    pads = (~prefix.valid).sum(1, keepdim=True)
    places = (torch.arange(length) - pads).clamp(min=0)
    rope = rope_table(model.target.config, length)[places]
    words = model.target.words(torch.cat([prefix.tokens, rows[:, :-1]], 1))
    hidden = model.target(x, rope, additive_mask(mask, x.dtype), words=words)
    logits = model.target.head(hidden[:, model.target.config.prefix - 1 :])
    return apply_guidance(
        logits, sampling_params([Sampling(scale)] * len(tokens), logits.shape[-1]), True
    )


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


def lumina_ids(folder: Path, prompt: str) -> tuple[list[int], list[int]]:
    """The conditional and the unconditional row, by the ids and words of the authors' description."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    text = f"Generate an image of 512x512 according to the following prompt:\n{prompt}"
    image = [8197, 8804 + 16, 8804 + 16]
    return [0, *tokenizer(text, add_special_tokens=False)["input_ids"], 8710, *image], image


def emu3(folder: Path) -> tuple[Any, Any]:
    """transformers' model and tokenizer."""
    from transformers import Emu3ForConditionalGeneration, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model: Any = Emu3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    return model, tokenizer


def emu3_ids(tokenizer: Any, text: str, grid: str = "8*8") -> Tensor:
    """As the authors' processor writes a prompt that is to be drawn: [1, T]."""
    start, image = "<|extra_203|>", f"<|image start|>{grid}<|image token|>"
    found = tokenizer(start + text + image, return_tensors="pt", add_special_tokens=False)
    ids: Tensor = found["input_ids"]
    return ids


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
    rows: Callable[[str], tuple[list[int], list[int]]]
    codes: slice
    end: int | None = None  # what closes a row

    def numbered(self, tokens: Tensor) -> Tensor:
        """Ours as the authors number them."""
        known = self.codes.stop - self.codes.start
        end = -1 if self.end is None else self.end
        return torch.where(tokens == known, end, tokens + self.codes.start)


def their_anole(folder: Path) -> Theirs:
    from transformers import ChameleonForConditionalGeneration, PreTrainedTokenizerFast

    model: Any = ChameleonForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

    def rows(prompt: str) -> tuple[list[int], list[int]]:
        words = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return [0, *words, 8710, 8197], [0, 8197]

    return Theirs(model.model.eval(), model.lm_head, rows, slice(4, 8196))


def their_lumina(folder: Path) -> Theirs:
    model = lumina(folder)
    rows = partial(lumina_ids, folder)
    return Theirs(model.model, model.lm_head, rows, slice(4, 8196), 8803)


def their_emu3(folder: Path) -> Theirs:
    model, tokenizer = emu3(folder)

    def rows(prompt: str) -> tuple[list[int], list[int]]:
        given, bare = (emu3_ids(tokenizer, t)[0].tolist() for t in (prompt + PRAISE, NEGATIVE))
        return given, bare

    return Theirs(model.model.text_model, model.lm_head, rows, slice(151854, 184622), 151846)


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


def simplear_rows(
    folder: Path, prompt: str, negative: str = SIMPLEAR_NEGATIVE
) -> tuple[list[int], list[int]]:
    """The conditional and the unconditional row, by the authors' templates."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    texts = (f"A highly realistic image of {prompt}", negative)
    ids = [
        tokenizer(f"<|t2i|>{text}<|soi|>", add_special_tokens=False)["input_ids"] for text in texts
    ]
    return ids[0], ids[1]


def simplear(folder: Path) -> Any:
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def lumina2_rows(
    folder: Path, prompt: str, height: int = 768, width: int = 768
) -> tuple[list[int], list[int]]:
    """The conditional and the unconditional row, by the ids and words of the authors' description."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    text = f"Generate an image of {width}x{height} according to the following prompt:\n{prompt}<reserved08706>"
    names = [f"<reserved{8800 + side // 32:05d}>" for side in (height, width)]
    image = [151665, *(tokenizer.get_vocab()[name] for name in names)]
    return [151643, *tokenizer(text, add_special_tokens=False)["input_ids"], *image], image


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


def tokenizer_of(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "text" / "tokenizer.json"))


def mammoth_rows(
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


def emu35_rows(
    folder: Path, of: str, prompt: str, grid: tuple[int, int] = (64, 64)
) -> tuple[list[int], list[int]]:
    """The conditional and the unconditional row, by the authors' templates; `of` tells of what the latter is."""
    tokenizer = tokenizer_of(folder)
    size = tokenizer("*".join(map(str, grid)), add_special_tokens=False)["input_ids"]

    def row(helps: str, text: str) -> list[int]:
        written = f"You are a helpful assistant{helps}. USER: {text} ASSISTANT: "
        words = tokenizer(written, add_special_tokens=False)["input_ids"]
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
    LUMINA: their_lumina,
    EMU3: their_emu3,
    SIMPLEAR: their_simplear,
    LUMINA2: their_lumina2,
    MAMMOTH: their_mammoth,
    EMU35_IMAGE: their_emu35,
    U0: partial(their_emu35, of=" for t2i task"),
}
