"""The checkpoint families that load as they were published: one file a family."""

from __future__ import annotations

from lantern_hpu.errors import WeightsError
from lantern_hpu.models.families import chameleon, janus, llamagen
from lantern_hpu.models.families.base import Family
from lantern_hpu.models.files.checkpoint import Checkpoint

FAMILIES: dict[str, Family] = {
    "chameleon": chameleon.FAMILY,
    "janus": janus.FAMILY,
    "llamagen": llamagen.FAMILY,
}


def family_of(checkpoint: Checkpoint) -> Family:
    """
    Raises:
        WeightsError: of no known family.
    """
    for family in FAMILIES.values():
        if family.recognises(checkpoint):
            return family
    why = f"its tensors are those of none of {', '.join(FAMILIES)}"
    hint = "python -m lantern_hpu.models"
    raise WeightsError(f"{checkpoint.path} is of no known family", why, hint)
