"""From image tokens to pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lantern_hpu.backends.base import Backend
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.model import ImageModel, Tokenizer

UNKNOWN = (200, 200, 200)  # colour of rows that a preview does not know yet


def decode_pixels(
    vq: Tokenizer | None, config: TransformerConfig, backend: Backend, tokens: NDArray[np.int64]
) -> list[Image.Image]:
    """Images of finished tokens [b, N], one at a time to keep memory low; none where nothing decodes them."""
    return decode_codes(vq, config, backend, codes_of(config, tokens))


def codes_of(config: TransformerConfig, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The codes [b, rows * columns] of tokens [b, N]: without the preview, and without what closes rows."""
    rows, columns = config.grid
    picture = tokens[:, config.preview_tokens :]
    kept = picture.reshape(-1, rows, config.columns)[:, :, :columns]
    return np.ascontiguousarray(kept.reshape(-1, rows * columns))


def decode_codes(
    vq: Tokenizer | None, config: TransformerConfig, backend: Backend, tokens: NDArray[np.int64]
) -> list[Image.Image]:
    """`decode_pixels` of codes [b, rows * columns]."""
    images: list[Image.Image] = []
    if vq is None:
        return images
    for row in torch.from_numpy(tokens.astype(np.int32)).split(1):
        backend.queue.flush()  # the same graph for each image
        with torch.no_grad():
            codes = row.to(backend.device)
            images += to_images(vq.decode_codes(codes, config.grid))
    return images


def to_images(pixels: Tensor) -> list[Image.Image]:
    """[B, 3, H, W] in [-1, 1] to RGB pictures."""
    scaled = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return [Image.fromarray(image) for image in scaled.permute(0, 2, 3, 1).cpu().numpy()]


def preview(
    model: ImageModel, backend: Backend, tokens: NDArray[np.int64], known: Sequence[int]
) -> list[Image.Image]:
    """Images of the whole rows known so far; the rest is grey.

    Args:
        tokens: [b, N]. known: [b], how many of each image mean something.
    """
    rows, columns = model.target.config.grid
    full = [model.target.config.rows_known(k) for k in known]
    held = codes_of(model.target.config, tokens)
    for image, count in enumerate(full):
        # What comes after is not decided: repeat the last known token so that the seam stays clean.
        held[image, count * columns :] = held[image, max(count * columns - 1, 0)]
    images = decode_codes(model.vq, model.target.config, backend, held)
    for picture, count in zip(images, full, strict=True):
        edge = picture.height * count // rows
        picture.paste(UNKNOWN, (0, edge, picture.width, picture.height))
    return images
