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
FORMATS = (torch.float32, torch.bfloat16)


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


# Randomness, accumulation, states of models


@program("tests/pytest_working/any_mode/test_hpu_rng_state.py; hpu/random.py")
def a_state_of_the_generator_draws_the_same_numbers_again(card: Device) -> None:
    hpu = import_module(f"{ROOT}.torch.hpu")
    torch.manual_seed(3)
    state, before = hpu.get_rng_state(), torch.get_rng_state()
    first = torch.rand(8, device="hpu")
    assert not torch.equal(first.cpu(), torch.rand(8, device="hpu").cpu())
    hpu.set_rng_state(state)
    close(torch.rand(8, device="hpu"), first.cpu())
    hpu.manual_seed(4)
    assert torch.equal(torch.get_rng_state(), before), (
        "the host's numbers have a state of their own"
    )
    hpu.manual_seed_all(3)
    close(torch.rand(8, device="hpu"), first.cpu())


@program(
    "hpu/__init__.py, _initialized; torch.utils.checkpoint; optimum-habana, gradient_checkpointing"
)
def layers_computed_twice_drop_the_same_numbers(card: Device) -> None:
    checkpoint = import_module("torch.utils.checkpoint").checkpoint
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 4)).to("hpu")
    x = torch.randn(3, 4, device="hpu")
    found = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        model.zero_grad()
        torch.manual_seed(5)
        y = run(x)
        y.square().sum().backward()
        found.append((y.detach().cpu(), model[0].weight.grad.cpu()))  # type: ignore[union-attr]
    for plain, again in zip(*found, strict=True):
        close(again, plain)


@program("docs.habana.ai, PyTorch Gradient Accumulation; Model-References, trainers")
def gradients_of_parts_add_to_those_of_the_batch(card: Device) -> None:
    core = import_module(f"{ROOT}.torch.core")
    twin = nn.Linear(4, 3)
    model = copy.deepcopy(twin).to("hpu")
    x = torch.randn(6, 4)
    twin(x).square().sum().backward()
    for part in x.to("hpu").chunk(3):
        model(part).square().sum().backward()
        core.mark_step()
    assert model.weight.grad is not None and twin.weight.grad is not None
    close(model.weight.grad, twin.weight.grad, 1e-4)


@program("tests/pytest_working/any_mode/test_ema.py; torch.optim.swa_utils")
def averages_of_weights_follow_them(card: Device) -> None:
    averaging = import_module("torch.optim.swa_utils")
    found = []
    for device in ("cpu", "hpu"):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        model = nn.Sequential(layer, nn.BatchNorm1d(4)).to(device)
        average = averaging.AveragedModel(
            model, multi_avg_fn=averaging.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        for number in range(3):
            with torch.no_grad():
                model(torch.linspace(-1, number, 12).view(3, 4).to(device))
                layer.weight.mul_(1.5)
            average.update_parameters(model)
        found.append({name: value.cpu() for name, value in average.state_dict().items()})
    for name, value in found[0].items():
        close(found[1][name], value)


@program("torch.load(map_location='hpu'); optimum-habana, resume_from_checkpoint")
def a_training_that_was_saved_goes_on_as_if_it_had_not_stopped(card: Device) -> None:
    def learn(model: nn.Module, learner: torch.optim.Optimizer) -> None:
        learner.zero_grad()
        model(torch.ones(2, 4, device="hpu")).square().sum().backward()
        learner.step()

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 3).to("hpu")
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, learner = made()
    learn(model, learner)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "state.pt"
        torch.save({"model": model.state_dict(), "learner": learner.state_dict()}, file)
        for device in ("hpu", "cpu"):
            state = torch.load(file, map_location=device, weights_only=True)
            assert {value.device.type for value in state["model"].values()} == {device}
            other, again = made()
            other.load_state_dict(state["model"])
            again.load_state_dict(state["learner"])
            learn(other, again)
            if device == "hpu":
                learn(model, learner)
            close(other.weight, model.weight.cpu())  # type: ignore[arg-type]


@program("tests/pytest_working/any_mode/test_fused_adam.py; torch.optim.Adam(fused=True)")
def a_fused_optimizer_is_the_plain_one(card: Device) -> None:
    twin = nn.Linear(4, 3)
    model = copy.deepcopy(twin).to("hpu")
    for one, fused in ((twin, False), (model, True)):
        learner = torch.optim.Adam(one.parameters(), lr=0.1, weight_decay=0.1, fused=fused)
        for _ in range(3):
            learner.zero_grad()
            one(torch.ones(2, 4, device="hpu" if fused else "cpu")).square().sum().backward()
            learner.step()
    close(model.weight, twin.weight)


# Indices


@program("any_mode/simple_ops/test_hpu_scatter_with_reduce.py, test_hpu_index_reduce.py")
def places_named_twice_are_reduced(card: Device) -> None:
    x, source = torch.arange(4.0), torch.tensor([5.0, -2.0, 3.0])
    where = torch.tensor([1, 1, 3])
    for reduce in ("sum", "prod", "amax", "amin", "mean"):
        got = x.to("hpu").scatter_reduce(0, where.to("hpu"), source.to("hpu"), reduce)
        close(got, x.scatter_reduce(0, where, source, reduce))
    for reduce in ("prod", "amax", "amin"):
        got = x.to("hpu").index_reduce(0, where.to("hpu"), source.to("hpu"), reduce)
        close(got, x.index_reduce(0, where, source, reduce))


@program("any_mode/simple_ops/test_index_put_4d.py, test_index.py")
def masks_and_numbers_index_together(card: Device) -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    mask, rows = torch.tensor([True, False, True]), torch.tensor([1, 0])
    here = x.to("hpu")
    close(here[:, mask.to("hpu")], x[:, mask])
    close(here[rows.to("hpu"), :, 2], x[rows, :, 2])
    here[:, mask.to("hpu"), 1] = -1.0
    x[:, mask, 1] = -1.0
    here.index_put_((rows.to("hpu"), rows.to("hpu")), torch.ones(4, device="hpu"), accumulate=True)
    x.index_put_((rows, rows), torch.ones(4), accumulate=True)
    close(here, x)


@program("torch.autograd.grad with grad_outputs")
def gradients_come_in_from_the_card_alone(card: Device) -> None:
    x = torch.ones(3, device="hpu", requires_grad=True)
    (found,) = torch.autograd.grad(x * 2, x, grad_outputs=torch.full((3,), 3.0, device="hpu"))
    assert found.tolist() == [6] * 3
    with pytest.raises(RuntimeError, match=META_AND_CARD):
        torch.autograd.grad(x * 2, x, grad_outputs=torch.ones(3, device="meta"))
    with pytest.raises(RuntimeError, match=META_AND_CARD):
        (x * 2).backward(torch.ones(3, device="meta"))


# Graphs


@program("hpu/graphs.py, input_hash: the format is in the key from 1.24 on", "lazy")
@program("hpu/graphs.py, input_hash: the format is not in the key", "lazy", "1.19")
def a_wrapped_function_has_a_graph_for_each_key(card: Device) -> None:
    hpu = import_module(f"{ROOT}.torch.hpu")
    keys = [hpu.graphs.input_hash((torch.ones(2, dtype=t, device="hpu"),)) for t in FORMATS]
    assert len(set(keys)) == (2 if card.release.key_has_dtype else 1)
    calls: list[int] = []

    def double(x: Tensor, factor: int = 2) -> Tensor:
        calls.append(factor)
        return x * factor

    graphed = hpu.wrap_in_hpu_graph_func(double)
    for factor in (2, 2, 3, 3, 2):
        assert graphed(torch.ones(2, device="hpu"), factor=factor).tolist() == [factor] * 2
    assert set(calls) == {2, 3}


@program("hpu/graphs.py: graphs are of lazy mode alone from 1.24 on", "eager")
def graphs_outside_lazy_mode_are_refused(card: Device) -> None:
    hpu = import_module(f"{ROOT}.torch.hpu")
    with pytest.raises(RuntimeError, match="lazy mode only"):
        hpu.HPUGraph()


@program("tests/pytest_working/lazy/test_capture_replay_inplace.py", "lazy")
def a_capture_executes_what_it_records(card: Device) -> None:
    hpu = import_module(f"{ROOT}.torch.hpu")
    x, graph = torch.zeros(2, device="hpu"), hpu.HPUGraph()
    with hpu.graph(graph):
        x += 1
    graph.replay()
    hpu.synchronize()
    assert x.tolist() == [2, 2]


@program("hpu_ops/cpu_fallback.cpp: not in a capture", "lazy")
def what_the_card_lacks_cannot_be_captured(card: Device) -> None:
    hpu = import_module(f"{ROOT}.torch.hpu")
    x = torch.tensor([4, 6], dtype=torch.int32, device="hpu")
    assert torch.gcd(x, x + 2).tolist() == [2, 2] and card.counts.fallbacks
    with pytest.raises(RuntimeError, match="cpu fallback is not supported"):
        hpu.wrap_in_hpu_graph_func(torch.gcd)(x, x)


@program("hpu/metrics: graph_compilation, cpu_fallback", "lazy")
def counters_tell_what_was_compiled_and_what_fell_back(card: Device) -> None:
    hpu = import_module(f"{ROOT}.torch.hpu")
    metrics = import_module(f"{ROOT}.torch.hpu.metrics")
    x = torch.tensor([4, 6], dtype=torch.int32, device="hpu")
    with metrics.metric_localcontext("cpu_fallback") as fell:
        torch.gcd(x, x).tolist()
    with metrics.metric_localcontext("graph_compilation") as made:
        for length in (3, 3, 5):
            (torch.ones(length, device="hpu") * 2).sum().item()
            hpu.synchronize()
    assert fell.stats()[0][1] == 1 and made.stats()[0][1] == 2


@program("torch.compile of a training step; any_mode/compile tests", "eager")
def a_compiled_step_learns_as_a_plain_one(card: Device) -> None:
    twin = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    model = copy.deepcopy(twin).to("hpu")
    run = compiled(model)
    x = torch.randn(3, 4)
    for one, call, data in ((twin, twin, x), (model, run, x.to("hpu"))):
        learner = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            learner.zero_grad()
            call(data).square().mean().backward()
            learner.step()
    for here, there in zip(model.parameters(), twin.parameters(), strict=True):
        close(here, there)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.id)
def test_a_program_does_what_it_does_on_a_card(program: Program) -> None:
    with loaded(program) as card:
        program.run(card)
