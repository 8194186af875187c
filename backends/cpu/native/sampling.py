"""Draws and the walk down a verified tree in C, by `sampling.h`.

Their plain twins are in `ops/sampling.py` and `decode/walk.py`. Both give the same to the last bit where torch sums
in one thread, as 2.13 does on x86-64 up to 32,767 tokens: sums run in its order. Beyond, they agree within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cpu.native import CWalk, call, pointer
from lantern_hpu.ops.kernels import PLAIN, Kernels


def like_tokens(probs: Tensor, uniform: Tensor) -> Tensor:
    return uniform.new_empty(uniform.shape, dtype=torch.int32)


@operator("native_draw(Tensor probs, Tensor uniform) -> Tensor", like_tokens)
def native_distinct(probs: Tensor, uniform: Tensor) -> Tensor:
    """`sampling.sample_distinct`: probs [..., V] float32, uniform [..., c] -> [..., c] int32."""
    assert probs.dtype == uniform.dtype == torch.float32 and probs.shape[:-1] == uniform.shape[:-1]
    probs, uniform, tokens = probs.contiguous(), uniform.contiguous(), like_tokens(probs, uniform)
    rows, draws = probs.numel() // probs.shape[-1], uniform.shape[-1]
    sizes = (torch.get_num_threads(), rows, probs.shape[-1], draws)
    call("lantern_draw", *sizes, *map(pointer, (probs, uniform, tokens)))
    return tokens


def native_sample(probs: Tensor, uniform: Tensor) -> Tensor:
    """`sampling.sample`: probs [..., V] float32, uniform [...] -> [...] int32."""
    tokens: Tensor = native_distinct(probs, uniform[..., None])
    return tokens[..., 0]


def results(p: Tensor, tokens: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Node [B], what is left of p [B, V], relaxed [B, D] and spent [B, D], of a walk to come."""
    images, _, vocabulary = p.shape
    each = (images, depth)
    node = tokens.new_empty(images, dtype=torch.int32)
    left, spent = p.new_empty(images, vocabulary), p.new_empty(each)
    return node, left, p.new_empty(each, dtype=torch.bool), spent


@operator(
    "native_walk(Tensor p, Tensor q, Tensor tokens, Tensor child, Tensor row, Tensor uniform, Tensor? neighbours,"
    " Tensor k, Tensor delta, Tensor factor, Tensor weight, Tensor? tv=None, Tensor? budget=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda p, q, tokens, child, row, uniform, *others: results(p, tokens, uniform.shape[1]),
)
def native_walk(*arguments: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `lantern_hpu.ops.kernels.Walk`."""
    uniform = arguments[5]
    assert uniform is not None
    return walked("lantern_walk", arguments, uniform.shape[1])


@operator(
    "native_traverse(Tensor p, Tensor q, Tensor tokens, Tensor child, Tensor row, Tensor order, int depth,"
    " Tensor uniform, Tensor? tv=None, Tensor? budget=None) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda p, q, tokens, child, row, order, depth, *others: results(p, tokens, depth),
)
def native_traverse(
    p: Tensor,
    q: Tensor,
    tokens: Tensor,
    child: Tensor,
    row: Tensor,
    order: Tensor,
    depth: int,
    uniform: Tensor,
    *blended: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `lantern_hpu.ops.kernels.Traverse`."""
    relaxation = (None,) * 5  # of `Walk`: neighbours, k, delta, factor, weight
    arguments = (p, q, tokens, child, row, uniform, *relaxation, *blended)
    return walked("lantern_traverse", arguments, depth)


def walked(
    function: str, arguments: Sequence[Tensor | None], depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a function of `decoder.h` finds in a tree, by the arguments of `Walk`."""
    inputs: list[Any] = [None if x is None else x.contiguous() for x in arguments]
    p, q, tokens, child, row, uniform, neighbours, *_ = inputs
    assert {x.dtype for x in (p, q, uniform)} == {torch.float32} and p.shape == q.shape
    assert {x.dtype for x in (tokens, child, row)} == {torch.int32}
    made = results(p, tokens, depth)
    lenders = 0 if neighbours is None else neighbours.shape[1]
    sizes = (*p.shape[:2], child.shape[1], depth, child.shape[2], p.shape[2], lenders)
    outputs = dict(zip(("node", "left", "relaxed", "spent"), map(pointer, made), strict=True))
    walk = CWalk(*sizes, torch.get_num_threads(), *map(pointer, inputs), **outputs)
    call(function, byref(walk))
    return made


def native_kernels() -> Kernels:
    """The plain ones, but for draws and walks."""
    draws = replace(PLAIN, sample=native_sample, sample_distinct=native_distinct)
    return replace(draws, walk=native_walk, traverse=native_traverse)
