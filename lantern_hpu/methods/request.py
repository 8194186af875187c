"""One image to draw: its prompt, its seed, and how its tokens are drawn. Checked here, once. Needs no torch."""

from __future__ import annotations

import operator
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lantern_hpu.errors import Arg, OptionError, check_ranges, option, require, words
from lantern_hpu.methods.relaxation import EXACT, MOST, Relaxation

if TYPE_CHECKING:
    import torch

MAX_SEED = 2**63 - 1
MAX_IMAGES = 100_000  # of one run, each with a request of its own


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from the target's logits.

    Attributes:
        cfg_scale: guidance strength s in u + s (c - u); 1 switches guidance off.
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the most probable tokens up to this mass; 1 keeps all.
    """

    cfg_scale: float = option(
        3.0, "classifier-free guidance scale; 1 turns it off", low=1, high=100, marks={1: "off"}
    )
    temperature: float = option(1.0, "sampling temperature; 0 is greedy")
    top_k: int = option(
        0,
        "sample from the K most probable tokens; 0 turns it off",
        low=0,
        high=MOST,
        marks={0: "off"},
    )
    top_p: float = option(
        1.0,
        "nucleus sampling: smallest set of tokens with this probability; 1 turns it off",
        low=1e-6,  # less may be 0 in float32, which leaves no token
        high=1,
        marks={1: "off"},
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        # Below 0.01 float32 would overflow on the way to what greedy says exactly.
        fits = self.temperature == 0 or 0.01 <= self.temperature <= 10
        require(fits, "temperature", self.temperature, "0 (greedy), or 0.01 to 10")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def check_text(what: str | Arg, text: str) -> None:
    """Raise an OptionError for what no model reads and no file holds: half a character, or a control character."""
    for mark in text:
        if "\ud800" <= mark <= "\udfff":
            why = f"it holds {mark!r}, half of a character or a byte of another encoding"
            raise OptionError(words(what, "is not valid text"), why, "the same in UTF-8")
        if unicodedata.category(mark) == "Cc" and not mark.isspace():
            why = f"it holds the control character {mark!r}"
            raise OptionError(words(what, "is not valid text"), why, "leave it out")


@dataclass(frozen=True)
class Request:
    """One image to draw.

    Attributes:
        negative: what guidance draws away from, for models that read one; None: the model's own.
        size: height and width in pixels, for models that draw many; None: the model's own.
    """

    prompt: str
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    relaxation: Relaxation = EXACT
    negative: str | None = None
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise OptionError(
                "the prompt is empty", "there is nothing to draw", Arg("prompt", "a red apple")
            )
        check_text("the prompt", self.prompt)
        check_text(Arg("negative_prompt"), self.negative or "")
        require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"0 to {MAX_SEED}")


def size_of(height: int | None, width: int | None) -> tuple[int, int] | None:
    """Height and width of a picture; one alone is both, and neither is the model's own size."""
    first = height if width is None else width
    return None if first is None else (first if height is None else height, first)


def in_turn(
    prompts: Sequence[str],
    index: Iterable[int],
    seed: int,
    sampling: Sampling,
    relaxation: Relaxation = EXACT,
    negative: str | None = None,
    size: tuple[int, int] | None = None,
) -> list[Request]:
    """Request i has the next prompt, around and around, and seed `seed` + i."""
    return [
        Request(prompts[i % len(prompts)], seed + i, sampling, relaxation, negative, size)
        for i in index
    ]


def whole_number(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise OptionError(f"{name} is {value!r}", "allowed: a whole number") from error


def per_prompt(name: str, value: str | Sequence[str] | None, count: int) -> list[str | None]:
    """One value for each of `count` prompts."""
    if value is None or isinstance(value, str):
        return [value] * count
    require(
        len(value) == count,
        words("the length of", Arg(name)),
        len(value),
        f"{count}, or one string",
    )
    return list(value)


def prompts_of(prompt: Any) -> list[str]:
    """One prompt or several, of which each is a string."""
    several = isinstance(prompt, Iterable) and not isinstance(prompt, str)
    prompts = list(prompt) if several else [prompt]
    for text in prompts:
        require(isinstance(text, str), "prompt", repr(text), "a string, or a list of strings")
    require(len(prompts) > 0, "prompt", "an empty list", "a string, or a list of strings")
    return prompts


def seeds_of(
    seed: int | Sequence[int] | None,
    generator: torch.Generator | Sequence[torch.Generator] | None,
    count: int,
) -> list[int]:
    """A seed for each image."""
    require(seed is None or generator is None, "seed", seed, "one of seed and generator")
    if isinstance(seed, (list, tuple)):
        each = f"{count}, one an image, or a single seed"
        require(len(seed) == count, words("the number of", Arg("seed")), len(seed), each)
        return [whole_number("seed", one) for one in seed]
    if isinstance(generator, Sequence):
        each = f"{count}, one an image, or a single one"
        require(
            len(generator) == count, words("the number of", Arg("generator")), len(generator), each
        )
        return [one.initial_seed() % (MAX_SEED + 1) for one in generator]
    first = whole_number("seed", seed or 0)
    first = first if generator is None else generator.initial_seed() % (MAX_SEED + 1)
    return [first + i for i in range(count)]
