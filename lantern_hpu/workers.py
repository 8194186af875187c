"""Many cards and machines, through Ray: each piece of work goes to a free worker, and to another if that one dies.

A worker leaves files named by the number of the image, so a piece that is done again writes nothing twice.
Nothing here loads torch: a worker imports it, and its device's software, in a process of its own.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from lantern_hpu.backends import card_of
from lantern_hpu.errors import Arg, DeviceError, LanternError, needing, words

TRIES = 3  # new workers in place of each
LOOK = 2.0  # seconds between two looks whether Ray runs, while no worker answers
# Of Ray: at 0 its processes listen on 127.0.0.1 alone
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def connect(workers: int) -> Any:
    """Ray: the cluster that RAY_ADDRESS or `ray start` names, else one of this machine, for this user alone."""
    with needing("ray", "it carries work to other cards and machines", "ray"):
        import ray
    if ray.is_initialized():
        return ray
    quiet: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.ERROR}
    with suppress(ConnectionError):
        ray.init(address="auto", **quiet)
        return ray
    # Ray listens on the loopback address, but read that when it was imported
    if os.environ.setdefault(LOOPBACK, "0") == "0":
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    usual = os.umask(0o077)  # of the token that opens its ports, which Ray writes into the home
    try:
        cores = max(workers, os.cpu_count() or 1)
        folder = session_folder(ray)
        ray.init(num_cpus=cores, include_dashboard=False, _temp_dir=folder, **quiet)
    except Exception as error:  # of a node that does not start
        why = (str(error).strip().splitlines() or [repr(error)])[0]
        hint = "a machine that is less busy, or RAY_ADDRESS of a cluster that runs"
        raise DeviceError("Ray does not start on this machine", why, hint) from error
    finally:
        os.umask(usual)
    return ray


def session_folder(ray: Any) -> str:
    """A folder for sockets and logs of a Ray of this process, within one that no other user may enter.

    Ray opens the folder it is given to all users. It is not in TMPDIR, which may be too long for the name of a socket.
    """
    folder = tempfile.mkdtemp(prefix="lantern-ray-", dir="/tmp")

    def end() -> None:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return f"{folder}/ray"


def share_of(ray: Any, device: str) -> dict[str, Any]:
    """The resources of one worker, as options of Ray."""
    card = card_of(device, ray.cluster_resources())
    names = {"CPU": "num_cpus", "GPU": "num_gpus"}
    return {names[card]: 1} if card in names else {"resources": {card: 1}, "num_cpus": 1}


class Worker:
    """Loads and captures once, then does pieces."""

    def __init__(self, opener: str, *arguments: Any) -> None:
        """`opener` is `module:function`, called here with the arguments; it returns what does a piece."""
        module, _, name = opener.partition(":")
        self.draw: Callable[[list[int]], Any] = getattr(import_module(module), name)(*arguments)

    def piece(self, numbers: list[int]) -> Any:
        """The result of one piece, or the error that a user can act on: Ray would wrap one that is raised."""
        try:
            return self.draw(numbers) if numbers else None
        except LanternError as error:
            return error


def pieces(count: int, workers: int, slots: int) -> list[list[int]]:
    """Numbers 0 .. count - 1 in pieces: several for each worker, so that none waits long for the last."""
    size = max(slots, -(-count // (4 * workers)))
    return [list(range(i, min(i + size, count))) for i in range(0, count, size)]


def share_work(
    opener: str,
    arguments: Sequence[Any],
    work: Sequence[list[int]],
    workers: int,
    device: str = "auto",
) -> Iterator[tuple[list[int], Any]]:
    """Each piece with its result, in the order in which they are done.

    A piece whose worker dies goes to the next free one, and another worker starts where there is room. (Ray's ActorPool
    keeps a piece with its worker, and fails where the worker's node died and no other has room.)

    Raises:
        DeviceError: workers die again and again, or Ray ends.
    """
    ray = connect(workers)
    hired = ray.remote(Worker).options(**share_of(ray, device))
    busy: dict[Any, tuple[Any, list[int]]] = {}  # worker and piece by the answer to come
    waiting = deque(work)
    images = sum(map(len, work))
    finished = 0
    deaths = 0

    def give(worker: Any, numbers: list[int]) -> None:
        busy[worker.piece.remote(numbers)] = worker, numbers

    def hire() -> None:
        """A worker starts now or later, wherever there is room: until then it has an empty piece."""
        give(hired.remote(opener, *arguments), [])

    try:
        for _ in range(min(workers, len(work))):
            hire()
        while finished < images:
            answer = next_answer(ray, list(busy))
            worker, numbers = busy.pop(answer)
            try:
                result = ray.get(answer)
            except (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError):
                deaths += 1
                if deaths > TRIES * workers:
                    raise
                waiting.extend([numbers] if numbers else [])
                hire()
                continue
            if isinstance(result, LanternError):
                raise result
            if waiting:
                give(worker, waiting.popleft())
            else:  # room for one that was hired in place of another
                ray.kill(worker)
            if numbers:
                finished += len(numbers)
                yield numbers, result
    except ray.exceptions.RayError as error:
        why = f"{str(error).strip().splitlines()[0]}; {finished} of {images} are done, and kept"
        hint = words(
            "the same command, of `generate` with", Arg("resume", True), ", draws the rest"
        )
        raise DeviceError("workers cannot go on", why, hint) from error
    finally:
        for worker, _ in busy.values():
            with suppress(Exception):  # of a cluster that is gone
                ray.kill(worker)


def next_answer(ray: Any, answers: Sequence[Any]) -> Any:
    """The first answer that is there."""
    here = ray.get_runtime_context().get_node_id()
    while True:
        ready, _ = ray.wait(answers, timeout=LOOK)
        if ready:
            return ready[0]
        if not any(node["Alive"] and node["NodeID"] == here for node in ray.nodes()):
            raise ray.exceptions.RayError("Ray's node on this machine died")
