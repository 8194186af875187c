"""Small programs of the kinds that the vendor's documents and tests have: each gives on the emulated card what a card
gives.

A program says which of the vendor's sources asks for it (files of HabanaAI/gaudi-pytorch-bridge unless another is
named) and runs in the modes that it is for. Where numbers are compared, the CPU's are computed by torch beside them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
from gaudi_emulator.releases import RELEASES, EmulatorError, listed
from gaudi_emulator.scope import Beyond, OutOfScope
from lantern_hpu.backends.hpu.backend import HPUBackend
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
    finds: str | None = (
        None  # the rules that it breaks, of errors and warnings; None: not looked at
    )

    @property
    def id(self) -> str:
        mode = "lazy" if self.lazy else "eager"
        return "-".join(filter(None, (self.run.__name__, mode, self.release)))


PROGRAMS: list[Program] = []
SLOW = ("a_factor_lasts_where_numbers_are_symbols", "a_compiled_step_learns_as_a_plain_one")


def program(
    source: str,
    modes: str = "lazy eager",
    release: str | None = None,
    flags: Mapping[str, str] | None = None,
    finds: str | None = None,
) -> Callable[[Callable[[Device], None]], Callable[[Device], None]]:
    """Adds a function to the programs, once for each mode."""

    def add(run: Callable[[Device], None]) -> Callable[[Device], None]:
        for mode in modes.split():
            PROGRAMS.append(Program(run, source, mode == "lazy", release, flags or {}, finds))
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
    turned = x.transpose(1, 2)
    for source, goal in ((turned, "cpu"), (turned.cpu(), "hpu")):
        assert source.to(goal, copy=True, memory_format=torch.contiguous_format).is_contiguous()


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


@dataclass
class Metadata:
    lengths: Tensor
    heads: int


@program("hpu/graphs.py, input_hash: dataclasses go by what they hold", "lazy", finds="")
def a_dataclass_made_anew_is_the_same_argument(card: Device) -> None:
    graphed = hpu_module().wrap_in_hpu_graph_func(lambda given: given.lengths * given.heads)
    for heads in (2, 2, 3):
        made = graphed(Metadata(torch.ones(2, device="hpu"), heads))
        assert made.tolist() == [heads] * 2
    assert card.counts.graphs["captured"] == 2


@program("torch.tensor and torch.as_tensor of a tensor, with another format", finds="")
def a_tensor_made_of_another_has_the_format_that_was_asked_for(card: Device) -> None:
    x, half = torch.ones(2, device="hpu"), torch.float16
    copied = torch.tensor(x, dtype=half, device="hpu", requires_grad=True)
    assert copied.requires_grad
    for made in (copied, torch.as_tensor(x, dtype=half, device="hpu"), x.new_tensor(x, dtype=half)):
        assert made.dtype == half and made.device.type == "hpu"


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


# As vllm-gaudi, transformers and plain PyTorch are written: the right ones break no rule, the others exactly one


def hpu_module(name: str = "hpu") -> Any:
    return import_module(f"{ROOT}.torch.{name}")


def padded(tokens: list[int], bucket: int) -> Tensor:  # -> [1, bucket]
    return torch.tensor([tokens + [0] * (bucket - len(tokens))], device="hpu")


def serve_buckets(card: Device, warmed: tuple[int, ...]) -> None:
    """Prompts padded to a few lengths, each of them captured before the first request."""
    twin = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)).eval()
    graphed = hpu_module().wrap_in_hpu_graph(copy.deepcopy(twin).to("hpu"))
    with torch.no_grad():
        for bucket in 2 * warmed:  # a capture and a replay of each
            graphed(padded([1], bucket))
        card.warmed_up()
        for prompt in ([1, 2], [3, 4, 5], [6]):
            logits = graphed(padded(prompt, 2 if len(prompt) <= 2 else 4)).cpu()
            close(logits[0, : len(prompt)], twin(torch.tensor(prompt)))


@program("vllm-gaudi, bucketing and warmup_model", "lazy", finds="")
def prompts_of_warmed_buckets_compile_nothing(card: Device) -> None:
    serve_buckets(card, (2, 4))
    assert not card.counts.recompiles


@program("vllm-gaudi, bucketing without its longest bucket", "lazy", finds="H020")
def a_bucket_that_was_not_warmed_up_is_compiled_late(card: Device) -> None:
    serve_buckets(card, (2,))


def read_blocks(slots: list[int], blocks: list[int]) -> None:
    """Keys written to slots of a paged cache, and read back by a block table; block 0 is for padding."""
    cache = torch.zeros(4, 2, 3, device="hpu")  # [blocks, block size, width]
    keys = torch.arange(1.0, 10.0).view(3, 3)
    flat = cache.view(8, 3)
    flat.index_copy_(0, torch.tensor(slots, device="hpu"), keys.to("hpu"))
    found = cache.index_select(0, torch.tensor(blocks, device="hpu")).flatten(0, 1)  # [T, width]
    close(found[:3], keys)


@program("vllm-gaudi, extension/cache_ops.py insert_or_update_cache", finds="")
def a_paged_cache_is_read_by_its_block_table(card: Device) -> None:
    read_blocks([4, 5, 2], [2, 1, 0])


@program("vllm-gaudi, a block table padded with -1", finds="H050")
def a_block_table_padded_with_a_negative_number_is_named(card: Device) -> None:
    read_blocks([4, 5, 2], [2, 1, -1])


class Decoder(nn.Module):
    """One layer of attention over a static cache, written at a position that the card holds."""

    kv: Tensor  # [2, T, H]
    slots: Tensor  # [T]

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(8, 4), nn.Linear(4, 12, bias=False)
        self.register_buffer("kv", torch.zeros(2, length, 4))
        self.register_buffer("slots", torch.arange(length))

    def forward(self, token: Tensor, position: Tensor) -> Tensor:  # [1], [1] -> [1, 8]
        q, k, v = self.qkv(self.embed(token)).chunk(3, -1)  # [1, H] each
        self.kv.index_copy_(1, position, torch.stack([k, v]))
        scores = (q @ self.kv[0].T).masked_fill(self.slots > position, -1e9)
        logits: Tensor = scores.softmax(-1) @ self.kv[1] @ self.embed.weight.T
        return logits


def decode(model: Callable[..., Tensor], device: str, steps: int) -> list[int]:
    token = torch.tensor([1], device=device)
    position, drawn = torch.zeros(1, dtype=torch.int64, device=device), []
    with torch.no_grad():
        for _ in range(steps):
            token = model(token, position).argmax(-1)
            position = position + 1
            drawn.append(token.clone())
    return torch.cat(drawn).tolist()


@program("transformers, StaticCache in generate; optimum-habana, hpu_graphs=True", "lazy", finds="")
def a_static_cache_is_decoded_with_one_graph(card: Device) -> None:
    model = Decoder(8).eval()
    want = decode(copy.deepcopy(model), "cpu", 6)
    graphed = hpu_module().wrap_in_hpu_graph(model.to("hpu"))
    assert decode(graphed, "hpu", 6) == want
    assert card.counts.graphs["captured"] == 1


@program("transformers, DynamicCache in generate", "lazy", finds="H013")
def a_cache_that_grows_by_cat_is_named(card: Device) -> None:
    core = hpu_module("core")
    keys = torch.zeros(1, 1, 4, device="hpu")  # [B, T, H]
    for _ in range(6):
        keys = torch.cat([keys, torch.ones(1, 1, 4, device="hpu")], 1)
        core.mark_step()


def merge(card: Device, change: Callable[[nn.Linear, Tensor], None]) -> None:
    """A low-rank change goes into the weights of a layer that was captured."""
    layer = nn.Linear(4, 4, bias=False).eval()
    before, delta, x = layer.weight.detach().clone(), torch.randn(4, 4), torch.randn(2, 4)
    graphed = hpu_module().wrap_in_hpu_graph(layer.to("hpu"))
    with torch.no_grad():
        close(graphed(x.to("hpu")), x @ before.T)
        change(layer, delta.to("hpu"))
        after = graphed(x.to("hpu")).cpu()
    merged = not any(finding.rule.id == "H069" for finding in card.findings.errors)
    close(after, x @ (before + merged * delta).T)


def add_in_place(layer: nn.Linear, delta: Tensor) -> None:
    layer.weight.data += delta


def bind_anew(layer: nn.Linear, delta: Tensor) -> None:
    layer.weight = nn.Parameter(layer.weight + delta)


def data_bound_anew(layer: nn.Linear, delta: Tensor) -> None:
    layer.weight.data = layer.weight.data + delta


@program("peft, tuners/lora/layer.py merge; the same under 1.19", "lazy", finds="")
@program("peft, tuners/lora/layer.py merge", "lazy", "1.19", finds="")
def a_merge_in_place_is_seen_by_a_captured_graph(card: Device) -> None:
    merge(card, add_in_place)


@program("hpu/graphs.py: a parameter bound anew after the capture", "lazy", finds="H069")
def a_merge_into_a_new_parameter_is_named(card: Device) -> None:
    merge(card, bind_anew)


@program("hpu/graphs.py: data bound anew after the capture", "lazy", "1.19", finds="H069")
def a_merge_into_new_data_is_named(card: Device) -> None:
    merge(card, data_bound_anew)


def call_wrapped(keep: Callable[[list[Tensor], Tensor, Tensor], None]) -> None:
    """Three calls of a wrapped layer, of whose inputs and outputs a program keeps some."""
    layer = nn.Linear(4, 4).eval()
    twin = copy.deepcopy(layer)
    held: list[Tensor] = []
    graphed = hpu_module().wrap_in_hpu_graph(layer.to("hpu"))
    with torch.no_grad():
        for number in range(3):
            x = torch.full((2, 4), float(number))
            here = x.to("hpu")
            made = graphed(here)
            close(made, twin(x))
            keep(held, here, made)
    for kept in held:
        kept.sum().item()


@program("optimum-habana, generation; Model-References, inference", "lazy", finds="")
@program("optimum-habana, generation; Model-References, inference", "lazy", "1.19", finds="")
def a_wrapped_module_takes_a_new_tensor_at_each_call(card: Device) -> None:
    call_wrapped(lambda held, x, made: held.append(made.clone()))


@program(
    "hpu/graphs.py, copy_to: the first caller's tensor is the static input", "lazy", finds="H064"
)
def an_input_that_a_later_call_overwrites_is_named(card: Device) -> None:
    call_wrapped(lambda held, x, made: held.append(x))


@program("hpu/graphs.py: each replay writes the same outputs", "lazy", finds="H063")
def an_output_that_a_later_call_overwrites_is_named(card: Device) -> None:
    call_wrapped(lambda held, x, made: held.append(made))


def train(each: Callable[[Tensor], None], marks_backward: bool = True) -> None:
    """Steps of Adam with a mark after backward and after the optimizer, as Model-References have them."""
    core = hpu_module("core")
    twin = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model, x = copy.deepcopy(twin).to("hpu"), torch.randn(6, 4)
    here = x.to("hpu")
    for one, data in ((twin, x), (model, here)):
        learner = torch.optim.AdamW(one.parameters(), lr=0.1, foreach=False)
        for _ in range(8):
            learner.zero_grad()
            loss = one(data).square().mean()
            loss.backward()
            if one is model and marks_backward:
                core.mark_step()
            learner.step()
            if one is model:
                core.mark_step()
                each(loss)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        close(mine, theirs, 1e-4)


@program("docs.habana.ai, Getting Started with Training: mark_step", "lazy", finds="")
def a_training_with_step_marks_reads_its_loss_at_the_end(card: Device) -> None:
    losses: list[Tensor] = []
    train(lambda loss: losses.append(loss.detach()))
    assert losses[-1].item() < losses[0].item()


@program("Model-References, a loss printed at each step", "lazy", finds="H001")
def a_loss_that_is_read_at_each_step_is_named(card: Device) -> None:
    train(lambda loss: print(loss.item()), marks_backward=False)


@program("torch.utils.checkpoint with dropout; optimum-habana, gradient_checkpointing", finds="")
def a_checkpoint_draws_its_dropout_again(card: Device) -> None:
    again = import_module("torch.utils.checkpoint").checkpoint
    block = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 4)).to("hpu")
    x, found = torch.randn(3, 4).to("hpu"), []
    for run in (block, lambda t: again(block, t, use_reentrant=False)):
        torch.manual_seed(7)
        block.zero_grad()
        run(x.clone().requires_grad_()).sum().backward()
        found.append([p.grad.cpu() for p in block.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        close(one, other)


@program("vllm-gaudi, HabanaMemoryProfiler; docs.habana.ai, Memory Statistics", "lazy", finds="")
def memory_is_counted_by_tensor(card: Device) -> None:
    hpu = hpu_module()
    hpu.reset_accumulated_memory_stats()
    before = hpu.memory_stats(0)
    held = [torch.zeros(1024, device="hpu") for _ in range(3)]
    now = hpu.memory_stats("hpu:0")
    assert now["NumAllocs"] == now["ActiveAllocs"] == 3 and now["NumFrees"] == 0
    assert now["InUse"] - before["InUse"] == 3 * 4096 and now["MaxAllocSize"] >= 4096
    held.clear()
    assert hpu.memory_stats()["NumFrees"] == 3 and hpu.memory_allocated() == before["InUse"]
    assert hpu.max_memory_allocated() >= now["InUse"] and "NumAllocs:" in hpu.memory_summary()
    hpu.reset_peak_memory_stats()
    assert hpu.max_memory_allocated() == hpu.memory_allocated()


@program(
    "torch.profiler with ProfilerActivity.HPU; docs.habana.ai, Profiling with PyTorch", finds=""
)
def a_profile_of_some_steps_is_written(card: Device) -> None:
    profiler = torch.profiler
    ready: list[Any] = []
    kinds = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.HPU]
    plan = profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with profiler.profile(activities=kinds, schedule=plan, on_trace_ready=ready.append) as made:
        for _ in range(3):
            (torch.ones(4, device="hpu") * 2).sum().item()
            made.step()
    assert len(ready) == 1


@program("hpu/events.py; docs.habana.ai, timing with events", finds="")
def two_recorded_events_give_milliseconds(card: Device) -> None:
    hpu = hpu_module()
    begin, end = (hpu.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="Both events must be recorded"):
        begin.elapsed_time(end)
    begin.record()
    side = hpu.Stream()
    with hpu.stream(side):
        y = torch.ones(8, 8, device="hpu") @ torch.ones(8, 8, device="hpu")
    hpu.current_stream().wait_stream(side)
    hpu.record_stream(y, hpu.current_stream())
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 0 and y[0, 0].item() == 8


def scale_to_float8(largest: float) -> Tensor:
    """Numbers scaled to a range, cast, and scaled back."""
    x = torch.linspace(-3, 3, 7, device="hpu")
    scale = x.abs().max() / largest
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@program("vllm-gaudi, extension/ops.py: float8 of a Gaudi 2 ends at 240", finds="")
def numbers_scaled_to_240_go_to_float8(card: Device) -> None:
    torch.testing.assert_close(
        scale_to_float8(240).cpu(), torch.linspace(-3, 3, 7), atol=0.2, rtol=0
    )


@program("any_mode/test_hpu_fp8_ops_any_mode.py, test_cast_to_fp8_v2_out_of_range", finds="H035")
def numbers_scaled_to_448_are_cut_off(card: Device) -> None:
    assert scale_to_float8(448).abs().max().item() == pytest.approx(3 * 240 / 448)


@program("a checkpoint in float8, made for 448", finds="H035")
def float8_of_another_maker_is_not_a_number(card: Device) -> None:
    weight = torch.tensor([100.0, 448.0]).to(torch.float8_e4m3fn)
    assert weight.to("hpu").float().isnan().tolist() == [False, True]


@program("docs.habana.ai, Mixed Precision with torch.compile", "eager", finds="")
def a_compiled_function_computes_under_autocast(card: Device) -> None:
    layer, x = nn.Linear(4, 4).to("hpu"), torch.randn(3, 4)

    def norm(t: Tensor) -> Tensor:
        with torch.autocast("hpu", dtype=torch.bfloat16):
            logits: Tensor = layer(t)
        return logits.float().softmax(-1) * (1 if logits.dtype == torch.bfloat16 else 2)

    with torch.no_grad():
        found = compiled(norm)(x.to("hpu"))
    want = F.linear(x, layer.weight.cpu(), layer.bias.cpu()).softmax(-1)
    close(found, want.detach(), 2e-2)


@program("torch.compile without a backend", "eager", finds="H086")
def inductor_has_no_code_for_the_card(card: Device) -> None:
    double = torch.compile(lambda x: x * 2, backend="inductor")
    with suppress(Exception):
        double(torch.ones(2, device="hpu"))


@program("hpu/_utils.py, HPUGuardImpl.h: one device a process", finds="")
def there_is_no_second_device(card: Device) -> None:
    hpu = hpu_module()
    hpu.set_device(0)
    with hpu.device("hpu:0"):
        assert torch.ones(2, device="hpu:0").get_device() == hpu.current_device() == 0
    refused: list[Callable[[], Any]] = [
        lambda: hpu.set_device(9),
        lambda: hpu.device(1),
        lambda: hpu.memory_allocated(5),
        lambda: hpu.get_device_name("hpu:2"),
        lambda: hpu.get_rng_state(1),
    ]
    for use in refused:
        with pytest.raises(AssertionError, match="Invalid device id"):
            use()
    for move in (lambda: torch.ones(2, device="hpu:1"), lambda: nn.Linear(2, 2).to("hpu:1")):
        with pytest.raises(RuntimeError, match="habana active device: 1 != 0"):
            move()
    with pytest.raises(ValueError, match="Expected a hpu device"):
        hpu.memory_allocated("cpu")


@program("core/torch_overwrites.py, wrap_seed; hpu/random.py", finds="")
def seeds_reach_the_card(card: Device) -> None:
    hpu, host = hpu_module(), torch.Generator().manual_seed(3)
    assert torch.seed() == hpu.initial_seed()
    state = hpu.get_rng_state_all()
    drawn = torch.rand(3, device="hpu")
    hpu.set_rng_state_all(state)
    close(drawn, torch.rand(3, device="hpu").cpu())
    first = torch.randn(3, device="hpu", generator=host)
    host.manual_seed(3)
    close(first, torch.randn(3, device="hpu", generator=host).cpu())


@program("hpex/kernels/FusedSDPA.py, sdpa_fwd_wrapper", finds="")
def fused_attention_asserts_what_its_training_needs(card: Device) -> None:
    hpu, fused = hpu_module(), hpu_module("hpex.kernels").FusedSDPA
    q = torch.randn(1, 2, 4, 8, device="hpu", requires_grad=True)
    still, lengths = q.detach(), torch.tensor([4], device="hpu")
    with pytest.raises(TypeError):
        fused.apply(still, still, still, is_causal=True)
    fast = (None, 0.0, False, None, "fast")
    with pytest.raises(AssertionError, match="fast"):
        fused.apply(q, q, q, *fast)
    with pytest.raises(AssertionError, match="valid_seq_len"):
        fused.apply(q, q, q, None, 0.0, True, None, "None", None, lengths)
    with hpu.sdp_kernel(enable_recompute=False):
        fused.apply(q, q, q, *fast).sum().backward()
    assert q.grad is not None and hpu.recompute_sdp_enabled()
    host = still.cpu()
    want = F.scaled_dot_product_attention(host, host, host)
    close(fused.apply(still, still, still, *fast), want)


@program("docs.habana.ai, PyTorch Support Matrix: torch.jit in no mode", finds="")
def torchscript_is_refused(card: Device) -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    traced = torch.jit.trace(layer, x)
    close(traced(x), layer(x))
    for use in (lambda: torch.jit.trace(layer.to("hpu"), x.to("hpu")), lambda: traced(x.to("hpu"))):
        with pytest.raises(EmulatorError, match="TorchScript does not run on hpu"):
            use()


@program("docs.habana.ai, GPU Migration Toolkit", finds="")
def the_migration_toolkit_says_that_it_is_not_here(card: Device) -> None:
    with pytest.raises(OutOfScope, match="gpu_migration is out of the emulator's scope"):
        import_module(f"{ROOT}.torch.gpu_migration")


@program("a random number of the host in a captured function", "lazy", finds="H070")
def a_random_number_of_the_host_is_named(card: Device) -> None:
    def drop(x: Tensor) -> Tensor:
        return x * float(torch.rand(()) > 2)

    graphed = hpu_module().wrap_in_hpu_graph_func(drop)
    assert graphed(torch.ones(2, device="hpu")).tolist() == [0, 0]


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=pytest.mark.slow) if p.run.__name__ in SLOW else p for p in PROGRAMS],
    ids=lambda p: p.id,
)
def test_a_program_does_what_it_does_on_a_card(program: Program) -> None:
    with loaded(program) as card:
        program.run(card)
        found = {f.rule.id for f in card.findings.sorted() if f.severity != "info"}
    assert program.finds is None or found == set(program.finds.split())


def test_every_public_name_is_there_or_refused() -> None:
    page = (Path(__file__).parents[1] / "docs/gaudi-lint.md").read_text()
    for release in RELEASES:
        with emulate(release, lazy=True):
            import_module(f"{ROOT}.torch")
            for name in listed("public") + listed("public_since_1.24") * (release != "1.19"):
                module, _, own = name.rpartition(".")
                value = getattr(import_module(f"{ROOT}.torch.{module}"), own)
                if isinstance(value, Beyond):
                    assert f"`{own}`" in page, own
                    with pytest.raises(OutOfScope, match=f"{own} is out of the emulator's scope"):
                        value()


def test_a_report_of_an_emulated_card_says_so() -> None:
    for release in RELEASES:
        with emulate(release, lazy=True):
            backend = HPUBackend()
            ok, why = backend.available()
            marked = f"GAUDI2 (emulated, bridge {release}: contract-checked)"
            assert ok and why.startswith(marked) and backend.describe()["card"] == marked
            assert backend.hpu.get_device_name() == "GAUDI2"
