"""Lumina-mGPT: Chameleon's network taught to draw pictures of many sizes, with rows that end in a token of their own.

Names are Chameleon's. Its authors save query and key norms as one row for all heads, which tells it from Anole; where
transformers saved it again, a training option that config.json keeps or a name does. Version 2.0 is the same network
with a table of its own, by whose rows it is known; its codes are MoVQGAN's, of half as many pixels.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from lantern_hpu.core import Sampling
from lantern_hpu.errors import WeightsError
from lantern_hpu.models.config import ConditionConfig
from lantern_hpu.models.families import chameleon
from lantern_hpu.models.families.base import Family, Published, called
from lantern_hpu.models.files.checkpoint import Checkpoint
from lantern_hpu.models.files.names import CODE_PIXELS, Parts
from lantern_hpu.models.text.frames import Lumina2Frame, LuminaFrame

SAMPLING = {"lumina": Sampling(3.0, 1.0, 2000, 1.0)}
SIZES = (512, 768, 1024)  # the published models; one draws its own
# Of 2.0: rows of the table, codes, and codes of a side as it was trained
TOKENS_2, CODES_2, SIDE_2 = 171385, 16384, 96
SAMPLING_2 = {"lumina2": Sampling(4.0, 1.0, 4096, 1.0)}


def is_lumina(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> bool:
    if not chameleon.is_chameleon(checkpoint, about, parts):
        return False
    shared = chameleon.norm_shape(checkpoint)[0] < chameleon.head_count(checkpoint, about)
    return shared or "z_loss_weight" in about or "lumina-mgpt" in called(about, parts)


def image_size(about: dict[str, Any], parts: Parts) -> int:
    """Pixels of a side, from what was asked for or the model's name."""
    named = {int(size) for size in re.findall(r"[-_](512|768|1024)\b", called(about, parts))}
    known = named | ({parts.image_size} if parts.image_size else set())
    hint = "--image-size " + " or ".join(map(str, SIZES))
    if len(known) > 1:
        why = " and ".join(f"{size} pixels" for size in sorted(known))
        raise WeightsError(f"the image size of {parts.target} is contradictory", why, hint)
    if not known:
        why = "neither its name nor its config.json says it"
        raise WeightsError(f"the image size of {parts.target} is unknown", why, hint)
    size = known.pop()
    if size not in SIZES:
        why = "Lumina-mGPT was published for " + ", ".join(map(str, SIZES))
        raise WeightsError(f"no Lumina-mGPT draws {size} pixels", why, hint)
    return size


def read_lumina(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Published:
    side = image_size(about, parts) // CODE_PIXELS
    plain = chameleon.chameleon_config(checkpoint, about)
    config = replace(
        plain,
        vocab_size=plain.vocab_size + 1,
        grid=(side, side),
        row_ends=True,
        code_pixels=CODE_PIXELS,
        grid_step=LuminaFrame.PATCH // CODE_PIXELS,
    )
    condition = ConditionConfig("tokens", frame="lumina")
    recipe = chameleon.chameleon_recipe(checkpoint, config, LuminaFrame.order)
    tokenizer = chameleon.tokenizer_of(checkpoint)
    return Published("lumina", config, condition, checkpoint, recipe, tokenizer)


FAMILY = Family(is_lumina, read_lumina, SAMPLING, chameleon.IGNORED, keys=chameleon.KEYS)


def is_lumina2(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> bool:
    rows = checkpoint.shapes.get(chameleon.EMBED, (0,))[0]
    return rows == TOKENS_2 and chameleon.FIRST + "q_norm.weight" in checkpoint


def read_lumina2(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Published:
    config = chameleon.chameleon_config(
        checkpoint,
        about,
        vocab_size=CODES_2 + 1,
        grid=(SIDE_2, SIDE_2),
        row_ends=True,
        code_pixels=Lumina2Frame.PIXELS,
        grid_step=Lumina2Frame.PATCH // Lumina2Frame.PIXELS,
        max_positions=int(about.get("max_position_embeddings", 0)) or None,
    )
    condition = ConditionConfig("tokens", frame="lumina2")
    recipe = chameleon.chameleon_recipe(checkpoint, config, Lumina2Frame.order)
    return Published("lumina2", config, condition, checkpoint, recipe)


FAMILY_2 = Family(
    is_lumina2,
    read_lumina2,
    SAMPLING_2,
    chameleon.IGNORED,
    code_pixels=Lumina2Frame.PIXELS,
    keys=chameleon.KEYS,
)
