"""The modules of `habana_frameworks.torch`, of the release that the emulated card is of."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gaudi_emulator import graphs, hpex, streams
from gaudi_emulator.card import flag
from gaudi_emulator.device import LIMIT, Device, current
from gaudi_emulator.releases import ROOT, listed
from gaudi_emulator.scope import MODULES, OUT_OF_SCOPE, BeyondModule, meanwhile_for, names_of, short
from gaudi_emulator.tensor import DEVICE, HPUTensor


def accept_anything(*args: Any, **kwargs: Any) -> None:
    """Settings that change nothing here."""


# hpu: the one device of a process (hpu/_utils.py), and its memory


def need_card(device: object = None) -> None:
    """Raise unless a number, a device or its name means the one that there is; so does none."""
    named = torch.device(device) if isinstance(device, str) else device
    if isinstance(named, torch.device) and named.type != DEVICE:
        raise ValueError(f"Expected a hpu device, but got: {named}")
    index = named.index if isinstance(named, torch.device) else named
    if index not in (None, 0, int(os.environ.get("HLS_MODULE_ID") or 0)):
        raise AssertionError(f"Invalid device id {index}: this process has one device, 0")


def of_card(answer: Callable[[], Any]) -> Callable[..., Any]:
    """A function that may be told the device."""

    def call(device: object = None) -> Any:
        need_card(device)
        return answer()

    return call


def memory_stats() -> dict[str, int]:
    card = current()
    allocs, frees = card.allocs - card.counted_from[0], card.frees - card.counted_from[1]
    return {
        "Limit": LIMIT,
        "InUse": card.in_use,
        "MaxInUse": card.peak,
        "NumAllocs": allocs,
        "NumFrees": frees,
        "ActiveAllocs": allocs - frees,
        "MaxAllocSize": card.largest,
        "TotalSystemAllocs": card.allocs,
        "TotalSystemFrees": card.frees,
        "TotalActiveAllocs": card.allocs - card.frees,
    }


def memory_summary() -> str:
    rows = (f"  {name + ':':<19}{value:>20}\n" for name, value in memory_stats().items())
    return f" PyTorch HPU memory summary, device ID 0\n{''.join(rows)}"


def memory_of(name: str) -> Callable[..., int]:
    return of_card(lambda: memory_stats()[name])


def reset_peak() -> None:
    current().peak = current().in_use


def reset_counts() -> None:
    current().counted_from = current().allocs, current().frees


# hpu: random numbers, from a generator on the host


def manual_seed(seed: int) -> torch.Generator:
    return current().generator.manual_seed(int(seed))


def seed() -> int:
    return current().generator.seed()


def set_rng_state(new_state: Tensor, device: object = DEVICE) -> None:
    need_card(device)
    current().generator.set_state(new_state)


def set_rng_state_all(new_states: list[Tensor]) -> None:
    if len(new_states) != 1:
        raise RuntimeError("hpu set_rng_state_all supports only states len of 1")
    set_rng_state(new_states[0])


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


CACHE_METRICS = "PT_HPU_ENABLE_CACHE_METRICS"
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
    "memory_defragmentation": lambda card: dict.fromkeys(
        ("TotalNumber", "TotalSuccessful", "AvgTime", "MaxTime"), 0
    ),
    "recipe_cache": lambda card: {
        "TotalHit": card.counts.hits,
        "RecipeHit": {},
        "TotalMiss": card.counts.recipes,
        "RecipeMiss": {},
    },
}
# What a local metric of an unknown name raises; the second from 1.24 on
NOT_FOUND = {n: type(n, (Exception,), {}) for n in ("MetricNotFound", "MetricNotFoundError")}
DUMPS = ("InvalidMetricDumpFileFormat", "InvalidMetricDumpTrigger")


def metrics_of(card: Device) -> dict[str, Callable[[Device], dict[str, Any]]]:
    if card.release.name == "1.19":
        return METRICS
    return METRICS | {"device_memory": lambda card: {"peak_memory": card.peak}}


def metric_global(name: str) -> Metric | None:
    """Counted from the start of the process; None for a name that is unknown (hpu/metrics/metrics.py)."""
    if name not in metrics_of(current()):
        return None
    if name == "recipe_cache" and not flag(current().flags, CACHE_METRICS):
        warnings.warn(f"a card has {name} with {CACHE_METRICS}=1 alone, else None", stacklevel=2)
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


def taken(module: ModuleType, names: str) -> dict[str, Any]:
    """Functions and classes of a module of ours."""
    return {name: getattr(module, name) for name in names.split()}


CORE = taken(streams, "mark_step iter_mark_step add_step_closure")
CORE |= dict.fromkeys(listed("core_settings"), accept_anything)
GRAPHS = taken(graphs, "HPUGraph graph CachedParams input_hash copy_to")
GRAPHS |= taken(graphs, "wrap_in_hpu_graph wrap_in_hpu_graph_func")
GRAPHS["is_current_stream_capturing"] = lambda: streams.current_stream().is_capture
RANDOM = named(manual_seed, seed, set_rng_state, set_rng_state_all) | {
    "manual_seed_all": manual_seed,
    "seed_all": seed,
    "initial_seed": lambda: current().generator.initial_seed(),
    "get_rng_state": of_card(lambda: current().generator.get_state()),
    "get_rng_state_all": lambda: [current().generator.get_state()],
}
LIMITS = "memory_reserved max_memory_reserved memory_cached max_memory_cached".split()
MEMORY = dict.fromkeys(LIMITS, memory_of("Limit")) | {
    "memory_stats": of_card(memory_stats),
    "memory_summary": of_card(memory_summary),
    "mem_get_info": of_card(lambda: (LIMIT - current().in_use, LIMIT)),
    "memory_allocated": memory_of("InUse"),
    "max_memory_allocated": memory_of("MaxInUse"),
    "reset_peak_memory_stats": of_card(reset_peak),
    "reset_accumulated_memory_stats": of_card(reset_counts),
}
STREAMS = taken(streams, "Stream Event stream set_stream current_stream default_stream")
STREAMS |= {"StreamContext": streams.stream, "record_stream": accept_anything}
METRIC_API = named(metric_global, metric_localcontext) | {
    name: type(name, (Exception,), {}) for name in DUMPS
}


# hpu: identity, switches


def version() -> str:
    return f"{current().release.name}.0"


def toggle(name: str, on: bool = True) -> None:
    """A switch whose state can be asked for."""
    (current().switches.add if on else current().switches.discard)(name)


def is_on(name: str) -> bool:
    return name in current().switches


@contextmanager
def sdp_kernel(enable_recompute: bool = True) -> Iterator[dict[str, Any]]:
    before = is_on("recompute_sdp")
    toggle("recompute_sdp", enable_recompute)
    try:
        yield {}
    finally:
        toggle("recompute_sdp", before)


def new_tensor(dtype: torch.dtype, cls: type[Tensor], data: Any) -> Tensor:
    """`torch.hpu.FloatTensor(data)`"""
    return torch.tensor(data, dtype=dtype, device=DEVICE)


RECOMPUTE = named(sdp_kernel) | {
    "enable_recompute_sdp": partial(toggle, "recompute_sdp"),
    "recompute_sdp_enabled": partial(is_on, "recompute_sdp"),
}
SWITCHES = {
    f"{verb}_{name}": partial(toggle, name, verb == "enable")
    for name in ("inference_mode", "matmul3d_2d_reshape")
    for verb in ("enable", "disable")
}
TENSORS = {
    f"{name}Tensor": type(name, (Tensor,), {"__new__": partial(new_tensor, getattr(torch, dtype))})
    for name, dtype in map(str.split, listed("tensor_types"))
}
STREAM_DEBUG = "PT_ENABLE_HABANA_STREAMASYNC"
NAME = "GAUDI2"  # that it is emulated is said by the plugin's version


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
    "get_device_name": of_card(lambda: NAME),
    "get_arch_list": lambda: [NAME],
    "get_gencode_flags": lambda: "",
    "get_device_capability": of_card(version),
    "get_device_properties": of_card(lambda: f"(dramSize={LIMIT}, dramEnabled=1, device_id=0)"),
    "memory_usage": memory_of("InUse"),
    "is_bf16_supported": lambda including_emulation=True: True,
    "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    "synchronize": streams.synchronize,
    "set_device": need_card,
    "device": of_card(nullcontext),
    "device_of": lambda obj: nullcontext(),
    "set_sync_debug_mode": lambda mode: current().flags.update({STREAM_DEBUG: str(mode)}),
    "get_sync_debug_mode": lambda: int(current().flags[STREAM_DEBUG]),
    "setDeterministic": partial(toggle, "deterministic"),
    "getDeterministic": partial(is_on, "deterministic"),
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
    "is_inference_mode_enabled": partial(is_on, "inference_mode"),
    "is_matmul3d_2d_reshape_enabled": partial(is_on, "matmul3d_2d_reshape"),
    "formatted_memory_stats": of_card(memory_summary),
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
    not_found = named(NOT_FOUND[device.release.missing_metric])
    has_graphs = device.lazy or device.release.graphs_always_named
    hpu = {
        **STREAMS,
        **METRIC_API,
        **not_found,
        **TENSORS,
        **MEMORY,
        **RANDOM,
        **dict.fromkeys(listed("hpu_settings"), accept_anything),
        **(GRAPHS if has_graphs else {}),
        **IDENTITY,
        **RECOMPUTE,
        **SWITCHES,
        **(SINCE_1_24 if newer else {}),
        "default_generators": (device.generator,),
    }
    parts: dict[str, dict[str, Any]] = {
        **{name: {} for name in (*OUT_OF_SCOPE, *MODULES)},
        "core": CORE,
        "core.quantization": dict.fromkeys(
            [*listed("core_settings"), "_check_params_as_const", "_mark_params_as_const"],
            accept_anything,
        ),
        "hpu": hpu,
        "hpu.metrics": METRIC_API | not_found,
        "hpu.random": RANDOM,
        "hpu.memory": {n: hpu[n] for n in (*MEMORY, "formatted_memory_stats") if n in hpu},
        "hpu.streams": {n: STREAMS[n] for n in STREAMS if n != "Event"},
        "hpu.events": named(streams.Event),
        "utils.internal": taken(streams, "is_lazy lazy_only"),
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
        "hpex.kernels": taken(hpex, "FusedSDPA RotaryPosEmbeddingMode apply_rotary_pos_emb")
        | named(hpex.RotaryPosEmbeddingHelperV2),
        "hpex.kernels.FusedSDPA": named(hpex.FusedSDPA),
        "hpex.normalization.FusedRMSNorm": named(hpex.FusedRMSNorm),
        "hpex.normalization": named(hpex.FusedRMSNorm),
        "dynamo.compile_backend.config": {"configuration_flags": defaultdict(bool)},
    }
    if has_graphs:
        parts["hpu.graphs"] = GRAPHS
    if newer:
        parts["hpu.sdp_kernel_flag"] = RECOMPUTE
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
