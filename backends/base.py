"""The contract of a backend: what a device can do, never which device it is."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lantern_hpu.errors import DeviceError, OptionError, choices, require
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


class Pace:
    """Runs the steps of one engine. A device that can adapt to how long they take has a pace of its own."""

    def fit(self, step: Callable[[], object], bits: Callable[[], object]) -> None:
        """Try on a real step, whose results nobody needs, what there is to choose.

        Args:
            step: always begins at the same state. bits: tells what it left from what differs in a bit.
        """

    def __call__(self, step: Callable[[], Tensor]) -> Tensor:
        """A step of an image, run as was chosen."""
        return step()

    def held(self) -> AbstractContextManager[None]:
        """What was chosen holds inside."""
        return nullcontext()


class Backend(ABC):
    """A device. Everything above asks it for what it needs instead of asking for its name.

    Attributes:
        name: the value of `--device`.
        device: where tensors live.
        dtypes: supported number formats, best first, each with the reason for its place.
        quantized: smaller formats for the target's weights that were tried here.
        graph_modes: ways to record a function, best first, each with the reason for its place; `eager` is one.
        layouts: ways to keep the matrices of linear layers, each with the reason.
    """

    name: str
    device: torch.device
    dtypes: dict[str, str]
    graph_modes: dict[str, str]
    quantized: tuple[str, ...] = ()
    layouts: dict[str, str] = {"plain": "as torch keeps them"}
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

    @cached_property
    def decided(self) -> dict[str, str]:
        """What was left to the device and what it took, with the reason; for reports."""
        return {}

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

    def check_layout(self, choice: str) -> None:
        """Raise a DeviceError unless the device offers a layout of matrices, or `auto`."""
        if choice != "auto" and choice not in self.layouts:
            what, hint = f"{self.name} does not offer layout {choice!r}", ["auto", *self.layouts]
            raise DeviceError(what, hint=choices(hint))

    def weight_bytes(self, layout: str, dtype: torch.dtype) -> int:
        """Of a number in a matrix that lies in a layout."""
        return dtype.itemsize

    def lay_out(
        self, modules: Sequence[nn.Module], choice: str = "auto", modes: Collection[str] = ()
    ) -> str:
        """Bring the linear layers of loaded modules into the layout that is fastest here, in place. -> its name

        Args:
            choice: `auto`, or one of `layouts`.
            modes: graph modes that are to run them.

        Raises:
            DeviceError: the device does not offer it, or not in these modes.
        """
        self.check_layout(choice)
        return "plain"

    def use_threads(self, count: int) -> None:
        """The threads of the processor that torch may use.

        Args:
            count: 0 leaves them to the device, which may try how many are fastest.

        Raises:
            OptionError: more than there are cores.
        """
        cores = os.cpu_count() or 1
        require(0 <= count <= cores, "--threads", count, f"1 to {cores}, or 0 for the fastest")
        if count:
            torch.set_num_threads(count)

    def pace(self) -> Pace:
        """What runs the steps of a new engine."""
        return Pace()

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

    def best_dtype(self, parameters: int = 0) -> tuple[str, str]:
        """The fastest number format for a model of so many parameters, and why."""
        return next(iter(self.dtypes.items()))

    def dtype(self, name: str = "auto", parameters: int = 0) -> torch.dtype:
        """The number format of that name, or the best one.

        Args:
            parameters: of the model, which may decide which is best.

        Raises:
            DeviceError: the device does not offer it.
        """
        why = "asked for"
        if name == "auto":
            name, why = self.best_dtype(parameters)
        if name not in self.dtypes:
            raise DeviceError(
                f"{self.name} does not offer dtype {name!r}", hint=choices(self.dtypes)
            )
        self.decided["dtype"] = f"{name}: {why}"
        found: torch.dtype = getattr(torch, name)
        return found
