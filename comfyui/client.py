"""A lantern_hpu server over HTTP: where it is, one image as a stream of events, and its errors as sentences."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp

Event = dict[str, Any]  # of a stream
DEFAULT_URL = "http://127.0.0.1:8000"
# Seconds: for a connection, and between two parts of an answer; a server that works sends one every 15 s
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)


class ServerError(RuntimeError):
    """The server refused or failed; its own sentence where it sent one."""


class Server(NamedTuple):
    """Where a server is, without a path, and the key that it asks for; empty for none."""

    url: str
    key: str

    @classmethod
    def of(cls, url: str, key: str, environ: Mapping[str, str] = os.environ) -> Server:
        """From a node's fields, or LANTERN_HPU_URL and LANTERN_HPU_API_KEY where they are empty.

        The variable's key goes to the variable's server alone: a workflow of somebody else may name another."""
        own = plain_url(environ.get("LANTERN_HPU_URL", "")) or DEFAULT_URL
        chosen = plain_url(url) or own
        own_key = environ.get("LANTERN_HPU_API_KEY", "") if chosen == own else ""
        return cls(chosen, key.strip() or own_key)

    async def events(
        self, path: str, fields: Event, pictures: Sequence[bytes] = ()
    ) -> AsyncIterator[Event]:
        """Unfinished images, then the whole one, or a ServerError. `pictures` are files of PNG, for edits."""
        body: Event = {"data": form_of(fields, pictures)} if pictures else {"json": fields}
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            async with (
                aiohttp.ClientSession(timeout=TIMEOUT, headers=headers) as session,
                session.post(self.url + path, allow_redirects=False, **body) as answer,
            ):
                if answer.status != 200:
                    raise ServerError(sentence(answer, await answer.text()))
                async for event in events_of(answer.content):
                    yield event
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            why = str(error) or type(error).__name__
            hint = "is `lantern-hpu serve` running there?"
            raise ServerError(f"no answer from {self.url}: {why}; {hint}") from error


def plain_url(text: str) -> str:
    """An address as users write it, without the path that clients of OpenAI add."""
    return text.strip().rstrip("/").removesuffix("/v1")


def form_of(fields: Event, pictures: Sequence[bytes]) -> aiohttp.FormData:
    form = aiohttp.FormData()
    for name, value in fields.items():
        form.add_field(name, value if isinstance(value, str) else json.dumps(value))
    for number, picture in enumerate(pictures):
        form.add_field("image[]", picture, filename=f"{number}.png", content_type="image/png")
    return form


async def events_of(content: aiohttp.StreamReader) -> AsyncIterator[Event]:
    """Events up to the whole image. Lines may have any length: those of aiohttp are shorter than a picture."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                event: Event = json.loads(line.removeprefix(b"data: "))
                if event["type"] == "error":
                    raise ServerError(event["error"]["message"])
                yield event
                if event["type"].endswith(".completed"):
                    return
    raise ServerError("the server closed the connection before the image was done")


def sentence(answer: aiohttp.ClientResponse, text: str) -> str:
    """What an answer without an image says: the message in OpenAI's form of errors, or how it begins."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.url} answered {answer.status} {answer.reason}: {text[:200]}"
