"""What each device can do: one folder a device; and how a model is to run there, as options.

Importing this package loads neither torch nor a driver.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import NamedTuple

from lantern_hpu.errors import Arg, DeviceError, choices, require, shell
from lantern_hpu.fields import option

if __name__ == "backends":
    raise ImportError("import lantern_hpu.backends, not backends: the same module would load twice")


@dataclass(frozen=True)
class Device:
    """What is known of a device before its software is loaded.

    Attributes:
        backend: where its class is.
        card: what a cluster calls one; a processor is counted in cores.
        visible: the variable that chooses a process's card.
        package: without which it cannot be here. without: how to run its code where it is not.
        kernels: that it has forms of its own of; `Backend.candidates` gives them.
        modes: graph modes that `verify` asks. modes_apart: whether each needs a process of its own.
        stages: what it asks and in which mode, the most informative first; if not given, what it asks of every device.
    """

    backend: str
    card: str = "CPU"
    visible: str = ""
    package: str = ""
    without: str = ""
    kernels: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("auto", "compile")
    modes_apart: bool = False
    stages: tuple[tuple[str, str], ...] = ()


# Best first
BACKENDS = {
    "hpu": Device(
        "lantern_hpu.backends.hpu.backend:HPUBackend",
        card="HPU",
        visible="HABANA_VISIBLE_MODULES",
        package="habana_frameworks",
        without=shell("COMMAND", Arg("device", "hpu"), Arg("emulate", True)),
        kernels=("attention", "rms_norm", "rotate"),
        modes=("hpu_graph", "compile", "compile_layers"),
        modes_apart=True,
        # What ten minutes of a first hour should tell: whether kernels and caches are right, how fast that is, the same
        # of compile mode; then what explains a wrong answer, and what takes long
        stages=(
            *(("kernels", "hpu_graph"), ("caches", "hpu_graph"), ("bench", "hpu_graph")),
            *(("kernels", "compile"), ("caches", "compile"), ("cuts", "compile")),
            *(("caches", "compile_layers"), ("facts", "hpu_graph"), ("facts", "eager")),
            *(("methods", "hpu_graph"), ("methods", "compile"), ("distribution", "hpu_graph")),
        ),
    ),
    "cuda": Device(
        "lantern_hpu.backends.cuda.backend:CUDABackend",
        card="GPU",
        visible="CUDA_VISIBLE_DEVICES",
        kernels=(
            *("attention", "attend", "rms_norm", "add_norm", "rotate", "swiglu", "place"),
            *("probs", "sample", "sample_distinct", "walk", "traverse", "product", "commit"),
        ),
    ),
    "cpu": Device("lantern_hpu.backends.cpu.backend:CPUBackend"),
}
HOST = "cpu"  # the processor itself
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}  # of a number
# Smaller formats for the matrices of target and drafter: bytes of a number
QUANTIZED = {"int8": 1.0, "int4": 0.5 + 5 / 128}
LARGE_PARAMETERS = 10**8  # of a target whose steps take a processor long
DEVICE_VARIABLE = "LANTERN_HPU_DEVICE"  # the variable that names the device which `auto` is


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
    quantize: str | None = option(
        None,
        "keep the matrices of target and drafter in 8 or 4 bits",
        metavar="|".join(QUANTIZED),
    )
    layout: str = option("auto", f"of the matrices: {LAYOUTS}")
    threads: int = option(0, "CPU threads; 0 selects the fastest number", metavar="N")

    def __post_init__(self) -> None:
        allowed = {"kernels": ("auto", "plain"), "keep_text": KEEP_TEXT}
        for name, values in allowed.items():
            asked = getattr(self, name)
            require(asked in values, name, repr(asked), choices(values, asked))

    def on_host(self, dtype: str = "auto", graphs: str = "auto") -> DeviceOptions:
        """The same on the processor itself."""
        return replace(self, device=HOST, dtype=dtype, graphs=graphs)


def installed(name: str) -> bool:
    """Whether what a device needs is there: a package, which is not imported, or a torch that was built for it."""
    if name == "cuda":
        import torch

        return torch.version.cuda is not None
    package = BACKENDS[name].package
    try:
        return not package or find_spec(package) is not None
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
    cards = [known.card for known in BACKENDS.values()]
    if name == "auto":
        return next((card for card in cards if offered.get(card, 0) >= 1), cards[-1])
    card = BACKENDS[name].card if name in BACKENDS else cards[-1]
    if offered.get(card, 0) < 1:
        why, hint = f"it offers {', '.join(sorted(offered))}", "ray start --resources"
        raise DeviceError(f"the cluster has no {card}", why, hint)
    return card


def is_host(name: object) -> bool:
    """Whether a device that reports or metadata name is the processor itself."""
    return name == HOST


class DraftingDefaults(NamedTuple):
    """How a device drafts where nothing was tuned, measured with the model, or asked for."""

    method: str = "eagle"  # that `auto` takes; without its drafter a window
    window: int = 16  # drafts of a window
    idle_arithmetic: bool = True  # whether a step over dozens of drafts takes few times one of `ar`
    tree: str = "naive_extend_57"  # a static one


ACCELERATOR = DraftingDefaults()
