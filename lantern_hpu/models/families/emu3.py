"""Emu3-Gen: names and sizes of the files.

A Llama with grouped queries, and one table of 184,622 tokens for words, signs and the 32,768 codes of a tokenizer of
its own. Ours begins with the codes, then what closes a row. Names are the authors' (`model.layers`), or transformers'
of any version; the former are used here.
"""

from __future__ import annotations

import math

from lantern_hpu.core import Sampling
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.families.base import (
    Family,
    Files,
    llama_config,
)

AREA = 720 * 720  # pixels of a picture, where config.json does not say it
PIXELS = 8  # along a code


def emu3_config(family: Family, files: Files) -> TransformerConfig:
    area = int(files.hf_config.get("image_area", AREA))
    side = round(math.sqrt(area) / PIXELS)
    return llama_config(family, files, grid=(side, side))


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
