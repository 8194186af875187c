"""How much memory the host still has. Needs no torch."""

from __future__ import annotations

from pathlib import Path

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


def available_bytes() -> int | None:
    """What a program can still have without swapping, within its container's limit; None where that is not told."""
    try:
        lines = MEMINFO.read_text().splitlines()
        told = next(line for line in lines if line.startswith("MemAvailable:"))
        found = [1024 * int(told.split()[1])]
    except (OSError, StopIteration, ValueError):
        return None
    for folder, *files in GROUPS:
        left = group_bytes(Path(folder), *files)
        found += [] if left is None else [left]
    return min(found)


def group_bytes(folder: Path, limit: str, used: str, droppable: str) -> int | None:
    """What a control group may still take; None where it has no limit."""
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        taken = int((folder / used).read_text()) - int(stat.get(droppable, 0))
        return max(int((folder / limit).read_text()) - taken, 0)
    except (OSError, ValueError):  # no such group, or its limit is "max"
        return None
