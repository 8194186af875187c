"""Many cards and machines, through Ray: each piece of work goes to a free worker, and to another if that one dies.

What a worker leaves are files named by the number of the image, so a piece that is done again writes nothing twice.
Nothing here loads torch: a worker imports it, and its device's software, in a process of its own.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from lantern_hpu.backends import card_of
from lantern_hpu.errors import Arg, DeviceError, LanternError, needing, words

TRIES = 3  # of one piece whose worker dies, and as many new workers in place of each
LOOK = 2.0  # seconds between two looks at the cluster while no worker answers
PATIENCE = 120.0  # seconds until a worker must be there, where none is left
# Of Ray: at 0 its processes listen on 127.0.0.1 alone
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def connect(workers: int) -> Any:
    """Ray: the cluster that RAY_ADDRESS or `ray start` names, else one of this machine on its loopback address."""
    with needing("ray", "it carries work to other cards and machines", "ray"):
        import ray
    if not ray.is_initialized():
        quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": True}
        try:
            ray.init(address="auto", log_to_driver=True, logging_level=logging.ERROR)
        except ConnectionError:
            cores = max(workers, os.cpu_count() or 1)
            # Ray listens on the loopback address, but read that when it was imported
            if os.environ.setdefault(LOOPBACK, "0") == "0":
                ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
            hide_token()
            try:  # a node that does not start raises a plain Exception
                quiet["_temp_dir"] = session_folder(ray)
                ray.init(num_cpus=cores, logging_level=logging.ERROR, **quiet)
            except Exception as error:
                why = (str(error).strip().splitlines() or [repr(error)])[0]
                hint = "a machine that is less busy, or RAY_ADDRESS of a cluster that runs"
                raise DeviceError("Ray does not start on this machine", why, hint) from error
    return ray


def hide_token() -> None:
    """Ray's token opens its ports, where anybody's code runs as this user, and Ray writes it for all users to read."""
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return
    file, new = Path.home() / ".ray" / "auth_token", os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with suppress(OSError):
        file.parent.mkdir(0o700, exist_ok=True)
        if file.exists():
            file.chmod(0o600)
        else:
            with open(file, "w", opener=lambda name, _: os.open(name, new, 0o600)) as made:
                made.write(secrets.token_hex(32))


def session_folder(ray: Any) -> str:
    """Where a Ray of this process keeps sockets, logs and what it was started with: read by no other user.

    Ray opens the folder it is given to all users, so that it gets one within ours. Not in TMPDIR, which may be too long
    for the name of a socket.
    """
    folder = tempfile.mkdtemp(prefix="lantern-ray-", dir="/tmp")

    def end() -> None:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return f"{folder}/ray"


def share_of(ray: Any, device: str) -> dict[str, Any]:
    """What Ray is asked to give one worker, as it takes it."""
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
    """Each piece with what came of it, in the order in which they are done.

    A piece whose worker dies goes to the next free one, and another worker is started where there is room. (Ray's
    ActorPool keeps a piece with its worker, and fails where the worker's node died and no other has room.)
    """
    ray = connect(workers)
    team = Team(ray, opener, arguments, share_of(ray, device))
    try:
        for _ in range(min(workers, len(work))):
            team.hire()
        yield from team.run(work)
    except (ray.exceptions.RayError, Lost) as error:
        why = str(error).strip().splitlines()[0]
        drawn = f"{team.finished} of {sum(map(len, work))} are done, and kept"
        hint = words(
            "the same command, of `generate` with", Arg("resume", True), ", draws the rest"
        )
        raise DeviceError("workers cannot go on", f"{why}; {drawn}", hint) from error
    finally:
        team.dismiss()


class Lost(Exception):
    """No worker is left to go on."""


class Team:
    """The workers of one run: those that load, those that do a piece, and those that are free."""

    def __init__(
        self, ray: Any, opener: str, arguments: Sequence[Any], share: dict[str, Any]
    ) -> None:
        self.ray, self.order = ray, (opener, *arguments)
        self.remote = ray.remote(Worker).options(**share)
        self.busy: dict[Any, tuple[Any, list[int]]] = {}  # worker and piece by the answer to come
        self.idle: list[Any] = []
        self.hired, self.finished = 0, 0  # workers so far; numbers that are done
        self.node = ray.get_runtime_context().get_node_id()

    def hire(self) -> None:
        """Start a worker, wherever there is room, now or later; its first piece is empty."""
        worker = self.remote.remote(*self.order)
        self.busy[worker.piece.remote([])] = worker, []
        self.hired += 1

    def run(self, work: Sequence[list[int]]) -> Iterator[tuple[list[int], Any]]:
        waiting, tries, most = deque(work), Counter[int](), TRIES * (len(work) + 1)
        while waiting or any(numbers for _, numbers in self.busy.values()):
            while waiting and self.idle:
                numbers, worker = waiting.popleft(), self.idle.pop()
                self.busy[worker.piece.remote(numbers)] = worker, numbers
            answer = self.next_answer()
            worker, numbers = self.busy.pop(answer)
            try:
                result = self.ray.get(answer)
            except (self.ray.exceptions.RayActorError, self.ray.exceptions.NodeDiedError) as error:
                if numbers:
                    waiting.append(numbers)
                    tries[numbers[0]] += 1
                if max(tries.values(), default=0) >= TRIES or self.hired > most:
                    why = str(error).strip().splitlines()[0]
                    raise Lost(f"a worker died again and again: {why}") from error
                self.hire()
                continue
            if isinstance(result, LanternError):
                raise result
            self.idle.append(worker)
            if numbers:
                self.finished += len(numbers)
                yield numbers, result

    def next_answer(self) -> Any:
        silent = 0.0
        while True:
            ready, _ = self.ray.wait(list(self.busy), timeout=LOOK)
            if ready:
                return ready[0]
            if not any(n["Alive"] and n["NodeID"] == self.node for n in self.ray.nodes()):
                raise Lost("Ray's node on this machine died")
            drawing = any(numbers for _, numbers in self.busy.values())
            silent = 0.0 if drawing else silent + LOOK
            if silent > PATIENCE:
                raise Lost(f"no worker is there after {PATIENCE:g} s, and none draws")

    def dismiss(self) -> None:
        """End all workers, as far as Ray still can."""
        for worker in [*self.idle, *(worker for worker, _ in self.busy.values())]:
            with suppress(Exception):  # of a cluster that is gone
                self.ray.kill(worker)
