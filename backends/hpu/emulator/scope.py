"""What the emulator does not stand in for, and the one error that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


class OutOfScope(NotImplementedError):
    """A part of Gaudi's software that is not emulated; on a card it works."""

    def __init__(self, what: str, meanwhile: str) -> None:
        super().__init__(
            f"{what} is out of the emulator's scope; on a card it works. Meanwhile: {meanwhile}"
        )


class CustomOperators:
    """`torch.ops.hpu`: the vendor's own operators (fp8, int4, mixtures of experts, ...)."""

    MEANWHILE = {
        "fp8": "bfloat16 while checking; the graph around it is the same",
        "uint4": "bfloat16 weights while checking",
        "mixture_of_experts": "a loop over experts, or index_select and bmm",
        "sdpa": "hpex.kernels.FusedSDPA, or torch.nn.functional.scaled_dot_product_attention",
        "rotary": "hpex.kernels.apply_rotary_pos_emb",
        "rms_norm": "hpex.normalization.FusedRMSNorm",
    }

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        known = (hint for part, hint in self.MEANWHILE.items() if part in name)
        return beyond(f"torch.ops.hpu.{name}", next(known, "plain torch operators while checking"))


def beyond(what: str, meanwhile: str) -> Callable[..., NoReturn]:
    """Stands under a name that programs may look for; only its use is an error."""

    def call(*args: object, **kwargs: object) -> NoReturn:
        raise OutOfScope(what, meanwhile)

    return call
