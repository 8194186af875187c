"""Pictures of GLM-Image's codes by the diffusion model that is published with it, which diffusers draws with."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lantern_hpu.errors import (
    Arg,
    InvalidImageError,
    OptionError,
    WeightsError,
    needing,
    words,
)
from lantern_hpu.models.config import TransformerConfig

FIRST, LAST = (0, 41), (0, 42)  # releases of diffusers whose pipeline takes ready codes as here
# A folder's model_index.json may name others, of modules in the folder or in the working folder, and is not read
PARTS = {
    "tokenizer": ("transformers", "ByT5Tokenizer"),
    "text_encoder": ("transformers", "T5EncoderModel"),
    "transformer": ("diffusers", "GlmImageTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
}


def check_diffusers(version: str | None = None) -> None:
    """Raise an OptionError unless diffusers, of this version or as it is installed, takes codes as they are given."""
    if version is None:
        with needing("diffusers", "it makes pictures of GLM-Image's codes", "glm"):
            import diffusers

            version = diffusers.__version__
    release = tuple(int(part) for part in version.split(".")[:2])
    if FIRST <= release <= LAST:
        return
    known = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
    why = f"{known} are known to take codes as they are given here"
    hint = words('pip install "lantern-hpu[glm]", or', Arg("save_tokens", "FILE.npz"))
    raise OptionError(f"diffusers {version} is refused", why, hint)


def prior_token_ids(tokens: NDArray[np.int64], grid: tuple[int, int]) -> Tensor:
    """The `prior_token_ids` of diffusers' `GlmImagePipeline`: each code of the picture doubled both ways.

    From [B, N], with or without the preview's, to [B, 4 * rows * columns] int64.
    """
    rows, columns = grid
    codes = torch.as_tensor(tokens[:, -rows * columns :]).long().unflatten(1, grid)
    return codes.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)


class DiffusionPixels:
    """diffusers' pipeline without its language model; `options` are those of its call."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, **options: Any
    ) -> None:
        check_diffusers()
        check_diffusion_folder(folder)
        with needing("diffusers", "it makes pictures of GLM-Image's codes", "glm"):
            pipeline: Any = import_module("diffusers").GlmImagePipeline
        parts: dict[str, Any] = {"vision_language_encoder": None, "processor": None}
        try:
            with warnings.catch_warnings():  # newer releases call it `dtype`
                warnings.filterwarnings("ignore", ".*torch_dtype", FutureWarning)
                for name, (module, kind) in PARTS.items():
                    how: dict[str, Any] = {"local_files_only": True}
                    if name in ("text_encoder", "transformer", "vae"):
                        how |= {"torch_dtype": dtype, "use_safetensors": True}
                    made = getattr(import_module(module), kind)
                    parts[name] = made.from_pretrained(folder / name, **how)
                self.pipe: Any = pipeline(**parts)
        except MemoryError:
            raise
        except Exception as error:  # libraries raise anything for settings of another type
            what, why = f"the diffusion model in {folder} cannot be read", str(error) or repr(error)
            raise WeightsError(what, why.splitlines()[0], "download it again") from error
        self.pipe.to(device)
        self.pipe.set_progress_bar_config(disable=True)
        self.options = options

    @torch.no_grad()
    def __call__(
        self,
        tokens: NDArray[np.int64],
        config: TransformerConfig,
        prompts: Sequence[str],
        seeds: Sequence[int],
        sources: Sequence[tuple[Image.Image, Tensor]] = (),
    ) -> list[Image.Image]:
        """Pictures of tokens [B, N], one at a time; of prompts, quoted text is read.

        Args:
            sources: of each picture that all are drawn from what the model saw of it, and its codes [h, w].
        """
        height, width = (config.code_pixels * side for side in config.grid)
        read = source_arguments(sources, self.pipe.device) if sources else {}
        found: list[Image.Image] = []
        for row, prompt, seed in zip(tokens, prompts, seeds, strict=True):
            pixels = self.pipe(
                output_type="np",
                prompt=prompt,
                height=height,
                width=width,
                prior_token_ids=prior_token_ids(row[None], config.grid).to(self.pipe.device),
                generator=torch.Generator().manual_seed(seed),
                **read,
                **self.options,
            ).images  # [1, H, W, 3] in 0 to 1
            found += self.pipe.image_processor.numpy_to_pil(np.nan_to_num(pixels))
            if not np.isfinite(pixels).all():
                raise InvalidImageError.of_pixels(found[-1:])
        return found


def source_arguments(
    sources: Sequence[tuple[Image.Image, Tensor]], device: torch.device
) -> dict[str, Any]:
    """What diffusers' pipeline takes of one picture's sources: pixels, codes doubled both ways, and their grids."""
    codes, grids = [], []
    for _, own in sources:
        rows, columns = own.shape
        codes.append(prior_token_ids(own.flatten()[None].numpy(), (rows, columns))[0])
        grids.append([1, 2 * rows, 2 * columns])
    return {
        "image": [picture for picture, _ in sources],
        "prior_token_image_ids": [torch.cat(codes).to(device)],
        "source_image_grid_thw": [torch.tensor(grids, device=device)],
    }


def check_diffusion_folder(folder: Path) -> None:
    """Raise a WeightsError unless all parts of a pipeline that make pixels have a folder."""
    missing = [name for name in PARTS if not (folder / name).is_dir()]
    if missing:
        hint = words("download it again, or", Arg("save_tokens", "FILE.npz"))
        raise WeightsError(f"folders are missing in {folder}", ", ".join(missing), hint)
