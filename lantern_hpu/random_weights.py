"""Known models with random weights: their real sizes without their files, for timing steps.

How long a step takes does not depend on the numbers in it. What the drafter is worth does, and so do pictures:
neither can be had from these. Weights are made on the device in its number format, with no copy on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from lantern_hpu.backends.base import Backend, named
from lantern_hpu.config import Sampling
from lantern_hpu.kernels import Kernels
from lantern_hpu.memory import Model, check_room, of_known
from lantern_hpu.models.condition import Prefix, wordless
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.folder import ImageModel
from lantern_hpu.models.transformer import HeadNorm, RMSNorm, Target, TransformerConfig
from lantern_hpu.models.vq import VQModel
from lantern_hpu.models.weights import shapes_only
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.registry import Entry

SPREAD = 0.02  # standard deviation of a weight


def transformer_config(entry: Entry) -> TransformerConfig:
    """The target's configuration, of a known model's sizes and family."""
    sizes = entry.geometry
    plain = TransformerConfig(
        vocab_size=sizes.vocab,
        dim=sizes.dim,
        layers=sizes.layers,
        heads=sizes.heads,
        ffn_dim=sizes.ffn_dim,
        prefix=sizes.prefix,
        grid=sizes.grid,
        qk_norm=sizes.qk_norm,
    )
    if entry.family != "chameleon":
        return plain
    # Rows for words are left out of the embedding: a step only looks rows up.
    return replace(plain, rope="1d", rope_pairs="half", rope_prefix="identity")


def make_drafter(entry: Entry, config: TransformerConfig, kernels: Kernels) -> Drafter:
    """The drafter published for a model; for one without, LlamaGen's kind: one block without norms of its own."""
    about = entry.geometry.drafter or {"input_norm": False, "qk_norm": False}
    return Drafter(
        replace(config, qk_norm=bool(about["qk_norm"])),
        input_norm=bool(about["input_norm"]),
        sees_pads=config.rope == "2d",
        kernels=kernels,
    )


def fill(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
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


def counted(entry: Entry, target: Target, drafter: Drafter) -> Model:
    """What there is of them: no text encoder, and nothing that decodes."""
    held, drafts = (sum(p.numel() for p in part.parameters()) for part in (target, drafter))
    sizes = replace(entry.geometry, vq_channels=0)
    return replace(of_known(entry), sizes=sizes, target=held, drafter=drafts, vq=0, text=0)


class RandomCondition:
    """A prefix of random embeddings for any prompt, all of its slots real."""

    takes_classes = False

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.prefix = torch.empty(config.prefix, config.dim, dtype=dtype, device=device).normal_()

    def prepare(self, prompts: Sequence[str]) -> None:
        """Nothing: there is no text encoder."""

    def rows(self, prompts: Sequence[str], guidance: bool) -> Prefix:
        rows = len(prompts) * (2 if guidance else 1)
        prefix = self.prefix.expand(rows, -1, -1)
        valid = torch.ones(prefix.shape[:2], dtype=torch.bool, device=prefix.device)
        return wordless(prefix, valid)

    def notes(self, prompt: str) -> list[str]:
        return []

    def parts(self) -> dict[str, nn.Module]:
        return {}


class RandomPipeline(LanternPipeline):
    """Draws tokens that mean nothing, and no pictures."""

    def pixels(self, tokens: NDArray[np.int64]) -> list[Image.Image]:
        """None: there is no image decoder."""
        return []

    def nearest(self, k: int) -> Tensor | None:
        """Neighbours that lie scattered, as real ones do: looking them up takes as long."""
        if k and k not in self.neighbours:
            codes = self.model.target.config.vocab_size
            away = torch.randperm(codes - 1)[:k] + 1  # no code is its own neighbour
            table = (torch.arange(codes)[:, None] + away) % codes
            self.neighbours[k] = table.int().to(self.backend.device)
        return self.neighbours[k] if k else None


def make_model(
    entry: Entry, backend: Backend, dtype: str = "auto", kernels: str = "auto", seed: int = 0
) -> ImageModel:
    """A known model's sizes with random weights on a device.

    Raises:
        DeviceError: they do not fit.
    """
    config, number, device = transformer_config(entry), backend.dtype(dtype), backend.device
    chosen = backend.kernels(kernels, number)
    torch.manual_seed(seed)
    with shapes_only():
        target, vq = Target(config, chosen), VQModel()
        drafter = make_drafter(entry, config, chosen)
    check_room(entry.name, lambda: counted(entry, target, drafter), backend, named(number))
    for module in (target, drafter):
        fill(module, number, device)
    name = f"{entry.name}, random weights"
    return ImageModel(
        name,
        name,
        {},
        f"random {entry.name} {seed}",
        target,
        drafter,
        RandomCondition(config, number, device),
        {"kind": "random"},
        vq,  # stays on `meta`: nothing decodes
        Sampling(**dict[str, Any](entry.sampling)),
    )


def random_pipeline(
    entry: Entry, backend: Backend, dtype: str, graphs: str, kernels: str = "auto"
) -> LanternPipeline:
    """A pipeline of a known model with random weights."""
    with backend.errors(), torch.no_grad():
        return RandomPipeline(make_model(entry, backend, dtype, kernels), backend, graphs)
