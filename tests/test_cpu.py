"""What a processor decides by itself - number format, layout of matrices, threads - and that no image suffers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from lantern_hpu.backends import DeviceOptions, get_backend, host
from lantern_hpu.backends.cpu import layouts as cpu_layouts
from lantern_hpu.backends.cpu.backend import PATIENCE, Search, ThreadPace, search
from lantern_hpu.backends.cpu.layouts import (
    FORMS,
    PackedLinear,
    lay_out,
    obstacle,
)
from lantern_hpu.commands.generate import main
from lantern_hpu.decode.state import bits_digest
from lantern_hpu.errors import DeviceError, OptionError
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import read_png
from lantern_hpu.tree import load_static
from tests.tiny import CONFIG, Models, advance, make_engine, request, spec_for, tiny_models

PROMPT = "a red cat"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("LANTERN_HPU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def needs(form: str, dtype: torch.dtype = torch.float32) -> None:
    if why := obstacle(FORMS[form], [nn.Linear(64, 48, dtype=dtype)]):
        pytest.skip(why)


# ------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [("packed", torch.float32), ("packed", torch.bfloat16), ("half", torch.float32)],
)
def test_packed_matrices_multiply_as_plain_ones(form: str, dtype: torch.dtype, bias: bool) -> None:
    """The twin is `nn.Linear` in float64, of the matrix as it is kept; odd sizes, any number of rows, any strides."""
    needs(form, dtype)
    torch.manual_seed(0)
    plain = nn.Linear(83, 47, bias, dtype=dtype).requires_grad_(False)
    packed, twin = FORMS[form](plain), nn.Linear(83, 47, bias, dtype=torch.float64)
    twin.load_state_dict(plain.state_dict())
    if form == "half":
        twin.weight.data.copy_(plain.weight.half())
    for rows in (1, 2, 7, 12, 52, 116):
        x = torch.randn(2, 83, rows, dtype=dtype).transpose(1, 2)  # [2, rows, 83]
        want = twin(x.double())
        off = (packed(x).double() - want).abs().max() / want.abs().max()
        assert off < {torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]


def test_weights_beyond_float16_are_not_halved() -> None:
    needs("half")
    wide = nn.Linear(64, 48)
    wide.weight.data[3, 5] = 1e5
    with pytest.raises(DeviceError, match="beyond float16's 65504"):
        lay_out([nn.Sequential(wide)], "half")
    assert "beyond" in obstacle(FORMS["half"], [nn.Linear(64, 48), wide])
    assert "made for float32" in obstacle(FORMS["half"], [nn.Linear(64, 48, dtype=torch.bfloat16)])


def features(models: Models, mode: str) -> torch.Tensor:
    """What the target makes of a tree in the middle of an image: [R, M, H]."""
    requests = [request(seed=1)]
    engine = make_engine(models, spec_for(load_static("chain"), requests), mode)
    advance(engine, requests, 3)
    step, state = engine.step_function, engine.state
    with torch.no_grad():
        return cast(torch.Tensor, dict(step.stages(state))["verify"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["eager", pytest.param("strict", marks=pytest.mark.slow)])
def test_a_packed_model_computes_the_plain_ones_features(mode: str, form: str) -> None:
    """Target and drafter, also under the rules of a capture."""
    needs(form)
    models, twins = tiny_models(), tiny_models()
    if form == "half":
        for layer in (part for each in twins for part in each.modules()):
            if isinstance(layer, nn.Linear):
                layer.weight.data.copy_(layer.weight.half())
    want = features(twins, mode)
    assert lay_out(models, form) == (form, "asked for")
    assert not any(isinstance(part, nn.Linear) for each in models for part in each.modules())
    torch.testing.assert_close(features(models, mode), want, rtol=1e-4, atol=1e-5)


def test_a_small_float32_model_takes_what_loses_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No clock is asked, so that one command draws the same on two days: `half` where no weight loses a bit by it."""
    needs("half")
    needs("packed")
    monkeypatch.setattr(cpu_layouts, "known_shares", None)
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    assert isinstance(pipeline.model.target.head, PackedLinear) and pipeline.fit.layout == "packed"
    assert "float32 as it is" in pipeline.fit.decided["layout"]
    models = tiny_models()
    for layer in (part for each in models for part in each.modules()):
        if isinstance(layer, nn.Linear):
            layer.weight.data.copy_(layer.weight.half())
    assert lay_out(models)[0] == "half"
    plain = LanternPipeline.from_pretrained(str(model), device="cpu", layout="plain")
    assert plain(PROMPT).config["layout"] == "plain"
    assert plain.fit.decided["layout"] == "plain: asked for"


@pytest.mark.parametrize(
    ("packed", "half", "taken"),
    [(0.5, 0.3, "half"), (0.5, 0.45, "packed"), (0.99, 0.9, "plain"), (1.4, 0.7, "half")],
)
def test_a_large_model_takes_what_was_faster(
    monkeypatch: pytest.MonkeyPatch, packed: float, half: float, taken: str
) -> None:
    """The form that rounds weights must gain more than the one that only sums in another order."""
    needs("packed")
    needs("half")
    monkeypatch.setattr(cpu_layouts, "LARGE", 0)
    shares = {"packed": packed, "half": half}
    monkeypatch.setattr(
        cpu_layouts,
        "known_shares",
        lambda layers, forms, held: {
            name: dict.fromkeys(cpu_layouts.ROWS, shares[name]) for name in forms
        },
    )
    models = tiny_models()
    found, why = lay_out(models)
    assert found == taken and f"half took {half:.2f} for 2" in why
    assert type(models[0].head) is {**FORMS, "plain": nn.Linear}[taken]


def count_measuring(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is appended to at each measurement."""
    seen, real = list[int](), cpu_layouts.measured_shares

    def counted(layers: list[nn.Linear], forms: list[str], held: bool) -> cpu_layouts.Shares:
        seen.append(len(layers))
        return real(layers, forms, held)

    monkeypatch.setattr(cpu_layouts, "measured_shares", counted)
    return seen


def test_measurements_are_remembered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By processor, sizes, format, threads and torch; a damaged file is measured anew."""
    needs("packed")
    seen = count_measuring(monkeypatch)
    layers = [nn.Linear(64, 32), nn.Linear(32, 64)]
    first = cpu_layouts.known_shares(layers, ["packed"])
    assert set(first["packed"]) == set(cpu_layouts.ROWS) and min(first["packed"].values()) > 0
    assert cpu_layouts.known_shares(layers, ["packed"]) == first and len(seen) == 1
    (file,) = cache.rglob("*.json")
    assert json.loads(file.read_text())["about"]["sizes"] == {"32x64": 1, "64x32": 1}
    file.write_text("{")
    cpu_layouts.known_shares(layers, ["packed"])
    cpu_layouts.known_shares([nn.Linear(64, 16)], ["packed"])
    assert len(seen) == 3


def test_a_cache_that_cannot_be_written_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("packed")
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setenv("LANTERN_HPU_CACHE", str(file))
    seen = count_measuring(monkeypatch)
    for _ in range(2):
        cpu_layouts.known_shares([nn.Linear(64, 32)], ["packed"])
    assert len(seen) == 2 and file.read_text() == "in the way"


def test_a_layout_that_is_not_offered_is_one_error(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", str(model), "--device", "cpu", "--prompt", PROMPT, "--layout"]
    assert main([*asked, "magic"]) == 2
    assert "one of auto, native, packed, half, plain" in capsys.readouterr().err
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert main([*asked, "packed"]) == 2
    shown = capsys.readouterr().err
    assert "torch was built without oneDNN" in shown and "try: --layout auto" in shown


def test_what_inductor_compiles_stays_plain() -> None:
    """It takes no opaque matrices, so a layout that was asked for is refused before a minute of warm-up."""
    backend, models = get_backend("cpu"), tiny_models()
    fit = backend.fit(CONFIG, DeviceOptions(graphs="compile"))
    fit.lay_out(models)
    assert fit.layout == "plain" and not fit.invariant
    with pytest.raises(DeviceError, match="cannot be compiled"):
        backend.fit(CONFIG, DeviceOptions(graphs="compile", layout="packed"))


@pytest.mark.parametrize("form", FORMS)
def test_an_image_is_drawn_again_in_its_layout(model: Path, tmp_path: Path, form: str) -> None:
    needs(form)
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    here = ["--model", str(model), "--device", "cpu"]
    assert main([*here, "--prompt", PROMPT, "--layout", form, "--output", str(first)]) == 0
    assert main([*here, "--from-png", str(first), "--output", str(again)]) == 0
    assert read_png(again)["config"]["layout"] == form


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
    ],
)
def test_auto_is_the_format_for_this_processor_and_size(
    flags: Callable[[str], None], said: str, parameters: int, dtype: str, why: str
) -> None:
    flags(said)
    found, reason = get_backend("cpu").number_format("auto", parameters)
    assert found == getattr(torch, dtype) and why in reason


def test_a_processor_of_which_nothing_is_told_takes_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "CPUINFO", str(tmp_path / "none"))
    host.cpuinfo.cache_clear()
    assert get_backend("cpu").number_format("auto", 10**9)[0] == torch.float32
    host.cpuinfo.cache_clear()


def test_a_format_that_the_processor_lacks_is_said(
    model: Path,
    tmp_path: Path,
    flags: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It draws all the same, in half the memory; one it does not offer at all is refused."""
    flags("fpu avx2")
    asked = ["--model", str(model), "--device", "cpu", "--prompt", PROMPT]
    output = ["--output", str(tmp_path / "out.png")]
    assert main([*asked, *output, "--dtype", "bfloat16", "--verbose"]) == 0
    assert "this processor lacks it" in capsys.readouterr().err
    assert main([*asked, "--dtype", "float16"]) == 2
    assert "cpu does not offer dtype 'float16'" in capsys.readouterr().err


def test_the_report_says_what_was_taken_and_why(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    asked = ["--model", str(model), "--device", "cpu", "--prompt", PROMPT, "--threads", "1"]
    output = ["--output", str(tmp_path / "out.png"), "--report", str(report)]
    assert main([*asked, *output]) == 0
    assert "threads" not in capsys.readouterr().err  # unless it is asked for
    assert main([*asked, *output, "--verbose", "--force"]) == 0
    decided = json.loads(report.read_text())["environment"]["decided"]
    assert set(decided) == {"dtype", "layout", "threads", "invariant"}
    assert decided["threads"] == "1: asked for"
    shown = capsys.readouterr().err
    for name, said in decided.items():
        assert f"{name} {said}" in shown


# ------------------------------------------------------------------------------------ threads


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the threads of the process for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Machine:
    """A processor whose steps take as long as a test says, by the threads that run them."""

    def __init__(self, **seconds: float) -> None:
        self.now = 0.0
        self.seconds = {int(name.removeprefix("t")): took for name, took in seconds.items()}
        self.rounding: dict[
            int, int
        ] = {}  # what tells the bits of a number of threads from others'
        self.ran: list[int] = []

    def clock(self) -> float:
        return self.now

    def step(self) -> torch.Tensor:
        self.ran.append(torch.get_num_threads())
        self.now += self.seconds[self.ran[-1]]
        return torch.zeros(1)

    def bits(self) -> int:
        return self.rounding.get(self.ran[-1], 0)


def paced(
    machine: Machine, report: Callable[[int, str], None] = lambda count, why: None
) -> ThreadPace:
    pace = ThreadPace(report, machine.clock)
    pace.fit(machine.step, machine.bits)
    machine.ran.clear()
    return pace


def answered(asked: Search, seconds: dict[int, float]) -> tuple[tuple[int, float], list[int]]:
    """What a search finds, and the counts that it tried."""
    counts = [next(asked)]
    try:
        while True:
            counts.append(asked.send(seconds[counts[-1]]))
    except StopIteration as done:
        return done.value, counts


@pytest.mark.parametrize(
    ("seconds", "best", "tried"),
    [
        ({8: 1.0, 4: 1.5, 2: 0.1, 1: 0.1}, 8, [8, 4]),
        ({8: 9.0, 4: 4.0, 2: 1.0, 1: 0.5}, 1, [8, 4, 2, 1]),
        ({8: 1.0, 4: 1.0, 2: 0.8, 1: 1.5}, 2, [8, 4, 2, 1]),
        ({1: 1.0}, 1, [1]),
    ],
)
def test_threads_are_halved_while_that_helps(
    seconds: dict[int, float], best: int, tried: list[int]
) -> None:
    assert answered(search(max(seconds)), seconds) == ((best, seconds[best]), tried)


def test_the_warm_up_takes_the_fastest_number(threads: Callable[[int], None]) -> None:
    threads(2)
    report: list[tuple[int, str]] = []
    machine = Machine(t1=0.01, t2=0.6)
    pace = paced(machine, lambda *what: report.append(what))
    assert pace.count == 1 and torch.get_num_threads() == 2
    pace(machine.step)
    assert machine.ran == [1] and torch.get_num_threads() == 2
    ((count, why),) = report
    assert count == 1 and "600.0 ms with 2, 10.0 ms with 1" in why


def test_steps_that_become_slow_are_looked_at(threads: Callable[[int], None]) -> None:
    """Cores that become busy are noticed within a few steps, and cores that become free again later."""
    threads(2)
    machine = Machine(t1=0.015, t2=0.01)
    pace = paced(machine)
    for _ in range(20):
        pace(machine.step)
    assert set(machine.ran) == {2}
    machine.seconds = {1: 0.03, 2: 0.6}
    machine.ran.clear()
    for _ in range(20):
        pace(machine.step)
    assert machine.ran.count(2) <= 4 and machine.ran[-10:] == [1] * 10
    machine.seconds = {1: 0.015, 2: 0.01}
    machine.ran.clear()
    for _ in range(2 * PATIENCE * 63):
        pace(machine.step)
    assert machine.ran[-1] == 2


def test_trying_again_in_vain_costs_little(threads: Callable[[int], None]) -> None:
    threads(2)
    machine = Machine(t1=0.01, t2=0.5)
    pace = paced(machine)
    for _ in range(20_000):
        pace(machine.step)
    assert machine.ran.count(2) >= 2  # it does look
    assert 0.49 * machine.ran.count(2) < 0.02 * machine.now


def test_one_thread_leaves_nothing_to_try(threads: Callable[[int], None]) -> None:
    threads(1)
    machine = Machine(t1=0.01)
    pace = ThreadPace(clock=machine.clock)
    pace.fit(machine.step, machine.bits)
    assert machine.ran == []


def test_threads_that_are_asked_for_are_taken(
    model: Path, threads: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu", threads=1)
    assert pipeline(PROMPT).environment["decided"]["threads"] == "1: asked for"
    assert pipeline.backend.describe()["threads"] == 1
    asked = ["--model", str(model), "--device", "cpu", "--prompt", PROMPT, "--threads", "100000"]
    assert main(asked) == 2
    assert "--threads is 100000" in capsys.readouterr().err
    with pytest.raises(OptionError, match="--threads is -1"):
        get_backend("cpu").fit(CONFIG, DeviceOptions(threads=-1))


@pytest.mark.parametrize(("alone", "taken"), [(0.006, 2), (0.0025, 1)])
def test_threads_that_round_otherwise_must_be_far_faster(
    threads: Callable[[int], None], alone: float, taken: int
) -> None:
    """The same seed is the same image, unless two threads wait for each other; which is reported."""
    threads(2)
    report: list[str] = []
    machine = Machine(t1=alone, t2=0.01)
    machine.rounding = {1: 17}
    pace = paced(machine, lambda count, why: report.append(why))
    assert pace.count == taken
    assert ("rounds otherwise than 2" if taken == 1 else "1 would round otherwise") in report[-1]
    machine.seconds = {1: 0.02, 2: 0.05} if taken == 2 else {1: 0.002, 2: 0.003}
    for _ in range(2 * PATIENCE * 20):
        pace(machine.step)
    assert pace.count == 2  # busy, but not three times; or quiet again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_the_digest_tells_results_apart(dtype: torch.dtype) -> None:
    """By one bit of one number."""
    tensor = torch.ones(3, 5, dtype=dtype)
    before = bits_digest(tensor)
    assert bits_digest(tensor.clone()) == before
    tensor.view(torch.uint8).flatten()[-1] ^= 1
    assert bits_digest(tensor) != before


@pytest.mark.parametrize("tree", ["chain", "naive_extend_57"])
def test_a_step_that_is_tried_is_the_same_each_time(tree: str) -> None:
    """So digests differ by the threads alone."""
    engine = make_engine(tiny_models(), spec_for(load_static(tree), [request()]))
    engine.warm_up()
    with torch.no_grad():
        steps = engine.same_steps()
        next(steps)
        first = engine.bits()
        for _ in range(3):
            next(steps)
        assert engine.bits() == first
        engine.state.root.add_(1)
        next(engine.same_steps())
        assert engine.bits() != first


def test_layout_is_refused_where_there_is_none_to_choose() -> None:
    from lantern_hpu.backends.cuda.backend import CUDABackend

    with pytest.raises(DeviceError, match="cuda does not offer layout 'packed'"):
        CUDABackend().fit(CONFIG, DeviceOptions(layout="packed"))
