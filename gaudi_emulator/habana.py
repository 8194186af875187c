"""The modules of `habana_frameworks.torch`, of the release that the emulated card is of."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gaudi_emulator import graphs, hpex
from gaudi_emulator.device import LIMIT, Device, current
from gaudi_emulator.releases import ROOT, listed
from gaudi_emulator.scope import MODULES, NAMES, BeyondModule, meanwhile_for, names_of, short
from gaudi_emulator.streams import (
    Event,
    Stream,
    add_step_closure,
    current_stream,
    default_stream,
    is_lazy,
    iter_mark_step,
    lazy_only,
    mark_step,
    set_stream,
    stream,
    synchronize,
)
from gaudi_emulator.tensor import DEVICE, HPUTensor


def accept_anything(*args: Any, **kwargs: Any) -> None:
    """Settings that change nothing here."""


# hpu: memory


def memory_stats(device: object = None) -> dict[str, int]:
    card = current()
    return {"Limit": LIMIT, "InUse": card.in_use, "MaxInUse": card.peak}


def memory_of(name: str) -> Callable[..., int]:
    return lambda device=None: memory_stats()[name]


def reset_peak_memory_stats(device: object = None) -> None:
    current().peak = current().in_use


def mem_get_info(device: object = None) -> tuple[int, int]:
    return LIMIT - current().in_use, LIMIT


# hpu: random numbers, from a generator on the host


def manual_seed(seed: int) -> None:
    current().generator.manual_seed(seed)


def seed() -> int:
    return current().generator.seed()


def get_rng_state(device: object = "hpu") -> Tensor:
    return current().generator.get_state()


def set_rng_state(new_state: Tensor, device: object = "hpu") -> None:
    current().generator.set_state(new_state)


# hpu: metrics


class Metric:
    """A metric, counted from its last reset."""

    def __init__(self, name: str) -> None:
        card = current()
        if name not in metrics_of(card):
            why = f"Metric with given name ({name}) doesn't exist."
            raise NOT_FOUND[card.release.missing_metric](why)
        self._name = name
        self.rows = metrics_of(card)[name]
        self.reset()

    def name(self) -> str:
        return self._name

    def stats(self) -> list[tuple[str, Any]] | dict[str, Any]:
        """(key, value) pairs; callers index them by position. Of `device_memory` the largest values so far."""
        now = self.rows(current())
        if self._name == "device_memory":
            return now
        return [
            (key, value - self.base.get(key, 0) if type(value) is int else value)
            for key, value in now.items()
        ]

    def reset(self) -> None:
        self.base = self.rows(current())

    def start(self) -> None: ...

    def stop(self) -> None: ...


METRICS: dict[str, Callable[[Device], dict[str, Any]]] = {
    "graph_compilation": lambda card: {
        "TotalNumber": card.counts.recipes,
        "TotalTime": 0,
        "AvgTime": 0,
    },
    "cpu_fallback": lambda card: {
        "TotalNumber": card.counts.fallbacks.total(),
        "FallbackOps": dict(card.counts.fallbacks),
    },
}
# What a local metric of an unknown name raises; the second from 1.24 on
NOT_FOUND = {n: type(n, (Exception,), {}) for n in ("MetricNotFound", "MetricNotFoundError")}


def metrics_of(card: Device) -> dict[str, Callable[[Device], dict[str, Any]]]:
    if card.release.name == "1.19":
        return METRICS
    return METRICS | {"device_memory": lambda card: {"peak_memory": card.peak}}


def metric_global(name: str) -> Metric | None:
    """Counted from the start of the process; None for a name that is unknown (hpu/metrics/metrics.py)."""
    if name not in metrics_of(current()):
        return None
    metric = Metric(name)
    metric.base = {}
    return metric


@contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    yield Metric(name)


# internal.bridge_config


class BridgeConfig(BeyondModule):
    """A function for each flag of the bridge: `get_pt_hpu_lazy_mode()`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_"):
            return lambda: current().flags.get(name[4:].upper())
        return super().__getattr__(name)


# The tree of modules


def named(*members: Any) -> dict[str, Any]:
    """Functions and classes by their names."""
    return {member.__name__: member for member in members}


CORE = named(mark_step, iter_mark_step, add_step_closure) | dict.fromkeys(
    listed("core_settings"), accept_anything
)
GRAPHS = {
    name: getattr(graphs, name)
    for name in "HPUGraph graph CachedParams input_hash copy_to wrap_in_hpu_graph "
    "wrap_in_hpu_graph_func".split()
} | {"is_current_stream_capturing": lambda: bool(getattr(current_stream(), "is_capture", False))}
RANDOM = named(manual_seed, seed, get_rng_state, set_rng_state) | {
    "manual_seed_all": manual_seed,
    "seed_all": seed,
    "initial_seed": lambda: current().generator.initial_seed(),
    "get_rng_state_all": lambda: [get_rng_state()],
    "set_rng_state_all": lambda states: set_rng_state(states[0]),
}
MEMORY = named(memory_stats, mem_get_info, reset_peak_memory_stats) | {
    "memory_allocated": memory_of("InUse"),
    "max_memory_allocated": memory_of("MaxInUse"),
    "memory_reserved": memory_of("Limit"),
    "max_memory_reserved": memory_of("Limit"),
    "reset_accumulated_memory_stats": accept_anything,
}
STREAMS = named(Stream, Event, stream, set_stream, current_stream, default_stream)
METRIC_API = named(metric_global, metric_localcontext)


# hpu: identity, switches


def version() -> str:
    return f"{current().release.name}.0"


def name(device: object = None) -> str:
    """Goes into reports, which must not pass for a card's."""
    return f"GAUDI2 (emulated, {current().release}: contract-checked)"


@contextmanager
def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """A context that changes nothing here: one card, one device."""
    yield


synDeviceType = IntEnum(
    "synDeviceType", {"synDeviceGaudi": 1, "synDeviceGaudi2": 4, "synDeviceGaudi3": 5}
)
IDENTITY = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_initialized": True,  # by which torch.utils.checkpoint knows that there are numbers to draw again
    "_lazy_init": accept_anything,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": name,
    "get_device_capability": lambda device=None: version(),
    "is_bf16_supported": lambda including_emulation=True: True,
    "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    "synchronize": synchronize,
    "device": nothing,
    "device_of": nothing,
    "sdp_kernel": nothing,
    "getDeterministic": lambda: False,
    "enable_dynamic_shape": lambda: setattr(current(), "dynamic_shapes", True),
    "disable_dynamic_shape": lambda: setattr(current(), "dynamic_shapes", False),
    "get_dynamic_shape_status": lambda: current().dynamic_shapes,
    "set_autocast_hpu_enabled": lambda on: torch.set_autocast_enabled(DEVICE, on),
    "is_autocast_hpu_enabled": lambda: torch.is_autocast_enabled(DEVICE),
    "set_autocast_hpu_dtype": lambda dtype: torch.set_autocast_dtype(DEVICE, dtype),
    "get_autocast_hpu_dtype": lambda: torch.get_autocast_dtype(DEVICE),
    "_is_in_bad_fork": lambda: False,
}


SINCE_1_24 = {
    "is_inference_mode_enabled": lambda: False,
    "sdp_kernel_flag": nothing,
    "set_mark_scale_const": accept_anything,
    "set_mark_non_scale_const": accept_anything,
}


class HPUModule(ModuleType):
    """`torch.hpu`; in 1.19 the graphs API is missing outside lazy mode, and asking for it is worth a word."""

    def __getattr__(self, name: str) -> Any:
        if name in GRAPHS:
            current().findings.hit("H080", name, "error")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def module(name: str, **members: Any) -> ModuleType:
    below = short(name)
    kinds = dict.fromkeys((ROOT, "torch", "version"), ModuleType)
    kinds |= {"hpu": HPUModule, "internal.bridge_config": BridgeConfig}
    made = kinds.get(below, BeyondModule)(name)
    made.__path__ = []  # a package: its parts are imported by name
    made.__spec__ = ModuleSpec(name, None, origin="emulated", is_package=True)  # for `find_spec`
    made.__dict__.update(names_of(below) | members)
    if isinstance(made, BeyondModule):
        made.meanwhile = meanwhile_for(below)
    return made


def modules(device: Device) -> dict[str, ModuleType]:
    """All modules by their full names, tied together as attributes."""
    newer = device.release.name != "1.19"
    has_graphs = device.lazy or device.release.graphs_always_named
    hpu = {
        **STREAMS,
        **MEMORY,
        **RANDOM,
        **dict.fromkeys(listed("hpu_settings"), accept_anything),
        **(GRAPHS if has_graphs else {}),
        **IDENTITY,
        **(SINCE_1_24 if newer else {}),
        "default_generators": (device.generator,),
    }
    parts: dict[str, dict[str, Any]] = {
        **{name: {} for name in (*NAMES, *MODULES)},
        "core": CORE,
        "core.quantization": dict.fromkeys(
            [*listed("core_settings"), "_check_params_as_const", "_mark_params_as_const"],
            accept_anything,
        ),
        "hpu": hpu,
        "hpu.metrics": METRIC_API | named(NOT_FOUND[device.release.missing_metric]),
        "hpu.random": RANDOM,
        "hpu.memory": MEMORY,
        "hpu.streams": {n: STREAMS[n] for n in STREAMS if n != "Event"},
        "hpu.events": named(Event),
        "utils.internal": named(is_lazy, lazy_only),
        "utils.debug": {"_get_fallback_op_count": lambda: dict(current().counts.fallbacks)},
        "utils.experimental": {
            "_data_ptr": HPUTensor.data_ptr,
            "_is_fp16_supported": lambda: True,
            "_get_device_type": lambda: synDeviceType["synDeviceGaudi2"],
            "synDeviceType": synDeviceType,
            "_compute_stream": lambda: 0,
        },
        "utils.library_loader": {
            "load_habana_module": accept_anything,
            "is_habana_available": lambda: True,
        },
        "internal.bridge_config": {},
        "distributed.hccl": {
            "initialize_distributed_hpu": lambda world_size=None, rank=None, local_rank=None: (
                int(os.environ.get("WORLD_SIZE", 1)),
                int(os.environ.get("RANK", 0)),
                int(os.environ.get("LOCAL_RANK", 0)),
            )
        },
        "hpex.kernels": {
            name: getattr(hpex, name)
            for name in "FusedSDPA RotaryPosEmbeddingMode apply_rotary_pos_emb RotaryPosEmbeddingHelperV2".split()
        },
        "hpex.kernels.FusedSDPA": named(hpex.FusedSDPA),
        "hpex.normalization.FusedRMSNorm": named(hpex.FusedRMSNorm),
        "hpex.normalization": named(hpex.FusedRMSNorm),
        "dynamo.compile_backend.config": {"configuration_flags": defaultdict(bool)},
    }
    if has_graphs:
        parts["hpu.graphs"] = GRAPHS
    if newer:
        parts["version"] = dict.fromkeys(("__version__", "version"), f"{device.release.name}.0")
    made = {name: module(name) for name in (ROOT, f"{ROOT}.torch")}
    for name, members in parts.items():
        outside = name.startswith(("media", "autoload"))
        full = f"{ROOT}.{name}" if outside else f"{ROOT}.torch.{name}"
        made[full] = module(full, **members)
    for name in made:
        parent, _, child = name.rpartition(".")
        if parent and not child[0].isupper():  # the name of its class, which stands there
            setattr(made[parent], child, made[name])
    vars(made[f"{ROOT}.torch"])["torch"] = torch
    made[f"{ROOT}.torch.core"].hpu = made[f"{ROOT}.torch.hpu"]  # type: ignore[attr-defined]
    return made
