"""From prompts to caption features: the interface, and the word table of the embedded model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lantern_hpu.ops.buffers import ToDevice, to_device

ARTICLES = frozenset({"a", "an", "the"})


class TextFeatures(NamedTuple):
    """What a batch of prompts becomes before the target's own projection."""

    features: Tensor  # [B, P, C], zero at pads, left-padded
    valid: Tensor  # [B, P] bool


def left_padded(
    rows: Sequence[Tensor],
    prefix: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device | None,
    to_device: ToDevice,
) -> TextFeatures:
    """Features of several prompts [v, C], v <= P each, behind zeros: [B, P, C] and [B, P] on the device.

    They are put together on the host, so that one copy goes up.
    """
    features = torch.zeros(len(rows), prefix, width, dtype=dtype)  # [B, P, C]
    valid = torch.zeros(features.shape[:2], dtype=torch.bool)
    for place, known in enumerate(rows):
        features[place, prefix - len(known) :] = known
        valid[place, prefix - len(known) :] = True
    return TextFeatures(to_device(features, device), to_device(valid, device))


class TextConditioner(Protocol):
    """Turns prompts into caption features; T5 and word tables are implementations."""

    def encode(self, prompts: Sequence[str]) -> TextFeatures:
        """Features of each prompt, cut to the prefix."""
        ...

    def notes(self, prompt: str) -> list[str]:
        """Warnings for the user: words that were cut or that the model does not know."""
        ...


class WordConditioner(nn.Module):
    """A table of words with learned positions: the text side of the embedded model.

    Id 0 pads, id 1 is any unknown word, known words follow in sorted order. Articles are dropped.
    """

    def __init__(
        self, words: Sequence[str], dim: int, prefix: int, to_device: ToDevice = to_device
    ) -> None:
        super().__init__()
        self.to_device = to_device
        self.words = tuple(words)
        self.index = {word: i + 2 for i, word in enumerate(self.words)}
        self.prefix = prefix
        self.table = nn.Embedding(len(self.words) + 2, dim)
        self.position = nn.Embedding(prefix, dim)
        nn.init.normal_(self.table.weight, std=dim**-0.5)
        nn.init.normal_(self.position.weight, std=dim**-0.5)

    @staticmethod
    def split(prompt: str) -> list[str]:
        """Lower-case words and numbers without articles."""
        return [w for w in re.findall(r"[^\W_]+", prompt.lower()) if w not in ARTICLES]

    def ids(self, prompt: str) -> list[int]:
        """Ids of a prompt's words, at most `prefix` of them."""
        return [self.index.get(word, 1) for word in self.split(prompt)[: self.prefix]]

    def forward(self, ids: Tensor) -> TextFeatures:
        """[B, P] int32 ids, padded with 0 on the left -> features."""
        valid = ids > 0
        # A word's place, whatever the padding
        order = (valid.int().cumsum(-1, dtype=torch.int32) - 1).clamp(min=0)
        features = (self.table(ids) + self.position(order)) * valid[..., None]
        return TextFeatures(features, valid)

    def encode(self, prompts: Sequence[str]) -> TextFeatures:
        rows = [self.ids(prompt) for prompt in prompts]
        padded = [[0] * (self.prefix - len(row)) + row for row in rows]
        ids = torch.tensor(padded, dtype=torch.int32)
        return self(self.to_device(ids, self.table.weight.device))

    def notes(self, prompt: str) -> list[str]:
        words = self.split(prompt)
        result = []
        if not any(word in self.index for word in words[: self.prefix]):
            result.append("no word of it is known to this model, so it may draw anything")
        if len(words) > self.prefix:
            cut = " ".join(words[self.prefix :])
            result.append(f"the prompt is longer than {self.prefix} words; left out: {cut!r}")
        unknown = [w for w in words[: self.prefix] if w not in self.index]
        if unknown:
            result.append(f"words this model does not know: {', '.join(unknown)}")
        return result
