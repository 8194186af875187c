"""What each device can do: one folder a device; and how a model is to run there, as options.

Importing this package loads neither torch nor a driver.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from lantern_hpu.errors import DeviceError, OptionError, choices, option

if __name__ == "backends":
    raise ImportError("import lantern_hpu.backends, not backends: the same module would load twice")

if TYPE_CHECKING:
    from lantern_hpu.backends.base import Backend

# Best first
BACKENDS = {
    "hpu": "lantern_hpu.backends.hpu.backend:HPUBackend",
    "cuda": "lantern_hpu.backends.cuda.backend:CUDABackend",
    "cpu": "lantern_hpu.backends.cpu.backend:CPUBackend",
}


# What a cluster calls one card of a device; a processor is counted in cores
CARDS = {"hpu": "HPU", "cuda": "GPU"}
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}  # of a number
QUANTIZED = ("int8",)  # smaller formats for the target's weights
HOST = "cpu"  # the processor itself
LARGE_PARAMETERS = 10**8  # of a target whose steps take a processor long
DEVICE_VARIABLE = "LANTERN_HPU_DEVICE"  # the variable that names the device which `auto` is
# Kernels that a device has forms of its own of; `candidates.py` gives them
OWN_KERNELS = {
    "hpu": ("attention", "rms_norm", "rotate"),
    "cuda": (
        *("attention", "rms_norm", "rotate", "swiglu", "rotate_into"),
        *("probs", "sample", "sample_distinct", "walk"),
    ),
}
GAUDI = "hpu"  # whose bridge has facts that `verify` asks
# How to run a device's code without one
WITHOUT = {GAUDI: f"--device {GAUDI} --emulate, which runs its code on the processor"}


# Where a text encoder stays once prompts are encoded; `auto`: on the host, but a server's on the device if it fits
KEEP_TEXT = ("auto", "device", "host", "free")
LAYOUTS = "native (one call of C a pass), plain (torch), or auto: native where it can be had"


@dataclass(frozen=True)
class DeviceOptions:
    """Where and how a model runs; the arguments of `LanternPipeline.from_pretrained`."""

    device: str = option("auto", "auto")
    dtype: str = option(
        "auto",
        "number format of the weights: auto, bfloat16, float16, float32, as the device supports",
    )
    graphs: str = option("auto", "auto")
    kernels: str = option("auto", "auto: the device's fused ones; plain: torch's")
    keep_text: str = option(
        "auto", f"where to keep the text encoder after encoding the prompts: {', '.join(KEEP_TEXT)}"
    )
    quantize: str | None = option(None, "quantize the weights of the target model", metavar="int8")
    layout: str = option("auto", f"of the matrices: {LAYOUTS}")
    threads: int = option(0, "CPU threads; 0 selects the fastest number", metavar="N")

    def __post_init__(self) -> None:
        allowed = {"kernels": ("auto", "plain"), "keep_text": KEEP_TEXT}
        for name, values in allowed.items():
            asked, written = getattr(self, name), name.replace("_", "-")
            if asked not in values:
                raise OptionError(f"--{written} is {asked!r}", hint=choices(values, asked))


# Packages without which a device cannot be here, so that `auto` need not ask it
PACKAGES = {"hpu": "habana_frameworks"}


def installed(name: str) -> bool:
    """Whether what a device needs is there: a package, which is not imported, or a torch that was built for it."""
    if name == "cuda":
        import torch

        return torch.version.cuda is not None
    try:
        return name not in PACKAGES or find_spec(PACKAGES[name]) is not None
    except (ImportError, ValueError):  # a program has put something of that name in its place
        return True


def device_named(name: str) -> str:
    """The name of a device, which is `auto` only where the environment names none.

    Raises:
        DeviceError: the environment names an unknown one.
    """
    named = os.environ.get(DEVICE_VARIABLE, "")
    if name != "auto" or named in ("", "auto"):
        return name
    if named not in BACKENDS:
        raise DeviceError(
            f"{DEVICE_VARIABLE} names the unknown device {named!r}", hint=choices(BACKENDS)
        )
    return named


def prepare(name: str, graphs: str = "auto") -> None:
    """What must happen before torch is imported: Gaudi's flags are read then.

    Raises:
        DeviceError: the environment contradicts the graph mode.
    """
    name = device_named(name)
    if name not in ("auto", "hpu") or not installed("hpu"):
        return
    from lantern_hpu.backends.hpu import env as hpu_env

    if hpu_env.plugin_folder() is not None:
        hpu_env.prepare_flags(graphs if name == "hpu" or graphs in hpu_env.LAZY else "auto")


def card_of(name: str, offered: Mapping[str, float]) -> str:
    """What one worker of a cluster takes: the cluster's own name of a card, or `CPU`.

    Args:
        name: of a device; `auto` takes what `LANTERN_HPU_DEVICE` names, else the best that the cluster offers.
        offered: what the cluster has in all, by its names.

    Raises:
        DeviceError: it has no card of that device.
    """
    name = device_named(name)
    if name == "auto":
        return next((card for card in CARDS.values() if offered.get(card, 0) >= 1), "CPU")
    card = CARDS.get(name, "CPU")
    if offered.get(card, 0) < 1:
        why, hint = f"it offers {', '.join(sorted(offered))}", "ray start --resources"
        raise DeviceError(f"the cluster has no {card}", why, hint)
    return card


class DraftingDefaults(NamedTuple):
    """How a device drafts where nothing was tuned, measured with the model, or asked for."""

    method: str = "eagle"  # that `auto` takes; without its drafter a window
    window: int = 16  # drafts of a window
    idle_arithmetic: bool = True  # whether a step over dozens of drafts takes few times one of `ar`


ACCELERATOR = DraftingDefaults()


def get_backend(name: str = "auto", graphs: str = "auto") -> Backend:
    """The backend of a device; `auto` takes what `LANTERN_HPU_DEVICE` names, else the first that is available.

    Args:
        graphs: the graph mode wanted, for devices that read it while they are loaded.

    Raises:
        DeviceError: unknown name, or the device cannot be used here; the reason is the backend's own.
    """
    name = device_named(name)
    if name != "auto" and name not in BACKENDS:
        raise DeviceError(f"unknown device {name!r}", hint=choices(["auto", *BACKENDS]))
    refused = []
    for candidate in filter(installed, BACKENDS) if name == "auto" else [name]:
        module, _, cls = BACKENDS[candidate].partition(":")
        backend: Backend = getattr(import_module(module), cls)(graphs)
        usable, why = backend.available()
        if usable:
            return backend
        refused.append(f"{candidate}: {why}" if name == "auto" else why)
    hint = f"--device {HOST}"  # the others may not be usable here either: the doctor asks them
    hint += f"; {WITHOUT[name]}" if name in WITHOUT else ""
    hint += "; lantern-hpu doctor says more"
    raise DeviceError(f"device {name!r} cannot be used here", "; ".join(refused), hint)
