"""Requests made of what was given for several images at once. Needs no torch."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lantern_hpu.core import Request, Sampling, SourcePicture
from lantern_hpu.errors import Arg, OptionError, require, words
from lantern_hpu.fields import MAX_SEED
from lantern_hpu.methods.relaxation import EXACT, Relaxation

if TYPE_CHECKING:
    import torch


def in_turn(
    prompts: Sequence[str],
    index: Iterable[int],
    seed: int,
    sampling: Sampling,
    relaxation: Relaxation = EXACT,
    negative: str | None = None,
    size: tuple[int, int] | None = None,
    sources: tuple[SourcePicture, ...] = (),
    logprobs: bool = False,
) -> list[Request]:
    """Request i has the next prompt, around and around, and seed `seed` + i."""
    shared = (sampling, relaxation, negative, size, sources, logprobs)
    return [Request(prompts[i % len(prompts)], seed + i, *shared) for i in index]


def whole_number(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise OptionError(f"{name} is {value!r}", "allowed: a whole number") from error


def check_count(name: str, values: Sequence[Any], count: int) -> None:
    """Raise an OptionError for a list that has not one value each."""
    if len(values) != count:
        what = words(Arg(name), f"has {len(values)} values")
        raise OptionError(what, f"allowed: {count}, or a single one for all")


def per_prompt(name: str, value: str | Sequence[str] | None, count: int) -> list[str | None]:
    """One value for each of `count` prompts."""
    if value is None or isinstance(value, str):
        return [value] * count
    values: list[Any] = list(value) if isinstance(value, Iterable) else [0]
    for text in values:
        require(isinstance(text, str | None), name, repr(value)[:60], "a string, or a list of them")
    check_count(name, values, count)
    return values


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
        check_count("seed", seed, count)
        return [whole_number("seed", one) for one in seed]
    if isinstance(generator, Sequence):
        check_count("generator", generator, count)
        return [one.initial_seed() % (MAX_SEED + 1) for one in generator]
    first = 0 if seed is None else whole_number("seed", seed)
    if generator is not None:
        first = generator.initial_seed() % (MAX_SEED + 1)
    return [first + i for i in range(count)]
