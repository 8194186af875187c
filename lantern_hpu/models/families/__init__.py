"""The checkpoint families that load as they were published: one file a family."""

from __future__ import annotations

from typing import Any

from lantern_hpu.errors import WeightsError
from lantern_hpu.models.families import (
    chameleon,
    emu3,
    glm_image,
    janus,
    llamagen,
    lumina,
    mammothmoda2,
    simplear,
)
from lantern_hpu.models.families.base import Family
from lantern_hpu.models.files.checkpoint import Checkpoint, some_names
from lantern_hpu.models.files.names import Parts

# In this order: Lumina-mGPT has Chameleon's tensors
FAMILIES: dict[str, Family] = {
    "lumina": lumina.FAMILY,
    "lumina-2.0": lumina.FAMILY_2,
    "chameleon": chameleon.FAMILY,
    "emu3": emu3.FAMILY,
    "glm-image": glm_image.FAMILY,
    "janus": janus.FAMILY,
    "simplear": simplear.FAMILY,
    "mammothmoda2": mammothmoda2.FAMILY,
    "llamagen": llamagen.FAMILY,
}


# Models that do not load, by the rows of their tables
RELATIVES = {
    151936: "Qwen2.5 or Qwen3",
    152064: "Qwen2.5",
    282926: "Emu3.5",
}


def family_of(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Family:
    for family in FAMILIES.values():
        if family.recognises(checkpoint, about, parts):
            return family
    why = f"it holds {some_names(sorted(checkpoint.shapes))}"
    tables = [s for n, s in checkpoint.shapes.items() if n.endswith("embed_tokens.weight") and s]
    like = [RELATIVES[shape[0]] for shape in tables if shape[0] in RELATIVES]
    why += f", as {like[0]} does" if like else ""
    why += f"; config.json says {kind}" if (kind := about.get("model_type")) else ""
    why += f"; known are {', '.join(FAMILIES)}"
    raise WeightsError(
        f"{checkpoint.path} is of an unknown model family", why, "lantern-hpu models"
    )
