"""Why the cache is a tensor a layer, written once a step: the cache of version 0.2, put back, fails each check.

It kept the keys of all layers in one tensor, and the values in another; each layer wrote its rows there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gaudi_emulator import emulate
from gaudi_emulator.lint.rules import Finding
from lantern_hpu.backends import get_backend
from lantern_hpu.backends.base import Fit
from lantern_hpu.backends.hpu.env import RELEASES
from lantern_hpu.decode.engine import Engine
from lantern_hpu.errors import CaptureError
from lantern_hpu.models.transformer import SelfAttention
from lantern_hpu.ops.kv_cache import KVCache, LayerCache, WrittenCache
from lantern_hpu.tree import DraftTree
from tests.tiny import (
    advance,
    draw,
    make_engine,
    request,
    spec_for,
    tiny_config,
    tiny_models,
)

AR = DraftTree.root_only()
SMALL = tiny_config(vocab_size=16, dim=16, layers=2, ffn_dim=16, grid=(2, 4))
STEPS = 3


@dataclass
class SharedLayer(LayerCache):
    """One layer's rows of tensors that all layers share."""

    layer: int
    layers: int

    @property
    def first(self) -> int:
        """The storage index where its rows begin."""
        return self.layer * len(self.k) // self.layers

    def read(self) -> tuple[Tensor, Tensor]:
        shape = (self.layers, self.rows, -1)
        return self.k.unflatten(0, shape)[self.layer], self.v.unflatten(0, shape)[self.layer]


@dataclass
class SharedWritten(SharedLayer):
    """The same, of which a pass reads what it writes."""

    index: Tensor
    written_rows: int

    def read(self) -> tuple[Tensor, Tensor]:
        here = WrittenCache(self.k, self.v, self.rows, self.index + self.first, self.written_rows)
        return here.read()


class SharedCache(KVCache):
    def written(self, index: Tensor, rows: int) -> KVCache:
        count = len(self.layers)
        layers = (
            SharedWritten(one.k, one.v, one.rows, layer, count, index, rows)
            for layer, one in enumerate(self.layers)
        )
        return KVCache(tuple(layers))


def allocate(
    cls: type[KVCache],
    layers: int,
    rows: int,
    capacity: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    by_head: bool = False,
) -> KVCache:
    shape = (layers * rows * capacity, kv_heads, head_dim)
    k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    return SharedCache(tuple(SharedLayer(k, v, rows, layer, layers) for layer in range(layers)))


@pytest.fixture
def shared_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the cache of version 0.2 in the place of ours."""
    real = SelfAttention.forward

    def forward(
        self: SelfAttention,
        x: Tensor,
        rope: Tensor,
        mask: Tensor,
        cache: Any,
        index: Any,
        source: Any,
    ) -> Tensor:
        if isinstance(cache, SharedLayer):
            index = index + cache.first
            source = None if source is None else source + cache.first
        return real(self, x, rope, mask, cache, index, source)

    monkeypatch.setattr(KVCache, "allocate", classmethod(allocate))
    monkeypatch.setattr(SelfAttention, "forward", forward)


def engine_on(backend: Any, mode: str) -> Engine:
    """A small model, autoregressive, one image with guidance."""
    target, drafter = tiny_models(SMALL)
    spec = spec_for(AR, requests(), config=SMALL)
    device = backend.device
    fit = Fit(backend, target.dtype, mode)
    return Engine(target.to(device), drafter.to(device), spec, fit)


def requests() -> list[Any]:
    return [request("abcd", 1)]


def kept(engine: Engine) -> dict[str, Tensor]:
    """Keys and values of each layer after a few steps: [R, known positions, kv_heads, hd]."""
    engine.warm_up()
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
    from lantern_hpu.backends import get_backend

    with torch.no_grad():
        return kept(engine_on(get_backend("cpu"), "eager"))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    yield
    torch._dynamo.reset()


def test_cache_of_0_2_draws_the_same_eagerly(wanted: dict[str, Tensor], shared_cache: None) -> None:
    from lantern_hpu.backends import get_backend

    with torch.no_grad():
        assert sum(wrong_rows(kept(engine_on(get_backend("cpu"), "eager")), wanted).values()) == 0


def test_cache_of_0_2_is_refused_by_the_strict_runner(shared_cache: None) -> None:
    engine = make_engine(tiny_models(SMALL), spec_for(AR, requests(), config=SMALL), "strict")
    with pytest.raises(CaptureError, match="share a storage"):
        draw(engine, requests())


def test_state_tensors_of_0_2_share_storages(shared_cache: None) -> None:
    """What `test_state_tensors_share_no_storage` (test_runners.py) asks of ours."""
    engine = make_engine(tiny_models(SMALL), spec_for(AR, requests(), config=SMALL), "eager")
    storages = [t.untyped_storage().data_ptr() for t in engine.state.tensors().values()]
    taken = [address for address in storages if address]
    assert len(set(taken)) < len(taken)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("release", RELEASES)
def test_compiled_step_of_0_2_corrupts_its_cache_on_1_19(
    release: str,
    wanted: dict[str, Tensor],
    shared_cache: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the first layer's write lasts; nothing else tells."""
    found, findings = compiled(release, monkeypatch, in_place=True)
    wrong = wrong_rows(found, wanted)
    chains = {f.severity for f in findings if f.rule.id == "H092"}
    if release == "1.19":
        assert wrong["layer 1, keys"] > 0 and wrong["layer 1, values"] > 0, wrong
        assert chains == {"error"}
    else:
        assert sum(wrong.values()) == 0 and chains == {"warn"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_flag_that_we_set_keeps_even_that_cache_right(
    wanted: dict[str, Tensor], shared_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = compiled("1.19", monkeypatch, in_place=False)
    assert sum(wrong_rows(found, wanted).values()) == 0


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
