"""Any machine's processor: the backend that keeps everything runnable anywhere."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from lantern_hpu.backends import LARGE_PARAMETERS, QUANTIZED, DeviceOptions, DraftingDefaults, host
from lantern_hpu.backends.base import Backend, DevicePlan, Memory, StepTuner
from lantern_hpu.backends.cpu import native
from lantern_hpu.backends.cpu.native.sampling import native_kernels
from lantern_hpu.errors import Arg, DeviceError, words
from lantern_hpu.ops.kernels import PLAIN, Kernels, Sizes
from lantern_hpu.ops.quantized import QuantizedLinear
from lantern_hpu.ops.sampling import sample_distinct_in_order, sample_in_order

# ----------------------------------------------------------------------------------------- threads

# How many threads a step takes on a processor: the fastest number by the clock, looked at again when steps slow down.
#
# The threads of a step wait for one another some hundred times. Where other programs want the same cores, a thread that
# must wait for its turn holds up all: one thread is then many times faster than two, which a clock alone can tell.
#
# In torch's form another number of threads can change the last bit of a float, and the same seed is to be the same
# image: there fewer threads have to be several times faster to be taken, which on idle cores they are not.

# Times faster than all threads, to be taken although sums may round otherwise
OTHER_BITS_GAIN = 3.0
MIN_GAIN = 0.85  # of the time with more threads, to take fewer: trials are off by a tenth
STOP_RATIO = 1.1  # times the best: past it, still fewer threads are not tried
TRIAL_STEPS = 3  # of a trial, at least
MAX_TRIAL_S = 0.25  # after which fewer steps do
# Least seconds of a trial in the warm-up and while drawing: the turns of other programs last some milliseconds, and a
# mean over several of them counts what a median of a few steps does not see
WARM_UP_TRIAL_S = 0.01
DRAWING_TRIAL_S = 0.05
SLOWDOWN = 2.5  # times what a step took when the threads were chosen: they are chosen again
RETRY_FACTOR = 100  # more threads are tried again after this many times what trying took,
BUSY_RETRY_FACTOR = 10  # and all numbers on a machine that is busy, whose trials can mislead


@contextmanager
def threads_set(count: int) -> Iterator[None]:
    """Inside, the calling thread uses `count` threads; a new thread begins with what another has set last."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ThreadTuner(StepTuner):
    """Chooses the threads of one engine's steps, also within an image.

    Attributes:
        most: threads that the process may use; they are what is tried first. count: those of a step.
        notify: is given what was chosen and why, each time. faster: times that fewer have to be, to be taken.
        busy: whether other programs want the processor.
    """

    def __init__(
        self,
        notify: Callable[[int, str], None] = lambda count, why: None,
        clock: Callable[[], float] = time.perf_counter,
        faster: float = 1.0,
        busy: Callable[[], bool] = host.is_busy,
    ) -> None:
        self.busy = busy
        self.most = self.count = torch.get_num_threads()
        self.notify = notify
        self.clock = clock
        self.faster = faster
        self.usual = inf  # seconds of a step with what was chosen
        self.again = inf  # when other numbers are tried once more
        self.searching = False  # in the warm-up, or by the steps of an image
        self.best = self.most  # of the search
        self.tried: dict[int, float] = {}  # mean seconds of a step, by count
        self.taken: list[float] = []  # seconds of the steps of a trial
        self.spent = 0.0  # seconds of all trials of the search

    def fit(self, step: Callable[[], object]) -> None:
        """Trials in the warm-up, whose results are discarded."""
        self.begin()
        while self.searching:
            self.note(self.timed(step)[0], WARM_UP_TRIAL_S, "in the warm-up")

    def __call__(self, step: Callable[[], Tensor]) -> Tensor:
        took, found = self.timed(step)
        self.note(took, DRAWING_TRIAL_S, "while drawing")
        return found

    def with_threads(self) -> AbstractContextManager[None]:
        return threads_set(self.count)

    def timed(self, step: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds that a step takes, and what it returns."""
        began = self.clock()
        with self.with_threads():
            found = step()
        return self.clock() - began, found

    def note(self, took: float, enough: float, when: str) -> None:
        """A step took so long: go on with a search where a trial is complete, or begin one if it is time to."""
        self.taken.append(took)
        total = sum(self.taken)
        if total < MAX_TRIAL_S and (len(self.taken) < TRIAL_STEPS or total < enough):
            return
        mean = total / len(self.taken)
        self.spent += total
        self.taken.clear()
        if self.searching:
            return self.answer(mean, when)
        if mean > SLOWDOWN * self.usual or self.clock() > self.again:
            self.begin()
        self.usual = min(self.usual, mean)

    def begin(self) -> None:
        """Begin a search; there is none where there is one thread."""
        self.searching = self.most > 1
        self.tried = {}
        self.spent = 0.0
        self.count = self.best = self.most

    def answer(self, took: float, when: str) -> None:
        """What a step took with the threads that are being tried: they are halved while that helps."""
        self.tried[self.count] = took
        if took < MIN_GAIN * self.tried[self.best]:
            self.best = self.count
        if self.count > 1 and took <= STOP_RATIO * self.tried[self.best]:
            self.count //= 2
            return
        if self.tried[self.best] * self.faster > self.tried[self.most]:
            self.best = self.most
        self.count = self.best
        self.searching = False
        self.usual = self.tried[self.count]
        busy = self.faster == 1 and self.busy()  # where no bits depend on the number
        wait = (BUSY_RETRY_FACTOR if busy else RETRY_FACTOR) * self.spent
        self.again = self.clock() + wait if busy or self.count < self.most else inf
        times = ", ".join(f"{1000 * s:.1f} ms with {n}" for n, s in self.tried.items())
        self.notify(self.count, f"chosen {when}, where a step took {times}")


# --------------------------------------------------------------------------------------------- fit

DTYPES = {
    "float32": "exact comparisons hold; the fastest one for small models",
    "bfloat16": "half the memory; pays for large models where the native decoder or the processor takes it",
}
LAYOUTS = {
    "native": "the layers of a pass in one call of C: least time, and rows keep their bits by construction",
    "plain": "as torch keeps it: its slow twin, for any processor, number format and graph mode",
}
COMPILED = "inductor takes no call of C"
# Bytes of a model in float32 that caches do not hold: reading them is what its steps wait for
LARGE = 256 * 2**20
# Drafts of a window: with guidance, a step over 2 or 5 fills 6 or 12 rows, which the native decoder multiplies at once.
# At LlamaGen-XL's sizes the longer one is faster with AVX512-BF16, and slower than `ar` with AVX2 or weights of 8 bits.
# With tiles the products of 32 rows cost 1.05 times those of two, of integers those of 16 rows 1.3 times: reckoned from
# products that were measured on a Xeon, as no whole step was: there windows are fastest.
# Elsewhere a chain of two drafts was the fastest lossless setting in each format, or as fast as the best window.
WINDOW = 2
TILES = "avx512_amx"
WINDOWS = {TILES: 16, "avx512_bf16": 5}
QUANTIZED_WINDOWS = {TILES: 7}


@dataclass(frozen=True)
class CPUPlan(DevicePlan):
    """The native decoder where it can be had; as many threads as are asked for, or as are fastest by the clock."""

    threads: int = 0
    halved: bool = False  # whether a float32 model keeps its matrices in float16

    def weight_bytes(self, quantize: str | None) -> float:
        return torch.float16.itemsize if self.halved else super().weight_bytes(quantize)

    def lay_out(self, modules: Sequence[nn.Module]) -> DevicePlan:
        why_plain = "asked for"
        if self.layout != "plain":
            why_plain = COMPILED if self.graphs == "compile" else native.why_unsupported(modules)
            if why_plain and self.layout == "native":
                what = words(Arg("layout", "native"), "cannot be used here")
                raise DeviceError(what, why_plain, Arg("layout", "auto"))
            if why := native.missing():
                warnings.warn(f"torch's slower form draws: {why}", stacklevel=2)
        if self.threads:
            self.note_threads(self.threads, "asked for")
        if why_plain:
            layers = (layer for module in modules for layer in module.modules())
            if any(isinstance(layer, QuantizedLinear) for layer in layers):
                why_plain += "; each product widens its quantised matrix first, which takes time"
            self.decided["layout"] = f"plain: {why_plain}"
            return replace(self, layout="plain")
        self.decided["layout"] = f"native: {native.isa()}"
        halved = native.pack_model(modules) == native.FLOAT16
        return replace(self, layout="native", keys_by_head=True, halved=halved)

    def refill(self, module: nn.Module, fresh: nn.Module) -> None:
        super().refill(module, fresh)
        if self.layout == "native":
            native.repack(module, fresh)

    def tuner(self) -> StepTuner:
        faster = 1.0 if self.layout == "native" else OTHER_BITS_GAIN
        return StepTuner() if self.threads else ThreadTuner(self.note_threads, faster=faster)

    def note_threads(self, count: int, why: str) -> None:
        self.decided["threads"] = f"{count}: {why}"


# ----------------------------------------------------------------------------------------- backend


IN_ORDER = replace(PLAIN, sample=sample_in_order, sample_distinct=sample_distinct_in_order)


def bfloat16_taken_by() -> str:
    """What takes bfloat16 no slower than float32 here: the native decoder widens it where nothing multiplies it."""
    return host.native_bfloat16() or native.isa()


class CPUBackend(Backend):
    """The processor: layers in C where they can be had, else plain torch."""

    name = "cpu"
    device = torch.device("cpu")
    dtypes = DTYPES
    graph_modes = {
        "eager": "nothing to gain from a recording: calls cost little and start at once",
        "strict": "judges whether an accelerator could record the function; as fast as eager after that",
        "compile": "inductor, with the layout plain: the first warm-up takes a minute, later ones seconds",
    }

    is_host = True
    layouts = LAYOUTS
    quantized: tuple[str, ...] = tuple(QUANTIZED)

    def available(self) -> tuple[bool, str]:
        return True, "every machine has a processor"

    def synchronize(self) -> None:
        """Nothing to wait for: calls return when they are done."""

    def drafting_defaults(self, parameters: int, quantize: str | None = None) -> DraftingDefaults:
        if parameters < LARGE_PARAMETERS:
            return DraftingDefaults("ar", WINDOW, idle_arithmetic=False)
        windows = QUANTIZED_WINDOWS if quantize else WINDOWS
        isa = native.isa()
        method = "scd" if isa == TILES else "eagle"
        return DraftingDefaults(method, windows.get(isa, WINDOW), idle_arithmetic=False)

    def best_dtype(self, parameters: int = 0) -> tuple[str, str]:
        """bfloat16 where something takes it and reading the model takes the time; a small model keeps exact figures."""
        taken_by = bfloat16_taken_by()
        size = 4 * parameters
        if not taken_by:
            return "float32", "this processor does not multiply bfloat16 natively"
        if size < LARGE:
            return "float32", f"{size / 2**20:.0f} MiB of it: a small model keeps its exact figures"
        read = f"{size / 2**30:.1f} GiB to read in each step"
        return "bfloat16", f"native here ({taken_by}), and half of {read}"

    def number_format(self, asked: str, parameters: int = 0) -> tuple[torch.dtype, str]:
        dtype, why = super().number_format(asked, parameters)
        if dtype == torch.bfloat16 and not bfloat16_taken_by():
            why += ", but this processor lacks it natively: half the memory, slower than float32"
        return dtype, why

    def own_kernels(self, dtype: torch.dtype, sizes: Sizes | None) -> Kernels:
        return native_kernels() if native.isa() else IN_ORDER

    def fit(self, config: Sizes, options: DeviceOptions) -> DevicePlan:
        found = vars(super().fit(config, options)) | {"layout": options.layout}
        if found["graphs"] == "compile" and found["kernels"] is not PLAIN:
            found["kernels"] = IN_ORDER
        return CPUPlan(**found, threads=options.threads)

    def loading(self, parameters: int) -> AbstractContextManager[None]:
        """A small model by one thread: others would only spin between its short operators."""
        return threads_set(1) if parameters < LARGE_PARAMETERS else nullcontext()

    def memory(self, reset_peak: bool = False) -> Memory:
        return Memory(host.total_bytes(), host.available_bytes(), host.peak_resident_bytes())

    def describe(self) -> dict[str, object]:
        return {
            "device": self.name,
            "processor": host.processor_name(),
            "threads": torch.get_num_threads(),
            "native_decoder": native.open_library()[1],  # the instruction set, or why there is none
            "torch": torch.__version__,
        }
