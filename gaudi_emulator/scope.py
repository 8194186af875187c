"""What the emulator does not stand in for, and the one error that says so."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

from gaudi_emulator.releases import listed


class OutOfScope(NotImplementedError):
    """A part of Gaudi's software that is not emulated; on a card it works."""

    def __init__(self, what: str, meanwhile: str) -> None:
        super().__init__(
            f"{what} is out of the emulator's scope; a card has it if its release does. Meanwhile: {meanwhile}"
        )


# What to use while checking, by module of `habana_frameworks.torch` and name; "" for every other name of the module
NAMES: dict[str, dict[str, str]] = {
    "hpex.kernels": {
        "": "plain torch functions",
        "RotaryPosEmbeddingHelperV1": "apply_rotary_pos_emb with position_ids",
        "RotaryPosEmbeddingHelperV3": "apply_rotary_pos_emb with cos and sin",
        "fp8_fused_sdpa": "FusedSDPA in bfloat16",
    },
    "hpex.optimizers": {"": "those of torch.optim, and a step mark after their step"},
    "hpex.normalization": {"": "torch.nn.utils.clip_grad_norm_"},
    "hpex.movingavrg": {"": "torch.optim.swa_utils.AveragedModel"},
    "hpex.experimental.transformer_engine": {"": "torch.nn layers in bfloat16"},
    "hpex.experimental.fp8_autocast": {"": "torch.autocast in bfloat16"},
    "hpu": dict.fromkeys(listed("refused_hpu"), "leave it out while checking")
    | {
        "make_graphed_callables": "wrap_in_hpu_graph for inference",
        "ModuleCacher": "the model as it is, with step marks",
    },
    "hpu.metrics": {"": "metric_global"},
    "utils.experimental": {"": "the lint, which counts recipes and names what recompiles"},
}
# Further modules that programs import; of nearly all nothing is emulated
MODULES = listed("modules")
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
    return {name: beyond(name, hint) for name, hint in NAMES.get(module, {}).items() if name}


def meanwhile_for(module: str) -> str:
    """What to use in the place of a module's other names, by the nearest one around it that says so."""
    while module:
        if hint := NAMES.get(module, {}).get(""):
            return hint
        module = module.rpartition(".")[0]
    return "leave it out while checking"


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
