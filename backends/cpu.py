"""Any machine's processor: the backend that keeps everything runnable anywhere."""

from __future__ import annotations

import os
import platform
import sys

import torch

from lantern_hpu.backends.base import Backend, Memory


class CPUBackend(Backend):
    """Plain torch on the processor."""

    name = "cpu"
    device = torch.device("cpu")
    is_host = True
    quantized = ("int8",)
    dtypes = {
        "float32": "exact comparisons hold, and single tokens are not faster in bfloat16",
        "bfloat16": "half the memory; pays where the processor multiplies bfloat16 natively",
    }
    graph_modes = {
        "eager": "nothing to gain from a recording: calls cost little and start at once",
        "strict": "judges whether an accelerator could record the function; as fast as eager after that",
        "compile": "inductor; warms up for a minute or more, so it pays for long runs at most",
    }

    def available(self) -> tuple[bool, str]:
        return True, "every machine has a processor"

    def synchronize(self) -> None:
        """Nothing to wait for: calls return when they are done."""

    def memory(self) -> Memory:
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
        total = pages * os.sysconf("SC_PAGE_SIZE") if pages else None
        return Memory(total, None, peak_resident_bytes())

    def describe(self) -> dict[str, object]:
        return {
            "device": "cpu",
            "processor": processor_name(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }


def peak_resident_bytes() -> int | None:
    """Most memory this process has held, or None where the platform does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def processor_name() -> str:
    """The processor's model name."""
    try:
        with open("/proc/cpuinfo") as lines:
            found = next((line for line in lines if line.startswith("model name")), "")
        return found.partition(":")[2].strip() or platform.processor()
    except OSError:
        return platform.processor() or platform.machine()
