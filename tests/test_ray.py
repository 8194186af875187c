"""Workers and replicas on a real Ray of this machine: the images of one process, whoever dies on the way."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from lantern_hpu.backends import DEVICE_VARIABLE, card_of
from lantern_hpu.commands.generate import main
from lantern_hpu.errors import DeviceError
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.serve.process import deployment, drain
from lantern_hpu.workers import LOOPBACK, connect, pieces, share_of
from lantern_lab.commands import evaluate
from tests.folder import config_file

ray = pytest.importorskip("ray")
ROOT = Path(__file__).parent.parent
IMAGES = 24
MANY = 3000  # in pieces that take longer than the command waits before it looks whether Ray lives
PORT = 18431


class Nodes:
    """A head without a processor to offer, and three nodes of one each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        small: dict[str, Any] = {"object_store_memory": 80 * 2**20}
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        self.others = [self.cluster.add_node(num_cpus=1, **small) for _ in range(3)]
        environment = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
        ray.init(address=self.cluster.address, runtime_env=environment, logging_level="ERROR")

    def kill(self) -> None:
        self.cluster.remove_node(self.others.pop(), allow_graceful=False)

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


def options_of(model: Path, out: Path, images: int = IMAGES) -> list[str]:
    given = ("--model", model, "--prompt", "red cat", "--num-images", images, "--output", out)
    return [*map(str, given), "--batch-size", "1", "--method", "ar"]


def after(folder: Path, count: int, act: Callable[[], Any]) -> threading.Thread:
    """Does something once there are so many pictures."""

    def watch() -> None:
        while len(list(folder.glob("*.png"))) < count:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.png"))}


def processes(mark: str) -> Iterator[Path]:
    """Folders in /proc of our processes whose environment has a mark."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                yield process
        except OSError:
            continue  # it has ended, or is another user's


@pytest.mark.ray
def test_a_node_that_dies_loses_no_image_and_a_run_resumes(
    model: Path, tmp_path: Path, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, many = tmp_path / "alone", tmp_path / "many"
    assert main(options_of(model, alone)) == 0
    options = options_of(model, many)
    dying = after(many, 4, nodes.kill)
    assert main([*options, "--workers", "3"]) == 0
    dying.join(300)
    assert bytes_of(many) == bytes_of(alone)
    files = sorted(many.iterdir())
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
def test_a_shared_folder_that_goes_away_is_an_error(
    model: Path, tmp_path: Path, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "many"
    gone = after(out, 4, lambda: shutil.rmtree(out, ignore_errors=True))
    assert main([*options_of(model, out), "--workers", "3"]) == 2
    gone.join(300)
    shown = capsys.readouterr().err
    assert "error:" in shown and "Traceback" not in shown
    assert main([*options_of(model, out), "--workers", "3", "--resume"]) == 0
    assert len(bytes_of(out)) == IMAGES


@pytest.mark.ray
def test_an_evaluation_is_the_same_with_any_number_of_workers(
    model: Path, tmp_path: Path, nodes: Nodes
) -> None:
    """Pictures and figures; and a run goes on where another number of workers left it."""
    few = {"num_images": 65, "panels": 2, "fresh": 70, "rounds": 10, "no_floor": True}
    sizes = [*config_file(tmp_path / "few.toml", **few), "--method", "ar,eagle"]

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
    assert evaluated("two", "--workers", "2") == want
    for file in sorted((tmp_path / "two/pictures/eagle").glob("*.png"))[:20]:
        file.unlink()
    assert evaluated("two", "--workers", "1") == want


@pytest.mark.ray
def test_replicas_answer_with_the_pictures_of_generate_also_when_a_node_dies(
    model: Path, nodes: Nodes
) -> None:
    from ray import serve

    options = ServeOptions(str(model), methods=("ar",), slots=2)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT, "location": "HeadOnly"})
    serve.run(deployment(options, 3, share_of(ray, "cpu")), name="lantern_hpu")
    pipeline = LanternPipeline.from_pretrained(str(model))

    def answer(**fields: Any) -> httpx.Response | None:
        url = f"http://127.0.0.1:{PORT}/v1/images/generations"
        try:
            return httpx.post(url, json={"prompt": "red cat", **fields}, timeout=300)
        except httpx.TransportError:
            return None

    def draws(seed: int) -> bool:
        """Whether a replica answers, with the picture of one process."""
        found = answer(seed=seed)
        if found is None or found.status_code != 200:
            return False
        drawn = Image.open(io.BytesIO(base64.b64decode(found.json()["data"][0]["b64_json"])))
        return drawn.tobytes() == pipeline("red cat", seed=seed, method="ar").images[0].tobytes()

    def wait_for(images: int) -> None:
        until = time.monotonic() + 300
        while not all(map(draws, range(images))):
            assert time.monotonic() < until

    wait_for(6)
    nodes.kill()
    wait_for(12)  # by the two that are left
    with ThreadPoolExecutor(4) as pool:  # a shutdown waits for what was taken
        asked = [pool.submit(answer, n=10) for _ in range(4)]
        while not any(each.done() for each in asked):  # what is not taken yet is refused
            time.sleep(0.01)
        drain()
        statuses = {found.status_code for each in asked if (found := each.result()) is not None}
    assert 200 in statuses and statuses <= {200, 503}


LISTEN = """
import sys
from lantern_hpu.workers import connect
ray = connect(1)
print(ray._private.worker._global_node.get_session_dir_path(), flush=True)
sys.stdin.readline()
"""


def listening(mark: str) -> set[str]:
    """Addresses on which processes of a mark listen, as /proc writes them."""
    inodes = set()
    for process in processes(mark):
        links = [os.readlink(link) for link in (process / "fd").iterdir()]
        inodes |= {link[8:-1] for link in links if link.startswith("socket:")}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.ray
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux says what listens where")
def test_ray_of_one_machine_listens_and_writes_for_its_user_alone(tmp_path: Path) -> None:
    """On the loopback address; in a folder behind one that others cannot enter, while Ray runs."""
    mark = uuid.uuid4().hex
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MARK": mark, "HOME": str(tmp_path)}
    environment.pop(LOOPBACK, None)
    words = [sys.executable, "-c", LISTEN]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, env=environment) as running:
        assert running.stdin is not None and running.stdout is not None
        session = Path(running.stdout.readline().decode().strip())
        assert (session / "sockets").is_dir()
        closed = [each for each in session.parents if not each.stat().st_mode & 0o077]
        assert closed and closed[-1].name.startswith("lantern-ray-")
        assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
        found = listening(mark)
        running.stdin.close()
    # 127.0.0.1, ::ffff:127.0.0.1 and ::1
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert found and found <= loopback
    assert not closed[-1].exists()


ALONE = "import sys; from lantern_hpu.commands.generate import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.ray
@pytest.mark.parametrize(("dies", "code", "images"), [("raylet", 2, MANY), ("ray::Worker", 0, 200)])
def test_where_ray_dies_the_error_names_what_is_drawn_and_a_worker_is_replaced(
    model: Path, tmp_path: Path, dies: str, code: int, images: int
) -> None:
    out, mark = tmp_path / "many", uuid.uuid4().hex
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MARK": mark, "OMP_NUM_THREADS": "1"}

    def kill() -> None:
        for process in processes(mark):
            if (process / "comm").read_text().startswith(dies):
                os.kill(int(process.name), 9)
                return

    words = [sys.executable, "-c", ALONE, *options_of(model, out, images), "--workers", "2"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, env=environment, text=True) as running:
        after(out, 4, kill).join(300)
        shown = running.communicate(timeout=900)[1]
    assert running.returncode == code, shown[-2000:]
    if code:
        assert f"of {images} are done" in shown and "--resume" in shown
        assert main([*options_of(model, out, images), "--resume"]) == 0
    assert len(bytes_of(out)) == images


def test_pieces_cover_every_image_once() -> None:
    for count, workers, slots in ((1, 1, 8), (12, 2, 2), (1000, 8, 8), (7, 50, 1)):
        found = pieces(count, workers, slots)
        assert [number for piece in found for number in piece] == list(range(count))
        assert all(len(piece) >= min(slots, count) for piece in found[:-1])


def test_a_worker_takes_one_card_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE_VARIABLE)
    offered = {"CPU": 8.0, "GPU": 2.0}
    assert card_of("auto", {"CPU": 8.0}) == card_of("cpu", offered) == "CPU"
    assert card_of("auto", offered) == card_of("cuda", offered) == "GPU"
    assert card_of("auto", offered | {"HPU": 8.0}) == "HPU"
    with pytest.raises(DeviceError, match="no HPU"):
        card_of("hpu", offered)


def test_a_ray_that_does_not_start_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(address: str | None = None, **options: Any) -> None:
        raise ConnectionError("no cluster") if address else Exception("the node timed out")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(DeviceError, match="Ray does not start") as raised:
        connect(1)
    assert "timed out" in str(raised.value.why)
