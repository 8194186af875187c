"""What the emulator does not stand in for, and the one error that says so."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn


class OutOfScope(NotImplementedError):
    """A part of Gaudi's software that is not emulated; on a card it works."""

    def __init__(self, what: str, meanwhile: str) -> None:
        super().__init__(
            f"{what} is out of the emulator's scope; a card has it if its release does. Meanwhile: {meanwhile}"
        )


# What to use while checking, by module of `habana_frameworks.torch` and name
NAMES: dict[str, dict[str, str]] = {
    "hpex.kernels": {
        "CustomSoftmax": "softmax",
        "CTCLoss": "torch.nn.CTCLoss",
        "RotaryPosEmbeddingHelperV1": "apply_rotary_pos_emb with position_ids",
        "RotaryPosEmbeddingHelperV3": "apply_rotary_pos_emb with cos and sin",
        "CustomNms": "torchvision.ops.nms on the host",
        "RoiAlignFunction": "torchvision.ops.roi_align on the host",
        "ScaledMaskedSoftmax": "softmax of the scaled scores and the mask",
        "fp8_fused_sdpa": "FusedSDPA in bfloat16",
    },
    "hpex.optimizers": {
        "Adam": "torch.optim.Adam, and a step mark after its step",
        "AdamW": "torch.optim.AdamW, and a step mark after its step",
        "FusedAdagrad": "torch.optim.Adagrad",
        "FusedAdamW": "torch.optim.AdamW, and a step mark after its step",
        "FusedLamb": "torch.optim.AdamW",
        "FusedLars": "torch.optim.SGD",
        "FusedResourceApplyMomentum": "torch.optim.SGD with momentum",
        "FusedSGD": "torch.optim.SGD",
    },
    "hpex.normalization": {"FusedClipNorm": "torch.nn.utils.clip_grad_norm_"},
    "hpex.movingavrg": {"FusedEMA": "torch.optim.swa_utils.AveragedModel"},
    "hpu": {"make_graphed_callables": "wrap_in_hpu_graph, or ModuleCacher for training"},
    "hpu.metrics": {"metrics_dump": "metric_global"},
    "utils.experimental": {
        "data_dynamicity": "the lint counts recipes itself",
        "detect_recompilation_auto_model": "the lint names what recompiles",
    },
}
# Modules of which nothing is emulated, whatever their names are
WHOLE = {
    "hpex.experimental.transformer_engine": "torch.nn layers in bfloat16",
    "hpex.experimental.fp8_autocast": "torch.autocast in bfloat16",
}
# Further modules that programs import
MODULES = (
    "utils internal distributed hpex hpex.movingavrg hpex.optimizers hpex.experimental dynamo dynamo.compile_backend "
    "activity_profiler core.observer core.pattern_matcher core.quantize_fsdpa core.quantize_kvcache "
    "core.quantize_pt2e core.quantizer core.step_closure core.torch_overwrites core.weight_sharing core.hccl "
    "distributed._pg_utils dynamo.compile_backend.backends dynamo.compile_backend.experimental "
    "dynamo.compile_backend.passes dynamo.debug_utils dynamo.debug_utils.logger gpu_migration gpu_migration.torch "
    "hpex.hmp hpex.kernels.Fp8FusedSDPA hpex.kernels.Fp8Ops "
    "hpex.kernels.PySDPA hpex.kernels.RotaryPosEmbeddingHelper hpex.optimizers.distributed "
    "utils._debug_C utils._experimental_C utils.debug.dynamo_utils utils.debug.logger utils.distributed_utils "
    "utils.event_dispatcher utils.git_info utils.lib_utils utils.profiler utils.version_checker "
    "utils.visualization medialoaders medialoaders.torch mediapipe mediapipe.fn mediapipe.media_types "
    "mediapipe.mediapipe mediapipe.plugins mediapipe.plugins.iterator_pytorch"
).split()
# Operators of the vendor, by a part of their names
OPERATORS = {
    "fp8": "bfloat16 while checking; the graph around it is the same",
    "int4": "bfloat16 weights while checking",
    "mixture_of_experts": "a loop over experts, or index_select and bmm",
    "sdpa": "hpex.kernels.FusedSDPA, or torch.nn.functional.scaled_dot_product_attention",
    "rotary": "hpex.kernels.apply_rotary_pos_emb",
    "rms_norm": "hpex.normalization.FusedRMSNorm",
}


class CustomOperators:
    """`torch.ops.hpu`: the vendor's own operators (fp8, int4, mixtures of experts, ...)."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = (hint for part, hint in OPERATORS.items() if part in name)
        return beyond(f"torch.ops.hpu.{name}", next(known, "plain torch operators while checking"))


class BeyondModule(ModuleType):
    """A module whose other names can be imported and not be used."""

    meanwhile: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return beyond(f"{short(self.__name__)}.{name}", self.meanwhile)


def short(module: str) -> str:
    return module.removeprefix("habana_frameworks.").removeprefix("torch.")


def names_of(module: str) -> dict[str, Any]:
    """What stands under the names of a module that are out of scope."""
    return {name: beyond(name, meanwhile) for name, meanwhile in NAMES.get(module, {}).items()}


class Beyond(type):
    """Of classes, one for each name that programs may look for: only a call, of it or of what it has, is an error."""

    what: str
    meanwhile: str

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise OutOfScope(cls.what, cls.meanwhile)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return beyond(f"{cls.what}.{name}", cls.meanwhile)


def beyond(what: str, meanwhile: str) -> Any:
    """Stands under a name that programs may look for; only its use is an error."""
    return Beyond(what.rpartition(".")[2], (), {"what": what, "meanwhile": meanwhile})
