"""The classes of ImageNet-1k by index and by name, for class-conditional models. Needs no torch.

`assets/imagenet.txt` has one class a line, in index order: its name, then its synonyms.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache

from lantern_hpu.errors import OptionError
from lantern_hpu.files import ASSETS

FILE = ASSETS / "imagenet.txt"


def class_index(text: str) -> int:
    """Index of a class given as "207", or by a name or synonym in any case ("golden retriever").

    A synonym of several classes means the one that it is the first name of: "gong" is 577, not 494
    ("chime, bell, gong").

    Raises:
        OptionError: index out of range; unknown name (close ones are named); name of several classes.
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
    """The first name of a class.

    Raises:
        OptionError: index out of range.
    """
    if not 0 <= index < len(_classes()):
        hint = f"an index from 0 to {len(_classes()) - 1}"
        raise OptionError(f"there is no ImageNet class {index}", hint=hint)
    return _classes()[index][0]


@cache
def _classes() -> list[list[str]]:
    """The names of each class."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return [[name.strip() for name in line.split(",")] for line in lines]


def _plain(name: str) -> str:
    """Names are compared without case; an underscore is a space, as in many lists of classes."""
    return " ".join(name.replace("_", " ").casefold().split())
