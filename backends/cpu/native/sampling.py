"""What a step does between its matrices in C, by `sampling.h` and `step.h`.

The plain twins are where `Kernels` says. Both give the same to the last bit where torch sums in one thread, as 2.13
does on x86-64 up to 32,767 tokens: sums run in its order, and exponentials are torch's own. Beyond, the walks agree
within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.backends.base import operator
from lantern_hpu.backends.cpu.native import CCommit, CPlace, CWalk, call, pointer
from lantern_hpu.ops.kernels import (
    PLAIN,
    Kernels,
    Placed,
    kept_out,
    place_tokens,
    placed_out,
    probs_out,
    tokens_out,
)
from lantern_hpu.ops.sampling import SamplingParams, guided_probs

# ------------------------------------------------------------------------------ draws and walks


@operator("native_draw(Tensor probs, Tensor uniform) -> Tensor", tokens_out)
def native_distinct(probs: Tensor, uniform: Tensor) -> Tensor:
    """`sampling.sample_distinct`: probs [..., V] float32, uniform [..., c] -> [..., c] int32."""
    assert probs.dtype == uniform.dtype == torch.float32 and probs.shape[:-1] == uniform.shape[:-1]
    probs, uniform, tokens = probs.contiguous(), uniform.contiguous(), tokens_out(probs, uniform)
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


# ------------------------------------------------------------------------------ around the passes


@operator(
    "native_place(Tensor start, Tensor offset, Tensor column, Tensor table, Tensor? valid, Tensor? pads,"
    " Tensor angles, Tensor slot, Tensor row_start, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    placed_out,
)
def place_on_one_axis(*given: Any) -> Placed:
    *tensors, dtype = given
    inputs: list[Any] = [None if x is None else x.contiguous() for x in tensors]
    start, offset, column, table, valid, pads, angles, slot, row_start = inputs
    rope, mask, index = placed_out(*inputs, torch.float32)
    images, rows, capacity = start.shape[0], row_start.shape[0], slot.shape[0]
    sizes = (images, rows, *table.shape[1:], capacity, 2 * angles.shape[2])
    how = (torch.get_num_threads(), torch.finfo(dtype).min)
    taken = (start, offset, column, row_start, table, valid, pads, angles, rope, mask, index)
    call("lantern_place", byref(CPlace(*sizes, *how, *map(pointer, taken))))
    return rope.to(dtype), mask.to(dtype), index


def native_place(*given: Any) -> Placed:
    """See `lantern_hpu.ops.kernels.place_tokens`; of three axes it is the plain form."""
    *what, axes, _ = given
    placed: Placed = place_on_one_axis(*what) if axes is None else place_tokens(*given)
    return placed


@operator(
    "native_scale(Tensor logits, Tensor cfg_scale, Tensor heat, Tensor top_k, bool guidance, int most) -> Tensor",
    probs_out,
)
def native_scale(logits: Tensor, *given: Any) -> Tensor:
    """Logits [R, T, V] after guidance, temperature and top-k: [B, T, V] float32."""
    *each, guidance, most = given
    logits, result = logits.float().contiguous(), probs_out(logits, *given)
    sizes = (torch.get_num_threads(), *result.shape, guidance, most)
    call("lantern_scale", *sizes, *map(pointer, (logits, *each, result)))
    return result


def native_probs(logits: Tensor, params: SamplingParams, *filters: Any) -> Tensor:
    """`sampling.guided_probs`; a batch that uses top-p takes the plain form, which sorts."""
    guidance, most, use_top_p, *_ = filters
    if use_top_p:
        return guided_probs(logits, params, *filters)
    each = (params.cfg_scale, params.temperature, params.top_k)
    result: Tensor = native_scale(logits, *each, guidance, most)
    return result.softmax(-1)


@operator(
    "native_race(Tensor probs, Tensor noise, Tensor token) -> Tensor",
    lambda probs, *_: probs.new_empty(probs.shape[:-1], dtype=torch.int32),
)
def native_race(probs: Tensor, noise: Tensor, _: Tensor) -> Tensor:
    """`sampling.race`: probs and noise [..., V] float32 -> [...] int32."""
    probs, noise = probs.contiguous(), noise.contiguous()
    tokens = probs.new_empty(probs.shape[:-1], dtype=torch.int32)
    sizes = (torch.get_num_threads(), tokens.numel(), probs.shape[-1])
    call("lantern_race", *sizes, *map(pointer, (probs, noise, tokens)))
    return tokens


@operator(
    "native_commit(Tensor node, Tensor bonus, Tensor helped, Tensor probs, Tensor path, Tensor depth, Tensor drafts,"
    " Tensor(a!)[] state, int prefix, int last, int size) -> (Tensor, Tensor, Tensor, Tensor)",
    kept_out,
)
def native_commit(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `lantern_hpu.ops.kernels.Commit`."""
    *tensors, state, prefix, last, size = given
    inputs = [x.contiguous() for x in tensors]
    node, _, helped, probs, *_, drafts = inputs
    made = kept_out(*inputs)
    sizes = (len(node), drafts.shape[1], helped.shape[1], *probs.shape[1:])
    ends = (len(state[0]) // len(node), prefix, last, size)
    commit = CCommit(*sizes, *ends, *map(pointer, (*inputs, *made, *state)))
    call("lantern_commit", byref(commit))
    return made


def native_kernels() -> Kernels:
    """The plain ones, but for what is here."""
    draws = replace(PLAIN, sample=native_sample, sample_distinct=native_distinct, race=native_race)
    walks = replace(draws, walk=native_walk, traverse=native_traverse)
    return replace(walks, place=native_place, probs=native_probs, commit=native_commit)
