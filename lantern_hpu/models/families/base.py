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
    """What a published target turned out to be."""

    kind: str  # as the list of known models has it
    config: TransformerConfig
    condition: ConditionConfig
    checkpoint: Checkpoint  # its tensors by the names that the recipe uses
    recipe: Recipe  # of `target.*` and of the condition's modules
    tokenizer: Checkpoint | None = (
        None  # a whole image tokenizer, if the target's own file holds one
    )
    codebook: int = 0  # width of the codes' vectors, where the recipe has them as `codebook.weight`
    sampling: Sampling | None = None  # as its files say; None: the family's
    diffusion: bool = (
        False  # whether pictures are made by a diffusion model of its codes and prompt
    )
    states: bool = False  # whether another program makes pictures, of its hidden states


@dataclass(frozen=True)
class Family:
    """One family of checkpoints, by its tensors, the config.json beside them, and the other parts."""

    recognises: Callable[[Checkpoint, dict[str, Any], Parts], bool]
    read: Callable[[Checkpoint, dict[str, Any], Parts], Published]
    ignored: tuple[str, ...]  # what the names of tensors that are not needed have in them
    sampling: Mapping[str, Sampling]  # published settings of each kind
    normalized_codes: bool  # whether codes are used at length 1
    code_pixels: int = CODE_PIXELS  # along a code


def called(about: dict[str, Any], parts: Parts) -> str:
    """By what names a checkpoint goes: those of its file or folder, and what its config.json says."""
    return f"{parts.name} {parts.target.name} {about.get('_name_or_path', '')}".lower()
