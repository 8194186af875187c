"""What the emulator does not stand in for, and the one error that says so."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn


class OutOfScope(NotImplementedError):
    """A part of Gaudi's software that is not emulated; on a card it works."""

    def __init__(self, what: str, meanwhile: str) -> None:
        super().__init__(
            f"{what} is out of the emulator's scope; on a card it works. Meanwhile: {meanwhile}"
        )


# What to use while checking, by module of `habana_frameworks.torch` and name
NAMES: dict[str, dict[str, str]] = {
    "hpex.kernels": {
        "CTCLoss": "torch.nn.CTCLoss",
        "CustomNms": "torchvision.ops.nms on the host",
        "RoiAlignFunction": "torchvision.ops.roi_align on the host",
        "ScaledMaskedSoftmax": "softmax of the scaled scores and the mask",
        "fp8_fused_sdpa": "FusedSDPA in bfloat16",
    },
    "hpex.optimizers": {
        "Adam": "torch.optim.Adam, and a step mark after its step",
        "AdamW": "torch.optim.AdamW, and a step mark after its step",
        "FusedAdagrad": "torch.optim.Adagrad",
        "FusedLamb": "FusedAdamW",
        "FusedLars": "torch.optim.SGD",
        "FusedResourceApplyMomentum": "torch.optim.SGD with momentum",
        "FusedSGD": "torch.optim.SGD",
    },
    "hpex.movingavrg": {"FusedEMA": "torch.optim.swa_utils.AveragedModel"},
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

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        known = (hint for part, hint in OPERATORS.items() if part in name)
        return beyond(f"torch.ops.hpu.{name}", next(known, "plain torch operators while checking"))


class BeyondModule(ModuleType):
    """A module that can be imported, and none of whose names can be used."""

    meanwhile: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = self.__name__.partition(".torch.")[2]
        return beyond(f"{module}.{name}", self.meanwhile)


def names_of(module: str) -> dict[str, Callable[..., NoReturn]]:
    """What stands under the names of a module that are out of scope."""
    return {name: beyond(name, meanwhile) for name, meanwhile in NAMES.get(module, {}).items()}


def beyond(what: str, meanwhile: str) -> Callable[..., NoReturn]:
    """Stands under a name that programs may look for; only its use is an error."""

    def call(*args: object, **kwargs: object) -> NoReturn:
        raise OutOfScope(what, meanwhile)

    return call
