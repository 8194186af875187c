"""Emu3-Gen, Emu3.5-Image and Xiaomi-Robotics-U0: names and sizes of the files.

A Llama with grouped queries, and one table of 184,622 tokens for words, signs and the 32,768 codes of a tokenizer of
its own. Ours begins with the codes, then what closes a row. Names are the authors' (`model.layers`), or transformers'
of any version; the former are used here.

Emu3.5 has Qwen3's network: heads wider than the width divided by them, whose queries and keys are normalised. Of its
282,926 tokens 131,072 are codes. U0 is tuned from it, in two sizes.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from lantern_hpu.core import Sampling
from lantern_hpu.errors import Arg, WeightsError, words
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.families.base import (
    Family,
    Files,
    llama_config,
)
from lantern_hpu.models.files.names import CODE_PIXELS

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
