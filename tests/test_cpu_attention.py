"""Attention on processors that reads filled positions alone: the bits of the plain form, whatever the lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lantern_hpu.backends.cpu import attention as form
from lantern_hpu.backends.cpu.backend import CPUBackend
from lantern_hpu.ops.kernels import PLAIN, attention


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("places", [1, 5])
@pytest.mark.parametrize("capacity", [60, 63, 320, 377, 700])
def test_it_has_the_bits_of_the_plain_form(dtype: torch.dtype, places: int, capacity: int) -> None:
    if not form.attention_keeps_bits(dtype):
        pytest.skip("this processor's plain form is used")
    for lengths in ([1, 1], [20, 20], [50, 17, 3]):
        arguments = call(lengths, places, capacity, dtype)
        assert torch.equal(form.filled_attention(*arguments), attention(*arguments))


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
