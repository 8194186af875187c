"""`torch.autocast` on the device: which operators run in the lower format and which in float32.

torch casts by dispatch keys, which the emulated tensors do not have, so arguments are cast where a function is
called. The lists are the default ones of Habana's page on mixed precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gaudi_emulator.nested import mapped
from gaudi_emulator.tensor import DEVICE, HPUTensor

OWNERS = (torch, F, torch._C._nn, Tensor)
LOWER = (
    "addmm addbmm batch_norm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "dot dropout feature_dropout group_norm instance_norm layer_norm leaky_relu linear matmul mean mm mul mv "
    "softmax log_softmax scaled_dot_product_attention __matmul__ __rmatmul__ __mul__ __rmul__ multiply einsum"
)
FLOAT32 = (
    "acos addcdiv asin atan2 bilinear binary_cross_entropy binary_cross_entropy_with_logits cdist cosh "
    "cosine_embedding_loss cosine_similarity cross_entropy dist div divide embedding embedding_bag erfinv exp expm1 "
    "hinge_embedding_loss huber_loss kl_div l1_loss log log10 log1p log2 logsumexp margin_ranking_loss mse_loss "
    "multi_margin_loss multilabel_margin_loss nll_loss pdist poisson_nll_loss pow reciprocal renorm rsqrt sinh "
    "smooth_l1_loss soft_margin_loss softplus tan topk triplet_margin_loss true_divide __truediv__ __pow__"
)


def functions(names: str) -> set[Callable[..., Any]]:
    found = (getattr(owner, name, None) for owner in OWNERS for name in names.split())
    return {function for function in found if function is not None}


LOWER_FUNCTIONS, FLOAT32_FUNCTIONS = functions(LOWER), functions(FLOAT32)


def cast(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments in the format that autocast has the function run in, if it is on and says one."""
    if not torch.is_autocast_enabled(DEVICE):
        return args, kwargs
    if func in LOWER_FUNCTIONS:
        goal = torch.get_autocast_dtype(DEVICE)
    elif func in FLOAT32_FUNCTIONS:
        goal = torch.float32
    else:
        return args, kwargs

    def change(tensor: Tensor) -> Tensor:
        floats = isinstance(tensor, HPUTensor) and tensor.is_floating_point()
        return tensor.to(goal) if floats and tensor.dtype != goal else tensor

    return mapped(args, change), mapped(kwargs, change)
