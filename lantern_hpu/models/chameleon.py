"""Chameleon's family, of which Anole draws: names of the files, ids of tokens, and the prompt as tokens.

One table of 65,536 tokens holds words and image codes. Ours begins with the image codes: token t of the checkpoint is
row (t - 4) mod 65536, so that a code is its own row, and the head keeps the rows of the codes alone. The decoder has
1-D rotary positions that count no pads, and norms on each head's queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lantern_hpu.errors import WeightsError, needing
from lantern_hpu.models.condition import Prefix
from lantern_hpu.models.transformer import TransformerConfig
from lantern_hpu.models.weights import Checkpoint, Recipe, llama_block, take

FIRST_IMAGE_TOKEN = 4
PROMPT_SLOTS = 256  # P: what a prompt and its frame must fit into
GRID = (32, 32)
BEGIN, PAD = 0, 1  # <s>, <pad>
END_OF_TURN, BEGIN_IMAGE = 8710, 8197
IGNORED = ("model.vqmodel.", "rotary_emb.inv_freq", "vocabulary_mapping")


def is_chameleon(checkpoint: Checkpoint) -> bool:
    return "model.layers.0.self_attn.q_norm.weight" in checkpoint


def ignored(name: str) -> bool:
    """The stock model's encoder of pictures: pictures are not read here, and its decoder is not in it."""
    return any(part in name for part in IGNORED)


def config_of(checkpoint: Checkpoint, about: dict[str, Any]) -> TransformerConfig:
    """Sizes, from the tensors and config.json."""
    rows, dim = checkpoint.shapes["model.embed_tokens.weight"]
    heads, head_dim = checkpoint.shapes["model.layers.0.self_attn.q_norm.weight"]
    if heads * head_dim != dim:
        why = f"its query norm is {heads} x {head_dim}, its width {dim}"
        raise WeightsError(f"{checkpoint.path} is of an unknown kind", why)
    return TransformerConfig(
        vocab_size=codes_of(about),
        dim=dim,
        layers=int(about.get("num_hidden_layers", 0)) or checkpoint.count("model.layers."),
        heads=heads,
        kv_heads=checkpoint.shapes["model.layers.0.self_attn.k_norm.weight"][0],
        ffn_dim=checkpoint.shapes["model.layers.0.mlp.gate_proj.weight"][0],
        prefix=PROMPT_SLOTS,
        grid=GRID,
        norm_eps=float(about.get("rms_norm_eps", 1e-5)),
        rope_base=rope_base(about),
        rope="1d",
        rope_pairs="half",
        rope_prefix="identity",
        qk_norm=True,
        embed_rows=rows,
    )


def codes_of(about: dict[str, Any]) -> int:
    return int((about.get("vq_config") or {}).get("num_embeddings", 8192))


def rope_base(about: dict[str, Any]) -> float:
    """transformers 5 moved it into `rope_parameters`."""
    nested = about.get("rope_parameters") or {}
    return float(about.get("rope_theta", nested.get("rope_theta", 10000.0)))


def check_draws(checkpoint: Checkpoint, about: dict[str, Any], config: TransformerConfig) -> None:
    """Raise a WeightsError for base Chameleon, whose head was not published for image tokens."""
    first = FIRST_IMAGE_TOKEN
    if "lm_head.weight" not in checkpoint:
        return  # which is said with whatever else is missing
    head = checkpoint.read("lm_head.weight")[first : first + config.vocab_size : 64]
    if about.get("mask_image_logits") or not bool(head.float().abs().sum() > 0):
        why = "this is base Chameleon, which reads images and does not draw them"
        raise WeightsError(f"{checkpoint.path} cannot draw", why, "Anole: --model anole-7b")


def target_recipe(config: TransformerConfig) -> Recipe:
    """Recipe of `target.*`."""
    first = FIRST_IMAGE_TOKEN
    recipe = {
        "target.embed.weight": take("model.embed_tokens.weight", roll=first),
        "target.norm.weight": take("model.norm.weight"),
        "target.head.weight": take("lm_head.weight", rows=(first, first + config.vocab_size)),
    }
    for i in range(config.layers):
        recipe |= llama_block(f"target.layers.{i}.", f"model.layers.{i}.", qk_norm=True)
    return recipe


# ------------------------------------------------------------------------------------ tokens and prompts


def code_name(code: int) -> str:
    """The name of an image token: the code's digits as letters."""
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"


def check_image_tokens(vocabulary: dict[str, int], codes: int, where: Path) -> None:
    """Code c must be token c + 4, by the names of the tokens.

    Raises:
        WeightsError: a name is missing or lies elsewhere.
    """
    for code in range(codes):
        found = vocabulary.get(code_name(code))
        if found != code + FIRST_IMAGE_TOKEN:
            why = f"code {code} is token {found}, expected {code + FIRST_IMAGE_TOKEN}"
            raise WeightsError(f"the tokenizer in {where} is not Chameleon's", why)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint's folder.

    Raises:
        OptionError: transformers is missing. WeightsError: no tokenizer, or one that does not fit.
    """
    with needing("transformers", "it splits prompts"):
        from transformers import PreTrainedTokenizerFast
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise WeightsError(f"{folder} holds no tokenizer.json", hint="download it with the model")
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise WeightsError(f"cannot read {file}", str(error), "download it again") from error


class TokenConditioner:
    """A prompt as tokens, framed as in Anole's training: <s> prompt, end of turn, begin of image."""

    takes_classes = False

    def __init__(self, tokenizer: Any, embed: nn.Embedding, slots: int = PROMPT_SLOTS) -> None:
        self.tokenizer, self.embed, self.slots = tokenizer, embed, slots

    def prepare(self, prompts: Sequence[str]) -> None:
        """Nothing: tokens are quick."""

    def words(self, prompt: str) -> list[int]:
        found: list[int] = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return found

    def ids(self, prompt: str) -> list[int]:
        """Tokens of a framed prompt, at most as many as there are slots."""
        return [BEGIN, *self.words(prompt)[: self.slots - 3], END_OF_TURN, BEGIN_IMAGE]

    def rows(self, prompts: Sequence[str], guidance: bool) -> Prefix:
        rows = [self.ids(prompt) for prompt in prompts]
        if guidance:
            rows += [[BEGIN, BEGIN_IMAGE]] * len(prompts)
        padded = [[PAD] * (self.slots - len(row)) + row for row in rows]
        device = self.embed.weight.device
        ids = torch.tensor(padded, device=device)  # [R, P]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        valid = torch.arange(self.slots, device=device) >= self.slots - lengths[:, None]
        tokens = (ids - FIRST_IMAGE_TOKEN) % self.embed.num_embeddings  # [R, P] rows of our table
        return Prefix(self.embed(tokens), valid, tokens.int())

    def notes(self, prompt: str) -> list[str]:
        count, room = len(self.words(prompt)), self.slots - 3
        if count > room:
            return [f"the prompt has {count} tokens; those past {room} are left out"]
        return []

    def parts(self) -> dict[str, nn.Module]:
        return {}


# ------------------------------------------------------------------------------------ pictures


def vq_name(name: str) -> str:
    """A tensor of Meta's vqgan.ckpt, or of a Hugging Face copy, by the name that `VQModel` gives it."""
    for prefix in ("model.", "vqmodel.", "vqvae."):
        name = name.removeprefix(prefix)
    part, _, rest = name.partition(".")
    if part not in ("encoder", "decoder"):
        return name
    words = rest.split(".")
    if words[0] == "mid":
        place = {"block_1": "0", "attn_1": "1", "block_2": "2"}[words[1]]
        return ".".join([part, "mid", place, *words[2:]])
    if words[0] in ("down", "up"):
        kind = {"block": "res", "attn": "attn"}.get(words[2], words[2])
        return ".".join([part, words[0], words[1], kind, *words[3:]])
    return name


def as_vq(checkpoint: Checkpoint) -> Checkpoint:
    """The tokenizer's tensors by our names; Meta's decoder counts its levels from the finest one."""
    renamed = checkpoint.renamed(vq_name)
    levels = renamed.count("encoder.down.")

    def place(name: str) -> str:
        words = name.split(".")
        if words[:2] == ["encoder", "down"]:
            words[1] = "conv_blocks"
        elif words[:2] == ["decoder", "up"]:
            words[1:3] = ["conv_blocks", str(levels - 1 - int(words[2]))]
        return ".".join(words)

    return renamed.renamed(place)
