"""torch's own functions that the bridge replaces while it is imported (core/torch_overwrites.py), for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from gaudi_emulator.lint.checks import no_bare_meta
from gaudi_emulator.nested import mapped
from gaudi_emulator.tensor import DEVICE, HPU, HPUTensor, is_hpu
from lantern_hpu.backends.hpu.env import ROOT

if TYPE_CHECKING:
    from gaudi_emulator.device import Device


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """An attribute made from the real one, put back after; an inherited one is inherited again."""
    inherited, before = name not in vars(owner), vars(owner).get(name)
    setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def wrapped(owner: Any, name: str, function: Callable[..., Any]) -> AbstractContextManager[None]:
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

    def fork_here(
        real: Any, devices: Any = None, *args: Any, device_type: str | None = None, **kwargs: Any
    ) -> Any:
        return real(devices, *args, device_type=device_type or DEVICE, **kwargs)

    def save(real: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        real(mapped(obj, detached_copy), *args, **kwargs)

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
        # A module that moves keeps its parameter objects, so that weights which two modules share stay shared.
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, before)
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
        "synchronizeDevice": hpu.synchronize,
        "getStream": hpu.current_stream,
        "setStream": hpu.set_stream,
    }
    known = {f"_accelerator_{name}": here(answer) for name, answer in answers.items()}
    return known | {"_get_accelerator": known["_accelerator_getAccelerator"]}


@contextmanager
def made_on_the_host() -> Iterator[None]:
    """`torch.tensor` makes its tensor on the host and moves it where tracers, and the emulator, see it."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def any_of_card(values: Iterable[object]) -> bool:
    return any(isinstance(value, HPUTensor) for value in values)


def detached_copy(tensor: Tensor) -> Tensor:
    """A checkpoint's tensor: off the device, and out of autograd."""
    return tensor.detach().cpu() if isinstance(tensor, HPUTensor) else tensor


def restored(values: Tensor, learns: bool, parameter: bool) -> Tensor:
    """A pickled device tensor: on the device again if there is one."""
    from gaudi_emulator.device import current, listening

    made: Tensor = current().upload(values) if listening() else values
    if parameter:
        return torch.nn.Parameter(made, requires_grad=learns)
    return made.requires_grad_(learns)
