"""Caption features that were computed elsewhere, in place of a T5: a prompt is the name that its features have.

features/000123.npy     a file a prompt, as LlamaGen's own pipeline saves them: [1, v, C] or [v, C]
features.safetensors    a tensor a prompt, by the prompt itself or any other name
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lantern_hpu.errors import OptionError, WeightsError
from lantern_hpu.files import sha256
from lantern_hpu.models.text.prefix import TextFeatures, left_padded
from lantern_hpu.ops.buffers import ToDevice, to_device

NUMPY, SAFE = ".npy", ".safetensors"


def is_saved(path: Path) -> bool:
    """Whether it holds features, and no T5."""
    if path.is_dir():
        return (
            not (path / "config.json").exists() and next(path.rglob(f"*{NUMPY}"), None) is not None
        )
    return path.suffix in (NUMPY, SAFE) and path.is_file()


class SavedFeatures:
    """Prompts to features that lie in files, and are read for each batch.

    Args:
        path: a `.safetensors` or `.npy` file, or a folder of `.npy` files.
        prefix: P, most tokens of a prompt. width: C.
        dtype: of the features. device: where they go; None is the host.
    """

    def __init__(
        self,
        path: Path,
        prefix: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        to_device: ToDevice = to_device,
    ) -> None:
        self.path, self.prefix, self.width = path, prefix, width
        self.dtype, self.device, self.to_device = dtype, device, to_device

    @cached_property
    def names(self) -> dict[str, Path]:
        """The file of each prompt."""
        if self.path.suffix != SAFE:
            folder = self.path if self.path.is_dir() else self.path.parent
            files = sorted(self.path.rglob(f"*{NUMPY}")) if self.path.is_dir() else [self.path]
            return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}
        try:
            with safe_open(self.path, "pt") as file:
                return dict.fromkeys(file.keys(), self.path)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {self.path}", str(error)) from error

    def prepare(self, prompts: Sequence[str]) -> None:
        """Raise an OptionError if there are no features of a prompt."""
        unknown = [prompt for prompt in prompts if prompt not in self.names]
        if unknown:
            some = ", ".join(list(self.names)[:3]) + (", ..." if len(self.names) > 3 else "")
            why = f"it has those of {len(self.names)} prompts: {some}"
            hint = "--prompt with one of these names"
            raise OptionError(f"{self.path} has no features of {unknown[0]!r}", why, hint)

    def encode(self, prompts: Sequence[str]) -> TextFeatures:
        """Features [B, P, C] and valid [B, P] of a batch, on the device."""
        self.prepare(prompts)
        rows = [self.real(prompt) for prompt in prompts]
        return left_padded(rows, self.prefix, self.width, self.dtype, self.device, self.to_device)

    def notes(self, prompt: str) -> list[str]:
        return []

    def digest(self) -> str:
        """Which features these are: of a file its checksum, of a folder that of its list of files."""
        if self.path.is_file():
            return sha256(self.path)
        listed = [f"{name} {file.stat().st_size}" for name, file in self.names.items()]
        return hashlib.sha256("\n".join(listed).encode()).hexdigest()

    def read(self, prompt: str) -> Tensor:
        """As they were saved: [1, v, C] or [v, C]."""
        file = self.names[prompt]
        try:
            if file.suffix == NUMPY:
                return torch.from_numpy(np.load(file, allow_pickle=False))
            with safe_open(file, "pt") as stored:
                result: Tensor = stored.get_tensor(prompt)
                return result
        except (OSError, ValueError, TypeError, EOFError, SafetensorError) as error:
            raise WeightsError(f"cannot read the features of {prompt!r}", str(error)) from error

    def real(self, prompt: str) -> Tensor:
        """Those of real tokens [v, C]; zeros at either end are pads."""
        result, what = (
            self.read(prompt),
            f"the features of {prompt!r} in {self.path} cannot be used",
        )
        features = result[0] if result.dim() == 3 and len(result) == 1 else result
        if features.dim() != 2 or features.shape[1] != self.width:
            wanted = f"[tokens, {self.width}], as the target reads them"
            raise WeightsError(what, f"they are {list(result.shape)}, expected {wanted}")
        if not bool(features.isfinite().all()):
            raise WeightsError(what, "some are not finite")
        there = features.any(1).nonzero()[:, 0].tolist()
        kept = features[there[0] : there[-1] + 1] if there else features[:0]  # [v, C]
        if not 0 < len(kept) <= self.prefix:
            why = f"they are of {len(kept)} tokens, the target reads 1 to {self.prefix}"
            raise WeightsError(what, why)
        return kept.to(self.dtype)
