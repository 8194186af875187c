"""The contract of a backend: what a device can do, never which device it is.

A backend says what its device is and offers (`name`, `device`, `dtypes`, `graph_modes`), does what every device does
(`available`, `synchronize`, `memory`, `kernels`, `compile`, `errors`, `describe`, `close`), and has two parts that most
devices take as they are: `tuning`, what is left to the device to choose, and `queue`, how the host hands it work.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library

from lantern_hpu.backends import HOST
from lantern_hpu.backends.compile_cache import open_cache
from lantern_hpu.errors import DeviceError, OptionError, choices, require
from lantern_hpu.ops.kernels import PLAIN, Kernels, Sizes

# --------------------------------------------------------------------------------------- operators

# Forms of a device's own as operators of torch.
#
# An operator is one call that compilers and recordings need not look into. Its results are new tensors; only
# `rotate_into` writes into its arguments, as its schema says. It has no backward: the plain forms of `ops.kernels`
# serve where a gradient is wanted. (`torch.library.custom_op` would load torch's compiler when the module is imported.)

LIBRARY = Library("lantern_hpu", "FRAGMENT")


def operator(schema: str, shaped: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make the decorated function the operator `lantern_hpu::NAME`.

    Args:
        schema: name, arguments and results, in torch's notation.
        shaped: the same for tensors without storage; it says what the results look like.
    """
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Any:
        LIBRARY.define(schema)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        LIBRARY.impl(name, shaped, "Meta")
        return getattr(torch.ops.lantern_hpu, name).default

    return register


# -------------------------------------------------------------------------------------------- base


@dataclass(frozen=True)
class Memory:
    """Bytes; None where the device does not report them."""

    total: int | None
    free: int | None
    peak: int | None


def dtype_name(dtype: torch.dtype) -> str:
    """A number format as options and reports call it."""
    return str(dtype).removeprefix("torch.")


def compile_whole(function: nn.Module, compiler: str = "inductor") -> Callable[[Any], Tensor]:
    """The function, compiled in one graph with static shapes; what inductor makes of it is kept on this machine."""
    if compiler == "inductor":
        open_cache()
    compiled: Callable[[Any], Tensor] = torch.compile(
        function, backend=compiler, fullgraph=True, dynamic=False
    )
    return compiled


class Pace:
    """Runs the steps of one engine. A device that can adapt to how long they take has a pace of its own."""

    def fit(self, step: Callable[[], object], bits: Callable[[], object]) -> None:
        """Choose by trials of a real step, whose results nobody needs.

        Args:
            step: always begins at the same state. bits: a digest of what it left, which differs if one bit does.
        """

    def __call__(self, step: Callable[[], Tensor]) -> Tensor:
        """A step of an image, run as was chosen."""
        return step()

    def held(self) -> AbstractContextManager[None]:
        """What was chosen is in force inside."""
        return nullcontext()


class Tuning:
    """What is left to the device: number format, layout of matrices, threads.

    Attributes:
        dtypes, quantized, layouts: what there is to choose from, see `Backend`. `quantized` are smaller formats for
            the target's weights that were tried here; `layouts` are ways to keep the matrices of linear layers.
        measured_as: the device whose measured defaults hold here.
        invariant: whether an image's bits are held to be independent of its batch.
        decided: what was chosen, with the reason; for reports.
    """

    quantized: tuple[str, ...] = ()
    layouts: Mapping[str, str] = {"plain": "as torch keeps them"}

    def __init__(
        self,
        name: str,
        dtypes: Mapping[str, str],
        quantized: tuple[str, ...] = (),
        measured_as: str | None = None,
    ) -> None:
        self.name, self.dtypes = name, dtypes
        self.quantized = quantized or self.quantized
        self.measured_as = measured_as or name
        self.invariant = False
        self.decided: dict[str, str] = {}

    @property
    def idle_arithmetic(self) -> bool:
        """Whether one token a step leaves the arithmetic idle, so that dozens of drafts are verified at little cost."""
        return self.measured_as != HOST

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
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def check_quantized(self, kind: str) -> None:
        """Raise a DeviceError unless the device offers a smaller format for weights."""
        if kind not in self.quantized:
            hint = choices(self.quantized) if self.quantized else "--dtype bfloat16"
            raise DeviceError(f"{self.name} does not offer {kind!r} weights", hint=hint)

    def check_layout(self, choice: str) -> None:
        """Raise a DeviceError unless the device offers a layout of matrices, or `auto`."""
        if choice != "auto" and choice not in self.layouts:
            what, hint = f"{self.name} does not offer layout {choice!r}", ["auto", *self.layouts]
            raise DeviceError(what, hint=choices(hint))

    def lay_out(
        self,
        modules: Sequence[nn.Module],
        choice: str = "auto",
        modes: Collection[str] = (),
        invariant: bool = False,
    ) -> str:
        """Bring the linear layers of loaded modules into the layout that is fastest here, in place. -> its name

        Args:
            choice: `auto`, or one of `layouts`.
            modes: graph modes that are to run them.
            invariant: whether the bits of a row must not depend on the rows beside it: see `holds_rows`.

        Raises:
            DeviceError: the device does not offer it, or not in these modes.
        """
        self.check_layout(choice)
        return "plain"

    def keys_by_head(self, dtype: torch.dtype) -> bool:
        """Whether attention is faster with a cache in which all positions of a head lie together."""
        return False

    def holds_rows(self, asked: bool, modes: Collection[str]) -> bool:
        """Whether images are held to bits that do not depend on their batch, in all of these graph modes."""
        return False

    def independent(self, kernels: Kernels, sizes: Sizes, dtype: torch.dtype) -> Kernels:
        """Kernels in which no image's bits depend on the others of its batch, where `holds_rows` says so."""
        return kernels

    def weight_bytes(self, layout: str, dtype: torch.dtype) -> int:
        """Of a number in a matrix that lies in a layout."""
        return dtype.itemsize

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


class Queue:
    """How the host hands work to the device, and what the device counts of it.

    This one is that of a device which does each operation at once.
    """

    runs_ahead = False  # whether the device works through what was launched while the host goes on

    def flush(self) -> None:
        """Launch what a lazy device has gathered, so that what follows is a graph of its own."""

    def upload(self, values: Tensor, target: Tensor) -> None:
        """Copy a tensor of the host into one of the device, after what was launched before."""
        target.copy_(values)

    def to_device(self, values: Tensor, device: torch.device | None) -> Tensor:
        """A new tensor of the host on the device, or left on the host; what was launched before is not waited for."""
        return values.to(device)

    def read(self, values: Tensor) -> Callable[[], list[int]]:
        """Start to copy a small tensor [n] to the host as it is now; the returned function waits for it."""
        result: list[int] = values.tolist()
        return lambda: result

    def counters(self) -> dict[str, int]:
        """What the device counts since its start: compilations, fallbacks, launches, ... if it does."""
        return {}


class Backend(ABC):
    """A device. Everything above asks it for what it needs instead of asking for its name.

    Attributes:
        name: the value of `--device`.
        device: where tensors live.
        dtypes: supported number formats, best first, each with the reason for its place.
        graph_modes: ways to record a function, best first, each with the reason for its place; `eager` is one.
    """

    name: str
    device: torch.device
    dtypes: dict[str, str]
    graph_modes: dict[str, str]

    def __init__(self, graphs: str = "auto") -> None:  # noqa: B027 - most need not know
        """Nothing is loaded yet.

        Args:
            graphs: the graph mode wanted; some devices read it while their software is loaded.
        """

    @cached_property
    def tuning(self) -> Tuning:
        """What is left to the device to choose."""
        return Tuning(self.name, self.dtypes)

    @cached_property
    def queue(self) -> Queue:
        """How the host hands work to the device."""
        return Queue()

    @abstractmethod
    def available(self) -> tuple[bool, str]:
        """Whether the device can be used here, and why (not)."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything asked for so far is done."""

    @abstractmethod
    def memory(self, reset_peak: bool = False) -> Memory:
        """Bytes in total, free, and at the peak.

        Args:
            reset_peak: begin the peak anew after this, where the device can; elsewhere it is that of the process.
        """

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
        return compile_whole(function)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns the device's known errors into ones that say what to do."""
        yield

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Hardware and versions, for reports."""
