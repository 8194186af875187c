"""MammothModa2-Preview's autoregressive stage: names and sizes of the files.

Qwen2.5's network with tables of image tokens next to those of words, and late layers that have a second SwiGLU for
image tokens: which one a token takes is decided by its id. Ours begins with the codes and what closes a row, then
come words, then other image tokens. Pictures are made of the hidden states by a diffusion model of its own, which
is not run here; its tensors lie in the same files and are left out.
"""

from __future__ import annotations

import re
from dataclasses import replace

from lantern_hpu.core import Sampling
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.families.base import (
    COMPUTED,
    QWEN2,
    Family,
    Files,
    check_known,
    llama_config,
    llama_recipe,
)
from lantern_hpu.models.files.checkpoint import Source

KIND = "mammothmoda2_qwen2_5_vl"  # of `llm_config`; the later model on Qwen3-VL has the same names
WORDS, IMAGE_TOKENS = 152064, 32800
MODEL = "llm_model.model.language_model."
TABLES = (f"{MODEL}embed_tokens.weight", f"{MODEL}gen_embed_tokens.weight")


def mammothmoda2_config(family: Family, files: Files) -> TransformerConfig:
    """Words and drawn tokens have one position on all three axes of its rotary embedding."""
    text = family.section(files.hf_config)
    layers = int(text["num_hidden_layers"])
    moe_type = str(text.get("moe_type", "ffn"))
    moe = re.fullmatch(rf"ffn(?:-(\d+):{layers})?", moe_type)
    words, images = (files.checkpoint.shapes.get(name, (0,))[0] for name in TABLES)
    kind = files.hf_config["llm_config"].get("model_type")
    check_known(
        files.checkpoint,
        ("llm_config.model_type", kind, KIND),
        ("the table of words", words, WORDS),
        ("the table of image tokens", images, IMAGE_TOKENS),
        ("text_config.gen_vocab_start_index", text.get("gen_vocab_start_index") or WORDS, WORDS),
        ("text_config.moe_type", moe_type, moe_type if moe else f"ffn-N:{layers}"),
    )
    assert moe is not None
    return llama_config(family, files, word_layers=layers - int(moe[1] or 0))


def mammothmoda2_recipe(
    family: Family, files: Files, config: TransformerConfig
) -> dict[str, Source]:
    recipe = llama_recipe(family, files, config)
    recipe["target.embed.weight"] = replace(recipe["target.embed.weight"], names=TABLES)
    assert family.order is not None
    drawn = tuple((start - WORDS, end - WORDS) for start, end in family.order.first)
    recipe["target.head.weight"] = Source.of("llm_model.gen_head.weight", rows=drawn)
    for i in range(config.layers - config.word_layers, config.layers):
        for part in ("gate_up", "down"):
            name = f"target.layers.{i}.ffn.{part}.weight"
            word = recipe[name]
            recipe[name.replace(".ffn.", ".word_ffn.")] = word
            recipe[name] = Source.of(*(name.replace(".mlp.", ".gen_mlp.") for name in word.names))
    return recipe


MAMMOTHMODA2 = Family(
    "mammothmoda2",
    Sampling(6.0, 1.0, 2048, 1.0),  # guidance of the authors' published command
    marker=TABLES[1],
    frame="mammothmoda2",
    model=MODEL,
    # What reads pictures, what makes them, and the head of words
    ignored=(
        *("llm_model.model.visual.", "llm_model.lm_head.", COMPUTED),
        *("gen_transformer.", "gen_vae.", "gen_image_condition_refiner."),
    ),
    sections=("llm_config.text_config", "llm_config"),
    # All of its axes have one position, so that "mrope" is the usual rotation
    keys=QWEN2
    | {
        "rope_scaling.type": ("default", "mrope"),
        "rope_scaling.rope_type": ("default", "mrope"),
    },
    sizes={
        "norm_eps": 1e-6,
        "rope_base": 1e6,
        "grid": (32, 32),  # where no size is asked for
        "embed_rows": WORDS + IMAGE_TOKENS,
        "qkv_bias": True,
        "code_pixels": 32,  # as the authors draw 1024 x 1024 from 32 x 32 codes
        "word_rows": WORDS,
    },
    config=mammothmoda2_config,
    recipe=mammothmoda2_recipe,
    generation="t2i_generation_config.json",
    states=True,
)
