"""Emu3, Emu3.5, U0, Janus-Pro, SimpleAR and MammothModa2: networks of transformers' Llama and Qwen2.

Tables hold words and codes; ours begin with the codes, then comes what closes a row.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from lantern_hpu.core import Sampling
from lantern_hpu.errors import Arg, WeightsError, words
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.families.base import (
    COMPUTED,
    QWEN2,
    Family,
    Files,
    check_keys,
    check_trained,
    llama_config,
    llama_recipe,
    square,
    unknown_format,
)
from lantern_hpu.models.files.checkpoint import Checkpoint, Source
from lantern_hpu.models.files.names import CODE_PIXELS

# Emu3-Gen has grouped queries, and 184,622 tokens, of which 32,768 are codes of a tokenizer of its own. Names are
# the authors' (`model.layers`), or transformers' of any version; the former are used here. Emu3.5-Image has Qwen3's
# network: heads wider than the width divided by them, whose queries and keys are normalised; of 282,926 tokens
# 131,072 are codes. Xiaomi-Robotics-U0 is tuned from it, in two sizes.


AREA = 720 * 720  # pixels of a picture, where config.json does not say it
PIXELS = 8  # along a code
# Rows and columns of pictures that Emu3.5 was trained to draw; the first unless asked. Its authors begin with 55 x 73
GRIDS = (
    *((64, 64), (55, 73), (73, 55), (52, 78), (78, 52)),
    *((47, 85), (85, 47), (41, 97)),
)


def emu3_config(family: Family, files: Files) -> TransformerConfig:
    area = int(files.hf_config.get("image_area", AREA))
    side = round(math.sqrt(area) / PIXELS)
    return llama_config(family, files, grid=(side, side))


def emu35_config(family: Family, files: Files) -> TransformerConfig:
    """Raises a WeightsError for the general Emu3.5, which has the same tensors and is known by its name alone."""
    name = files.known_as
    if re.search(r"\bemu3\.5(?![-.\w])", name) and "emu3.5-image" not in name:
        why = "by its name this is the general Emu3.5, which interleaves text and pictures"
        hint = words(Arg("model", "emu3.5-image"), ", or a folder of another name")
        raise WeightsError(f"{files.checkpoint.path} is not used to draw", why, hint)
    return llama_config(family, files)


def is_u0(files: Files) -> bool:
    """By its tokenizer's name, which config.json has, or its own."""
    return "unis" in str(files.hf_config.get("model_type")).lower() or bool(
        re.search(r"\bu0\b", files.known_as)
    )


EMU3 = Family(
    "emu3",
    Sampling(3.0, 1.0, 2048, 1.0),
    rows=184622,
    frame="emu3",
    vq="BAAI/Emu3-VisionTokenizer",
    rename=(
        (r"^(model\.text_model\.|text_model\.model\.)", "model."),
        (r"^text_model\.lm_head\.", "lm_head."),
        (r"model\.vqmodel\.", "vqmodel."),
    ),
    tokenizer="vqmodel.",
    sections=("text_config", ""),
    sizes={"rope_base": 1e6, "code_pixels": PIXELS},
    config=emu3_config,
)
EMU35 = Family(
    "emu3.5",
    Sampling(5.0, 1.0, 5120, 1.0),
    marker="q_norm.weight",
    rows=282926,
    also=lambda files: not is_u0(files),
    frame="emu3.5",
    vq="BAAI/Emu3.5-VisionTokenizer",
    sizes={
        "rope_base": 1e6,
        "qk_norm": "rms",
        "code_pixels": CODE_PIXELS,
        "grid": GRIDS[0],
        "grids": GRIDS,
    },
    config=emu35_config,
)
U0 = replace(EMU35, name="u0", also=is_u0, frame="u0", config=llama_config)


# --------------------------------------------------------------------------------------- Janus-Pro
# Codes have embeddings 8 wide that an MLP widens, and a head of two matrices draws the next one; the tokenizer is
# LlamaGen's VQ-16, in the same file. Names are those of the authors' files, or of transformers'
# JanusForConditionalGeneration; the former are used here.


LANGUAGE = "language_model.model."


def janus_config(family: Family, files: Files) -> TransformerConfig:
    """A picture has as many codes as the picture that the model reads has patches."""
    shapes = files.checkpoint.shapes
    codes, code_dim = shapes["gen_embed.weight"]
    vision = files.hf_config.get("vision_config") or {}
    vision = vision.get("params") or vision
    return llama_config(
        family,
        files,
        vocab_size=codes,
        grid=square(int(vision.get("image_size", 384)), int(vision.get("patch_size", 16))),
        code_dim=code_dim,
        head_hidden=shapes["gen_head.output_mlp_projector.weight"][0],
    )


def janus_recipe(family: Family, files: Files, config: TransformerConfig) -> dict[str, Source]:
    """Recipe of `target.*`, and of `words`, the language model's table."""
    recipe = llama_recipe(family, files, config)
    del recipe["target.head.weight"]
    recipe["words.weight"] = recipe.pop("target.embed.weight")
    recipe["target.embed.table.weight"] = Source.of("gen_embed.weight")
    for part in ("weight", "bias"):
        recipe |= {
            f"target.embed.fc1.{part}": Source.of(f"gen_aligner.layers.0.{part}"),
            f"target.embed.fc2.{part}": Source.of(f"gen_aligner.layers.2.{part}"),
            f"target.head.fc1.{part}": Source.of(f"gen_head.output_mlp_projector.{part}"),
            f"target.head.fc2.{part}": Source.of(f"gen_head.vision_head.{part}"),
        }
    return recipe


def janus_condition(family: Family, checkpoint: Checkpoint) -> ConditionConfig:
    rows = checkpoint.shapes[f"{LANGUAGE}embed_tokens.weight"][0]
    return ConditionConfig("tokens", frame=family.frame, rows=rows)


JANUS = Family(
    "janus",
    Sampling(5.0, 1.0, 0, 1.0),
    marker="gen_embed.weight",
    frame="janus",
    rename=(
        (r"^model\.language_model\.", LANGUAGE),
        (r"^model\.generation_embeddings\.", "gen_embed."),
        (r"^model\.generation_aligner\.fc1\.", "gen_aligner.layers.0."),
        (r"^model\.generation_aligner\.hidden_layers\.0\.", "gen_aligner.layers.2."),
        (r"^model\.generation_head\.proj_out\.", "gen_head.output_mlp_projector."),
        (r"^model\.generation_head\.", "gen_head."),
        (r"^model\.vqmodel\.", "gen_vision_model."),
        (r"^(gen_vision_model\.(en|de)coder)\.(down|up)\.(\d+)\.block", r"\1.conv_blocks.\4.res"),
        (r"^(gen_vision_model\.(en|de)coder)\.(down|up)\.", r"\1.conv_blocks."),
        (r"^(gen_vision_model\..*mid)\.block_1\.", r"\1.0."),
        (r"^(gen_vision_model\..*mid)\.attn_1\.", r"\1.1."),
        (r"^(gen_vision_model\..*mid)\.block_2\.", r"\1.2."),
    ),
    model=LANGUAGE,
    # Neither the language model's own head, nor what reads pictures
    reads=(LANGUAGE, "gen_embed.", "gen_aligner.", "gen_head."),
    tokenizer="gen_vision_model.",
    normalized_codes=True,
    sections=("language_config", "text_config"),
    other_keys={
        "vq_config.hidden_act": "gelu",
        "gen_aligner_config.params.projector_type": "mlp_gelu",
    },
    sizes={"norm_eps": 1e-6, "embed_rows": None},  # words have a table of their own
    config=janus_config,
    recipe=janus_recipe,
    condition=janus_condition,
)


# ---------------------------------------------------------------------------------------- SimpleAR
# A plain Qwen2 with 215,672 tokens: words, then the 64,000 codes of NVIDIA's Cosmos tokenizer. Pictures are squares
# without row ends, whose size no token says.


SIZES = (512, 1024)  # pixels of a side that were trained; the last unless asked


def simplear_config(family: Family, files: Files) -> TransformerConfig:
    size = files.parts.image_size or SIZES[-1]
    check_trained(size, "SimpleAR", SIZES)
    return llama_config(family, files, grid=square(size))


SIMPLEAR = Family(
    "simplear",
    Sampling(6.0, 1.0, 0, 1.0),
    marker="q_proj.bias",
    rows=215672,  # a plain Qwen2 has others
    vq="decoder.jit",
    frame="simplear",
    keys=QWEN2,
    head_dim=64,  # of the 0.5B
    sizes={"norm_eps": 1e-6, "rope_base": 1e6, "qkv_bias": True},
    config=simplear_config,
    tied=True,
)


# ------------------------------------------------------------------------------------ MammothModa2
# The autoregressive stage of MammothModa2-Preview: Qwen2.5's network with tables of image tokens next to those of
# words, and late layers that have a second SwiGLU for image tokens, chosen by a token's id. Behind codes and row ends
# come words, then other image tokens. Pictures are made of the hidden states by a diffusion model of its own, which is
# not run here; its tensors lie in the same files and are left out.


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
    if moe is None:
        unknown_format(files.checkpoint, f"moe_type is {moe_type}, where ffn-N:{layers} is known")
    tables = {"the table of words": words, "the table of image tokens": images}
    known = {
        "llm_config.model_type": KIND,
        "llm_config.text_config.gen_vocab_start_index": (0, WORDS),
        "the table of words": WORDS,
        "the table of image tokens": IMAGE_TOKENS,
    }
    check_keys(files.checkpoint, files.hf_config | tables, known)
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
FAMILIES = (EMU3, EMU35, U0, JANUS, SIMPLEAR, MAMMOTHMODA2)
