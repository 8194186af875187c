"""`evaluate`: pictures of many settings, scored; a run that is stopped goes on to the same table."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lantern_hpu.generator import ImageGenerator
from lantern_lab.commands.evaluate import evaluate_request, main, make_parser
from lantern_lab.evaluate import drawing
from lantern_lab.evaluate.drawing import read_picture
from tests.folder import config_file


def evaluated(
    model: Path, folder: Path, *options: str, rows: str = "ar,lantern++:lambda=3", **keys: Any
) -> int:
    sizes = {"num_images": 65, "panels": 2, "fresh": 70, "rounds": 10}
    about = {"model": str(model), "method": rows}
    given = config_file(folder.with_suffix(".toml"), **about | sizes | keys)
    return main([*given, "--preset", "scenes", "--output", str(folder), *options])


def document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return found


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests work on copies of it."""
    folder = tmp_path_factory.mktemp("finished") / "out"
    assert evaluated(model, folder) == 0
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "out")


def figures(folder: Path) -> list[dict[str, Any]]:
    """Rows without what depends on the clock."""
    skip = ("seconds_per_image", "intervals", "against_ar")
    return [{k: v for k, v in row.items() if k not in skip} for row in document(folder)["rows"]]


@pytest.mark.slow
def test_a_run_leaves_rows_a_page_and_plots(finished: Path) -> None:
    found = document(finished)
    rows = {row["row"]: row for row in found["rows"]}
    assert list(rows) == ["ar", "lantern++:lambda=3", "ar, other seeds"]
    for row in rows.values():
        assert {"frechet", "agreement", "diversity", "seconds_per_image"} <= set(row)
        low, high = row["intervals"]["frechet"]
        assert low < row["frechet"] < high
    assert rows["ar"]["tokens_per_step"] == 1
    assert rows["lantern++:lambda=3"]["tokens_per_step"] > 1.2
    assert rows["lantern++:lambda=3"]["relaxation"]["bound"] == 3
    assert set(rows["lantern++:lambda=3"]["against_ar"]) >= {"frechet", "agreement"}
    assert "65 captions" in found["protocol"]
    (generator,) = (row for row in found["baselines"] if row["row"] == "the generator")
    assert generator["diversity"] == pytest.approx(1)
    # Its own pictures are nearer to its own than those of a model that knows nothing
    assert generator["frechet"] < rows["ar"]["frechet"] / 2
    assert generator["agreement"] > 0.75 > rows["ar"]["agreement"] + 0.2
    assert rows["ar"]["tv_per_token"] == 0 < rows["lantern++:lambda=3"]["tv_per_token"] < 1
    plots = ("quality-tokens", "quality-seconds", "quality-tv", "tokens-tv")
    assert all(f"({name}.png)" in (finished / "evaluation.md").read_text() for name in plots)
    for name in ("evaluation.md", *(f"{name}.png" for name in plots)):
        assert (finished / name).stat().st_size > 500
    assert "lantern++:lambda=3" in (finished / "evaluation.md").read_text()


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_figures(model: Path, copied: Path) -> None:
    """Half a line, pictures without lines, a setting not begun, and no results yet."""
    folder = copied
    whole = figures(folder)
    for file in folder.glob("evaluation.*"):
        file.unlink()
    shutil.rmtree(folder / "features")
    lines = folder / "pictures" / "ar" / "drawn.jsonl"
    lines.write_text(lines.read_text()[:-1500])
    shutil.rmtree(folder / "pictures" / "lantern++-lambda=3")
    assert evaluated(model, folder) == 0
    assert figures(folder) == whole


@pytest.mark.slow
def test_a_finished_run_draws_nothing_again(
    model: Path, finished: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ImageGenerator, "draw")
    assert evaluated(model, copied) == 0
    assert figures(copied) == figures(finished)


@pytest.mark.slow
def test_pieces_done_by_others_in_any_order_are_the_same_evaluation(
    model: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What two workers do, here in one process: each opens the model anew, and the last piece is done first."""

    def shared(
        opener: str, arguments: list[Any], work: list[list[int]], workers: int, *device: Any
    ) -> Iterator[tuple[list[int], Any]]:
        assert opener == "lantern_lab.evaluate.drawing:open_picture_worker" and workers == 2
        hands = [
            drawing.open_picture_worker(*pickle.loads(pickle.dumps(arguments)))
            for _ in range(workers)
        ]
        for i, numbers in enumerate(reversed(work)):
            yield numbers, hands[i % workers](numbers)

    monkeypatch.setattr(drawing, "share_work", shared)
    assert evaluated(model, tmp_path / "out", "--workers", "2") == 0
    assert figures(tmp_path / "out") == figures(finished)
    for file in sorted((finished / "pictures").rglob("*.png"))[::16]:
        other = tmp_path / "out" / file.relative_to(finished)
        assert read_picture(file).tobytes() == read_picture(other).tobytes()
    assert "Workers drew the pictures" in (tmp_path / "out" / "evaluation.md").read_text()


@pytest.mark.slow
def test_batches_do_not_change_the_pictures(model: Path, finished: Path, tmp_path: Path) -> None:
    assert evaluated(model, tmp_path / "out", "--batch-size", "5", rows="ar", no_floor=True) == 0
    for file in sorted((finished / "pictures" / "ar").glob("*.png"))[::16]:
        other = tmp_path / "out" / "pictures" / "ar" / file.name
        assert read_picture(file).tobytes() == read_picture(other).tobytes()


@pytest.mark.slow
def test_half_a_picture_is_named(
    model: Path, finished: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copied / "pictures" / "ar" / "000007.png"
    file.write_bytes(file.read_bytes()[:200])
    assert evaluated(model, copied) == 2
    assert "000007.png is not a whole picture" in capsys.readouterr().err
    file.unlink()
    assert evaluated(model, copied) == 0
    assert figures(copied) == figures(finished)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"seed": 5}, "other seed"),
        ({"temperature": 0.5}, "other sampling"),
        ({"panels": 3}, "other prompts"),
    ],
)
def test_pictures_of_another_run_are_not_taken_for_these(
    model: Path, copied: Path, capsys: Any, keys: dict[str, Any], said: str
) -> None:
    assert evaluated(model, copied, **keys) == 2
    assert said in capsys.readouterr().err


def test_a_folder_of_other_things_is_left_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    assert evaluated(model, tmp_path) == 2
    assert "no evaluation's folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]


def test_the_small_form_keeps_what_is_given(tmp_path: Path) -> None:
    parse = make_parser().parse_args
    six = config_file(tmp_path / "six.toml", panels=6)
    quick = evaluate_request(parse([*six, "--quick", "--output", "x"]))
    usual = evaluate_request(parse(["--output", "x"]))
    assert [str(setting) for setting in quick.settings] == ["ar", "lantern++"]
    assert (quick.painted.images, quick.painted.panels, quick.rounds) == (80, 6, 50)
    assert quick.painted.fresh < usual.painted.fresh and quick.sampling == usual.sampling
