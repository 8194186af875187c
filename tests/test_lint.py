"""The lint names the rule and the line: a gallery of bad programs, one for each error, and a clean bill for ours."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from gaudi_emulator.lint import lint_script
from gaudi_emulator.rules import RULES
from lantern_lab.commands.lint import main

START = """
import torch
import habana_frameworks.torch as ht
import habana_frameworks.torch.core as htcore
from gaudi_emulator import warmed_up
hpu = ht.hpu
x = torch.ones(4, 4, device="hpu")
ids = torch.tensor([1, 0, 3, 2], dtype=torch.int32, device="hpu")
big = torch.arange(4, device="hpu")

def capture(body):
    graph = hpu.HPUGraph()
    graph.capture_begin()
    try:
        return graph, body()
    finally:
        graph.capture_end()

def wrapped(body):
    return hpu.wrap_in_hpu_graph_func(body)
"""

# Rule -> a program's last lines; the line with BAD is the one to be named.
GALLERY = {
    "H001": "for _ in range(40):\n    if (x.sum() > 3).item(): x = x + 1  # BAD",
    "H001 captured": "capture(lambda: x * x.sum().item())  # BAD",
    "H002": "capture(lambda: x.cpu())  # BAD",
    "H003": "capture(lambda: hpu.synchronize())  # BAD",
    "H004": "capture(lambda: torch.equal(x, x))  # BAD",
    "H010": "y = x[x > 0]  # BAD",
    "H010 nonzero": "y = x.nonzero()  # BAD",
    "H011": "y = ids.unique()  # BAD",
    "H012": "x[x > 0] = torch.ones(16, device='hpu')  # BAD",
    "H013": (
        "seen = x\nfor _ in range(8):\n    seen = torch.cat([seen, x])  # BAD\n    htcore.mark_step()"
    ),
    "H014": (
        "def step(n):\n    y = x[:n] * 2  # BAD\n    htcore.mark_step()\n"
        "htcore.mark_step()\nstep(1)\nwarmed_up()\nstep(2)"
    ),
    "H020": "warmed_up()\ny = x @ x\nhtcore.mark_step()  # BAD",
    "H021": "f = wrapped(lambda x, n: x * n)\nfor n in range(3, 9):\n    f(x, n)  # BAD",
    "H022": "f = wrapped(lambda x, n: x * n)\nf(x, -1)\nf(x, -2)  # BAD",
    "H030": "y = torch.tensor([2**40], device='hpu')  # BAD",
    "H031": "y = (big + 2**30) * 4  # BAD",
    "H034": "y = torch.view_as_complex(x.view(4, 2, 2))  # BAD",
    "H040": "capture(lambda: torch.i0(x))  # BAD",
    "H041": "long = torch.ones(64, device='hpu')\ncapture(lambda: long.sort(stable=True))  # BAD",
    "H042": "capture(lambda: x.short().argmax(-1))  # BAD",
    "H043": "i = ids.view(2, 2)\ncapture(lambda: i @ i)  # BAD",
    "H045": "y = torch.ones(1, 1, 1, 1, 1, 2, device='hpu').index_select(5, ids[:1])  # BAD",
    "H050": "y = x[ids - 2]  # BAD",
    "H051": "y = x.index_select(0, ids + 1)  # BAD",
    "H052": "x.index_copy_(0, big * 0, x * 2 + big[:, None])  # BAD",
    "H053": "x.scatter_(0, big.view(1, 4), x)  # BAD",
    "H060": "def body():\n    x[:2] = 3.0  # BAD\ncapture(body)",
    "H061": "y = torch.ones(4, 4)\ncapture(lambda: x + y)  # BAD",
    "H061 captured": "capture(lambda: x + torch.tensor([1.0] * 4, device='hpu'))  # BAD",
    "H063": "f = wrapped(lambda x: x * 2)\na = f(x)\nb = f(x + 1)\nc = a + b  # BAD",
    "H066": "a, b = hpu.HPUGraph(), hpu.HPUGraph()\na.capture_begin()\nb.capture_begin()  # BAD",
    "H067": (
        "g = hpu.HPUGraph()\ng.capture_begin(dry_run=True)\ny = x * 2\ng.capture_end()\nz = y + 1  # BAD"
    ),
    "H068 counter": (
        "class Turn(torch.nn.Module):\n    n = 0\n    def forward(self, x):\n        self.n += 1\n"
        "        return x * self.n  # BAD\nhpu.wrap_in_hpu_graph(Turn())(x)"
    ),
    "H068 attribute after the capture": (
        "class Net(torch.nn.Module):\n    scale = 1.0\n    def forward(self, x):\n"
        "        return x * self.scale  # BAD\n"
        "net = hpu.wrap_in_hpu_graph(Net())\nnet(x)\nnet.scale = 2.0\nnet(x)"
    ),
    "H068 random": "import random\nwrapped(lambda x: x * random.random())(x)  # BAD",
    "H068 carried": (
        "class Last(torch.nn.Module):\n    last = None\n    def forward(self, x):\n"
        "        y = x * 2 if self.last is None else x * 2\n        z = y if self.last is None else y + self.last"
        "  # BAD\n        self.last = y\n        return z\nhpu.wrap_in_hpu_graph(Last())(x)"
    ),
    "H068 grows": (
        "seen = []\ndef body(x):\n    seen.append(x)\n    return torch.cat(seen)  # BAD\nwrapped(body)(x)"
    ),
    "H069": (
        "class State(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('n', torch.zeros(1, device='hpu'))\n    def forward(self, x):\n"
        "        self.n = self.n + 1  # BAD\n        return x * self.n\nhpu.wrap_in_hpu_graph(State())(x)"
    ),
    "H070": "capture(lambda: x * float(torch.rand(1)))  # BAD",
    "H084": "capture(lambda: x.copy_(torch.ones(4, 4)))  # BAD",
    "H080 compile": "f = torch.compile(lambda x: x, backend='hpu_backend')\nf(x)  # BAD",
    "H080 reserved": ("def forward(x):\n    return x\nforward(x, bypass_hpu_graphs=True)  # BAD"),
    "H086 autocast": "with torch.autocast('cuda', dtype=torch.bfloat16): y = x @ x  # BAD",
    "H086 inductor": "torch.compile(lambda x: x * 2)(x)  # BAD",
    "H081": "import os\nos.environ['PT_HPU_LAZY_MODE'] = '1'  # BAD",
    "H082": "import os\nif os.fork() == 0:  # BAD\n    os._exit(0)",
}

ONLY = {"H041": "1.19"}  # the release that a rule holds for, if not both


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "H086 inductor" else name
        for name in GALLERY
    ],
)
def test_bad_program_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    file = tmp_path / "bad.py"
    source = START + GALLERY[name] + "\n"
    file.write_text(source)
    card, _ = lint_script(file, [], lazy=True, release=ONLY.get(name))
    bad = 1 + next(i for i, line in enumerate(source.splitlines()) if "# BAD" in line)
    caught = {(f.rule.id, f.line) for f in card.findings.errors if f.file == str(file)}
    assert (name.split()[0], bad) in caught, card.findings.errors


def test_collectives_without_their_flag_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    card, _ = lint_script(written(tmp_path, "capture(lambda: x * 2)"), [], lazy=True)
    assert {f.rule.id for f in card.findings.errors} == {"H085"}


def test_the_gallery_covers_every_error_rule() -> None:
    errors = {r.id for r in RULES.values() if "error" in (r.severity, r.captured)}
    # Tests of their own: test_lint_compiled.py, test_compile_contract.py
    assert errors - {name.split()[0] for name in GALLERY} == {"H085", "H093"}


def written(tmp_path: Path, body: str, start: str = START) -> Path:
    file = tmp_path / "program.py"
    file.write_text(start + body + "\n")
    return file


CLEAN = """
cache, place = torch.zeros(8, 4, device='hpu'), torch.zeros(1, dtype=torch.int64, device='hpu')
def body():
    cache.index_copy_(0, place, x[:1] * 2)
    place.add_(1)
    return torch.where(cache > 1, cache, cache * 0).sum()
graph, out = capture(body)
warmed_up()
for _ in range(4): graph.replay()
assert out.item() == 5 * 4 * 2
"""


@pytest.mark.parametrize(
    ("body", "rule", "code"),
    [
        (CLEAN, "", 0),
        ("for n in range(1, 9):\n    y = big.repeat(4)[:n] * 2\n    htcore.mark_step()", "H014", 1),
        ("for n in range(1, 40):\n    torch.ones(n, 4).to('hpu') * 2\n    htcore.mark_step()", "H016", 1),
        ("for n in [*range(1, 40)] * 3:\n    torch.ones(n, 4).to('hpu') * 2\n    htcore.mark_step()", "", 0),
        ("for _ in range(3000):\n    x = torch.tanh(x * x)", "H083", 0),
        ("for _ in range(40):\n    t = x.sum().item()\n    htcore.mark_step()", "H001", 0),
        ("x.index_copy_(0, big * 0, x)\nx[big * 0, big * 0] = 7.0\nx.scatter_(1, big[:, None] * 0, 1.0)", "", 0),
        ("x.index_copy_(0, torch.tensor([2, 0, 0]).to('hpu'), big[:3, None] * x[:3])", "", 0),
        ("x.scatter_(0, big[:, None] * 0, (x + 1).expand(4, 4)[:, :1])", "", 0),
        ("x.scatter_(0, big[:, None] * 0, big[:, None] * x)", "H052", 1),
        ("torch.nn.functional.one_hot(big - 1, 4)", "", 0),
        ("x.index_select(0, big - 1)\nx.gather(0, big[:, None] - 1)", "H050", 0),
        ("x.index_copy_(0, big.clamp(max=1) - 1, big[:, None] * x)", "H050", 0),
        ("x.index_copy_(0, big - 2, big[:, None] * x)", "H050", 1),
        ("x.index_copy_(0, big, x[:4])\nx.take(ids)\ntorch.div(1.3, x, rounding_mode='floor')", "", 0),
        ("y = x[:, 0].index_select(0, ids + 2)\nassert y.tolist() == [1] * 4", "H051", 1),  # it goes on
    ],
)  # fmt: skip
def test_whether_a_program_compiles_anew_reads_each_step_or_repeats_an_index(
    body: str, rule: str, code: int, tmp_path: Path
) -> None:
    file = written(tmp_path, body)
    card, ended = lint_script(file, [], lazy=True, release="1.19")
    assert ended is None, repr(ended)
    assert {f.rule.id for f in card.findings.sorted() if f.severity != "info"} == {rule} - {""}
    assert main(["--script", str(file), "--strict"]) == code


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("y = x[x > 0]\nprint('noise')\nwhile True: pass", "stopped after 1.5 seconds"),
        ("y = x[x > 0]\nimport no_such_module", "ended with ModuleNotFoundError"),
        ("y = x[x > 0]\ntorch.ops.hpu.cast_to_fp8_v2(x)", "Meanwhile: bfloat16"),
    ],
)
def test_program_that_ends_early_fails_and_keeps_its_findings(
    body: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, body)
    assert main(["--script", str(file), "--timeout", "1.5"]) == 1  # without --strict too
    shown = capsys.readouterr()
    assert said in shown.err and "H010" in shown.out and "noise" not in shown.out


def test_finding_names_place_reason_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, "y = x[x > 0]")
    line = len(file.read_text().splitlines())
    assert main(["--script", str(file)]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"program\.py:{line}: error H010 dynamic-nonzero", said)
    assert "H010 dynamic-nonzero: the shape of the result depends on data" in said
    assert "    instead: where(" in said
    assert main(["--script", str(file), "--strict", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["rule"], found["line"]) == ("H010", line)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("method", "profile", "release"),
    [
        ("ar", "lazy", "1.19"),
        ("eagle", "compile", "1.19"),
        ("lantern++", "lazy", "1.24"),
        ("scd", "compile", "1.24"),
        ("eagle2", "lazy", "1.24.2"),
        ("sjd-pac", "compile", "1.24.2"),
    ],
)
def test_our_step_is_clean_under_every_release_and_mode(
    method: str, profile: str, release: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each method in each mode is asked the same by test_hpu.py."""
    how = ["--method", method, "--profile", profile, "--bridge", release]
    assert main(["--model", str(model), *how, "--strict", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    serious = [f for f in said["findings"] if f["severity"] != "info"]
    counts = said["counts"]
    assert not serious and counts["graph_launches"] > 0, serious
    assert counts["recompiles_after_warmup"] == counts["cpu_fallbacks"] == counts["eager_cuts"] == 0


@pytest.mark.slow
def test_a_method_may_be_a_setting(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launches = []
    for setting in ("scd@4:commit=2", "scd@4:commit=4"):
        assert main(["--model", str(model), "--method", setting, "--strict", "--json"]) == 0
        launches.append(json.loads(capsys.readouterr().out)["counts"]["graph_launches"])
    assert launches[1] < launches[0]


BEFORE = """
import os
os.environ["PT_HPU_MAX_COMPOUND_OP_SIZE"] = "2"
os.environ.setdefault("PT_HPU_LAZY_MODE", "1")
os.environ["LANTERN_TEST_KEPT"] = "its"; del os.environ["PATH"]
import torch
import habana_frameworks.torch as ht
x = torch.ones(4, device="hpu")
for _ in range(7):
    x = x + 1
"""


def test_flag_set_before_the_import_counts_and_ends_with_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANTERN_TEST_KEPT", "mine")
    before = dict(os.environ)
    card, ended = lint_script(written(tmp_path, "", BEFORE), [], lazy=True)
    assert ended is None and card.findings.errors == [] and dict(os.environ) == before
    assert card.counts.launches == 4  # eight operators, two at a time
    other = BEFORE.replace('.setdefault("PT_HPU_LAZY_MODE", "1")', '["PT_HPU_LAZY_MODE"] = "0"')
    card, _ = lint_script(written(tmp_path, "", other), [], lazy=True)
    assert {(f.rule.id, f.line) for f in card.findings.errors} == {("H080", 7)}
