"""Workers and replicas on a real Ray of this machine: the images of one process, whoever dies on the way."""

from __future__ import annotations

import atexit
import base64
import io
import json
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from lantern_hpu.backends import DEVICE_VARIABLE, card_of
from lantern_hpu.commands.generate import main, make_parser
from lantern_hpu.errors import DeviceError
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.png import read_png
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.serve.process import deployment, drain
from lantern_hpu.workers import hide_token, pieces, session_folder, share_of, share_work
from lantern_lab.commands import evaluate

ray = pytest.importorskip("ray")
ROOT = Path(__file__).parent.parent
COUNT = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    for trial in range(5):  # it gives up after 30 s, which a busy machine may need longer than
        try:
            ray.init(
                num_cpus=3,
                include_dashboard=False,
                object_store_memory=100 * 2**20,
                runtime_env=environment,
                logging_level=logging.ERROR,
            )
            break
        except Exception:
            ray.shutdown()
            if trial == 4:
                raise
    yield
    ray.shutdown()


def options_for(model: Path, folder: Path, out: Path) -> list[str]:
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(f"{word} {i}" for i, word in enumerate(["cat", "red"] * 6)))
    given = ("--model", model, "--prompts-file", prompts, "--output", out, "--batch-size", 2)
    return [str(each) for each in given]


@pytest.mark.ray
def test_a_worker_that_dies_loses_no_image_and_draws_none_twice(
    model: Path, tmp_path: Path, cluster: None
) -> None:
    alone, many, notes = tmp_path / "alone", tmp_path / "many", tmp_path / "notes"
    notes.mkdir()
    assert main(options_for(model, tmp_path, alone)) == 0
    args = make_parser().parse_args(options_for(model, tmp_path, many))
    work = pieces(COUNT, 2, 2)
    found = list(share_work("tests.ray_worker:open_mortal", [args, str(notes)], work, 2))
    assert sorted(number for numbers, _ in found for number in numbers) == list(range(COUNT))
    assert (notes / "died").exists()
    written = {file.name: read_png(file) for file in many.iterdir()}
    assert written == {file.name: read_png(file) for file in alone.iterdir()}
    drawn = [int(note.name.split("-")[1]) for note in notes.glob("*-*")]
    assert sorted(drawn) == list(range(COUNT))


@pytest.mark.ray
def test_any_number_of_workers_draws_what_one_process_draws_and_resumes(
    model: Path, tmp_path: Path, cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, many = tmp_path / "alone", tmp_path / "many"
    assert main(options_for(model, tmp_path, alone)) == 0
    options = options_for(model, tmp_path, many)
    assert main([*options, "--workers", "2"]) == 0
    files = sorted(many.iterdir())
    assert [f.name for f in files] == sorted(f.name for f in alone.iterdir())
    for file in files:
        first, second = (np.asarray(Image.open(f)) for f in (file, alone / file.name))
        assert np.array_equal(first, second)
    kept = {file: file.stat().st_mtime_ns for file in files[4:]}
    for file in files[:4]:
        file.unlink()
    capsys.readouterr()
    assert main([*options, "--workers", "1", "--resume"]) == 0
    assert "4 image(s) drawn" in capsys.readouterr().out
    assert all(file.stat().st_mtime_ns == when for file, when in kept.items())
    assert main([*options, "--workers", "2", "--resume", "--seed", "5"]) == 2
    assert "another image" in capsys.readouterr().err


@pytest.mark.ray
def test_an_evaluation_is_the_same_with_any_number_of_workers(
    model: Path, tmp_path: Path, cluster: None
) -> None:
    """Pictures and figures; and a run goes on where another number of workers left it."""
    sizes = "--num-images 65 --panels 2 --fresh 70 --rounds 10 --no-floor --method ar,eagle".split()

    def evaluated(name: str, *more: str) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
        out = tmp_path / name
        given = ["--model", str(model), "--preset", "scenes", *sizes, "--output", str(out), *more]
        assert evaluate.main(given) == 0
        rows = json.loads((out / "evaluation.json").read_text())["rows"]
        timed = ("seconds_per_image", "intervals", "against_ar")
        figures = [{k: v for k, v in row.items() if k not in timed} for row in rows]
        files = sorted((out / "pictures").rglob("*.png"))
        pixels = {str(f.relative_to(out)): Image.open(f).tobytes() for f in files}
        assert all(row["seconds_per_image"] > 0 for row in rows)
        return figures, pixels

    want = evaluated("alone")
    assert len(want[1]) == 2 * (65 + 2 * 4)
    assert evaluated("one", "--workers", "1") == want
    assert evaluated("two", "--workers", "2") == want
    for file in sorted((tmp_path / "two/pictures/eagle").glob("*.png"))[:20]:
        file.unlink()
    assert evaluated("two", "--workers", "2") == want


@pytest.mark.ray
def test_replicas_answer_with_the_pictures_of_generate(
    model: Path, tmp_path: Path, cluster: None
) -> None:
    from ray import serve

    options = ServeOptions(str(model), methods=("ar",), slots=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(deployment(options, 2, share_of(ray, "cpu")), name="lantern_hpu")
    pipeline = LanternPipeline.from_pretrained(str(model))
    try:
        for seed in range(6):
            fields: dict[str, Any] = {"prompt": "red cat", "seed": seed}
            answer = ready_answer(f"http://127.0.0.1:{port}", fields)
            drawn = Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])))
            want = pipeline("red cat", seed=seed, method="ar").images[0]
            assert np.array_equal(np.asarray(drawn), np.asarray(want))
        with ThreadPoolExecutor(4) as pool:  # a shutdown waits for what was taken
            fields = {"prompt": "red cat", "n": 10}
            url = f"http://127.0.0.1:{port}/v1/images/generations"
            asked = [pool.submit(httpx.post, url, json=fields, timeout=300) for _ in range(4)]
            while not any(each.done() for each in asked):  # what is not taken yet is refused
                time.sleep(0.01)
            drain()
            statuses = {each.result().status_code for each in asked}
        assert 200 in statuses and statuses <= {200, 503}
    finally:
        serve.shutdown()


def ready_answer(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The answer of a replica that has captured its engines."""
    end = time.monotonic() + 300
    while True:
        answer = httpx.post(url + "/v1/images/generations", json=fields, timeout=300)
        if answer.status_code == 200:
            found: dict[str, Any] = answer.json()
            return found
        assert answer.status_code == 503 and time.monotonic() < end, answer.text
        time.sleep(0.5)


def test_pieces_cover_every_image_once() -> None:
    for count, workers, slots in ((1, 1, 8), (12, 2, 2), (1000, 8, 8), (7, 50, 1)):
        found = pieces(count, workers, slots)
        assert [number for piece in found for number in piece] == list(range(count))
        assert all(len(piece) >= min(slots, count) for piece in found[:-1])


@pytest.mark.parametrize(
    ("device", "offered", "card"),
    [
        ("auto", {"CPU": 8.0}, "CPU"),
        ("auto", {"CPU": 8.0, "GPU": 2.0}, "GPU"),
        ("auto", {"CPU": 8.0, "GPU": 2.0, "HPU": 8.0}, "HPU"),
        ("cuda", {"CPU": 8.0, "GPU": 2.0}, "GPU"),
        ("cpu", {"CPU": 8.0, "GPU": 2.0}, "CPU"),
    ],
)
def test_a_worker_takes_one_card_of_the_cluster(
    device: str, offered: dict[str, float], card: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DEVICE_VARIABLE)
    assert card_of(device, offered) == card


def test_a_card_that_the_cluster_has_not_is_an_error() -> None:
    with pytest.raises(DeviceError, match="no HPU"):
        card_of("hpu", {"CPU": 8.0})


@pytest.mark.parametrize("option", ["--grid", "--report x", "--save-tokens x", "--preview-every 1"])
def test_what_workers_cannot_leave_is_refused(
    model: Path, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_for(model, tmp_path, tmp_path / "out")
    assert main([*options, "--workers", "2", *option.split()]) == 2
    assert "--workers excludes" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--places", "4"], ["--tree", "auto"], ["--workers", "0"]])
def test_what_the_one_that_scores_cannot_measure_is_refused(
    model: Path, tmp_path: Path, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(model), "--preset", "scenes", "--output", str(tmp_path / "out")]
    assert evaluate.main([*given, "--workers", "2", *option]) == 2
    assert "--workers" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_ray_that_does_not_start_is_one_clear_error(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def init(address: str | None = None, **options: Any) -> None:
        raise ConnectionError("no cluster") if address else Exception("the node timed out")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    options = options_for(model, tmp_path, tmp_path / "out")
    assert main([*options, "--workers", "2"]) == 2
    shown = capsys.readouterr().err
    assert "Ray does not start" in shown and "timed out" in shown and "Traceback" not in shown


@pytest.mark.parametrize("there", [True, False])
def test_other_users_read_neither_rays_token_nor_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    file = tmp_path / ".ray" / "auth_token"
    if there:
        file.parent.mkdir()
        file.write_text("token")
        file.chmod(0o644)
    hide_token()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text() == "token" if there else len(file.read_text()) == 64
    ended: list[Any] = []
    monkeypatch.setattr(atexit, "register", ended.append)
    given = Path(session_folder(SimpleNamespace(shutdown=lambda: None)))
    given.mkdir(exist_ok=True)
    given.chmod(0o777)  # as Ray does
    assert given.parent.stat().st_mode & 0o777 == 0o700
    ended[0]()
    assert not given.parent.exists()
