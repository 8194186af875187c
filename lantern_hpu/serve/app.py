"""The HTTP side: endpoints, answers, streams. It waits for the decode thread and never blocks on it."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

from lantern_hpu import __version__
from lantern_hpu.core import REPORTED
from lantern_hpu.errors import Arg, as_option, needing
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.results.images import encode
from lantern_hpu.serve import edits, protocol, sglang
from lantern_hpu.serve.decoder import DecodeThread
from lantern_hpu.serve.edits import BODY_SECONDS, CLOSED, FORM, AllowedBody, Body, media_type
from lantern_hpu.serve.options import MAX_BODY, PREFIX, ServeOptions
from lantern_hpu.serve.protocol import ApiError, ParsedRequest, check_name, read_call
from lantern_hpu.serve.queue import Done, Event, Job, Partial, log

with needing("fastapi", "the server is built on it", "serve"):
    from fastapi import APIRouter, Depends, FastAPI, Request, Response, Security
    from fastapi import Body as JSONBody
    from fastapi.exceptions import RequestValidationError
    from fastapi.openapi.utils import get_openapi
    from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
    from fastapi.security import HTTPBearer
    from pydantic.json_schema import models_json_schema
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.exceptions import HTTPException
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HERE = Path(__file__).parent
IMAGES, EDITS, FILES = "/v1/images/generations", "/v1/images/edits", "/v1/images/files/"
JSON = "application/json"
SCHEMAS = "#/components/schemas/{model}"
PROBES = ("/livez", "/readyz", "/health")
# How clients write what stands before a place: without /v1, with it twice, or as Azure has it
BASE = re.compile(r"(/openai)?(/v1)*(/deployments/(?P<model>.+?))?(?=/(images/|models(/|$)))")
FORWARDED = {"proto": "https?", "host": r"[\w.:\[\]-]+", "prefix": PREFIX}  # X-Forwarded-*
NO_KEY = "wrong or missing API key"
STOPPING = 0.3  # seconds for the decode thread to end, once all its images are answered
STALE = 120.0  # seconds without a heartbeat after which the loop is taken for dead
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# FastAPI's page loads its script and style from here
DOCS_POLICY = (
    "default-src 'self'; script-src 'unsafe-inline' https://cdn.jsdelivr.net; "
    "style-src 'unsafe-inline' https://cdn.jsdelivr.net; "
    "img-src 'self' data: https://fastapi.tiangolo.com; base-uri 'none'; frame-ancestors 'none'"
)
SILENT = 15.0  # seconds after which an answer that waits says so
KEPT_FILES, KEPT_SECONDS = 64, 3600.0  # pictures that answers have addresses of: the last ones
# Fields whose values messages may quote: words, and names of files
UNLOGGED = ("prompt", "negative_prompt", "image", "image[]")


class Record:
    """The line of the log for one request."""

    def __init__(self, headers: Headers) -> None:
        self.began = time.monotonic()
        self.id = headers.get("x-request-id", "")[:64] or f"img-{secrets.token_hex(8)}"
        self.client, self.status, self.about = "", 500, dict[str, Any]()

    def asked(self, call: ParsedRequest) -> None:
        request = call.requests[0]
        self.about["method"] = call.served.setting.method
        self.about["n"] = len(call.requests)
        self.about["seed"] = request.seed
        self.about["stream"] = call.stream
        self.about["prompt_chars"] = len(request.prompt)

    def answered(self, images: Sequence[Done]) -> None:
        self.status = 200
        steps = [done.drawn.record.steps for done in images]
        self.about["queue_s"] = round(max(done.queue_s for done in images), 4)
        self.about["steps"] = steps if len(steps) > 1 else steps[0]

    def failed(self, error: ApiError) -> None:
        hidden = error.param in UNLOGGED
        what = f"{error.param}: {error.code}" if hidden else error.message[:200]
        self.status, self.about["error"] = error.status_code, what

    def write(self) -> None:
        line = {"event": "request", "id": self.id, "client": self.client, "status": self.status}
        seconds = round(time.monotonic() - self.began, 4)
        log.info(json.dumps(line | self.about | {"seconds": seconds}))


class ImageRequestHandler:
    """The images of a request on their way, and what its answer says of them."""

    def __init__(self, request: Request, decoder: DecodeThread, call: ParsedRequest) -> None:
        """Queues the images."""
        self.request, self.decoder, self.call = request, decoder, call
        self.record: Record = request.state.record
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()

        # Without `self`, whose pictures a cycle would keep
        def send(index: int, event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

        self.events = events

        height, width = call.size
        self.payload: dict[str, Any] = {
            "created": int(time.time()),
            "output_format": call.output[0],
            "model": decoder.served.name,
            "size": f"{width}x{height}",
        }
        deadline = time.monotonic() + request.app.state.options.timeout
        method, shows = call.served.setting.method, call.shows
        self.jobs = [
            Job(one, method, deadline, shows, partial(send, index), (need.grid, need.prefix))
            for index, (one, need) in enumerate(zip(call.requests, call.needs, strict=True))
        ]
        decoder.submit(self.jobs)

    async def answer(self) -> protocol.ImagesResponse | Response:
        images = await self.images()
        if images is None:
            return Response(status_code=CLOSED)
        data = [await self.image_data(one) for one in images]
        return protocol.ImagesResponse(data=data, **self.payload, **self.used())

    async def images(self) -> list[Done] | None:
        """All images; None where the client goes away first, and they are given up."""
        done = asyncio.ensure_future(self.all_done())
        gone = asyncio.ensure_future(edits.client_leaves(self.request))
        try:
            await asyncio.wait([done, gone], return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                self.record.status = CLOSED
                return None
            images = await done
        finally:
            gone.cancel()
            done.cancel()
            self.decoder.cancel(self.jobs)
        self.record.answered(images)
        return images

    async def all_done(self) -> list[Done]:
        done: dict[int, Done] = {}
        while len(done) < len(self.jobs):
            index, event = await self.events.get()
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, Done):
                done[index] = event
        return [done[index] for index in sorted(done)]

    async def image_data(self, done: Done) -> protocol.ImageData:
        picture = await asyncio.to_thread(picture_file, done, *self.call.output)
        whole, kept = "b64_json" in self.call.kinds, "url" in self.call.kinds
        return protocol.ImageData(
            b64_json=base64.b64encode(picture).decode() if whole else None,
            url=keep_file(self.request, picture, self.call.output[0]) if kept else None,
            seed=done.drawn.record.seed,
            metrics=self.metrics(done),
            **done.drawn.record.listed_logprobs(),
        )

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events; where the client goes away, the generator is closed and the image given up."""
        self.record.status = CLOSED
        partials = 0
        try:
            while True:
                try:
                    _, event = await asyncio.wait_for(self.events.get(), SILENT)
                except asyncio.TimeoutError:
                    yield ": waiting\n\n"
                    continue
                if isinstance(event, ApiError):
                    error = {"type": "error", **event.body()}
                    yield f"event: error\ndata: {json.dumps(error)}\n\n"
                    self.record.failed(event)
                    return
                shown = await self.shown(event, partials)
                yield f"event: {shown.type}\ndata: {shown.model_dump_json()}\n\n"
                partials += 1
                if isinstance(event, Done):
                    self.record.answered([event])
                    return
        finally:
            self.decoder.cancel(self.jobs)

    async def shown(
        self, event: Partial | Done, index: int
    ) -> protocol.PartialImage | protocol.CompletedImage:
        """An event of a stream; `index` counts them."""
        picture = await asyncio.to_thread(picture_file, event, *self.call.output)
        common = self.payload | {"created_at": self.payload["created"]}
        common["b64_json"] = base64.b64encode(picture).decode()
        kind = "image_edit" if self.call.requests[0].sources else "image_generation"
        common["type"] = f"{kind}.{'completed' if isinstance(event, Done) else 'partial_image'}"
        if isinstance(event, Done):
            common |= event.drawn.record.listed_logprobs()
            metrics = self.metrics(event)
            return protocol.CompletedImage(**common, **self.used(), metrics=metrics)
        rate = round((event.tokens - 1) / max(event.steps, 1), 4)
        common["metrics"] = protocol.PartialMetrics(steps=event.steps, tokens_per_step=rate)
        return protocol.PartialImage(**common, partial_image_index=index, rows=event.rows)

    def used(self) -> dict[str, Any]:
        """Of `protocol.Settings`, and the tokens. The log counts warnings, as they quote the prompt."""
        pipeline, setting = self.decoder.pipeline, self.call.served.setting
        requests = self.call.requests
        first, count = requests[0], len(requests)
        warnings = [*(note for _, note in pipeline.notes(requests)), *self.call.warnings]
        if warnings:
            self.record.about["warnings"] = len(warnings)
        config = self.call.needs[0].sizes(pipeline.model.target.config)
        read, drawn = config.prefix * count, config.tokens * count
        reader = pipeline.model.condition.reader
        grids = [reader.grid(source) for source in first.sources] if reader else []
        seen = count * sum(map(math.prod, grids))
        parts = protocol.InputTokensDetails(text_tokens=read - seen, image_tokens=seen)
        counts = {"input_tokens": read, "output_tokens": drawn, "total_tokens": read + drawn}
        usage = protocol.Usage(**counts, input_tokens_details=parts)
        return {
            "seed": first.seed,
            "method": str(replace(setting, relaxation=first.relaxation)).partition("@")[0],
            "tree": setting.tree.name,
            "relaxation": first.relaxation.as_json(),
            "warnings": warnings,
            "usage": usage,
            **vars(first.sampling),
        }

    def metrics(self, done: Done) -> protocol.ImageMetrics:
        record = done.drawn.record
        drafts = METHODS[self.call.served.setting.method].drafts
        fields = protocol.ImageMetrics.model_fields
        timed: dict[str, Any] = done._asdict()
        seconds = {name: round(timed[name], 4) for name in timed if name != "drawn"}
        speculation = protocol.SpeculativeDecoding.of(record.steps, record.accepted_by_depth)
        return protocol.ImageMetrics(
            **seconds,
            **{name: getattr(record, name) for name in REPORTED if name in fields},
            speculative_decoding=speculation if drafts else None,
        )


def picture_file(shown: Partial | Done, kind: str, quality: int) -> bytes:
    """A finished PNG has the metadata to draw it again."""
    if isinstance(shown, Done) and kind == "png":
        return shown.drawn.png()
    image = shown.drawn.image if isinstance(shown, Done) else shown.image
    assert image is not None
    return encode(image, kind, quality=quality)


def keep_file(request: Request, data: bytes, kind: str) -> str | None:
    """-> the address at which the server has a picture for a while; None where several share a port"""
    files, name = request.app.state.files, f"{secrets.token_urlsafe(16)}.{kind}"
    if files is None:
        return None
    files[name] = time.monotonic(), data
    while len(files) > KEPT_FILES:
        files.pop(next(iter(files)))
    return str(request.url_for("image_file", name=name))


bearer = HTTPBearer(auto_error=False)


router = APIRouter()
keyed = APIRouter(dependencies=[Security(bearer)])  # for the schema; `Guard` asks for the key


class Guard:
    """ASGI middleware: which requests reach the endpoints, how long a body may take, and the log.

    Endpoints find the request's `Record` as `request.state.record`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        body, asked = Body(receive, scope["app"].state), scope["method"]
        record = Record(headers)
        scope.setdefault("state", {}).update(record=record, body=body)

        async def answer(message: Message) -> None:
            if asked == "HEAD" and "body" in message:
                message = {**message, "body": b""}
            if message["type"] == "http.response.start":
                more = {"X-Request-Id": record.id}
                if own_path(scope) == "/docs":
                    more["Content-Security-Policy"] = DOCS_POLICY
                MutableHeaders(scope=message).update(HEADERS | more)
                if record.status != CLOSED:
                    record.status = message["status"]
            await send(message)

        try:
            scope = as_routed(as_public(scope, headers, scope["app"].state.options))
            record.client = (scope.get("client") or ("",))[0]
            scope["method"] = "GET" if asked == "HEAD" else asked
            check_source(scope, headers)
            if allowed := allowed_body(scope):
                check_media_type(scope, headers, allowed.kinds)
                body.allowed = allowed
            check_key(scope, headers)
            if deployment := scope["state"].get("deployment"):
                check_name(deployment, scope["app"].state.decoder.served)
            await self.app(scope, body.receive, answer)
        except ApiError as error:
            record.failed(error)
            response = JSONResponse(error.body(), error.status_code, headers=error.headers)
            await response(scope, receive, answer)
        finally:
            if body.cut:
                record.status = CLOSED
            if allowed_body(scope):
                if record.status not in (200, CLOSED):
                    metrics = scope["app"].state.decoder.metrics
                    metrics.add("request_failure", 1, str(record.status))
                record.write()


def check_source(scope: Scope, headers: Headers) -> None:
    """Raise an ApiError where a request may hide another, or has no name of this server.

    Where two headers say how long a body is, a proxy may go by the other one. A name that is not ours may have been
    pointed here (DNS rebinding).
    """
    if "content-length" in headers and "transfer-encoding" in headers:
        what = "Content-Length and Transfer-Encoding exclude each other; send one of them"
        raise ApiError(400, what, None, "invalid_framing", {"Connection": "close"})
    host = ", ".join(headers.getlist("host"))
    probe = own_path(scope) in PROBES and "host" not in headers  # HTTP/1.0: a browser sends one
    if not probe and not known_host(host, scope["app"].state.options.allow_host):
        what = f"this server does not answer to the host {host[:100]!r}; allow_host names others"
        raise ApiError(403, what, None, "unknown_host")


def check_media_type(scope: Scope, headers: Headers, kinds: Sequence[str]) -> None:
    """Raise an ApiError for a body of another kind, or one that a foreign web page may have sent through a browser.

    What is not JSON a browser sends to any host without asking it first: a form has to come from our own page, or
    from no page.
    """
    sent = media_type(headers)
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        what = f"Content-Encoding is {coding[:60]!r}; send the body as it is"
        raise ApiError(415, what, None, "unsupported_media_type")
    if sent not in kinds:
        what = f"Content-Type is {sent[:60]!r}; send {' or '.join(kinds)}"
        raise ApiError(415, what, None, "unsupported_media_type")
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    own = Headers(scope=scope).get("host", "").lower()  # as a proxy was asked for it
    foreign = origin is not None and origin.partition("://")[2].lower() != own
    if sent == FORM and (foreign or site not in ("same-origin", "none")):
        raise ApiError(403, "a web page of another origin sent this", None, "cross_origin")


def check_key(scope: Scope, headers: Headers) -> None:
    """Raise an ApiError without the key, where there is one: no body of others is read."""
    path, wanted = own_path(scope), scope["app"].state.options.api_key
    if wanted is None or not path.startswith("/v1/") or path.startswith(FILES):
        return
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    if "api-key" in headers:  # as Azure's clients send it
        scheme, sent = "bearer", headers["api-key"]
    right = secrets.compare_digest(sent.strip().encode(), wanted.encode())
    if scheme.lower() != "bearer" or not right:
        raise ApiError(401, NO_KEY, None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})


def allowed_body(scope: Scope) -> AllowedBody | None:
    """What may be sent with a request; None where it draws nothing."""
    path, options = own_path(scope), scope["app"].state.options
    if scope["method"] != "POST":
        return None
    if path == IMAGES:
        return AllowedBody((JSON,), MAX_BODY, BODY_SECONDS)
    if options.sources and path == EDITS:
        return AllowedBody((FORM, JSON), options.upload_mib << 20, options.upload_timeout)
    if options.sglang and path in sglang.PLACES:
        return AllowedBody((JSON,), sglang.MAX_BODY, BODY_SECONDS)
    return None


def own_path(scope: Scope) -> str:
    """The path of a request without the one at which a proxy has the server, as Starlette routes it."""
    path, place = scope["path"], scope.get("root_path", "")
    return path[len(place) :] if path == place or path.startswith(f"{place}/") else path


def as_routed(scope: Scope) -> Scope:
    """A request at the place that serves it, however its client joined address and path.

    Slashes are doubled, or end a path, where a base address ended in one; Azure's paths name the model.
    """
    path = re.sub("/+", "/", own_path(scope)).rstrip("/") or "/"
    if base := BASE.match(path):
        path = "/v1" + path[base.end() :]
        scope["state"]["deployment"] = base["model"]
    return {**scope, "path": scope.get("root_path", "") + path}


def as_public(scope: Scope, headers: Headers, options: ServeOptions) -> Scope:
    """A request as it was sent to the proxy in front, where that says so and is one of those that are believed.

    The addresses in answers follow from it.
    """
    public = {**scope, "root_path": options.root_path or scope.get("root_path", "")}
    if not is_proxy(scope, options.forwarded_allow_ips):
        return public
    found = {}
    for name, allowed in FORWARDED.items():
        value = headers.get(f"x-forwarded-{name}", "").partition(",")[0].strip()
        found[name] = value.rstrip("/")
        if value and not re.fullmatch(allowed, found[name]):
            what = f"X-Forwarded-{name.title()} is {value[:60]!r}"
            raise ApiError(400, what, None, "invalid_header")
    if found["host"]:
        others = [each for each in scope["headers"] if each[0] != b"host"]
        public["headers"] = [*others, (b"host", found["host"].encode())]
    public["scheme"] = found["proto"] or scope["scheme"]
    public["root_path"] = found["prefix"] or public["root_path"]
    # The last one is the proxy's word; those before it may be the client's
    client = ",".join(headers.getlist("x-forwarded-for")).rpartition(",")[2].strip()
    if client:
        port = r":\d+$" if client.count(":") == 1 or client.startswith("[") else "$"
        public["client"] = (re.sub(port, "", client)[:60], 0)
    return public


def is_proxy(scope: Scope, trusted: Collection[str]) -> bool:
    """Whether a request came from this machine, or from one of these addresses or networks."""
    peer, own = ((scope.get(end) or ("",))[0] for end in ("client", "server"))
    if "*" in trusted or peer == own:
        return True
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    networks = (ipaddress.ip_network(network) for network in trusted)
    return address.is_loopback or any(address in network for network in networks)


def known_host(header: str, hosts: Collection[str]) -> bool:
    """Whether a Host header is an address, `localhost` or one of the names, with any port."""
    name = re.sub(r":\d+$", "", header).strip("[]").lower()
    if "*" in hosts or name in ("localhost", *hosts):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def make_app(options: ServeOptions, load: Callable[[], DecodeThread]) -> FastAPI:
    """The application; its decoder is loaded when it starts and stopped when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.decoder = await asyncio.to_thread(load)
        app.state.decoder.start()
        yield
        await asyncio.to_thread(app.state.decoder.stop, wait=STOPPING)

    pages = dict[str, Any](redoc_url=None, swagger_ui_oauth2_redirect_url=None)
    app = FastAPI(title="lantern_hpu", version=__version__, lifespan=lifespan, **pages)
    app.state.options, app.state.files = options, dict[str, tuple[float, bytes]]()
    app.state.uploads = edits.Uploads(max(options.slots, 2) * (options.upload_mib << 20))
    if options.sources:
        with needing("python-multipart", "it splits forms", "serve"):
            import python_multipart  # noqa: F401
    for each in (router, keyed):
        app.include_router(each)
    for place in sglang.PLACES if options.sglang else ():
        app.add_api_route(place, generate_tokens, methods=["POST"], include_in_schema=False)
    app.add_middleware(Guard)
    for kind in (RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer_error)
    app.openapi = cache(partial(openapi, app))  # type: ignore[method-assign]
    return app


def openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's schema, with the events of a stream, and without the 422 that is a 400 here."""
    place = app.state.options.root_path
    servers = [{"url": place}] if place else None
    made = get_openapi(title=app.title, version=app.version, routes=app.routes, servers=servers)
    for operation in (each for path in made["paths"].values() for each in path.values()):
        operation["responses"].pop("422", None)
    schemas = made["components"]["schemas"]
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    events = [(protocol.PartialImage, "serialization"), (protocol.CompletedImage, "serialization")]
    if app.state.options.sources:
        edits_in = (protocol.EditsRequest, protocol.JSONEditsRequest)
        events += [(kind, "validation") for kind in edits_in]
    else:
        made["paths"].pop(EDITS)
    schemas |= models_json_schema(events, ref_template=SCHEMAS)[1]["$defs"]  # type: ignore[arg-type]
    return made


async def answer_error(request: Request, error: Exception) -> Response:
    """Any error, in OpenAI's shape."""
    if isinstance(error, RequestValidationError):
        error = protocol.invalid(error.errors())
    if not isinstance(error, ApiError):
        status, headers = 500, None
        if isinstance(error, HTTPException):
            status, headers = error.status_code, error.headers  # Allow, of a 405
        place = f"{request.method} {request.url.path[:100]}"
        messages = {
            400: "the body is not valid JSON in UTF-8",
            500: "the server failed; its log says why",
        }
        drawn = drawing_place(request)
        what = messages.get(status, f"{place} is not served here; images are: POST {drawn}")
        if headers and headers.get("Allow") == "GET":
            headers = {"Allow": "GET, HEAD"}
        error = ApiError(status, what, None, "invalid_json" if status == 400 else None, headers)
    request.state.record.failed(error)
    return JSONResponse(error.body(), error.status_code, headers=error.headers)


def drawing_place(request: Request) -> str:
    """Where this server draws prompts."""
    return sglang.PLACES[0] if request.app.state.options.sglang else IMAGES


def decoder_of(request: Request) -> DecodeThread:
    decoder: DecodeThread = request.app.state.decoder
    return decoder


TheDecoder = Annotated[DecodeThread, Depends(decoder_of)]


def errors(statuses: dict[int, str]) -> dict[int | str, dict[str, Any]]:
    model = protocol.ErrorResponse
    return {status: {"model": model, "description": what} for status, what in statuses.items()}


@router.get("/livez", responses={503: {"model": protocol.Status}})
async def livez(decoder: TheDecoder, response: Response) -> protocol.Status:
    """Whether the decode loop runs, and the tasks of text and pixels; it ignores readiness."""
    silent = decoder.seconds_since_heartbeat
    dead = decoder.failure is not None or (decoder.ready and silent > STALE)
    response.status_code = 503 if dead else 200
    return protocol.Status(status="dead" if dead else "alive", heartbeat_s=round(silent, 3))


@router.get("/readyz", responses={503: {"model": protocol.Status}})
@router.get("/health", responses={503: {"model": protocol.Status}})
async def readyz(decoder: TheDecoder, response: Response) -> protocol.Status:
    """Whether images are taken: engines captured and checked, and no shutdown under way."""
    ready = decoder.ready and not decoder.draining
    response.status_code = 200 if ready else 503
    status = "ready" if ready else "draining" if decoder.draining else "warming up"
    if decoder.failure is not None:
        status = "failed"
    return protocol.Status(status=status)


@router.get("/version")
async def version_route() -> protocol.Version:
    """The version of lantern_hpu."""
    return protocol.Version(version=__version__)


@router.get("/metrics", response_class=Response)
async def metrics(decoder: TheDecoder) -> Response:
    """Prometheus' text format."""
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return Response(decoder.metrics.text(), media_type=kind)


@keyed.get("/v1/models", responses=errors({401: NO_KEY}))
async def models(decoder: TheDecoder) -> protocol.ModelList:
    """The model by each of its names, with the methods that requests may name."""
    model = decoder.served
    methods = {
        name: protocol.MethodCard(
            tree=served.setting.tree.name,
            relaxation=served.setting.relaxation.as_json(),
            relaxations=list(served.relaxations),
        )
        for name, served in model.methods.items()
    }
    sizes = [f"{width}x{height}" for height, width in model.sizes]
    about: dict[str, Any] = {"methods": methods, "size": sizes[0], "sizes": sizes}
    about |= {"rows": model.rows, "edits": model.sources}
    cards = [protocol.ModelCard(id=name, **about) for name in model.names]
    return protocol.ModelList(data=cards)


@keyed.get("/v1/models/{name:path}", responses=errors({404: "another model"}))
async def one_model(name: str, decoder: TheDecoder) -> protocol.ModelCard:
    """The model, if that is one of its names."""
    check_name(name, decoder.served)
    return next(card for card in (await models(decoder)).data if card.id == name)


@router.get(FILES + "{name}", response_class=Response)
async def image_file(name: str, request: Request) -> Response:
    """A picture that an answer has the address of. Who knows it needs no key, as browsers send none."""
    began, data = (request.app.state.files or {}).get(name, (-math.inf, b""))
    if time.monotonic() - began > KEPT_SECONDS:
        raise ApiError(404, "no such picture, or not any more", None, "not_found")
    return Response(data, media_type=f"image/{name.rpartition('.')[2]}")


@router.get("/", include_in_schema=False)
async def start_page() -> FileResponse:
    return FileResponse(HERE / "page.html", headers={"Cache-Control": "no-cache"})


@router.get("/page.js", include_in_schema=False)
async def script() -> FileResponse:
    return FileResponse(HERE / "page.js", media_type="text/javascript")


STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "With `stream`: `PartialImage` events, then a `CompletedImage`.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
FAILURES = errors(
    {
        400: "a field that cannot be honoured",
        401: NO_KEY,
        403: "an unknown host, or a web page of another origin",
        404: "another model",
        408: "the body did not arrive in time",
        413: "the body is too large",
        415: "neither JSON nor, for an edit, a form",
        429: "the queue is full: see Retry-After",
        500: "the image failed: the server's log says why, under the id in the message",
        503: "not ready, or about to stop",
        504: "not done in time",
    }
)


@keyed.post(IMAGES, response_model=protocol.ImagesResponse, responses=STREAMED | FAILURES)
async def generate_images(
    asked: protocol.ImagesRequest, request: Request, decoder: TheDecoder
) -> protocol.ImagesResponse | Response:
    """Draw images for a prompt."""
    if decoder.options.sglang:
        what = "this server draws no pictures, but tokens for SGLang: POST /generate"
        raise ApiError(404, what, None, "not_found")
    return await answer_call(read_call(asked, decoder.served), request, decoder)


async def answer_call(
    call: ParsedRequest, request: Request, decoder: DecodeThread
) -> protocol.ImagesResponse | Response:
    """The images of a request, as it wants them."""
    prompt = call.requests[0].prompt
    await asyncio.to_thread(decoder.pipeline.model.condition.clean, prompt)
    request.state.record.asked(call)
    if call.kinds == ("url",) and request.app.state.files is None:
        allowed = f"b64_json with {as_option(Arg('replicas'))}"
        raise protocol.refuse("response_format", "url", allowed)
    handler = ImageRequestHandler(request, decoder, call)
    if not call.stream:
        return await handler.answer()
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # of nginx
    return StreamingResponse(handler.stream(), media_type="text/event-stream", headers=headers)


async def generate_tokens(
    body: Annotated[dict[str, Any], JSONBody()], request: Request, decoder: TheDecoder
) -> Response:
    """Draw image tokens for framed prompts, as SGLang asks for them: for one, or a list for several."""
    call, several = sglang.read_generate(body, decoder)
    handler = ImageRequestHandler(request, decoder, call)
    handler.record.asked(call)
    images = await handler.images()
    if images is None:
        return Response(status_code=CLOSED)
    codes = decoder.pipeline.model.target.config.codes
    drawn = [sglang.image_answer(handler.record.id, one, codes) for one in images]
    return JSONResponse(drawn if several else drawn[0])


EDIT_BODIES = {
    FORM: {"schema": {"$ref": SCHEMAS.format(model="EditsRequest")}},
    JSON: {"schema": {"$ref": SCHEMAS.format(model="JSONEditsRequest")}},
}


@keyed.post(
    EDITS,
    response_model=protocol.ImagesResponse,
    responses=STREAMED | FAILURES,
    openapi_extra={"requestBody": {"content": EDIT_BODIES, "required": True}},
)
async def edit_images(request: Request, decoder: TheDecoder) -> protocol.ImagesResponse | Response:
    """Draw images for a prompt and one or several pictures: a form with files, or JSON with data URLs."""
    if not decoder.served.sources:
        return await refuse_pictures(request)
    return await answer_call(await edits.read_edit(request, decoder), request, decoder)


@keyed.post("/v1/images/variations", include_in_schema=False)
async def refuse_pictures(request: Request) -> Response:
    """An error for what clients of OpenAI's API may ask for, edits among it where they are off."""
    await edits.read_rest(request)
    asked = "edit images" if own_path(request.scope) == EDITS else "make variations"
    what = f"this server does not {asked}; it draws prompts: POST {drawing_place(request)}"
    raise ApiError(400, what, None, "unsupported_operation")
