"""Arguments of a call in Python, in the forms that diffusers takes, as what draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lantern_hpu.errors import require
from lantern_hpu.methods import relaxation
from lantern_hpu.methods.relaxation import Relaxation
from lantern_hpu.methods.request import MAX_SEED
from lantern_hpu.methods.table import METHODS

if TYPE_CHECKING:
    import torch


def per_prompt(name: str, value: str | Sequence[str] | None, count: int) -> list[str | None]:
    """One value for each of `count` prompts.

    Raises:
        OptionError: another number was given.
    """
    if value is None or isinstance(value, str):
        return [value] * count
    require(len(value) == count, f"the length of {name}", len(value), f"{count}, or one string")
    return list(value)


def seeds_of(
    seed: int, generator: torch.Generator | Sequence[torch.Generator] | None, count: int
) -> list[int]:
    """A seed for each image.

    Raises:
        OptionError: the list of generators is not one for each image.
    """
    if isinstance(generator, Sequence):
        require(
            len(generator) == count, "the number of generators", len(generator), f"{count}, or one"
        )
        return [one.initial_seed() % (MAX_SEED + 1) for one in generator]
    first = seed if generator is None else generator.initial_seed() % (MAX_SEED + 1)
    return [first + i for i in range(count)]


def relaxation_of(relax: str | Relaxation | None, method: str) -> Relaxation | None:
    """What `relax` means to a method.

    Raises:
        OptionError: it cannot be read.
    """
    if not isinstance(relax, str):
        return relax
    name = method.partition("@")[0].partition(":")[0]
    return relaxation.parse(relax, METHODS[name].relaxation if name in METHODS else None)
