"""What each device and its software offer here, also where they are broken: the facts of `lantern-hpu doctor`.

Torch is loaded by the devices alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import BACKENDS, DEVICE_VARIABLE, device_named
from lantern_hpu.backends.hpu import env as hpu_env
from lantern_hpu.backends.hpu import errors as hpu_errors
from lantern_hpu.errors import DeviceError, LanternError, as_option, spelled

if TYPE_CHECKING:
    from lantern_hpu.backends.base import Backend

Facts = dict[str, Any]


def examine() -> Facts:
    """All devices; flags and checks come first, because asking a device loads its software."""
    # Nothing is set, and the flags are not in force, where there is no plugin to read them
    active = hpu_env.plugin_folder() is not None
    environ = os.environ if active else dict(os.environ)
    flags = attempt(lambda: asdict(hpu_env.prepare_flags(environ=environ)))
    checks = [asdict(check) for check in hpu_env.checks()]
    devices = {name: examine_device(name) for name in BACKENDS}
    return {
        "torch": hpu_env.version_of("torch"),
        "devices": devices,
        "gaudi": {"checks": checks, "flags": {"active": active, **flags}},
        "default": default_of(devices),
    }


def examine_device(name: str) -> Facts:
    """What a backend says of itself, or how it fails."""
    try:
        from lantern_hpu.backends.base import load_backend

        return ask(load_backend(name), BACKENDS[name].without)
    except Exception as error:  # of any kind: the rest must be shown
        return {"available": False, "why": "its software fails", **failure(error)}


def ask(backend: Backend, without: str) -> Facts:
    """What a backend says of itself; a part that fails is replaced by its error."""
    available, why = backend.available()
    facts: Facts = {"available": available, "why": spelled(why, as_option)}
    facts.update(dtypes=dict(backend.dtypes), graph_modes=dict(backend.graph_modes))
    if available:
        facts["memory"] = attempt(lambda: asdict(backend.memory()))
        facts["details"] = attempt(lambda: dict(backend.describe()))
        facts["kernels"] = attempt(lambda: {"built": backend.try_kernel()})
        facts["products"] = attempt(lambda: {"chosen": backend.kept_choices()})
    elif without:
        facts["hint"] = without
    return facts


def attempt(ask: Callable[[], Facts]) -> Facts:
    """The answer, or the error in its place."""
    try:
        return ask()
    except Exception as error:
        return failure(error)


def failure(error: Exception) -> Facts:
    """An error as it was, and in plain words if it is a known one."""
    if isinstance(error, LanternError):
        text = spelled(error.reason, as_option)
        return {"error": text, "meaning": None, "hint": spelled(error.hint, as_option)}
    known = hpu_errors.explain_gaudi(error)
    return {
        "error": f"{type(error).__name__}: {error}".strip(),
        "meaning": known.what if known else None,
        "hint": spelled(known.hint, as_option) if known else None,
    }


def default_of(devices: Facts) -> Facts:
    """What `auto` takes: what the environment names, else the first that is available."""
    try:
        named = device_named("auto")
    except DeviceError as error:
        return {"device": None, "why": spelled(error.what, as_option)}
    if named != "auto":
        device = named if devices[named]["available"] else None
        return {"device": device, "why": f"{DEVICE_VARIABLE} names {named}"}
    passed: list[str] = []
    for name, facts in devices.items():
        if facts["available"]:
            return {"device": name, "why": "; ".join([facts["why"], *passed])}
        passed.append(f"{name} is not available")
    return {"device": None, "why": "; ".join(passed)}
