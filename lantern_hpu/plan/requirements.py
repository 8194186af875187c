"""What drawing with a model takes on a device: which model, which device, and the table of both."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import BACKENDS, get_backend, prepare
from lantern_hpu.decode.memory import (
    DeviceMemory,
    Setup,
    engine_bytes,
    largest_phase,
    phases,
    summed,
    text_weights,
    weights,
)
from lantern_hpu.decode.spec import capacity, rounded_up
from lantern_hpu.errors import DeviceError, OptionError, choices, require
from lantern_hpu.files import amount
from lantern_hpu.methods.setting import AUTO, ResolveContext, Setting
from lantern_hpu.methods.setting import resolve as resolve_setting
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.models.files.names import CONFIG, Given, Parts, given_path, read_config, with_text
from lantern_hpu.zoo.find import find_parts, locate_model
from lantern_hpu.zoo.registry import get

if TYPE_CHECKING:
    from lantern_hpu.backends.base import Backend


@dataclass(frozen=True)
class Counted:
    """A model to count, whether its drafter is loaded where nothing is drafted, and whether it usually draws guided."""

    config: ModelConfig
    loads_drafter: bool = True
    guided: bool = True


def find_model(name: str, given: Given) -> Counted:
    """What there is to count of a known model, the embedded one, a folder or a weights file."""
    if name == "builtin" or os.path.exists(given_path(name)) or given != Given():
        return Counted(planned_config(find_parts(name, given)))
    entry = get(name, "a folder or a weights file")
    guided = entry.sampling["cfg_scale"] != 1
    return Counted(entry.config, locate_model(entry).get("drafter") is not None, guided)


def planned_config(parts: Parts) -> ModelConfig:
    """Of local files; a folder of ours describes itself, for all else checkpoints are opened."""
    if (parts.target / CONFIG).is_file() and parts.vq is None and parts.drafter is None:
        return with_text(read_config(parts.target)[1], parts.text)
    from lantern_hpu.models.files.load import open_model  # loads torch

    return open_model(parts).config


# ------------------------------------------------------------------------------------ devices


def parse_memory(text: str) -> int:
    """Bytes of `24GB`, `96 GiB`, `500MB`."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt])(i?)b?\s*", text.lower())
    if match is None or not float(match[1]):
        why = "not an amount of memory with its unit"
        raise OptionError(f"the device's memory is {text!r}", why, "24GB or 96GiB")
    power = " kmgt".index(match[2])
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def find_device(device: str, memory: str | None, parameters: int) -> DeviceMemory:
    """A device by name, to run a model of so many parameters; `NAME:24GB` says how much it has, else it is asked, which
    loads torch."""
    name, _, amount = device.partition(":")
    text = memory or amount
    given = parse_memory(text) if text else None
    if given and name not in BACKENDS:
        return DeviceMemory(given, "as given")
    prepare(name)
    if given:
        return described(BACKENDS[name].load(), given, "as given", parameters)
    try:
        backend = get_backend(name)
        result, where = backend.memory().total, f"device {backend.name}"
        where += " does not tell its memory" * (result is None)
        return described(backend, result, where, parameters)
    except DeviceError as error:
        if name not in BACKENDS:
            raise
        why = f"no {name} device can be asked here ({error.why})"
        return described(BACKENDS[name].load(), None, why, parameters)


def described(backend: Backend, memory: int | None, where: str, parameters: int) -> DeviceMemory:
    best, _ = backend.best_dtype(parameters)
    return DeviceMemory(
        memory,
        where,
        best,
        backend.quantized,
        is_host=backend.is_host,
        drafting=backend.drafting_defaults(parameters),
        shares_pool=backend.shares_pool,
    )


def setup_of(
    model: Counted,
    device: DeviceMemory,
    dtype: str,
    method: str | None,
    tree: str | None,
    **how: Any,
) -> Setup:
    """What the options mean for a model on a device; `how` is the rest that `Setup` has, such as `batch_size`."""
    if how["quantize"] not in (None, *device.quantized):
        hint = choices(device.quantized) if device.quantized else "--dtype bfloat16"
        raise DeviceError(f"this device does not offer {how['quantize']!r} weights", hint=hint)
    target = model.config.target
    context = ResolveContext(
        target.codes,
        target.tokens,
        has_drafter=model.config.drafter is not None,
        defaults=device.drafting,
        images=how["batch_size"],
    )
    setting = resolve_setting(Setting.of(method or AUTO, tree=tree), context)
    # The published residual looks one neighbour further; a code has one neighbour less than there are codes.
    k = setting.relaxation.k
    most = min(rounded_up(k + 1), target.codes - 1) if setting.relaxation.lends else 0
    return Setup(
        dtype=device.dtype if dtype == "auto" else dtype,
        tree=setting.tree,
        neighbours=most,
        is_host=device.is_host,
        loads_drafter=model.loads_drafter,
        **how,
    )


def plan_report(name: str, model: ModelConfig, setup: Setup) -> str:
    """The table of the phase that needs most, with its total and those of the others."""
    phase, rows = largest_phase(model, setup)
    guided = "with guidance" if setup.guidance else "without guidance"
    images = f"{setup.batch_size} image{'s' * (setup.batch_size > 1)} at a time"
    positions = capacity(model.target, setup.tree)
    dtype = f"{setup.dtype}, {setup.quantize} blocks" if setup.quantize else setup.dtype
    head = (
        f"{name}, {dtype}, {images}, {guided}, tree {setup.tree.name}, {positions} positions a row"
    )
    sums = [(f"total while {phase}", summed(rows))]
    sums += [(f"(while {p}", summed(r)) for p, r in phases(model, setup).items() if p != phase]
    width = max(len(label) for label, _ in rows + sums)
    lines = [f"  {label:<{width}}  {amount(count):>9}" for label, count in rows + sums]
    lines = [line + ")" * line.startswith("  (") for line in lines]
    if model.lacks_text:
        lines.append("  the text encoder is not here and not counted: --text-encoder FOLDER")
    return "\n".join([head, *lines])


def facts(model: ModelConfig, setup: Setup, device: DeviceMemory) -> dict[str, Any]:
    """What the report says, for programs; `fits` is None where that is unknown."""
    phase, rows = largest_phase(model, setup)
    need, memory, unknown = summed(rows), device.memory, model.lacks_text
    fits = None if memory is None or (unknown and need <= memory) else need <= memory
    return {
        "phase": phase,
        "bytes": dict(rows),
        "total": need,
        "phases": {name: summed(result) for name, result in phases(model, setup).items()},
        "not_counted": ["text encoder weights"] if unknown else [],
        "memory": memory,
        "memory_from": device.where,
        "fits": fits,
    }


def serve_report(
    name: str,
    model: Counted,
    device: DeviceMemory,
    setup: Setup,
    methods: Sequence[str],
    slots: int,
) -> list[str]:
    """What a server needs, and what would fit: each method has an engine of all slots and one of a single slot."""
    require(1 <= slots <= 256, "slots", slots, "1 to 256")
    how = {"guidance": setup.guidance, "quantize": setup.quantize, "keep_text": setup.keep_text}

    def need(methods: Sequence[str], slots: int) -> int:
        engines = {
            (each.tree, size): (model.config, each)
            for size in (1, slots)
            for method in methods
            for each in [setup_of(model, device, setup.dtype, method, None, batch_size=size, **how)]
        }
        text = text_weights(model.config, setup) if setup.text_stays else []
        alone = summed(weights(model.config, setup) + text)
        return alone + sum(
            engine_bytes([*engines.values()], not device.is_host, device.shares_pool)
        )

    memory, whole = device.memory, need(methods, slots)
    lines = [f"{name}, {', '.join(methods)} served with {slots} slots: {amount(whole)}"]
    if memory is None:
        return [*lines, device.where, "  try: --memory 24GB says whether it fits"]
    where = f"{amount(memory)} ({device.where})"
    if whole <= memory:
        return [*lines, f"fits in {where}, {amount(memory - whole)} left"]
    fewer = [methods[:n] for n in range(len(methods) - 1, 0, -1)]
    changes: list[list[tuple[str, Sequence[str], int]]] = [
        [(f"--slots {n}", methods, n) for n in range(slots - 1, 0, -1)],
        [(f"--methods {','.join(some)}", some, slots) for some in fewer],
    ]
    fitting = [next((c for c in tried if need(c[1], c[2]) <= memory), None) for tried in changes]
    said = [f"  {c[0]}: {amount(need(c[1], c[2]))}, fits" for c in fitting if c]
    lines.append(f"does not fit in {where}: {amount(whole - memory)} too much")
    return [*lines, *(said or ["  neither fewer slots nor fewer methods make it fit"])]
