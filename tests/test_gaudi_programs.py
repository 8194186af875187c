"""Small programs of the kinds that the vendor's documents and tests have: each gives on the emulated card what a card
gives.

A program says which of the vendor's sources asks for it (files of HabanaAI/gaudi-pytorch-bridge unless another is
named) and runs in the modes that it is for. Where numbers are compared, the CPU's are computed by torch beside them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gaudi_emulator import emulate
from gaudi_emulator.device import Device
from lantern_hpu.backends.hpu.env import ROOT

META_AND_CARD = "at least two devices, hpu:0 and meta"


@dataclass(frozen=True)
class Program:
    """A program, the vendor's source that asks for it, and the card that it is run on."""

    run: Callable[[Device], None]
    source: str
    lazy: bool
    release: str | None
    flags: Mapping[str, str]

    @property
    def id(self) -> str:
        mode = "lazy" if self.lazy else "eager"
        return "-".join(filter(None, (self.run.__name__, mode, self.release)))


PROGRAMS: list[Program] = []


def program(
    source: str,
    modes: str = "lazy eager",
    release: str | None = None,
    flags: Mapping[str, str] | None = None,
) -> Callable[[Callable[[Device], None]], Callable[[Device], None]]:
    """Adds a function to the programs, once for each mode."""

    def add(run: Callable[[Device], None]) -> Callable[[Device], None]:
        for mode in modes.split():
            PROGRAMS.append(Program(run, source, mode == "lazy", release, flags or {}))
        return run

    return add


@contextmanager
def loaded(program: Program) -> Iterator[Device]:
    """A card whose software the program has imported."""
    with emulate(program.release, program.lazy, program.flags) as card:
        import_module(f"{ROOT}.torch")
        yield card


def close(got: Tensor, want: Tensor, apart: float = 1e-5) -> None:
    torch.testing.assert_close(got.detach().cpu(), want.detach(), atol=apart, rtol=apart)


# Training


def gradients(device: str) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(3, device=device)) for _ in range(2)]
    for number, parameter in enumerate(made):
        parameter.grad = torch.full((3,), 2.0 + number, device=device)
    return made


@program("tests/pytest_working/any_mode/test_hpu_clip_grad.py; Model-References, trainers")
def clipped_gradients_have_the_norm_that_was_asked_for(card: Device) -> None:
    for kind in (1.0, 2.0, float("inf")):
        here, there = gradients("hpu"), gradients("cpu")
        found = nn.utils.clip_grad_norm_(here, 1.0, norm_type=kind)
        close(found, nn.utils.clip_grad_norm_(there, 1.0, norm_type=kind))
        for one, other in zip(here, there, strict=True):
            close(one.grad, other.grad)  # type: ignore[arg-type]
    here = gradients("hpu")
    nn.utils.clip_grad_value_(here, 0.5)
    assert all(p.grad is not None and p.grad.tolist() == [0.5] * 3 for p in here)


@program("torch.optim: each optimizer on a device; Model-References, trainers")
def every_optimizer_learns_what_it_learns_on_the_cpu(card: Device) -> None:
    x = torch.randn(5, 4)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adafactor"):
        for options in ({}, {"foreach": True}):
            twin = nn.Linear(4, 3)
            model = copy.deepcopy(twin).to("hpu")
            for one, data in ((twin, x), (model, x.to("hpu"))):
                learner = getattr(torch.optim, name)(one.parameters(), lr=0.1, **options)
                for _ in range(2):
                    learner.zero_grad()
                    one(data).square().mean().backward()
                    nn.utils.clip_grad_norm_(one.parameters(), 0.5)
                    learner.step()
            close(model.weight, twin.weight)


@program("torch.amp.GradScaler('hpu'); docs.habana.ai, PyTorch Mixed Precision")
def a_scaler_of_gradients_takes_its_factor_out_again(card: Device) -> None:
    model, scaler = nn.Linear(4, 3).to("hpu"), torch.amp.GradScaler("hpu")
    learner = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(2, 4, device="hpu")).sum()).backward()
    scaler.unscale_(learner)
    assert model.weight.grad is not None and model.weight.grad.flatten().tolist() == [2.0] * 12
    scaler.step(learner)
    scaler.update()
    close(model.weight, before.cpu() - 2)


@program("torch: a tensor without numbers and one of a device do not mix")
def nothing_of_the_card_meets_a_bare_meta_tensor(card: Device) -> None:
    x, bare = torch.ones(3, device="hpu"), torch.ones(3, device="meta")
    mixtures: list[Callable[[], Any]] = [
        lambda: x + bare,
        lambda: x.mul_(bare[0]),
        lambda: x.copy_(bare),
        lambda: bare.copy_(x),
        lambda: torch._foreach_mul_([x], bare[0]),
        lambda: torch.cat([bare, x]),
        lambda: torch.equal(x, bare),
        lambda: setattr(x, "grad", bare),
        lambda: nn.Linear(3, 2, device="meta")(x),
    ]
    for mixture in mixtures:
        with pytest.raises(RuntimeError, match=META_AND_CARD):
            mixture()
    for moved in (lambda: bare.to("hpu"), lambda: setattr(x, "data", bare)):
        with pytest.raises(NotImplementedError, match="no data"):
            moved()
    assert x.tolist() == [1, 1, 1]
    assert nn.Linear(3, 2, device="meta").to_empty(device="hpu")(x).device.type == "hpu"


@program("torch.tensor(..., requires_grad=True)")
def a_tensor_made_on_the_card_learns_if_it_is_to(card: Device) -> None:
    x = torch.tensor([1.0, 3.0], device="hpu", requires_grad=True)
    torch.autograd.backward(x.unbind()[1] * 2)
    assert x.grad is not None and x.grad.tolist() == [0, 2]


@program("tests/pytest_working/any_mode/test_hpu_rms_norm.py")
def hooks_before_a_fused_kernel_hear_of_one_gradient(card: Device) -> None:
    kernels = import_module(f"{ROOT}.torch.hpex")
    heard: list[Tensor] = []
    x = torch.rand(1, 2, 4, 8, device="hpu", requires_grad=True)
    for apply in (
        lambda t: kernels.normalization.FusedRMSNorm.apply(t, torch.ones(8, device="hpu"), 1e-6),
        lambda t: kernels.kernels.FusedSDPA.apply(t, t, t),
    ):
        between = x * 1.0
        between.retain_grad()
        between.register_hook(heard.append)
        apply(between).sum().backward()
        assert between.grad is not None and x.grad is not None
        close(between.grad, x.grad.cpu())
        x.grad = None
    assert len(heard) == 2


# Autocast


@program("hpu_ops/autocast_helpers.h, lower_first_ops")
def norms_under_autocast_keep_their_weights(card: Device) -> None:
    x, weight, bias = torch.randn(4, 8, 2), 1 + torch.rand(8) / 300, torch.zeros(8)
    low = x.bfloat16().float()
    with torch.autocast("hpu", dtype=torch.bfloat16):
        given = [t.to("hpu") for t in (x, weight, bias)]
        groups = F.group_norm(given[0], 2, given[1], given[2])
        layers = F.layer_norm(given[0].mT, (8,), weight=given[1], bias=given[2])
    assert groups.dtype == layers.dtype == torch.bfloat16
    assert torch.equal(groups.cpu(), F.group_norm(low, 2, weight, bias).bfloat16())
    assert torch.equal(layers.cpu(), F.layer_norm(low.mT, (8,), weight, bias).bfloat16())


@program("hpu_ops/autocast_helpers.h, load_list; optimum-habana, gaudi_configuration.py")
def lists_of_autocast_come_from_files(card: Device) -> None:
    with TemporaryDirectory() as folder:
        for name, text in (("lower", "add\n"), ("float32", "matmul\n")):
            (Path(folder) / name).write_text(text)
        card.flags["PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST"] = f"{folder}/lower"
        card.flags["PT_HPU_AUTOCAST_FP32_OPS_LIST"] = f"{folder}/float32"
        x = torch.ones(2, 2, device="hpu")
        with torch.autocast("hpu", dtype=torch.bfloat16):
            assert (x + x).dtype == torch.bfloat16
            assert (x @ x.bfloat16()).dtype == (x * 2).dtype == torch.float32


# Memory, streams, views, float8


@program("hpu/memory.py; vllm-gaudi, HabanaMemoryProfiler; scripts/env_flags.yaml:624", "lazy")
def int64_and_float64_take_four_bytes(card: Device) -> None:
    hpu = import_module(f"{ROOT}.torch.hpu")
    for dtype in (torch.int64, torch.float64, torch.float32):
        before = hpu.memory_allocated()
        held = torch.zeros(1024, dtype=dtype, device="hpu")
        assert hpu.memory_allocated() - before == 4096
        del held


@program("tests/pytest_working/lazy/test_hpu_record_stream.py, test_hpu_stream.py")
def a_tensor_may_be_used_on_another_stream(card: Device) -> None:
    hpu = import_module(f"{ROOT}.torch.hpu")
    x, side = torch.ones(4, device="hpu"), hpu.Stream()
    side.wait_stream(hpu.current_stream())
    with hpu.stream(side):
        y = x * 2
        done = side.record_event()
    hpu.current_stream().wait_event(done)
    y.record_stream(hpu.current_stream())
    assert y.tolist() == [2] * 4


@program("habana_eager/ops/view.cpp; any_mode/test_hpu_unfold.py", "eager")
@program("habana_eager/ops/view.cpp", "eager", "1.19")
def unfold_is_a_view_outside_lazy_mode(card: Device) -> None:
    x = torch.arange(12.0, device="hpu").reshape(2, 6)
    windows = x.unfold(1, 3, 2)
    assert not card.counts.fallbacks
    x.zero_()
    assert not windows.any()


@program("tests/pytest_working/any_mode/test_hpu_index_copy.py: float8")
def a_float8_cache_is_written_by_index(card: Device) -> None:
    rows = torch.randn(2, 8).to(torch.float8_e4m3fn)
    cache = torch.zeros(4, 8, dtype=torch.float8_e4m3fn, device="hpu")
    where = torch.tensor([1, 3], device="hpu")
    assert cache.index_copy_(0, where, rows.to("hpu")) is cache
    assert torch.equal(cache[where].float().cpu(), rows.float())


@program("torch: Tensor.to and Tensor.cpu with a layout")
def a_copy_on_the_host_has_the_layout_that_was_asked_for(card: Device) -> None:
    x = torch.randn(2, 3, 4, 4, device="hpu")
    for made in (
        x.to("cpu", copy=True, memory_format=torch.channels_last),
        x.cpu(memory_format=torch.channels_last),
    ):
        assert made.is_contiguous(memory_format=torch.channels_last)
        close(x, made)


@program("vllm-gaudi, platform.py:26 and patches.py:5; torch.accelerator")
def code_for_any_accelerator_finds_the_card(card: Device) -> None:
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1
    found = torch.accelerator.current_accelerator()
    assert found is not None and torch.ones(2, device=found).device.type == "hpu"
    torch.accelerator.synchronize()
    for refused in (torch.accelerator.empty_cache, torch.accelerator.memory_allocated):
        with pytest.raises(RuntimeError, match="DeviceAllocator"):
            refused()


@program("optimum-habana, DataLoader(pin_memory=True)")
def pinned_batches_go_to_the_card(card: Device) -> None:
    batches = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2, pin_memory=True)
    assert all(batch.is_pinned() and batch.to("hpu").tolist() for (batch,) in batches)


# HPU graphs and compile mode


@program("hpu/graphs.py: a replay works on the storages of its capture", "lazy")
def a_buffer_bound_anew_after_the_capture_is_named(card: Device) -> None:
    class Scaled(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(2, device="hpu") * 2)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model, x = torch.hpu.wrap_in_hpu_graph(Scaled()), torch.ones(2, device="hpu")  # type: ignore[attr-defined]
    model(x)
    model(x)
    assert not card.findings.errors
    model.scale = torch.ones(2, device="hpu") * 3
    model(x)
    assert [found.rule.id for found in card.findings.errors] == ["H069"]


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend="hpu_backend", **options)


@program("tests/pytest_working/any_mode/test_hpu_add_sub_rsub.py", "eager")
def a_factor_lasts_where_numbers_are_symbols(card: Device) -> None:
    x = torch.arange(3, dtype=torch.int32)
    for operator in (torch.add, torch.sub, torch.rsub):
        run = compiled(lambda x, n, a, op=operator: op(x, n, alpha=a), dynamic=True)
        for number, factor in ((5.0, 5), (2.5, 3)):
            close(run(x.to("hpu"), number, factor), operator(x, number, alpha=factor))


@program("dynamo/compile_backend/backends.py and config.py", "eager")
def hpu_backend_hears_its_options_and_refuses_others(card: Device) -> None:
    x = torch.ones(3, 3, device="hpu")
    with pytest.raises(RuntimeError, match="no option 'no_such_option'"):
        compiled(torch.neg, options={"no_such_option": 1})
    for cut in (lambda x: x.nonzero(), lambda x: torch.addcmul(x, x, x)):
        with pytest.raises(Exception, match="eager fallback"):
            compiled(cut, options={"use_eager_fallback": False})(x)
        compiled(cut)(x)


@program("python_packages/habana_frameworks/torch: its modules")
def modules_of_the_package_can_be_imported_and_their_names_refuse(card: Device) -> None:
    for name in ("hpex.kernels.CTCLoss", "dynamo.device_interface", "utils.gaudi_spawn"):
        import_module(f"{ROOT}.torch.{name}")
    kernels = import_module(f"{ROOT}.torch.hpex.kernels.FusedSDPA")
    assert kernels.FusedSDPA is import_module(f"{ROOT}.torch.hpex.kernels").FusedSDPA
    with pytest.raises(NotImplementedError, match="is_gqa is out of the emulator's scope"):
        kernels.is_gqa(1)
    with pytest.raises(ModuleNotFoundError, match="no_such_part"):
        import_module(f"{ROOT}.torch.no_such_part")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.id)
def test_a_program_does_what_it_does_on_a_card(program: Program) -> None:
    with loaded(program) as card:
        program.run(card)
