"""Any machine's processor: the backend that keeps everything runnable anywhere."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import torch
from torch import nn

from lantern_hpu.backends.base import Backend, Memory, Pace
from lantern_hpu.backends.cpu import layouts as cpu_layouts
from lantern_hpu.backends.cpu.processor import native_bfloat16, peak_resident_bytes, processor_name
from lantern_hpu.backends.cpu.threads import ThreadPace
from lantern_hpu.errors import DeviceError


class CPUBackend(Backend):
    """Plain torch on the processor."""

    name = "cpu"
    device = torch.device("cpu")
    is_host = True
    quantized = ("int8",)
    layouts = cpu_layouts.LAYOUTS
    dtypes = {
        "float32": "exact comparisons hold; the fastest one unless bfloat16 is native and a model large",
        "bfloat16": "half the memory; pays where the processor multiplies bfloat16 natively",
    }
    graph_modes = {
        "eager": "nothing to gain from a recording: calls cost little and start at once",
        "strict": "judges whether an accelerator could record the function; as fast as eager after that",
        "compile": "inductor; warms up for a minute or more, so it pays for long runs at most",
    }
    tries_threads = True  # whether their number is left to the clock

    def available(self) -> tuple[bool, str]:
        return True, "every machine has a processor"

    def synchronize(self) -> None:
        """Nothing to wait for: calls return when they are done."""

    def memory(self) -> Memory:
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
        total = pages * os.sysconf("SC_PAGE_SIZE") if pages else None
        return Memory(total, None, peak_resident_bytes())

    def best_dtype(self, parameters: int = 0) -> tuple[str, str]:
        """bfloat16 where it is native and reading the model is what takes time; a small model keeps exact figures."""
        native, size = native_bfloat16(), 4 * parameters
        if native is None:
            return "float32", "this processor does not multiply bfloat16 natively"
        if size < cpu_layouts.LARGE:
            return "float32", f"{size / 2**20:.0f} MiB of it: a small model keeps its exact figures"
        why = f"native here ({native}), and half of {size / 2**30:.1f} GiB to read in each step"
        return "bfloat16", why

    def dtype(self, name: str = "auto", parameters: int = 0) -> torch.dtype:
        found = super().dtype(name, parameters)
        if found == torch.bfloat16 and native_bfloat16() is None:
            slow = "asked for, but this processor lacks it natively: half the memory, and slower than float32"
            self.decided["dtype"] = f"bfloat16: {slow}"
        return found

    def lay_out(
        self, modules: Sequence[nn.Module], choice: str = "auto", modes: Collection[str] = ()
    ) -> str:
        self.check_layout(choice)
        if "compile" in modes and choice in cpu_layouts.FORMS:
            why, hint = "inductor takes no matrices in a library's order", "--graphs eager"
            raise DeviceError(f"--layout {choice} cannot be compiled", why, hint)
        if "compile" in modes and choice == "auto":
            found, why = "plain", "inductor takes no others"
        else:
            found, why = cpu_layouts.lay_out(modules, choice)
        self.decided["layout"] = f"{found}: {why}"
        return found

    def weight_bytes(self, layout: str, dtype: torch.dtype) -> int:
        return cpu_layouts.HALF_BYTES if layout == "half" else dtype.itemsize

    def use_threads(self, count: int) -> None:
        super().use_threads(count)
        if count:
            self.tries_threads = False
            self.decided["threads"] = f"{count}: asked for"

    def pace(self) -> Pace:
        if not self.tries_threads:
            return Pace()

        def told(count: int, why: str) -> None:
            self.decided["threads"] = f"{count}: {why}"

        return ThreadPace(told)

    def describe(self) -> dict[str, object]:
        return {
            "device": "cpu",
            "processor": processor_name(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
