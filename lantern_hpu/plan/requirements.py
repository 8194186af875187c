"""What drawing with a model takes on a device: which model, which device, and how the model runs there."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from lantern_hpu.backends import BACKENDS, BYTES, QUANTIZED, get_backend
from lantern_hpu.decode.memory import (
    DeviceMemory,
    Setup,
)
from lantern_hpu.decode.spec import Spec, rounded_up
from lantern_hpu.errors import DeviceError, OptionError, choices, require, words
from lantern_hpu.files import ASSETS, reading
from lantern_hpu.methods.setting import AUTO, ResolveContext, Setting
from lantern_hpu.methods.setting import resolve as resolve_setting
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.files.names import PartOverrides, given_path
from lantern_hpu.zoo.find import Located, find_parts
from lantern_hpu.zoo.registry import get


@dataclass(frozen=True)
class Counted:
    """A model to count, whether its drafter is loaded where nothing is drafted, and whether it usually draws guided."""

    config: ModelConfig
    loads_drafter: bool = True
    guided: bool = True
    quantize: str | None = None  # the smaller format that its files have


def find_model(name: str, given: PartOverrides) -> Counted:
    """What there is to count of a known model, the embedded one, a folder or a weights file."""
    if name == "builtin" or os.path.exists(given_path(name)) or given != PartOverrides():
        opened = open_model(find_parts(name, given))
        return Counted(opened.config, quantize=opened.quantize)
    entry = get(name, "a folder or a weights file")
    guided = entry.sampling["cfg_scale"] != 1
    return Counted(entry.config, Located(entry).get("drafter") is not None, guided)


# ------------------------------------------------------------------------------------ devices


class Accelerator(NamedTuple):
    """A card of which figures are known.

    Attributes:
        device: what runs it. memory: in bytes; None: that of the machine.
        bandwidth, rate: bytes and operations a second. source: of these figures.
        measured: reports in benchmarks/results by model, whose steps were measured on it.
        large: the fastest lossless setting of LlamaGen-XL's sizes, and its speed against `ar`, of that report.
        copied: bytes a second that were measured. launch: seconds of a captured kernel besides its bytes, by a fit.
    """

    name: str
    title: str
    device: str
    memory: float | None
    bandwidth: float
    rate: float
    source: str
    measured: dict[str, str] = {}
    large: dict[str, Any] = {}
    copied: float | None = None
    launch: float | None = None


@cache
def accelerators() -> dict[str, Accelerator]:
    """The known ones by name."""
    with reading(ASSETS / "accelerators.json", "install the package again") as data:
        return {each["name"]: Accelerator(**each) for each in data["accelerators"]}


def parse_memory(text: str) -> int:
    """Bytes of `24GB`, `96 GiB`, `500MB`."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt])(i?)b?\s*", text.lower())
    if match is None or not float(match[1]):
        why = "not an amount of memory with its unit"
        raise OptionError(f"the device's memory is {text!r}", why, "24GB or 96GiB")
    power = " kmgt".index(match[2])
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def find_device(
    device: str, memory: str | None, model: Counted, quantize: str | None = None
) -> DeviceMemory:
    """A device or card by name, to run a model in this format; `NAME:24GB` says how much memory it has."""
    parameters = model.config.target.parameters
    name, _, amount = device.partition(":")
    text, where = memory or amount, "as given"
    size = parse_memory(text) if text else None
    card = accelerators().get(name)
    if card is not None:
        name = card.device
        if card.memory and not size:
            size, where = int(card.memory), card.title
    if size and name not in BACKENDS:
        return DeviceMemory(size, where)
    known = dict.fromkeys(["auto", *BACKENDS, *accelerators()])
    if name not in known:
        raise DeviceError(f"unknown device {name!r}", hint=choices(known, name))
    try:
        backend = BACKENDS[name].load() if size else get_backend(name)
        if not size:
            size, where = backend.memory().total, f"device {backend.name}"
            where += " does not tell its memory" * (size is None)
    except DeviceError as error:
        if name not in BACKENDS:
            raise
        backend = BACKENDS[name].load()
        where = words(f"no {name} device can be asked here:", error.why)
    best, _ = backend.best_dtype(parameters)
    return DeviceMemory(
        size,
        where,
        best,
        backend.quantized,
        is_host=backend.is_host,
        drafting=backend.drafting_defaults(parameters, quantize or model.quantize),
        shares_pool=backend.shares_pool,
        name=backend.name,
    )


def setup_of(
    model: Counted,
    device: DeviceMemory,
    dtype: str = "auto",
    method: str | None = None,
    tree: str | None = None,
    *,
    batch_size: int = 1,
    guidance: bool | None = None,
    quantize: str | None = None,
    keep_text: str = "host",
) -> Setup:
    """What the options mean for a model on a device; `guidance` is the model's own if it is not given."""
    require(dtype in ("auto", *BYTES), "dtype", dtype, ", ".join(BYTES))
    require(batch_size > 0, "batch_size", batch_size, "1 or more")
    require(quantize in (None, *QUANTIZED), "quantize", quantize, choices(QUANTIZED))
    quantize = quantize or model.quantize
    target = model.config.target
    context = ResolveContext(
        target.codes,
        target.tokens,
        has_drafter=model.config.drafter is not None,
        defaults=device.drafting,
        images=batch_size,
    )
    setting = resolve_setting(Setting.of(method or AUTO, tree=tree), context)
    # The published residual looks one neighbour further; a code has one neighbour less than there are codes.
    k = setting.relaxation.k
    most = min(rounded_up(k + 1), target.codes - 1) if setting.relaxation.lends else 0
    guided = model.guided if guidance is None else guidance
    return Setup(
        Spec(batch_size, guided, setting.tree, neighbours=most),
        device.dtype if dtype == "auto" else dtype,
        keep_text,
        quantize if quantize in device.quantized else None,
        device.is_host,
        model.loads_drafter,
    )
