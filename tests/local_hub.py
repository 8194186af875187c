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
def content(repo: str, name: str, size: int) -> bytes:
    return random.Random(ascii(f"{repo}/{name}")).randbytes(size)


class LocalHub(ThreadingHTTPServer):
    """Answers as the Hub does; a test changes what it lists or sends.

    Attributes:
        files: names by repository: what known models need of it, the first name where either would do.
        size: bytes of a file. stated: the size that is listed in place of it. commit: the newest one.
        damaged: whether it sends other bytes than it lists.
        asked: names of the files that were sent.
    """

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.size = size
        self.stated: Any = size
        self.commit: Any = COMMIT
        self.damaged = False
        self.asked: list[str] = []
        self.files: dict[str, list[str]] = {}
        for part in (part for entry in entries().values() for part in entry.parts.values()):
            names = self.files.setdefault(part.repo, [])
            names += sorted({spec.split("|")[0] for spec in part.files} - {*names})

    def listed(self, repo: str, tree: bool) -> Any:
        """The files of a repository, as the API tells of a model or of a tree at a commit."""
        files = []
        for name in self.files[repo]:
            digest = hashlib.sha256(content(repo, name, self.size)).hexdigest()
            lfs = {"oid": digest, "sha256": digest, "size": self.size, "pointerSize": 134}
            about = {"type": "file", "path": name, "rfilename": name, "oid": digest[:40]}
            files.append(about | {"blobId": digest[:40], "size": self.stated, "lfs": lfs})
        return files if tree else {"id": repo, "sha": self.commit, "siblings": files}

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # else the client was killed
            super().handle_error(request, client_address)


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LocalHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server
        path = unquote(urlsplit(self.path).path).removeprefix("/")
        repo, kind, rest = path.removeprefix("api/models/"), "", ""
        for word in ("/resolve/", "/tree/"):
            if word in repo:
                repo, kind, rest = repo.partition(word)
        name = rest.partition("/")[2]
        if repo not in hub.files or (kind == "/resolve/" and name not in hub.files[repo]):
            self.send_error(404)
            return
        if kind == "/resolve/":
            self.send_content(repo, name)
        else:
            body = json.dumps(hub.listed(repo, kind == "/tree/")).encode()
            self.send_body(body, {"Content-Type": "application/json"})

    def send_content(self, repo: str, name: str) -> None:
        hub, whole = self.server, content(repo, name, self.server.size)
        digest = hashlib.sha256(whole).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if self.command == "GET":
            hub.asked.append(name)
        self.send_body(whole[::-1] if hub.damaged else whole, headers)

    def send_body(self, body: bytes, headers: dict[str, str]) -> None:
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


@contextmanager
def local_hub(size: int = SIZE) -> Iterator[LocalHub]:
    """One that answers at its `address`."""
    server = LocalHub(size)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
