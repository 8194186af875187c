"""Any machine's processor: the backend that keeps everything runnable anywhere."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from lantern_hpu.backends import host
from lantern_hpu.backends.base import Backend, Memory
from lantern_hpu.backends.cpu.attention import attention_keeps_bits, filled_attention
from lantern_hpu.backends.cpu.dtypes import DTYPES
from lantern_hpu.backends.cpu.tuning import CPUTuning
from lantern_hpu.ops.kernels import Kernels


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

    @cached_property
    def tuning(self) -> CPUTuning:
        return CPUTuning(self.name, self.dtypes)

    def available(self) -> tuple[bool, str]:
        return True, "every machine has a processor"

    def synchronize(self) -> None:
        """Nothing to wait for: calls return when they are done."""

    def kernels(self, choice: str = "auto", dtype: torch.dtype | None = None) -> Kernels:
        plain = super().kernels(choice, dtype)
        if choice == "plain" or not attention_keeps_bits(dtype or torch.float32):
            return plain
        return replace(plain, attention=filled_attention)

    def memory(self, reset_peak: bool = False) -> Memory:
        return Memory(host.total_bytes(), host.available_bytes(), host.peak_resident_bytes())

    def describe(self) -> dict[str, object]:
        return {
            "device": self.name,
            "processor": host.processor_name(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
