"""The checkpoint families that load as they were published: one file a family."""

from __future__ import annotations

from lantern_hpu.errors import WeightsError, shell
from lantern_hpu.files import some_names
from lantern_hpu.models.families import llamagen
from lantern_hpu.models.families.base import Family, Files
from lantern_hpu.models.families.chameleon import CHAMELEON, LUMINA, LUMINA2, LUMINA_OMNI
from lantern_hpu.models.families.glm_image import GLM_IMAGE
from lantern_hpu.models.families.llama import EMU3, EMU35, JANUS, MAMMOTHMODA2, SIMPLEAR, U0

# In this order: Lumina-mGPT has Chameleon's tensors, and one of its models is known by name alone
FAMILIES: tuple[Family, ...] = (
    *(LUMINA_OMNI, LUMINA, LUMINA2, CHAMELEON, EMU3, EMU35, U0, GLM_IMAGE),
    *(JANUS, SIMPLEAR, MAMMOTHMODA2),
    *(llamagen.CLASS, llamagen.TEXT),
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
