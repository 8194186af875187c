"""Calls of other people's programs that the device takes, and the emulator with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, distributed

from gaudi_emulator import emulate, scope
from gaudi_emulator.device import Device
from gaudi_emulator.lint import lint_script
from lantern_hpu.backends.hpu.env import ROOT
from tests.marks import mostly_slow

Call = Callable[[torch.Tensor], torch.Tensor]


# Compiled functions of x, [3, 4]; `net` is on x's device
COMPILED = {
    "causal attention": "F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)",
    "number written into a row": "assign(x * 2, 0, 7)",
    "number written into an input": "assign(x, 0, 0)",
    "number written through a mask": "assign(x.clone(), x > 3, 0.5)",
    "numbers written through an index": "assign(x + 0, torch.tensor([2], device=x.device), 1)",
    "tensor of numbers": "x * torch.tensor([1.0, 2, 3, 4], device=x.device)",
    "tensor of one number": "torch.where(x > 2, torch.tensor(9.0, device=x.device), x)",
    "as_tensor": "x + torch.as_tensor([1, 2, 3, 4], device=x.device)",
    "as_tensor of a tensor": "torch.as_tensor(x, device=x.device) + 1",
    "new_tensor": "x + x.new_tensor([1, 2, 3, 4])",
    "tensor of the host moved by name": "x + torch.ones(4).to(x.device.type)",
    "type_as": "x + torch.ones(4, dtype=torch.int32, device=x.device).type_as(x)",
    "autocast": "cast(x)",
    "LSTM": "assign(net.lstm(x[None])[0], 0, 1)",
    "GRU": "assign(net.gru(x[None])[0], 0, 1)",
    "attention with heads": "net.heads(x[None], x[None], x[None])[0]",
    "factories in plain Python": "plain(x * 2) + 1",
    "reads in plain Python": "reads(x * 2) + 1",
}
# A program: each function whole where dynamo can trace it whole, and in pieces where it leaves some to Python
COMPILES = """
import copy, sys
import torch, torch.nn.functional as F
import habana_frameworks.torch.core

torch.manual_seed(0)
x = torch.randn(3, 4) * 3
net = torch.nn.ModuleDict(dict(
    lstm=torch.nn.LSTM(4, 5, 2, bidirectional=True), gru=torch.nn.GRU(4, 5),
    heads=torch.nn.MultiheadAttention(4, 2, batch_first=True),
)).eval().requires_grad_(False)
nets = {"cpu": net, "hpu": copy.deepcopy(net).to("hpu")}

def assign(x, where, value):
    x[where] = value
    return x + 1

def cast(x):
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.linear(x, x) @ x[:, :3]

@torch._dynamo.disable
def plain(x):
    made = torch.tensor([1.0, 2, 3, 4], device=x.device) * torch.zeros(4, device=x.device).add_(2)
    at = torch.arange(4, device=x.device) + torch.ones(4).to(x.device.type)
    return x * made + at + torch.eye(4, device=x.device)[0] + torch.full((4,), 3.0, device=x.device)

@torch._dynamo.disable
def reads(x):
    return x + x.tolist()[0][1] + x.sum().item() + float(x.cpu().numpy()[0, 0])

def f(x):
    net = nets[x.device.type]
    return BODY

compiled = torch.compile(f, backend="hpu_backend", dynamic=False, fullgraph=WHOLE)
for turn in range(2):  # the second call compiles nothing
    got, want = compiled((x + turn).to("hpu")).cpu(), f(x + turn)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
"""
IN_PIECES = {"LSTM", "GRU", "factories in plain Python", "reads in plain Python"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", mostly_slow(COMPILED, "tensor of numbers", "LSTM"))
def test_compiled_call_gives_the_cpus_numbers(name: str, tmp_path: Path) -> None:
    file, whole = tmp_path / "compiles.py", str(name not in IN_PIECES)
    file.write_text(COMPILES.replace("BODY", COMPILED[name]).replace("WHOLE", whole))
    card, ended = lint_script(file, [], lazy=False)
    assert ended is None, repr(ended)
    assert card.counts.graphs["launches"] >= 2 and card.counts.fallbacks.total() == 0
    errors = {f.rule.id for f in card.findings.errors}
    assert errors <= ({"H001", "H002"} if name.startswith("reads") else set()), errors


# What is out of scope: on a card it works, here its use is one sentence

VENDORS = (
    *("convert_from_int4", "convert_from_uint4", "cast_to_fp8_v2", "fp8_gemm_v2", "softmax_fp8"),
    *("fp8_sdpa", "mixture_of_experts"),
)
REFUSED = {
    "hpex.kernels": "CustomSoftmax CTCLoss RotaryPosEmbeddingHelperV1 RotaryPosEmbeddingHelperV3 CustomNms "
    "RoiAlignFunction ScaledMaskedSoftmax fp8_fused_sdpa",
    "hpex.optimizers": "Adam AdamW FusedAdagrad FusedAdamW FusedLamb FusedLars FusedResourceApplyMomentum FusedSGD",
    "hpex.normalization": "FusedClipNorm",
    "hpex.movingavrg": "FusedEMA",
    "hpu": "make_graphed_callables ModuleCacher",
    "hpu.metrics": "metrics_dump",
    "utils.experimental": "data_dynamicity detect_recompilation_auto_model",
}
PAGE = (Path(__file__).parent.parent / "docs" / "gaudi-lint.md").read_text()


def outside() -> Iterator[tuple[str, Callable[[Device], object]]]:
    """(name, use) of everything that is refused."""
    for module, names in REFUSED.items():
        for name in names.split():
            yield name, lambda card, m=module, n=name: getattr(part(card, m), n)()  # type: ignore[misc]
    for module in ("transformer_engine", "fp8_autocast"):
        full = f"hpex.experimental.{module}"
        yield full, lambda card, m=full: part(card, m).Linear(4, 4)  # type: ignore[misc]
    for name in VENDORS:
        yield name, lambda card, n=name: getattr(torch.ops.hpu, n)(torch.ones(2, device="hpu"))  # type: ignore[misc]

    def attend(card: Device, *more: object) -> object:
        q = torch.ones(1, 1, 2, 4, device="hpu")
        arguments = (None, 0.0, False, None, "None", None, None, "left", *more)
        return part(card, "hpex.kernels").FusedSDPA.apply(q, q, q, *arguments)

    yield "sink", lambda card: attend(card, False, False, (-1, -1), torch.ones(1))
    yield "more results", lambda card: attend(card, True, False)


def part(card: Device, name: str) -> ModuleType:
    return card.modules[f"{ROOT}.torch.{name}"]


@pytest.mark.parametrize(("name", "use"), list(outside()), ids=[name for name, _ in outside()])
def test_out_of_scope_is_one_sentence_and_on_the_page(
    name: str, use: Callable[[Device], object]
) -> None:
    with emulate(lazy=True) as card, pytest.raises(scope.OutOfScope) as refused:
        use(card)
    said = str(refused.value)
    assert "is out of the emulator's scope; a card has it if its release does. Meanwhile: " in said
    assert name in PAGE and "\n" not in said


def test_names_that_programs_import_fail_when_they_are_called(tmp_path: Path) -> None:
    file = tmp_path / "imports.py"
    file.write_text(
        "from habana_frameworks.torch.hpex.kernels import CustomNms, EmbeddingBag\n"
        "from habana_frameworks.torch.hpex.optimizers import FusedAdamW, FusedLamb\n"
        "from habana_frameworks.torch.hpex.experimental.transformer_engine import recipe\n"
        "from habana_frameworks.torch.hpex.kernels.Fp8Ops import cast_to_fp8\n"
        "from habana_frameworks.torch.core.weight_sharing import HabanaParameterWrapperMeta\n"
        "from habana_frameworks.torch.utils.library_loader import load_habana_module\n"
        "import habana_frameworks.torch.internal.bridge_config as bc\n"
        "nms = CustomNms.apply\nload_habana_module()\nassert bc.get_pt_hpu_lazy_mode() == '0'\n"
        "assert not isinstance(1, EmbeddingBag)\nnms(1)\n"
    )
    _, ended = lint_script(file, [], lazy=False)
    assert isinstance(ended, scope.OutOfScope) and "CustomNms.apply is out" in str(ended)


def test_collectives_over_hccl_reach_the_tensors(tmp_path: Path) -> None:
    with emulate(lazy=False):
        import habana_frameworks.torch.distributed.hccl  # type: ignore[import-not-found]  # noqa: F401

        where = f"file://{tmp_path / 'store'}"
        distributed.init_process_group("hccl", init_method=where, rank=0, world_size=1)
        try:
            x, gathered = torch.ones(3).to("hpu"), [torch.zeros(3).to("hpu")]
            distributed.all_reduce(x)
            distributed.all_gather(gathered, x * 2)
            assert gathered[0].cpu().tolist() == [2.0] * 3
        finally:
            distributed.destroy_process_group()


def test_calls_that_a_card_takes_or_refuses() -> None:
    with emulate(lazy=False):
        import habana_frameworks.torch as ht
        import habana_frameworks.torch.core as htcore  # type: ignore[import-not-found]

        @torch.compile(backend="hpu_backend", fullgraph=True)
        def marked(x: Tensor) -> Tensor:
            htcore.mark_step()
            return x if ht.utils.internal.is_lazy() else x * 2

        assert marked(torch.ones(2, device="hpu")).cpu().tolist() == [2.0, 2.0]
        net = torch.nn.Linear(4, 4)
        alive = net(torch.ones(1, 4))
        assert net.to("hpu").weight.device.type == "hpu" and alive.requires_grad
        for dtype in (torch.uint16, torch.uint32, torch.uint64):
            with pytest.raises(TypeError, match="not supported on HPU"):
                torch.zeros(2, dtype=dtype, device="hpu")
        with pytest.raises(RuntimeError):
            torch.Generator("hpu")
        y = torch.arange(4.0).to("hpu")
        y[[0, 1]] = y[[2, 3]]
        assert y.index_copy_(0, torch.tensor([3], device="hpu"), y[:1]).tolist() == [2, 3, 2, 2]
        assert y.take(torch.tensor([1], dtype=torch.int32).to("hpu")).item() == 3


def test_tensors_are_on_the_card_wherever_they_are_made() -> None:
    """By torch's own Python functions, by a copy's last argument, and inside a compiled function without inputs."""
    with emulate(lazy=False) as card:
        x = torch.rand(1, 1, 8, 8).to("hpu")
        pooled = torch.nn.functional.fractional_max_pool2d(x, 2, output_size=(3, 3))
        shape = torch.unravel_index(torch.tensor([5]).to("hpu"), (2, 3))
        assert pooled.device.type == "hpu" and [i.item() for i in shape] == [1, 2]
        assert x.to(torch.float32, False, True).data_ptr() != x.data_ptr()
        before = dict(card.counts.fallbacks)
        assert torch.equal(torch.diag(x[0, 0]).cpu(), x[0, 0].cpu().diag())

        @torch.compile(backend="hpu_backend")
        def makes(h: Tensor) -> tuple[Tensor, ...]:
            on_card = torch.arange(4, device="hpu")
            return (
                on_card,
                on_card.cpu() + 1,
                h.to("hpu") * 2,
                torch.nn.functional.one_hot(on_card, 4),
            )

        h = torch.ones(3, requires_grad=True)
        made = makes(h)
        assert [t.device.type for t in made] == ["hpu", "cpu", "hpu", "hpu"]
        assert made[0].tolist() == [0, 1, 2, 3] and made[1].tolist() == [1, 2, 3, 4]
        made[2].sum().backward()
        assert h.grad is not None and h.grad.tolist() == [2.0] * 3
        assert dict(card.counts.fallbacks) == before
