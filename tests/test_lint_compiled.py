"""`lint --profile compile`: compiled functions pass through the real tracers, and what they say is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_emulator.lint import lint_script
from lantern_lab.commands.lint import main

pytestmark = pytest.mark.slow

START = """
import copy
import torch
import torch.nn.functional as F
from torch import nn
import habana_frameworks.torch as ht
import habana_frameworks.torch.core as htcore
from gaudi_emulator import warmed_up
torch.manual_seed(0)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x):
        return x + self.second(F.gelu(self.first(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

twin = Net().eval().requires_grad_(False)
model = copy.deepcopy(twin).to("hpu")
x = torch.randn(2, 4)
near = lambda a, b: torch.allclose(a.detach().cpu(), b.detach().cpu(), atol=1e-5)

def compiled(function, **options):
    return torch.compile(function, backend="hpu_backend", **{"dynamic": False, **options})
"""

# Rule -> a program's last lines; the line with BAD is the one to be named.
GALLERY = {
    "H090 read": (
        "def f(x):\n    y = x * 2\n    if y.sum().item() > 0:  # BAD\n        y = y + 1\n    return y\n"
        "assert near(compiled(f)(x.abs().to('hpu')), x.abs() * 2 + 1)"
    ),
    "H090 branch": (
        "def f(x):\n    y = x * 2\n    if y.sum() > 0:  # BAD\n        y = y + 1\n    return y\n"
        "assert near(compiled(f)(x.abs().to('hpu')), x.abs() * 2 + 1)"
    ),
    "H090 print": (
        "def f(x):\n    y = x * 2\n    print('y', y.shape)  # BAD\n    return y + 1\ncompiled(f)(x.to('hpu'))"
    ),
    "H015": (
        "f = torch.compile(lambda x: x * 2, backend='hpu_backend')\nfor n in (2, 3, 4):\n"
        "    f(torch.ones(n, 4, device='hpu'))  # BAD"
    ),
    "H024": (
        "def f(x):  # BAD\n    return x * 2\ng = compiled(f)\nfor n in range(2, 9):\n"
        "    g(torch.ones(n, 4, device='hpu'))"
    ),
}
ERRORS = {
    "H090 whole": (
        "def f(x):\n    if x.sum().item() > 0:  # BAD\n        return x\n    return x + 1\n"
        "compiled(f, fullgraph=True)(x.to('hpu'))"
    ),
    "H020 size": (
        "f = compiled(lambda x: x * 2)\nf(torch.ones(2, 4, device='hpu'))\nwarmed_up()\n"
        "f(torch.ones(3, 4, device='hpu'))  # BAD"
    ),
    "H020 format": (
        "f = compiled(lambda x: x * 2)\nf(torch.ones(2, 4, device='hpu'))\nwarmed_up()\n"
        "f(torch.ones(2, 4, dtype=torch.bfloat16, device='hpu'))  # BAD"
    ),
    "H020 value": (
        "f = compiled(lambda x, n: x[:, :n] * 2)\nf(x.to('hpu'), 1)\nwarmed_up()\nf(x.to('hpu'), 2)  # BAD"
    ),
    "H020 attribute": (
        "class Turn(nn.Module):\n    turn = 0\n    def forward(self, x):\n        return x[:, self.turn :] * 2\n"
        "net = Turn()\nf = compiled(net)\nf(x.to('hpu'))\nwarmed_up()\nnet.turn = 1\nf(x.to('hpu'))  # BAD"
    ),
    "H020 new": "warmed_up()\ncompiled(lambda x: x * 2)(x.to('hpu'))  # BAD",
    "H040": "f = compiled(lambda x: x.i0())  # BAD\nf(x.to('hpu'))",
    "H050": (
        "f = compiled(lambda x, i: x.index_select(0, i))  # BAD\n"
        "f(x.to('hpu'), torch.tensor([-1], device='hpu'))"
    ),
    "H051": (
        "f = compiled(lambda x, i: x.index_select(0, i))  # BAD\n"
        "f(x.to('hpu'), torch.tensor([7], device='hpu'))"
    ),
    "H001": (
        "f = compiled(lambda x: x.softmax(-1).argmax(-1))\nfor _ in range(24):\n"
        "    token = f(x.to('hpu'))\n    seen = [t.item() for t in token]  # BAD"
    ),
    "H080": "graph = ht.hpu.HPUGraph()  # BAD",
}

IDIOMS = {
    "a whole model": (
        "f = compiled(model, fullgraph=True)\nfor turn in range(3):\n"
        "    assert near(f((x + turn).to('hpu')), twin(x + turn))\n    if turn == 0:\n        warmed_up()"
    ),
    "layers by themselves (regional)": (
        "for i, layer in enumerate(model.layers):\n    model.layers[i] = compiled(layer, fullgraph=True)\n"
        "model(x.to('hpu'))\nwarmed_up()\nassert near(model((x + 1).to('hpu')), twin(x + 1))"
    ),
    "a module compiled in place": (
        "model.compile(backend='hpu_backend', options={'force_static_compile': True})\n"
        "assert near(model(x.to('hpu')), twin(x))"
    ),
    "a decorated sampler": (
        "@torch.compile(backend='hpu_backend', fullgraph=True, dynamic=False)\n"
        "def sample(logits, uniforms):\n    probs = logits.softmax(-1)\n"
        "    return (probs.cumsum(-1) < uniforms).sum(-1).clamp(max=probs.shape[-1] - 1)\n"
        "u = torch.rand(2, 1)\nwant = (x.softmax(-1).cumsum(-1) < u).sum(-1).clamp(max=3)\n"
        "assert torch.equal(sample(x.to('hpu'), u.to('hpu')).cpu(), want)"
    ),
    "a cache written in place": (
        "def write(cache, place, x):\n    cache.index_copy_(0, place, x)\n    return cache.sum(0)\n"
        "cache, f = torch.zeros(8, 4, device='hpu'), compiled(write, fullgraph=True)\n"
        "for n in range(4):\n    y = f(cache, torch.tensor([n], device='hpu'), x[:1].to('hpu'))\n"
        "    if n == 0:\n        warmed_up()\n"
        "assert near(y, 4 * x[0]) and near(cache[3], x[0])"
    ),
    "tensors made on the device inside": (
        "def f(x):\n    place = torch.arange(4, device=x.device)\n    keep = torch.ones(4, device='hpu')\n"
        "    return torch.where(place > 1, x, 0.0) * keep\n"
        "assert near(compiled(f, fullgraph=True)(x.to('hpu')), torch.where(torch.arange(4) > 1, x, 0.0))"
    ),
    "training": (
        "for one in (model, twin):\n    one.requires_grad_(True)\n"
        "f = compiled(model)\n"
        "for one, call, device in ((twin, twin, 'cpu'), (model, f, 'hpu')):\n"
        "    learner = torch.optim.SGD(one.parameters(), 0.1)\n    for _ in range(2):\n"
        "        learner.zero_grad()\n        call(x.to(device)).square().mean().backward()\n"
        "        learner.step()\n"
        "assert all(near(a, b) for a, b in zip(model.parameters(), twin.parameters()))"
    ),
}


def program(tmp_path: Path, body: str) -> tuple[Path, int]:
    """The program's file, and the line with BAD."""
    source = START + body + "\n"
    file = tmp_path / "compiles.py"
    file.write_text(source)
    lines = [i for i, line in enumerate(source.splitlines(), 1) if "# BAD" in line]
    return file, lines[0] if lines else 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*GALLERY, *ERRORS])
def test_what_the_tracers_say_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    file, bad = program(tmp_path, (GALLERY | ERRORS)[name])
    card, ended = lint_script(file, [], lazy=False)
    assert ended is None or name in ("H090 whole", "H080"), repr(ended)
    found = {(f.rule.id, f.line, f.severity) for f in card.findings.sorted()}
    assert (name.split()[0], bad, "error" if name in ERRORS else "warn") in found, found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IDIOMS)
def test_compiled_idiom_gives_the_cpus_numbers(name: str, tmp_path: Path) -> None:
    file, _ = program(tmp_path, IDIOMS[name])
    card, ended = lint_script(file, [], lazy=False)
    assert ended is None, repr(ended)
    assert [f for f in card.findings.sorted() if f.severity != "info"] == []
    assert card.counts.recompiles == 0 and card.counts.graphs["launches"] >= 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (ERRORS["H020 size"], "size mismatch at index 0. expected 2, actual 3"),
        (GALLERY["H024"], "H024"),
    ],
)
def test_what_compiles_anew_fails_a_strict_run_with_its_cause(
    body: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, _ = program(tmp_path, body)
    assert main(["--script", str(file), "--profile", "compile"]) == 0
    assert said in capsys.readouterr().out
    assert main(["--script", str(file), "--profile", "compile", "--strict"]) == 1
