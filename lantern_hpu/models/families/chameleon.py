"""Chameleon's family, of which Anole and Lumina-mGPT draw: names and sizes of the files.

One table of 65,536 tokens holds words and image codes. Ours begins with the image codes, so that a code is its own
row (`frames.ANOLE`), and the head keeps the rows of the codes alone. The decoder has 1-D rotary positions that
count no pads, and norms on each head's queries and keys. transformers stores a row of each norm a head, the authors
one for all heads.

Lumina-mGPT draws pictures of many sizes, with rows that end in a token of their own. Its authors save query and key
norms as one row for all heads, which tells it from Anole; where transformers saved it again, a training option that
config.json keeps or a name does. Version 2.0 is the same network with a table of its own, by whose rows it is known;
its codes are MoVQGAN's, of half as many pixels.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from lantern_hpu.core import Sampling
from lantern_hpu.errors import Arg, WeightsError, words
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.families.base import (
    COMPUTED,
    HEAD,
    LLAMA,
    Family,
    Files,
    agreed_size,
    check_trained,
    llama_config,
    llama_recipe,
    square,
    unknown_format,
)
from lantern_hpu.models.files.checkpoint import Source
from lantern_hpu.models.files.names import CODE_PIXELS
from lantern_hpu.models.text.frames import FIRST_IMAGE_TOKEN, FRAMES, SIZE_STEP

NORM = "model.layers.0.self_attn.q_norm.weight"


def norm_shape(files: Files) -> tuple[int, ...]:
    """Rows and features of the first query norm."""
    return files.checkpoint.shapes[NORM]


def head_count(files: Files) -> int:
    """Heads of a layer: by config.json, or by the width of a head's norm."""
    dim = files.checkpoint.shapes["model.embed_tokens.weight"][1]
    size = norm_shape(files)[1]
    heads = int(files.hf_config.get("num_attention_heads") or dim // size)
    if heads * size != dim:
        why = f"{heads} heads, norms of {size} features, width {dim}"
        unknown_format(files.checkpoint, why)
    return heads


def chameleon_config(family: Family, files: Files, **own: Any) -> TransformerConfig:
    """Sizes of its network; `own` are those that its relatives read in their own way."""
    hf_config = files.hf_config
    codes = int((hf_config.get("vq_config") or {}).get("num_embeddings", 8192))
    usual: dict[str, Any] = {
        "vocab_size": codes + family.row_ends,
        "heads": head_count(files),
        "qk_norm": True,
        "sandwich_norms": bool(hf_config.get("swin_norm")),
        "input_norms": not hf_config.get("swin_norm"),
    }
    return llama_config(family, files, **usual | own)


def anole_config(family: Family, files: Files) -> TransformerConfig:
    """Raises a WeightsError for base Chameleon, whose head was not published for image tokens."""
    config = chameleon_config(family, files)
    if HEAD in files.checkpoint:  # else an error names it with all that is missing
        first = FIRST_IMAGE_TOKEN
        head = files.checkpoint.read(HEAD)[first : first + config.vocab_size : 64]
        if files.hf_config.get("mask_image_logits") or not bool(head.float().abs().sum() > 0):
            why = "this is base Chameleon, which reads images and does not draw them"
            hint = words("Anole:", Arg("model", "anole-7b"))
            raise WeightsError(f"{files.checkpoint.path} cannot draw", why, hint)
    return config


def chameleon_recipe(family: Family, files: Files, config: TransformerConfig) -> dict[str, Source]:
    recipe = llama_recipe(family, files, config)
    for i in range(0 if config.input_norms else config.layers):
        for part in ("attention", "ffn"):  # by the same names, behind them
            norm = f"target.layers.{i}.{part}"
            recipe[f"{norm}_post_norm.weight"] = recipe.pop(f"{norm}_norm.weight")
    return recipe


CHAMELEON = Family(
    "chameleon",
    Sampling(3.0, 1.0, 2000, 1.0),
    marker="q_norm.weight",
    rows=65536,  # relatives with another table have tokenizers of their own
    also=lambda files: len(norm_shape(files)) == 2,
    frame="anole",
    ignored=(COMPUTED, "vocabulary_mapping"),
    vq="vqgan.ckpt",
    tokenizer="model.vqmodel.",  # of the stock model an encoder alone, which is not read
    keys={**LLAMA, "swin_norm": (False, True)},
    sizes={"grid": (32, 32), "top_p_first": True},
    config=anole_config,
    recipe=chameleon_recipe,
)


# ------------------------------------------------------------------------------------- Lumina-mGPT


SIZES = (512, 768, 1024)  # the published models; one draws its own
SOURCE_TOKENS = 4  # of a source besides its rows: what begins and ends it, and its size


def is_lumina(files: Files) -> bool:
    if len(norm_shape(files)) != 2:
        return False
    shared = norm_shape(files)[0] < head_count(files)
    return shared or "z_loss_weight" in files.hf_config or "lumina-mgpt" in files.known_as


def lumina_config(family: Family, files: Files) -> TransformerConfig:
    named = re.findall(r"[-_](512|768|1024)\b", files.known_as)
    known = {f"-{size} in its name": int(size) for size in named}
    if files.parts.image_size:
        known["what was asked for or is known of it"] = files.parts.image_size
    size = agreed_size(files, known, SIZES)
    check_trained(size, "Lumina-mGPT", SIZES)
    config = chameleon_config(family, files, grid=square(size))
    if not FRAMES[family.frame].reads_pictures:
        return config
    # A source of as many codes in up to twice as many rows, which have ends, and the prompt
    codes, sides = config.grid[0] * config.grid[1], 2 * config.grid[0]
    longest = -(-(config.prefix + codes + sides + SOURCE_TOKENS) // 64) * 64
    return replace(config, source_prefixes=(longest,))


def is_omni(files: Files) -> bool:
    """Whether it was taught to draw from pictures, which its tensors do not tell."""
    return is_lumina(files) and "omni" in files.known_as


def lumina2_config(family: Family, files: Files) -> TransformerConfig:
    positions = int(files.hf_config.get("max_position_embeddings", 0)) or None
    assert family.order is not None
    drawn = family.order.drawn
    return chameleon_config(family, files, vocab_size=drawn, max_positions=positions)


LUMINA = replace(
    CHAMELEON,
    name="lumina",
    also=is_lumina,
    frame="lumina",
    sizes={"code_pixels": CODE_PIXELS, "grid_step": SIZE_STEP // CODE_PIXELS},
    config=lumina_config,
)
LUMINA_OMNI = replace(LUMINA, also=is_omni, frame="lumina-omni")
LUMINA2 = replace(
    CHAMELEON,
    name="lumina2",
    sampling=Sampling(4.0, 1.0, 4096, 1.0),
    rows=171385,
    vq="movqgan_270M.ckpt",
    also=lambda _: True,
    frame="lumina2",
    sizes={
        "grid": (96, 96),  # as it was trained
        "code_pixels": FRAMES["lumina2"].pixels,
        "grid_step": SIZE_STEP // FRAMES["lumina2"].pixels,
    },
    config=lumina2_config,
)
# In this order: Lumina-mGPT has Chameleon's tensors, and one of its models is known by name alone
FAMILIES = (LUMINA_OMNI, LUMINA, LUMINA2, CHAMELEON)
