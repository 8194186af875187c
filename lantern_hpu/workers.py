"""Many cards and machines, through Ray: pieces of work go to whoever is free, and to another if a worker dies.

What a worker leaves are files named by the number of the image, so a piece that is done again writes nothing twice.
Nothing here loads torch: a worker imports it, and its device's software, in a process of its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from lantern_hpu.backends import card_of
from lantern_hpu.errors import DeviceError, LanternError, needing

TRIES = 3  # of one piece whose worker dies, and as many new starts of one worker
Draw = Callable[[list[int]], Any]


def connect(workers: int) -> Any:
    """Ray: the cluster that RAY_ADDRESS or `ray start` names, else one of this machine alone.

    Raises:
        OptionError: it is not installed.
        DeviceError: it does not start.
    """
    with needing("ray", "it carries work to other cards and machines", "ray"):
        import ray
    if not ray.is_initialized():
        quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": True}
        try:
            ray.init(address="auto", log_to_driver=True, logging_level=logging.ERROR)
        except ConnectionError:
            cores = max(workers, os.cpu_count() or 1)
            try:
                ray.init(num_cpus=cores, logging_level=logging.ERROR, **quiet)
            except (
                Exception
            ) as error:  # what a node that does not start raises has no type of its own
                why = (str(error).strip().splitlines() or [repr(error)])[0]
                hint = "a machine that is less busy, or RAY_ADDRESS of a cluster that runs"
                raise DeviceError("Ray does not start on this machine", why, hint) from error
    return ray


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

    Raises:
        DeviceError: the cluster has no such card, or workers die over one piece again and again.
        LanternError: what a worker raised.
    """
    ray = connect(workers)
    from ray.util import ActorPool

    # Ray starts a worker that died again, anywhere where there is room, and gives it its piece once more
    again = {"max_restarts": TRIES, "max_task_retries": TRIES - 1}
    made = ray.remote(Worker).options(**share_of(ray, device, emulate), **again)
    actors = [made.remote(opener, *arguments) for _ in range(min(workers, len(work)))]
    pool = ActorPool(actors)

    def piece(actor: Any, numbers: list[int]) -> Any:
        return actor.piece.remote(numbers)

    try:
        for numbers, result, wrong in pool.map_unordered(piece, list(work)):
            if wrong:
                raise LanternError(wrong)
            yield numbers, result
    except ray.exceptions.RayActorError as error:
        what = "a worker died again and again"
        why = str(error).strip().splitlines()[0]
        raise DeviceError(what, why, "the same command with --resume draws what lacks") from error
    finally:
        for actor in actors:
            ray.kill(actor)
