"""From image tokens to pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lantern_hpu.backends.base import Backend
from lantern_hpu.models.model import ImageModel

UNKNOWN = (200, 200, 200)  # colour of rows that a preview does not know yet


def decode_pixels(
    model: ImageModel, backend: Backend, tokens: NDArray[np.int64]
) -> list[Image.Image]:
    """Images of finished tokens [b, N], one at a time to keep memory low; none where nothing decodes them."""
    images: list[Image.Image] = []
    if model.vq is None:
        return images
    for row in torch.from_numpy(tokens.astype(np.int32)).split(1):
        backend.flush()  # the same graph for each image
        with torch.no_grad():
            codes = row.to(backend.device)
            images += to_images(model.vq.decode_codes(codes, model.target.config.grid))
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
    full = [min(k // columns, rows) for k in known]
    held = tokens.copy()
    for image, count in enumerate(full):
        # What comes after is not decided: repeat the last known token so that the seam stays clean.
        held[image, count * columns :] = held[image, max(count * columns - 1, 0)]
    images = decode_pixels(model, backend, held)
    for picture, count in zip(images, full, strict=True):
        edge = picture.height * count // rows
        picture.paste(UNKNOWN, (0, edge, picture.width, picture.height))
    return images
