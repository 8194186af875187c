"""From prompts to the target's prefix: captions through a projection, class labels through a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.text.classes import class_index
from lantern_hpu.models.text.words import TextConditioner
from lantern_hpu.ops.buffers import ToDevice, to_device


class Prefix(NamedTuple):
    """A batch's condition: conditional rows first, then with guidance as many unconditional ones."""

    embeddings: Tensor  # [R, P, H]
    valid: Tensor  # [R, P] bool, False at pads, which are on the left
    tokens: Tensor  # [R, P] int32, what the drafter reads there: words, or 0 where there are none


class Conditioner(Protocol):
    """What a family of models does with a prompt."""

    takes_classes: bool  # prompts are class labels

    def prepare(self, prompts: Sequence[str]) -> None:
        """Do what is better done for all prompts of a run at once."""
        ...

    def rows(self, prompts: Sequence[str], guidance: bool) -> Prefix:
        """The prefix of each prompt.

        Raises:
            OptionError: a prompt that means nothing to this model.
        """
        ...

    def sized(self, config: TransformerConfig) -> Conditioner:
        """The same for a target of other sizes, where those are chosen by request."""
        ...

    def length(self, prompt: str) -> int:
        """Positions that a prompt takes; 0 where that is always the whole prefix.

        Raises:
            OptionError: it is too long for a family that cuts none.
        """
        ...

    def notes(self, prompt: str) -> list[str]:
        """Warnings for the user: words that were cut or that the model does not know."""
        ...

    def parts(self) -> dict[str, nn.Module]:
        """What is stored with the target, by the names it is stored under."""
        ...


class FixedPrefix:
    """What conditioners have in common whose model has one size of picture and prefix."""

    def sized(self, config: TransformerConfig) -> Any:
        return self

    def length(self, prompt: str) -> int:
        return 0


def wordless(embeddings: Tensor, valid: Tensor) -> Prefix:
    """A prefix without words for the drafter, as LlamaGen's is."""
    return Prefix(embeddings, valid, torch.zeros_like(valid, dtype=torch.int32))


class CaptionProjection(nn.Module):
    """Caption features to prefix embeddings, and the learned features of "no caption".

    Pads are exact zeros and stay zeros, since neither layer has a bias.
    """

    def __init__(self, caption_dim: int, dim: int, prefix: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(caption_dim, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)
        self.uncond = nn.Parameter(torch.empty(prefix, caption_dim))
        nn.init.normal_(self.uncond, std=caption_dim**-0.5)

    def forward(self, features: Tensor) -> Tensor:
        """[.., P, caption_dim] features -> [.., P, H] embeddings."""
        return self.fc2(F.gelu(self.fc1(features), approximate="tanh"))


class CaptionConditioner(FixedPrefix):
    """Captions through a text encoder and LlamaGen's projection."""

    takes_classes = False

    def __init__(self, text: TextConditioner, projection: CaptionProjection) -> None:
        self.text, self.projection = text, projection

    def prepare(self, prompts: Sequence[str]) -> None:
        prepare = getattr(self.text, "prepare", None)
        if prepare is not None:
            prepare(prompts)

    def rows(self, prompts: Sequence[str], guidance: bool) -> Prefix:
        """The unconditional rows use the caption's mask, as LlamaGen's sampler does."""
        features, valid = self.text.encode(prompts)  # [B, P, C], [B, P]
        uncond = self.projection.uncond
        features = features.to(uncond.dtype)
        if guidance:
            features = torch.cat([features, uncond.expand_as(features)])
            valid = torch.cat([valid, valid])
        return wordless(self.projection(features), valid)

    def notes(self, prompt: str) -> list[str]:
        return self.text.notes(prompt)

    def parts(self) -> dict[str, nn.Module]:
        stored: dict[str, nn.Module] = {"condition": self.projection}
        return stored | ({"words": self.text} if isinstance(self.text, nn.Module) else {})


class ClassConditioner(FixedPrefix):
    """Class labels through LlamaGen's table; its last row means "no class"."""

    takes_classes = True

    def __init__(self, table: nn.Embedding, to_device: ToDevice = to_device) -> None:
        self.table, self.to_device = table, to_device

    def prepare(self, prompts: Sequence[str]) -> None:
        for prompt in prompts:
            class_index(prompt)  # an unknown one is refused before anything is drawn

    def rows(self, prompts: Sequence[str], guidance: bool) -> Prefix:
        chosen = [class_index(prompt) for prompt in prompts]
        if guidance:
            chosen += [self.table.num_embeddings - 1] * len(chosen)
        index = self.to_device(torch.tensor(chosen), self.table.weight.device)[:, None]
        return wordless(self.table(index), torch.ones_like(index, dtype=torch.bool))

    def notes(self, prompt: str) -> list[str]:
        return []

    def parts(self) -> dict[str, nn.Module]:
        return {"classes": self.table}
