"""Triton forms of what a step does besides its matrices, each with a plain twin it must agree with.

Importing this package does not import Triton; `triton_kernels` does.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from lantern_hpu.backends.base import Candidate
from lantern_hpu.backends.cuda.kernels.programs import has_matrix_units
from lantern_hpu.ops.kernels import PLAIN, Kernels

BY_DOT = ("attention", "attend")  # without matrix units minutes to compile, and slower than torch's


@cache
def triton_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The Triton kernels that run on this device and agree there with the plain ones.

    Args:
        dtype: what the models compute in.

    Warns if some do not, or if there is no Triton; the second call finds the answer of the first.
    """
    try:
        result = triton_candidates(device, dtype)
    except ImportError as error:
        warnings.warn(f"plain kernels serve: {error}; pip install triton", stacklevel=2)
        return PLAIN
    from lantern_hpu.backends.cuda.kernels.checks import fault

    if not has_matrix_units(device):
        result = {name: candidate for name, candidate in result.items() if name not in BY_DOT}
    refused = {name: why for name, candidate in result.items() if (why := fault(candidate))}
    served = {name: candidate.make() for name, candidate in result.items()}
    return without(refused, replace(PLAIN, **served))


def without(refused: Mapping[str, str], kernels: Kernels) -> Kernels:
    """The kernels with plain ones in place of those that are refused; a warning says why."""
    if refused:
        why = "; ".join(f"{name}: {why}" for name, why in refused.items())
        warnings.warn(f"plain kernels serve in place of {why}", stacklevel=3)
    return replace(kernels, **{name: getattr(PLAIN, name) for name in refused})


def triton_candidates(device: torch.device, dtype: torch.dtype) -> dict[str, Candidate]:
    """All kernels, whether or not they agree here with the plain ones."""
    from lantern_hpu.backends.cuda.kernels import (
        accept,
        attention,
        checks,
        forward,
        products,
        sample,
    )

    kernels: dict[str, Any] = {
        "attention": attention.triton_attention,
        "attend": attention.triton_attend,
        "rms_norm": forward.triton_rms_norm,
        "add_norm": forward.triton_add_norm,
        "swiglu": forward.triton_swiglu,
        "rotate": forward.triton_rotate,
        "place": forward.triton_place,
        "probs": sample.triton_probs,
        "sample": sample.triton_sample,
        "sample_distinct": sample.launch_distinct,
        "walk": accept.triton_walk,
        "traverse": accept.triton_traverse,
        "product": products.triton_product,
        "commit": accept.triton_commit,
    }
    examples, slack = checks.kernel_examples(device, dtype), checks.tolerance(dtype)
    return {
        name: Candidate(lambda kernel=kernel: kernel, examples[name], slack)  # type: ignore[misc]
        for name, kernel in kernels.items()
    }
