"""Checks on any machine, without a card, whether a function can be captured.

First the function runs once on fake tensors of the `meta` device, under rules that no real run can check: no host
read, no shape that depends on data, no copy between devices, no write into a view, no second write by index into one
tensor, no constant made inside, no tensor from outside the state and the module. Then it runs on the real state with
what a replay promises and no more: the same addresses, shapes and dtypes each time, and one output storage that is
poisoned before each call, so that a stale result or one kept too long shows.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_hpu.backends.base import Backend
from lantern_hpu.errors import CaptureError
from lantern_hpu.graphs.base import Function, Runner, State

# Operators that make a tensor out of nothing. In a graph they would be constants of the recording, made
# again in each replay, often from host memory; they belong in the module as buffers. (`zeros_like` and
# its kin follow a tensor of the function and are plain fills on the device.)
CONSTANTS = frozenset(
    f"aten::{name}"
    for name in (
        "arange eye full linspace lift_fresh lift_fresh_copy new_full new_ones new_zeros ones rand "
        "randint randn randperm scalar_tensor tril_indices triu_indices zeros"
    ).split()
)


# Operators that write a part of a tensor, which part an index says. A compiler that brings several of them on one
# tensor into place may keep one of them alone, or copy the whole tensor for each.
WRITES_BY_INDEX = frozenset(
    f"aten::{name}_"
    for name in "index_copy index_put index_add index_fill scatter scatter_add".split()
)


class CaptureRules(TorchDispatchMode):
    """Refuses what a graph cannot record but fake tensors alone would let through."""

    def __init__(self) -> None:
        super().__init__()
        # By index: kept, so that no other storage takes its place
        self.written: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in CONSTANTS:
            raise CaptureError(f"{name} makes a constant inside the function")
        if name == "aten::_to_copy" and kwargs.get("device") is not None:
            source, goal = args[0].device.type, torch.device(kwargs["device"]).type
            if source != goal:
                raise CaptureError(f"copy from {source} to {goal}")
        if name == "aten::copy_" and args[0].device.type != args[1].device.type:
            raise CaptureError(f"copy from {args[1].device.type} to {args[0].device.type}")
        if self.writes_view(func, args):
            raise CaptureError(f"{name} writes into a view", "its base may move between replays")
        if name in WRITES_BY_INDEX:
            storage = args[0].untyped_storage()._cdata
            if storage in self.written:
                why = "a compiler may keep one of the writes alone"
                raise CaptureError(f"{name} writes by index into a tensor written before", why)
            self.written[storage] = args[0]
        return func(*args, **kwargs)

    @staticmethod
    def writes_view(func: Any, args: tuple[Any, ...]) -> bool:
        """Whether the operator changes an argument that is a view."""
        return any(
            declared.alias_info is not None
            and declared.alias_info.is_write
            and isinstance(given, Tensor)
            and given._is_view()
            for declared, given in zip(func._schema.arguments, args, strict=False)
        )


def fake_like(value: Any, mode: FakeTensorMode) -> Any:
    """A copy of a dataclass with each tensor replaced by a fake one on `meta`."""
    twin = copy.copy(value)
    for name in value.__dataclass_fields__:
        part = getattr(value, name)
        if isinstance(part, Tensor):
            with mode:
                part = torch.empty(part.shape, dtype=part.dtype, device="meta")
        elif isinstance(part, tuple):
            part = tuple(fake_like(item, mode) for item in part)
        elif hasattr(part, "__dataclass_fields__"):
            part = fake_like(part, mode)
        setattr(twin, name, part)
    return twin


def check_rules(function: nn.Module, state: State) -> None:
    """Run the function once on fake tensors."""
    refuse_shared(function, state)
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    weights = {**dict(function.named_parameters()), **dict(function.named_buffers())}
    with mode:
        fakes = {n: torch.empty(w.shape, dtype=w.dtype, device="meta") for n, w in weights.items()}
    twin = fake_like(state, mode)
    try:
        with torch.no_grad(), mode, CaptureRules():
            # Parts shared by two modules are one object: tying them again would not be undone.
            torch.func.functional_call(function, fakes, (twin,), tie_weights=False)
    except CaptureError as error:
        raise CaptureError(f"{type(function).__name__} cannot be captured", str(error)) from error
    except Exception as error:  # fake tensors raise many types for host reads and dynamic shapes
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise CaptureError(f"{type(function).__name__} cannot be captured", reason) from error


def refuse_shared(function: nn.Module, state: State) -> None:
    names: dict[int, str] = {}
    for name, tensor in state.tensors().items():
        address = tensor.untyped_storage().data_ptr()
        if address and names.setdefault(address, name) != name:  # an empty tensor has none
            what = f"{type(function).__name__} cannot be captured"
            both = f"state tensors {names[address]!r} and {name!r} share a storage"
            raise CaptureError(what, f"{both}; a compiler may take one for the other")


class StrictRunner(Runner):
    """Checks the capture rules once and the promises of a replay at each call."""

    mode = "strict"

    def __init__(self, function: Function, state: State, backend: Backend) -> None:
        super().__init__(function, state, backend)
        self.output: Tensor | None = None
        self.recorded: dict[str, tuple[object, ...]] = {}

    def capture(self) -> None:
        began = time.perf_counter()
        check_rules(self.function, self.state)
        self.recorded = self.identity()
        self.stats.captures += 1
        self.stats.capture_seconds += time.perf_counter() - began

    def identity(self) -> dict[str, tuple[object, ...]]:
        """What a recording holds on to of each tensor: address, shape, strides, dtype."""
        return {
            name: (t.data_ptr(), tuple(t.shape), t.stride(), t.dtype)
            for name, t in self.state.tensors().items()
        }

    def __call__(self) -> Tensor:
        if not self.recorded:
            self.capture()
        for name, now in self.identity().items():
            if self.recorded[name] != now:
                what = f"state tensor {name!r} was replaced after capture"
                raise CaptureError(what, "write into it instead")
        if self.output is not None:
            # A value that no honest result has
            self.output.fill_(float("nan") if self.output.is_floating_point() else -1)
        result: Tensor = self.function(self.state)
        if self.output is None:
            self.output = torch.empty_like(result)
        self.output.copy_(result)
        self.stats.replays += 1
        return self.output
