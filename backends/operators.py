"""Forms of a device's own as operators of torch.

An operator is one call that compilers and recordings need not look into. Its results are new tensors; only
`rotate_into` writes into its arguments, as its schema says. It has no backward: the plain forms of `ops.kernels` serve
where a gradient is wanted. (`torch.library.custom_op` would load torch's compiler when the module is imported.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

LIBRARY = Library("lantern_hpu", "FRAGMENT")


def operator(schema: str, shaped: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make the decorated function the operator `lantern_hpu::NAME`.

    Args:
        schema: name, arguments and results, in torch's notation.
        shaped: the same for tensors without storage; it says what the results look like.
    """
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Any:
        LIBRARY.define(schema)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        LIBRARY.impl(name, shaped, "Meta")
        return getattr(torch.ops.lantern_hpu, name).default

    return register
