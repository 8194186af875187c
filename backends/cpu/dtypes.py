"""Number formats on a processor, and which of them `auto` takes."""

from __future__ import annotations

from lantern_hpu.backends.cpu.layouts import LARGE
from lantern_hpu.backends.host import native_bfloat16

DTYPES = {
    "float32": "exact comparisons hold; the fastest one unless bfloat16 is native and a model large",
    "bfloat16": "half the memory; pays where the processor multiplies bfloat16 natively",
}


def best_dtype(parameters: int) -> tuple[str, str]:
    """bfloat16 where it is native and reading the model is what takes time; a small model keeps exact figures."""
    native, size = native_bfloat16(), 4 * parameters
    if native is None:
        return "float32", "this processor does not multiply bfloat16 natively"
    if size < LARGE:
        return "float32", f"{size / 2**20:.0f} MiB of it: a small model keeps its exact figures"
    return (
        "bfloat16",
        f"native here ({native}), and half of {size / 2**30:.1f} GiB to read in each step",
    )


def slow_here(name: str) -> str | None:
    """Why a format that was asked for is a poor choice on this processor."""
    if name == "bfloat16" and native_bfloat16() is None:
        return "asked for, but this processor lacks it natively: half the memory, and slower than float32"
    return None
