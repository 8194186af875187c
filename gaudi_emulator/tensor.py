"""A tensor that says it lives on `hpu` while its numbers lie in a CPU tensor.

To torch itself the device is `meta`: such a tensor needs no device guard and no driver, and what torch's own C++
makes on the way (`zeros` inside `one_hot`, say) is asked for on `meta` too and so differs from a CPU
tensor that the caller made. Python code sees `hpu`.
"""

from __future__ import annotations

import copy
import warnings
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from gaudi_emulator.releases import listed

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]  # of a call that torch hands over
DEVICE = "hpu"
HPU = torch.device(DEVICE, 0)
META = torch.device("meta")
cards: list[Any] = []  # those that are installed, `device.Device`; the last is in use


def card_in_use() -> Any:
    """The installed card."""
    if not cards:
        raise RuntimeError("an emulated tensor outlived its emulator: no card is installed")
    return cards[-1]


class HPUTensor(Tensor):
    """A device tensor of the emulator.

    Attributes:
        raw: the CPU tensor with its numbers.
        base: the tensor it is a view of, or None.
        stale: the rule to report when it is read next, or None.
        lease: what holds its memory, for the count of it; None in a view.
    """

    raw: Tensor
    base: HPUTensor | None
    stale: str | None
    lease: object

    @staticmethod
    def __new__(cls, raw: Tensor, base: HPUTensor | None = None) -> HPUTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=META,
        )
        made.raw, made.base, made.stale, made.lease = raw, base, None, None
        return made

    def __init__(self, raw: Tensor, base: HPUTensor | None = None) -> None: ...

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return HPU

    is_hpu = True
    is_meta = is_cpu = False

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        return card_in_use().read(self, "tolist", "H001").tolist()

    def __getitem__(self, where: Any) -> Any:
        return Tensor.__getitem__(self, as_tensors(where))

    def __setitem__(self, where: Any, value: Any) -> None:
        Tensor.__setitem__(self, as_tensors(where), value)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def become(self, raw: Tensor, base: HPUTensor | None) -> None:
        """Take over another storage, with its shape."""
        with torch._C.DisableTorchFunctionSubclass(), no_dispatch():
            Tensor.data.__set__(self, HPUTensor(raw))  # type: ignore[attr-defined]
        self.raw, self.base, self.stale = raw, base, None

    def synced(self) -> HPUTensor:
        """Itself, after an operator that may have changed the shape in place (`t_`, `resize_`, `set_`)."""
        raw = self.raw
        mine = (tuple(self.shape), self.stride(), self.storage_offset())
        if mine != (tuple(raw.shape), raw.stride(), raw.storage_offset()):
            self.become(raw, self.base)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        values = card_in_use().read(self, "print") if self.stale is None else self.raw
        return f"{repr(values)[:-1]}, device='hpu:0')"

    @classmethod
    def __torch_function__(
        cls, func: Func, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = cast(func, args, kwargs or {})
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        card = card_in_use()
        if card.traced and any(map(is_fake, flat((*args, *(kwargs or {}).values())))):
            return through(func, args, kwargs or {})
        return card.run(func, args, kwargs or {})

    # What torch asks of a tensor that its tracers are to see through

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: None, size: Any, stride: Any
    ) -> HPUTensor:
        return HPUTensor(inner["raw"])


def as_tensors(where: Any) -> Any:
    """An index with tensors for its lists of numbers, which torch's C++ would make on `meta`, without numbers."""
    if type(where) is tuple:
        return tuple(map(as_tensors, where))
    numbers = isinstance(where, list) and all(isinstance(n, (bool, int)) for n in flat(where))
    return torch.tensor(where, dtype=None if where else torch.int64) if numbers else where


def flat(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += flat(value) if isinstance(value, (list, tuple)) else [value]
    return found


def each(change: Callable[[Any], Any], value: Any) -> Any:
    """An argument changed; of a list, every one in it."""
    return [each(change, item) for item in value] if isinstance(value, list) else change(value)


def raw(value: Any) -> Any:
    """The numbers of a device tensor; anything else as it is."""
    return value.raw if isinstance(value, HPUTensor) else value


def is_fake(value: object) -> bool:
    """Whether a device tensor has none but a tracer's numbers."""
    return isinstance(value, HPUTensor) and type(value.raw) is not Tensor


def through(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """An operator that is being traced: what is inside, wrapped again."""
    inner = {
        n: torch.device("cpu") if n == "device" and v is not None else v for n, v in kwargs.items()
    }
    raw_args, raw_kwargs = tree_map(raw, (args, inner))
    made = func(*raw_args, **raw_kwargs)
    to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    if to_host:
        return made
    made = tree_map(lambda v: HPUTensor(v) if isinstance(v, Tensor) else v, made)
    return return_and_correct_aliasing(func, args, kwargs, made)


def is_hpu(device: object) -> bool:
    """Whether a `device=` argument means the device. A process has one, 0 (backend/habana_device/HPUGuardImpl.h)."""
    if device is None or isinstance(device, int):
        return False
    named = torch.device(device)  # type: ignore[call-overload]
    if named.type == DEVICE and named.index:
        raise RuntimeError(f"habana active device: {named.index} != 0")
    return bool(named.type == DEVICE)


# Tensors in arguments and results


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


def tensors_in(value: Any) -> list[HPUTensor]:
    """The device tensors of an object, in their order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, note)
    return [tensor for tensor in found if isinstance(tensor, HPUTensor)]


# `torch.autocast` on the device: which operators run in the lower format and which in float32. torch casts by dispatch
# keys, which the emulated tensors do not have, so arguments are cast where a function is called. The lists are the
# default ones of Habana's page on mixed precision, unless flags name files.

OWNERS = (torch, F, torch._C._nn, Tensor)
LOWER_FIRST = frozenset({"batch_norm", "group_norm", "instance_norm", "layer_norm"})
SIGNS = {"add", "matmul", "mul", "pow"}  # which Python has operators for, from either side
# Files with a name a line, which take the place of the lists
FILES = ("PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST")


@dataclass(frozen=True)
class AutocastLists:
    """Functions by what autocast does to their arguments."""

    lower: frozenset[Callable[..., Any]]
    # Of `lower`, those that have the first argument cast alone
    first: frozenset[Callable[..., Any]]
    float32: frozenset[Callable[..., Any]]


def autocast_lists(flags: Mapping[str, str]) -> AutocastLists:
    return lists_of(*map(flags.get, FILES))


@cache
def lists_of(lower_file: str | None, float32_file: str | None) -> AutocastLists:
    """As the bridge has them (hpu_ops/autocast_helpers.h): the default ones, or those of the files of its flags."""
    lowered = functions(names(lower_file, "autocast_lower"))
    float32 = functions(names(float32_file, "autocast_float32"))
    return AutocastLists(lowered, lowered & functions(LOWER_FIRST), float32 - lowered)


def names(file: str | None, default: str) -> Iterable[str]:
    """A file's, or the default ones if there is none to read."""
    if file and Path(file).is_file():
        return Path(file).read_text(encoding="utf-8").split()
    if file:
        warnings.warn(f"no {file} to read: autocast has its default list", stacklevel=2)
    return listed(default)


def functions(names: Iterable[str]) -> frozenset[Callable[..., Any]]:
    every = {*names}
    for name in every & SIGNS:
        every |= {f"__{name}__", f"__r{name}__"}
    if every & {"div", "true_divide"}:
        every.add("__truediv__")
    found = (getattr(owner, name, None) for owner in OWNERS for name in every)
    return frozenset(function for function in found if function is not None)


def cast(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments in the format that autocast has the function run in, if it is on and says one."""
    if not torch.is_autocast_enabled(DEVICE):
        return args, kwargs
    known = autocast_lists(card_in_use().flags)
    if func in known.lower:
        goal = torch.get_autocast_dtype(DEVICE)
    elif func in known.float32:
        goal = torch.float32
    else:
        return args, kwargs

    def change(tensor: Tensor) -> Tensor:
        floats = isinstance(tensor, HPUTensor) and tensor.is_floating_point()
        return tensor.to(goal) if floats and tensor.dtype != goal else tensor

    if func in known.first:
        given = {"input": kwargs["input"]} if "input" in kwargs else {}
        return (*mapped(args[:1], change), *args[1:]), kwargs | mapped(given, change)
    return mapped(args, change), mapped(kwargs, change)
