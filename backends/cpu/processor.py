"""What this machine's processor is and what it multiplies by itself. Needs no torch."""

from __future__ import annotations

import platform
import sys
from functools import cache

CPUINFO = "/proc/cpuinfo"
BFLOAT16 = {  # flags of processors that multiply bfloat16 natively, by what it is called
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX512-BF16",
    "bf16": "Arm's BF16",
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
    return told("model name") or platform.processor() or platform.machine()


def native_bfloat16() -> str | None:
    """What multiplies bfloat16 here, or None; where the system does not tell, nothing does."""
    flags = {*told("flags").split(), *told("Features").split()}
    return next((name for flag, name in BFLOAT16.items() if flag in flags), None)


@cache
def told(what: str) -> str:
    """A line of what the system says of its first processor; empty where it says nothing."""
    try:
        with open(CPUINFO, encoding="utf-8") as lines:
            found = next((line for line in lines if line.partition("\t")[0] == what), "")
    except OSError:
        return ""
    return found.partition(":")[2].strip()
