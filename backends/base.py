"""The contract of a backend: what a device can do, never which device it is.

A backend says what its device is and offers, does what every device does, and answers one question about a model:
`fit`, which number format, graph mode, kernels, layout of matrices and threads it runs with, and why.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library

from lantern_hpu.backends import (
    ACCELERATOR,
    BACKENDS,
    HOST,
    QUANTIZED,
    DeviceOptions,
    DraftingDefaults,
    device_named,
    host,
    installed,
)
from lantern_hpu.errors import Arg, DeviceError, OutputError, Words, choices, require, shell, words
from lantern_hpu.files import own_cache
from lantern_hpu.ops.kernels import PLAIN, Kernels, Sizes
from lantern_hpu.ops.quantized import QuantizedLinear, plain_layer, replace_layers

# --------------------------------------------------------------------------------------- operators

# Forms of a device's own as operators of torch.
#
# An operator is one call that compilers and recordings need not look into. Its results are new tensors; those that
# write into a cache, `attend` and `native_decode`, say so in their schema. It has no backward: the plain forms of
# `ops.kernels` serve where a gradient is wanted. (`torch.library.custom_op` would load torch's compiler at import.)

LIBRARY = Library("lantern_hpu", "FRAGMENT")


def operator(schema: str, shaped: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make the decorated function the operator `lantern_hpu::NAME`, whose schema is in torch's notation.

    `shaped` is the same for tensors without storage; it says what the results look like.
    """
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Any:
        LIBRARY.define(schema)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        LIBRARY.impl(name, shaped, "Meta")
        return getattr(torch.ops.lantern_hpu, name).default

    return register


# ---------------------------------------------------------------------------------------- judging

# A device's own forms, before anybody uses them: each is held to its plain twin by itself.

Example = tuple[Sequence[Any], Sequence[Tensor]]  # arguments, outcome
# What software without the kernel, or with other arguments for it, raises
LACKING = (ImportError, AttributeError, TypeError, RuntimeError)


@dataclass(frozen=True)
class Candidate:
    """A device's own form of a kernel of `Kernels`.

    Attributes:
        make: gives it; raises where the device's software lacks it.
        examples: calls, and what comes of the plain twin.
        tolerance: the largest difference to it, absolute for small numbers and relative for large ones.
    """

    make: Callable[[], Callable[..., Any]]
    examples: Sequence[Example]
    tolerance: float

    def apart(self) -> float:
        """The largest difference over all examples; infinite where types differ or a number is none."""
        kernel = self.make()
        with torch.no_grad():
            got = on_host([x for given, _ in self.examples for x in outcome(kernel, given)])
        wanted = [want for _, results in self.examples for want in results]
        return max(difference(*pair) for pair in zip(got, wanted, strict=True))

    def agrees(self) -> bool:
        return self.apart() <= self.tolerance


def on_host(results: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors, those of a number format in one: each copy waits for a card."""
    found = list(results)
    for dtype in {x.dtype for x in found}:
        same = [i for i, x in enumerate(found) if x.dtype == dtype]
        flat = torch.cat([found[i].flatten() for i in same]).cpu()
        for i, part in zip(same, flat.split([found[i].numel() for i in same]), strict=True):
            found[i] = part.view(found[i].shape)
    return found


def difference(got: Tensor, want: Tensor) -> float:
    """The largest |got - want| / (1 + |want|); whole numbers are equal, or infinitely apart."""
    got, want = got.cpu(), want.cpu()
    if got.dtype != want.dtype or got.shape != want.shape:
        return float("inf")
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else float("inf")
    got, want = got.double(), want.double()
    same, apart = got == want, (got - want).abs() / (1 + want.abs())
    apart = apart.masked_fill(same, 0.0)  # equal infinities are NaN apart
    return float(apart.nan_to_num(float("inf"), float("inf")).max()) if apart.numel() else 0.0


def outcome(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    """What a call returns, and the tensors it was given as it leaves them: some are written to."""
    given = deepcopy(arguments)
    results = function(*given)
    return (*(results if isinstance(results, tuple) else (results,)), *tensors(given))


def tensors(arguments: Sequence[Any]) -> Sequence[Tensor]:
    """Those among arguments, and in the tuples among them."""
    nested = [tensors(x) if isinstance(x, tuple) else [x] for x in arguments]
    return [x for part in nested for x in part if isinstance(x, Tensor)]


# ----------------------------------------------------------------------------------------- backends


@dataclass(frozen=True)
class Memory:
    """Bytes; None where the device does not report them."""

    total: int | None
    free: int | None
    peak: int | None


INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# By the user: torch sets it once its compiler is imported
INDUCTOR_GIVEN = os.environ.get(INDUCTOR_CACHE)


def dtype_name(dtype: torch.dtype | str) -> str:
    """A number format as options and reports call it."""
    return str(dtype).removeprefix("torch.")


class Float32Default:
    """Inside, float32 is torch's default format, which all threads share; the last to leave restores the one before."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, torch.float32

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.before = torch.get_default_dtype()
            self.inside += 1
            torch.set_default_dtype(torch.float32)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                torch.set_default_dtype(self.before)


float32_default = Float32Default()


@contextmanager
def own_defaults() -> Iterator[None]:
    """Inside, a tensor is on the host and of float32 where its maker names nothing else, and numbers are computed as
    written, no matter what the program around has set: a default device or format, autocast, inference mode.

    Of these the format alone is seen by the program's other threads, meanwhile.
    """
    with ExitStack() as stack:
        stack.enter_context(float32_default)
        if torch.get_default_device().type != HOST:
            stack.enter_context(torch.device(HOST))
        for kind in filter(torch.is_autocast_enabled, BACKENDS):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        yield


def compile_whole(function: Callable[..., Any], compiler: str = "inductor") -> Callable[..., Any]:
    """The function, compiled in one graph with static shapes.

    Inductor keeps what it makes of it on this machine, for the next process to start in seconds. Code for one processor
    may stop another, and a home folder may serve both: so there is a folder for each.
    """
    about = [host.processor_name(), host.cpuinfo("flags"), host.cpuinfo("Features")]
    machine = hashlib.sha256(repr(about).encode()).hexdigest()[:8]
    try:
        kept = own_cache("compiled") / f"torch-{torch.__version__}-{machine}"
        kept.mkdir(0o700, exist_ok=True)
    except (OSError, OutputError):  # torch's own folder has a name that others may know
        kept = Path(tempfile.mkdtemp(prefix="lantern-hpu-"))
    os.environ[INDUCTOR_CACHE] = INDUCTOR_GIVEN or str(kept)
    compiled: Callable[..., Any] = torch.compile(
        function, backend=compiler, fullgraph=True, dynamic=False
    )
    return compiled


class StepTuner:
    """Runs the steps of one engine. A device that can adapt to how long they take has a tuner of its own."""

    def fit(self, step: Callable[[], object]) -> None:
        """Choose by trials of a real step, which always begins at the same state; its results are discarded."""

    def __call__(self, step: Callable[[], Tensor]) -> Tensor:
        """A step of an image, run as was chosen."""
        return step()

    def with_threads(self) -> AbstractContextManager[None]:
        """The threads that were chosen are in force inside."""
        return nullcontext()


class Transfers:
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


@dataclass(frozen=True)
class DevicePlan:
    """How a model runs on a device.

    Attributes:
        graphs: the graph mode. layout: of the matrices of linear layers; `auto` before `lay_out`.
        keys_by_head: whether the KV cache keeps all positions of a head together.
        decided: what was chosen, with the reason, for reports; what is chosen later is added.
    """

    backend: Backend
    dtype: torch.dtype
    graphs: str = "eager"
    kernels: Kernels = PLAIN
    layout: str = "plain"
    keys_by_head: bool = False
    decided: dict[str, str] = field(default_factory=dict)

    def weight_bytes(self, quantize: str | None) -> float:
        """Of a number in a matrix of a model that was loaded with these, if the device keeps them."""
        kept = quantize if quantize in self.backend.quantized else None
        return QUANTIZED[kept] if kept else self.dtype.itemsize

    def lay_out(self, modules: Sequence[nn.Module]) -> DevicePlan:
        """Bring the linear layers of loaded modules into the layout, in place. -> with the layout that was taken

        Raises:
            DeviceError: the layout cannot be used for these weights.
        """
        return self

    def keep_quantized(self, modules: Sequence[nn.Module], form: str) -> str:
        """Leave loaded matrices in a smaller format, or where the device has none, turn them back into the model's own.

        Returns what a user should know of that, or nothing.
        """
        if form in self.backend.quantized:
            each = "row of a matrix" if form == "int8" else "group of inputs of a row"
            self.decided["quantize"] = f"{form}, with a scale for each {each}"
            return ""
        for module in modules:
            replace_layers(module, QuantizedLinear, partial(plain_layer, dtype=self.dtype))
        name, dtype = self.backend.name, dtype_name(self.dtype)
        return f"{name} keeps no {form} matrices: it draws with the same numbers in {dtype}"

    def refill(self, module: nn.Module, fresh: nn.Module) -> None:
        """Give a module that was laid out the numbers of one that is plain, in place, where recordings read them."""
        for name, parameter in module.named_parameters():
            if parameter.numel():  # else they are in a layout's own form
                parameter.copy_(fresh.get_parameter(name))

    def tuner(self) -> StepTuner:
        """What runs the steps of a new engine."""
        return StepTuner()


class Backend(ABC):
    """A device. Everything above asks it for what it needs instead of asking for its name.

    Attributes:
        name: of the device, as options have it.
        device: where tensors live.
        dtypes: supported number formats, best first, each with the reason for its place.
        graph_modes: ways to record a function, best first, each with the reason for its place; `eager` is one.
        layouts: ways to keep the matrices of linear layers. quantized: smaller formats that it keeps them in.
        transfers: how the host hands work to the device.
        shares_pool: whether all recordings keep what they compute in one memory.
        skips_guards: whether a compiled step leaves out the checks of its inputs once it is warm.
        compiles_parts: whether what runs outside of the step is compiled too: else each of its operators is a launch.
        overlaps: whether another thread's work may run at the same time as the steps, in what `own_stream` makes.
    """

    name: str
    device: torch.device
    dtypes: Mapping[str, str]
    graph_modes: Mapping[str, str]
    layouts: Mapping[str, str] = {"plain": "as torch keeps them"}
    quantized: tuple[str, ...] = ()
    transfers: Transfers = Transfers()
    is_host = False
    shares_pool = False
    skips_guards = False
    compiles_parts = False
    overlaps = False

    def __init__(self, graphs: str = "auto") -> None:  # noqa: B027 - most need not know
        """Nothing is loaded yet; some devices read the graph mode wanted while their software is loaded."""

    @abstractmethod
    def available(self) -> tuple[bool, str]:
        """Whether the device can be used here, and why (not)."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything asked for so far is done."""

    @abstractmethod
    def memory(self, reset_peak: bool = False) -> Memory:
        """Bytes in total, free, and at the peak, which is that of the process where the device has none of its own.

        Where the device can, the peak starts again after this if `reset_peak`.
        """

    def drafting_defaults(self, parameters: int, quantize: str | None = None) -> DraftingDefaults:
        """How a target of this many parameters, in this format, drafts where nothing was measured or asked for."""
        return ACCELERATOR

    def fit(self, config: Sizes, options: DeviceOptions) -> DevicePlan:
        """How a model of these sizes runs here, as the options ask.

        Raises:
            DeviceError: the device does not offer what is asked for.
            OptionError: more threads than there are cores.
        """
        self.check_offers("layout", options.layout, ["auto", *self.layouts])
        self.check_offers("quantize", options.quantize or "none", ["none", *QUANTIZED])
        cores = os.cpu_count() or 1
        allowed = f"1 to {cores}, or 0 for the fastest"
        require(0 <= options.threads <= cores, "threads", options.threads, allowed)
        if options.threads:
            torch.set_num_threads(options.threads)
        dtype, why = self.number_format(options.dtype, config.parameters)
        kernels = self.kernels(options.kernels, dtype, config)
        decided = {"dtype": f"{dtype_name(dtype)}: {why}"}
        return DevicePlan(self, dtype, self.graph_mode(options.graphs), kernels, decided=decided)

    def loading(self, parameters: int) -> AbstractContextManager[None]:
        """Inside, the weights of a target of this many parameters are loaded and laid out."""
        return nullcontext()

    def check_offers(self, what: str, asked: str, offered: Iterable[str]) -> None:
        """Raise a DeviceError unless the device offers what is asked for."""
        if asked not in offered:
            raise DeviceError(
                f"{self.name} does not offer {what} {asked!r}", hint=choices(offered, asked)
            )

    def graph_mode(self, asked: str) -> str:
        """The graph mode to use: `auto` is the first."""
        self.check_offers("graph mode", asked, ["auto", *self.graph_modes])
        return next(iter(self.graph_modes)) if asked == "auto" else asked

    def number_format(self, asked: str, parameters: int = 0) -> tuple[torch.dtype, str]:
        """The number format to use for a model of this many parameters, and why."""
        name, why = self.best_dtype(parameters) if asked == "auto" else (asked, "asked for")
        self.check_offers("dtype", name, self.dtypes)
        return getattr(torch, name), why

    def best_dtype(self, parameters: int = 0) -> tuple[str, str]:
        """The fastest number format for a model of this many parameters, and why."""
        return next(iter(self.dtypes.items()))

    def kernels(
        self, choice: str = "auto", dtype: torch.dtype | None = None, sizes: Sizes | None = None
    ) -> Kernels:
        """What the transformer calls on this device.

        Args:
            choice: `auto`, the fastest forms that agree with the plain ones; or `plain`.
            dtype, sizes: what the models compute in, and the target's sizes, in which they have to agree; if not given,
                the best one, and sizes of the device's own choice.
        """
        if choice == "plain":
            return PLAIN
        return self.own_kernels(dtype or self.number_format("auto")[0], sizes)

    def own_kernels(self, dtype: torch.dtype, sizes: Sizes | None) -> Kernels:
        """The fastest forms that agree with the plain ones here."""
        return PLAIN

    def candidates(self, dtype: torch.dtype) -> dict[str, Candidate]:
        """The device's own forms of kernels, whether or not they are right here."""
        return {}

    def try_kernel(self) -> str | None:
        """Whether kernels of the device's own can be built here, and why not; None: none are built."""
        return None

    def kept_choices(self) -> list[str]:
        """A line for each form that was chosen here by time, and is kept."""
        return []

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled whole with static shapes."""
        return compile_whole(function)

    def own_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """Makes the context in which another thread works while steps run; called in the thread of the steps."""
        return nullcontext

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns the device's known errors into ones that say what to do."""
        yield

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Hardware and versions, for reports."""


def load_backend(name: str, graphs: str = "auto") -> Backend:
    """The backend of a known device, whether or not that is here."""
    module, _, kind = BACKENDS[name].backend.partition(":")
    backend: Backend = getattr(import_module(module), kind)(graphs)
    return backend


def get_backend(name: str = "auto", graphs: str = "auto") -> Backend:
    """The backend of a device; `auto` takes what `LANTERN_HPU_DEVICE` names, else the first that is available.

    Args:
        graphs: the graph mode wanted, for devices that read it while they are loaded.

    Raises:
        DeviceError: unknown name, or the device cannot be used here; the reason is the backend's own.
    """
    name = device_named(name)
    if name != "auto" and name not in BACKENDS:
        raise DeviceError(f"unknown device {name!r}", hint=choices(["auto", *BACKENDS]))
    refused = []
    for candidate in filter(installed, BACKENDS) if name == "auto" else [name]:
        backend = load_backend(candidate, graphs)
        usable, why = backend.available()
        if usable:
            return backend
        refused.append(words(f"{candidate}:", why) if name == "auto" else why)
    # The others may not be usable here either: the doctor asks them
    others = [BACKENDS[name].without] if name in BACKENDS and BACKENDS[name].without else []
    hint = words(Arg("device", HOST), "; " + "; ".join([*others, shell("doctor") + " says more"]))
    raise DeviceError(f"device {name!r} cannot be used here", listed_words(refused), hint)


def listed_words(reasons: Sequence[str]) -> Words:
    """Reasons with a semicolon between, whose arguments each surface spells."""
    return words(*reasons[:1], *(words(";", reason) for reason in reasons[1:]))
