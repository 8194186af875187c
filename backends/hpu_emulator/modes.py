"""Where torch's calls reach the card: Python functions that name a device or read a tensor, then operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_hpu.backends.hpu_emulator.device import Device
from lantern_hpu.backends.hpu_emulator.ops import RANDOM
from lantern_hpu.backends.hpu_emulator.tensor import META, HPUTensor, is_hpu

Handler = Callable[[Device, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Functions(TorchFunctionMode):
    """Calls of torch's Python functions."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.card = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in HANDLERS:
            return HANDLERS[func](self.card, func, args, kwargs)
        here = is_hpu(kwargs.get("device"))
        if here:
            kwargs["device"] = META
        # What torch makes on `meta` on the way is ours if the call was.
        outer, self.card.inside = self.card.inside, here or HPUTensor in types
        try:
            return func(*args, **kwargs)
        finally:
            self.card.inside = outer


class Operators(TorchDispatchMode):
    """Operators, after torch has taken composite functions apart."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.card = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        goal = kwargs.get("device")
        made_here = goal is not None and goal.type == "meta" and self.card.inside
        if made_here or HPUTensor in types:
            return self.card.run(func, args, kwargs)
        if self.card.recording is not None:
            on_host(self.card, func)
        return func(*args, **kwargs)


def on_host(card: Device, func: Any) -> None:
    """An operator on CPU tensors while a graph is captured: the recording will not see it."""
    packet = func._schema.name.partition("::")[2]
    if packet in RANDOM:
        card.findings.hit("H070", packet)
    elif packet in ("empty", "zeros", "ones", "full", "arange", "lift_fresh", "scalar_tensor"):
        card.findings.hit("H061", f"{packet} on the CPU", "warn")


# Functions that move tensors, or that torch refuses for subclasses


def move(
    card: Device, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`Tensor.to`: dtype, device, both, or those of another tensor."""
    source, *rest = args
    if rest and isinstance(rest[0], HPUTensor):
        rest = [rest[0].device, rest[0].dtype, *rest[1:]]
    other = kwargs.pop("other", None)
    if isinstance(other, HPUTensor):
        kwargs |= {"device": other.device, "dtype": other.dtype}
    copies = kwargs.pop("copy", False)
    goal, dtype, _, layout = torch._C._nn._parse_to(*rest, **kwargs)
    dtype = dtype or source.dtype
    extra: dict[str, Any] = {} if layout is None else {"memory_format": layout}
    if isinstance(source, HPUTensor):
        if goal is not None and goal.type == "cpu":
            return card.read(source, "copy to the host").to(dtype, copy=True, **extra)
        if goal is not None and goal.type == "meta":
            return source.raw.to(META, dtype)
        return func(source, dtype, copy=copies, **extra)
    if goal is not None and is_hpu(goal):
        return card.upload(func(source, dtype, **extra))
    return func(source, *rest, copy=copies, **kwargs)


def to_host(
    card: Device, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`cpu`, `numpy` and `tolist`."""
    source = args[0]
    if not isinstance(source, HPUTensor):
        return func(*args, **kwargs)
    if func is Tensor.numpy:
        raise TypeError(
            "can't convert hpu:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor first."
        )
    rule, reason = ("H002", "copy to the host") if func is Tensor.cpu else ("H001", "tolist")
    values = card.read(source, reason, rule)
    return values.clone() if func is Tensor.cpu else func(values)


def make(
    card: Device, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`torch.tensor` and `torch.as_tensor`: made on the host, then uploaded."""
    if not is_hpu(kwargs.get("device")):
        return func(*args, **kwargs)
    if isinstance(args[0], HPUTensor):
        return args[0].clone() if func is torch.tensor else args[0]
    return card.upload(func(*args, **{**kwargs, "device": torch.device("cpu")}))


def complex_on_host(
    card: Device, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`torch.complex` of device tensors gives a CPU tensor, without a word."""
    if not any(isinstance(a, HPUTensor) for a in args):
        return func(*args, **kwargs)
    card.findings.hit("H034", "torch.complex")
    card.sync("copy to the host", "H002")
    return func(*(a.raw if isinstance(a, HPUTensor) else a for a in args), **kwargs)


HANDLERS: dict[Callable[..., Any], Handler] = {
    Tensor.to: move,
    Tensor.cpu: to_host,
    Tensor.numpy: to_host,
    Tensor.tolist: to_host,
    torch.tensor: make,
    torch.as_tensor: make,
    torch.complex: complex_on_host,
}
