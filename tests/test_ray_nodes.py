"""Three nodes of Ray on this machine, of which one dies; what listens where; a shared folder that goes away."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lantern_hpu.commands.generate import main
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.serve.process import deployment
from lantern_hpu.workers import LOOPBACK, share_of

ray = pytest.importorskip("ray")
ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.ray
IMAGES = 24
MANY = 3000  # in pieces that take longer than the command waits before it looks whether Ray lives


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


def after(folder: Path, count: int, act: Any) -> threading.Thread:
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


def test_a_node_that_dies_loses_no_image(model: Path, tmp_path: Path, nodes: Nodes) -> None:
    assert main(options_of(model, tmp_path / "alone")) == 0
    dying = after(tmp_path / "many", 4, nodes.kill)
    assert main([*options_of(model, tmp_path / "many"), "--workers", "3"]) == 0
    dying.join(300)
    assert bytes_of(tmp_path / "many") == bytes_of(tmp_path / "alone")


def test_a_shared_folder_that_goes_away_is_an_error(
    model: Path, tmp_path: Path, nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "many"
    gone = after(out, 4, lambda: shutil.rmtree(out, ignore_errors=True))
    assert main([*options_of(model, out), "--workers", "3"]) == 2
    gone.join(300)
    shown = capsys.readouterr().err
    assert "error:" in shown and "--resume" in shown and "Traceback" not in shown
    assert main([*options_of(model, out), "--workers", "3", "--resume"]) == 0
    assert len(bytes_of(out)) == IMAGES


def test_replicas_go_on_answering_when_a_node_dies(model: Path, nodes: Nodes) -> None:
    from ray import serve

    options = ServeOptions(str(model), methods=("ar",), slots=2)
    serve.start(http_options={"host": "127.0.0.1", "port": 18431, "location": "HeadOnly"})
    serve.run(deployment(options, 3, share_of(ray, "cpu")), name="lantern_hpu")
    url = "http://127.0.0.1:18431/v1/images/generations"

    def status() -> int:
        try:
            return httpx.post(url, json={"prompt": "red cat"}, timeout=300).status_code
        except httpx.TransportError:
            return 0

    def healthy(images: int) -> bool:
        return all(status() == 200 for _ in range(images))

    until = time.monotonic() + 300
    while not healthy(6):
        assert time.monotonic() < until
    nodes.kill()
    until, answered = time.monotonic() + 300, 0
    while not healthy(12):  # the two that are left
        answered += 1
        assert time.monotonic() < until, "no answers after a node died"
    serve.shutdown()


LISTEN = """
import sys
from lantern_hpu.workers import connect
ray = connect(1)
print(ray._private.worker._global_node.get_session_dir_path(), flush=True)
sys.stdin.readline()
"""


def listening(mark: str) -> set[str]:
    """Addresses on which processes listen whose environment has a mark, as /proc writes them."""
    inodes = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                links = [os.readlink(link) for link in (process / "fd").iterdir()]
                inodes |= {link[8:-1] for link in links if link.startswith("socket:")}
        except OSError:
            continue  # it has ended, or is another user's
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux says what listens where")
def test_ray_of_one_machine_listens_and_writes_for_its_user_alone() -> None:
    """On the loopback address; in a folder behind one that others cannot enter, while Ray runs."""
    mark = uuid.uuid4().hex
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LANTERN_TEST": mark}
    environment.pop(LOOPBACK, None)
    words = [sys.executable, "-c", LISTEN]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, env=environment) as running:
        assert running.stdin is not None and running.stdout is not None
        session = Path(running.stdout.readline().decode().strip())
        assert (session / "sockets").is_dir()
        closed = [each for each in session.parents if not each.stat().st_mode & 0o077]
        assert closed and closed[-1].name.startswith("lantern-ray-")
        found = listening(mark)
        running.stdin.close()
    # 127.0.0.1, ::ffff:127.0.0.1 and ::1
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert found and found <= loopback
    assert not closed[-1].exists()


ALONE = """
import sys
from lantern_hpu.commands.generate import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_machine_whose_ray_dies_is_an_error_that_names_what_is_drawn(
    model: Path, tmp_path: Path
) -> None:
    out, mark = tmp_path / "many", uuid.uuid4().hex
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "LANTERN_TEST": mark,
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-c", ALONE, *options_of(model, out, MANY), "--workers", "2"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, env=environment, text=True) as running:
        after(out, 4, lambda: kill_raylet(mark)).join(300)
        shown = running.communicate(timeout=300)[1]
    assert running.returncode == 2, shown[-2000:]
    assert f"of {MANY} are done" in shown and "--resume" in shown
    assert main([*options_of(model, out, MANY), "--resume"]) == 0
    assert len(bytes_of(out)) == MANY


def kill_raylet(mark: str) -> None:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = mark.encode() in (process / "environ").read_bytes()
            if is_ours and (process / "comm").read_text().strip() == "raylet":
                os.kill(int(process.name), 9)
        except OSError:
            continue
