"""What a processor chooses by measurement: number format (`dtypes.py`), layout of matrices, threads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from lantern_hpu.backends.base import Pace, Tuning, dtype_name
from lantern_hpu.backends.cpu import invariance, layouts
from lantern_hpu.backends.cpu.attention import order_keeps_bits
from lantern_hpu.backends.cpu.dtypes import best_dtype, slow_here
from lantern_hpu.backends.cpu.threads import ThreadPace
from lantern_hpu.backends.dtypes import QUANTIZED
from lantern_hpu.errors import DeviceError
from lantern_hpu.ops.kernels import Kernels, Sizes


class CPUTuning(Tuning):
    """bfloat16 where it is native, matrices packed where that is faster, and as many threads as the clock says."""

    quantized = QUANTIZED
    layouts = layouts.LAYOUTS

    def __init__(self, name: str, dtypes: Mapping[str, str]) -> None:
        super().__init__(name, dtypes)
        self.tries_threads = True  # whether their number is left to the clock

    def best_dtype(self, parameters: int = 0) -> tuple[str, str]:
        return best_dtype(parameters)

    def dtype(self, name: str = "auto", parameters: int = 0) -> torch.dtype:
        dtype = super().dtype(name, parameters)
        if why := slow_here(dtype_name(dtype)):
            self.decided["dtype"] = f"{dtype_name(dtype)}: {why}"
        return dtype

    def lay_out(
        self,
        modules: Sequence[nn.Module],
        choice: str = "auto",
        modes: Collection[str] = (),
        invariant: bool = False,
    ) -> str:
        self.check_layout(choice)
        if "compile" in modes and choice in layouts.FORMS:
            why, hint = "inductor takes no matrices in a library's order", "--graphs eager"
            raise DeviceError(f"--layout {choice} cannot be compiled", why, hint)
        plans = layouts.Plans(self.note_rows) if invariant else None
        if "compile" in modes and choice == "auto":
            layout, why = "plain", "inductor takes no others"
        else:
            layout, why = layouts.lay_out(modules, choice, plans)
        self.decided["layout"] = f"{layout}: {why}"
        return layout

    def holds_rows(self, asked: bool, modes: Collection[str]) -> bool:
        self.invariant = asked and "compile" not in modes
        why = "what inductor makes of a step is not tried" if asked else "not asked for"
        self.decided["invariant"] = "on" if self.invariant else f"off: {why}"
        return self.invariant

    def independent(self, kernels: Kernels, sizes: Sizes, dtype: torch.dtype) -> Kernels:
        return invariance.independent(kernels, sizes, dtype)

    def note_rows(self, text: str) -> None:
        self.decided["invariant"] = f"on: {text}"

    def keys_by_head(self, dtype: torch.dtype) -> bool:
        """In bfloat16; in float32 windows lose by it, and one token a row gains nothing."""
        return dtype == torch.bfloat16 and order_keeps_bits(dtype)

    def weight_bytes(self, layout: str, dtype: torch.dtype) -> int:
        return layouts.HALF_BYTES if layout == "half" else dtype.itemsize

    def use_threads(self, count: int) -> None:
        super().use_threads(count)
        if count:
            self.tries_threads = False
            self.note_threads(count, "asked for")

    def pace(self) -> Pace:
        return ThreadPace(self.note_threads) if self.tries_threads else Pace()

    def note_threads(self, count: int, why: str) -> None:
        self.decided["threads"] = f"{count}: {why}"
