"""A model folder: all parts of a text-to-image model that our own scripts train, and the embedded one.

model.json          sizes, words, default sampling, fastest methods, sha256 of each file
target.safetensors  words.*, condition.*, target.*
drafter.safetensors
vq.safetensors
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lantern_hpu.config import Sampling
from lantern_hpu.errors import WeightsError
from lantern_hpu.hub import CONFIG, read_config, sha256, source
from lantern_hpu.kernels import PLAIN, Kernels
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.llamagen import CaptionProjection
from lantern_hpu.models.text import WordConditioner
from lantern_hpu.models.transformer import Target, TransformerConfig
from lantern_hpu.models.vq import VQConfig, VQModel

TARGET = "target.safetensors"
DRAFTER = "drafter.json"  # beside the weights of a drafter that lies alone


@dataclass
class ImageModel:
    """The parts that turn prompts into images."""

    name: str
    source: str  # what `--model` takes to find it again
    files: dict[str, str]  # sha256 of each file: which weights these are
    target: Target
    drafter: Drafter
    text: WordConditioner
    condition: CaptionProjection
    vq: VQModel
    sampling: Sampling  # default settings
    # Device name to [method, tree or None]: the fastest that was measured there
    fastest: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Which target this is: a drafter belongs to one."""
        return self.files[TARGET]

    def prefix(self, prompts: Sequence[str], guidance: bool) -> tuple[Tensor, Tensor]:
        """Condition embeddings [R, P, H] and valid [R, P] of a batch of prompts."""
        condition = self.text.encode(prompts)
        return self.condition.rows(condition.features, condition.valid, guidance)

    @property
    def codebook(self) -> Tensor:
        """[V, code_dim]"""
        return self.vq.quantize.embedding.weight


def transformer_config(values: dict[str, Any]) -> TransformerConfig:
    """The configuration as JSON holds it."""
    return TransformerConfig(**{**values, "grid": tuple(values["grid"])})


def load_model(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    kernels: Kernels = PLAIN,
) -> ImageModel:
    """Read a model folder; its files are checked first.

    Raises:
        WeightsError: files are missing or damaged, or tensors do not fit the configuration.
    """
    config = read_config(folder)
    try:
        with torch.device("meta"):  # no random initialisation of what is about to be loaded
            target, drafter, text, condition, vq = make_parts(config, kernels)
        sampling = Sampling(**config["sampling"])
        fastest = {name: (method, tree) for name, (method, tree) in config["fastest"].items()}
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{folder / CONFIG} does not describe a model", repr(error)) from error
    main = nn.ModuleDict({"words": text, "condition": condition, "target": target})
    fill(main, folder / TARGET, dtype, device)
    fill(drafter, folder / "drafter.safetensors", dtype, device)
    fill(vq, folder / "vq.safetensors", torch.float32, device)
    return ImageModel(
        config["name"],
        source(folder),
        config["files"],
        target,
        drafter,
        text,
        condition,
        vq,
        sampling,
        fastest,
    )


def drafter_options(drafter: Drafter) -> dict[str, bool]:
    """What a drafter of the same kind is built with."""
    plain = isinstance(drafter.block.attention_norm, nn.Identity)
    return {"input_norm": not plain, "sees_pads": drafter.sees_pads}


def use_drafter(model: ImageModel, folder: Path) -> None:
    """Put in the drafter that `lantern_hpu.train` left in a folder.

    Raises:
        WeightsError: no such folder, unreadable, or trained for another target.
    """
    try:
        about = json.loads((folder / DRAFTER).read_text())
        options, target = dict(about["options"]), about["target"]
        with torch.device("meta"):
            drafter = Drafter(model.target.config, **options, kernels=model.target.kernels)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{folder} holds no drafter", repr(error)) from error
    if target != model.fingerprint:
        why = f"it was trained for another target than {model.name}"
        raise WeightsError(f"the drafter in {folder} does not fit", why, "--model")
    head = model.target.head.weight
    file = folder / "drafter.safetensors"
    fill(drafter, file, head.dtype, head.device)
    model.drafter = drafter
    model.files = model.files | {file.name: sha256(file)}


def make_parts(
    config: dict[str, Any], kernels: Kernels
) -> tuple[Target, Drafter, WordConditioner, CaptionProjection, VQModel]:
    """The modules that a configuration describes, without weights."""
    sizes, width = transformer_config(config["target"]), config["caption_dim"]
    vq = config["vq"]
    return (
        Target(sizes, kernels),
        Drafter(sizes, **config["drafter"], kernels=kernels),
        WordConditioner(config["words"], width, sizes.prefix),
        CaptionProjection(width, sizes.dim, sizes.prefix),
        VQModel(VQConfig(**{**vq, "multipliers": tuple(vq["multipliers"])})),
    )


def fill(module: nn.Module, file: Path, dtype: torch.dtype, device: torch.device | None) -> None:
    """Put a file's tensors into a module made on `meta`.

    Raises:
        WeightsError: unreadable file, or names or shapes that differ; the first of each kind is named.
    """
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"cannot read {file}", str(error)) from error
    expected = module.state_dict()
    missing, extra = (
        sorted(expected.keys() - tensors.keys()),
        sorted(tensors.keys() - expected.keys()),
    )
    if missing or extra:
        why = f"{len(missing)} tensors missing {missing[:3]}, {len(extra)} unknown {extra[:3]}"
        raise WeightsError(f"{file} does not fit its configuration", why)
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            why = f"{name} is {list(tensor.shape)}, expected {list(expected[name].shape)}"
            raise WeightsError(f"{file} does not fit its configuration", why)
    moved = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    module.load_state_dict(moved, assign=True)
    module.requires_grad_(False).eval()
