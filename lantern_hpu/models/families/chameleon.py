"""Chameleon's family, of which Anole draws: names and sizes of the files.

One table of 65,536 tokens holds words and image codes. Ours begins with the image codes, so that a code is its own
row (`frames.AnoleFrame`), and the head keeps the rows of the codes alone. The decoder has 1-D rotary positions that
count no pads, and norms on each head's queries and keys. transformers stores a row of each norm a head, the authors
one for all heads.
"""

from __future__ import annotations

from typing import Any

from lantern_hpu.core import Sampling
from lantern_hpu.errors import WeightsError
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.families.base import (
    COMPUTED,
    LLAMA,
    Family,
    Published,
    llama_config,
    llama_recipe,
)
from lantern_hpu.models.files.checkpoint import Checkpoint, Recipe, head_norms
from lantern_hpu.models.files.names import Parts
from lantern_hpu.models.text.frames import FIRST_IMAGE_TOKEN, AnoleFrame, TokenOrder

GRID = (32, 32)
TOKENS = 65536  # rows of the table; relatives with another one have tokenizers of their own
EMBED, FIRST = "model.embed_tokens.weight", "model.layers.0.self_attn."
SAMPLING = {"chameleon": Sampling(3.0, 1.0, 2000, 1.0)}
KEYS = {**LLAMA, "swin_norm": (False, True)}
# Where the stock model has an encoder of pictures alone, which is not read
INNER_VQ = "model.vqmodel."
IGNORED = (INNER_VQ, COMPUTED, "vocabulary_mapping")


def is_chameleon(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> bool:
    rows = checkpoint.shapes.get(EMBED, (0,))[0]
    return rows == TOKENS and len(checkpoint.shapes.get(FIRST + "q_norm.weight", ())) == 2


def head_count(checkpoint: Checkpoint, about: dict[str, Any]) -> int:
    """Heads of a layer: by config.json, or by the width of a head's norm."""
    dim, size = checkpoint.shapes[EMBED][1], norm_shape(checkpoint)[1]
    heads = int(about.get("num_attention_heads") or dim // size)
    if heads * size != dim:
        why = f"{heads} heads, norms of {size} features, width {dim}"
        raise WeightsError(f"{checkpoint.path} is of an unknown format", why)
    return heads


def norm_shape(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Rows and features of the first query norm."""
    return checkpoint.shapes[FIRST + "q_norm.weight"]


def chameleon_config(
    checkpoint: Checkpoint, about: dict[str, Any], **sizes: Any
) -> TransformerConfig:
    """Sizes of its network; `sizes` are those that its relatives have in a way of their own."""
    usual: dict[str, Any] = {
        "vocab_size": int((about.get("vq_config") or {}).get("num_embeddings", 8192)),
        "grid": GRID,
        "norm_eps": 1e-5,
        "rope_base": 10000.0,
        "qk_norm": True,
        "sandwich_norms": bool(about.get("swin_norm")),
        "input_norms": not about.get("swin_norm"),
    }
    said = about | {"num_attention_heads": head_count(checkpoint, about)}
    return llama_config(checkpoint, said, "model.", 1, **usual | sizes)


def check_draws(checkpoint: Checkpoint, about: dict[str, Any], config: TransformerConfig) -> None:
    """Raise a WeightsError for base Chameleon, whose head was not published for image tokens."""
    first = FIRST_IMAGE_TOKEN
    if "lm_head.weight" not in checkpoint:
        return  # an error names it with whatever else is missing
    head = checkpoint.read("lm_head.weight")[first : first + config.vocab_size : 64]
    if about.get("mask_image_logits") or not bool(head.float().abs().sum() > 0):
        why = "this is base Chameleon, which reads images and does not draw them"
        raise WeightsError(f"{checkpoint.path} cannot draw", why, "Anole: --model anole-7b")


def chameleon_recipe(
    checkpoint: Checkpoint, config: TransformerConfig, order: TokenOrder
) -> Recipe:
    recipe = llama_recipe(config, "model.", order)
    for i in range(config.layers):
        goal, old = f"target.layers.{i}.", f"model.layers.{i}."
        recipe |= head_norms(goal, old, checkpoint, config.heads, config.kv)
        if not config.input_norms:  # by the same names, behind attention and SwiGLU
            for part in ("attention", "ffn"):
                recipe[f"{goal}{part}_post_norm.weight"] = recipe.pop(f"{goal}{part}_norm.weight")
    return recipe


def read_chameleon(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Published:
    config = chameleon_config(checkpoint, about, top_p_first=True)
    check_draws(checkpoint, about, config)
    recipe = chameleon_recipe(checkpoint, config, AnoleFrame.order)
    tokenizer = tokenizer_of(checkpoint)
    return Published("chameleon", config, ConditionConfig("tokens"), checkpoint, recipe, tokenizer)


def tokenizer_of(checkpoint: Checkpoint) -> Checkpoint | None:
    """The image tokenizer in the model's own file, if it is there with its decoder."""
    inside = checkpoint.under(INNER_VQ)
    return inside if "decoder.conv_in.weight" in inside else None


FAMILY = Family(is_chameleon, read_chameleon, SAMPLING, IGNORED, keys=KEYS)
