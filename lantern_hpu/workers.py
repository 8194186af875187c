"""Many cards and machines, through Ray: pieces of work go to whoever is free, and to another if a worker dies.

What a worker leaves are files named by the number of the image, so a piece that is done again writes nothing twice.
Nothing here loads torch: a worker imports it, and its device's software, in a process of its own.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from lantern_hpu.backends import card_of
from lantern_hpu.errors import DeviceError, LanternError, needing

TRIES = 3  # of one piece whose worker dies, and as many new workers in place of each
LOOK = 2.0  # seconds between two looks at the cluster while nothing is heard of any worker
PATIENCE = 120.0  # seconds until a worker must be there, where none is left
LOOPBACK = (
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # of Ray: at 0 its processes listen on 127.0.0.1 alone
)
Draw = Callable[[list[int]], Any]


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
            stay_on_this_machine(ray)
            try:
                ray.init(num_cpus=cores, logging_level=logging.ERROR, **quiet)
            except (
                Exception
            ) as error:  # what a node that does not start raises has no type of its own
                why = (str(error).strip().splitlines() or [repr(error)])[0]
                hint = "a machine that is less busy, or RAY_ADDRESS of a cluster that runs"
                raise DeviceError("Ray does not start on this machine", why, hint) from error
    return ray


def stay_on_this_machine(ray: Any) -> None:
    """What Ray starts from here on listens on the loopback address; who sets the variable otherwise has their way.

    Processes of Ray read the variable when they start, and this one did when it imported Ray.
    """
    if os.environ.setdefault(LOOPBACK, "0") == "0":
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False


def share_of(ray: Any, device: str, emulate: bool) -> dict[str, Any]:
    """What Ray is asked to give one worker, as it takes it."""
    card = card_of(device, ray.cluster_resources(), emulate)
    names = {"CPU": "num_cpus", "GPU": "num_gpus"}
    return {names[card]: 1} if card in names else {"resources": {card: 1}, "num_cpus": 1}


class Worker:
    """Loads and captures once, then does pieces."""

    def __init__(self, opener: str, *arguments: Any) -> None:
        """
        Args:
            opener: `module:function`, called here with the arguments; it returns what does a piece.
        """
        module, _, name = opener.partition(":")
        self.draw: Draw = getattr(import_module(module), name)(*arguments)

    def ready(self) -> tuple[list[int], None, str]:
        """Answers once everything is loaded."""
        return [], None, ""

    def piece(self, numbers: list[int]) -> tuple[list[int], Any, str]:
        """One piece, what came of it, and what is wrong if something is: errors of users stay readable."""
        try:
            return numbers, self.draw(numbers), ""
        except LanternError as error:
            return numbers, None, str(error)


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
    emulate: bool = False,
) -> Iterator[tuple[list[int], Any]]:
    """Each piece with what came of it, in the order in which they are done.

    A piece whose worker dies goes to whoever is free, and another worker is started in its place, where there is room.
    """
    ray = connect(workers)
    team = Team(ray, opener, arguments, share_of(ray, device, emulate))
    total = sum(map(len, work))
    try:
        for _ in range(min(workers, len(work))):
            team.hire()
        yield from team.done(work)
    except ray.exceptions.RayError as error:
        why = str(error).strip().splitlines()[0]
        raise team.lost("Ray failed", why, total) from error
    except Gone as error:
        raise team.lost(str(error), "", total) from error
    finally:
        team.dismiss()


class Gone(Exception):
    """Nobody is left who could go on."""


class Team:
    """The workers of one run: those that load, and those that do a piece."""

    def __init__(
        self, ray: Any, opener: str, arguments: Sequence[Any], share: dict[str, Any]
    ) -> None:
        self.ray, self.how = ray, (opener, *arguments)
        self.made = ray.remote(Worker).options(**share)
        self.loading: dict[Any, Any] = {}  # worker by what it answers once it is there
        self.busy: dict[Any, tuple[Any, list[int]]] = {}  # worker and piece by the answer to come
        self.idle: list[Any] = []
        self.hired, self.finished = 0, 0  # workers so far; numbers that are done
        self.node = ray.get_runtime_context().get_node_id()

    def hire(self) -> None:
        """Start a worker, wherever there is room, now or later."""
        worker = self.made.remote(*self.how)
        self.loading[worker.ready.remote()] = worker
        self.hired += 1

    def done(self, work: Sequence[list[int]]) -> Iterator[tuple[list[int], Any]]:
        """Each piece with what came of it."""
        waiting, tries, most = deque(work), Counter[int](), TRIES * len(work)
        while waiting or self.busy:
            while waiting and self.idle:
                numbers, worker = waiting.popleft(), self.idle.pop()
                self.busy[worker.piece.remote(numbers)] = worker, numbers
            answer = self.heard()
            worker, numbers = self.busy.pop(answer, (self.loading.pop(answer, None), []))
            try:
                _, result, wrong = self.ray.get(answer)
            except (self.ray.exceptions.RayActorError, self.ray.exceptions.NodeDiedError) as error:
                if numbers:
                    waiting.append(numbers)
                    tries[numbers[0]] += 1
                if max(tries.values(), default=0) >= TRIES or self.hired > most + TRIES:
                    why = str(error).strip().splitlines()[0]
                    raise Gone(f"a worker died again and again: {why}") from error
                self.hire()
                continue
            if wrong:
                raise LanternError(wrong)
            self.idle.append(worker)
            if numbers:
                self.finished += len(numbers)
                yield numbers, result

    def heard(self) -> Any:
        """The next answer of a worker."""
        silent = 0.0
        while True:
            ready, _ = self.ray.wait([*self.busy, *self.loading], timeout=LOOK)
            if ready:
                return ready[0]
            if not any(n["Alive"] and n["NodeID"] == self.node for n in self.ray.nodes()):
                raise Gone("Ray's node on this machine died")
            silent = 0.0 if self.busy else silent + LOOK
            if silent > PATIENCE:
                raise Gone(f"no worker is there after {PATIENCE:g} s, and none draws")

    def lost(self, what: str, why: str, total: int) -> DeviceError:
        """The error of a run that cannot go on."""
        drawn = f"{self.finished} of {total} are done, and kept"
        hint = "the same command, of `generate` with --resume, goes on with the others"
        return DeviceError(what, f"{why}; {drawn}" if why else drawn, hint)

    def dismiss(self) -> None:
        """End all workers, as far as Ray still can."""
        workers = [
            *self.loading.values(),
            *(worker for worker, _ in self.busy.values()),
            *self.idle,
        ]
        for worker in workers:
            with suppress(Exception):  # of a cluster that is gone
                self.ray.kill(worker)
