"""A compiled step on the emulated card keeps every row of the cache, in each release and with either flag."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gaudi_emulator import emulate
from lantern_hpu.backends.base import DevicePlan, get_backend
from lantern_hpu.backends.hpu.env import RELEASES
from lantern_hpu.core import Request
from lantern_hpu.decode.engine import Engine
from lantern_hpu.tree import DraftTree
from tests.tiny import advance, request, spec_for, tiny_config, tiny_models

SMALL = tiny_config(vocab_size=16, dim=16, layers=2, ffn_dim=16, grid=(2, 4))
STEPS = 3


@torch.no_grad()
def kept(device: str, mode: str) -> list[Tensor]:
    """Keys and values of each layer after a few steps: [R, known positions, kv_heads, hd]."""
    backend, (target, drafter) = get_backend(device, mode), tiny_models(SMALL)
    requests = [request("abcd", 1)]
    spec = spec_for(DraftTree.root_only(), requests, config=SMALL)
    plan = DevicePlan(backend, target.dtype, mode)
    engine = Engine(target.to(backend.device), drafter.to(backend.device), spec, plan)
    engine.warm_up(Request("cat"))
    advance(engine, requests, STEPS)
    known = SMALL.prefix + STEPS
    layers = engine.state.kv_cache.layers
    return [part.cpu()[:, :known] for layer in layers for part in layer.read()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("in_place", ["0", "1"])
@pytest.mark.parametrize("release", RELEASES)
def test_compiled_step_keeps_every_row(
    release: str, in_place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    wanted = kept("cpu", "eager")
    with emulate(release, flags={"PT_HPU_USE_INPLACE_INDEX_COPY": in_place}) as card:
        found = kept("hpu", "compile")
        assert not [f for f in card.findings.sorted() if f.severity != "info"]
    torch._dynamo.reset()
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
