"""Two releases of Gaudi's bridge: each finding names those that it holds for, and one run judges both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gaudi_emulator import emulate
from gaudi_emulator.lint import lint_script
from gaudi_emulator.releases import RELEASES, Release
from gaudi_emulator.rules import RULES
from lantern_hpu.cli import main as run
from lantern_lab.commands.lint import main

OLD, NEW = RELEASES
START = """
import torch
import habana_frameworks.torch as ht
x = torch.ones(4, 4, device="hpu")
"""


def hpu() -> ModuleType:
    module: ModuleType = torch.hpu  # type: ignore[attr-defined]
    return module


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype, device="hpu")


def other_format() -> None:
    wrapped = hpu().wrap_in_hpu_graph_func(lambda x: x * 2)
    wrapped(ones(2))
    wrapped(ones(2).bfloat16())


def same_hash() -> None:
    wrapped = hpu().wrap_in_hpu_graph_func(lambda x, n: x * n)
    wrapped(ones(2), -1)
    wrapped(ones(2), -2)


def made(dtype: torch.dtype) -> Tensor:
    return ones(2, 2, dtype=dtype)


def add_by_index(dtype: torch.dtype) -> Tensor:
    return ones(4, dtype=dtype).index_add_(0, ones(1, dtype=INT), ones(1, dtype=dtype))


INT, SHORT, LONG = torch.int32, torch.int16, torch.int64
# What is done -> the rule, and the releases that it holds for
HOLDS: dict[str, tuple[Callable[[], object], str, tuple[str, ...]]] = {
    "wrapped graphs that differ by a format": (other_format, "H022", (OLD,)),
    "wrapped graphs that differ by a number": (same_hash, "H022", (OLD, NEW)),
    "int64 data in gather": (lambda: made(LONG).gather(0, made(LONG)), "H032", (OLD,)),
    "stable sort of 64": (lambda: ones(64).sort(stable=True), "H041", (OLD,)),
    "max of bool": (lambda: (ones(2, 2) > 0).max(-1), "H042", (OLD,)),
    "argmax of int16": (lambda: made(SHORT).argmax(), "H042", (NEW,)),
    "matrix product of int32": (lambda: made(INT) @ made(INT), "H043", (OLD, NEW)),
    "logical_or of int32": (lambda: made(INT).logical_or(made(INT)), "H040", (NEW,)),
    "logical_xor of int64": (lambda: made(LONG).logical_xor(made(LONG)), "H040", (NEW,)),
    "logical_not of int64": (lambda: made(LONG).logical_not(), "H040", (NEW,)),
    "tril of int32": (lambda: made(INT).tril(), "H040", (NEW,)),
    "triu of int16": (lambda: made(SHORT).triu(), "H040", (NEW,)),
    "index_add of int64": (lambda: add_by_index(LONG), "H040", (NEW,)),
    "comparison of int16": (lambda: made(SHORT).lt(made(SHORT)), "H040", (NEW,)),
    "cumsum of int16": (lambda: made(SHORT).cumsum(0), "H040", (NEW,)),
    "sum of int16": (lambda: made(SHORT).sum(), "H040", (OLD,)),
    "histc": (lambda: ones(4).histc(3), "H040", (OLD,)),
    "i0": (lambda: ones(4).i0(), "H040", (OLD, NEW)),
}


@pytest.mark.parametrize("name", HOLDS)
def test_finding_names_the_releases_that_it_holds_for(name: str) -> None:
    body, rule, wanted = HOLDS[name]
    holds = []
    for release in RELEASES.values():
        with emulate(release.name, True) as card, torch.no_grad():
            body()
        findings = [f for f in card.findings.sorted() if f.rule.id == rule]
        assert all(f.as_dict()["releases"] == [release.name] for f in findings)
        holds += [release.name] * bool(findings)
    assert tuple(holds) == wanted


def test_rules_of_one_release_are_not_hit_under_the_other() -> None:
    alone = {name for name, rule in RULES.items() if rule.releases == (OLD,)}
    assert alone == {"H032", "H041"} and RULES["H041"].releases == (OLD,)
    with emulate(NEW, True) as card:
        card.findings.hit("H041")
    assert not card.findings.sorted()


# One run under both


def lint(tmp_path: Path, body: str, *options: str) -> int:
    file = tmp_path / "program.py"
    file.write_text(START + body + "\n")
    return main(["--script", str(file), "--bridge", "both", *options])


@pytest.mark.slow
def test_one_run_says_for_each_finding_which_release_it_holds_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = (
        "f = ht.hpu.wrap_in_hpu_graph_func(lambda x: x * 2)\nf(x)\nf(x.bfloat16())\ny = x[x > 0]\n"
    )
    assert lint(tmp_path, body, "--strict") == 1
    said = capsys.readouterr().out
    assert "program.py:7: error H022 key-alias under 1.19 (" in said
    assert "program.py:8: error H010 dynamic-nonzero under 1.19 and 1.24 (" in said
    assert "(bridge 1.19)" in said and "(bridge 1.24)" in said
    last = "ends on both, with errors: what a card computes there is not known"
    assert said.splitlines()[-1] == last
    lint(tmp_path, body, "--json")
    report = json.loads(capsys.readouterr().out)
    held = {f["rule"]: f["releases"] for f in report["findings"] if f["severity"] == "error"}
    assert held == {"H022": [OLD], "H010": [OLD, NEW]}
    assert (report["release"], report["runs_on"]) == ("both", [])
    assert set(report["counts"]) == {OLD, NEW}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "verdict", "code"),
    [
        ("y = x * 2", "runs on both: bridge 1.19 and 1.24", 0),
        ("ht.hpu.wrap_in_hpu_graph_func(lambda x: x.histc(3))(x)", "runs on bridge 1.24 alone", 1),
        ("ht.hpu.empty_cache()", "runs on neither", 1),
    ],
)
def test_one_line_says_where_a_program_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    body: str,
    verdict: str,
    code: int,
) -> None:
    assert lint(tmp_path, body) == code
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == verdict
    assert said.err.count("the program ended under") == (
        0 if code == 0 else 1 if "alone" in verdict else 2
    )


@pytest.mark.slow
def test_program_that_takes_its_process_with_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lint(tmp_path, "import os\nos._exit(0)") == 1
    assert "the program ended under 1.24 with the process ended" in capsys.readouterr().err


def test_other_commands_take_one_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["generate", "--device", "hpu", "--emulate", "--bridge", "both", "--prompt", "a sun"])
        == 2
    )
    assert "--bridge is 'both'" in capsys.readouterr().err


# Releases that were not read


# What else differs


@pytest.mark.parametrize("release", RELEASES)
def test_flag_after_the_import_of_torch_is_late_where_torch_loads_the_plugin(
    release: str, tmp_path: Path
) -> None:
    file = tmp_path / "program.py"
    line = "os.environ['PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE'] = '0'"
    for start, late in (
        (f"import os\n{line}\nimport torch\n", False),
        (f"import os, torch\n{line}\n", True),
    ):
        file.write_text(start + "import habana_frameworks.torch\n")
        for lazy in (True, False):
            card, ended = lint_script(file, [], lazy, release=release)
            assert ended is None
            expected = late and release == NEW and not lazy
            assert {f.rule.id for f in card.findings.errors} == ({"H081"} if expected else set())


@pytest.mark.parametrize("release", RELEASES)
def test_option_of_the_other_releases_compiler_is_refused(release: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    for name, known in (("use_graph_freezing", OLD), ("joint_graph_constant_folding", NEW)):
        call = f"torch.compile(lambda x: x, backend='hpu_backend', options={{'{name}': True}})"
        file.write_text(START + call + "\n")
        _, ended = lint_script(file, [], lazy=False, release=release)
        assert (ended is None) == (release == known)
        assert ended is None or f"has no option '{name}'" in str(ended)


@pytest.mark.parametrize("rebinds", [True, False])
def test_scalars_of_the_host_are_rebound_unless_a_flag_says_no(rebinds: bool) -> None:
    flags = {"PT_HPU_ENABLE_H2D_SCALES": str(rebinds).lower()}
    with emulate(NEW, True, flags=flags), torch.no_grad():
        wrapped = hpu().wrap_in_hpu_graph_func(lambda x, scale: x * scale)
        got = [wrapped(ones(1), torch.tensor(float(n))).item() for n in (2, 3)]
    assert got == ([2, 3] if rebinds else [2, 2])


@pytest.mark.parametrize("release", RELEASES.values(), ids=str)
def test_reset_ends_an_open_capture(release: Release) -> None:
    with emulate(release.name, True) as card:
        graph = hpu().HPUGraph()
        graph.capture_begin()
        graph.reset()
        assert card.recording is None
        hpu().HPUGraph().capture_begin()


@pytest.mark.parametrize("release", RELEASES.values(), ids=str)
def test_second_write_by_index_in_a_capture_is_noted_and_both_last(
    release: Release,
) -> None:
    with emulate(release.name, True) as card, torch.no_grad():
        cache, rows = ones(4, 2) * 0, [torch.tensor([n], device="hpu") for n in range(2)]
        graph = hpu().HPUGraph()
        graph.capture_begin()
        for row in rows:
            cache.index_copy_(0, row, ones(1, 2))
        graph.capture_end()
        graph.replay()
        assert cache.cpu().tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
        (finding,) = (f for f in card.findings.sorted() if f.rule.id == "H092")
        assert (finding.severity, finding.captured) == ("info", True)
