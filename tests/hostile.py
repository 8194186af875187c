"""Clients that a server has to outlive, one a function: each asks for something, misbehaves, and leaves."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

PATH = "/v1/images/generations"
JSON = {"Content-Type": "application/json"}
HEAD = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
SENSELESS: list[tuple[bytes, dict[str, str]]] = [
    (b'{"prompt": "a red apple", "n": 0}', {}),
    (b'{"prompt": "a red apple", "size": "3x3"}', {}),
    (b'{"prompt": "\\u0000"}', {}),
    (b'{"prompt": "\\ud800"}', {}),
    (b'{"prompt": null}', {}),
    (b'{"prompt": "a red apple", "method": "none"}', {}),
    (b'{"prompt": "a red apple", "x": 1}', {}),
    (b'{"prompt": "a red apple"', {}),
    (b"[" * 100_000, {}),
    (b"\xff\xfe", {}),
    (b"", {}),
    (b'{"prompt": "a red apple"}', {"Content-Type": "text/plain"}),
    (b'{"prompt": "a red apple"}', {"Host": "evil.example"}),
    (b'{"prompt": "' + b"x" * 2_000_000 + b'"}', {}),
    (b"{" + b",".join(b'"f%d": 0' % i for i in range(50_000)) + b"}", {}),
]
# Values at the ends of their ranges and past them; a server allows few of them
EXTREMES: dict[str, tuple[Any, ...]] = {
    "method": (
        *("scd:lambda=1:k=2147483648", "scd:lambda=1000000000:k=1000000000", "scd:k=" + "9" * 5000),
        *("scd@2:commit=:x", "eagle2@dynamic:64x16x4200", "eagle@" + "x" * 5000),
        *("scd@0", "scd@" + "9" * 5000, "sjd-pac@2:64x1"),
    ),
    "top_k": (0, 1, 2**31, 10**30),
    "top_p": (1e-46, 5e-324, 0, 1),
    "temperature": (5e-324, 0.01, 10, 1e308),
    "cfg_scale": (1, 0.99, 100, 1e308),
    "seed": (2**63 - 12, 2**63, -1),
    "prompt": ("x" * 4000, "<![a]", "<a " * 1333, "</s><image>"),
}
SHAPE = {"message", "type", "param", "code"}


class Visit(NamedTuple):
    """One client's visit.

    Attributes:
        patience: seconds in which a server may drop a connection that it has to. asked: what came of it, counted;
            `left` are images that were asked for and not waited for, `leavers` requests.
    """

    client: httpx.Client
    url: str
    rng: random.Random
    patience: float
    asked: Counter[str]

    def post(self, body: str | bytes, headers: Mapping[str, str] = JSON, **how: Any) -> None:
        note(self.asked, self.client.post(self.url + PATH, content=body, headers=headers, **how))

    def was_dropped(self, yes: bool, **more: int) -> None:
        """Count a connection that the server had to drop, and whether it did."""
        self.asked.update({"to_drop": 1, "dropped": yes} | more)

    def connect(self, buffer: int = 0) -> socket.socket:
        """A connection, with so large a buffer for what it does not read."""
        place, made = urlsplit(self.url), socket.socket()
        if buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        made.settimeout(self.patience)
        made.connect((place.hostname, place.port))
        return made


def note(asked: Counter[str], answer: httpx.Response) -> None:
    """Count an answer by its status, its images, and whether it has OpenAI's shape."""
    content = answer.json() if "json" in answer.headers.get("content-type", "") else {}
    images = len(content.get("data", []))
    shaped = images if answer.status_code == 200 else set(content.get("error", {})) == SHAPE
    asked.update({str(answer.status_code): 1, "images": images, "shapeless": not shaped})


def ends(made: socket.socket, seconds: float, read: bool = True) -> bool:
    """Whether the server ends a connection within some time. Who does not read finds out by writing."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        try:
            made.settimeout(left)
            if read and not made.recv(1 << 16):
                return True
            if not read:
                made.settimeout(0.1)
                made.send(b"\r\n")
                time.sleep(0.1)
        except TimeoutError:
            pass
        except ConnectionError:
            return True
    return False


def send_nonsense(visit: Visit) -> None:
    body, more = visit.rng.choice(SENSELESS)
    visit.post(body, JSON | more)


def send_extremes(visit: Visit) -> None:
    chosen = visit.rng.sample([*EXTREMES], 2)
    fields = {name: visit.rng.choice(EXTREMES[name]) for name in chosen}
    visit.post(json.dumps({"prompt": "a red apple"} | fields))


def leave_early(visit: Visit) -> None:
    count = visit.rng.randint(1, 3)
    try:
        body = json.dumps({"prompt": "a red apple", "n": count})
        visit.post(body, timeout=visit.rng.uniform(0.01, 0.5))
    except httpx.TimeoutException:
        visit.asked.update({"left": count, "leavers": 1})


def leave_a_stream(visit: Visit) -> None:
    """After the first of its partial pictures."""
    fields = {"prompt": "a red apple", "stream": True, "partial_images": 3}
    with visit.client.stream("POST", visit.url + PATH, json=fields) as answer:
        next(answer.iter_lines(), None)
    visit.asked.update({"left": 1, "leavers": 1})


def send_a_head_without_end(visit: Visit) -> None:
    with closing(visit.connect()) as made:
        with suppress(OSError):
            made.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
            for _ in range(256):  # 16 MiB
                made.sendall(b"X-More: " + b"x" * 65_000 + b"\r\n")
        visit.was_dropped(ends(made, visit.patience))


def send_half_a_head(visit: Visit) -> None:
    with closing(visit.connect()) as made:
        made.sendall(HEAD.encode()[: visit.rng.randint(0, 60)])
        visit.was_dropped(ends(made, visit.patience))


def send_half_a_body(visit: Visit) -> None:
    with closing(visit.connect()) as made:
        made.sendall(f"{HEAD}Content-Length: 100\r\n\r\n{{".encode())
        visit.was_dropped(ends(made, visit.patience), leavers=1)


def ask_for_images(made: socket.socket, count: int) -> None:
    body = json.dumps({"prompt": "a red apple", "n": count})
    made.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())


def pipeline_without_end(visit: Visit) -> None:
    """Behind a request that is drawn."""
    with closing(visit.connect()) as made:
        with suppress(OSError):
            ask_for_images(made, 4)
            for _ in range(256):  # 16 MiB
                made.sendall(GET * 1000)
        visit.was_dropped(ends(made, visit.patience), left=4, leavers=1)


def read_nothing(visit: Visit) -> None:
    """Of an image and of more than the buffers of both ends hold."""
    with closing(visit.connect(4096)) as made:
        ask_for_images(made, 1)
        made.sendall(GET * 1000)
        visit.was_dropped(ends(made, visit.patience, read=False), left=1, leavers=1)


CLIENTS: tuple[Callable[[Visit], None], ...] = (
    send_nonsense,
    send_extremes,
    leave_early,
    leave_a_stream,
    send_a_head_without_end,
    send_half_a_head,
    send_half_a_body,
    pipeline_without_end,
    read_nothing,
)
