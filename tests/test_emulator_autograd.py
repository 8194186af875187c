"""Torch's operators give the CPU's numbers on the emulated card, and gradients eager and compiled; inference_mode."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from gaudi_emulator import emulate
from lantern_hpu.ops.kernels import rms_norm

SHARDS = 8
# Of torch's operators, those whose first sample has no gradient to compare here, and why
LEFT_OUT = {
    "reads its lengths on the host": "nn.functional.ctc_loss tensor_split",
    "sparse, or of complex numbers": "to_sparse sparse.mm.reduce fft.hfft",
    "runs in Python behind a graph break, and makes tensors in C++": (
        "corrcoef cov combinations nn.functional.scaled_dot_product_attention"
    ),
    "makes a tensor of a number in C++": "quantile nanquantile",
    "copies to the host inside, or is called on the base class": "to __getitem__",
    "drops out at random": "nn.functional.multi_head_attention_forward",
}


# Those whose numbers are not the CPU's by themselves, or that a card refuses
NOT_COMPARED = {
    "random": (
        "rand normal dropout bernoulli uniform multinomial exponential cauchy geometric rrelu empty fractional lowrank"
    ),
    "of complex numbers, or sparse": "fft. stft sparse.",
    "sums bfloat16 in other parts by device": "linear_cross_entropy.chunked",
    "called on the base class, or names the CPU": "__getitem__ to",
    "of numbers beyond int32, or unsigned ones": "hash_tensor masked. unravel_index",
    "takes indices of the host": "tensor_split",
    "drops out in its samples": "multi_head_attention_forward scaled_dot_product_attention",
}


def gradients(function: Callable[..., Any], values: Any, device: str) -> list[Tensor]:
    """Of the sum of squares of all results, with regard to each float tensor among the values (args, kwargs)."""

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone().to(device).requires_grad_(value.requires_grad)

    args, kwargs = tree_map(placed, values)
    results = tree_flatten(function(*args, **kwargs))[0]
    learning = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    torch.stack([r.square().sum() for r in learning]).sum().backward()
    tensors = (t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor))
    return [torch.zeros(0) if t.grad is None else t.grad.cpu() for t in tensors if t.requires_grad]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-4, equal_nan=True)
        for a, b in zip(some, others, strict=True)
    )


def compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, backend="hpu_backend", dynamic=False)


@pytest.mark.filterwarnings("ignore")
def test_fused_kernels_learn_as_plain_ones_eager_and_compiled() -> None:
    def plain(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
        return rms_norm(x, w, 1e-5) + x * cos + turned * sin

    x, w = torch.randn(2, 4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    values: Any = ((x, w, torch.randn(4, 8), torch.randn(4, 8)), {})
    with emulate(lazy=False):
        from habana_frameworks.torch.hpex.kernels import apply_rotary_pos_emb  # type: ignore[import-not-found]
        from habana_frameworks.torch.hpex.normalization import FusedRMSNorm  # type: ignore[import-not-found]

        def fused(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return FusedRMSNorm.apply(x, w, 1e-5) + apply_rotary_pos_emb(x, cos, sin)

        want = gradients(plain, values, "cpu")
        assert same(gradients(fused, values, "hpu"), want)
        assert same(gradients(compiled(fused), values, "hpu"), want)
        with pytest.raises(TypeError, match="positional"):
            apply_rotary_pos_emb(x, cos=x, sin=x)
        h = x.detach().to("hpu").requires_grad_() * 2
        y = FusedRMSNorm.apply(h, w.detach().to("hpu"), 1e-5)
        h.add_(100.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_views_of_ordinary_tensors_are_taken_under_inference_mode() -> None:
    with emulate(lazy=False):
        x = torch.randn(4, 3).to("hpu")
        layer = torch.nn.MultiheadAttention(4, 2, batch_first=True).to("hpu").eval()
        with torch.inference_mode():
            for view in [x[0], x[1:], x.t(), x.view(-1), x[None], x.unflatten(0, (2, 2))]:
                assert view.device.type == "hpu" and not view.is_inference()
            made = layer(*[torch.ones(1, 2, 4, device="hpu")] * 3)[0]
            assert made.is_inference()
        x[0].add_(1.0)  # and outside they are as good as any


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_operator_that_torch_differentiates_agrees(shard: int) -> None:
    """By torch's own samples: eager and compiled, the gradient of the first one that has a tensor."""
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    left_out = {name for names in LEFT_OUT.values() for name in names.split()}
    wrong = []
    with emulate(lazy=False) as card:
        for info in [i for i in op_db if i.supports_autograd][shard::SHARDS]:
            if info.full_name in left_out or torch.float32 not in info.dtypes:
                continue
            with card.aside():
                try:
                    values = sample_of(info)
                    want = gradients(info.op, values, "cpu")
                except (RuntimeError, StopIteration):
                    continue  # complex or sparse results
            torch._dynamo.reset()
            for how in (info.op, compiled(lambda *args, op=info.op, **kw: op(*args, **kw))):
                try:
                    agrees = same(gradients(how, values, "hpu"), want)
                except Exception as error:
                    wrong.append((info.full_name, how is info.op, repr(error)[:200]))
                else:
                    wrong += (
                        [] if agrees else [(info.full_name, how is info.op, "another gradient")]
                    )
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("lazy", [True, False])
def test_every_operator_of_torch_gives_the_cpus_numbers(lazy: bool, dtype: torch.dtype) -> None:
    """Four of torch's own samples each; what is made is made on the card."""
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    names = [name for names in NOT_COMPARED.values() for name in names.split()]
    wrong, compared = [], 0
    with emulate(lazy=lazy) as card:
        for info in op_db:
            named = any(n in info.full_name if n != "to" else n == info.full_name for n in names)
            if named or dtype not in info.dtypes:
                continue
            with card.aside():
                torch.manual_seed(0)
                samples = list(islice(info.sample_inputs("cpu", dtype), 4))
            for sample in samples:
                values = (sample.input, *sample.args), sample.kwargs
                with card.aside():
                    try:
                        want = results(info.op, values, "cpu")
                    except Exception:
                        continue  # not on a CPU, or a view beyond its copy
                if any(t.is_complex() or t.layout != torch.strided for t in want):
                    continue
                compared += 1
                try:
                    got = results(info.op, values, "hpu")
                    agrees = [t.dtype for t in got] == [t.dtype for t in want] and same(got, want)
                except Exception as error:
                    wrong.append((info.full_name, repr(error)[:200]))
                else:
                    wrong += [] if agrees else [(info.full_name, "other numbers")]
    assert not wrong and compared > 800, (compared, wrong)


def results(function: Callable[..., Any], values: Any, device: str) -> list[Tensor]:
    """What an operator makes of values (args, kwargs) on a device, copied to the host."""

    def placed(value: Any) -> Any:
        return value.detach().clone().to(device) if isinstance(value, Tensor) else value

    args, kwargs = tree_map(placed, values)
    kwargs |= {"device": device} if "device" in kwargs else {}
    made = [t for t in tree_flatten(function(*args, **kwargs))[0] if isinstance(t, Tensor)]
    return [t.detach().cpu() for t in made]


def sample_of(info: Any) -> Any:
    torch.manual_seed(0)
    samples = info.sample_inputs("cpu", torch.float32, requires_grad=True)
    sample = next(s for s in samples if isinstance(s.input, (Tensor, list, tuple)))
    return (sample.input, *sample.args), sample.kwargs
