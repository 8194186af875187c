"""Several servers behind one port, through Ray Serve: one replica a card, each the application of a single process.

Which replica draws an image changes nothing about it.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import prepare
from lantern_hpu.errors import DeviceError, needing
from lantern_hpu.serve.options import MAX_N, ServeOptions
from lantern_hpu.workers import connect, share_of

if TYPE_CHECKING:
    from lantern_hpu.serve.decoder import DecodeThread

NAME = "lantern_hpu"
_opened: list[DecodeThread] = []  # of this process, which is a replica's


def build(options: ServeOptions) -> Any:
    """The application, in a replica; the device's software is imported here and not before."""
    prepare(options.device.device, options.device.graphs, options.device.emulate)
    from lantern_hpu.serve.app import make_app
    from lantern_hpu.serve.process import opener

    def opened() -> DecodeThread:
        """Ray sends requests only to replicas that are ready, so this waits."""
        decoder = opener(options)()
        _opened.append(decoder)
        decoder.start()
        decoder.settled()
        if decoder.failure is not None:
            raise RuntimeError("the replica cannot draw") from decoder.failure
        return decoder

    return make_app(options, opened)


class Replica:
    """What Ray asks beside HTTP."""

    def check_health(self) -> None:
        """Raise where the decode loop has ended, so that Ray starts another replica."""
        if _opened and _opened[-1].failure is not None:
            raise RuntimeError(repr(_opened[-1].failure))


def deployment(options: ServeOptions, replicas: int, share: dict[str, Any]) -> Any:
    """The application as Ray Serve runs it."""
    with needing("ray", "replicas run in it", "ray"):
        from ray import serve

    def built() -> Any:
        return build(options)

    made = serve.deployment(
        name=NAME,
        num_replicas=replicas,
        ray_actor_options=share,
        # Those in slots, those that may wait, and some to be refused
        max_ongoing_requests=options.slots + options.queue + MAX_N,
        graceful_shutdown_timeout_s=options.shutdown,
        health_check_period_s=5,
    )
    return made(serve.ingress(built)(Replica)).bind()


def drain() -> None:
    """Take the application off the port, wait until its replicas have answered what they took, and end Ray Serve."""
    from ray import serve

    serve.delete(NAME)
    serve.shutdown()


def serve_replicas(options: ServeOptions, host: str, port: int, replicas: int) -> None:
    """Serve until a signal.

    Raises:
        DeviceError: the cluster has fewer cards.
    """
    ray = connect(replicas)
    from ray import serve

    device = options.device
    share = share_of(ray, device.device, device.emulate)
    card = next(iter(share.get("resources", {})), None) or ("GPU" if "num_gpus" in share else "CPU")
    offered = int(ray.cluster_resources().get(card, 0))
    if offered < replicas:
        what = f"{replicas} replicas need {replicas} {card}, the cluster has {offered}"
        raise DeviceError(what, "each replica has one of its own", f"--replicas {offered}")
    serve.start(http_options={"host": host, "port": port})
    serve.run(deployment(options, replicas, share), name=NAME)
    print(f"http://{host}:{port} serves {options.model}: {replicas} replicas", file=sys.stderr)
    stop = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: stop.set())
    stop.wait()
    drain()
    print("stopped", file=sys.stderr)
