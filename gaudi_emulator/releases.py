"""What holds for one release of the bridge and not for the other, beyond what a program must know. Needs no torch."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = "habana_frameworks"  # the vendor's Python package
PLUGIN = "habana-torch-plugin"  # and the distribution that has it
LAZY_MODE = "PT_HPU_LAZY_MODE"


class EmulatorError(ValueError):
    """What was asked for cannot be: what is wrong, why, and what to try."""

    def __init__(self, what: str, why: str = "", hint: str = "") -> None:
        self.what, self.why, self.hint = what, why, hint
        reason = f"{what}: {why}" if why else what
        super().__init__(f"{reason}\n  try: {hint}" if hint else reason)


@dataclass(frozen=True, eq=False)
class Release:
    """One release, of `releases.json`; compared by identity.

    Attributes:
    name: major and minor number.
        source: what was read of it.
        autoloads: whether `import torch` loads the plugin, unless PT_HPU_LAZY_MODE=1 or PT_HPU_AUTOLOAD=0.
        lazy_by_default: what an unset PT_HPU_LAZY_MODE means.
        graphs_always_named: whether the HPU graph interface exists outside lazy mode, where its use raises.
        key_has_dtype: whether `wrap_in_hpu_graph` tells number formats apart.
        missing_metric: the error of a local metric of an unknown name; the global one is None.
        sort_limit: elements beyond which a stable sort falls back, as it does along dimension 0; None: never.
        fallback_checks: operators with a check of their arguments that can send them to the CPU.
        unreduced: reductions that do not take the number formats `unreduced_formats`.
        eager_operators: registered in C++ outside lazy mode (habana_eager/ops), so that its list lacks them.
        chains_corrupt: whether compile mode keeps only the first of several index_copy_ on one tensor.
        partial_index_rank: the most dimensions of a result that compile mode takes by an index with None.
        backend_options: of hpu_backend (dynamo/compile_backend/config.py); it refuses others.
    """

    name: str
    source: str
    autoloads: bool
    lazy_by_default: bool
    graphs_always_named: bool
    key_has_dtype: bool
    missing_metric: str
    sort_limit: int | None
    fallback_checks: tuple[str, ...]
    unreduced: tuple[str, ...]
    unreduced_formats: tuple[str, ...]
    eager_operators: tuple[str, ...]
    chains_corrupt: bool
    partial_index_rank: int
    backend_options: tuple[str, ...]

    def __str__(self) -> str:
        return f"bridge {self.name}"


def table(file: str) -> Any:
    return json.loads(Path(__file__).with_name(f"{file}.json").read_text(encoding="utf-8"))


NAMES: dict[str, Any] = table("names")
RELEASES = {row["name"]: Release(**row) for row in table("releases")}
DEFAULT = RELEASES["1.24"]


def listed(what: str) -> list[str]:
    """Names that the bridge has for something (HabanaAI/gaudi-pytorch-bridge, Apache-2.0; names only)."""
    found: list[str] = NAMES[what]
    return found


def operators(what: str) -> frozenset[str]:
    """Operators that have something in common."""
    return frozenset(listed(f"operators_{what}"))


def version_number(version: str | None) -> tuple[int, int] | None:
    """(major, minor) of a version, None if it has none."""
    found = re.match(r"\D*(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def release_named(name: str) -> Release:
    """Of a version, such as `--bridge 1.22`.

    Raises:
        EmulatorError: it is no version.
    """
    if version_number(name) is None:
        hint = f"one of {', '.join(RELEASES)}; another version takes the nearest one's contract"
        raise EmulatorError(f"--bridge is {name!r}", "it is a release of Gaudi's software", hint)
    return nearest_release(name)


@cache
def nearest_release(version: str) -> Release:
    """The release whose contract a version has; one that was not read is warned of once a process."""
    asked = version_number(version)
    if asked is None:
        return DEFAULT

    def apart(release: Release) -> int:
        major, minor = version_number(release.name) or asked
        return abs(100 * (major - asked[0]) + minor - asked[1])

    found = min(RELEASES.values(), key=apart)
    if version_number(found.name) != asked:
        why = "was not read; the contract of"
        warnings.warn(f"bridge {asked[0]}.{asked[1]} {why} {found.name} is used", stacklevel=2)
    return found


def plugin_version() -> str:
    """Of the vendor's distribution on the path; empty if there is none."""
    try:
        return metadata.version(PLUGIN)
    except metadata.PackageNotFoundError:
        return ""


def current_release() -> Release:
    """The release whose distribution is on the path."""
    return nearest_release(plugin_version())
