"""The contract of a backend: what a device can do, never which device it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lantern_hpu.errors import DeviceError, OptionError, choices
from lantern_hpu.ops.kernels import PLAIN, Kernels


@dataclass(frozen=True)
class Memory:
    """Bytes; None where the device does not tell."""

    total: int | None
    free: int | None
    peak: int | None


def named(dtype: torch.dtype) -> str:
    """A number format as options and reports call it."""
    return str(dtype).removeprefix("torch.")


class Backend(ABC):
    """A device. Everything above asks it for what it needs instead of asking for its name.

    Attributes:
        name: the value of `--device`.
        device: where tensors live.
        dtypes: supported number formats, best first, each with the reason for its place.
        quantized: smaller formats for the target's weights that were tried here.
        graph_modes: ways to record a function, best first, each with the reason for its place; `eager` is one.
    """

    name: str
    device: torch.device
    dtypes: dict[str, str]
    graph_modes: dict[str, str]
    quantized: tuple[str, ...] = ()
    emulates = False  # whether it can run without its device
    compiler = "inductor"  # what `torch.compile` uses
    is_host = False  # whether it is the processor itself
    runs_ahead = False  # whether it works through what was launched while the host goes on

    def __init__(self, graphs: str = "auto", emulate: bool = False) -> None:
        """Nothing is loaded yet.

        Args:
            graphs: the graph mode wanted; some devices read it while their software is loaded.
            emulate: stand in for a device that is not there.
        """
        if emulate and not self.emulates:
            raise OptionError(f"{self.name} cannot be emulated", "it needs no emulator")

    @property
    def measured_as(self) -> str:
        """The device whose measured defaults hold here."""
        return self.name

    @abstractmethod
    def available(self) -> tuple[bool, str]:
        """Whether the device can be used here, and why (not)."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything asked for so far is done."""

    @abstractmethod
    def memory(self) -> Memory:
        """Bytes in total, free, and at the peak since `reset_peak`."""

    def reset_peak(self) -> None:  # noqa: B027 - a process cannot forget its own
        """Begin the peak of memory anew, where the device can; elsewhere it is that of the whole process."""

    def kernels(self, choice: str = "auto", dtype: torch.dtype | None = None) -> Kernels:
        """What the transformer calls on this device.

        Args:
            choice: `auto`, the fastest forms that agree with the plain ones; or `plain`.
            dtype: what the models compute in, in which they have to agree; the best one if not given.
        """
        if choice not in ("auto", "plain"):
            raise OptionError(f"--kernels is {choice!r}", hint=choices(["auto", "plain"]))
        return PLAIN

    def compile(self, function: nn.Module) -> Callable[[Any], Tensor]:
        """The function, compiled whole with static shapes."""
        compiled: Callable[[Any], Tensor] = torch.compile(
            function, backend=self.compiler, fullgraph=True, dynamic=False
        )
        return compiled

    def flush(self) -> None:  # noqa: B027 - most devices gather nothing
        """Launch what a lazy device has gathered, so that what follows is a graph of its own."""

    def upload(self, numbers: Tensor, goal: Tensor) -> None:
        """Copy numbers of the host into a tensor of the device, after what was launched before."""
        goal.copy_(numbers)

    def ask(self, numbers: Tensor) -> Callable[[], list[int]]:
        """Start to copy a small tensor [n] to the host as it is now; the returned function waits for it."""
        found: list[int] = numbers.tolist()
        return lambda: found

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Whatever the device compiles inside is expected; after it, nothing should be."""
        yield

    def counters(self) -> dict[str, int]:
        """What the device counts since its start: compilations, fallbacks, launches, ... if it does."""
        return {}

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns the device's known errors into ones that say what to do."""
        yield

    def close(self) -> None:  # noqa: B027 - most devices need no closing
        """Give back what was taken for this backend alone."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Hardware and versions, for reports."""

    def check_quantized(self, kind: str) -> None:
        """Raise a DeviceError unless the device offers a smaller format for weights."""
        if kind not in self.quantized:
            hint = choices(self.quantized) if self.quantized else "--dtype bfloat16"
            raise DeviceError(f"{self.name} does not offer {kind!r} weights", hint=hint)

    def dtype(self, name: str = "auto") -> torch.dtype:
        """The number format of that name, or the best one.

        Raises:
            DeviceError: the device does not offer it.
        """
        if name == "auto":
            name = next(iter(self.dtypes))
        if name not in self.dtypes:
            raise DeviceError(
                f"{self.name} does not offer dtype {name!r}", hint=choices(self.dtypes)
            )
        found: torch.dtype = getattr(torch, name)
        return found
