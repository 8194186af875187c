"""`verify` asks everything, goes on where it was stopped, and says what could not be asked and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lantern_hpu.commands.verify import main
from lantern_hpu.lab.verify import run
from lantern_hpu.lab.verify.items import Question, Result, Stage, items_of, stages_of
from lantern_hpu.lab.verify.page import page
from tests.folder import write_folder

STAGE = Stage("facts", "eager")


@pytest.fixture
def one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "stages_of", lambda device: [STAGE])


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
    assert main(["--emulate", "--output", str(file)]) == 0
    assert states(file) == {item: "confirmed" for item, _ in items_of(STAGE)}
    count = len(list(items_of(STAGE)))
    assert f"{count} confirmed, 0 refuted, 0 unanswered" in capsys.readouterr().out
    assert "(emulated)" in file.with_suffix(".html").read_text()
    monkeypatch.setattr(run, "messages_of", None)  # nothing is asked any more
    assert main(["--emulate", "--output", str(file)]) == 0


def test_without_a_card_the_reason_stands_at_each_question(tmp_path: Path, one_stage: None) -> None:
    file = tmp_path / "card.json"
    assert main(["--output", str(file)]) == 1
    report = json.loads(file.read_text())
    assert {r["state"] for r in report["results"]} == {"unanswered"}
    assert all("habana_frameworks" in r["detail"] for r in report["results"])
    assert not all(check["ok"] for check in report["checks"])


def test_question_that_ends_its_process_is_left_open_and_the_next_is_asked(
    tmp_path: Path, one_stage: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *others = items_of(STAGE)
    calls: list[list[Question]] = []

    def messages_of(wanted: Any, stage: Stage, questions: list[Question], ends: float) -> Any:
        calls.append(questions)
        if first in questions:
            yield first
            yield "its process ended with -11"
            return
        for question in questions:
            yield question
            yield Result(stage.name, question.item, "refuted", "got 1, the contract says 2")

    monkeypatch.setattr(run, "messages_of", messages_of)
    file = tmp_path / "card.json"
    assert main(["--emulate", "--output", str(file)]) == 1
    assert states(file)[first.item] == "unanswered"
    assert states(file)[second.item] == "refuted"
    assert calls == [[first, second, *others], [second, *others]]
    shown = file.with_suffix(".html").read_text()
    assert "its process ended with -11" in shown and "the contract says 2" in shown


def test_time_that_is_over_leaves_the_rest_open(tmp_path: Path, one_stage: None) -> None:
    file = tmp_path / "card.json"
    assert main(["--emulate", "--minutes", "0.01", "--output", str(file)]) == 1
    assert set(states(file).values()) == {"unanswered"}


def test_bad_options(tmp_path: Path, one_stage: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "abacus"]) == 2
    assert main(["--device", "cpu", "--emulate"]) == 2
    assert main(["--minutes", "0"]) == 2
    assert main(["--output", "card.txt"]) == 2
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"kind": "lantern_hpu.bench"}))
    assert main(["--emulate", "--output", str(file)]) == 2
    assert "cannot be gone on with" in capsys.readouterr().err
    assert json.loads(file.read_text()) == {"kind": "lantern_hpu.bench"}


def test_page_escapes_what_devices_say() -> None:
    result = Result(
        "bench auto", "short benchmark", "confirmed", "<b>", numbers={"rows": [{"ms": 1.5}]}
    )
    report = {
        **dict.fromkeys(("kind", "device", "model", "torch", "lantern_hpu"), "x"),
        **{"emulated": False, "hardware": {"card": "<i>"}, "checks": [], "seconds": 1.0},
        "results": [result.as_json()],
    }
    shown = page(report)
    assert "&lt;b&gt;" in shown and "&lt;i&gt;" in shown and "ms 1.5" in shown


def test_every_device_has_its_stages() -> None:
    assert [stage.kind for stage in stages_of("cuda")] == ["kernels", "methods", "methods", "bench"]
    assert [stage.name for stage in stages_of("hpu")][:2] == ["facts hpu_graph", "facts eager"]


@pytest.mark.slow
def test_processor_draws_what_the_plain_step_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the stage that compiles every method, which takes minutes
    monkeypatch.setattr(run, "stages_of", lambda device: stages_of(device)[:2])
    file, model = tmp_path / "cpu.json", write_folder(tmp_path / "tiny")
    assert main(["--device", "cpu", "--model", str(model), "--output", str(file)]) == 0
    found = states(file)
    assert found["lantern++"] == found["attention"] == "confirmed"


@pytest.mark.slow
def test_emulated_card_draws_what_the_processor_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "stages_of", lambda device: [Stage("methods", "hpu_graph")])
    monkeypatch.setattr(run, "items_of", lambda stage: [Question("lantern++", "the CPU's tokens")])
    file, model = tmp_path / "card.json", write_folder(tmp_path / "tiny")
    main(["--emulate", "--model", str(model), "--output", str(file)])
    (found,) = (r for r in json.loads(file.read_text())["results"] if r["item"] == "lantern++")
    assert found["state"] == "confirmed" and found["numbers"]["recompiles after warm-up"] == 0
