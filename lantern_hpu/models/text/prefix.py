"""From prompts to the target's prefix: captions through a projection, class labels through a table, or tokens."""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.core import IMAGENET_CLASSES, Request
from lantern_hpu.errors import Arg, OptionError, WeightsError, needing, words
from lantern_hpu.files import ASSETS, check_content, some_names
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.pictures import Reader
from lantern_hpu.models.text.frames import Codes, Frame, FrameConfig, Words, places_of
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
        """Warnings for the user: words that were cut, that the model does not know, or that it often leaves out."""


class WordConditioner(nn.Module, TextConditioner):
    """A table of words with learned positions: the text side of the embedded model.

    Id 0 pads, id 1 is any unknown word, known words follow in sorted order. Articles are dropped.
    """

    whole = ("forward",)  # what may be compiled by itself

    def __init__(
        self, config: ConditionConfig, prefix: int, to_device: ToDevice = to_device
    ) -> None:
        super().__init__()
        self.to_device = to_device
        self.words = config.words
        self.remarks = config.remarks
        self.index = {word: i + 2 for i, word in enumerate(self.words)}
        self.prefix, self.positions = prefix, config.positions or prefix  # words that are read
        self.table = nn.Embedding(len(self.words) + 2, config.dim)
        self.position = nn.Embedding(self.positions, config.dim)
        nn.init.normal_(self.table.weight, std=config.dim**-0.5)
        nn.init.normal_(self.position.weight, std=config.dim**-0.5)

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
        read = words[: self.positions]
        result = []
        known = f"it knows {some_names(self.words, MOST_WORDS)}"
        if not any(word in self.index for word in read):
            why = "no word of it is known to this model, so it may draw anything"
            result.append(f"{why}; {known}")
        if len(words) > self.positions:
            cut = " ".join(words[self.positions :])
            result.append(f"the prompt is longer than {self.positions} words; left out: {cut!r}")
        unknown = [w for w in read if w not in self.index]
        if unknown and len(unknown) < len(words):
            result.append(f"words this model does not know: {', '.join(unknown)}; {known}")
        return result + [f"{word}: {remark}" for word, remark in self.remarks if word in read]


def class_index(text: str, classes: int = IMAGENET_CLASSES) -> int:
    """Index of a class: "207", or of ImageNet-1k a name or synonym in any case ("golden retriever").

    A synonym of several classes means the one that it is the first name of: "gong" is 577, not 494 ("chime, bell,
    gong").

    Args:
        classes: that the model was trained on; names are known for ImageNet's.
    """
    hint = f"an index from 0 to {classes - 1}"
    if re.fullmatch(r"\s*[+-]?\d+\s*", text):
        index = int(text)
        if not 0 <= index < classes:
            raise OptionError(f"there is no class {index}", f"the model has {classes}", hint)
        return index
    if classes != IMAGENET_CLASSES:
        why = f"the model has {classes} classes, whose names are not known"
        raise OptionError(f"{text!r} is no class", why, hint)
    name = _plain(text)
    known = [[_plain(name) for name in names] for names in _classes()]
    result = [index for index, names in enumerate(known) if names[0] == name]
    result = result or [index for index, names in enumerate(known) if name in names]
    if not result:
        close = get_close_matches(name, {n for names in known for n in names}, n=5, cutoff=0.6)
        raise OptionError(f"no ImageNet class is called {text!r}", hint=", ".join(close) or hint)
    if len(result) > 1:
        meant = "; ".join(f"{i} ({', '.join(_classes()[i])})" for i in result)
        what = f"several ImageNet classes are called {text!r}"
        raise OptionError(what, meant, "the index of the one you mean")
    return result[0]


@cache
def _classes() -> list[list[str]]:
    lines = IMAGENET.read_text(encoding="utf-8").splitlines()
    return [[name.strip() for name in line.split(",")] for line in lines]


@lru_cache(4096)
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

    classes = 0  # labels that a prompt may name; 0 where it is a text
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

    def grids(self, request: Request) -> Sequence[tuple[int, int]]:
        """Rows and columns of the codes of the pictures that a prompt has."""
        return ()

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

    whole = ("forward",)  # what may be compiled by itself

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
        prompts = [request.prompt for request in requests]
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


class ClassConditioner(Conditioner):
    """Class labels through LlamaGen's table; its last row means "no class"."""

    def __init__(self, table: nn.Embedding, to_device: ToDevice = to_device) -> None:
        self.table, self.to_device = table, to_device
        self.classes = table.num_embeddings - 1

    def prepare(self, requests: Sequence[Request]) -> None:
        for request in requests:  # an unknown one is refused before anything is drawn
            class_index(request.prompt, self.classes)

    def rows(self, requests: Sequence[Request], guidance: bool) -> Prefix:
        chosen = [class_index(request.prompt, self.classes) for request in requests]
        if guidance:
            chosen += [self.classes] * len(chosen)
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
        result["words"] = WordConditioner(config, prefix, to_device)
    return result


# ---------------------------------------------------------------------- tokens of a language model


PROMPT_POSITIONS = 256  # P: what a prompt and its frame must fit into
BREAK = "\0"  # where text is split before it becomes tokens
CACHED = 256  # texts whose tokens are kept: of a server's prompts, from when they come until they are drawn
ROUNDS = 4  # of breaking names of control tokens that others are made of


def load_tokenizer(folder: Path, whose: str = "") -> Any:
    """
    Args:
        whose: which other model's it is, where the model was published without one.
    """
    with needing("transformers", "it splits prompts"):
        from transformers import PreTrainedTokenizerFast
    file = folder / "tokenizer.json"
    if not file.is_file():
        why = f"the model was published without one, and reads {whose}" if whose else ""
        given = words(Arg("text_encoder", "FOLDER"), "with it")
        hint = given if whose else "download it with the model"
        raise WeightsError(f"{folder} holds no tokenizer.json", why, hint)
    check_content(file)
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise WeightsError(f"cannot read {file}", str(error), "download it again") from error


def splitter(tokenizer: Any) -> Words:
    """Text to tokens, without the tokenizer's own frame; each part between two breaks by itself."""

    @lru_cache(CACHED)
    def tokens(text: str) -> tuple[int, ...]:
        parts = [part for part in text.split(BREAK) if part] or [""]
        return tuple(t for p in parts for t in tokenizer(p, add_special_tokens=False)["input_ids"])

    return lambda text: list(tokens(text))


Framed = TypeVar("Framed", bound="FramedConditioner")


class FramedPrompt(str):
    """A prompt that another program has framed and split: its tokens, as the model's authors number them.

    Attributes:
        grids: rows and columns of the codes of pictures that it begins with.
    """

    ids: tuple[int, ...]
    grids: tuple[tuple[int, int], ...]

    def __new__(cls, ids: Sequence[int], grids: Sequence[tuple[int, int]] = ()) -> FramedPrompt:
        self = super().__new__(cls, " ".join(map(str, ids)))
        self.ids = tuple(ids)
        self.grids = tuple(grids)
        return self


class FramedConditioner(Conditioner):
    """Framed prompts, padded on the left; both rows of an image have pads and positions of their own.

    Attributes:
        embed: the target's embedding, which looks the words up too; `word_table` takes its place.
    """

    takes_negative = True

    def __init__(
        self,
        entry: FrameConfig,
        config: TransformerConfig,
        embed: nn.Module,
        word_table: nn.Embedding | None = None,
        to_device: ToDevice = to_device,
    ) -> None:
        self.entry = entry
        self.config = config
        self.embed = embed
        self.word_table = word_table
        self.to_device = to_device
        self.others: dict[TransformerConfig, Any] = {}  # of other sizes

    def sized(self: Framed, config: TransformerConfig) -> Framed:
        if config == self.config:
            return self
        if config not in self.others:
            other = copy.copy(self)
            other.resize(config)
            self.others[config] = other
        sized: Framed = self.others[config]
        return sized

    def resize(self, config: TransformerConfig) -> None:
        self.config = config

    def grids(self, request: Request) -> Sequence[tuple[int, int]]:
        return request.prompt.grids if isinstance(request.prompt, FramedPrompt) else ()

    def prepare(self, requests: Sequence[Request]) -> None:
        """Framed prompts are read as they are."""

    def framed(self, request: Request) -> list[int]:
        """Tokens of a request's prompt, pictures included."""
        assert isinstance(request.prompt, FramedPrompt), "who has no tokenizer frames none"
        return list(request.prompt.ids)

    def without(self, row: list[int], negative: str | None) -> list[int]:
        """The row that guidance subtracts from a framed prompt's: the negative one, or its last token."""
        return list(negative.ids) if isinstance(negative, FramedPrompt) else row[-1:]

    def length(self, request: Request) -> int:
        row = self.framed(request)
        return max(len(row), len(self.without(row, request.negative)))

    def rows(self, requests: Sequence[Request], guidance: bool) -> Prefix:
        rows = [self.framed(request) for request in requests]
        if guidance:
            given = [request.negative for request in requests]
            rows += [self.without(r, n) for r, n in zip(rows, given, strict=True)]
        width = self.config.prefix
        longest = max(map(len, rows))
        if longest > width:
            what = f"a prompt has {longest} tokens"
            raise OptionError(what, f"{self.entry.family} reads up to {width}", "a shorter prompt")
        device = next(self.embed.parameters()).device
        lengths = self.to_device(torch.tensor([len(row) for row in rows]), device)
        valid = torch.arange(width, device=device) >= width - lengths[:, None]
        padded = [[self.entry.pad] * (width - len(row)) + row for row in rows]
        ids = torch.tensor([[self.place(t) for t in row] for row in padded])
        ids = self.to_device(ids, device)
        table = self.word_table or self.embed
        embeddings: Tensor = table(ids)  # [R, P, H]
        # A drafter has a table like the target's; words that it does not hold are token 0 to it.
        tokens = ids.int() if self.word_table is None else torch.zeros_like(ids)
        axes = self.axes(rows, requests) if self.config.has_axes else None
        return Prefix(embeddings, valid, tokens, axes)

    def axes(self, rows: Sequence[Sequence[int]], requests: Sequence[Request]) -> Tensor:
        """Places of framed prompts, and of rows without them, on the axes of "mrope": [R, 3, P] int32."""
        grids = [*map(self.grids, requests), *[[]] * (len(rows) - len(requests))]
        width = self.config.prefix
        places = torch.zeros(len(rows), 3, width, dtype=torch.int32)
        for place, row, own in zip(places, rows, grids, strict=True):
            place[:, width - len(row) :] = torch.tensor(places_of(len(row), own))
        return self.to_device(places, next(self.embed.parameters()).device)

    def place(self, token: int) -> int:
        """The row of the table that holds a token."""
        order, rows = self.entry.order, self.config.embed_rows
        return token if order is None or rows is None else order.row(token, rows)

    def as_published(self, drawn: Sequence[int]) -> list[int]:
        """Drawn rows of our table, as the model's authors number them."""
        order, rows = self.entry.order, self.config.embed_rows
        if order is None or rows is None:
            return list(drawn)
        tokens = order.tokens(rows)
        return [tokens[row] for row in drawn]

    def parts(self) -> dict[str, nn.Module]:
        return {"words": self.word_table} if self.word_table is not None else {}


class TokenConditioner(FramedConditioner):
    """Prompts of a user, which it splits and frames; framed ones too."""

    def __init__(
        self,
        tokenizer: Any,
        frame: Frame,
        embed: nn.Module,
        word_table: nn.Embedding | None = None,
        to_device: ToDevice = to_device,
    ) -> None:
        super().__init__(frame.entry, frame.config, embed, word_table, to_device)
        self.tokenizer = tokenizer
        self.frame = frame
        self.takes_negative = frame.entry.takes_negative
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {id for id, token in added.items() if token.special}
        self.control = special | set(frame.id.values()) | frame.drawn()

    def resize(self, config: TransformerConfig) -> None:
        super().resize(config)
        self.frame = self.frame.sized(config)

    @property
    def sourced(self) -> TokenConditioner:
        """The same of prompts with pictures."""
        return self.sized(self.config.of_grid(None, sourced=True))

    def length(self, request: Request) -> int:
        grids = self.grids(request)
        if grids and not self.config.sourced:
            return self.sourced.length(request)
        blank = [[[0] * columns] * rows for rows, columns in grids]
        return len(self.ids(request.prompt, blank))

    def ids(self, prompt: str, sources: Sequence[Codes] = ()) -> list[int]:
        """Tokens of a framed prompt and of its sources."""
        if isinstance(prompt, FramedPrompt):
            return list(prompt.ids)
        return self.frame.ids(self.plain(prompt), sources)

    def framed(self, request: Request) -> list[int]:
        return self.ids(request.prompt, self.codes(request))

    def without(self, row: list[int], negative: str | None) -> list[int]:
        if isinstance(negative, FramedPrompt):
            return super().without(row, negative)
        return self.frame.without(row, negative if negative is None else self.plain(negative))

    def grids(self, request: Request) -> Sequence[tuple[int, int]]:
        reader = self.reader
        assert reader is not None or not request.sources, "a request's sources are checked before"
        read = [reader.grid(source) for source in request.sources] if reader else []
        return [*super().grids(request), *read]

    def codes(self, request: Request) -> list[list[list[int]]]:
        """Codes of a request's sources, of each row by row."""
        reader = self.reader
        return [reader.codes(source).tolist() for source in request.sources] if reader else []

    def prepare(self, requests: Sequence[Request]) -> None:
        """Split prompts and read sources: what comes of it is kept for a while."""
        for request in requests:
            self.length(request)
            self.codes(request)

    def words(self, prompt: str) -> list[int]:
        return self.frame.words(self.plain(prompt))

    def plain(self, prompt: str) -> str:
        """A prompt that is all text: names of control tokens and image codes are broken after their first letter."""
        for _ in range(ROUNDS):
            found = {id for id in self.frame.words(prompt) if id in self.control}
            names = [self.tokenizer.convert_ids_to_tokens(id) for id in sorted(found)]
            names = [name for name in names if len(name) > 1 and name in prompt]
            if not names:
                break
            for name in names:
                prompt = prompt.replace(name, name[0] + BREAK + name[1:])
        return prompt

    def published(self, prompt: str, drawn: Sequence[int]) -> list[int]:
        """Tokens of a prompt and of drawn rows of our table, as the model's authors number them."""
        return [*self.ids(prompt), *self.as_published(drawn)]

    def notes(self, prompt: str) -> list[str]:
        return self.frame.notes(self.plain(prompt))

    def request_notes(self, request: Request) -> list[str]:
        frame = self.sourced.frame if request.sources else self.frame
        return frame.notes(self.plain(request.prompt), self.grids(request))

    def negative_notes(self, negative: str) -> list[str]:
        """The same of a negative prompt."""
        return self.frame.notes(self.plain(negative), negative=True)
