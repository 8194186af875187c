"""SwiGLU in one pass over the projections; plain torch where a gradient is wanted."""

# Triton reads the annotations of its functions: they are not postponed, and say `constexpr` or nothing.

import torch
import triton
import triton.language as tl
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cuda.kernels.programs import EXACTLY, warps
from lantern_hpu.ops.kernels import swiglu

BLOCK = 1024  # features that one program makes


@triton.jit
def swiglu_kernel(
    gate_up,  # [n, 2 F]
    out,  # [n, F]
    F,
    BLOCK: tl.constexpr,
):
    """One program a block of a vector. What the gate makes is rounded before the product, as torch does it."""
    vector = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = feature < F
    source = gate_up + vector * 2 * F + feature
    gate = tl.load(source, mask=there, other=0.0)
    up = tl.load(source + F, mask=there, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    open = tl.math.div_rn(x, 1 + tl.exp(-x)).to(gate.dtype).to(tl.float32)
    tl.store(out + vector * F + feature, open * up, mask=there)


def swiglu_out(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@operator("swiglu(Tensor gate_up) -> Tensor", swiglu_out)
def launch_swiglu(gate_up: Tensor) -> Tensor:
    out = swiglu_out(gate_up)
    features = out.shape[-1]
    swiglu_kernel[(out.numel() // features, triton.cdiv(features, BLOCK))](
        gate_up.contiguous(), out, features, BLOCK=BLOCK, num_warps=warps(BLOCK), **EXACTLY
    )
    return out


def triton_swiglu(gate_up: Tensor) -> Tensor:
    """`kernels.swiglu`: gate_up [..., 2 F] in any dtype."""
    if torch.is_grad_enabled():
        return swiglu(gate_up)
    return launch_swiglu(gate_up)
