"""The checkpoint families that load as they were published: a family is an entry."""

from __future__ import annotations

from lantern_hpu.errors import WeightsError, shell
from lantern_hpu.files import some_names
from lantern_hpu.models.families import chameleon, glm_image, llama, llamagen
from lantern_hpu.models.families.base import Family, Files

FAMILIES: tuple[Family, ...] = (
    *chameleon.FAMILIES,
    *llama.FAMILIES,
    *glm_image.FAMILIES,
    *llamagen.FAMILIES,
)
# Models that do not load, by the rows of their tables
RELATIVES = {
    151936: "Qwen2.5 or Qwen3",
    152064: "Qwen2.5",
}


def family_of(files: Files) -> Family:
    for family in FAMILIES:
        if family.matches(files):
            return family
    shapes = files.checkpoint.shapes
    why = f"it holds {some_names(sorted(shapes))}"
    tables = [s for n, s in shapes.items() if n.endswith("embed_tokens.weight") and s]
    like = [RELATIVES[shape[0]] for shape in tables if shape[0] in RELATIVES]
    why += f", as {like[0]} does" if like else ""
    why += f"; config.json says {kind}" if (kind := files.hf_config.get("model_type")) else ""
    why += f"; known are {', '.join(dict.fromkeys(family.name for family in FAMILIES))}"
    what = f"{files.checkpoint.path} is of an unknown model family"
    raise WeightsError(what, why, shell("models"))
