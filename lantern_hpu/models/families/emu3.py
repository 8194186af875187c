"""Emu3-Gen: names and sizes of the files.

A Llama with grouped queries, and one table of 184,622 tokens for words, signs and the 32,768 codes of a tokenizer of
its own. Ours begins with the codes, then what closes a row. Names are the authors' (`model.layers`), or transformers'
of any version; the former are used here.
"""

from __future__ import annotations

import math
from typing import Any

from lantern_hpu.core import Sampling
from lantern_hpu.models.config import ConditionConfig
from lantern_hpu.models.families.base import (
    LLAMA,
    Family,
    Published,
    llama_config,
    llama_recipe,
    within,
)
from lantern_hpu.models.files.checkpoint import Checkpoint
from lantern_hpu.models.files.names import Parts
from lantern_hpu.models.text.frames import Emu3Frame

TOKENS = 184622
CODES = 32768
AREA = 720 * 720  # pixels of a picture, where config.json does not say it
PIXELS = 8  # along a code
HEAD = 128  # width of a head
SAMPLING = {"emu3": Sampling(3.0, 1.0, 2048, 1.0)}
TOKENIZER = "vqmodel."
# From transformers' names to the authors'
NAMES = (
    (r"^(model\.text_model\.|text_model\.model\.)", "model."),
    (r"^text_model\.lm_head\.", "lm_head."),
    (r"model\.vqmodel\.", TOKENIZER),
)


def is_emu3(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> bool:
    named = checkpoint.rewritten(NAMES)
    return named.shapes.get("model.embed_tokens.weight", (0,))[0] == TOKENS


def read_emu3(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Published:
    named = checkpoint.rewritten(NAMES)
    network = named.only(lambda name: not name.startswith(TOKENIZER))
    side = round(math.sqrt(int(about.get("image_area", AREA))) / PIXELS)
    config = llama_config(
        network,
        about.get("text_config") or about,
        "model.",
        HEAD,
        vocab_size=CODES + 1,
        grid=(side, side),
        norm_eps=1e-5,
        rope_base=1e6,
        row_ends=True,
        code_pixels=PIXELS,
    )
    inside = named.under(TOKENIZER)
    recipe = llama_recipe(config, "model.", Emu3Frame.order)
    tokenizer = inside if inside.shapes else None
    condition = ConditionConfig("tokens", frame="emu3")
    return Published("emu3", config, condition, network, recipe, tokenizer)


KEYS = {**LLAMA, **within("text_config", LLAMA)}
FAMILY = Family(is_emu3, read_emu3, SAMPLING, code_pixels=PIXELS, keys=KEYS)
