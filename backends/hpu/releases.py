"""Releases of Gaudi's PyTorch bridge, as data: what holds for one and not for the other. Needs no torch.

Two states of the bridge are public and were read: 1.19 (HabanaAI/gaudi-pytorch-bridge, tag v1.19.0) and the 1.24
generation (the same repository at bcc5172c479e). Any other release is held to the nearer one of them.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any

from lantern_hpu.errors import OptionError

VARIABLE = (
    "LANTERN_HPU_BRIDGE"  # the release that the emulator stands in for; subprocesses inherit it
)


@dataclass(frozen=True, eq=False)
class Release:
    """One release; compared by identity.

    Attributes:
        name: major and minor number. source: what was read of it.
        lazy_by_default: what an unset PT_HPU_LAZY_MODE means.
        autoloads: whether `import torch` loads the plugin, unless PT_HPU_LAZY_MODE=1 or PT_HPU_AUTOLOAD=0.
        graphs_always_named: whether the HPU graph interface exists outside lazy mode, where its use raises.
        key_has_dtype: whether `wrap_in_hpu_graph` tells number formats apart.
        missing_metric_raises: whether an unknown metric raises MetricNotFoundError; else it is None.
        sort_limit: elements beyond which a stable sort falls back, as it does along dimension 0; None: never.
        fallback_checks: operators with a check of their arguments that can send them to the CPU.
        chains_corrupt: whether compile mode keeps only the first of several index_copy_ on one tensor.
        state_flags: flags that compile mode needs so that state stays right, with the reason.
    """

    name: str
    source: str
    lazy_by_default: bool
    autoloads: bool
    graphs_always_named: bool
    key_has_dtype: bool
    missing_metric_raises: bool
    sort_limit: int | None
    fallback_checks: frozenset[str]
    chains_corrupt: bool
    state_flags: dict[str, tuple[str, str]]

    @cached_property
    def operators(self) -> dict[str, Any]:
        """The tables of operators and number formats: `emulator/ops_v<name>.json`."""
        folder = files("lantern_hpu.backends.hpu") / "emulator"
        table: dict[str, Any] = json.loads((folder / f"ops_v{self.name}.json").read_text("utf-8"))
        return table

    def __str__(self) -> str:
        return f"bridge {self.name}"


RELEASES = {
    release.name: release
    for release in (
        Release(
            name="1.19",
            source="HabanaAI/gaudi-pytorch-bridge, tag v1.19.0 (5a56187e)",
            lazy_by_default=True,
            autoloads=False,
            graphs_always_named=False,
            key_has_dtype=False,
            missing_metric_raises=False,
            sort_limit=37,
            fallback_checks=frozenset(
                "embedding binary_cross_entropy_with_logits unique_dim where index_select index_reduce div".split()
            ),
            chains_corrupt=True,
            state_flags={
                "PT_HPU_USE_INPLACE_INDEX_COPY": (
                    "0",
                    "a pass of the compiler keeps only the first of several index_copy_ on one tensor",
                ),
            },
        ),
        Release(
            name="1.24",
            source="HabanaAI/gaudi-pytorch-bridge at bcc5172c479e",
            lazy_by_default=False,
            autoloads=True,
            graphs_always_named=True,
            key_has_dtype=True,
            missing_metric_raises=True,
            sort_limit=None,
            fallback_checks=frozenset("embedding where index_select".split()),
            chains_corrupt=False,
            state_flags={
                "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE": (
                    "0",
                    "memory of inputs is reused between compiled parts, and vLLM lost state to it",
                ),
            },
        ),
    )
}
DEFAULT = RELEASES["1.24"]


def number(version: str | None) -> tuple[int, int] | None:
    """(major, minor) of a version, None if it has none."""
    found = re.match(r"\D*(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def nearest(version: str) -> Release:
    """The release that a version is held to; a version that was not read is warned of once."""
    asked = number(version)
    if asked is None:
        return DEFAULT
    major, minor = asked

    def apart(release: Release) -> tuple[int, int]:
        known = number(release.name) or asked
        return abs(known[0] - major), abs(known[1] - minor)

    found = min(RELEASES.values(), key=apart)
    if number(found.name) != asked:
        warnings.warn(
            f"bridge {major}.{minor} was not read; the contract of {found.name} is used",
            stacklevel=2,
        )
    return found


def choose(name: str | None) -> None:
    """Let the emulator of this process and of those that it starts be of a release.

    Raises:
        OptionError: that is no version.
    """
    if name is None:
        return
    if number(name) is None:
        hint = f"one of {', '.join(RELEASES)}; another version takes the nearest one's contract"
        raise OptionError(f"--bridge is {name!r}", "it is a release of Gaudi's software", hint)
    os.environ[VARIABLE] = nearest(name).name


def emulated() -> Release:
    """The release that the emulator stands in for: 1.24, unless `choose` or the variable says otherwise."""
    return nearest(os.environ.get(VARIABLE, DEFAULT.name))
