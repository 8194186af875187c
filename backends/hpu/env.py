"""Gaudi's environment: which flags must be set before its software is imported, and what of it is here.

Gaudi reads its flags while `habana_frameworks` is imported, which `import torch` may do by itself, and the default of
the most important one differs between releases. So `prepare_flags` sets them all explicitly, before either is imported.
This module imports neither.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from lantern_hpu.errors import DeviceError, OutputError, choices
from lantern_hpu.files import own_cache

# Two states of the bridge are public and were read: 1.19 (HabanaAI/gaudi-pytorch-bridge, tag v1.19.0) and the 1.24
# generation (the same repository at bcc5172c479e). Any other release is held to the nearer one of them, and so are
# patch releases: 1.24.2, the newest (PyTorch 2.13, by vllm-gaudi's notes of 0.30.0), whose changes are not public.


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
    """What holds for one release of the bridge and not for the other; compared by identity.

    Attributes:
        name: major and minor number.
        autoloads: whether `import torch` loads the plugin, unless PT_HPU_LAZY_MODE=1 or PT_HPU_AUTOLOAD=0.
        checks_flags: whether a value that a flag does not take ends the process while the plugin is loaded.
        state_flags: what keeps state right outside lazy mode.
    """

    name: str
    autoloads: bool
    checks_flags: bool
    state_flags: tuple[FlagSetting, ...]

    def __str__(self) -> str:
        return f"bridge {self.name}"


INPUT_REUSE = FlagSetting(
    "PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE",
    "0",
    "memory that is reused between compiled parts has overwritten state (vllm-gaudi 1753)",
    "1 saves memory, and a step that is cut in parts may read overwritten state",
)
RELEASES = {
    "1.19": Release("1.19", autoloads=False, checks_flags=False, state_flags=()),
    "1.24": Release("1.24", autoloads=True, checks_flags=True, state_flags=(INPUT_REUSE,)),
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


# Names with these beginnings are booleans (scripts/env_flags.yaml)
BOOLEAN = ("PT_ENABLE_", "PT_HPU_ENABLE_")
WORDS = ("0", "1", "true", "false")
CACHE_FORM = re.compile(
    r"""\s*([^\s,<>|?*"]*)\s*(,\s*(true|false)\s*,\s*\d+(\s*,\s*(true|false))?)?\s*""",
    re.IGNORECASE,
)
UNSAFE = set(" \t\n\"'\\<>|&;$%*?[]{}^~`")


def fatal_flag(release: Release, name: str, value: str) -> str | None:
    """Why a flag's value ends the process while the plugin is loaded; None if it does not.

    From backend/synapse_helpers/env_flags_impl.cpp of 1.24; of its booleans those that most flags are.
    """
    if name == LOGS:
        return unfit_logs(value)
    if not release.checks_flags or not value:
        return None  # an empty value counts as none
    if name == "PT_HPU_LAZY_MODE" and value not in ("0", "1"):
        return "it takes 0 or 1 alone"
    if name.startswith(BOOLEAN) and value.lower() not in WORDS:
        return f"it takes {', '.join(WORDS)} alone"
    if name != "PT_HPU_RECIPE_CACHE_CONFIG":
        return None
    form = CACHE_FORM.fullmatch(value)
    return unfit_cache(form[1]) if form else "its form is PATH[,true|false,MB[,true|false]]"


def unfit_cache(folder: str) -> str | None:
    """Why a folder cannot keep recipes; None if it can. One that is not there yet is made by the bridge."""
    if UNSAFE & set(folder):
        return f"{folder} has characters that are refused in a path"
    path = Path(folder)
    if path.is_symlink():
        return f"{folder} is a symbolic link"
    if folder and path.exists() and not path.is_dir():
        return f"{folder} is not a directory"
    known = next((place for place in (path, *path.parents) if place.exists()), path)
    return None if not folder or os.access(known, os.W_OK) else f"{known} is not writable"


def unfit_logs(folder: str) -> str | None:
    """Why the runtime cannot write its logs into a folder, which ends the process (SIGABRT); None if it can.

    One that is not there yet is made by it.
    """
    path = Path(folder or DEFAULT_LOGS)
    known = next(place for place in (path, *path.absolute().parents) if place.exists())
    closed = [file for file in (known, *path.glob("*.log")) if not os.access(file, os.W_OK)]
    return f"{closed[0]} is not writable" if closed else None


def log_folder() -> str | None:
    """A folder of the cache for the runtime's logs; None where that is not ours to write."""
    with suppress(OutputError):
        folder = str(own_cache("logs"))
        return folder if unfit_logs(folder) is None else None
    return None


# Whether a graph mode needs lazy mode. HPU graphs exist in lazy mode alone, the compiler in the other alone.
LAZY = {
    "hpu_graph": True,
    "hpu_graph_split": True,
    "compile": False,
    "compile_layers": False,
    "eager": False,
}

ROOT = "habana_frameworks"  # Gaudi's Python package
PLUGIN = "habana-torch-plugin"  # and the distribution that has it
LAZY_MODE = "PT_HPU_LAZY_MODE"
RECIPE_CACHE = "PT_HPU_RECIPE_CACHE_CONFIG"
LOGS = "HABANA_LOGS"
PREFIXES = ("PT_", "HABANA_")
MARK = "LANTERN_HPU_FLAGS"  # what `prepare_flags` set, as JSON: not to be taken for the user's

# Where things are on a machine with a Gaudi.
DEV = Path("/dev")
DRIVER = Path("/sys/module/habanalabs/version")
MOUNTS = Path("/proc/self/mounts")
DEFAULT_LOGS = Path("/var/log/habana_logs")
SMI = "hl-smi"
VISIBLE = ("HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES", "HLS_MODULE_ID")
SMI_SECONDS = 5.0
IDLE_MIB = 2048  # an idle card reports several hundred MiB of its own
NETWORK_DISKS = {"nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "gpfs", "ceph", "beegfs", "afs"}


@dataclass(frozen=True)
class Flags:
    """The flags in force.

    Attributes:
        lazy: whether operations are collected into graphs (HPU graphs), or run one by one or compiled.
        why: why this mode.
        chosen: what we set.
        respected: what the user had set; left as it is.
        release: of the bridge.
        settings: all that we would set, with the reasons, whether or not the user set some of it.
    """

    lazy: bool
    why: str
    chosen: dict[str, str]
    respected: dict[str, str]
    release: str
    settings: tuple[FlagSetting, ...] = ()


@dataclass(frozen=True)
class Check:
    """One thing that is known without importing torch."""

    name: str
    ok: bool
    detail: str


def prepare_flags(mode: str = "auto", environ: MutableMapping[str, str] | None = None) -> Flags:
    """Decide between lazy mode and the other, and set the flags that the user has not set.

    Call it before torch is imported. Calling it again is harmless.
    """
    env = os.environ if environ is None else environ
    release = release_of()
    mine = _ours(env)
    user = {n: v for n, v in env.items() if n.startswith(PREFIXES) and n not in mine}
    for name, value in user.items():
        if wrong := fatal_flag(release, name, value):
            what = f"{name}={value} would end Gaudi's software when it is loaded"
            raise DeviceError(what, f"{release}: {wrong}", f"unset {name}, or give it such a value")
    lazy, why = _decide(mode, user.get(LAZY_MODE))
    settings = tuple(_wanted(lazy, env, release))
    running = _running_lazy()
    if running is not None:
        if mode == "auto" and LAZY_MODE not in user:
            lazy, why = running, f"habana_frameworks is already loaded in {_name(running)}"
        if lazy != running:
            raise DeviceError(
                f"{LAZY_MODE}={lazy:d} comes too late",
                f"habana_frameworks is already loaded in {_name(running)}, and reads it when loaded"
                + (" (from 1.24 on `import torch` loads it)" if release.autoloads else ""),
                f"{LAZY_MODE}={lazy:d} in the shell, or use lantern_hpu before importing torch",
            )
        return Flags(lazy, why, mine, user, release.name, settings)
    chosen = {flag.name: flag.value for flag in settings if flag.name not in user}
    for name in mine:
        del env[name]
    env.update(chosen)
    env[MARK] = json.dumps(chosen)
    return Flags(lazy, why, chosen, user, release.name, settings)


def release_of() -> Release:
    """That of the plugin; where its version is unknown, the newest that was read."""
    loaded = getattr(sys.modules.get(f"{ROOT}.torch.version"), "__version__", None)
    return nearest_release(loaded or version_of(PLUGIN) or DEFAULT.name)


def _ours(env: Mapping[str, str]) -> dict[str, str]:
    """Flags that an earlier call set, also in a parent process, unchanged since then."""
    marked: dict[str, str] = json.loads(env.get(MARK, "{}"))
    return {name: value for name, value in marked.items() if env.get(name) == value}


def _decide(mode: str, flag: str | None) -> tuple[bool, str]:
    """(lazy or not, why); `flag` is the user's own."""
    if mode != "auto":
        if mode not in LAZY:
            hint = choices(["auto", *LAZY], mode)
            raise DeviceError(f"Gaudi has no graph mode {mode!r}", hint=hint)
        lazy = LAZY[mode]
        if flag is not None and (flag != "0") != lazy:
            others = " or ".join(name for name, needs in LAZY.items() if needs != lazy)
            raise DeviceError(
                f"graph mode {mode!r} needs {LAZY_MODE}={lazy:d}",
                f"the environment says {LAZY_MODE}={flag}",
                f"unset {LAZY_MODE}, or graph mode {others}",
            )
        return lazy, f"graph mode {mode!r} was asked for"
    if flag is not None:
        return flag != "0", f"{LAZY_MODE}={flag} was set already"
    torch = version_of("torch")
    if fits_any_torch():
        return True, "HPU graphs need lazy mode"
    if not is_fork(torch):
        return False, f"torch {torch} is not Gaudi's own build (+git, +hpu): no lazy mode"
    if missing := missing_library(torch, lazy=True):
        return False, f"the plugin lacks {missing}, which lazy mode needs"
    return True, f"torch {torch} is Gaudi's own build, which lazy mode and its HPU graphs need"


def _running_lazy() -> bool | None:
    """The mode that Gaudi's software was loaded in, as it reports; None if it is not loaded.

    The flag may have been changed or left unset since, and its default is not the same in all releases.
    """
    if f"{ROOT}.torch.hpu" not in sys.modules:
        return None
    return bool(import_module(f"{ROOT}.torch.utils.internal").is_lazy())


def _name(lazy: bool) -> str:
    return "lazy mode" if lazy else "eager and compile mode"


def _wanted(lazy: bool, env: Mapping[str, str], release: Release) -> Iterator[FlagSetting]:
    """All flags that we would set."""
    needs = "HPU graphs need lazy mode" if lazy else "eager and compile mode are outside lazy mode"
    modes = " and ".join(name for name, lazily in LAZY.items() if lazily != lazy)
    yield FlagSetting(LAZY_MODE, str(int(lazy)), needs, f"{1 - lazy} gives graph modes {modes}")
    yield FlagSetting(
        "PT_HPU_WEIGHT_SHARING",
        "0",
        "it wraps parameters, and these models share none",
        "1 wraps them, which nothing here was checked with",
    )
    yield FlagSetting(
        "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES",
        "0",
        "every shape is fixed",
        "1 may compile recipes for ranges of shapes, which no step needs",
    )
    folder, _ = recipe_folder(env)
    if folder is not None:
        kept = "compiled recipes are kept for the next run"
        yield FlagSetting(RECIPE_CACHE, folder, kept, "empty compiles at each start")
    logs = log_folder()
    if logs is not None:
        writes = "the runtime writes its logs there, and ends the process where it cannot"
        yield FlagSetting(LOGS, logs, writes, f"without it they go to {DEFAULT_LOGS}")
    processes = env.get("WORLD_SIZE") or env.get("OMPI_COMM_WORLD_SIZE") or "1"
    if lazy and processes != "1":  # started together, by torchrun or by MPI
        several = "HPU graphs on several cards need it"
        off = "false ends a capture at the first collective"
        yield FlagSetting("PT_HPU_ENABLE_LAZY_COLLECTIVES", "true", several, off)
    if not lazy:
        yield from release.state_flags


def recipe_folder(env: Mapping[str, str]) -> tuple[str | None, str]:
    """Where compiled recipes are kept between runs, or None, and why.

    One folder for all processes of a machine: the first that needs a recipe compiles it and the others read it. That
    rests on file locks, so a network disk will not do. Recipes carry the versions they were made with.

    The flag holds the bare path: the longer forms (three fields, later four) are each refused by some release, this
    one by none. It means that nothing is deleted at the start and that 1024 MB are kept.
    """
    base = env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.realpath(os.path.join(base, "lantern_hpu", "recipes"))
    if not re.fullmatch(r"[\w./-]+", folder, re.ASCII):
        return None, f"{folder} has characters that Gaudi refuses in a path"
    disk = _disk_type(folder)
    if disk in NETWORK_DISKS or disk.startswith("fuse"):
        return None, f"{folder} is on a network disk ({disk}), where file locks do not hold"
    why = unfit_cache(folder)
    return (folder, folder) if why is None else (None, why)


def _disk_type(folder: str) -> str:
    """The type of the file system that a path is or would be on; empty where the system does not tell."""
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    mounts = [line.split()[1:3] for line in reversed(lines)]  # the last one covers those before it
    around = [mount for mount in mounts if f"{folder}/".startswith(mount[0].rstrip("/") + "/")]
    return max(around, key=lambda mount: len(mount[0]), default=("", ""))[1]


def without_home(value: str) -> str:
    """A flag's value for reports, which others read: a path of the user's begins with `~`."""
    home = f"{Path.home()}{os.sep}"
    return f"~{os.sep}{value.removeprefix(home)}" if value.startswith(home) else value


def version_of(distribution: str) -> str | None:
    """The version of a distribution, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def is_fork(torch: str | None) -> bool:
    """Whether a version of torch is Gaudi's own build."""
    return (torch or "").partition("+")[2].startswith(("git", "hpu"))


def plugin_folder() -> Path | None:
    """Where Gaudi's package for torch is, without importing it."""
    try:
        spec = find_spec(ROOT)
    except (ImportError, ValueError):  # something in sys.modules that only has the name
        return None
    for place in (spec and spec.submodule_search_locations) or ():
        if (Path(place) / "torch").is_dir():
            return Path(place) / "torch"
    return None


def fits_any_torch() -> bool:
    """Whether the plugin says so itself: one without libraries that were built for a torch."""
    folder = plugin_folder()
    return folder is not None and read_line(folder / "required_version.txt") == "any"


def missing_library(torch: str | None, lazy: bool) -> str | None:
    """The library that the plugin needs for a version of torch in a mode, if it lacks it."""
    folder = plugin_folder()
    kind = "" if is_fork(torch) else ".upstream"
    name = f"lib/libhabana_pytorch{'' if lazy else '2'}_plugin{kind}.so"
    return name if folder is not None and not (folder / name).exists() else None


def unfit_plugin(lazy: bool) -> str | None:
    """Why the plugin cannot be loaded with the torch that is installed; None if it can, or is not here."""
    torch = version_of("torch") or ""
    if plugin_folder() is None or fits_any_torch():
        return None
    if not is_fork(torch):
        if "cpu" not in torch.partition("+")[2]:
            return f"torch {torch} is neither Gaudi's own build nor a +cpu build"
        if lazy:
            return f"torch {torch} is a stock build, and lazy mode needs Gaudi's own"
    missing = missing_library(torch, lazy)
    return missing and f"the plugin lacks {missing}, which torch {torch} needs in {_name(lazy)}"


def read_line(file: Path) -> str | None:
    """A small text file, or None."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return None


# -------------------------------------------------------------------------------------- inspection

Finding = tuple[bool, str]  # whether it is as it should be, and what was found


def checks() -> list[Check]:
    """Everything that is known without importing torch."""
    return [Check(name, *find()) for name, find in CHECKS.items()]


def find_plugin() -> Finding:
    folder = plugin_folder()
    version = version_of(PLUGIN)
    if folder is None:
        return False, "habana_frameworks is not installed (Gaudi's images have it)"
    return True, f"habana-torch-plugin {version or 'of unknown version'} in {folder}"


def find_torch() -> Finding:
    """Whether torch is the one that the plugin was built for; pip likes to replace it."""
    torch = version_of("torch")
    folder = plugin_folder()
    if torch is None:
        return False, "torch is not installed"
    if folder is None or fits_any_torch():
        return True, f"{torch}, {'' if is_fork(torch) else 'not '}Gaudi's own build"
    built_for = read_line(folder / "required_version.txt") or torch
    of_one_kind = is_fork(built_for) == is_fork(torch)
    fits = of_one_kind and version_number(built_for) == version_number(torch)
    unfit = {"HPU graphs": unfit_plugin(True), "compile and eager": unfit_plugin(False)}
    lacking = [modes for modes, why in unfit.items() if why]
    if not fits or len(lacking) == 2:
        why = unfit["compile and eager"] if fits else f"the plugin was built for {built_for}"
        fix = "reinstall Gaudi's own, or start from a fresh image"
        return False, f"REPLACED: {torch} is not what came with Gaudi ({why}): {fix}"
    if not lacking:
        return True, f"{torch}, Gaudi's own build: every graph mode"
    if is_fork(torch):
        return False, f"{torch}: no {lacking[0]}, {unfit[lacking[0]]}"
    return True, f"{torch}, a stock build: compile and eager, and no HPU graphs"


def find_nodes() -> Finding:
    """Whether this user may open the cards' device nodes; the vendor's own examples run as root."""
    folder = DEV / "accel"
    nodes = sorted([*folder.glob("accel[0-9]*"), *DEV.glob("hl[0-9]*")])
    closed = [node for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
        closed = [folder]
    if closed:
        remedy = f"docker run --group-add {closed[0].stat().st_gid}"
        which = ", ".join(map(str, closed))
        return False, f"no permission to use {which}: {remedy} gives it, or run as root"
    if not nodes:
        return False, f"none in {DEV} (a container needs the runtime habana)"
    return True, ", ".join(map(str, nodes))


def find_driver() -> Finding:
    """Whether it is of the plugin's release; another patch release is noted."""
    driver = read_line(DRIVER)
    plugin = version_of(PLUGIN)
    if driver is None:
        return False, "habanalabs is not loaded"
    if plugin and version_number(plugin) != version_number(driver):
        why = f"habanalabs {driver} does not match the plugin's release {plugin}"
        return False, f"{why}: use an image of the driver's release"
    ours, theirs = (re.match(r"\D*(\d+\.\d+\.\d+)", text or "") for text in (plugin, driver))
    note = ""
    if ours and theirs and ours[1] != theirs[1]:
        note = f", of another patch release than the plugin's {ours[1]}: an image of the driver's is safer"
    return True, f"habanalabs {driver}{note}"


def find_visible() -> Finding:
    """What the container and the process may see."""
    given = [f"{name}={os.environ[name]}" for name in VISIBLE if name in os.environ]
    return True, ", ".join(given) or "not restricted"


def find_cards() -> Finding:
    """Cards and which are taken, as far as `hl-smi` tells."""
    program = shutil.which(SMI)
    if program is None:
        return False, f"{SMI} is not on PATH"
    query = [program, "-Q", "module_id,memory.used", "-f", "csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{SMI} gave no answer: {error}"
    visible = os.environ.get("HABANA_VISIBLE_MODULES", "all").replace(" ", "").split(",")
    rows = re.findall(r"^\s*(\d+)\s*,\s*(\d+)", done.stdout, re.MULTILINE)
    used = {int(card): int(mib) for card, mib in rows if visible == ["all"] or card in visible}
    if not used:
        said = (done.stderr or done.stdout).strip().splitlines()
        return False, f"{SMI} lists none" + (f": {said[0]}" if said else "")
    taken = [card for card, mib in used.items() if mib > IDLE_MIB]
    if len(taken) == len(used):
        return False, f"all {len(used)} look taken (by their memory)"
    which = f" (modules {', '.join(map(str, taken))} look taken)" if taken else ""
    return True, f"{len(used)}, {len(used) - len(taken)} free{which}"


def find_recipes() -> Finding:
    """Where compiled graphs are kept between runs."""
    given = os.environ.get(RECIPE_CACHE)
    if given is not None and RECIPE_CACHE not in _ours(os.environ):
        wrong = fatal_flag(release_of(), RECIPE_CACHE, given)
        return wrong is None, f"{RECIPE_CACHE}={given}" + (f": {wrong}" if wrong else "")
    folder, why = recipe_folder(os.environ)
    if folder is None:
        return False, f"off: {why} (set {RECIPE_CACHE} to a local folder)"
    return True, folder


def find_logs() -> Finding:
    """Whether the runtime can write its logs."""
    folder = os.environ.get(LOGS) or log_folder() or str(DEFAULT_LOGS)
    wrong = unfit_logs(folder)
    if wrong:
        return False, f"{wrong}, which ends the process (set {LOGS} to a folder that is)"
    return True, folder


# What the doctor prints of a Gaudi, in this order
CHECKS = {
    "plugin": find_plugin,
    "torch": find_torch,
    "device nodes": find_nodes,
    "driver": find_driver,
    "visible cards": find_visible,
    "cards": find_cards,
    "recipe cache": find_recipes,
    "logs": find_logs,
}
