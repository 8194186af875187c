"""The contract of a checkpoint family: how its files are recognised, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lantern_hpu.methods.request import Sampling
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.files.checkpoint import Checkpoint, Recipe
from lantern_hpu.models.files.names import CODE_PIXELS, Parts


@dataclass(frozen=True)
class Published:
    """What a published target turned out to be.

    Attributes:
        kind: as the list of known models has it.
        checkpoint: its tensors by the names that the recipe uses.
        recipe: of `target.*` and of the condition's modules.
        tokenizer: a whole image tokenizer, if the target's own file holds one.
        codebook: width of the codes' vectors, where the recipe has them as `codebook.weight`.
        sampling: as its files say; None: the family's.
        diffusion: whether pictures are made by a diffusion model of its codes and prompt.
    """

    kind: str
    config: TransformerConfig
    condition: ConditionConfig
    checkpoint: Checkpoint
    recipe: Recipe
    tokenizer: Checkpoint | None = None
    codebook: int = 0
    sampling: Sampling | None = None
    diffusion: bool = False


@dataclass(frozen=True)
class Family:
    """One family; its file says the same of each.

    Attributes:
        recognises: whether these tensors, with their metadata, are of the family.
        read: what they are; takes them, the config.json beside them, and where the other parts lie.
        ignored: what the names of tensors that are not needed have in them.
        sampling: published settings of each kind, by the names that the list of known models has for those.
        normalized_codes: whether codes are used at length 1. code_pixels: along a code.
    """

    recognises: Callable[[Checkpoint, dict[str, Any], Parts], bool]
    read: Callable[[Checkpoint, dict[str, Any], Parts], Published]
    ignored: tuple[str, ...]
    sampling: Mapping[str, Sampling]
    normalized_codes: bool
    code_pixels: int = CODE_PIXELS


def called(about: dict[str, Any], parts: Parts) -> str:
    """By what names a checkpoint goes: those of its file or folder, and what its config.json says."""
    return f"{parts.name} {parts.target.name} {about.get('_name_or_path', '')}".lower()
