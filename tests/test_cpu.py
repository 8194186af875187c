"""What a processor decides by itself - number format, layout of matrices, threads - and that no image suffers."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lantern_hpu.backends import DeviceOptions, host
from lantern_hpu.backends.base import get_backend
from lantern_hpu.backends.cpu import native
from lantern_hpu.backends.cpu.backend import RETRY_FACTOR, ThreadTuner
from lantern_hpu.commands.generate import main
from lantern_hpu.core import Request
from lantern_hpu.errors import DeviceError, OptionError
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import read_png
from lantern_hpu.tree import load_static
from tests.tiny import CONFIG, make_engine, request, spec_for, tiny_models

PROMPT = "a red cat"


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no compiler was there."""
    monkeypatch.setattr(native, "open_library", lambda: (None, "it was not built"))
    monkeypatch.setattr(native, "BUILT_FOR", (sys.platform, platform.machine()))


needs_library = pytest.mark.skipif(not native.isa(), reason=native.open_library()[1])


# ------------------------------------------------------------------------------------ layouts


@needs_library
def test_a_model_takes_the_native_form_and_says_so(model: Path) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    assert isinstance(pipeline.model.target.decoder, native.NativeDecoder)
    assert pipeline.fit.decided["layout"] == f"native: {native.isa()}"
    assert pipeline(PROMPT).config["layout"] == "native"
    plain = LanternPipeline.from_pretrained(str(model), device="cpu", layout="plain")
    assert plain(PROMPT).config["layout"] == "plain"
    assert plain.fit.decided["layout"] == "plain: asked for"


def test_without_the_library_torch_draws_and_it_is_said(model: Path, no_library: None) -> None:
    """The same picture up to rounding, which in a tiny model changes no token."""
    with pytest.warns(UserWarning, match="torch's slower form draws: it was not built"):
        pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    assert pipeline.fit.layout == "plain" and "not built" in pipeline.fit.decided["layout"]
    asked = LanternPipeline.from_pretrained(str(model), device="cpu", layout="plain")
    assert pipeline(PROMPT, seed=3).tokens.tolist() == asked(PROMPT, seed=3).tokens.tolist()


@needs_library
@pytest.mark.parametrize("method", ["ar", "scd@4", "lantern++@broad_7"])
def test_both_layouts_draw_the_same_tokens(model: Path, method: str) -> None:
    drawn = [
        LanternPipeline.from_pretrained(str(model), device="cpu", layout=layout)(
            PROMPT, method=method, num_images_per_prompt=2, seed=5
        ).tokens
        for layout in ("native", "plain")
    ]
    assert drawn[0].tolist() == drawn[1].tolist()


def test_a_layout_that_is_not_offered_is_one_error(
    model: Path,
    no_library: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["--model", str(model), "--device", "cpu", "--prompt", PROMPT]
    monkeypatch.setenv("LANTERN_HPU_LAYOUT", "magic")
    assert main(asked) == 2
    assert "one of auto, native, plain" in capsys.readouterr().err
    monkeypatch.setenv("LANTERN_HPU_LAYOUT", "native")
    assert main(asked) == 2
    shown = capsys.readouterr().err
    assert "it was not built" in shown and "try: layout = auto" in shown


def test_what_inductor_compiles_stays_plain() -> None:
    """Native is refused where it is asked for; a warning that something is missing would be untrue."""
    backend, models = get_backend("cpu"), tiny_models()
    fit = backend.fit(CONFIG, DeviceOptions(graphs="compile"))
    fit = fit.lay_out(models)
    assert fit.layout == "plain" and "inductor" in fit.decided["layout"]
    fit = backend.fit(CONFIG, DeviceOptions(graphs="compile", layout="native"))
    with pytest.raises(DeviceError, match="inductor"):
        fit.lay_out(models)


@needs_library
@pytest.mark.parametrize(
    ("name", "value"),
    [("layout", "native"), ("layout", "plain"), ("kernels", "auto"), ("kernels", "plain")],
)
def test_an_image_is_drawn_again_by_the_same_code(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    here = ["--model", str(model), "--device", "cpu"]
    asked = ["--prompt", PROMPT, "--method", "ar", "--dtype", "bfloat16"]
    monkeypatch.setenv(f"LANTERN_HPU_{name.upper()}", value)
    assert main([*here, *asked, "--output", str(first)]) == 0
    monkeypatch.delenv(f"LANTERN_HPU_{name.upper()}")
    assert main([*here, "--from-png", str(first), "--output", str(again)]) == 0
    assert [read_png(file)["config"][name] for file in (first, again)] == [value] * 2


# ------------------------------------------------------------------------------------ formats


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes this processor one with other flags."""
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(host, "CPUINFO", str(file))

    def write(said: str) -> None:
        file.write_text(f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {said}\n")
        host.cpuinfo.cache_clear()

    yield write
    host.cpuinfo.cache_clear()


@pytest.mark.parametrize(
    ("said", "parameters", "dtype", "why"),
    [
        ("fpu avx2", 775_000_000, "float32", "does not multiply bfloat16"),
        ("fpu avx512_bf16 amx_bf16", 775_000_000, "bfloat16", "AMX"),
        ("fpu avx512_bf16", 775_000_000, "bfloat16", "AVX512-BF16"),
        ("fpu amx_bf16", 13_000_000, "float32", "exact figures"),
        ("", 775_000_000, "float32", "does not multiply bfloat16"),
    ],
)
def test_auto_is_the_format_for_this_processor_and_size(
    flags: Callable[[str], None],
    no_library: None,
    said: str,
    parameters: int,
    dtype: str,
    why: str,
) -> None:
    flags(said)
    found, reason = get_backend("cpu").number_format("auto", parameters)
    assert found == getattr(torch, dtype) and why in reason


def test_a_format_that_the_processor_lacks_is_said(
    model: Path,
    tmp_path: Path,
    flags: Callable[[str], None],
    no_library: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It draws all the same, in half the memory; one it does not offer at all is refused."""
    flags("fpu avx2")
    asked = ["--model", str(model), "--device", "cpu", "--prompt", PROMPT]
    output = ["--output", str(tmp_path / "out.png")]
    monkeypatch.setenv("LANTERN_HPU_VERBOSE", "1")
    assert main([*asked, *output, "--dtype", "bfloat16"]) == 0
    assert "this processor lacks it" in capsys.readouterr().err
    assert main([*asked, "--dtype", "float16"]) == 2
    assert "cpu does not offer dtype 'float16'" in capsys.readouterr().err


def test_the_report_says_what_was_taken_and_why(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    asked = ["--model", str(model), "--device", "cpu", "--prompt", PROMPT, "--threads", "1"]
    output = ["--output", str(tmp_path / "out.png"), "--report", str(report)]
    assert main([*asked, *output]) == 0
    assert "threads" not in capsys.readouterr().err  # unless it is asked for
    monkeypatch.setenv("LANTERN_HPU_VERBOSE", "1")
    assert main([*asked, *output, "--force"]) == 0
    decided = json.loads(report.read_text())["environment"]["decided"]
    assert set(decided) == {"dtype", "layout", "method", "threads"}
    assert decided["threads"] == "1: asked for"
    shown = capsys.readouterr()
    assert f", {decided.pop('method')}, " in shown.out  # of the summary
    for name, said in decided.items():
        assert f"{name} {said}" in shown.err


# ------------------------------------------------------------------------------------ threads


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the threads of the process for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


LONG = 2 * RETRY_FACTOR * 63  # steps until more threads are tried again


class Machine:
    """A processor whose steps take as long as a test says, by the threads that run them."""

    def __init__(self, **seconds: float) -> None:
        self.now = 0.0
        self.seconds = {int(name.removeprefix("t")): took for name, took in seconds.items()}
        self.ran: list[int] = []
        self.busy = False

    def clock(self) -> float:
        return self.now

    def step(self) -> torch.Tensor:
        self.ran.append(torch.get_num_threads())
        self.now += self.seconds[self.ran[-1]]
        return torch.zeros(1)

    def run(self, pace: ThreadTuner, steps: int) -> list[int]:
        """So many steps of an image: the threads of each."""
        self.ran.clear()
        for _ in range(steps):
            pace(self.step)
        return self.ran


def paced(machine: Machine) -> ThreadTuner:
    pace = ThreadTuner(clock=machine.clock, busy=lambda: machine.busy)
    pace.fit(machine.step)
    machine.ran.clear()
    return pace


@pytest.mark.parametrize(
    ("seconds", "best", "tried"),
    [
        ({8: 1.0, 4: 1.5, 2: 0.1, 1: 0.1}, 8, [8, 4]),
        ({8: 9.0, 4: 4.0, 2: 1.0, 1: 0.5}, 1, [8, 4, 2, 1]),
        ({8: 1.0, 4: 1.0, 2: 0.8, 1: 1.5}, 2, [8, 4, 2, 1]),
        ({2: 0.6, 1: 0.01}, 1, [2, 1]),
        ({1: 1.0}, 1, []),
    ],
)
def test_threads_are_halved_in_the_warm_up_while_that_helps(
    threads: Callable[[int], None], seconds: dict[int, float], best: int, tried: list[int]
) -> None:
    threads(max(seconds))
    machine = Machine(**{f"t{count}": took for count, took in seconds.items()})
    report: list[tuple[int, str]] = []
    pace = ThreadTuner(lambda *what: report.append(what), machine.clock, busy=lambda: False)
    pace.fit(machine.step)
    assert (pace.count, list(dict.fromkeys(machine.ran))) == (best, tried)
    assert [count for count, _ in report] == [best] * bool(tried)
    assert all(f"{1000 * seconds[n]:.1f} ms with {n}" in why for _, why in report for n in tried)
    machine.ran.clear()
    pace(machine.step)
    assert machine.ran == [best] and torch.get_num_threads() == max(seconds)


def test_turns_of_other_programs_count(threads: Callable[[int], None]) -> None:
    """Two threads are faster in most steps, and wait for another program's turn in a few: one is faster in all."""
    threads(2)
    machine = Machine(t1=0.0015, t2=0.001)
    pace = paced(machine)
    assert pace.count == 2

    def disturbed() -> torch.Tensor:
        machine.now += 0.1 * (torch.get_num_threads() == 2 and len(machine.ran) % 20 == 19)
        return machine.step()

    for _ in range(1000):
        pace(disturbed)
    assert machine.ran[-500:] == [1] * 500


def test_steps_that_become_slow_are_looked_at(threads: Callable[[int], None]) -> None:
    """Cores that become busy are noticed within a few steps, and cores that become free again later."""
    threads(2)
    machine = Machine(t1=0.015, t2=0.01)
    pace = paced(machine)
    assert set(machine.run(pace, 20)) == {2}
    machine.seconds = {1: 0.03, 2: 0.6}
    ran = machine.run(pace, 20)
    assert ran.count(2) <= 4 and ran[-10:] == [1] * 10
    machine.seconds = {1: 0.015, 2: 0.01}
    assert machine.run(pace, LONG)[-1] == 2


def test_a_busy_machine_whose_trials_misled_is_looked_at_again(
    threads: Callable[[int], None],
) -> None:
    """Both trials met other programs: what was chosen is far slower than it has to be, from its first step on."""
    threads(2)
    machine = Machine(t1=9.0, t2=8.0)
    machine.busy = True
    pace = paced(machine)
    assert pace.count == 2
    machine.seconds = {1: 0.75, 2: 7.6}
    assert machine.run(pace, 60)[-20:] == [1] * 20


def test_trying_again_in_vain_costs_little(threads: Callable[[int], None]) -> None:
    threads(2)
    machine = Machine(t1=0.01, t2=0.5)
    pace = paced(machine)
    looks = machine.run(pace, 20_000).count(2)
    assert 2 <= looks < 0.02 * machine.now / 0.49


def test_waiting_between_the_steps_of_a_search_is_no_trial(
    threads: Callable[[int], None],
) -> None:
    """A server may idle for hours in the middle of one, and looks for more threads as soon as else."""
    threads(2)
    machine = Machine(t1=0.01, t2=0.1)
    pace = paced(machine)
    machine.seconds = {1: 0.05, 2: 0.2}
    for _ in range(9):
        pace(machine.step)
        machine.now += 3600
    assert (pace.count, pace.searching) == (1, False)
    machine.seconds = {1: 0.015, 2: 0.01}
    assert machine.run(pace, LONG)[-1] == 2


def test_threads_that_are_asked_for_are_taken(
    model: Path, threads: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu", threads=1)
    assert pipeline(PROMPT).environment["decided"]["threads"] == "1: asked for"
    assert pipeline.backend.describe()["threads"] == 1
    asked = ["--model", str(model), "--device", "cpu", "--prompt", PROMPT, "--threads", "100000"]
    assert main(asked) == 2
    assert "--threads is 100000" in capsys.readouterr().err
    with pytest.raises(OptionError, match="threads is -1"):
        get_backend("cpu").fit(CONFIG, DeviceOptions(threads=-1))


@pytest.mark.parametrize(("one", "best"), [(0.1, 1), (0.3, 2)])
def test_torchs_form_takes_fewer_threads_only_where_they_are_far_faster(
    threads: Callable[[int], None], one: float, best: int
) -> None:
    """Its sums may round otherwise with another number, and a seed is to be one image on idle cores."""
    threads(2)
    machine = Machine(t1=one, t2=0.6)
    fit = get_backend("cpu").fit(CONFIG, DeviceOptions(layout="plain")).lay_out([])
    pace = fit.tuner()
    assert isinstance(pace, ThreadTuner)
    pace.clock = machine.clock
    pace.fit(machine.step)
    assert pace.count == best and "600.0 ms with 2" in fit.decided["threads"]
    native = replace(fit, layout="native").tuner()
    assert isinstance(native, ThreadTuner) and native.faster == 1


@pytest.mark.parametrize("tree", ["chain", "naive_extend_57"])
def test_a_step_that_is_tried_is_the_same_each_time(tree: str) -> None:
    """So its times differ by the threads alone."""
    engine = make_engine(tiny_models(), spec_for(load_static(tree), [request()]))
    engine.warm_up(Request("cat"))
    with torch.no_grad():
        steps = engine.replay_same_state()
        next(steps)
        first = {name: tensor.clone() for name, tensor in engine.state.tensors().items()}
        for _ in range(3):
            next(steps)
    for name, tensor in engine.state.tensors().items():
        assert torch.equal(tensor, first[name]), name
