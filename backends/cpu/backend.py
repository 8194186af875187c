"""Any machine's processor: the backend that keeps everything runnable anywhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from statistics import median

import torch
from torch import Tensor, nn

from lantern_hpu.backends import QUANTIZED, DeviceOptions, host
from lantern_hpu.backends.base import Backend, Fit, Memory, Pace, operator
from lantern_hpu.backends.cpu import layouts, native
from lantern_hpu.errors import DeviceError
from lantern_hpu.ops.kernels import PLAIN, Kernels, Sizes
from lantern_hpu.ops.kernels import attention as plain
from lantern_hpu.ops.sampling import sample_distinct_in_order, sample_in_order

# ----------------------------------------------------------------------------------------- threads

# How many threads a step takes on a processor: the fastest number by the clock, looked at again when steps slow down.
#
# A step opens some hundred parallel regions, and at the end of each the threads wait for one another. Where other
# programs want the same cores, a thread that must wait for its turn holds up all, hundreds of times a step: one thread
# is then many times faster than two. Arithmetic does not tell when that is so; a clock does.
#
# Threads can change the last bit of a float: a product that is cut into fewer rows a thread is summed in another order.
# The same seed is to be the same image, so a number of threads that rounds otherwise than the process's own has to be
# several times faster to be taken: on idle cores it is not.

OTHER_BITS = 3.0  # times faster than all threads, to be taken although it rounds otherwise
LESS = 0.85  # of the time with more threads, to take fewer: short trials are off by a tenth
WORSE = 1.1  # times the best: past it, still fewer threads are not tried
TIMES = 5  # steps of a trial in the warm-up
ENOUGH = 0.25  # seconds of one: it need not be longer
SLOW = 2.5  # times what a step took when the threads were chosen: they are chosen anew
LAST = 3  # steps whose median is looked at
PATIENCE = 100  # more threads are tried again after so many times what trying took

Search = Generator[int, float, tuple[int, float]]


def search(most: int) -> Search:
    """Halve the threads while that helps. Yields counts, each of which is sent the seconds of a step with it.

    Returns the best count, and its seconds.
    """
    best, least = most, (yield most)
    count = most // 2
    while count:
        took = yield count
        if took < LESS * least:
            best, least = count, took
        elif took > WORSE * least:
            break
        count //= 2
    return best, least


def median_seconds(step: Callable[[], object], clock: Callable[[], float]) -> float:
    taken: list[float] = []
    while len(taken) < TIMES and sum(taken) < ENOUGH:
        began = clock()
        step()
        taken.append(clock() - began)
    return median(taken)


class ThreadPace(Pace):
    """Chooses the threads of one engine's steps, also within an image.

    Attributes:
        most: threads that the process may use; they are what is tried first. count: those of a step.
        unlike: counts that round otherwise than `most`.
    """

    def __init__(
        self,
        notify: Callable[[int, str], None] = lambda count, why: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            notify: is given what was chosen and why, each time.
        """
        self.most = self.count = torch.get_num_threads()
        self.notify, self.clock = notify, clock
        self.unlike = set[int]()
        self.usual = inf  # seconds of a step with what was chosen
        self.last = deque[float](maxlen=LAST)  # seconds of steps
        self.search: Search | None = None  # under way, by the steps of an image
        self.tried: dict[int, float] = {}  # seconds of a step, by count
        self.again = inf  # when more threads are tried once more

    def fit(self, step: Callable[[], object], bits: Callable[[], object]) -> None:
        """Trials in the warm-up, whose results are discarded."""
        self.begin()
        want: object = None
        while self.search is not None:
            with self.held():
                took, found = median_seconds(step, self.clock), bits()
            if self.count == self.most:
                want = found
            elif found != want:
                self.unlike.add(self.count)
            self.answer(took, "in the warm-up")

    def __call__(self, step: Callable[[], Tensor]) -> Tensor:
        if self.most == 1:
            return step()
        began = self.clock()
        with self.held():
            found = step()
        self.note(self.clock() - began)
        return found

    @contextmanager
    def held(self) -> Iterator[None]:
        before = torch.get_num_threads()
        if before == self.count:
            yield
            return
        torch.set_num_threads(self.count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def note(self, took: float) -> None:
        """A step of an image took so long: go on with a search, or begin one if it is time to."""
        if self.search is not None:
            self.answer(took, "while drawing")
            return
        self.last.append(took)
        lately = median(self.last) if len(self.last) == LAST else self.usual
        if lately > SLOW * self.usual or (self.count < self.most and self.clock() > self.again):
            self.begin()
        self.usual = min(self.usual, lately)

    def begin(self) -> None:
        """Begin a search; there is none where there is one thread."""
        if self.most > 1:
            self.search, self.tried = search(self.most), {}
            self.count = next(self.search)

    def answer(self, took: float, when: str) -> None:
        """What a step took with the threads that are being tried."""
        assert self.search is not None
        self.tried[self.count] = took
        try:
            self.count = self.search.send(took * (OTHER_BITS if self.count in self.unlike else 1))
        except StopIteration as done:
            count, _ = done.value
            self.usual = self.tried[count]
            self.again = self.clock() + PATIENCE * sum(self.tried.values())
            self.count, self.search = count, None
            self.last.clear()
            times = ", ".join(f"{1000 * s:.1f} ms with {n}" for n, s in self.tried.items())
            self.notify(count, f"chosen {when}, where a step took {times}" + self.caution(count))

    def caution(self, count: int) -> str:
        """What is to be said of the bits of a choice."""
        if count in self.unlike:
            return f"; it rounds otherwise than {self.most}"
        passed = [str(n) for n in self.tried if n in self.unlike]
        return f"; {', '.join(passed)} would round otherwise" if passed else ""


# ------------------------------------------------------------------------------------------ dtypes

DTYPES = {
    "float32": "exact comparisons hold; the fastest one unless bfloat16 is native and a model large",
    "bfloat16": "half the memory; pays where the processor multiplies bfloat16 natively",
}


# --------------------------------------------------------------------------------------- attention

# Attention of one token a row, on a processor: cache positions that no row attends to are not read.
#
# With one query a row in float32, sums run over the positions in turn, and a masked one adds an exact zero: what is
# left out changes no bit. With several queries it does, as the library cuts longer sums otherwise, and in caches whose
# size is no multiple of four, where the library has no whole vectors. Those take the plain form.
#
# In 16 bits the library is slow for one query a row: it takes three times as long as for two. So keys and values that
# are read are brought to float32 and multiplied there, which rounds less.

STEP = 16  # positions read are rounded up to a multiple of it: a vector of any number format
VECTOR = 4  # sizes of a cache that the library goes through in whole vectors are multiples of it
CAPACITIES = (192, 448, 1152)  # positions that the form is tried with


def float32_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`plain` in float32, whatever the dtype: q [R, h, T, hd] -> [R, h, T, hd]."""
    return plain(q.float(), k.float(), v.float(), mask.float()).to(q.dtype)


def filled_positions(mask: Tensor) -> int:
    """How many of the positions of a mask [R, 1, T, S] are to be read; all of them if none is attended to."""
    attended = (mask > torch.finfo(mask.dtype).min).flatten(0, -2).any(0).nonzero()  # [n, 1]
    size = mask.shape[-1]
    return min(size, -(-(int(attended[-1]) + 1) // STEP) * STEP) if len(attended) else size


@operator(
    "attention_filled(Tensor q, Tensor k, Tensor v, Tensor mask) -> Tensor",
    lambda q, k, v, mask: torch.empty_like(q),
)
def attention_filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """An operator because how much is read depends on data, which captures and compilers cannot follow."""
    end = filled_positions(mask)
    return float32_attention(q, k[:, :, :end], v[:, :, :end], mask[..., :end]).contiguous()


def filled_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [R, h, T, hd], k and v [R, kv, S, hd], additive mask [R, 1, T, S] -> [R, h, T, hd]."""
    if q.shape[2] > 1 or torch.is_grad_enabled():
        return plain(q, k, v, mask)
    if k.shape[2] % VECTOR:
        return float32_attention(q, k, v, mask)
    result: Tensor = attention_filled(q, k, v, mask)
    return result


def masked_from(lengths: Tensor, capacity: int, dtype: torch.dtype) -> Tensor:
    """An additive mask of rows that are filled to these lengths [R, 1, T, 1]: [R, 1, T, S]."""
    hidden = torch.arange(capacity) >= lengths
    return hidden.to(dtype) * torch.finfo(dtype).min


@torch.no_grad()
def attention_keeps_bits(dtype: torch.dtype) -> bool:
    """Whether what is left out changes no bit here, in caches of several sizes filled to several lengths."""
    random = torch.Generator().manual_seed(0)
    for capacity in CAPACITIES:
        k, v = (torch.randn(2, capacity, 4, 64, generator=random).to(dtype) for _ in range(2))
        q = torch.randn(2, 4, 1, 64, generator=random).to(dtype)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        for length in range(7, capacity, capacity // 5):
            lengths = torch.tensor([length, length // 2 + 1])[:, None, None, None]
            mask = masked_from(lengths, capacity, dtype)
            if not torch.equal(filled_attention(q, k, v, mask), float32_attention(q, k, v, mask)):
                return False
    return True


def by_positions(x: Tensor) -> Tensor:
    """The same [R, kv, S, hd], which in memory is [R, S, kv, hd]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@cache
@torch.no_grad()
def order_keeps_bits(dtype: torch.dtype) -> bool:
    """Whether attention has the same bits here with a cache by head as with one by position."""
    random = torch.Generator().manual_seed(0)
    for capacity in CAPACITIES:
        k, v = (torch.randn(2, 4, capacity, 64, generator=random).to(dtype) for _ in range(2))
        for places in (1, 8, 17):
            q = torch.randn(2, 4, places, 64, generator=random).to(dtype)
            ends = torch.tensor([capacity // 3, capacity // 2])[:, None, None, None]
            mask = masked_from(ends + torch.arange(places)[:, None], capacity, dtype)
            if not torch.equal(
                plain(q, k, v, mask), plain(q, by_positions(k), by_positions(v), mask)
            ):
                return False
    return True


# --------------------------------------------------------------------------------------------- fit


@dataclass
class CPUFit(Fit):
    """Matrices packed where that is faster; unless some are asked for, as many threads as are fastest by the clock."""

    threads: int = 0

    @property
    def weight_bytes(self) -> int:
        return layouts.HALF_BYTES if self.layout == "half" else self.dtype.itemsize

    def lay_out(self, modules: Sequence[nn.Module]) -> None:
        if self.layout == "native":
            why = native.pack_model(modules)
        elif self.graphs == "compile" and self.layout == "auto":
            self.layout, why = "plain", "inductor takes no others"
        else:
            plans = layouts.Plans(self.note_rows) if self.invariant else None
            self.layout, why = layouts.lay_out(modules, self.layout, plans)
        self.decided["layout"] = f"{self.layout}: {why}"

    def note_rows(self, text: str) -> None:
        self.decided["invariant"] = f"on: {text}"

    def pace(self) -> Pace:
        return Pace() if self.threads else ThreadPace(self.note_threads)

    def note_threads(self, count: int, why: str) -> None:
        self.decided["threads"] = f"{count}: {why}"


# ----------------------------------------------------------------------------------------- backend


class CPUBackend(Backend):
    """Plain torch on the processor."""

    name = "cpu"
    device = torch.device("cpu")
    dtypes = DTYPES
    graph_modes = {
        "eager": "nothing to gain from a recording: calls cost little and start at once",
        "strict": "judges whether an accelerator could record the function; as fast as eager after that",
        "compile": "inductor; the first warm-up takes a minute, later ones seconds: for long runs of windows",
    }

    layouts = layouts.LAYOUTS
    quantized = QUANTIZED

    def available(self) -> tuple[bool, str]:
        return True, "every machine has a processor"

    def synchronize(self) -> None:
        """Nothing to wait for: calls return when they are done."""

    def best_dtype(self, parameters: int = 0) -> tuple[str, str]:
        """bfloat16 where it is native and reading the model is what takes time; a small model keeps exact figures."""
        native, size = host.native_bfloat16(), 4 * parameters
        if native is None:
            return "float32", "this processor does not multiply bfloat16 natively"
        if size < layouts.LARGE:
            why = f"{size / 2**20:.0f} MiB of it: a small model keeps its exact figures"
            return "float32", why
        why = f"native here ({native}), and half of {size / 2**30:.1f} GiB to read in each step"
        return "bfloat16", why

    def number_format(self, asked: str, parameters: int = 0) -> tuple[torch.dtype, str]:
        dtype, why = super().number_format(asked, parameters)
        if dtype == torch.bfloat16 and host.native_bfloat16() is None:
            why += (
                ", but this processor lacks it natively: half the memory, and slower than float32"
            )
        return dtype, why

    def kernels(self, choice: str = "auto", dtype: torch.dtype | None = None) -> Kernels:
        if choice == "plain":
            return PLAIN
        own = replace(PLAIN, sample=sample_in_order, sample_distinct=sample_distinct_in_order)
        filled = attention_keeps_bits(dtype or torch.float32)
        return replace(own, attention=filled_attention) if filled else own

    def fit(self, config: Sizes, options: DeviceOptions) -> Fit:
        fit = CPUFit(**vars(super().fit(config, options)), threads=options.threads)
        compiled, asked = fit.graphs == "compile", options.invariant == "on"
        if compiled and options.layout in ("native", *layouts.FORMS):
            why, hint = "inductor takes no matrices in a library's order", "--graphs eager"
            raise DeviceError(f"--layout {options.layout} cannot be compiled", why, hint)
        fit.layout, fit.invariant = options.layout, asked and not compiled
        why = "what inductor makes of a step is not tried" if asked else "not asked for"
        fit.decided["invariant"] = "on" if fit.invariant else f"off: {why}"
        if fit.invariant:
            fit.kernels = layouts.independent(fit.kernels, config, fit.dtype)
        if fit.threads:
            fit.note_threads(fit.threads, "asked for")
        # In float32 windows lose by it, and one token a row gains nothing
        by_head = fit.dtype == torch.bfloat16 and order_keeps_bits(fit.dtype)
        fit.keys_by_head = by_head or options.layout == "native"
        return fit

    def memory(self, reset_peak: bool = False) -> Memory:
        return Memory(host.total_bytes(), host.available_bytes(), host.peak_resident_bytes())

    def describe(self) -> dict[str, object]:
        return {
            "device": self.name,
            "processor": host.processor_name(),
            "threads": torch.get_num_threads(),
            "native_decoder": native.open_library()[1],
            "torch": torch.__version__,
        }
