"""Calls of other people's programs that the device takes, and the emulator with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lantern_hpu.backends.hpu.emulator import emulate
from lantern_hpu.backends.hpu.lint import lint_script
from lantern_hpu.backends.hpu.releases import RELEASES, Release
from lantern_hpu.commands.lint import main

Call = Callable[[torch.Tensor], torch.Tensor]
NATIVE: dict[str, Call] = {
    "slice_scatter": lambda x: x.slice_scatter(x[:1] * 2, 0, 0, 1),
    "select_scatter": lambda x: x.select_scatter(x[0] * 2, 0, 1),
    "diagonal_scatter": lambda x: x.diagonal_scatter(x.diagonal() * 2),
    "fp8 repeat": lambda x: x.to(torch.float8_e4m3fn).repeat(2, 1).float(),
    "fp8 roll": lambda x: x.to(torch.float8_e4m3fn).roll(1, 0).float(),
}


@pytest.mark.parametrize("release", RELEASES.values(), ids=str)
@pytest.mark.parametrize("name", NATIVE)
def test_native_call_does_not_fall_back(name: str, release: Release) -> None:
    x = torch.arange(16.0).view(4, 4)
    with emulate(release=release) as card:
        got = NATIVE[name](x.to("hpu")).cpu()
        assert card.counts.fallbacks.total() == 0
    assert torch.equal(got, NATIVE[name](x))


@pytest.mark.parametrize("release", RELEASES.values(), ids=str)
def test_norm_takes_two_number_formats(release: Release) -> None:
    with emulate(release=release) as card:
        norm = card.modules["habana_frameworks.torch.hpex.normalization"].FusedRMSNorm
        x = torch.randn(2, 8, dtype=torch.bfloat16)
        made = norm.apply(x.to("hpu"), torch.ones(8, device="hpu"), 1e-6).cpu()
    wanted = torch.nn.functional.rms_norm(x.float(), (8,), eps=1e-6)
    assert made.dtype == torch.bfloat16 and torch.allclose(made.float(), wanted, atol=1e-2)


@pytest.mark.parametrize("release", RELEASES.values(), ids=str)
@pytest.mark.parametrize("mode", ["none", "Fast"])
def test_attention_takes_lengths_padded_on_the_right(mode: str, release: Release) -> None:
    q = torch.randn(1, 2, 4, 8)
    with emulate(release=release) as card:
        sdpa = card.modules["habana_frameworks.torch.hpex.kernels"].FusedSDPA
        x, lengths = q.to("hpu"), torch.tensor([3], dtype=torch.int32, device="hpu")
        made = sdpa.apply(x, x, x, None, 0.0, True, None, mode, True, lengths, "right").cpu()
    short = q[:, :, :3]
    wanted = torch.nn.functional.scaled_dot_product_attention(short, short, short, is_causal=True)
    assert torch.allclose(made[:, :, :3], wanted, atol=1e-5)


def test_rope_begins_at_an_offset() -> None:
    p, cos, sin = torch.randn(2, 3, 4, 8), torch.randn(1, 1, 9, 8), torch.randn(1, 1, 9, 8)
    with emulate() as card:
        rope = card.modules["habana_frameworks.torch.hpex.kernels"].RotaryPosEmbeddingHelperV1
        made = rope.apply(p.to("hpu"), cos.to("hpu"), sin.to("hpu"), 5).cpu()
    turned = torch.cat([-p[..., 4:], p[..., :4]], -1)
    assert torch.allclose(made, p * cos[:, :, 5:] + turned * sin[:, :, 5:], atol=1e-5)


START = "import torch\nimport habana_frameworks.torch as ht\n"


def test_many_shapes_of_a_wrapped_module_are_named(tmp_path: Path) -> None:
    file = tmp_path / "sizes.py"
    file.write_text(
        START
        + "f = ht.hpu.wrap_in_hpu_graph(torch.nn.Linear(4, 4).to('hpu').requires_grad_(False))\n"
        "for n in range(1, 41):\n    f(torch.ones(n, 4, device='hpu'))\n"
    )
    card, ended = lint_script(file, [], lazy=True)
    assert ended is None, repr(ended)
    assert {(f.rule.id, f.line, f.severity) for f in card.findings.sorted()} >= {
        ("H021", 5, "warn")
    }


def test_program_that_dies_fails_without_strict_too(tmp_path: Path) -> None:
    file = tmp_path / "dies.py"
    file.write_text(START + "raise ValueError('no such thing')\n")
    assert main(["--script", str(file)]) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_cross_entropy_of_five_dimensions_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANTERN_HPU_BRIDGE", "1.19")
    file = tmp_path / "loss.py"
    file.write_text(
        "import torch\nimport habana_frameworks.torch.core\n"
        "loss = torch.nn.functional.binary_cross_entropy_with_logits\n"
        "f = torch.compile(lambda x, y: loss(x, y), backend='hpu_backend')\n"
        "x = torch.ones(1, 2, 1, 2, 1, device='hpu')\nf(x, x)\n"
    )
    card, ended = lint_script(file, [], lazy=False)
    assert ended is None and card.counts.fallbacks.total() == 0, (ended, card.counts)
