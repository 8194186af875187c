"""Tensors in arguments and results: containers of any kind, kept in their kind."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from gaudi_emulator.tensor import HPUTensor


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same kind of object with each tensor in it changed: named tuples, model outputs, dataclasses too."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, (dict, UserDict)):
        made = copy.copy(value)
        for name, item in value.items():
            made[name] = mapped(item, change)
        return made
    if is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in fields(value):
            object.__setattr__(twin, field.name, mapped(getattr(value, field.name), change))
        return twin
    return value


def tensors_in(value: Any) -> Iterator[HPUTensor]:
    """The device tensors of an object, in their order."""
    if isinstance(value, HPUTensor):
        yield value
    elif isinstance(value, (dict, UserDict)):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
