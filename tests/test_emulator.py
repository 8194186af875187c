"""The emulator is faithful: each test is named after a fact of the bridge that it keeps.

It is one of both releases, 1.19 and 1.24, unless the test tells them apart.

Sources are files of HabanaAI/gaudi-pytorch-bridge unless another is named.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gaudi_emulator import emulate
from gaudi_emulator.device import Device
from gaudi_emulator.ops import lists, op_of
from gaudi_emulator.releases import RELEASES, Release
from gaudi_emulator.scope import OutOfScope
from lantern_hpu.backends.hpu.env import ROOT


@pytest.fixture(params=RELEASES)
def card(request: pytest.FixtureRequest) -> Iterator[Device]:
    with emulate(request.param, True) as device, torch.no_grad():
        yield device


def hpu() -> ModuleType:
    module: ModuleType = torch.hpu  # type: ignore[attr-defined]
    return module


def part(card: Device, name: str) -> ModuleType:
    return card.modules[f"{ROOT}.torch.{name}"]


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(*shape, device="hpu", **options)


def rules(card: Device, severity: str | None = None) -> set[str]:
    return {f.rule.id for f in card.findings.sorted() if severity in (None, f.severity)}


# The device


def test_tensors_say_hpu_and_keep_their_numbers(card: Device) -> None:
    made = [
        torch.arange(3, device="hpu"),
        torch.tensor([1.0], device="hpu"),
        torch.zeros(2).to("hpu"),
        ones(2)[0] * 2,
        nn.Linear(2, 2).to("hpu").weight,
    ]
    assert all(t.device == torch.device("hpu", 0) and not t.is_cpu for t in made)
    assert all(t.is_hpu for t in made)  # type: ignore[attr-defined]
    assert (ones(2, 2) @ ones(2, 2)).cpu().tolist() == [[2, 2], [2, 2]]
    assert "device='hpu:0'" in repr(ones(1))
    with torch.device("hpu"):
        assert torch.zeros(1).device.type == "hpu"


def test_modules_run_as_on_a_cpu(card: Device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.GELU())
    ids = torch.tensor([[1, 2, 7]])
    want = model(ids)
    got = model.to("hpu")(ids.to("hpu"))
    assert torch.equal(got.cpu(), want)


def test_cpu_tensor_among_device_tensors_is_uploaded_in_lazy_mode_alone() -> None:
    """habana_lazy/lazy_kernels.h:1459, habana_eager/eager_op.cpp:93"""
    with emulate(lazy=True) as card:
        assert (ones(3) + torch.ones(3)).cpu().tolist() == [2, 2, 2]
        assert (ones(3) + torch.tensor(1.0)).cpu().tolist() == [2, 2, 2]
        assert "H061" in rules(card, "warn") and card.counts.uploads == 1
        with pytest.raises(TypeError, match="can't convert hpu:0"):
            ones(1).numpy()
    with emulate(lazy=False), pytest.raises(RuntimeError, match="on the same device"):
        ones(3) + torch.ones(3)


LIKE: dict[str, Callable[..., Tensor]] = {
    "empty_like": torch.empty_like,
    "full_like": lambda x, device: torch.full_like(x, 7, device=device),
    "new_empty_strided": lambda x, device: x.new_empty_strided((2,), (1,), device=device),
    "new_tensor": lambda x, device: x.new_tensor([7, 7], device=device),
    "new_zeros": lambda x, device: x.new_zeros(2, device=device),
    "rand_like": torch.rand_like,
    "randint_like": lambda x, device: torch.randint_like(x, 5, device=device),
    "zeros_like": torch.zeros_like,
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", LIKE)
def test_tensors_are_made_like_those_of_the_other_side(name: str, lazy: bool) -> None:
    """Shape and format are read; an upload would be a copy of numbers that nobody asked for."""
    with emulate(lazy=lazy) as card:
        host, device = torch.ones(2, dtype=torch.float16), ones(2, dtype=torch.float16)
        for like in (host, device):
            for goal in ("hpu", "cpu"):
                made = LIKE[name](like, device=goal)
                assert made.device.type == goal and made.dtype == torch.float16
                assert isinstance(made, type(device)) == (goal == "hpu")
                assert torch.equal(made.cpu()[:0], host[:0]) and made.shape == (2,)
        uploads = 2 if name == "new_tensor" else 0
        assert card.counts.uploads == uploads and "H061" not in rules(card)
        assert LIKE["full_like"](host, device="hpu").cpu().tolist() == [7, 7]


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_takes_bfloat16_weights_with_float_statistics(
    card: Device, training: bool
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 3, 5).bfloat16(), torch.randn(3).bfloat16()
    mean, var = torch.zeros(3), torch.ones(3)
    want = F.batch_norm(x.float(), mean, var, weight.float(), weight.float(), training)
    on = [t.to("hpu").requires_grad_() for t in (x, weight)]
    stats = torch.zeros(3, device="hpu"), torch.ones(3, device="hpu")
    with torch.enable_grad():
        got = F.batch_norm(on[0], *stats, on[1], on[1], training)
        got.float().square().sum().backward()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.detach().float().cpu(), want, rtol=0.01, atol=0.01)
    torch.testing.assert_close(stats[0].cpu(), mean, rtol=0.01, atol=0.001)
    assert all(t.grad is not None and t.grad.dtype == torch.bfloat16 for t in on)


@pytest.mark.slow
def test_an_emulator_that_is_never_left_ends_with_the_interpreter_in_silence() -> None:
    code = (
        "from gaudi_emulator import emulate\n"
        "card = emulate()\ncard.__enter__()\n"
        "import habana_frameworks.torch.core"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_is_left_behind() -> None:
    with emulate():
        assert import_module(f"{ROOT}.torch.core") is sys.modules[f"{ROOT}.torch.core"]
    assert not any(name.startswith(ROOT) for name in sys.modules)
    assert not hasattr(torch, "hpu")


# Lazy graphs (habana_lazy/hpu_lazy_tensors.cpp, lazy_graph_hash_builder.cpp)


def test_item_flushes_and_waits(card: Device) -> None:
    x = ones(2) + 1
    assert x.sum().item() == 4 and int(x[0]) == 2 and bool((x > 0).all()) and x.tolist() == [2, 2]
    assert card.counts.host_syncs == {"item": 3, "tolist": 1}
    assert card.counts.flushes["item"] >= 2


def test_mark_step_outside_lazy_mode_does_nothing_and_warns_once() -> None:
    with emulate(lazy=False) as card, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        core = part(card, "core")
        assert core.mark_step() is None and core.mark_step() is None
        assert len(caught) == 1


def test_outside_lazy_mode_the_graphs_api_is_missing_or_raises(release: Release) -> None:
    """hpu/__init__.py of 1.19; hpu/graphs.py of 1.24"""
    with emulate(release.name, False) as card:
        for name in ("HPUGraph", "wrap_in_hpu_graph"):
            assert hasattr(hpu(), name) == (release.name == "1.24")
        if release.name == "1.24":
            with pytest.raises(RuntimeError, match="in lazy mode only"):
                hpu().HPUGraph()
            with pytest.raises(RuntimeError, match="in lazy mode only"):
                hpu().wrap_in_hpu_graph(nn.Linear(2, 2).to("hpu"))(ones(2))
        assert "H080" in rules(card, "error")


def test_step_closures_run_after_the_next_mark_step(card: Device) -> None:
    core = part(card, "core")
    ran: list[int] = []
    core.add_step_closure(ran.append, (1,))
    assert not ran
    core.mark_step()
    assert ran == [1]


# HPU graphs (python_packages/.../hpu/graphs.py, backend/habana_device/HPUGraph.cpp)


def captured(body: Any) -> Any:
    graph = hpu().HPUGraph()
    graph.capture_begin()
    try:
        result = body()
    finally:
        graph.capture_end()
    return graph, result


def test_capture_must_end_on_its_stream(card: Device) -> None:
    graph = hpu().HPUGraph()
    with hpu().stream(hpu().Stream()):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match="capture must end on the stream it began on"):
        graph.capture_end()
    card.recording = None


def test_capture_leaves_dynamic_shapes_switched_off() -> None:
    with emulate(lazy=True, flags={"PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES": "1"}):
        assert hpu().get_dynamic_shape_status()
        captured(lambda: ones(1) + 1)
        assert not hpu().get_dynamic_shape_status()


# wrap_in_hpu_graph (hpu/graphs.py:553-659)


class Double(nn.Module):
    def forward(self, x: Tensor, factor: Any = 2) -> Tensor:
        return x * factor


def wrapped(**options: Any) -> nn.Module:
    made: nn.Module = hpu().wrap_in_hpu_graph(Double(), **options)
    return made


def test_order_of_keyword_arguments_is_part_of_the_key(card: Device) -> None:
    model = wrapped()
    model(x=ones(2), factor=ones(1))
    model(factor=ones(1), x=ones(2))
    assert card.counts.graphs["captured"] == 2


def test_reserved_arguments(card: Device) -> None:
    model, x = wrapped(), ones(2)
    out = model(x)
    replays = card.counts.graphs["replayed"]
    x.fill_(5)
    assert model(x, warmup_mode=True) is out
    assert card.counts.graphs["replayed"] == replays
    assert model(x, bypass_hpu_graphs=True).cpu().tolist() == [10, 10]
    assert card.counts.graphs["bypassed"] == 1
    with pytest.raises(TypeError):
        hpu().wrap_in_hpu_graph(Double(), hash_with_views=True)


def test_exception_leaves_the_capture_open() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    with emulate(lazy=True) as card:
        with pytest.raises(ValueError, match="no"):
            hpu().wrap_in_hpu_graph(Broken())(ones(1))
        with pytest.raises(RuntimeError, match="already in progress"):
            hpu().HPUGraph().capture_begin()
    assert "H066" in rules(card, "error")


# Numbers, indices, operators


def test_fallback_can_be_forbidden() -> None:
    with (
        emulate(lazy=True, flags={"PT_HPU_PLACE_ON_CPU": "none"}),
        pytest.raises(RuntimeError, match="not yet"),
    ):
        torch.i0(ones(4))


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> Release:
    return RELEASES[request.param]


def test_operator_table_agrees_with_what_falls_back(release: Release) -> None:
    for name in lists(release).cpu_only:
        packet, _, overload = name.partition(".")
        found = getattr(torch.ops.aten, packet, None)
        if found is not None and (overload or "default") in found.overloads():
            assert not op_of(getattr(found, overload or "default"), release).native, name
    for func in (torch.ops.aten.mm.default, torch.ops.aten.index_copy_.default):
        assert op_of(func, release).native


@pytest.mark.parametrize(
    ("make", "stored"),
    [
        (lambda: torch.full((1,), 3 * 2**30, device="hpu"), -(2**30)),
        (lambda: torch.arange(2**31, 2**31 + 1, device="hpu"), -(2**31)),
        (lambda: ones(1).mul(3e9).long(), 3_000_000_000 - 2**32),
        (lambda: big().add_(1), -(2**31)),
        (lambda: big().scatter_add_(0, big() * 0, big() * 0 + 1), -(2**31)),
        (lambda: big().index_add_(0, big() * 0, big() * 0 + 1), -(2**31)),
        (lambda: (big() // 2 + 1).pow_(2), 0),
        (lambda: big().addcmul(big() * 0 + 1, big() * 0 + 1), -(2**31)),
    ],
)
def test_int64_is_stored_as_int32(card: Device, make: Any, stored: int) -> None:
    """backend/habana_device: PT_ENABLE_INT64_SUPPORT is off in lazy mode, scripts/env_flags.yaml:624"""
    assert make().cpu().tolist() == [stored]
    assert "H031" in rules(card, "error")


def big() -> Tensor:
    return torch.tensor([2**31 - 1], device="hpu")


def test_int64_is_stored_as_int32_in_replays(card: Device) -> None:
    x = big() - 1
    graph, out = captured(lambda: x + 1)
    x.add_(1)
    graph.replay()
    assert out.tolist() == [-(2**31)]


# Fused kernels


def test_replay_with_inputs_reads_the_scalars_of_the_call(card: Device) -> None:
    """hpu/graphs.py, replay_with_inputs"""
    graph, x, scale = hpu().HPUGraph(), ones(2), torch.tensor(3.0)
    graph.capture_begin()
    graph.mark_user_inputs([x, scale])
    y = x * scale
    graph.capture_end()
    graph.mark_user_outputs([y], free_inplace=True)
    if card.release.name == "1.19":
        with pytest.raises(AttributeError):
            graph.replay_with_inputs([x, torch.tensor(5.0)])
        scale.fill_(5.0)
        graph.replay()
        assert y.cpu().tolist() == [3, 3]  # baked in
        return
    graph.replay_with_inputs([x, torch.tensor(5.0)], asynchronous=True)
    assert y.cpu().tolist() == [5, 5]


@pytest.mark.parametrize("option", ["free_inplace", "verbose", "log_frequency"])
def test_wrapper_takes_the_arguments_of_its_release(card: Device, option: str) -> None:
    """hpu/graphs.py, wrap_in_hpu_graph"""
    layer = nn.Linear(2, 2).to("hpu")
    if card.release.name == "1.19":
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            hpu().wrap_in_hpu_graph(layer, **{option: True})
    else:
        assert hpu().wrap_in_hpu_graph(layer, **{option: True})(ones(2)).shape == (2,)


def test_fused_attention_takes_the_positions_of_its_release(card: Device) -> None:
    """hpex/kernels/FusedSDPA.py"""
    fused = part(card, "hpex.kernels").FusedSDPA
    q = ones(1, 2, 6, 8)
    rest = (None, 0.0, True, None, "none", True, None, "left", False, False, (2, 0), None)
    if card.release.name == "1.19":
        with pytest.raises(TypeError, match="13 positions, not 15"):
            fused.apply(q, q, q, *rest)
    else:
        with pytest.raises(OutOfScope, match="a window or a sink"):
            fused.apply(q, q, q, *rest)
        assert fused.apply(*[ones(1, 2, 0, 8)] * 3).shape == (1, 2, 0, 8)


# Metrics


def test_memory_is_counted(card: Device) -> None:
    before = hpu().memory_allocated()
    kept = ones(1024)
    assert hpu().memory_allocated() == before + 4096
    del kept
    assert hpu().memory_allocated() == before
    assert hpu().max_memory_allocated() >= before + 4096
