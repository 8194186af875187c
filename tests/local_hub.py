"""A Hugging Face Hub of this machine alone: the known models' files with bytes made from their names, sent slowly.

`HF_ENDPOINT` names it to huggingface_hub, which lists, asks for and fetches files as it does from the real one, in the
plain HTTP that it falls back to where Xet is not offered. So a download can be broken off anywhere, and nothing leaves
the machine.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from lantern_hpu.zoo.registry import entries

COMMIT = "c" * 40
SIZE = 192 * 1024  # bytes of a file
PIECE, PAUSE = 16 * 1024, 0.01  # bytes that are sent together, and seconds after them


@cache
def content(repo: str, name: str) -> bytes:
    return random.Random(f"{repo}/{name}").randbytes(SIZE)


@cache
def files() -> dict[str, list[str]]:
    """By repository: what known models need of it, the first name where either would do."""
    result: dict[str, list[str]] = {}
    for entry in entries().values():
        for part in entry.parts.values():
            result.setdefault(part.repo, []).extend(spec.split("|")[0] for spec in part.files)
    return {repo: sorted(set(names)) for repo, names in result.items()}


def listed(repo: str) -> dict[str, Any]:
    """What the Hub says of a repository at its newest commit."""
    siblings = []
    for name in files()[repo]:
        digest = hashlib.sha256(content(repo, name)).hexdigest()
        lfs = {"sha256": digest, "size": SIZE, "pointerSize": 134}
        siblings.append({"rfilename": name, "size": SIZE, "blobId": digest[:40], "lfs": lfs})
    return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).removeprefix("/")
        repo, _, rest = path.removeprefix("api/models/").partition("/resolve/")
        if repo not in files():
            self.send_error(404)
            return
        body = content(repo, rest.split("/", 1)[1]) if rest else json.dumps(listed(repo)).encode()
        headers = {"Content-Type": "application/json"}
        if rest:
            etag = f'"{hashlib.sha256(body).hexdigest()}"'
            headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        first = int((self.headers.get("Range") or "bytes=0-")[len("bytes=") :].split("-")[0])
        self.send_response(206 if first else 200)
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
        for name, value in (headers | {"Content-Length": str(len(body) - first)}).items():
            self.send_header(name, value)
        self.end_headers()
        for place in range(first, len(body) if self.command == "GET" else first, PIECE):
            self.wfile.write(body[place : place + PIECE])
            time.sleep(PAUSE)


class Hub(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # else the client was killed
            super().handle_error(request, client_address)


@contextmanager
def local_hub() -> Iterator[str]:
    """Its address, while it answers."""
    server = Hub(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
