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
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from lantern_hpu.errors import OptionError

VARIABLE = (
    "LANTERN_HPU_BRIDGE"  # the release that the emulator stands in for; subprocesses inherit it
)


@dataclass(frozen=True)
class FlagSetting:
    """A flag of Gaudi's software.

    Attributes:
        value: that we set. why: the reason. otherwise: what another value does.
    """

    name: str
    value: str
    why: str
    otherwise: str


@dataclass(frozen=True, eq=False)
class Release:
    """One release; compared by identity.

    Attributes:
        name: major and minor number. source: what was read of it.
        lazy_by_default: what an unset PT_HPU_LAZY_MODE means.
        autoloads: whether `import torch` loads the plugin, unless PT_HPU_LAZY_MODE=1 or PT_HPU_AUTOLOAD=0.
        graphs_always_named: whether the HPU graph interface exists outside lazy mode, where its use raises.
        key_has_dtype: whether `wrap_in_hpu_graph` tells number formats apart.
        missing_metric: the error of a local metric of an unknown name; the global one is None.
        sort_limit: elements beyond which a stable sort falls back, as it does along dimension 0; None: never.
        fallback_checks: operators with a check of their arguments that can send them to the CPU.
        chains_corrupt: whether compile mode keeps only the first of several index_copy_ on one tensor.
        partial_index_rank: the most dimensions of a result that compile mode takes by an index with None.
        state_flags: what keeps state right outside lazy mode.
        unknown_options: of hpu_backend that the other release has and this one refuses.
        checks_flags: whether a value that a flag does not take ends the process while the plugin is loaded.
    """

    name: str
    source: str
    lazy_by_default: bool
    autoloads: bool
    graphs_always_named: bool
    key_has_dtype: bool
    missing_metric: str
    sort_limit: int | None
    fallback_checks: frozenset[str]
    chains_corrupt: bool
    partial_index_rank: int
    state_flags: tuple[FlagSetting, ...]
    unknown_options: frozenset[str]
    checks_flags: bool

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
            missing_metric="MetricNotFound",
            sort_limit=37,
            fallback_checks=frozenset(
                "embedding binary_cross_entropy_with_logits unique_dim where index_select index_reduce div".split()
            ),
            chains_corrupt=True,
            partial_index_rank=-1,
            state_flags=(
                FlagSetting(
                    "PT_HPU_USE_INPLACE_INDEX_COPY",
                    "0",
                    "a pass of the compiler keeps only the first of several index_copy_ on one tensor",
                    "1 writes caches in place, right only while a compiled step writes each once",
                ),
            ),
            unknown_options=frozenset(
                "dump_graph_repro joint_graph_constant_folding use_generic_reinplacer enable_synapse_input_reuse "
                "fallback_dynamic_to_eager enable_flex_attention enable_compile_debug_nan_checks "
                "enable_bwd_graph_input_reuse enable_waittensor_graph_split".split()
            ),
            checks_flags=False,
        ),
        Release(
            name="1.24",
            source="HabanaAI/gaudi-pytorch-bridge at bcc5172c479e",
            lazy_by_default=False,
            autoloads=True,
            graphs_always_named=True,
            key_has_dtype=True,
            missing_metric="MetricNotFoundError",
            sort_limit=None,
            fallback_checks=frozenset("embedding where index_select".split()),
            chains_corrupt=False,
            partial_index_rank=4,
            state_flags=(
                FlagSetting(
                    "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE",
                    "0",
                    "memory that is reused between compiled parts has overwritten state (vllm-gaudi 1753)",
                    "1 saves memory, and a step that is cut in parts may read overwritten state",
                ),
            ),
            unknown_options=frozenset({"use_graph_freezing"}),
            checks_flags=True,
        ),
    )
}
DEFAULT = RELEASES["1.24"]


def version_number(version: str | None) -> tuple[int, int] | None:
    """(major, minor) of a version, None if it has none."""
    found = re.match(r"\D*(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


@cache
def nearest_release(version: str) -> Release:
    """The release that a version is held to; a version that was not read is warned of once a process."""
    asked = version_number(version)
    if asked is None:
        return DEFAULT

    def apart(release: Release) -> int:
        major, minor = version_number(release.name) or asked
        return abs(100 * (major - asked[0]) + minor - asked[1])

    found = min(RELEASES.values(), key=apart)
    if version_number(found.name) != asked:
        warnings.warn(
            f"bridge {asked[0]}.{asked[1]} was not read; the contract of {found.name} is used",
            stacklevel=2,
        )
    return found


def choose_release(name: str | None) -> None:
    """Let the emulator of this process and of those that it starts be of a release.

    Raises:
        OptionError: that is no version.
    """
    if name is not None:
        os.environ[VARIABLE] = release_named("--bridge", name).name


def release_named(setting: str, name: str) -> Release:
    """
    Raises:
        OptionError: that is no version.
    """
    if version_number(name) is None:
        hint = f"one of {', '.join(RELEASES)}; another version takes the nearest one's contract"
        raise OptionError(f"{setting} is {name!r}", "it is a release of Gaudi's software", hint)
    return nearest_release(name)


# Flags that take 0, 1, true and false alone (scripts/env_flags.yaml). All names with these beginnings are booleans.
BOOLEAN = re.compile(
    r"PT_(HPU_)?ENABLE_\w+|PT_COMPILE_ONLY_MODE|PT_USE_MARKSTEP|PT_RECIPE_CACHE_(IGNORE_VERSION|DUMP_DEBUG)|PT_HPU_("
    r"INFERENCE_MODE|GPU_MIGRATION|USE_JIT_FORK|MATMUL3D_2D_RESHAPE|DISABLE_HPUGRAPH_REPLAY_HASHCHECK|"
    r"FORCE_INDEX_PUT_FRONTEND_FALLBACK|PGM_ENABLE_CACHE|PRINT_DEVICE_CONFIG|DISALLOW_TORCH_COMPILE|"
    r"USE_FUSE_SDPA_PASS|COMPILE_DEBUG_NAN_ASSERTS|HUGE_PAGES_POPULATE|USE_PHILOX_NORMAL|"
    r"OVERRIDE_LINEAR_MATMUL_EAGER|WRAP_RANDOM_OPS_COMPILE|LAZY_COLLECTIVES_HOLD_TENSORS|EAGER_COLLECTIVE_SYNC)"
)
# Those of the compiler, which reads them in Python (dynamo/compile_backend/config.py) and takes more words
COMPILER = re.compile(
    r"PT_HPU_(USE_(EAGER_FALLBACK|INPLACE_INDEX_COPY|INPLACE_COLLECTIVE|INFERENCE_COMPILER|CPP_PARTITIONER)|"
    r"KEEP_INPUT_MUTATIONS|COMPILE_(USE_RECIPES|VERBOSE))"
)
WORDS = ("0", "1", "true", "false")
MORE_WORDS = (*WORDS, "on", "off", "yes", "no", "y", "n", "t", "f")
CACHE_FORM = re.compile(
    r"""\s*([^\s,<>|?*"]*)\s*(,\s*(true|false)\s*,\s*\d+(\s*,\s*(true|false))?)?\s*""",
    re.IGNORECASE,
)
UNSAFE = re.compile(r"""[\s"'\\<>|&;$%*?\[\]{}^~`]""")


def fatal_flag(release: Release, name: str, value: str) -> str | None:
    """Why a flag's value ends the process while the plugin is loaded; None if it does not.

    From backend/synapse_helpers/env_flags_impl.cpp and scripts/env_flags.yaml of 1.24.
    """
    if not release.checks_flags or not value:
        return None  # an empty value counts as none
    if name == "PT_HPU_LAZY_MODE" and value not in ("0", "1"):
        return "it takes 0 or 1 alone"
    if BOOLEAN.fullmatch(name) and value.lower() not in WORDS:
        return f"it takes {', '.join(WORDS)} alone"
    if COMPILER.fullmatch(name) and value.lower() not in MORE_WORDS:
        return f"it takes {', '.join(MORE_WORDS)} alone"
    if name == "PT_HPU_RECIPE_CACHE_CONFIG":
        form = CACHE_FORM.fullmatch(value)
        return (
            "its form is PATH[,true|false,MB[,true|false]]"
            if form is None
            else unfit_cache(form[1])
        )
    return None


def unfit_cache(folder: str) -> str | None:
    """Why a folder cannot keep recipes; None if it can. One that is not there yet is made by the bridge."""
    if UNSAFE.search(folder):
        return f"{folder} has characters that are refused in a path"
    path = Path(folder)
    if path.is_symlink():
        return f"{folder} is a symbolic link"
    if folder and path.exists() and not path.is_dir():
        return f"{folder} is no directory"
    known = next((place for place in (path, *path.parents) if place.exists()), path)
    return None if not folder or os.access(known, os.W_OK) else f"{known} is not writable"


def emulated() -> Release:
    """The release that the emulator stands in for: 1.24, unless `choose_release` or the variable says otherwise.

    Raises:
        OptionError: the variable holds no version.
    """
    return release_named(VARIABLE, os.environ.get(VARIABLE) or DEFAULT.name)
