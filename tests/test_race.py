"""A race: each setting draws alone, figures are those of its run, and the files agree with each other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lantern_hpu import LanternPipeline, cli
from lantern_lab.commands.race import model_of
from lantern_lab.measure import race
from lantern_lab.measure.meter import Meter
from tests.folder import write_folder

ROOT = Path(__file__).parent.parent
METHODS = "ar,auto,scd@3,lantern++:tv=0.1@chain_2"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("race") / "tiny")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a tiny model take microseconds: on a machine that runs other tests their times are in doubt."""
    monkeypatch.setattr(race, "doubtful_step", lambda *times: "")


def run(tiny: Path, output: Path, *more: str) -> int:
    given = ["--model", str(tiny), "--prompt", "red cat", "--device", "cpu"]
    return cli.main(["race", *given, "--output", str(output), *more])


def test_promise_a_table_an_animation_and_its_last_frame(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: None
) -> None:
    folder = tmp_path / "race"
    assert run(tiny, folder, "--method", METHODS, "--turns", "2") == 0
    said = capsys.readouterr()
    assert f"lantern-hpu tune --method scd --model {tiny}\n" in said.out
    assert sorted(file.name for file in folder.iterdir()) == ["race.gif", "race.json", "race.png"]
    content = (folder / "race.json").read_bytes()
    report = json.loads(content)
    rows = {row["setting"]: row for row in report["rows"]}
    assert next(iter(rows)) == "ar" and {"scd@3", "lantern++:tv=0.1@chain_2"} <= rows.keys()
    assert rows["ar"]["times_ar"] == 1 == rows["ar"]["tokens_per_step"]
    assert not rows["lantern++:tv=0.1@chain_2"]["lossless"] and rows["scd@3"]["lossless"]
    for name, row in rows.items():
        assert name in said.out and len(row["times"]) > 0
        assert row["times"][-1][0] <= row["seconds"] + 1e-3
        assert row["times_ar"] == pytest.approx(rows["ar"]["seconds"] / row["seconds"], rel=1e-2)
    with Image.open(folder / "race.gif") as film, Image.open(folder / "race.png") as last:
        assert film.info["comment"].decode() == race.mark_of(content)
        film.seek(film.n_frames - 1)
        shown, still = (np.asarray(page.convert("RGB"), int) for page in (film, last))
        assert shown.shape == still.shape and abs(shown - still).mean() < 12  # 255 colours of it


def test_figures_are_those_of_a_draw_by_itself(tiny: Path) -> None:
    with_lines = LanternPipeline.from_pretrained(str(tiny), device="cpu")
    (found,) = race.race(with_lines, [with_lines.resolve("scd@3")], "red cat", 5, 1)
    alone = LanternPipeline.from_pretrained(str(tiny), device="cpu")(
        "red cat", seed=5, method="scd@3"
    )
    assert found.batch.pictures[0].tobytes() == alone.images[0].tobytes()
    assert found.row["tokens_per_step"] == alone.records[0].tokens_per_step
    assert found.known(0.0) < found.tokens == found.known(found.batch.seconds)
    known = [tokens for _, tokens in found.row["times"]]
    assert known == sorted(known) and known[-1] == found.tokens


def test_what_is_there_is_kept(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny, tmp_path) == 2
    assert "exists" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_sizes_are_widened_to_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Path] = []

    def stretch(asked: object) -> None:
        made.append(asked.output)  # type: ignore[attr-defined]
        made[-1].mkdir()

    monkeypatch.setenv("LANTERN_HPU_CACHE", str(tmp_path))
    monkeypatch.setattr("lantern_lab.commands.race.stretch", stretch)
    assert model_of("builtin") == "builtin"
    assert model_of("llamagen-xl") == model_of("llamagen-xl") == str(made[0])
    assert len(made) == 1 and tmp_path in made[0].parents


def test_promise_the_tutorials_animation_and_table_are_of_one_race() -> None:
    content = (ROOT / "benchmarks" / "results" / "race.json").read_bytes()
    with Image.open(ROOT / "docs" / "images" / "race.gif") as film:
        assert film.info["comment"].decode() == race.mark_of(content)
    page = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
    assert race.table(json.loads(content)["rows"]).markdown() in page
    assert "](images/race.gif)" in page


@pytest.mark.parametrize(
    ("slow", "turns"), [((7.6, 7.6), 4), ((7.6, 1.0), 4), ((1.0, 1.0), 2)], ids=str
)
def test_turns_that_cannot_be_are_drawn_again_and_marked(
    slow: tuple[float, float],
    turns: int,
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step over four tokens takes no ten times as long as one over one token, but on a machine that is busy."""
    real, drawn = Meter.draw, list[str]()

    def draw(meter: Meter, pixels: bool) -> None:
        drawn.append(str(meter.case.setting))
        step = 0.75 if drawn[-1] == "ar" else slow[len(drawn) > 2]
        real(meter, pixels)
        batch = meter.batches[-1]
        batch.seconds, batch.stats.steps, batch.stats.steps_s = step, 1, step / 1000

    monkeypatch.setattr(Meter, "draw", draw)
    assert run(tiny, tmp_path / "race", "--method", "ar,scd@3") == 0
    said = capsys.readouterr().out
    ar, window = json.loads((tmp_path / "race" / "race.json").read_bytes())["rows"]
    in_doubt = slow == (7.6, 7.6)
    assert len(drawn) == turns and ar["times_ar"] == 1
    assert in_doubt == (window["times_ar"] is None) == ("doubt" in window)
    assert in_doubt == ("in doubt: scd@3: a step over 4 tokens took 7.6 ms" in said)
