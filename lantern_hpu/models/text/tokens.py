"""A prompt as tokens of a language model, of the target's own table or of a separate one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lantern_hpu.core import Request
from lantern_hpu.errors import Arg, WeightsError, needing, words
from lantern_hpu.files import check_content
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.text.frames import Codes, Frame, Words
from lantern_hpu.models.text.prefix import Conditioner, Prefix
from lantern_hpu.ops.buffers import ToDevice, to_device

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


class FramedPrompt(str):
    """A prompt that another program has framed and split: its tokens, as the model's authors number them."""

    ids: tuple[int, ...]

    def __new__(cls, ids: Sequence[int]) -> FramedPrompt:
        self = super().__new__(cls, " ".join(map(str, ids)))
        self.ids = tuple(ids)
        return self


class TokenConditioner(Conditioner):
    """Framed prompts, padded on the left; both rows of an image have pads and positions of their own."""

    def __init__(
        self,
        tokenizer: Any,
        frame: Frame,
        embed: nn.Module,
        word_table: nn.Embedding | None = None,
        to_device: ToDevice = to_device,
    ) -> None:
        """`embed` is the target's embedding, which looks the words up too; `word_table` takes its place."""
        self.tokenizer, self.frame, self.embed = tokenizer, frame, embed
        self.word_table, self.to_device = word_table, to_device
        self.width = frame.config.prefix
        self.takes_negative = frame.entry.takes_negative
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {id for id, token in added.items() if token.special}
        self.control = special | set(frame.id.values()) | frame.drawn()
        self.others: dict[TransformerConfig, TokenConditioner] = {}  # of other sizes

    def sized(self, config: TransformerConfig) -> TokenConditioner:
        if config == self.frame.config:
            return self
        if config not in self.others:
            frame = self.frame.sized(config)
            other = TokenConditioner(
                self.tokenizer, frame, self.embed, self.word_table, self.to_device
            )
            other.reader = self.reader
            self.others[config] = other
        return self.others[config]

    @property
    def sourced(self) -> TokenConditioner:
        """The same of prompts with pictures."""
        return self.sized(self.frame.config.of_grid(None, sourced=True))

    def length(self, request: Request) -> int:
        if request.sources and not self.frame.config.sourced:
            return self.sourced.length(request)
        blank = [[[0] * columns] * rows for rows, columns in self.grids(request)]
        return len(self.ids(request.prompt, blank))

    def ids(self, prompt: str, sources: Sequence[Codes] = ()) -> list[int]:
        """Tokens of a framed prompt and of its sources."""
        if isinstance(prompt, FramedPrompt):
            return list(prompt.ids)
        return self.frame.ids(self.plain(prompt), sources)

    def grids(self, request: Request) -> list[tuple[int, int]]:
        """Rows and columns of the codes of a request's sources."""
        reader = self.reader
        assert reader is not None or not request.sources, "a request's sources are checked before"
        return [reader.grid(source) for source in request.sources] if reader else []

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

    def rows(self, requests: Sequence[Request], guidance: bool) -> Prefix:
        rows = [self.ids(one.prompt, self.codes(one)) for one in requests]
        if guidance:
            given = [request.negative for request in requests]
            words = [n if n is None else self.plain(n) for n in given]
            rows += [self.frame.without(r, n) for r, n in zip(rows, words, strict=True)]
        device = next(self.embed.parameters()).device
        lengths = self.to_device(torch.tensor([len(row) for row in rows]), device)
        valid = torch.arange(self.width, device=device) >= self.width - lengths[:, None]
        padded = [[self.frame.entry.pad] * (self.width - len(row)) + row for row in rows]
        ids = torch.tensor([[self.place(t) for t in row] for row in padded])
        ids = self.to_device(ids, device)
        table = self.word_table or self.embed
        embeddings: Tensor = table(ids)  # [R, P, H]
        # A drafter has a table like the target's; words that it does not hold are token 0 to it.
        tokens = ids.int() if self.word_table is None else torch.zeros_like(ids)
        axes = self.axes(rows, requests) if self.frame.config.has_axes else None
        return Prefix(embeddings, valid, tokens, axes)

    def axes(self, rows: Sequence[Sequence[int]], requests: Sequence[Request]) -> Tensor:
        """Places of framed prompts, and of rows without them, on the axes of "mrope": [R, 3, P] int32."""
        grids = [*map(self.grids, requests), *[[]] * (len(rows) - len(requests))]
        places = torch.zeros(len(rows), 3, self.width, dtype=torch.int32)
        for number, (row, own) in enumerate(zip(rows, grids, strict=True)):
            places[number, :, self.width - len(row) :] = torch.tensor(
                self.frame.axes(len(row), own)
            )
        return self.to_device(places, next(self.embed.parameters()).device)

    def place(self, token: int) -> int:
        """The row of the table that holds a token."""
        order, rows = self.frame.entry.order, self.frame.config.embed_rows
        return token if order is None or rows is None else order.row(token, rows)

    def published(self, prompt: str, drawn: Sequence[int]) -> list[int]:
        """Tokens of a prompt and of drawn rows of our table, as the model's authors number them."""
        order, rows = self.frame.entry.order, self.frame.config.embed_rows
        if order is not None and rows is not None:
            tokens = order.tokens(rows)
            drawn = [tokens[row] for row in drawn]
        return [*self.ids(prompt), *drawn]

    def notes(self, prompt: str) -> list[str]:
        return self.frame.notes(self.plain(prompt))

    def request_notes(self, request: Request) -> list[str]:
        if not request.sources:
            return self.notes(request.prompt)
        return self.sourced.frame.source_notes(self.plain(request.prompt), self.grids(request))

    def negative_notes(self, negative: str) -> list[str]:
        """The same of a negative prompt."""
        return self.frame.notes(self.plain(negative), negative=True)

    def parts(self) -> dict[str, nn.Module]:
        return {"words": self.word_table} if self.word_table is not None else {}
