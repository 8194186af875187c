"""Known models with random weights: their real sizes without their files, for timing steps.

How long a step takes does not depend on the numbers in it. What the drafter is worth does, and so do pictures:
neither can be had from these. Weights are made on the device in its number format, with no copy on the host.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lantern_hpu.backends.base import Backend, dtype_name
from lantern_hpu.decode.memory import check_room
from lantern_hpu.methods.request import Sampling
from lantern_hpu.models.config import (
    ConditionConfig,
    DrafterConfig,
    ModelConfig,
    TransformerConfig,
)
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.files.recipe import shapes_only
from lantern_hpu.models.model import ImageModel
from lantern_hpu.models.text.prefix import Prefix, wordless
from lantern_hpu.models.transformer import HeadNorm, RMSNorm, Target
from lantern_hpu.zoo.registry import KnownModel

SPREAD = 0.02  # standard deviation of a weight
LLAMAGENS = DrafterConfig(sees_pads=True)  # the kind of drafter made where none is published


class RandomCondition:
    """A prefix of random embeddings for any prompt, all of its positions real."""

    takes_classes = False

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, device: torch.device) -> None:
        # [P, H]
        self.prefix = torch.empty(config.prefix, config.dim, dtype=dtype, device=device).normal_()

    def sized(self, config: TransformerConfig) -> RandomCondition:
        """Its first positions."""
        other = copy.copy(self)
        other.prefix = self.prefix[: config.prefix]
        return other

    def length(self, prompt: str) -> int:
        return len(prompt.split())

    def prepare(self, prompts: Sequence[str]) -> None:
        """Nothing: there is no text encoder."""

    def rows(self, prompts: Sequence[str], guidance: bool) -> Prefix:
        rows = len(prompts) * (2 if guidance else 1)
        prefix = self.prefix.expand(rows, -1, -1)  # [R, P, H]
        valid = torch.ones(prefix.shape[:2], dtype=torch.bool, device=prefix.device)  # [R, P]
        return wordless(prefix, valid)

    def notes(self, prompt: str) -> list[str]:
        return []

    def parts(self) -> dict[str, nn.Module]:
        return {}


@dataclass(kw_only=True)
class RandomModel(ImageModel):
    """Its tokens mean nothing and become no pictures."""

    def nearest(self, k: int) -> Tensor:
        """Neighbours that lie scattered, as real ones do: looking them up takes as long. -> [V, k] int32"""
        codes = torch.arange(self.vocabulary, device=self.target.device)
        away = codes[torch.randperm(len(codes) - 1)[:k] + 1]  # [k]; no code is its own neighbour
        return ((codes[:, None] + away) % len(codes)).int()


def step_sizes(entry: KnownModel) -> ModelConfig:
    """What a step needs of a known model; rows for words are left out of the embedding, as it only looks rows up."""
    return ModelConfig(
        replace(entry.config.target, embed_rows=None),
        ConditionConfig("tokens"),
        entry.config.drafter or LLAMAGENS,
    )


def fill_randomly(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give a module that lies on `meta` random weights on the device."""
    module.to(dtype).to_empty(device=device)
    for part in module.modules():
        norm = isinstance(part, RMSNorm | HeadNorm)
        for name, weight in part.named_parameters(recurse=False):
            if name == "bias":
                nn.init.zeros_(weight)
            elif norm:
                nn.init.ones_(weight)
            else:
                nn.init.normal_(weight, std=SPREAD)
    module.requires_grad_(False).eval()


def make_model(
    entry: KnownModel,
    backend: Backend,
    dtype: str = "auto",
    kernels: str = "auto",
    seed: int = 0,
) -> ImageModel:
    """A known model's sizes with random weights on a device.

    Raises:
        DeviceError: they do not fit.
    """
    config, device = step_sizes(entry), backend.device
    number = backend.tuning.dtype(dtype, config.target.parameters)
    assert config.drafter is not None
    check_room(entry.name, config, backend, dtype_name(number), mapped=False)
    chosen = backend.kernels(kernels, number)
    torch.manual_seed(seed)
    with shapes_only():
        target = Target(config.target, chosen)
        drafter = Drafter(config.target, config.drafter, chosen)
    for module in (target, drafter):
        fill_randomly(module, number, device)
    name = f"{entry.name}, random weights"
    return RandomModel(
        name=name,
        source=name,
        config=config,
        files={},
        fingerprint=f"random {entry.name} {seed}",
        target=target,
        drafter=drafter,
        condition=RandomCondition(config.target, number, device),
        vq=None,
        sampling=Sampling(**dict[str, Any](entry.sampling)),
    )
