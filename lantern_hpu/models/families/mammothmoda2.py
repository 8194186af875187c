"""MammothModa2-Preview's autoregressive stage: names and sizes of the files.

Qwen2.5's network with tables of image tokens beside those of words, and late layers that have a second SwiGLU for
image tokens: which one a token takes is decided by its id. Ours begins with the codes and what closes a row, then
come words, then other image tokens. Pictures are made of the hidden states by a diffusion model of its own, which
is not run here; its tensors lie in the same files and are left out.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from lantern_hpu.core import Sampling
from lantern_hpu.files import reading
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.families.base import (
    COMPUTED,
    QWEN2,
    Family,
    Published,
    check_known,
    llama_config,
    llama_recipe,
    within,
)
from lantern_hpu.models.families.glm_image import generation_sampling
from lantern_hpu.models.files.checkpoint import Checkpoint, Recipe, folder_of, take
from lantern_hpu.models.files.names import Parts
from lantern_hpu.models.text.frames import MammothModa2Frame

KIND = "mammothmoda2_qwen2_5_vl"  # of `llm_config`; the later model on Qwen3-VL has the same names
WORDS, IMAGE_TOKENS, CODES = 152064, 32800, 16384
PIXELS = 32  # along a code, as the authors draw 1024 x 1024 from 32 x 32 codes
GRID = (32, 32)  # where no size is asked for
GUIDANCE = 6.0  # of the authors' published command
SAMPLING = {"mammothmoda2": Sampling(GUIDANCE, 1.0, 2048, 1.0)}
GENERATION = "t2i_generation_config.json"
MODEL = "llm_model.model.language_model."
TABLES = (MODEL + "embed_tokens.weight", MODEL + "gen_embed_tokens.weight")
# What reads pictures, what makes them, and the head of words
IGNORED = (
    *("llm_model.model.visual.", "llm_model.lm_head.", COMPUTED),
    *("gen_transformer.", "gen_vae.", "gen_image_condition_refiner."),
)


def is_mammothmoda2(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> bool:
    return TABLES[1] in checkpoint


def mammothmoda2_config(checkpoint: Checkpoint, about: dict[str, Any]) -> TransformerConfig:
    llm = about["llm_config"]
    text = llm.get("text_config", llm)
    layers, heads = int(text["num_hidden_layers"]), int(text["num_attention_heads"])
    said = str(text.get("moe_type", "ffn"))
    moe = re.fullmatch(rf"ffn(?:-(\d+):{layers})?", said)
    words = checkpoint.shapes.get(TABLES[0], (0, 0))
    check_known(
        checkpoint,
        ("llm_config.model_type", llm.get("model_type"), KIND),
        ("the table of words", words[0], WORDS),
        ("the table of image tokens", checkpoint.shapes[TABLES[1]][0], IMAGE_TOKENS),
        ("text_config.gen_vocab_start_index", text.get("gen_vocab_start_index") or WORDS, WORDS),
        ("text_config.moe_type", said, said if moe else f"ffn-N:{layers}"),
    )
    assert moe is not None
    # Words and drawn tokens have one position on all three axes of its rotary embedding
    return llama_config(
        checkpoint,
        text,
        MODEL,
        words[1] // heads,
        vocab_size=CODES + 1,
        grid=GRID,
        norm_eps=1e-6,
        rope_base=1e6,
        embed_rows=WORDS + IMAGE_TOKENS,
        row_ends=True,
        qkv_bias=True,
        code_pixels=PIXELS,
        word_layers=layers - int(moe[1] or 0),
        word_rows=WORDS,
    )


def mammothmoda2_recipe(config: TransformerConfig) -> Recipe:
    order = MammothModa2Frame.order
    head = tuple((start - WORDS, end - WORDS) for start, end in order.first)
    recipe = llama_recipe(config, MODEL, order, tables=TABLES)
    recipe["target.head.weight"] = take("llm_model.gen_head.weight", rows=head)
    for i in range(config.layers - config.word_layers, config.layers):
        for part in ("gate_up", "down"):
            name = f"target.layers.{i}.ffn.{part}.weight"
            word = recipe[name]
            recipe[name.replace(".ffn.", ".word_ffn.")] = word
            recipe[name] = take(*(name.replace(".mlp.", ".gen_mlp.") for name in word.names))
    return recipe


def read_mammothmoda2(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Published:
    config = mammothmoda2_config(checkpoint, about)
    return Published(
        "mammothmoda2",
        config,
        ConditionConfig("tokens", frame="mammothmoda2"),
        replace(checkpoint, note=checkpoint.note or penalty_note(parts)),
        mammothmoda2_recipe(config),
        sampling=generation_sampling(parts.target, GENERATION, GUIDANCE),
        states=True,
    )


def penalty_note(parts: Parts) -> str:
    """What of the authors' sampling is not done here."""
    file = folder_of(parts.target) / GENERATION
    if not file.is_file():
        return ""
    with reading(file, "download it again") as said:
        penalty = float(said.get("repetition_penalty") or 1.0)
    return "" if penalty == 1 else f"{GENERATION} has a repetition penalty, which is not applied"


# All of its axes have one position, so that "mrope" is the usual rotation
KEYS = QWEN2 | {
    "rope_scaling.type": ("default", "mrope"),
    "rope_scaling.rope_type": ("default", "mrope"),
}
FAMILY = Family(
    is_mammothmoda2,
    read_mammothmoda2,
    SAMPLING,
    IGNORED,
    code_pixels=PIXELS,
    keys={**within("llm_config", KEYS), **within("llm_config.text_config", KEYS)},
)
