"""Where torch's calls reach the card: Python functions that name a device or read a tensor, then operators; and torch's
own functions that the bridge replaces while it is imported (core/torch_overwrites.py), for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, wraps
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor
from torch.library import Library
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode

from gaudi_emulator import checks
from gaudi_emulator.checks import no_bare_meta
from gaudi_emulator.device import Device, current, listening
from gaudi_emulator.ops import RANDOM
from gaudi_emulator.releases import ROOT, EmulatorError
from gaudi_emulator.tensor import DEVICE, HPU, META, Args, Func, HPUTensor, Kwargs, is_hpu, mapped

Handler = Callable[[Device, Func, Args, Kwargs], Any]


class Functions(TorchFunctionMode):
    """Calls of torch's Python functions."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.card = device

    def __torch_function__(
        self, func: Func, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in HANDLERS:
            if func in (torch.tensor, torch.as_tensor) and is_hpu(_device.CURRENT_DEVICE):
                kwargs.setdefault("device", _device.CURRENT_DEVICE)
            return HANDLERS[func](self.card, func, args, kwargs)
        here = is_hpu(kwargs.get("device"))
        if kwargs.get("device") is None and is_hpu(_device.CURRENT_DEVICE):  # set_default_device
            here = func in _device._device_constructors()
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
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        goal = kwargs.get("device")
        made_here = goal is not None and (
            is_hpu(goal) or (goal.type == "meta" and self.card.inside)
        )
        if made_here or HPUTensor in types:
            if torch.is_inference_mode_enabled() and is_composite(func):
                with self:  # elsewhere autograd takes it apart before it comes here
                    return func.decompose(*args, **kwargs)
            return self.card.run(func, args, kwargs)
        if self.card.recording is not None:
            host_operator(self.card, func)
        return func(*args, **kwargs)


@cache
def is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def host_operator(card: Device, func: Any) -> None:
    """An operator on CPU tensors while a graph is captured: the recording will not see it."""
    packet = func._schema.name.partition("::")[2]
    if packet in RANDOM:
        card.findings.hit("H070", packet)
    elif packet in ("empty", "zeros", "ones", "full", "arange", "lift_fresh", "scalar_tensor"):
        card.findings.hit("H061", f"{packet} on the CPU", "warn")


@contextmanager
def heard(card: Device) -> Iterator[None]:
    """What this thread calls reaches the card."""
    allocators()
    card.threads.modes = Functions(card), Operators(card)
    card.listen()
    try:
        yield
    finally:
        card.deaf()


@cache
def allocators() -> Library:
    """Kernels for what is made on `hpu` where no mode sees it: by torch's own Python functions and C++, and in pieces
    that dynamo leaves to Python."""
    made = Library("aten", "IMPL", "HPU")
    for name in ("empty.memory_format", "empty_strided"):
        overload: Any = getattr(torch.ops.aten, name.partition(".")[0])
        func = getattr(overload, name.partition(".")[2] or "default")

        def make(*args: Any, func: Any = func, **kwargs: Any) -> Any:
            return current().run(func, args, {**kwargs, "device": META})

        made.impl(name, make)
    return made


# Functions that move tensors, or that torch refuses for subclasses


def move(card: Device, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`Tensor.to`: dtype, device, both, or those of another tensor."""
    source, *rest = args
    if rest and isinstance(rest[0], HPUTensor):
        rest = [rest[0].device, rest[0].dtype, *rest[1:]]
    other = kwargs.pop("other", None)
    if isinstance(other, HPUTensor):
        kwargs |= {"device": other.device, "dtype": other.dtype}
    copies = kwargs.pop("copy", False)
    if [type(value) for value in rest[-2:]] == [bool, bool]:  # non_blocking, copy
        copies = rest.pop()
    goal, dtype, _, layout = torch._C._nn._parse_to(*rest, **kwargs)
    dtype = dtype or source.dtype
    # Another device is a copy, so a layout that was asked for holds, also where torch would take the old one for it
    extra: dict[str, Any] = {} if layout is None else {"memory_format": layout, "copy": True}
    here = is_hpu(goal)
    if isinstance(source, HPUTensor):
        if goal is not None and goal.type == "cpu":
            moved = across(card, source, "copy to the host")
            return moved.to(dtype, **extra) if extra or moved.dtype != dtype else moved
        if goal is not None and goal.type == "meta":
            return source.raw.to(META, dtype)
        return func(source, dtype, **extra | {"copy": copies})
    if here:
        return across(card, func(source, dtype, **extra), "upload")
    return func(source, *rest, copy=copies, **kwargs)


def across(card: Device, source: Tensor, reason: str, rule: str = "H002") -> Tensor:
    """A copy on the other side; gradients flow back the same way."""
    if source.requires_grad and torch.is_grad_enabled():
        moved: Tensor = Across.apply(source, card, reason, rule)
        return moved
    return crossed(card, source, reason, rule)


def crossed(card: Device, source: Tensor, reason: str, rule: str) -> Tensor:
    if isinstance(source, HPUTensor):
        return card.read(source, reason, rule).clone()
    return card.upload(source)


class Across(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, card: Device, reason: str, rule: str) -> Tensor:
        ctx.card = card
        return crossed(card, source.detach(), reason, rule)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        reason = "copy to the host" if isinstance(grad, HPUTensor) else "upload"
        return crossed(ctx.card, grad, reason, "H002"), None, None, None


def read_to_host(card: Device, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`cpu` and `numpy`."""
    source = args[0]
    if not isinstance(source, HPUTensor):
        return func(*args, **kwargs)
    if func is Tensor.numpy:
        raise TypeError(
            "can't convert hpu:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor first."
        )
    moved = across(card, source, "copy to the host")
    layout = args[1] if len(args) > 1 else kwargs.get("memory_format", torch.preserve_format)
    return moved.contiguous(memory_format=layout) if layout != torch.preserve_format else moved


def pin(card: Device, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`pin_memory`: another tensor of the host, which says that it is pinned."""
    if isinstance(args[0], HPUTensor):
        raise RuntimeError("cannot pin 'hpu' only dense CPU tensors can be pinned")
    made = args[0].clone()
    made.pinned = True
    return made


def make(card: Device, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`torch.tensor` and `torch.as_tensor`: made on the host, then uploaded."""
    if not is_hpu(kwargs.get("device")):
        return func(*args, **kwargs)
    source, learns = args[0], kwargs.pop("requires_grad", False)
    if not isinstance(source, HPUTensor):
        made = card.upload(func(*args, **{**kwargs, "device": torch.device("cpu")}))
        return made.requires_grad_(learns)
    source = source.to(kwargs.get("dtype") or source.dtype)
    return source.detach().clone().requires_grad_(learns) if func is torch.tensor else source


def complex_on_host(card: Device, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`torch.complex` of device tensors gives a CPU tensor, without a word."""
    if not any(isinstance(a, HPUTensor) for a in args):
        return func(*args, **kwargs)
    card.findings.hit("H034", "torch.complex")
    card.sync("copy to the host", "H002")
    return func(*(a.raw if isinstance(a, HPUTensor) else a for a in args), **kwargs)


def make_like(card: Device, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`new_tensor`: `torch.tensor`, in the tensor's format and on its device unless others are named."""
    like, *rest = args
    named = {name: value for name, value in kwargs.items() if value is not None}
    kwargs = {"dtype": like.dtype, "device": like.device} | named
    return make(card, torch.tensor, tuple(rest or [kwargs.pop("data")]), kwargs)


def set_data(card: Device, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`x.data = y`: the same object with another storage; also from a CPU tensor to a device tensor."""
    target, source = args
    if isinstance(target, HPUTensor):
        source = source if isinstance(source, HPUTensor) else card.upload(source)
        target.become(source.raw, source.base)
    elif isinstance(source, HPUTensor):
        made: Tensor = HPUTensor(source.raw, source.base)
        if isinstance(target, torch.nn.Parameter):
            made = torch.nn.Parameter(made, target.requires_grad)
        torch.utils.swap_tensors(target, made)
    else:
        func(target, source)


def set_grad(card: Device, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`x.grad = y`: torch itself takes a tensor of `meta` for one on the same device."""
    if any(isinstance(value, HPUTensor) for value in args):
        checks.no_bare_meta(args, "grad")
    return func(*args)


def deep_copy(card: Device, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`copy.deepcopy` of a tensor: a storage of its own on the device."""
    source, memo = args
    if not isinstance(source, HPUTensor):
        return func(*args, **kwargs)
    if id(source) in memo:
        return memo[id(source)]
    if not source.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
        )
    with torch.no_grad():
        made: Tensor = source.detach().clone()
        if isinstance(source, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=source.requires_grad)
        made.requires_grad_(source.requires_grad)
        if source.grad is not None:
            made.grad = source.grad.clone()
    memo[id(source)] = made
    return made


def pickled(card: Device, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A pickle holds the numbers."""
    source = args[0]
    if not isinstance(source, HPUTensor):
        return func(*args, **kwargs)
    values = card.read(source, "pickle").detach().clone()
    return restored, (values, source.requires_grad, isinstance(source, torch.nn.Parameter))


HANDLERS: dict[Callable[..., Any], Handler] = {
    Tensor.to: move,
    Tensor.cpu: read_to_host,
    Tensor.numpy: read_to_host,
    Tensor.pin_memory: pin,
    Tensor.is_pinned: lambda card, func, args, kwargs: getattr(args[0], "pinned", False),
    Tensor.new_tensor: make_like,
    Tensor.data.__set__: set_data,  # type: ignore[attr-defined]
    Tensor.grad.__set__: set_grad,  # type: ignore[union-attr]
    Tensor.__deepcopy__: deep_copy,
    Tensor.__reduce_ex__: pickled,
    torch.tensor: make,
    torch.as_tensor: make,
    torch.complex: complex_on_host,
}


# torch's own functions


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """An attribute made from the real one, for a while."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def wrapped(owner: Any, name: str, function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """A function in the place of another, which it gets before the arguments."""

    def make(real: Any) -> Any:
        @wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(real, *args, **kwargs)

        return call

    return replaced(owner, name, make)


@contextmanager
def overwrites(card: Device) -> Iterator[None]:
    """Seeds reach the card, and checkpoints hold CPU tensors."""

    def seed_both(real: Any, seed: int) -> Any:
        card.generator.manual_seed(seed)
        return real(seed)

    def seed_anew(real: Any) -> Any:
        made = real()
        card.generator.manual_seed(made)
        return made

    def profile(real: Any, *args: Any, use_device: Any = None, **kwargs: Any) -> None:
        """The host's part of a trace: the device has none here."""
        if use_device == DEVICE:
            use_device, kwargs["use_cpu"] = None, True
        real(*args, use_device=use_device, **kwargs)

    def script(real: Any, *args: Any, **kwargs: Any) -> Any:
        """`torch.jit.trace`, and calls of what was traced or scripted."""
        held = [a.state_dict() if isinstance(a, torch.nn.Module) else a for a in args]
        found: list[Tensor] = []
        mapped([held, kwargs], found.append)
        if not any_of_card(found):
            return real(*args, **kwargs)
        raise EmulatorError(
            "TorchScript does not run on hpu",
            "the vendor's PyTorch Support Matrix has torch.jit in no mode",
            "wrap_in_hpu_graph in lazy mode, torch.compile with hpu_backend outside it",
        )

    def fork_here(
        real: Any, devices: Any = None, *args: Any, device_type: str | None = None, **kwargs: Any
    ) -> Any:
        return real(devices, *args, device_type=device_type or DEVICE, **kwargs)

    def save(real: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        """A checkpoint's tensors are off the device, and out of autograd."""

        def host(tensor: Tensor) -> Tensor:
            return tensor.detach().cpu() if isinstance(tensor, HPUTensor) else tensor

        real(mapped(obj, host), *args, **kwargs)

    def load(real: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        here = isinstance(map_location, (str, torch.device)) and is_hpu(map_location)
        found = real(f, "cpu" if here else map_location, *args, **kwargs)
        return mapped(found, lambda t: t.to(DEVICE)) if here else found

    def place(tensor: Tensor) -> Any:
        return type(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape

    def swap(real: Any, one: Tensor, other: Tensor) -> None:
        if not isinstance(one, HPUTensor) and not isinstance(other, HPUTensor):
            real(one, other)
        elif place(one) != place(other):
            # Without torch's checks, which refuse a tensor that was traced or that a living graph holds
            one.__class__, other.__class__ = other.__class__, one.__class__
            one.__dict__, other.__dict__ = other.__dict__, one.__dict__
            torch._C._swap_tensor_impl(one, other)

    def record(real: Any, tensor: Tensor, stream: Any) -> None:
        if not isinstance(tensor, HPUTensor):  # whose memory no other stream gets here
            real(tensor, stream)

    def grouped(real: Any, tensors: Any, *args: Any) -> dict[Any, Any]:
        """By device and format, for `clip_grad_norm_` and optimizers: C++ reads the device that torch itself sees."""
        groups = real(tensors, *args).items()
        ours = [any_of_card(lists[0]) for _, (lists, _) in groups]
        places = zip(ours, groups, strict=True)
        return {(HPU if here else at, dtype): group for here, ((at, dtype), group) in places}

    def gradients(real: Any, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        no_bare_meta([*outputs, *grads] if any_of_card(outputs) else (), "a gradient")
        return real(outputs, grads, *args, **kwargs)

    def enter(real: Any, context: Any) -> Any:
        if context.device == "cuda":
            card.findings.hit("H086", "autocast('cuda')")
        return real(context)

    with ExitStack() as stack:
        for owner, name, function in (
            (torch.autocast, "__enter__", enter),
            (torch, "manual_seed", seed_both),
            (torch.random, "manual_seed", seed_both),
            (torch, "seed", seed_anew),
            (torch.random, "seed", seed_anew),
            (torch.autograd.profiler.profile, "__init__", profile),
            (torch.jit, "trace", script),
            (torch._C.ScriptFunction, "__call__", script),
            (torch._C.ScriptMethod, "__call__", script),
            (torch.random, "fork_rng", fork_here),
            (torch, "save", save),
            (torch, "load", load),
            (torch.utils, "swap_tensors", swap),
            (Tensor, "record_stream", record),
            (torch.autograd, "_make_grads", gradients),
            (torch._C, "_group_tensors_by_device_and_dtype", grouped),
        ):
            stack.enter_context(wrapped(owner, name, function))
        for name, function in accelerator(card).items():
            if hasattr(torch._C, name):
                stack.enter_context(wrapped(torch._C, name, function))
        for state, switch in (
            # A module that moves keeps its parameter objects, so that weights which two modules share stay shared
            (
                torch.__future__.get_swap_module_params_on_conversion,
                torch.__future__.set_swap_module_params_on_conversion,
            ),
            # `torch.tensor` makes its tensor on the host and moves it where tracers, and the emulator, see it
            (torch._C._only_lift_cpu_tensors, torch._C._set_only_lift_cpu_tensors),
        ):
            stack.callback(switch, state())
            switch(True)
        yield


def accelerator(card: Device) -> dict[str, Callable[..., Any]]:
    """What `torch.accelerator` asks C++ for, once the bridge is loaded. Memory is refused: Gaudi's allocator is not of
    torch's kind for devices (vllm-gaudi, patches.py)."""

    def here(answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(real: Any, *args: Any) -> Any:
            loaded = card.loaded or card.autoloads
            excluded = torch._C._dispatch_tls_local_exclude_set()
            inside = card.tracing() or excluded.has(torch._C.DispatchKey.Python)  # torch's own work
            return answer(*args) if loaded and not inside else real(*args)

        return call

    def refuse(*args: Any) -> NoReturn:
        raise RuntimeError("Allocator for hpu is not a DeviceAllocator.")

    hpu: Any = card.modules[f"{ROOT}.torch.hpu"]
    memory = "isAllocatorInitialized emptyCache emptyHostCache getMemoryInfo getDeviceStats resetPeakStats"
    answers: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(memory.split(), refuse),
        "getAccelerator": lambda: torch.device(DEVICE),
        "getDeviceIndex": hpu.current_device,
        **dict.fromkeys(
            "setDeviceIndex exchangeDevice maybeExchangeDevice".split(), hpu.set_device
        ),
        "synchronizeDevice": lambda index: hpu.synchronize(),
        "getStream": hpu.current_stream,
        "setStream": hpu.set_stream,
    }
    known = {f"_accelerator_{name}": here(answer) for name, answer in answers.items()}
    return known | {"_get_accelerator": known["_accelerator_getAccelerator"]}


def any_of_card(values: Iterable[object]) -> bool:
    return any(isinstance(value, HPUTensor) for value in values)


def restored(values: Tensor, learns: bool, parameter: bool) -> Tensor:
    """A pickled device tensor: on the device again if there is one."""
    made: Tensor = current().upload(values) if listening() else values
    if parameter:
        return torch.nn.Parameter(made, requires_grad=learns)
    return made.requires_grad_(learns)
