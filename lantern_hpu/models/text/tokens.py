"""A prompt as tokens of the target's own table, framed as Chameleon's family frames it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lantern_hpu.errors import WeightsError, needing
from lantern_hpu.models.text.prefix import Prefix

FIRST_IMAGE_TOKEN = 4
PROMPT_POSITIONS = 256  # P: what a prompt and its frame must fit into
BEGIN, PAD = 0, 1  # <s>, <pad>
END_OF_TURN, BEGIN_IMAGE = 8710, 8197


def code_name(code: int) -> str:
    """The name of an image token: the code's digits as letters."""
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"


def check_image_tokens(vocabulary: dict[str, int], codes: int, where: Path) -> None:
    """Code c must be token c + 4, by the names of the tokens.

    Raises:
        WeightsError: a name is missing or lies elsewhere.
    """
    for code in range(codes):
        found = vocabulary.get(code_name(code))
        if found != code + FIRST_IMAGE_TOKEN:
            why = f"code {code} is token {found}, expected {code + FIRST_IMAGE_TOKEN}"
            raise WeightsError(f"the tokenizer in {where} is not Chameleon's", why)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint's folder.

    Raises:
        OptionError: transformers is missing. WeightsError: no tokenizer, or one that does not fit.
    """
    with needing("transformers", "it splits prompts"):
        from transformers import PreTrainedTokenizerFast
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise WeightsError(f"{folder} holds no tokenizer.json", hint="download it with the model")
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise WeightsError(f"cannot read {file}", str(error), "download it again") from error


class TokenConditioner:
    """A prompt as tokens, framed as in Anole's training: <s> prompt, end of turn, begin of image."""

    takes_classes = False

    def __init__(self, tokenizer: Any, embed: nn.Embedding, positions: int) -> None:
        self.tokenizer, self.embed, self.width = tokenizer, embed, positions

    def prepare(self, prompts: Sequence[str]) -> None:
        """Nothing: tokens are quick."""

    def words(self, prompt: str) -> list[int]:
        found: list[int] = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return found

    def ids(self, prompt: str) -> list[int]:
        """Tokens of a framed prompt, at most as many as there are positions."""
        return [BEGIN, *self.words(prompt)[: self.width - 3], END_OF_TURN, BEGIN_IMAGE]

    def rows(self, prompts: Sequence[str], guidance: bool) -> Prefix:
        rows = [self.ids(prompt) for prompt in prompts]
        if guidance:
            rows += [[BEGIN, BEGIN_IMAGE]] * len(prompts)
        padded = [[PAD] * (self.width - len(row)) + row for row in rows]
        device = self.embed.weight.device
        ids = torch.tensor(padded, device=device)  # [R, P]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        valid = torch.arange(self.width, device=device) >= self.width - lengths[:, None]
        tokens = (ids - FIRST_IMAGE_TOKEN) % self.embed.num_embeddings  # [R, P] rows of our table
        return Prefix(self.embed(tokens), valid, tokens.int())

    def notes(self, prompt: str) -> list[str]:
        count, room = len(self.words(prompt)), self.width - 3
        if count > room:
            return [f"the prompt has {count} tokens; those past {room} are left out"]
        return []

    def parts(self) -> dict[str, nn.Module]:
        return {}
