"""torch's own functions that the bridge replaces while it is imported (core/torch_overwrites.py), for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gaudi_emulator.nested import mapped
from gaudi_emulator.tensor import DEVICE, HPUTensor, is_hpu

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


@contextmanager
def overwrites(card: Device) -> Iterator[None]:
    """Seeds reach the card, and checkpoints hold CPU tensors."""

    def seeding(real: Any) -> Any:
        @wraps(real)
        def manual_seed(seed: int) -> torch.Generator:
            card.generator.manual_seed(seed)
            made: torch.Generator = real(seed)
            return made

        return manual_seed

    def forking(real: Any) -> Any:
        @wraps(real)
        def fork_rng(
            devices: Any = None, enabled: bool = True, *args: Any, device_type: str | None = None
        ) -> Any:
            return real(devices, enabled, *args, device_type=device_type or DEVICE)

        return fork_rng

    def saving(real: Any) -> Any:
        @wraps(real)
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            real(mapped(obj, detached_copy), f, *args, **kwargs)

        return save

    def loading(real: Any) -> Any:
        @wraps(real)
        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            here = isinstance(map_location, (str, torch.device)) and is_hpu(map_location)
            found = real(f, "cpu" if here else map_location, *args, **kwargs)
            return mapped(found, lambda t: t.to(DEVICE)) if here else found

        return load

    def swapping(real: Any) -> Any:
        @wraps(real)
        def swap_tensors(one: Tensor, other: Tensor) -> None:
            if not isinstance(one, HPUTensor) and not isinstance(other, HPUTensor):
                real(one, other)
            elif not (isinstance(one, HPUTensor) and same_storage(one, other)):
                # Without torch's checks, which refuse a tensor that was traced or that a living graph holds
                one.__class__, other.__class__ = other.__class__, one.__class__
                one.__dict__, other.__dict__ = other.__dict__, one.__dict__
                torch._C._swap_tensor_impl(one, other)

        return swap_tensors

    def entering(real: Any) -> Any:
        @wraps(real)
        def enter(context: Any) -> Any:
            if context.device == "cuda":
                card.findings.hit("H086", "autocast('cuda')")
            return real(context)

        return enter

    with ExitStack() as stack:
        for owner, name, make in (
            (torch.autocast, "__enter__", entering),
            (torch, "manual_seed", seeding),
            (torch.random, "manual_seed", seeding),
            (torch.random, "fork_rng", forking),
            (torch, "save", saving),
            (torch, "load", loading),
            (torch.utils, "swap_tensors", swapping),
        ):
            stack.enter_context(replaced(owner, name, make))
        # A module that moves keeps its parameter objects, so that weights which two modules share stay shared.
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, before)
        yield


@contextmanager
def made_on_the_host() -> Iterator[None]:
    """`torch.tensor` makes its tensor on the host and moves it where tracers, and the emulator, see it."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def detached_copy(tensor: Tensor) -> Tensor:
    """A checkpoint's tensor: off the device, and out of autograd."""
    return tensor.detach().cpu() if isinstance(tensor, HPUTensor) else tensor


def same_storage(one: HPUTensor, other: Tensor) -> bool:
    """Whether a tensor that is moved is there already."""
    return (one.data_ptr(), one.dtype, one.shape) == (other.data_ptr(), other.dtype, other.shape)


def restored(values: Tensor, learns: bool, parameter: bool) -> Tensor:
    """A pickled device tensor: on the device again if there is one."""
    from gaudi_emulator.device import current, listening

    made: Tensor = current().upload(values) if listening() else values
    if parameter:
        return torch.nn.Parameter(made, requires_grad=learns)
    return made.requires_grad_(learns)
