"""NVIDIA GPUs, from Ampere on; older ones draw in float16 and float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lantern_hpu.backends import ACCELERATOR, DeviceOptions, DraftingDefaults
from lantern_hpu.backends.base import Backend, Candidate, DevicePlan, Memory, Transfers
from lantern_hpu.backends.cuda import forms
from lantern_hpu.backends.cuda.kernels.programs import AMPERE, SMALL_ROWS
from lantern_hpu.errors import Arg, DeviceError, shell, words
from lantern_hpu.ops.kernels import PLAIN, Kernels, Sizes

# ------------------------------------------------------------------------------------------ dtypes

# Number formats on an NVIDIA GPU; `auto` takes the first that the card has.

DTYPES = {
    "bfloat16": "half the bytes to read a token, with float32's range",
    "float16": "half the bytes; for cards before Ampere",
    "float32": "for exact comparisons",
}


# ----------------------------------------------------------------------------------------- backend

WHEELS = "https://pytorch.org/get-started/locally"


class CUDATransfers(Transfers):
    """Copies through pinned memory: from and to any other the host would wait until all that was launched is done."""

    runs_ahead = True

    def upload(self, values: Tensor, target: Tensor) -> None:
        target.copy_(values.pin_memory(), non_blocking=True)

    def to_device(self, values: Tensor, device: torch.device | None) -> Tensor:
        if device is None or device.type != "cuda":
            return values.to(device)
        return values.pin_memory().to(device, non_blocking=True)

    def read(self, values: Tensor) -> Callable[[], list[int]]:
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        copy.copy_(values, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def wait() -> list[int]:
            done.synchronize()
            result: list[int] = copy.tolist()
            return result

        return wait


class CUDAPlan(DevicePlan):
    """Each product of a block in the form that is fastest on the card."""

    def lay_out(self, modules: Sequence[nn.Module]) -> DevicePlan:
        if self.graphs != "compile" and self.kernels.product is not None:
            note = self.decided.__setitem__
            forms.install(modules, forms.Forms(self.kernels, forms.Card(), note))
        return self


class CUDABackend(Backend):
    """The current CUDA device."""

    name = "cuda"
    device = torch.device("cuda")
    dtypes = DTYPES
    graph_modes = {
        "cuda_graph": "the whole step is one launch, so the host costs nothing",
        "compile": "inductor fuses small operators; warms up for minutes",
        "eager": "every operator is a launch of its own, which takes longer than most of them run",
    }

    quantized = ("int8", "int4")
    transfers = CUDATransfers()
    shares_pool = True
    overlaps = True

    def __init__(self, graphs: str = "auto") -> None:
        self.recordings: WeakSet[Any] = WeakSet()  # runners whose graph lives
        self.retired: list[Any] = []  # graphs that live on with them
        self.pool: Any = None

    def available(self) -> tuple[bool, str]:
        if torch.version.cuda is None:
            why = f"torch {torch.__version__} was built without CUDA; a wheel with it: {WHEELS}"
            return False, why
        if not torch.cuda.is_available():
            return False, unusable()
        native = torch.cuda.get_device_capability() >= AMPERE
        self.dtypes = {name: why for name, why in DTYPES.items() if native or name != "bfloat16"}
        return True, torch.cuda.get_device_name()

    def drafting_defaults(self, parameters: int, quantize: str | None = None) -> DraftingDefaults:
        """A window: on an H200, at LlamaGen-XL's sizes, the fastest of the lossless settings that were measured; of
        the trees of `eagle` a chain, for one image and for eight. Small matrices have forms for so many rows: with
        guidance those of eight images, which one draft less keeps within."""
        window = SMALL_ROWS // 16 - 1 if quantize in self.quantized else ACCELERATOR.window
        return DraftingDefaults(method="scd", window=window, tree="chain")

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def memory(self, reset_peak: bool = False) -> Memory:
        free, total = torch.cuda.mem_get_info()
        memory = Memory(total, free + unused_bytes(), torch.cuda.max_memory_allocated())
        if reset_peak:
            torch.cuda.reset_peak_memory_stats()
        return memory

    def own_kernels(self, dtype: torch.dtype, sizes: Sizes | None) -> Kernels:
        from lantern_hpu.backends.cuda.kernels import triton_kernels
        from lantern_hpu.backends.cuda.kernels.programs import LARGEST

        kernels = triton_kernels(self.device, dtype)
        if sizes is not None and sizes.vocab_size > LARGEST:
            kernels = replace(kernels, walk=None, traverse=None)
        return kernels if sizes is None else self.held_kernels(kernels, dtype, sizes)

    def held_kernels(self, kernels: Kernels, dtype: torch.dtype, sizes: Sizes) -> Kernels:
        """Those that agree with their plain twins in the sizes of a model."""
        from lantern_hpu.backends.cuda.kernels import without
        from lantern_hpu.backends.cuda.kernels.checks import held_to_twins

        if kernels is PLAIN:
            return PLAIN
        machine = forms.Card().machine()
        return without(held_to_twins(kernels, sizes, self.device, dtype, machine), kernels)

    def fit(self, config: Sizes, options: DeviceOptions) -> DevicePlan:
        return CUDAPlan(**vars(super().fit(config, options)))

    def candidates(self, dtype: torch.dtype) -> dict[str, Candidate]:
        from lantern_hpu.backends.cuda.kernels import triton_candidates

        return triton_candidates(self.device, dtype)

    def kept_choices(self) -> list[str]:
        return forms.kept_choices(forms.Card().machine())

    def try_kernel(self) -> str:
        from lantern_hpu.backends.cuda.kernels.checks import fault, kept_verdicts

        try:
            dtype = self.number_format("auto")[0]
            why = fault(self.candidates(dtype)["swiglu"])
        except ImportError as error:
            why = f"{error}; pip install triton"
        if why:
            return f"plain ones serve: {why}"
        return "\n".join(["Triton builds them here", *kept_verdicts(forms.Card().machine())])

    @cached_property
    def capture_stream(self) -> Any:
        """Of this backend alone: cuBLAS's workspaces belong to a stream, and go with any graph captured on it.

        Torch hands out the 32 streams of a priority in turn: timings, text and pixels take those of the usual one.
        """
        return torch.cuda.Stream(priority=-1)

    def graph_pool(self) -> Any:
        """Memory that all live graphs share, as they never run at the same time; a new one where none is alive.

        Torch before its PR 175276 (2.9, for one) refuses a capture into a pool whose graphs are gone while something
        is left in it.
        """
        if not self.recordings:
            self.pool = torch.cuda.graph_pool_handle()
        return self.pool

    def retire(self, recording: Any, graph: Any) -> None:
        """A graph that is of no use any more, destroyed with the last one that lives.

        Since then torch frees the stream's workspaces with the first of them, which the others address (its issue
        193402, 2.13). What it holds of the shared pool is free for others at once.
        """
        self.recordings.discard(recording)
        self.retired = [*self.retired, graph] if self.recordings else []

    def own_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """A stream of its own, which waits for nothing: what passes between the threads is on the host."""
        return partial(torch.cuda.stream, torch.cuda.Stream())

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info()
            cause = str(error).splitlines()[0]
            why = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free ({cause})"
            plan = shell("models plan", "MODEL")
            hint = words("a smaller", Arg("batch_size"), f"; {plan} counts what is needed")
            raise DeviceError("the GPU has too little memory", why, hint) from error

    def describe(self) -> dict[str, object]:
        major, minor = torch.cuda.get_device_capability()
        return {
            "device": self.name,
            "card": torch.cuda.get_device_name(),
            "capability": f"{major}.{minor}",
            "driver": forms.driver_version(),
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
        }


def unused_bytes() -> int:
    """What torch's allocator keeps unused, outside of the private pools of graphs."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == torch.cuda.current_device()
        and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
    )


def unusable() -> str:
    """Why CUDA cannot start, in the driver's own words."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "no NVIDIA GPU was found"
