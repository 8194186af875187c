"""Faults planted in a small decode step that is wrapped in an HPU graph: the strict lint names each with its line.

The step reads a token, writes a key-value cache, attends, and draws the next token from uniforms of the host. A fault
is a line in it, or beside it. What the lint cannot name is listed in UNNAMED with the reason.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lantern_lab.commands.lint import main

pytestmark = pytest.mark.slow

PROGRAM = """
import random
import torch
from torch import nn
import habana_frameworks.torch as ht
import habana_frameworks.torch.core as htcore
from gaudi_emulator import warmed_up

class Step(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.head = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)
        self.turn, self.seen, self.last = 0, [], None
        for name, made in {
            "k": torch.zeros(12, 8), "v": torch.zeros(12, 8), "token": torch.zeros(1, dtype=torch.int32),
            "count": torch.zeros(1, dtype=torch.int64), "places": torch.arange(12), "big": torch.arange(4) + 2**30,
            "small": torch.ones(4, dtype=torch.int16), "history": torch.zeros(12, dtype=torch.int32),
            "uniforms": torch.full((1,), 0.4),
        }.items():
            self.register_buffer(name, made)

    def forward(self, x):
        count, places = self.count, self.places
        {FAULT}
        h = self.embed(self.token) + x
        q, k, v = self.qkv(h).chunk(3, -1)
        self.k.index_copy_(0, count, k)
        self.v.index_copy_(0, count, v)
        seen = (q @ self.k.T).masked_fill(places > count, -1e9).softmax(-1)
        probs = self.head(seen @ self.v).softmax(-1)
        drawn = (probs.cumsum(-1) < self.uniforms).sum(-1).clamp(max=15)
        self.token.copy_(drawn)
        self.history.index_copy_(0, count, self.token)
        self.count.add_(1)
        return probs

step = Step().to("hpu").requires_grad_(False)
x = torch.zeros(1, 8, device="hpu")
run = ht.hpu.wrap_in_hpu_graph(step)
kept = []
for turn in range(4):
    if turn == 2:
        warmed_up()
    y = run(x)
    {AFTER}
    htcore.mark_step()
print(step.history.cpu())
"""

# Name -> (rule, the line in the step)
IN_THE_STEP = {
    # Host reads
    "item": ("H001", "n = count.sum().item()"),
    "tolist": ("H001", "n = count.tolist()"),
    "a branch on a tensor": ("H001", "h = 1 if (count > 1) else 0"),
    "an integer of a tensor as a bound": ("H001", "places[: int(count)]"),
    "a copy to the host": ("H002", "n = self.token.cpu()"),
    "a comparison of tensors": ("H004", "torch.equal(self.k, self.v)"),
    "a wait for the device": ("H003", "ht.hpu.synchronize()"),
    # Shapes that depend on data
    "nonzero": ("H010", "n = (self.k[:, 0] > 0).nonzero()"),
    "unique": ("H011", "n = self.history.unique()"),
    "a mask as a target": ("H012", "self.history[places == count] = self.token"),
    # Python values
    "a counter as a bound": ("H068", "self.turn += 1; places[: self.turn] + 1"),
    "a counter as a factor": ("H068", "self.turn += 1; x = x * self.turn"),
    "Python's random numbers": ("H068", "x = x * random.random()"),
    "a list that grows": ("H068", "self.seen.append(x); torch.stack(self.seen)"),
    "a result carried in an attribute": (
        "H068",
        "x = x + (x if self.last is None else self.last); self.last = x * 2",
    ),
    "random numbers of the host": ("H070", "x = x * torch.rand(1).item()"),
    # State
    "a state tensor bound anew": ("H069", "self.count = count + 0"),
    "a write into a slice": ("H060", "self.k[:1] = 0.0"),
    "a constant made on the host": ("H061", "places + torch.arange(12)"),
    "an upload": ("H061", "places + torch.tensor([1], device='hpu')"),
    # Numbers
    "a product beyond int32": ("H031", "self.big * 4"),
    "a float beyond int32": ("H031", "(x + 3e9).long()"),
    "an exclusive or beyond int32": ("H031", "self.big ^ (2**33)"),
    "complex numbers": ("H034", "torch.view_as_complex(x.view(4, 2))"),
    # Operators
    "the inverse of a matrix": ("H040", "torch.linalg.inv(x[:, :1])"),
    "i0": ("H040", "torch.i0(x)"),
    "gcd": ("H040", "torch.gcd(self.small, self.small)"),
    "a stable sort of many": ("H041", "self.head.weight.view(-1).sort(stable=True)"),
    "a product of integers": ("H043", "self.small.view(2, 2) @ self.small.view(2, 2)"),
    # Indices
    "a negative index": ("H050", "self.k.index_select(0, count - 1)"),
    "an index out of range": ("H051", "self.k.index_select(0, count + 12)"),
    "a place written twice": (
        "H052",
        "self.k.index_copy_(0, places[:2] * 0, self.head.weight[:2])",
    ),
}
# Faults of an older release alone
RELEASES = {"a stable sort of many": "1.19"}
# Name -> (rule, the line next to the replays)
NEXT_TO_REPLAYS = {
    "a result kept over a replay": ("H063", "kept.append(y); turn > 1 and kept[-2] + 1"),
}
# Name -> the line in the step; above each, why it has no name
UNNAMED = {
    # The order of equal values is a card's own; here it is the CPU's, and each order is a right one.
    "the order of ties": "x = x + self.k.topk(3, 0).indices.sum() * 0",
    # Rounding is no rule of the contract: the CPU stops at 256 as well.
    "a count in bfloat16": "self.uniforms.copy_((count.bfloat16() + 0.5).float() * 0 + self.uniforms)",
    # Two runs before the capture, and the capture, do the same: nothing has turned yet.
    "a branch of Python that turns after the capture": (
        "self.turn += 1; x = x * 2 if self.turn > 9 else x"
    ),
}


def lint(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    after: str = "pass",
    release: str = "1.24",
) -> tuple[int, str, int]:
    """Exit code, what was said, and the line that the fault stands on."""
    source = PROGRAM.replace("{FAULT}", fault).replace("{AFTER}", after)
    file = tmp_path / "step.py"
    file.write_text(source)
    code = main(["--script", str(file), "--strict", "--bridge", release])
    bad = after if fault == "pass" else fault
    line = 1 + next(i for i, text in enumerate(source.splitlines()) if text.strip() == bad)
    return code, capsys.readouterr().out, line


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*IN_THE_STEP, *NEXT_TO_REPLAYS])
def test_planted_fault_is_named_with_its_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule, fault = (IN_THE_STEP | NEXT_TO_REPLAYS)[name]
    where = ("pass", fault) if name in NEXT_TO_REPLAYS else (fault, "pass")
    code, said, line = lint(tmp_path, capsys, *where, RELEASES.get(name, "1.24"))
    assert code == 1
    assert re.search(rf"step\.py:{line}: error {rule} ", said), said


@pytest.mark.parametrize("fault", ["pass", *UNNAMED.values()], ids=["none", *UNNAMED])
def test_a_step_without_a_fault_or_with_an_unnamed_one_is_clean(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, _ = lint(tmp_path, capsys, fault)
    assert code == 0 and said.startswith("0 errors, 0 warnings" if fault == "pass" else "0 errors")
