"""Drafters of every kind: published ones, those of our own training, and those in the speculators layout."""

from __future__ import annotations

from pathlib import Path

from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.families.eagle import PublishedDrafter, TrainedDrafter
from lantern_hpu.models.families.speculators import SpeculatorsDrafter, is_speculators
from lantern_hpu.models.files.names import DRAFTER

OpenedDrafter = TrainedDrafter | PublishedDrafter | SpeculatorsDrafter


def open_drafter(path: Path, target: TransformerConfig) -> OpenedDrafter:
    """A drafter of any kind; for a target of these sizes."""
    if (path / DRAFTER).is_file():
        return TrainedDrafter(path)
    kind = SpeculatorsDrafter if is_speculators(path) else PublishedDrafter
    return kind(path, target)
