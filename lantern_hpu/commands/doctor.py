"""What this machine offers: devices, versions, memory, graph modes, flags, and what is wrong.

    lantern-hpu doctor
    lantern-hpu doctor --json > doctor.json

Gaudi reads its flags while torch is imported, so they are prepared first. A device whose software is broken is shown
with its error and does not keep the others from being shown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lantern_hpu import __version__
from lantern_hpu.backends import BACKENDS, EMULATED
from lantern_hpu.backends.hpu import env as hpu_env
from lantern_hpu.backends.hpu import errors as hpu_errors
from lantern_hpu.errors import LanternError
from lantern_hpu.methods.table import METHODS
from lantern_hpu.results.tables import columns

if TYPE_CHECKING:
    from lantern_hpu.backends.base import Backend

Facts = dict[str, Any]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern-hpu doctor", description="What this machine offers, and what is wrong with it."
    )
    parser.add_argument("--json", action="store_true", help="everything, for a bug report")
    return parser


def examine() -> Facts:
    """Everything there is to say; flags and checks come first, because asking a device loads its software."""
    flags = prepare_flags()
    checks = [asdict(check) for check in hpu_env.checks()]
    devices = {name: examine_device(target) for name, target in BACKENDS.items()}
    return {
        "lantern_hpu": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": hpu_env.installed("torch"),
        "devices": devices,
        "gaudi": {"checks": checks, "flags": flags},
        "default": default_of(devices),
        "methods": {
            name: {"about": method.about, "needs_drafter": method.needs_drafter}
            for name, method in METHODS.items()
        },
    }


def prepare_flags() -> Facts:
    """The flags in force; `active` is false, and nothing is set, where there is no plugin to read them."""
    active = hpu_env.plugin_folder() is not None
    environ = os.environ if active else dict(os.environ)
    flags = attempt(lambda: asdict(hpu_env.prepare(environ=environ)))
    return {"active": active, **flags}


def examine_device(target: str) -> Facts:
    """What a backend says of itself, or how it fails."""
    module, _, cls = target.partition(":")
    try:
        with closing(getattr(import_module(module), cls)()) as backend:
            return ask(backend)
    except Exception as error:  # whatever is wrong with a device's software, the rest must be shown
        return {"available": False, "why": "its software fails", **failure(error)}


def ask(backend: Backend) -> Facts:
    """What a backend says of itself; a part that fails is replaced by its error."""
    available, why = backend.available()
    found: Facts = {"available": available, "why": why}
    found.update(dtypes=dict(backend.dtypes), graph_modes=dict(backend.graph_modes))
    if available:
        found["memory"] = attempt(lambda: asdict(backend.memory()))
        found["details"] = attempt(lambda: dict(backend.describe()))
    elif backend.name == EMULATED:
        found["hint"] = f"--device {backend.name} --emulate runs its code on the processor"
    return found


def attempt(ask: Callable[[], Facts]) -> Facts:
    """The answer, or the error in its place."""
    try:
        return ask()
    except Exception as error:
        return failure(error)


def failure(error: Exception) -> Facts:
    """An error as it was, and in plain words if it is a known one."""
    if isinstance(error, LanternError):
        text = f"{error.what}: {error.why}" if error.why else error.what
        return {"error": text, "meaning": None, "hint": error.hint}
    known = hpu_errors.explain(error)
    return {
        "error": f"{type(error).__name__}: {error}".strip(),
        "meaning": known.what if known else None,
        "hint": known.hint if known else None,
    }


def default_of(devices: Facts) -> Facts:
    """What `--device auto` takes: the first that is available."""
    passed: list[str] = []
    for name, found in devices.items():
        if found["available"]:
            return {"device": name, "why": "; ".join([found["why"], *passed])}
        passed.append(f"{name} is not available")
    return {"device": None, "why": "; ".join(passed)}


def report(facts: Facts) -> str:
    """The facts as text in short aligned sections."""
    versions = [
        ("lantern_hpu", facts["lantern_hpu"]),
        ("python", f"{facts['python']} on {facts['platform']}"),
        ("torch", facts["torch"] or "not installed"),
    ]
    parts = [table(versions)]
    for name, found in facts["devices"].items():
        state = f"available, {found['why']}" if found["available"] else "not available"
        parts.append(table(describe_device(found), f"{name}: {state}"))
    marks = {True: "ok", False: "--"}
    rows = [(c["name"], f"{marks[c['ok']]}  {c['detail']}") for c in facts["gaudi"]["checks"]]
    parts.append(table(rows, "gaudi"))
    if facts["gaudi"]["flags"]["active"]:
        parts.append(table(describe_flags(facts["gaudi"]["flags"]), "flags"))
    names = [
        (name, method["about"] + (", needs a drafter" if method["needs_drafter"] else ""))
        for name, method in facts["methods"].items()
    ]
    parts.append(table(names, "methods"))
    default = facts["default"]
    parts.append(f"default: {default['device'] or 'no device'}, because {default['why']}")
    return "\n\n".join(parts)


def table(rows: Sequence[tuple[str, str]], *head: str) -> str:
    """Two aligned columns, indented, below a line if one is given."""
    cells = []
    for name, text in rows:
        first, *more = text.split("\n")
        cells += [(f"  {name}", first), *(("", line) for line in more)]
    return "\n".join([*head, columns(cells)]).rstrip()


def describe_device(found: Facts) -> list[tuple[str, str]]:
    """Rows of one device: what it is, its memory, what it can do, best first, and what is wrong."""
    details, memory = found.get("details", {}), found.get("memory", {})
    rows = [] if found["available"] else [("why", found["why"].replace("; ", "\n"))]
    if "error" not in details:
        rows += [(name, str(value)) for name, value in details.items() if isinstance(value, str)]
    known = [f"{n / 2**30:.1f} GiB {name}" for name, n in memory.items() if isinstance(n, int)]
    rows += [("memory", ", ".join(known))] if known else []
    for key in ("dtypes", "graph_modes"):
        rows += [(key.replace("_", " "), ", ".join(found[key]))] if found.get(key) else []
    return [*rows, *problems(details), *problems(memory), *problems(found)]


def problems(found: Facts) -> Iterator[tuple[str, str]]:
    """Rows of an error, if there is one."""
    for name in ("error", "meaning", "hint"):
        if found.get(name):
            yield ("try" if name == "hint" else name, found[name])


def describe_flags(flags: Facts) -> list[tuple[str, str]]:
    """Rows of the flags: the mode and why; each that this project sets, with its reason; the user's."""
    if "error" in flags:
        return list(problems(flags))
    rows = [
        ("mode", f"{'lazy' if flags['lazy'] else 'eager and compile'}: {flags['why']}"),
        ("release", f"the contract of bridge {flags['release']}"),
    ]
    yours = dict(flags["respected"])
    for flag in flags["settings"]:
        name, value, why = flag["name"], flag["value"], flag["why"]
        given = yours.pop(name, None)
        head = f"{name}={value if given is None else given}"
        if given is None:
            rows.append(("set", f"{head}: {why} ({flag['otherwise']})"))
        elif given == value:
            rows.append(("yours", f"{head}, as it would be set: {why}"))
        else:
            rows.append(
                ("yours", f"{head}, kept; {value} would be set: {why} ({flag['otherwise']})")
            )
    return rows + [("yours", f"{name}={value}") for name, value in yours.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """The `doctor` command; the exit code is 0 whatever it finds."""
    args = make_parser().parse_args(argv)
    facts = examine()
    print(json.dumps(facts, indent=2, default=str) if args.json else report(facts))
    return 0
