"""Attention on processors that reads filled positions alone: no bit differs from the form that reads all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lantern_hpu.backends import DeviceOptions
from lantern_hpu.backends.base import Fit
from lantern_hpu.backends.cpu import backend as form
from lantern_hpu.backends.cpu.backend import CPUBackend
from lantern_hpu.decode.engine import Engine
from lantern_hpu.ops.kernels import PLAIN, attention
from lantern_hpu.ops.kv_cache import KVCache
from lantern_hpu.tree import DraftTree, load_tree
from tests.tiny import CONFIG, draw, request, spec_for, tiny_models


def call(
    lengths: list[int], places: int, capacity: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [R, 8, T, 32], k and v [R, 4, S, 32], mask [R, 1, T, S] of rows filled to these lengths."""
    random, rows = torch.Generator().manual_seed(1), len(lengths)
    q = torch.randn(rows, 8, places, 32, generator=random).to(dtype)
    k, v = torch.randn(2, rows, 4, capacity, 32, generator=random).to(dtype)
    ends = torch.tensor(lengths)[:, None, None, None] + torch.arange(places)[:, None]
    hidden = torch.arange(capacity) >= ends  # [R, 1, T, S]
    return q, k, v, hidden.to(dtype) * torch.finfo(dtype).min


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("capacity", [60, 63, 320, 377, 700])
def test_what_is_left_out_changes_no_bit(dtype: torch.dtype, capacity: int) -> None:
    if not form.attention_keeps_bits(dtype):
        pytest.skip("this processor's plain form is used")
    for lengths in ([1, 1], [20, 20], [50, 17, 3]):
        arguments = call(lengths, 1, capacity, dtype)
        want = form.float32_attention(*arguments)
        assert torch.equal(form.filled_attention(*arguments), want)
        if dtype == torch.float32:
            assert torch.equal(want, attention(*arguments))


@torch.no_grad()
@pytest.mark.parametrize("capacity", [60, 63, 320])
def test_several_tokens_a_row_take_the_plain_form(capacity: int) -> None:
    arguments = call([50, 17, 3], 5, capacity, torch.bfloat16)
    assert torch.equal(form.filled_attention(*arguments), attention(*arguments))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_token_a_row_rounds_less_than_the_plain_form(dtype: torch.dtype) -> None:
    arguments = call([300, 170, 31], 1, 320, dtype)
    exact = attention(*(x.double() for x in arguments))
    error, plainly = (
        (kernel(*arguments) - exact).abs().mean() for kernel in (form.filled_attention, attention)
    )
    assert error <= plainly


def test_it_reads_to_the_longest_row_and_everything_where_nothing_is_attended_to() -> None:
    assert form.filled_positions(call([20, 3], 1, 320, torch.float32)[3]) == 32
    assert form.filled_positions(call([33, 40], 5, 320, torch.float32)[3]) == 48
    assert form.filled_positions(call([315, 3], 1, 318, torch.float32)[3]) == 318
    assert form.filled_positions(call([0, 0], 1, 320, torch.float32)[3]) == 320


def test_what_is_not_read_may_hold_anything() -> None:
    q, k, v, mask = call([20, 3], 1, 320, torch.float32)
    with torch.no_grad():
        want = form.filled_attention(q, k, v, mask)
        k[:, :, 32:], v[:, :, 32:] = torch.nan, torch.nan
        assert torch.equal(form.filled_attention(q, k, v, mask), want)


def test_a_processor_that_rounds_otherwise_keeps_the_plain_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = CPUBackend()
    assert backend.kernels("plain") == PLAIN
    monkeypatch.setattr(form, "plain", lambda q, k, v, mask: k.shape[2] * attention(q, k, v, mask))
    assert not form.attention_keeps_bits(torch.float32)
    assert backend.kernels("auto").attention is attention


def test_training_passes_gradients() -> None:
    q, k, v, mask = call([20, 3], 1, 64, torch.float32)
    form.filled_attention(q.requires_grad_(), k, v, mask).sum().backward()
    assert q.grad is not None


@torch.no_grad()
@pytest.mark.parametrize("places", [1, 2, 5, 17, 26, 60])
@pytest.mark.parametrize("capacity", [60, 63, 320, 513, 700])
def test_a_cache_by_head_gives_the_bits_of_one_by_position(places: int, capacity: int) -> None:
    if not form.order_keeps_bits(torch.bfloat16):
        pytest.skip("this processor keeps the order by position")
    for lengths in ([1, 1], [20, 20], [50, 17, 3]):
        q, k, v, mask = call(lengths, places, capacity, torch.bfloat16)  # k, v lie by head
        want = attention(q, form.by_positions(k), form.by_positions(v), mask)
        assert torch.equal(attention(q, k, v, mask), want)


def test_both_orders_of_a_cache_take_the_same_writes_and_moves() -> None:
    here, there = (
        KVCache.allocate(1, 2, 5, 3, 4, torch.bfloat16, torch.device("cpu"), by_head).layers[0]
        for by_head in (False, True)
    )
    goal, news = torch.tensor([7, 2, 4]), torch.randn(3, 3, 4).bfloat16()
    for cache in (here, there):
        for part in cache.writable():
            part.index_copy_(0, goal, news)
            part.index_copy_(0, goal[:2], part.index_select(0, goal.flip(0)[:2]))
    for one, other in zip(here.read(), there.read(), strict=True):
        assert torch.equal(one, other) and one.shape == (2, 5, 3, 4)
    assert here.read()[0].stride() == (60, 12, 4, 1) and there.read()[0].stride() == (20, 4, 40, 1)


@pytest.mark.parametrize("mode", ["eager", "strict"])
@pytest.mark.parametrize("tree", [None, "scd:4", "broad_7", "dynamic:2x2x5"])
def test_an_engine_draws_the_same_with_either_order(
    tree: str | None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = tiny_models()
    models = target.bfloat16(), drafter.bfloat16()
    drafted = load_tree(tree) if tree else DraftTree.root_only()
    requests = [request("abcd", seed) for seed in range(2)]
    engines: list[Engine] = []
    for by_head in (False, True):
        fit = Fit(CPUBackend(), torch.bfloat16, mode, keys_by_head=by_head)
        engines.append(Engine(*models, spec_for(drafted, requests), fit))
        assert engines[-1].state.kv_cache.layers[0].k.is_contiguous() is not by_head
    tokens = [draw(engine, requests).tokens.tolist() for engine in engines]
    assert tokens[0] == tokens[1]
    caches = [engine.state.kv_cache.layers for engine in engines]
    for layer, other in zip(*caches, strict=True):
        assert torch.equal(layer.k, other.k) and torch.equal(layer.v, other.v)


def test_caches_lie_by_head_in_bfloat16_alone() -> None:
    for name in ("bfloat16", "float32"):
        fit = CPUBackend().fit(CONFIG, DeviceOptions(dtype=name))
        wanted = name == "bfloat16" and form.order_keeps_bits(torch.bfloat16)
        assert fit.keys_by_head == wanted
