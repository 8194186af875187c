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
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
        return f"{self.run.__name__}-{'lazy' if self.lazy else 'eager'}"


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


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.id)
def test_a_program_does_what_it_does_on_a_card(program: Program) -> None:
    with loaded(program) as card:
        program.run(card)
