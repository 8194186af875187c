"""What generation with a model needs on a device: which model, which device, and how the model runs there.

`decode/memory.py` counts the bytes; the command is `commands/plan.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lantern_hpu.backends import BACKENDS, BYTES, QUANTIZED
from lantern_hpu.backends.base import get_backend, load_backend
from lantern_hpu.decode.accelerators import accelerators
from lantern_hpu.decode.memory import (
    DeviceMemory,
    Setup,
    engine_bytes,
    summed,
    text_weights,
    weights,
)
from lantern_hpu.decode.spec import Spec, rounded_up
from lantern_hpu.errors import DeviceError, OptionError, choices, require, words
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
    """A device or card by name, to run a model in this format; `memory` is asked of it unless given."""
    known = dict.fromkeys(["auto", *BACKENDS, *accelerators()])
    if device not in known:
        raise DeviceError(f"unknown device {device!r}", hint=choices(known, device))
    parameters = model.config.target.parameters
    size, where = parse_memory(memory) if memory else None, "as given"
    name, card = device, accelerators().get(device)
    if card is not None:
        name = card.device
        if card.memory and not size:
            size, where = int(card.memory), card.title
    if size and name not in BACKENDS:
        return DeviceMemory(size, where)
    try:
        backend = load_backend(name) if size else get_backend(name)
        if not size:
            size, where = backend.memory().total, f"device {backend.name}"
            where += " does not tell its memory" * (size is None)
    except DeviceError as error:
        if name not in BACKENDS:
            raise
        backend = load_backend(name)
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
        card=card or accelerators().get(backend.name),
    )


def setup_of(
    model: Counted,
    device: DeviceMemory,
    dtype: str = "auto",
    method: str = AUTO,
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
    setting = resolve_setting(Setting.parse(method), context)
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


def server_bytes(
    model: Counted, device: DeviceMemory, setup: Setup, methods: Sequence[str], slots: int
) -> int:
    """What a server needs: each method has an engine of all slots and one of a single slot."""
    require(1 <= slots <= 256, "slots", slots, "1 to 256")
    specs = {
        replace(one.spec, images=size, guidance=setup.spec.guidance)
        for size in (1, slots)
        for one in (setup_of(model, device, method=m, batch_size=size) for m in methods)
    }
    text = text_weights(model.config, setup) if setup.text_stays else []
    how = (setup.dtype, not device.is_host, device.shares_pool)
    return summed(weights(model.config, setup) + text) + sum(
        engine_bytes(model.config, [*specs], *how)
    )
