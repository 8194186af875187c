"""Lumina-mGPT: Chameleon's network taught to draw pictures of many sizes, with rows that end in a token of their own.

Names are Chameleon's. Its authors save query and key norms as one row for all heads, which tells it from Anole; where
transformers saved it again, a training option that config.json keeps or a name does. Version 2.0 is the same network
with a table of its own, by whose rows it is known; its codes are MoVQGAN's, of half as many pixels.
"""

from __future__ import annotations

import re
from dataclasses import replace

from lantern_hpu.core import Sampling
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.families.base import (
    Family,
    Files,
    agreed_size,
    check_trained,
    square,
)
from lantern_hpu.models.families.chameleon import (
    CHAMELEON,
    chameleon_config,
    head_count,
    norm_shape,
)
from lantern_hpu.models.files.names import CODE_PIXELS
from lantern_hpu.models.text.frames import FRAMES, SIZE_STEP

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
    also=lambda _: True,
    frame="lumina2",
    sizes={
        "grid": (96, 96),  # as it was trained
        "code_pixels": FRAMES["lumina2"].pixels,
        "grid_step": SIZE_STEP // FRAMES["lumina2"].pixels,
    },
    config=lumina2_config,
)
