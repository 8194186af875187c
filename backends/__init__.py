"""What each device can do: one file a device. Importing this package loads neither torch nor a driver."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lantern_hpu.errors import DeviceError, choices

if __name__ == "backends":
    raise ImportError("import lantern_hpu.backends, not backends: the same module would load twice")

if TYPE_CHECKING:
    from lantern_hpu.backends.base import Backend

BACKENDS = {"cpu": "lantern_hpu.backends.cpu:CPUBackend"}


def get_backend(name: str = "auto") -> Backend:
    """The backend of a device; `auto` takes the first that is available.

    Raises:
        DeviceError: unknown name, or the device cannot be used here; the reason is the backend's own.
    """
    if name != "auto" and name not in BACKENDS:
        raise DeviceError(f"unknown device {name!r}", hint=choices(["auto", *BACKENDS]))
    refused = []
    for candidate in BACKENDS if name == "auto" else [name]:
        module, _, cls = BACKENDS[candidate].partition(":")
        backend: Backend = getattr(import_module(module), cls)()
        usable, why = backend.available()
        if usable:
            return backend
        refused.append(f"{candidate}: {why}")
    raise DeviceError(f"device {name!r} cannot be used here", "; ".join(refused), choices(BACKENDS))
