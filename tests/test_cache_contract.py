"""A compiled step on the emulated card keeps every row of the cache, in each release and with either flag."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gaudi_emulator import emulate
from gaudi_emulator.rules import Finding
from lantern_hpu.backends.base import DevicePlan, get_backend
from lantern_hpu.backends.hpu.env import RELEASES
from lantern_hpu.core import Request
from lantern_hpu.decode.engine import Engine
from lantern_hpu.tree import DraftTree
from tests.tiny import advance, request, spec_for, tiny_config, tiny_models

AR = DraftTree.root_only()
SMALL = tiny_config(vocab_size=16, dim=16, layers=2, ffn_dim=16, grid=(2, 4))
STEPS = 3


def engine_on(backend: Any, mode: str) -> Engine:
    """A small model, autoregressive, one image with guidance."""
    target, drafter = tiny_models(SMALL)
    spec = spec_for(AR, requests(), config=SMALL)
    device = backend.device
    fit = DevicePlan(backend, target.dtype, mode)
    return Engine(target.to(device), drafter.to(device), spec, fit)


def requests() -> list[Any]:
    return [request("abcd", 1)]


def kept(engine: Engine) -> dict[str, Tensor]:
    """Keys and values of each layer after a few steps: [R, known positions, kv_heads, hd]."""
    engine.warm_up(Request("cat"))
    advance(engine, requests(), STEPS)
    known = SMALL.prefix + STEPS
    return {
        f"layer {number}, {name}": part.cpu()[:, :known]
        for number, layer in enumerate(engine.state.kv_cache.layers)
        for name, part in zip(("keys", "values"), layer.read(), strict=True)
    }


def compiled(
    release: str, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> tuple[dict[str, Tensor], list[Finding]]:
    """What a compiled step leaves on the emulator of a release, and what it said."""
    flags = {"PT_HPU_USE_INPLACE_INDEX_COPY": str(int(in_place))}
    with emulate(release, flags=flags) as card, torch.no_grad():
        found = kept(engine_on(get_backend("hpu", "compile"), "compile"))
        return found, card.findings.sorted()


def wrong_rows(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, int]:
    """Rows of a tensor, one a position, that are not those wanted."""
    apart = {n: (found[n] - wanted[n]).abs().amax((-2, -1)) > 1e-4 for n in wanted}
    return {name: int(rows.sum()) for name, rows in apart.items()}


@pytest.fixture(scope="module")
def wanted() -> dict[str, Tensor]:
    """By the cache of today, eagerly on the CPU."""
    from lantern_hpu.backends.base import get_backend

    with torch.no_grad():
        return kept(engine_on(get_backend("cpu"), "eager"))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("release", RELEASES)
def test_compiled_step_of_today_keeps_every_row(
    release: str, in_place: bool, wanted: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, findings = compiled(release, monkeypatch, in_place)
    assert sum(wrong_rows(found, wanted).values()) == 0
    assert not [f for f in findings if f.severity != "info"]
