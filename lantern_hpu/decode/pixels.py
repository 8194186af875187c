"""From image tokens to pictures, or to the hidden states of which another program makes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lantern_hpu.backends.base import Backend, own_defaults
from lantern_hpu.core import Request
from lantern_hpu.errors import InvalidImageError, OptionError
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.model import ImageModel
from lantern_hpu.models.text.prefix import TokenConditioner
from lantern_hpu.models.transformer import Rotary
from lantern_hpu.models.vq import Tokenizer
from lantern_hpu.ops.buffers import additive_mask, arange32, causal_mask, prefix_mask
from lantern_hpu.ops.kv_cache import KVCache

UNKNOWN = (200, 200, 200)  # colour of rows that a preview does not know yet


def codes_of(config: TransformerConfig, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The codes [b, rows * columns] of tokens [b, N]: without the preview, and without what closes rows."""
    rows, columns = config.grid
    picture = tokens[:, config.preview_tokens :]
    kept = picture.reshape(-1, rows, config.columns)[:, :, :columns]
    return np.ascontiguousarray(kept.reshape(-1, rows * columns))


@own_defaults()
def decode_codes(
    vq: Tokenizer | None,
    config: TransformerConfig,
    backend: Backend,
    codes: NDArray[np.int64],
    check: bool = True,
) -> list[Image.Image]:
    """Images of codes [b, rows * columns], one at a time to keep memory low; none where nothing decodes them.

    Raises:
        InvalidImageError: to `check`, a pixel is NaN or infinite.
    """
    images: list[Image.Image] = []
    if vq is None:
        return images
    for row in torch.from_numpy(codes.astype(np.int32)).split(1):
        backend.transfers.flush()  # the same graph for each image
        with torch.no_grad():
            height, width = (side * vq.config.downsample for side in config.grid)
            made, valid = to_images(vq.draw(row.to(backend.device), config.grid), height, width)
            images += made
            if check and not valid:
                raise InvalidImageError.of_pixels(made)
    return images


def to_images(rows: Tensor, height: int, width: int) -> tuple[list[Image.Image], bool]:
    """Pictures of what `as_bytes` returns, and whether all their numbers were finite: in one host read."""
    read = rows.cpu().numpy()
    made = [Image.fromarray(row[:-1].reshape(height, width, 3)) for row in read]
    return made, bool(read[:, -1].all())


@own_defaults()
@torch.no_grad()
def hidden_states(
    model: ImageModel,
    config: TransformerConfig,
    prompt: str,
    tokens: Sequence[int] | NDArray[np.int64],
    by_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Tokens [T] int64, as the model's authors number them, and their final-normed hidden states [T, H], on the host.

    They are of the row with the prompt, in one pass: the framed prompt, an image's tokens, and behind all of them the
    token that closes an image, where the family has one.

    Args:
        config: the target's sizes for this image. tokens: [N], or the first of them, or none.
        by_head: see `KVCache.allocate`.

    Raises:
        OptionError: prompts are not read as tokens of the target's own, or these are no image's.
    """
    target, device, condition = model.target, model.target.device, model.condition.sized(config)
    if not isinstance(condition, TokenConditioner) or condition.word_table is not None:
        why = f"{model.name} does not read prompts as tokens of its own"
        raise OptionError("there are no hidden states to save", why, "the tokens alone")
    closing, drawn = condition.frame.entry.closes, [int(token) for token in tokens]
    if len(drawn) > config.tokens or not all(0 <= token < config.vocab_size for token in drawn):
        why = f"at most {config.tokens}, from 0 to {config.vocab_size - 1}"
        raise OptionError("tokens are not those of an image", why, "result.tokens[0]")
    if len(drawn) == config.tokens and closing is not None:
        drawn.append(condition.place(closing))
    prefix = condition.rows([Request(prompt)], False)
    rows = torch.tensor([drawn], dtype=torch.int32).to(device)  # [1, N + 1]
    x = torch.cat([prefix.embeddings, target.embed(rows)], 1)
    length = x.shape[1]
    position, causal = arange32(length).to(device), causal_mask(length).to(device)
    valid = torch.cat([prefix.valid, torch.ones_like(rows, dtype=torch.bool)], 1)
    rope = Rotary(config, length).to(device)(position[None], (~prefix.valid).sum(1))
    sizes = (config.layers, 1, length, config.kv, config.head_dim, target.dtype, device, by_head)
    cache = KVCache.allocate(*sizes).written(position, 1)
    mask = additive_mask(prefix_mask(valid, causal), x.dtype)
    words = target.words(torch.cat([prefix.tokens, rows], 1))
    states = target(x, rope.to(x.dtype), mask, cache, position, words=words)[0]  # [P + N + 1, H]
    ids = condition.published(prompt, drawn)
    return torch.tensor(ids), states[length - len(ids) :].cpu().contiguous()


def preview(
    model: ImageModel,
    config: TransformerConfig,
    backend: Backend,
    tokens: NDArray[np.int64],
    known: Sequence[int],
) -> list[Image.Image]:
    """Images of tokens [b, N], of which `known` [b] mean something: the whole rows of those, and grey.

    `config` is the target's for their size.
    """
    rows, columns = config.grid
    full = [config.rows_known(k) for k in known]
    held = codes_of(config, tokens)
    for image, count in enumerate(full):
        # What comes after is not decided: repeat the last known token so that the seam stays clean.
        held[image, count * columns :] = held[image, max(count * columns - 1, 0)]
    images = decode_codes(model.vq, config, backend, held, check=False)
    for picture, count in zip(images, full, strict=True):
        edge = picture.height * count // rows
        picture.paste(UNKNOWN, (0, edge, picture.width, picture.height))
    return images
