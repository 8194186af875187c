"""Lumina-mGPT: Chameleon's network taught to draw pictures of many sizes, with rows that end in a token of their own.

Files and names are Chameleon's, so what tells it from Anole is a name, or a training option that its config.json keeps.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from lantern_hpu.errors import WeightsError
from lantern_hpu.methods.request import Sampling
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.families import chameleon
from lantern_hpu.models.families.base import Family, Published, called
from lantern_hpu.models.files.checkpoint import Checkpoint, Recipe, take
from lantern_hpu.models.files.names import CODE_PIXELS, Parts
from lantern_hpu.models.text.frames import LuminaFrame

SAMPLING = {"lumina": Sampling(3.0, 1.0, 2000, 1.0)}
SIZES = (512, 768, 1024)  # the published models; one draws its own


def is_lumina(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> bool:
    named = "z_loss_weight" in about or "lumina-mgpt" in called(about, parts)
    return named and chameleon.is_chameleon(checkpoint, about, parts)


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


def lumina_recipe(config: TransformerConfig) -> Recipe:
    """Recipe of `target.*`: Chameleon's, with the end of a row behind the codes."""
    order = LuminaFrame.order
    return {
        **chameleon.chameleon_recipe(config),
        "target.embed.weight": take(
            "model.embed_tokens.weight", rows=order.stretches(config.embed_rows or 0)
        ),
        "target.head.weight": take("lm_head.weight", rows=order.first),
    }


def read_lumina(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Published:
    side = image_size(about, parts) // CODE_PIXELS
    plain = chameleon.chameleon_config(checkpoint, about)
    config = replace(
        plain,
        vocab_size=plain.vocab_size + 1,
        grid=(side, side),
        row_ends=True,
        top_p_first=False,  # transformers' order
    )
    condition, recipe = ConditionConfig("tokens", frame="lumina"), lumina_recipe(config)
    tokenizer = chameleon.tokenizer_of(checkpoint)
    return Published("lumina", config, condition, checkpoint, recipe, tokenizer)


FAMILY = Family(
    recognises=is_lumina,
    read=read_lumina,
    ignored=chameleon.IGNORED,
    sampling=SAMPLING,
    normalized_codes=False,
)
