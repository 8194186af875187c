"""The machine itself: what its processor is, and how much memory it has. Needs no torch."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from pathlib import Path

CPUINFO = "/proc/cpuinfo"
BFLOAT16 = {  # flags of processors that multiply bfloat16 natively, by what it is called
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX512-BF16",
    "bf16": "Arm's BF16",
}
BUSY = 2  # programs a core that want to run
MEMINFO = Path("/proc/meminfo")
# A container's limit, what it uses, and what of that can be dropped: control groups of the second and the first version
GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def processor_name() -> str:
    """The processor's model name, and its number: a virtual machine's name, such as AMD EPYC, tells no generation."""
    name = cpuinfo("model name") or platform.processor() or platform.machine()
    family = cpuinfo("cpu family")
    model = cpuinfo("model")
    return f"{name} (family {family}, model {model})" if family and model else name


def native_bfloat16() -> str | None:
    """What multiplies bfloat16 here, or None; where the system does not say, nothing does."""
    flags = {*cpuinfo("flags").split(), *cpuinfo("Features").split()}
    return next((name for flag, name in BFLOAT16.items() if flag in flags), None)


@cache
def cpuinfo(key: str) -> str:
    """A field of the first processor; empty where the system has none."""
    try:
        with open(CPUINFO, encoding="utf-8") as lines:
            line = next((line for line in lines if line.partition("\t")[0] == key), "")
    except OSError:
        return ""
    return line.partition(":")[2].strip()


def is_busy() -> bool:
    """Whether so many programs want to run that waiting for one another costs threads more than they gain."""
    return load() >= BUSY * (os.cpu_count() or 1)


def load() -> float:
    """Programs that want to run, over the last minute; 0 where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return 0.0


def total_bytes() -> int | None:
    """All memory of the machine, or None where the platform does not say."""
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return pages * os.sysconf("SC_PAGE_SIZE") if pages else None


def available_bytes() -> int | None:
    """What a program can still have without swapping, within its container's limit; None where it is not known."""
    try:
        lines = MEMINFO.read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        limits = [1024 * int(line.split()[1])]
    except (OSError, StopIteration, ValueError):
        return None
    for folder, *files in GROUPS:
        left = group_bytes(Path(folder), *files)
        limits += [] if left is None else [left]
    return min(limits)


def group_bytes(folder: Path, limit: str, used: str, droppable: str) -> int | None:
    """What a control group may still take; None where it has no limit."""
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        taken = int((folder / used).read_text()) - int(stat.get(droppable, 0))
        return max(int((folder / limit).read_text()) - taken, 0)
    except (OSError, ValueError):  # no such group, or its limit is "max"
        return None


def peak_resident_bytes() -> int | None:
    """Most memory this process has held, or None where the platform does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
