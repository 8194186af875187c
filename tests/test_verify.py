"""`verify` asks everything, goes on where it was stopped, and says what could not be asked and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from gaudi_emulator import compiler, emulate, graphs, hpex
from gaudi_emulator.device import Device
from gaudi_emulator.graphs import HPUGraph
from gaudi_emulator.recording import Recording
from lantern_hpu.backends import BACKENDS
from lantern_hpu.backends.base import Candidate, Transfers
from lantern_hpu.backends.cuda import kernels as triton
from lantern_hpu.backends.cuda.backend import CUDABackend
from lantern_hpu.backends.cuda.kernels import checks
from lantern_hpu.backends.hpu import env as hpu_env
from lantern_hpu.cli import main as run
from lantern_hpu.decode.engine import Engine, GraphReport
from lantern_hpu.graphs.strict import StrictRunner
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.ops.kernels import PLAIN, Kernels
from lantern_lab.commands.verify import verify_page
from lantern_lab.verify import stages
from lantern_lab.verify.ask import Asked, answer_all
from lantern_lab.verify.items import (
    CACHES,
    GROUPED,
    KINDS,
    RECAPTURED,
    Question,
    Result,
    Stage,
    items_of,
    stages_of,
)
from tests.folder import write_folder
from tests.marks import mostly_slow

STAGE = Stage("facts", "eager")


class AheadTransfers(Transfers):
    runs_ahead = True


@pytest.fixture
def one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "stages_of", lambda device: [STAGE])


def states(file: Path) -> dict[str, str]:
    return {r["item"]: r["state"] for r in json.loads(file.read_text())["results"]}


@pytest.mark.slow
def test_emulated_card_confirms_and_a_second_run_asks_nothing_again(
    tmp_path: Path,
    one_stage: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "card.json"
    assert run(["verify", "--emulate", "--output", str(file)]) == 0
    assert states(file) == {item: "confirmed" for item, *_ in items_of(STAGE)}
    count = len(list(items_of(STAGE)))
    assert f"{count} confirmed, 0 refuted, 0 unanswered" in capsys.readouterr().out
    assert "(emulated, bridge 1.24: contract-checked)" in file.with_suffix(".html").read_text()
    monkeypatch.setattr(stages, "messages_of", None)  # nothing is asked any more
    assert run(["verify", "--emulate", "--output", str(file)]) == 0


@pytest.mark.slow
def test_without_a_card_the_reason_stands_at_each_question(tmp_path: Path, one_stage: None) -> None:
    file = tmp_path / "card.json"
    assert run(["verify", "--output", str(file)]) == 1
    report = json.loads(file.read_text())
    assert {r["state"] for r in report["results"]} == {"unanswered"}
    assert all("habana_frameworks" in r["detail"] for r in report["results"])
    assert not all(check["ok"] for check in report["checks"])


def test_question_that_ends_its_process_is_left_open_and_the_next_is_asked(
    tmp_path: Path, one_stage: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *others = items_of(STAGE)
    calls: list[list[Question]] = []

    def messages_of(wanted: Any, questions: list[Question], ends: float) -> Any:
        calls.append(questions)
        if first in questions:
            yield first
            yield "its process ended with -11"
            return
        for question in questions:
            yield question
            yield Result(
                question.stage.name, question.item, "refuted", "got 1, the contract says 2"
            )

    monkeypatch.setattr(stages, "messages_of", messages_of)
    file = tmp_path / "card.json"
    assert run(["verify", "--emulate", "--output", str(file)]) == 1
    assert states(file)[first.item] == "unanswered"
    assert states(file)[second.item] == "refuted"
    assert calls == [[first, second, *others], [second, *others]]
    shown = file.with_suffix(".html").read_text()
    assert "its process ended with -11" in shown and "the contract says 2" in shown


def test_time_that_is_over_leaves_the_rest_open(tmp_path: Path, one_stage: None) -> None:
    file = tmp_path / "card.json"
    assert run(["verify", "--emulate", "--minutes", "0.01", "--output", str(file)]) == 1
    assert set(states(file).values()) == {"unanswered"}


def test_a_report_of_another_kind_is_not_resumed(
    tmp_path: Path, one_stage: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"kind": "lantern_hpu.bench"}))
    assert run(["verify", "--emulate", "--output", str(file)]) == 2
    assert "cannot be resumed" in capsys.readouterr().err
    assert json.loads(file.read_text()) == {"kind": "lantern_hpu.bench"}


def test_page_escapes_what_devices_say() -> None:
    result = Result(
        "bench auto", "short benchmark", "confirmed", "<b>", numbers={"rows": [{"ms": 1.5}]}
    )
    report = {
        **dict.fromkeys(("kind", "device", "model", "torch", "lantern_hpu"), "x"),
        **{"release": "1.24", "checks": [], "seconds": 1.0},
        "hardware": {"card": "<i>", "flags": {"PT_HPU_LAZY_MODE": "1"}},
        "results": [asdict(result)],
    }
    shown = verify_page(report)
    assert "&lt;b&gt;" in shown and "&lt;i&gt;" in shown and "ms 1.5" in shown
    assert "<td>1.24</td>" in shown and "PT_HPU_LAZY_MODE=1" in shown


def test_every_device_has_its_stages() -> None:
    kinds = [stage.kind for stage in stages_of("cuda")]
    assert kinds == ["kernels", "caches", "methods", "distribution", "bench", "caches", "methods"]
    assert "kernels" not in [stage.kind for stage in stages_of("cpu")]  # it has no forms of its own


@pytest.mark.parametrize("lazy", [True, False])
def test_a_first_hour_on_gaudi_begins_with_what_tells_the_most(
    lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stock torch has no lazy mode: all that is asked there is asked in the modes that exist."""
    why = None if lazy else "a stock build"
    monkeypatch.setattr(hpu_env, "unfit_plugin", lambda lazy: why)
    names = [stage.name for stage in stages_of("hpu")]
    first = "hpu_graph" if lazy else "compile"
    assert names[:3] == [f"{kind} {first}" for kind in ("kernels", "caches", "bench")]
    assert names.index("cuts compile") < names.index(f"methods {first}")
    kinds = {stage.kind for stage in stages_of("hpu")}
    assert kinds == set(KINDS) and len(names) == len(set(names)) == (12 if lazy else 8)
    if not lazy:
        assert not [name for name in names if "hpu_graph" in name]


def test_stages_share_processes_where_a_device_allows_it() -> None:
    """Facts and cuts have their own; Gaudi's graph modes are settled as its software is loaded."""
    for device in ("cuda", "cpu"):
        assert len({stage.process for stage in stages_of(device)}) == 1
    flags = [
        {tuple(s.flags.items()) for s in g}
        for _, g in groupby(stages_of("hpu"), lambda s: s.process)
    ]
    assert all(len(same) == 1 for same in flags)


def test_questions_of_a_process_share_engines_and_answer_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches and methods, in two graph modes: an engine is recorded once, and once more where that is the question."""
    recorded: list[str] = []
    capture = StrictRunner.capture

    def counted(runner: StrictRunner) -> None:
        recorded.append(type(runner.function).__name__)
        capture(runner)

    monkeypatch.setattr(StrictRunner, "capture", counted)
    several = [
        [one for one in items_of(Stage(kind, mode, "cpu")) if one.item in ("ar", RECAPTURED)]
        for mode in ("strict", "eager")
        for kind in ("caches", "methods")
    ]
    answers, captures = [], []
    for groups in (several, [[one for group in several for one in group]]):
        sent: list[Any] = []
        recorded.clear()
        for questions in groups:
            answer_all("cpu", str(model), questions, sent.append)
        captures.append(recorded.count("Step"))
        found = [result for result in sent if isinstance(result, Result)]
        answers.append([(r.stage, r.item, r.state, r.detail) for r in found])
    assert answers[0] == answers[1] and {state for _, _, state, _ in answers[0]} == {"confirmed"}
    assert len(answers[0]) == 6 and captures == [3, 2]


@pytest.mark.slow
def test_processor_draws_what_the_plain_step_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the stage that compiles every method, which takes minutes
    first = [stage for stage in stages_of("cpu") if stage.graphs == "auto"][:2]
    monkeypatch.setattr(stages, "stages_of", lambda device: first)
    file, model = tmp_path / "cpu.json", write_folder(tmp_path / "tiny")
    assert run(["verify", "--device", "cpu", "--model", str(model), "--output", str(file)]) == 0
    found = states(file)
    assert found["lantern++"] == found["ar"] == "confirmed"


@pytest.mark.slow
def test_emulated_card_draws_what_the_processor_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "stages_of", lambda device: [Stage("methods", "hpu_graph")])
    monkeypatch.setattr(
        stages, "items_of", lambda stage: [Question("lantern++", "the CPU's tokens", stage)]
    )
    file, model = tmp_path / "card.json", write_folder(tmp_path / "tiny")
    run(["verify", "--emulate", "--model", str(model), "--output", str(file)])
    (found,) = (r for r in json.loads(file.read_text())["results"] if r["item"] == "lantern++")
    assert found["state"] == "confirmed" and found["numbers"]["captures after warm-up"] == 0


# Each question can be refuted


@contextmanager
def asked(kind: str, graphs: str = "hpu_graph", model: str = "") -> Iterator[Asked]:
    with emulate():
        made = Asked(Stage(kind, graphs), "hpu", model)
        with made.stack:
            yield made


def confirmed_then_refuted(
    item: str,
    spoil: Callable[[], object],
    kind: str,
    model: Path | str = "",
    graphs: str = "hpu_graph",
) -> tuple[str, dict[str, Any]]:
    """A question is confirmed, and refuted once something is spoiled. -> its detail and numbers"""
    with asked(kind, graphs, str(model)) as question:
        assert question.answer(item)[0] == "confirmed"
    spoil()
    with asked(kind, graphs, str(model)) as question:
        state, detail, numbers = question.answer(item)
    assert state == "refuted"
    return detail, numbers


@pytest.mark.parametrize("graphs", mostly_slow(["hpu_graph", "compile"], "hpu_graph"))
@pytest.mark.parametrize("name", mostly_slow(BACKENDS["hpu"].kernels, "attention"))
def test_wrong_kernel_is_refuted_and_does_not_serve(
    name: str, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In compile mode it is wrong inside a compiled graph alone. The others are confirmed, and serve."""
    real, operator = hpex.run_fused, {"attention": "sdpa", "rotate": "rope"}.get(name, name)

    def half(kernel: str, *rest: Any) -> Any:
        here = graphs != "compile" or torch.compiler.is_compiling()
        return real(kernel, *rest) * (0.5 if here and kernel == operator else 1.0)

    spoil = partial(monkeypatch.setattr, hpex, "run_fused", half)
    detail, numbers = confirmed_then_refuted(name, spoil, "kernels", graphs=graphs)
    assert "is allowed" in detail and numbers["serves"] in ("plain", "matmul_attention")
    if graphs == "compile":
        return
    with asked("kernels") as question:
        others = [other for other in BACKENDS["hpu"].kernels if other != name]
        assert {question.answer(other)[0] for other in others} == {"confirmed"}


@pytest.mark.parametrize("where", ["group 1", "bfloat16"])
def test_attention_that_is_wrong_in_one_place_alone_is_refuted(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel wrong for one group of queries that share a key head, or in one number format; and a run replaces it."""
    real = hpex.run_fused

    def wrong(kernel: str, function: Any, q: Tensor, k: Tensor, *rest: Any) -> Any:
        result = real(kernel, function, q, k, *rest)
        if kernel != "sdpa" or (where == "bfloat16" and q.dtype != torch.bfloat16):
            return result
        group = torch.arange(q.shape[1]).view(-1, 1, 1) // (q.shape[1] // k.shape[1])
        spoils = (group == 1) if where == "group 1" else (group >= 0)
        return result * (1 - 0.3 * spoils.to(result.device)).to(result.dtype)

    monkeypatch.setattr(hpex, "run_fused", wrong)
    with asked("kernels") as question:
        state, detail, _ = question.answer("attention")
        assert state == "refuted" and where in (detail if where == "bfloat16" else "group 1")
        backend = question.backend
        names = [backend.kernels("auto", d).names() for d in (torch.float32, torch.bfloat16)]
        served = ["fused_sdpa" if where == "bfloat16" else "matmul_attention", "matmul_attention"]
        assert [each["attention"] for each in names] == served


@pytest.mark.slow
def test_model_with_grouped_heads_is_refuted_where_a_kernel_spoils_one_group(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is right while it is judged, and wrong for group 1 alone in a run."""
    real, runs = hpex.run_fused, list[bool]()

    def wrong(kernel: str, function: Any, q: Tensor, k: Tensor, *rest: Any) -> Any:
        result = real(kernel, function, q, k, *rest)
        if kernel != "sdpa" or not runs or k.shape[1] == q.shape[1]:
            return result
        group = torch.arange(q.shape[1]).view(-1, 1, 1) // (q.shape[1] // k.shape[1])
        return result * (1 - (group == 1).to(result.dtype).to(result.device))

    monkeypatch.setattr(hpex, "run_fused", wrong)
    with asked("caches", model=str(model)) as question:
        assert question.answer(GROUPED)[0] == "confirmed"
        runs.append(True)
        state, _, numbers = question.answer(GROUPED)
        assert state == "refuted" and "target, layer 1, keys" in numbers["wrong"]
        assert question.answer("ar")[0] == "confirmed"  # whose heads share nothing


@pytest.mark.slow
def test_draws_that_sums_spoil_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Device.compute

    def shaken(card: Device, op: Any, *rest: Any) -> Any:
        """Neither monotone nor near."""
        result = real(card, op, *rest)
        if op.packet != "cumsum" or not result.is_floating_point():
            return result
        return result + 0.02 * torch.sin(torch.arange(result.shape[-1]))

    detail, numbers = confirmed_then_refuted(
        "draws", partial(monkeypatch.setattr, Device, "compute", shaken), "kernels"
    )
    assert "from where its uniform is" in detail and numbers["sums that fall"] > 0


@pytest.mark.slow
def test_memory_that_refuses_its_second_life_is_refuted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, begin, reset = list[Any](), HPUGraph.capture_begin, HPUGraph.reset

    def refuses(graph: Any, *rest: Any) -> None:
        if closed:
            raise RuntimeError("the memory of a graph that was closed is taken")
        begin(graph, *rest)

    def resets(graph: Any) -> None:
        closed.append(graph)
        reset(graph)

    def spoil() -> None:
        monkeypatch.setattr(HPUGraph, "capture_begin", refuses)
        monkeypatch.setattr(HPUGraph, "reset", resets)

    assert "is taken" in confirmed_then_refuted(RECAPTURED, spoil, "methods", model)[0]


def test_kernel_that_a_release_lacks_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with asked("kernels") as question:
        module = question.backend.part("hpex.normalization")  # type: ignore[attr-defined]
        monkeypatch.delattr(module, "FusedRMSNorm")
        state, detail, _ = question.answer("rms_norm")
        assert state == "unanswered" and "the plain one serves" in detail


@pytest.mark.parametrize("method", mostly_slow(CACHES, "ar"))
def test_lost_write_into_a_cache_is_refuted(
    model: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay that leaves out one `index_copy_`, as a pass over chains of them would."""
    real = Recording.close

    def losing(recording: Recording) -> None:
        # Into the state: what a step makes and writes to itself is of no later step.
        writes = {
            i: step.args[0].nbytes
            for i, step in enumerate(recording.steps)
            if step.op.packet == "index_copy_" and isinstance(step.args[0], Tensor)
        }
        large = max(writes, key=lambda i: writes[i])
        del recording.steps[large]
        real(recording)

    detail, numbers = confirmed_then_refuted(
        method, partial(monkeypatch.setattr, Recording, "close", losing), "caches", model
    )
    assert "differ" in detail and numbers["wrong"]


@pytest.mark.parametrize("method", mostly_slow([*CACHES, GROUPED], GROUPED))
def test_device_that_runs_ahead_is_asked_after_the_same_steps(model: Path, method: str) -> None:
    """It is confirmed; one wrong key refutes it, and so does a step too few, with the shapes."""
    question = Asked(Stage("caches", "eager", "cpu"), "cpu", str(model))
    with question.stack:
        question.pipeline.backend.transfers = AheadTransfers()
        assert question.answer(method)[0] == "confirmed"
        real = question.steps

        def spoiled(pipeline: Any, name: str, most: int | None) -> Any:
            engine, steps = real(pipeline, name, most)
            assert steps == most or engine.read(engine.state.count)[0] == 15  # all are drawn
            if pipeline.backend is question.pipeline.backend:
                engine.state.kv_cache.layers[1].read()[0][0, 3, 1] += 1
            return engine, steps

        question.steps = spoiled  # type: ignore[method-assign, assignment]
        assert question.answer(method)[2]["wrong"] == ["target, layer 1, keys"]

        def fewer(pipeline: Any, name: str, most: int) -> Any:
            here = pipeline.backend is question.pipeline.backend
            return real(pipeline, name, 3 - here)

        question.steps = fewer  # type: ignore[method-assign, assignment]
        state, detail, numbers = question.answer(method)
        assert state == "refuted" and "after 12 steps, [2, " in detail
        assert numbers["largest difference"] <= numbers["tolerance"]


@pytest.mark.slow
@pytest.mark.parametrize("method", CACHES)
def test_write_that_a_compiler_loses_is_refuted(
    model: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in compile mode: a pass throws one write into a cache away."""
    real = compiler.put_in_place

    def losing(card: Device, graph: fx.GraphModule) -> int:
        left = real(card, graph)
        writes = [n for n in graph.graph.nodes if n.target == torch.ops.aten.index_copy_.default]
        for node in writes[:1]:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        graph.recompile()
        return left

    spoil = partial(monkeypatch.setattr, compiler, "put_in_place", losing)
    detail, numbers = confirmed_then_refuted(method, spoil, "caches", model, "compile")
    assert "differ" in detail and numbers["wrong"]


@pytest.mark.slow
@pytest.mark.parametrize("method", CACHES)
def test_operator_that_is_cut_out_of_a_compiled_step_is_refuted(
    model: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in Stage("cuts", "compile").flags.items():
        monkeypatch.setenv(name, value)
    cut = compiler.ALWAYS_CUT | {"cumsum"}
    spoil = partial(monkeypatch.setattr, compiler, "ALWAYS_CUT", cut)
    detail, _ = confirmed_then_refuted(method, spoil, "cuts", model, "compile")
    assert "eager fallback of cumsum" in detail


@pytest.mark.slow
def test_failure_that_is_no_cut_leaves_the_question_open(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(question: Asked, *rest: Any) -> None:
        raise RuntimeError("synStatus=26")

    monkeypatch.setattr(Asked, "steps", failing)
    with asked("cuts", "compile", str(model)) as question, pytest.raises(RuntimeError):
        question.answer("ar")


@pytest.mark.parametrize("method", mostly_slow(METHODS))
def test_wrong_products_of_matrices_are_refuted_by_the_tokens(
    model: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Device.compute

    def wrong(card: Device, op: Any, *rest: Any) -> Any:
        result = real(card, op, *rest)
        return result * 1.5 if op.packet in ("mm", "addmm", "linear") else result

    monkeypatch.setattr(Device, "compute", wrong)
    with asked("methods", model=str(model)) as question:
        state, detail, _ = question.answer(method)
        assert state == "refuted" and "tokens differ" in detail


@pytest.mark.parametrize(
    "what",
    mostly_slow(["graph compilations", "cpu fallbacks", "captures after warm-up"], "cpu fallbacks"),
)
def test_what_a_step_does_after_the_warm_up_is_refuted(
    what: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, report = graphs.replayed, Engine.report

    def replayed(card: Device, *given: Any) -> Any:
        counts = card.counts
        if what == "graph compilations":
            counts.recipes += 1
        elif what == "cpu fallbacks":
            counts.fallbacks["i0"] += 1
        return real(card, *given)

    def reported(engine: Engine) -> GraphReport:
        captures = int(what == "captures after warm-up")
        return replace(report(engine), recompiles_after_warmup=captures)

    monkeypatch.setattr(graphs, "replayed", replayed)
    monkeypatch.setattr(Engine, "report", reported)
    with asked("methods", model=str(model)) as question:
        state, detail, _ = question.answer("ar")
        assert state == "refuted" and f"{what} while drawing" in detail


# On CUDA all Triton kernels are asked; here plain forms stand in for them


class OneCard(CUDABackend):
    device = torch.device("cpu")
    dtypes = {"float32": ""}

    def kernels(self, choice: str = "auto", *sizes: Any) -> Kernels:
        return PLAIN


def stand_in(name: str) -> Callable[..., Any]:
    walks = checks.worked_walks(OneCard.device)
    if name in walks:
        return lambda *given: walks[name][1]
    return commit if name == "commit" else checks.TWINS[name]


def commit(*given: Any) -> tuple[Tensor, ...]:
    """Leaves the example's state as it is after it."""
    made = checks.worked_commit(OneCard.device)[1]
    state = next(part for part in given if isinstance(part, tuple))
    for tensor, after in zip(state, made[-len(state) :], strict=True):
        tensor.copy_(after)
    return tuple(made[:4])


def halved(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose results, and what it writes, are wrong."""

    def wrong(*given: Any) -> Any:
        results = function(*given)
        for tensor in results if isinstance(results, tuple) else (results,):
            tensor += torch.ones_like(tensor)
        return results

    return wrong


@pytest.mark.parametrize("wrong", mostly_slow(BACKENDS["cuda"].kernels, "walk"))
def test_each_triton_kernel_is_asked_and_can_be_refuted(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def candidates(device: torch.device, dtype: torch.dtype) -> dict[str, Candidate]:
        examples = checks.kernel_examples(device, dtype)
        made = {name: stand_in(name) for name in examples}
        made[wrong] = halved(made[wrong])
        slack = checks.tolerance(dtype)
        return {n: Candidate(lambda n=n: made[n], examples[n], slack) for n in made}  # type: ignore[misc]

    monkeypatch.setattr(triton, "triton_candidates", candidates)
    stage = Stage("kernels", "auto", "cuda")
    question = Asked(stage, "cuda", "")
    vars(question)["backend"] = OneCard()
    answers = {item: question.answer(item)[0] for item, *_ in items_of(stage)}
    assert len(answers) == len(BACKENDS["cuda"].kernels) + 1
    assert {item for item, state in answers.items() if state == "refuted"} == {wrong}
    assert set(answers.values()) == {"refuted", "confirmed"}


@pytest.mark.parametrize("device", ["hpu", "cuda"])
def test_every_kernel_that_a_device_has_is_asked(device: str) -> None:
    if device == "cuda":
        pytest.importorskip("triton")
        found = triton.triton_candidates(torch.device("cpu"), torch.float32)
    else:
        with asked("kernels") as question:
            found = question.backend.candidates(torch.float32)
    assert set(found) == set(BACKENDS[device].kernels)


def test_plain_twins_of_triton_kernels_run_on_the_processor() -> None:
    """So that a wrong result of the card's own plain form confirms nothing."""
    seen: set[str] = set()

    def noted(name: str) -> Callable[..., Any]:
        def twin(*given: Any) -> Any:
            seen.update(x.device.type for x in given if isinstance(x, Tensor))
            return real[name](*given)

        return twin

    real = dict(checks.TWINS)
    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setitem(checks.TWINS, name, noted(name))
        checks.kernel_examples(torch.device("meta"), torch.float32)
    assert seen == {"cpu"}
