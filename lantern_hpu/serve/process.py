"""One server process: its socket, its signals, its end; and several through Ray Serve."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

from lantern_hpu.backends import prepare
from lantern_hpu.console import start_log
from lantern_hpu.errors import (
    Arg,
    DeviceError,
    LanternError,
    OptionError,
    as_option,
    needing,
    spelled,
    words,
)
from lantern_hpu.methods.setting import lacks_drafter
from lantern_hpu.models.files.load import OpenedModel
from lantern_hpu.models.model import of_size
from lantern_hpu.models.text.frames import reads_pictures
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.serve.app import make_app
from lantern_hpu.serve.decoder import DecodeThread
from lantern_hpu.serve.options import MAX_N, ServeOptions
from lantern_hpu.serve.protocol import ApiError
from lantern_hpu.workers import connect, share_of

with needing("uvicorn", "the server runs in it", "serve"):
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

LAST = 8  # seconds for answers on their way once the last image is drawn
HURRY = 1  # the same after a second signal
HEAD_SECONDS = 10.0  # in which the head of a request has to arrive
READ_SECONDS = 30.0  # in which a client has to read some of what it was sent
PIPELINED = 1 << 16  # bytes of further requests that wait for the answer of the first
CHUNKS = 256  # of one body, and as many more as it has of these bytes: to read one byte in a chunk of its own
CHUNK_BYTES = 1024  # costs as much as to read kilobytes in one


def listen(host: str, port: int) -> socket.socket:
    """A socket that has the port, so that others are refused it while the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Where the protocol is not named, asyncio leaves Nagle's delay on, 40 ms an answer
    result = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        result.bind((host, port))
        result.listen(1024)
    except (OSError, OverflowError) as error:
        result.close()
        why = getattr(error, "strerror", None) or str(error)
        hint = words("another", Arg("port"))
        raise OptionError(f"cannot listen on {host}:{port}", why, hint) from error
    return result


def check_served(options: ServeOptions, opened: OpenedModel) -> None:
    """Refuse what cannot be served before weights are read."""
    if not options.sglang:
        opened.check_pictures()
    elif opened.config.condition.frame != "glm-image":
        what = words(Arg("sglang"), f"cannot serve {opened.name}")
        raise OptionError(what, "SGLang sends prompts of GLM-Image", Arg("model", "glm-image"))
    if options.sources > (most := reads_pictures(opened.config)):
        asked = words(Arg("sources", options.sources), "cannot be served")
        raise OptionError(asked, f"{opened.name} reads at most {most} pictures", "less")
    for setting in options.settings:
        if opened.config.drafter is None and setting.needs_drafter:
            raise lacks_drafter(opened.name, Arg("method", str(setting)))
    for size in options.sizes:
        try:
            of_size(opened.config, size, opened.name)
        except OptionError as error:
            asked = words(Arg("sizes", f"{size[1]}x{size[0]}"), "cannot be served")
            raise OptionError(asked, error.why, "leave it out") from error


def load_decoder(options: ServeOptions) -> DecodeThread:
    """The model in a decode thread that is not started yet.

    It is loaded in a thread that ends, so that its OpenMP threads do too: left idle, they and the decode thread's
    would be more than the cores, and the waits in a step become system calls.
    """
    check = partial(check_served, options)
    more: dict[str, Any] = {"given": options.given, "pictures": not options.sglang, "check": check}
    load = partial(LanternPipeline.from_pretrained, options.model, **more)
    with ThreadPoolExecutor(1) as loading:  # which also reads a first picture
        made = loading.submit(lambda: DecodeThread(load(**vars(options.device)), options))
        return made.result()


class Connection(h11.Connection):
    """h11's, which refuses a body in too many chunks: the loop that reads them answers everyone."""

    chunks = 0  # of the body that is read,
    bytes = 0  # and its size so far
    refusal = ""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = self.bytes = 0
        if isinstance(event, h11.Data):
            self.chunks += event.chunk_start
            self.bytes += len(event.data)
        if self.chunks > CHUNKS + self.bytes // CHUNK_BYTES:
            self.refusal = (
                f"the body has more than {CHUNKS} chunks, of less than {CHUNK_BYTES} bytes"
            )
            raise h11.RemoteProtocolError(self.refusal)
        return event


class Protocol(H11Protocol):
    """uvicorn's on h11, whose buffers are bounded. A client has so long to send a head, and to read its answer."""

    timer: asyncio.TimerHandle | None = None
    reader: asyncio.TimerHandle | None = None
    unread = 0  # bytes that were not read when it was last looked

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn: Connection = Connection(h11.SERVER)

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP that is taken, in OpenAI's shape."""
        what = f"{self.conn.refusal or msg}; the connection is closed"
        body = json.dumps(ApiError(400, what, None, "invalid_http").body()).encode()
        about = {"content-type": "application/json", "content-length": str(len(body))}
        events = [
            h11.Response(status_code=400, headers=[*about.items(), ("connection", "close")]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        with suppress(h11.LocalProtocolError):  # an answer has begun, or is whole
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.watch()
        self.watch_reader()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()
        # uvicorn reads no more while a second request waits, and would not see that the client left
        waiting = len(self.conn.trailing_data[0])
        if waiting > PIPELINED:
            self.transport.close()
        elif waiting:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self.timer, self.reader):
            if timer is not None:
                timer.cancel()

    def watch_reader(self) -> None:
        """Drop a client that asked and does not read, even where the connection is to be closed."""
        before, self.unread = self.unread, self.transport.get_write_buffer_size()
        if self.unread and self.unread == before:
            self.transport.abort()
        else:
            self.reader = self.loop.call_later(READ_SECONDS, self.watch_reader)

    def watch(self) -> None:
        complete = self.cycle is not None and not self.cycle.response_complete
        if complete and self.timer is not None:
            self.timer.cancel()
            self.timer = None
        elif not complete and self.timer is None:
            self.timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)


class Server(uvicorn.Server):
    """uvicorn, but a signal first lets what was taken be drawn; a second one ends it at once."""

    def __init__(self, config: uvicorn.Config, decoder: DecodeThread, shutdown: float) -> None:
        super().__init__(config)
        self.decoder, self.shutdown_timeout, self.lost = decoder, shutdown, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again, self.decoder.draining = self.decoder.draining, True
        threading.Thread(target=self.drain, args=(sig, again), daemon=True).start()

    def drain(self, sig: int, again: bool = False) -> None:
        """Wait until all that was taken is drawn, or the time is up; not where it is asked for again.

        Clients are answered while their connections are still there; the steps under way are not waited for.
        """
        name, left = signal.Signals(sig).name, len(self.decoder.queue.open_jobs)
        if again:
            say(f"{name} again: {left} images given up")
            self.config.timeout_graceful_shutdown = HURRY
        else:
            say(f"{name}: no more requests, {left} images to finish")
        lost = self.decoder.stop(0.0 if again else self.shutdown_timeout, wait=0)
        self.lost = self.lost or lost > 0
        if lost and not again:
            say(f"{lost} images were not done in time")
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self.decoder.failure is not None:
            self.should_exit = True
        return await super().on_tick(counter)


def say(text: str, level: int = logging.INFO) -> None:
    logging.getLogger("lantern_hpu.serve").log(level, spelled(text, as_option))


def warn_if_open(host: str, key: str | None) -> None:
    """Say that other machines can use the server, where nothing keeps them off; names are not looked up."""
    loopback = host == "localhost"
    with suppress(ValueError):
        loopback = loopback or ipaddress.ip_address(host).is_loopback
    if key is None and not loopback:
        why = "is open to other machines and there is no API key, so anyone can draw"
        hint = words("; set LANTERN_HPU_API_KEY, or leave", Arg("host"), "out")
        say(words(Arg("host", host), why, hint), logging.WARNING)


def serve(options: ServeOptions, host: str, port: int) -> int:
    """Serve until a signal; returns the exit code: 0, or 1 if images were lost."""
    listening = listen(host, port)
    warn_if_open(host, options.api_key)
    try:
        decoder = load_decoder(options)
        config = uvicorn.Config(
            make_app(options, lambda: decoder),
            log_config=None,  # its lines are as all others
            log_level="warning",
            access_log=False,
            use_colors=False,  # or it asks standard output, which may be closed
            timeout_graceful_shutdown=LAST,
            timeout_keep_alive=options.keep_alive,  # type: ignore[arg-type]
            proxy_headers=False,  # the application reads them
            lifespan="on",
            http=Protocol,
        )
        server = Server(config, decoder, options.shutdown)
        url = f"http://{host}:{listening.getsockname()[1]}"
        threading.Thread(target=announce, args=(decoder, url), daemon=True).start()
        asyncio.run(server.serve(sockets=[listening]))
    finally:
        listening.close()
    # In a step, in text or in pixels; threads cannot be ended from outside
    if decoder.alive and decoder.failure is None:
        say("stopped")
        if sys.stderr is not None:
            sys.stderr.close()  # which waits for what is still to be written
        os._exit(int(server.lost))
    decoder.pipeline.close()
    if isinstance(decoder.failure, LanternError):
        raise decoder.failure
    if decoder.failure is not None:
        raise LanternError("the decode loop failed", repr(decoder.failure)) from decoder.failure
    say("stopped")
    return int(server.lost)


def announce(decoder: DecodeThread, url: str) -> None:
    """Say what is warmed up, and once it is, where it is served."""
    began, model = time.monotonic(), decoder.served
    served = ", ".join(str(served.setting) for served in model.methods.values())
    say(f"warming up {served}: each is captured and checked, for one image and for all slots")
    decoder.start(wait=True)
    if decoder.ready:
        slots = f"{decoder.options.slots} slots, warm after {time.monotonic() - began:.1f} s"
        say(f"{url} serves {model.name}: {', '.join(model.methods)}; {slots}")


# Several servers behind one port, through Ray Serve: one replica a card, each the application of a single process.
# Which replica draws an image changes nothing about it.
NAME = "lantern_hpu"
replica: DecodeThread | None = None  # of this process, if it is one


def load_replica(options: ServeOptions) -> DecodeThread:
    """A decoder that is ready: Ray sends requests to replicas that are."""
    global replica
    replica = load_decoder(options)
    replica.start(wait=True)
    if replica.failure is not None:
        raise RuntimeError("the replica cannot draw") from replica.failure
    return replica


class Replica:
    """What Ray asks besides HTTP."""

    def check_health(self) -> None:
        """Raise where the decode loop has ended, so that Ray starts another replica."""
        if replica is not None and replica.failure is not None:
            raise RuntimeError(repr(replica.failure))


def deployment(options: ServeOptions, replicas: int, share: dict[str, Any]) -> Any:
    with needing("ray", "replicas run in it", "ray"):
        from ray import serve

    def build() -> Any:
        """The application, in a replica; the device's software is imported here and not before."""
        start_log()
        prepare(options.device.device, options.device.graphs)
        from lantern_hpu.serve.app import make_app
        from lantern_hpu.serve.process import load_replica

        app = make_app(options, lambda: load_replica(options))
        app.state.files = None  # another replica would be asked for them
        return app

    made = serve.deployment(
        name=NAME,
        num_replicas=replicas,
        ray_actor_options=share,
        # Those in slots, those that may wait, and some to be refused
        max_ongoing_requests=options.slots + options.queue + MAX_N,
        graceful_shutdown_timeout_s=options.shutdown,
        health_check_period_s=5,
    )
    return made(serve.ingress(build)(Replica)).bind()


def drain() -> None:
    """Take the application off the port, wait until its replicas have answered what they took, and end Ray Serve."""
    from ray import serve

    serve.delete(NAME)
    serve.shutdown()


def serve_replicas(options: ServeOptions, host: str, port: int, replicas: int) -> None:
    warn_if_open(host, options.api_key)
    ray = connect(replicas)
    from ray import serve

    device = options.device
    share = share_of(ray, device.device)
    card = next(iter(share.get("resources", {})), None) or ("GPU" if "num_gpus" in share else "CPU")
    offered = int(ray.cluster_resources().get(card, 0))
    if offered < replicas:
        what = f"{replicas} replicas need {replicas} {card}, the cluster has {offered}"
        raise DeviceError(what, "each replica has one of its own", Arg("replicas", offered))
    http = {"host": host, "port": port, "keep_alive_timeout_s": round(options.keep_alive)}
    serve.start(http_options=http)
    serve.run(deployment(options, replicas, share), name=NAME)
    say(f"http://{host}:{port} serves {options.model}: {replicas} replicas")
    stop = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: stop.set())
    stop.wait()
    drain()
    say("stopped")
