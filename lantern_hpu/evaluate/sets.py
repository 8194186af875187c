"""What is drawn: prompts with the names that their pictures go by. Needs no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """A picture that is to be drawn.

    Attributes:
        id: its file's name without the ending; unique.
    """

    id: str
    prompt: str


def digest(items: Sequence[Item]) -> str:
    """Of all ids and prompts: two lists are one set or not."""
    text = json.dumps([[item.id, item.prompt] for item in items])
    return hashlib.sha256(text.encode()).hexdigest()
