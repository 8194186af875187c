"""Compile mode of both releases: what is cut to eager, which writes last, and which tensors may share a storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_emulator.device import Device
from gaudi_emulator.lint import Ended, lint_script

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

START = """
import torch
import habana_frameworks.torch.core as htcore

def compiled(function):
    return torch.compile(function, backend="hpu_backend", dynamic=False, fullgraph=True)

x = torch.arange(12.0).view(3, 4)
"""
# A step of two layers on one cache, which then moves an accepted row: three writes into one tensor
CHAIN = """
def step(cache, rows, moved):
    a = cache.index_copy_(0, rows[0], moved * 2)
    b = cache.index_copy_(0, rows[1], a.sum(0, keepdim=True))  # BAD
    cache.index_copy_(0, rows[2], moved)
    return b.sum()

def run(device, call):
    cache = torch.zeros(4, 4, device=device)
    rows = [torch.tensor([n], device=device) for n in range(3)]
    return call(cache, rows, torch.ones(1, 4, device=device)).cpu(), cache.cpu()

total, cache = run("hpu", compiled(step))
want_total, want = run("cpu", step)
"""
ONE_EACH = """
def step(k, v, row, x):
    k.index_copy_(0, row, x)
    v.index_copy_(0, row, 2 * x)
    return k.sum() + v.sum()

k, v = (torch.zeros(4, 4, device="hpu") for _ in range(2))
f = compiled(step)
for n in range(3):
    y = f(k, v, torch.tensor([n], device="hpu"), x[:1].to("hpu"))
assert torch.equal(k[2].cpu(), x[0]) and torch.equal(2 * k.cpu(), v.cpu())
"""
SHARED = """
def step(k, v, row, x):
    k.index_copy_(0, row, x)  # BAD
    v.index_copy_(0, row, x)
    return k.sum() + v.sum()

both = torch.zeros(2, 4, 4, device="hpu")
compiled(step)(both[0], both[1], torch.tensor([1], device="hpu"), x[:1].to("hpu"))
"""
# Name -> (operation on x, whether 1.19 and 1.24 cut it)
CUTS = {
    "addcmul": ("x.addcmul(x, x)", (True, True)),
    "index with None, rank 3": ("x.view(3, 2, 2)[:, i]", (True, True)),
    "index with None, rank 2": ("x[:, i]", (True, False)),
    "index of rank 1": ("x[i]", (False, False)),
    "index_put with None": ("torch.ops.aten.index_put(x, [None, i], x[:, :2])", (True, True)),
    "permute of int64": ("x.long().permute(1, 0) + 1", (True, True)),
    "permute of float": ("x.permute(1, 0) + 1", (False, False)),
    "NaN": ("torch.where(x > 1, x, float('nan'))", (True, True)),
    "a step": ("(x * 2).softmax(-1).index_select(0, i)", (False, False)),
}


def run(tmp_path: Path, body: str, release: str | None = None) -> tuple[Device, Ended]:
    file = tmp_path / "program.py"
    file.write_text(START + body)
    return lint_script(file, [], lazy=False, release=release)


def lines(body: str) -> int:
    """The line with BAD."""
    return 1 + next(i for i, text in enumerate((START + body).splitlines()) if "# BAD" in text)


@pytest.fixture(params=["1.19", "1.24"])
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_first_write_of_a_chain_alone_lasts_on_1_19(
    tmp_path: Path, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of the step is right all the same: nothing tells but the state."""
    lost = "assert torch.equal(cache[0], want[0]) and not cache[1:].any() and want[1:3].all()\n"
    check = lost if release == "1.19" else "assert torch.equal(cache, want)\n"
    card, ended = run(tmp_path, CHAIN + check + "assert total == want_total\n", release)
    assert ended is None, repr(ended)
    (finding,) = (f for f in card.findings.sorted() if f.rule.id == "H092")
    severity = "error" if release == "1.19" else "warn"
    assert (finding.line, finding.severity) == (lines(CHAIN), severity)
    assert card.counts.whole_copies == (2 if release == "1.19" else 3)


def test_chain_is_right_without_index_copies_in_place(
    tmp_path: Path, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PT_HPU_USE_INPLACE_INDEX_COPY", "0")
    card, ended = run(tmp_path, CHAIN + "assert torch.equal(cache, want)\n", release)
    assert ended is None, repr(ended)
    assert card.counts.whole_copies == 3 and card.findings.errors == []


def test_tensor_written_once_is_written_in_place(tmp_path: Path, release: str) -> None:
    card, ended = run(tmp_path, ONE_EACH, release)
    assert ended is None, repr(ended)
    assert card.counts.whole_copies == 0
    assert [f for f in card.findings.sorted() if f.severity != "info"] == []


def test_state_tensors_on_one_storage_are_named(tmp_path: Path, release: str) -> None:
    card, ended = run(tmp_path, SHARED, release)
    assert ended is None, repr(ended)
    assert ("H093", lines(SHARED)) in {(f.rule.id, f.line) for f in card.findings.errors}


@pytest.mark.parametrize("name", CUTS)
def test_cuts_are_those_of_the_release(name: str, tmp_path: Path, release: str) -> None:
    operation, verdicts = CUTS[name]
    expected = verdicts[release == "1.24"]
    function = f"f = lambda x, i: ({operation}) * 1\ni = torch.tensor([0, 1])\n"
    check = (
        "y = compiled(f)(x.to('hpu'), i.to('hpu')).cpu()\n"
        "assert torch.allclose(y, f(x, i), equal_nan=True)\n"
    )
    card, ended = run(tmp_path, function + check, release)
    assert ended is None, repr(ended)
    cut = {f.rule.id for f in card.findings.sorted()} & {"H091"}
    assert bool(cut) == expected == bool(card.counts.cuts.total())
    assert (card.counts.graphs["launches"] > 1) == expected


@pytest.mark.parametrize("name", ["addcmul", "a step"])
def test_cut_is_refused_where_fallbacks_are_off(
    name: str, tmp_path: Path, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PT_HPU_USE_EAGER_FALLBACK", "0")
    operation, (expected, _) = CUTS[name]
    body = f"i = torch.tensor([0, 1], device='hpu')\ncompiled(lambda x, i: {operation})(x.to('hpu'), i)\n"
    _, ended = run(tmp_path, body, release)
    assert ("PT_HPU_USE_EAGER_FALLBACK=0" in str(ended)) == expected
