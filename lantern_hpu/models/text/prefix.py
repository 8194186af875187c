"""From prompts to the target's prefix: captions through a projection, class labels through a table."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.core import Request
from lantern_hpu.errors import OptionError
from lantern_hpu.files import ASSETS, some_names
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.reading import Reader
from lantern_hpu.ops.buffers import ToDevice, to_device

ARTICLES = frozenset({"a", "an", "the"})
MOST_WORDS = 100  # of a vocabulary that a warning names
IMAGENET = ASSETS / "imagenet.txt"  # a class a line, by index: its name, then its synonyms


class TextFeatures(NamedTuple):
    """What a batch of prompts becomes before the target's own projection."""

    features: Tensor  # [B, P, C], zero at pads, left-padded
    valid: Tensor  # [B, P] bool


class TextConditioner(ABC):
    """Turns prompts into caption features; T5 and word tables are implementations."""

    def clean(self, prompt: str) -> None:  # noqa: B027
        """What can be done in any thread before a prompt is encoded, and is kept."""

    def prepare(self, prompts: Sequence[str]) -> None:  # noqa: B027
        """Encode the prompts of a run at once, where that takes long."""

    @abstractmethod
    def encode(self, prompts: Sequence[str]) -> TextFeatures:
        """Features of each prompt, cut to the prefix."""

    @abstractmethod
    def notes(self, prompt: str) -> list[str]:
        """Warnings for the user: words that were cut or that the model does not know."""


class WordConditioner(nn.Module, TextConditioner):
    """A table of words with learned positions: the text side of the embedded model.

    Id 0 pads, id 1 is any unknown word, known words follow in sorted order. Articles are dropped.
    """

    def __init__(
        self,
        words: Sequence[str],
        dim: int,
        prefix: int,
        to_device: ToDevice = to_device,
        positions: int = 0,
    ) -> None:
        super().__init__()
        self.to_device = to_device
        self.words = tuple(words)
        self.index = {word: i + 2 for i, word in enumerate(self.words)}
        self.prefix, self.positions = prefix, positions or prefix  # words that are read
        self.table = nn.Embedding(len(self.words) + 2, dim)
        self.position = nn.Embedding(self.positions, dim)
        nn.init.normal_(self.table.weight, std=dim**-0.5)
        nn.init.normal_(self.position.weight, std=dim**-0.5)

    @staticmethod
    def split(prompt: str) -> list[str]:
        """Lower-case words and numbers without articles."""
        return [w for w in re.findall(r"[^\W_]+", prompt.lower()) if w not in ARTICLES]

    def ids(self, prompt: str) -> list[int]:
        """Ids of a prompt's words, at most `positions` of them."""
        return [self.index.get(word, 1) for word in self.split(prompt)[: self.positions]]

    def forward(self, ids: Tensor) -> TextFeatures:
        """[B, P] int32 ids, padded with 0 on the left -> features."""
        valid = ids > 0
        # A word's place, independent of the padding
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
        known = f"it knows {some_names(self.words, MOST_WORDS)}"
        if not any(word in self.index for word in words[: self.positions]):
            why = "no word of it is known to this model, so it may draw anything"
            result.append(f"{why}; {known}")
        if len(words) > self.positions:
            cut = " ".join(words[self.positions :])
            result.append(f"the prompt is longer than {self.positions} words; left out: {cut!r}")
        unknown = [w for w in words[: self.positions] if w not in self.index]
        if unknown and len(unknown) < len(words):
            result.append(f"words this model does not know: {', '.join(unknown)}; {known}")
        return result


def class_index(text: str) -> int:
    """Index of a class of ImageNet-1k: "207", or a name or synonym in any case ("golden retriever").

    A synonym of several classes means the one that it is the first name of: "gong" is 577, not 494 ("chime, bell,
    gong").
    """
    if re.fullmatch(r"\s*[+-]?\d+\s*", text):
        index = int(text)
        class_name(index)  # checks the range
        return index
    name = _plain(text)
    known = [[_plain(name) for name in names] for names in _classes()]
    result = [index for index, names in enumerate(known) if names[0] == name]
    result = result or [index for index, names in enumerate(known) if name in names]
    if not result:
        close = get_close_matches(name, {n for names in known for n in names}, n=5, cutoff=0.6)
        hint = ", ".join(close) or f"an index from 0 to {len(_classes()) - 1}"
        raise OptionError(f"no ImageNet class is called {text!r}", hint=hint)
    if len(result) > 1:
        meant = "; ".join(f"{i} ({', '.join(_classes()[i])})" for i in result)
        what = f"several ImageNet classes are called {text!r}"
        raise OptionError(what, meant, "the index of the one you mean")
    return result[0]


def class_name(index: int) -> str:
    if not 0 <= index < len(_classes()):
        hint = f"an index from 0 to {len(_classes()) - 1}"
        raise OptionError(f"there is no ImageNet class {index}", hint=hint)
    return _classes()[index][0]


@cache
def _classes() -> list[list[str]]:
    lines = IMAGENET.read_text(encoding="utf-8").splitlines()
    return [[name.strip() for name in line.split(",")] for line in lines]


def _plain(name: str) -> str:
    """Names are compared without case; an underscore is a space, as in many lists of classes."""
    return " ".join(name.replace("_", " ").casefold().split())


class Prefix(NamedTuple):
    """A batch's condition: conditional rows first, then with guidance as many unconditional ones."""

    embeddings: Tensor  # [R, P, H]
    valid: Tensor  # [R, P] bool, False at pads, which are on the left
    tokens: Tensor  # [R, P] int32, what the drafter reads there: words, or 0 where there are none
    # [R, 3, P] int32, places on the axes of "mrope"; None where each token is one behind the last
    axes: Tensor | None = None

    @property
    def pads(self) -> Tensor:
        """Positions of the cache that are none of the rotary embedding's, pads among them: [R] int32."""
        if self.axes is None:
            return (~self.valid).sum(1, dtype=torch.int32)
        return self.valid.shape[1] - 1 - self.axes[:, 0, -1]  # a prompt ends in a word


class Conditioner(ABC):
    """What a family of models does with a prompt."""

    takes_classes = False  # whether prompts are class labels
    takes_negative = False  # whether guidance subtracts words that a user may choose
    reader: Reader | None = None  # of pictures to draw from, where the model reads some

    @abstractmethod
    def prepare(self, requests: Sequence[Request]) -> None:
        """Refuse what cannot be read, and encode what takes long, for all requests of a run at once."""

    @abstractmethod
    def rows(self, requests: Sequence[Request], guidance: bool) -> Prefix: ...

    def clean(self, prompt: str) -> None:  # noqa: B027
        """What of `prepare` needs no device and may take long; in any thread."""

    def sized(self, config: TransformerConfig) -> Conditioner:
        """The same for a target of other sizes, where those are chosen by request."""
        return self

    def length(self, request: Request) -> int:
        """Positions that a request takes; 0 where that is always the whole prefix."""
        return 0

    def notes(self, prompt: str) -> list[str]:
        """Warnings for the user: words that were cut or that the model does not know."""
        return []

    def request_notes(self, request: Request) -> list[str]:
        """The same of a prompt with the pictures that it is drawn from."""
        return self.notes(request.prompt)

    @abstractmethod
    def parts(self) -> dict[str, nn.Module]:
        """What is stored with the target, by the names it is stored under."""


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


class CaptionConditioner(Conditioner):
    """Captions through a text encoder and LlamaGen's projection."""

    def __init__(self, text: TextConditioner, projection: CaptionProjection) -> None:
        self.text, self.projection = text, projection

    def clean(self, prompt: str) -> None:
        self.text.clean(prompt)

    def prepare(self, requests: Sequence[Request]) -> None:
        self.text.prepare([request.prompt for request in requests])

    def rows(self, requests: Sequence[Request], guidance: bool) -> Prefix:
        """The unconditional rows use the caption's mask, as LlamaGen's sampler does."""
        features, valid = self.text.encode(
            [request.prompt for request in requests]
        )  # [B, P, C], [B, P]
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


class ClassConditioner(Conditioner):
    """Class labels through LlamaGen's table; its last row means "no class"."""

    takes_classes = True

    def __init__(self, table: nn.Embedding, to_device: ToDevice = to_device) -> None:
        self.table, self.to_device = table, to_device

    def prepare(self, requests: Sequence[Request]) -> None:
        for request in requests:
            class_index(request.prompt)  # an unknown one is refused before anything is drawn

    def rows(self, requests: Sequence[Request], guidance: bool) -> Prefix:
        chosen = [class_index(request.prompt) for request in requests]
        if guidance:
            chosen += [self.table.num_embeddings - 1] * len(chosen)
        index = self.to_device(torch.tensor(chosen), self.table.weight.device)[:, None]
        return wordless(self.table(index), torch.ones_like(index, dtype=torch.bool))

    def parts(self) -> dict[str, nn.Module]:
        return {"classes": self.table}


def condition_modules(
    config: ConditionConfig, target: TransformerConfig, to_device: ToDevice = to_device
) -> dict[str, Any]:
    """What is stored with the target, by the names it is stored under, still to be filled."""
    dim, prefix = target.dim, target.prefix
    if config.kind == "classes":
        return {"classes": nn.Embedding(config.classes + 1, dim)}
    if config.kind == "tokens":
        return {"words": nn.Embedding(config.rows, dim)} if config.rows else {}
    result: dict[str, Any] = {"condition": CaptionProjection(config.dim, dim, prefix)}
    if config.kind == "words":
        positions = config.positions
        words = WordConditioner(config.words, config.dim, prefix, to_device, positions)
        result["words"] = words
    return result
