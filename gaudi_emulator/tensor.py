"""A tensor that says it lives on `hpu` while its numbers lie in a CPU tensor.

To torch itself the device is `meta`: such a tensor needs no device guard and no driver, and what torch's own C++
makes on the way (`zeros` inside `one_hot`, say) is asked for on `meta` too and so differs from a CPU
tensor that the caller made. Python code sees `hpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]  # of a call that torch hands over
DEVICE = "hpu"
HPU = torch.device(DEVICE, 0)
META = torch.device("meta")


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
        from gaudi_emulator.device import current

        return current().read(self, "tolist", "H001").tolist()

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
        from gaudi_emulator.device import current

        values = current().read(self, "print") if self.stale is None else self.raw
        return f"{repr(values)[:-1]}, device='hpu:0')"

    @classmethod
    def __torch_function__(
        cls, func: Func, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        from gaudi_emulator.autocast import cast

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = cast(func, args, kwargs or {})
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        from gaudi_emulator.device import current

        card = current()
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


def is_fake(value: object) -> bool:
    """Whether a device tensor has none but a tracer's numbers."""
    return isinstance(value, HPUTensor) and type(value.raw) is not Tensor


def through(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """An operator that is being traced: what is inside, wrapped again."""
    inner = {
        n: torch.device("cpu") if n == "device" and v is not None else v for n, v in kwargs.items()
    }
    raw_args, raw_kwargs = tree_map(
        lambda v: v.raw if isinstance(v, HPUTensor) else v, (args, inner)
    )
    made = func(*raw_args, **raw_kwargs)
    to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    if to_host:
        return made
    made = tree_map(lambda v: HPUTensor(v) if isinstance(v, Tensor) else v, made)
    return return_and_correct_aliasing(func, args, kwargs, made)


def is_hpu(device: object) -> bool:
    """Whether a `device=` argument means the device."""
    if device is None or isinstance(device, int):
        return False
    return torch.device(device).type == "hpu"  # type: ignore[call-overload]
