"""What goes over the wire, and from a request to what is to be drawn, or to an error that says what is allowed.

The fields are those of OpenAI's `POST /v1/images/generations`, as far as they can be honoured, and the settings of
`generate`. A field that cannot be honoured is refused, never ignored. `/openapi.json` is made from these."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from lantern_hpu.core import Request, Sampling, SourcePicture, check_text
from lantern_hpu.decode.spec import Spec
from lantern_hpu.errors import Arg, LanternError, OptionError, as_option, needing, part_of_setting
from lantern_hpu.fields import IMAGE_PARAMS, MAX_SEED, RANDOM, Param, given_params, only
from lantern_hpu.methods.request import in_turn
from lantern_hpu.methods.setting import Resolved, Setting, tree_text, verified
from lantern_hpu.models.text.frames import no_negative
from lantern_hpu.serve.options import MAX_N, MAX_PROMPT
from lantern_hpu.tree import Tree

with needing("fastapi", "the server is built on it", "serve"):
    from fastapi.exceptions import HTTPException
    from pydantic import (
        AfterValidator,
        BaseModel,
        ConfigDict,
        Field,
        ValidationError,
        create_model,
        model_validator,
    )
    from pydantic_core import PydanticCustomError

MOST_FIELDS = 64  # of a request
# Fields as the command line, Python and other servers call them, by what they are here
OTHER_NAMES = {
    param.name_for(surface): name
    for param in IMAGE_PARAMS.values()
    for surface in ("command", "python")
    if (name := param.name_for("http"))
} | {"width": "size", "height": "size", "num_inference_steps": "method", "steps": "method"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every error, in OpenAI's shape."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An error to send; `param` is the field that caused it."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        # A lone surrogate, which JSON can spell, cannot be encoded
        self.message, self.param = encodable(message), param and encodable(param)
        self.code = code

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        usual = "invalid_request_error" if self.status_code < 500 else "server_error"
        kind = kinds.get(self.status_code, usual)
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        return ErrorResponse(error=detail).model_dump()


def encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def shown(value: object) -> str:
    """A value in an error message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def refuse(param: str, value: object, allowed: str) -> ApiError:
    what = f"{param} is {shown(value)}; allowed: {allowed}"
    return ApiError(400, what, param, "invalid_value")


M = TypeVar("M", bound=BaseModel)


def parsed(kind: type[M], body: Any, strict: bool | None = None) -> M:
    """A body that FastAPI does not read; raises an ApiError. What is not `strict` reads text as numbers."""
    try:
        return kind.model_validate(body, strict=strict)
    except ValidationError as error:
        first = error.errors()[0]
        found = [{**first, "loc": ("body", *first["loc"])}]
        raise invalid(found, fields_at(kind, first["loc"][:-1])) from error


def fields_at(kind: type[BaseModel], place: Iterable[str | int]) -> Iterable[str]:
    """The fields of a part of a body, by where it is; those of the model where a part is no object."""
    for name in place:
        found: Any = kind.model_fields[name].annotation if name in kind.model_fields else None
        while get_args(found):  # of a list, or of lists
            found = get_args(found)[0]
        kind = found if isinstance(found, type) and issubclass(found, BaseModel) else kind
    return kind.model_fields


def invalid(errors: Sequence[Mapping[str, Any]], fields: Iterable[str] = ()) -> ApiError:
    """The first of pydantic's errors on a body of these fields."""
    error = errors[0]
    place = ".".join(str(part)[:60] for part in error["loc"][1:])
    param = place.partition(".")[0] or None
    if error["type"] == "json_invalid":
        why = error["ctx"]["error"]
        return ApiError(400, f"the body is not valid JSON: {why}", None, "invalid_json")
    if error["type"] == "extra_forbidden":
        allowed = [*(fields or ImagesRequest.model_fields)]
        near = [OTHER_NAMES.get(place, ""), *get_close_matches(place, allowed, 1, 0.6)]
        hint = next((f"; try {name}" for name in near if name in allowed), "")
        what = f"unknown field {place!r}{hint}; allowed: {', '.join(allowed)}"
        return ApiError(400, what, param, "unknown_parameter")
    if error["type"] == "part_of_setting":
        text, field = error["ctx"]["text"], error["ctx"]["field"]
        return ApiError(400, " ".join(text.split()), field, "invalid_value")
    if error["type"] == "too_many_fields":
        return ApiError(400, error["msg"], None, "invalid_value")
    if param is None:
        return ApiError(400, f"the body is not a JSON object: {error['msg']}", None, "invalid_json")
    why = error["msg"].removeprefix("Value error, ")  # pydantic's, before a message of ours
    what = f"{place} is {shown(error['input'])}: {why}"
    return ApiError(400, what, param, "invalid_value")


def printable(text: str) -> str:
    if not text.strip():
        raise ValueError("a prompt needs a character that is not a space")
    try:
        check_text("it", text)
    except OptionError as error:
        raise ValueError(f"a prompt is text without control characters: {error.why}") from error
    return text


class ImagesBody(BaseModel):
    """Null counts as not given. Ranges that depend on the model or on how it is served are checked as well."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT), AfterValidator(printable)]
    negative_prompt: str | None = Field(
        None, max_length=MAX_PROMPT, description="for models that take one"
    )
    model: str | None = Field(None, description="a name of the served model")
    n: int | None = Field(None, ge=1, le=MAX_N, description="images; image i has `seed` + i")
    size: str | None = Field(None, description='"auto", or one that `/v1/models` lists')
    user: str | None = Field(None, description="not kept")
    stream: bool | None = Field(None, description="answer with server-sent events; `n` is 1")
    partial_images: int | None = Field(
        None, ge=0, description="while streaming: up to one less than the image has token rows"
    )
    response_format: Literal["b64_json", "url"] | None = Field(None, description="null: both")
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = Field(
        None, ge=0, le=100, description="quality of jpeg and webp (100)"
    )
    quality: Literal["auto", "standard", "hd", "low", "medium", "high"] | None = None
    style: Literal["vivid", "natural"] | None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None

    @model_validator(mode="before")
    @classmethod
    def few(cls, body: Any) -> Any:
        """Each unknown field is an error of its own, and a body has room for a hundred thousand."""
        if isinstance(body, dict) and len(body) > MOST_FIELDS:
            what = f"the body has more than {MOST_FIELDS} fields"
            raise PydanticCustomError("too_many_fields", what)
        error = part_of_setting(body) if isinstance(body, dict) else None
        if error is not None:
            said = {"text": error.text(as_field), "field": error.field}
            raise PydanticCustomError("part_of_setting", "{text}", said)
        return body

    def given(self) -> dict[str, Any]:
        """The fields that are not null."""
        return self.model_dump(exclude_none=True)


# Fields that mean something else in a request than in a command
REQUEST_HELPS = {
    "method": 'one of `/v1/models`, or "auto"; a relaxation may follow: "scd:tv=0.1:budget=10"',
    "seed": "random if not given or -1; image i has `seed` + i",
}


def fields_of_image() -> dict[str, Any]:
    """Those of `fields.IMAGE_PARAMS` that a body has no field for yet."""
    return {
        name: (request_kind(param) | None, request_field(param))
        for param in IMAGE_PARAMS.values()
        if (name := param.name_for("http")) and name not in ImagesBody.model_fields
    }


def request_kind(param: Param) -> Any:
    """The type of a field; a number's range stands in the schema, and `given_params` holds it."""
    least = 0 if param.zero else param.low
    both = {"minimum": least, "maximum": param.high}
    ends: dict[str, Any] = {name: end for name, end in both.items() if end is not None}
    return Annotated[param.kind, Field(json_schema_extra=ends)] if ends else param.kind


def request_field(param: Param) -> Any:
    about = REQUEST_HELPS.get(param.name) or replace(param, default=None).about
    infinite = False if param.kind is float else None
    return Field(None, description=about, allow_inf_nan=infinite)


if TYPE_CHECKING:
    ImagesRequest = ImagesBody
else:
    ImagesRequest = create_model(
        "ImagesRequest", __base__=ImagesBody, __doc__=ImagesBody.__doc__, **fields_of_image()
    )


def with_files(schema: dict[str, Any]) -> None:
    """Add the pictures of a form, which are read apart from its fields, to a JSON schema."""
    file = {"type": "string", "format": "binary"}
    schema["properties"] |= {"image": file, "image[]": {"type": "array", "items": file}}
    schema["oneOf"] = [{"required": ["image"]}, {"required": ["image[]"]}]


class EditsRequest(ImagesRequest):
    """Fields of a form whose files `image`, or `image[]`, are the pictures to draw from."""

    model_config = ConfigDict(json_schema_extra=with_files)

    input_fidelity: Literal["high", "low"] | None = None
    safety_identifier: str | None = Field(None, description="not kept")


DataURL = Annotated[str, Field(pattern="^data:", description="data:image/png;base64,...")]


class PictureURL(BaseModel):
    """A picture within a JSON body; nothing is fetched from elsewhere."""

    model_config = ConfigDict(extra="forbid", strict=True)

    image_url: DataURL


class JSONEditsRequest(EditsRequest):
    """The same fields as JSON, with the pictures to draw from as data URLs."""

    model_config = ConfigDict(json_schema_extra=None)

    images: list[PictureURL] | None = None
    image: DataURL | list[DataURL] | None = Field(None, description="instead of `images`")

    def pictures(self) -> list[str]:
        """The data URLs; raises an ApiError where there are none, or of both names."""
        if self.images and self.image:
            raise ApiError(400, "image and images exclude each other", "image", "invalid_value")
        if self.images:
            return [picture.image_url for picture in self.images]
        if not self.image:
            what = "images is missing; send data URLs"
            raise ApiError(400, what, "images", "invalid_value")
        return [self.image] if isinstance(self.image, str) else self.image


class SpeculativeDecoding(BaseModel):
    """Acceptance of one image, under vLLM's names."""

    num_spec_steps: int = Field(description="drafts verified")
    mean_acceptance_length: float = Field(description="tokens a step, the target's own included")
    acceptance_histogram: list[int] = Field(
        description="steps that accepted 0, 1, 2, ... draft tokens"
    )

    @classmethod
    def of(cls, steps: int, by_depth: Sequence[int]) -> SpeculativeDecoding:
        """`by_depth` is how many steps accepted a draft at depth 1, 2, ...; it never rises."""
        reached = [steps, *by_depth, 0]
        histogram = [here - deeper for here, deeper in zip(reached, reached[1:], strict=False)]
        length = 1 + sum(by_depth) / max(steps, 1)
        return cls(
            num_spec_steps=steps,
            mean_acceptance_length=round(length, 4),
            acceptance_histogram=histogram,
        )


class ImageMetrics(BaseModel):
    """Of one image. Steps are shared with the other images of the batch."""

    queue_s: float = Field(description="for its text, a slot, and its pixels")
    text_s: float
    prefill_s: float
    steps_s: float
    decode_s: float = Field(description="from tokens to pixels")
    steps: int
    tokens_per_step: float
    accepted_by_depth: list[int] = Field(description="steps that accepted a draft at depth 1, ...")
    relaxed_accepts: int = Field(description="drafts accepted only because of the relaxation")
    tv_mean: float | None = Field(
        description="total variation that relaxation cost a token; null where it is not metered"
    )
    tv_max: float | None
    tv_sum: float | None
    speculative_decoding: SpeculativeDecoding | None = Field(description="null without drafts")


class Logprobs(BaseModel):
    """Of an image's tokens in raster order; null unless asked for."""

    logprobs: list[float] | None = Field(
        None, description="in the distribution that each was drawn from"
    )
    model_logprobs: list[float] | None = Field(
        None, description="by the model alone: temperature 1, no guidance, no filter"
    )


class ImageData(Logprobs):
    b64_json: str | None = Field(description="a PNG has the metadata to draw it again")
    url: str | None = Field(description="where the same file is for an hour")
    revised_prompt: None = None
    seed: int
    metrics: ImageMetrics


class InputTokensDetails(BaseModel):
    text_tokens: int
    image_tokens: int


class Usage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    total_tokens: int


class ImagePayload(BaseModel):
    """What all answers say about their picture."""

    created: int
    model: str
    size: str
    quality: Literal["auto"] = "auto"
    background: Literal["opaque"] = "opaque"
    output_format: Literal["png", "jpeg", "webp"]


class Settings(BaseModel):
    """The settings that were used: sent again, they give the same images."""

    seed: int
    method: str
    tree: str
    relaxation: dict[str, Any]
    cfg_scale: float
    temperature: float
    top_k: int
    top_p: float
    warnings: list[str] = Field(description="what the model cannot do with the prompt")


class ImagesResponse(ImagePayload, Settings):
    data: list[ImageData]
    usage: Usage


class PartialMetrics(BaseModel):
    steps: int
    tokens_per_step: float


class PartialImage(ImagePayload):
    """An event of a stream: the token rows drawn so far, the rest grey."""

    type: Literal["image_generation.partial_image", "image_edit.partial_image"]
    created_at: int
    b64_json: str
    partial_image_index: int
    rows: int
    metrics: PartialMetrics


class CompletedImage(ImagePayload, Settings, Logprobs):
    """The last event of a stream."""

    type: Literal["image_generation.completed", "image_edit.completed"]
    created_at: int
    b64_json: str
    usage: Usage
    metrics: ImageMetrics


class MethodCard(BaseModel):
    tree: str
    relaxation: dict[str, Any]
    relaxations: list[str] = Field(description="published settings that may follow it: `scd:tv`")


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "lantern_hpu"
    methods: dict[str, MethodCard]
    size: str
    sizes: list[str] = Field(description="that requests may ask for")
    rows: int = Field(description="rows of image tokens")
    edits: int = Field(description="pictures that a request may be drawn from; 0: none")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Status(BaseModel):
    status: str
    heartbeat_s: float | None = None


class Version(BaseModel):
    version: str


Shape = tuple[tuple[int, int] | None, int | None]  # grid and prefix of a spec
ONE_SHAPE: Shape = (None, None)  # of a model that has one size and one length


@dataclass(frozen=True)
class ServedMethod:
    """One method as it is served."""

    setting: Resolved
    spec: Spec  # of its step, which no request may go past
    shapes: tuple[Shape, ...] = (ONE_SHAPE,)  # captured: each size, for each length of prefix
    relaxations: tuple[str, ...] = ()  # published settings that a request may ask for


@dataclass(frozen=True)
class ServedModel:
    """A model as it is served."""

    names: tuple[str, ...]  # of the model
    takes_negative: bool  # whether a request may have a negative prompt
    sizes: tuple[tuple[int, int], ...]  # height, width; the first is the default
    by_request: bool  # whether a request has its size, or the model has one
    sources: int  # pictures that a request may be drawn from; 0: none
    rows: int  # of image tokens; 1 where there are no partial pictures
    vocabulary: int
    codes: int
    sampling: Sampling  # the model's own
    methods: dict[str, ServedMethod]  # the first is the default
    spec_of: Callable[[Request, Tree], Spec]  # what a request needs

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class ParsedRequest:
    """A request that can be honoured."""

    served: ServedMethod
    requests: list[Request]  # one an image
    stream: bool
    shows: tuple[int, ...]  # image rows at which a partial picture is sent
    size: tuple[int, int]  # height, width
    needs: list[Spec]  # of each image
    output: tuple[str, int]  # format of the files, and their quality
    kinds: tuple[str, ...]  # of `b64_json` and `url`
    warnings: tuple[str, ...]  # what of the request had no effect


# Fields of other models that clients send, and that change nothing here
IDLE_FIELDS = "quality style background moderation user input_fidelity safety_identifier".split()


def read_call(
    asked: ImagesRequest, menu: ServedModel, sources: tuple[SourcePicture, ...] = ()
) -> ParsedRequest:
    given = asked.given()
    check_name(given.get("model", menu.name), menu)
    size = read_size(given, menu, sources)
    images, stream = given.get("n", 1), given.get("stream", False)
    if stream and images > 1:
        raise refuse("n", images, "1 while streaming")
    sent = given.get("response_format")
    if stream and sent == "url":
        raise refuse("response_format", sent, "b64_json while streaming")
    kind, quality = given.get("output_format", "png"), given.get("output_compression", 100)
    if kind == "png" and quality < 100:
        raise refuse("output_compression", quality, "100 for png, less for jpeg and webp")
    served = read_method(given, menu)
    try:
        if given.get("top_k", 0) > menu.vocabulary:
            raise refuse("top_k", given["top_k"], f"0 (off) to {menu.vocabulary}")
        image = given_params({"seed": RANDOM} | given, "http")
        sampling = replace(menu.sampling, **only(Sampling, image))
        setting = read_setting(given, served.setting, menu)
        seed = image["seed"]
        if seed > MAX_SEED - images:
            raise refuse("seed", seed, f"-1 (random) to {MAX_SEED - images}")
        asked_size = size if menu.by_request else None
        negative = given.get("negative_prompt")
        if negative and not menu.takes_negative:
            raise no_negative(menu.name)
        negative = negative if menu.takes_negative else None
        logprobs = image.get("logprobs", False)
        settings = sampling, setting.relaxation, negative, asked_size, sources, logprobs
        requests = in_turn([asked.prompt], range(images), seed, *settings)
        need = menu.spec_of(requests[0], setting.tree)
        check_graph(need, served, given)
        rows = need.grid[0] if need.grid and menu.rows > 1 else menu.rows
        count = given.get("partial_images", 0)  # OpenAI allows three, and says that fewer may come
        if count and not stream:
            raise refuse("partial_images", count, "0 unless stream is true")
        shown = min(count, rows - 1)
    except LanternError as error:
        raise translated(error) from error
    idle = [name for name in IDLE_FIELDS if given.get(name, "auto") != "auto"]
    warnings = [f"{', '.join(idle)} had no effect"] if idle else []
    if shown < count:
        warnings.append(f"partial_images is {count}; the model makes {shown} of them at most")
    shows = tuple(dict.fromkeys(rows * (i + 1) // (shown + 1) for i in range(shown)))
    kinds, needs = (sent,) if sent else ("b64_json", "url"), [need] * len(requests)
    return ParsedRequest(
        served, requests, stream, shows, size, needs, (kind, quality), kinds, tuple(warnings)
    )


def check_name(name: str, menu: ServedModel) -> None:
    if name not in menu.names:
        what = f"model {name[:60]!r} is not served here; allowed: {', '.join(menu.names)}"
        raise ApiError(404, what, "model", "model_not_found")


def read_size(
    given: Mapping[str, Any], menu: ServedModel, sources: Sequence[SourcePicture]
) -> tuple[int, int]:
    """Height and width; a size that was not captured beforehand would make all others wait.

    Where none is asked for, the first one, or the one whose proportions are nearest to the first source's.
    """
    sizes = {f"{width}x{height}": (height, width) for height, width in menu.sizes}
    name = given.get("size", "auto")
    if name != "auto" and name not in sizes:
        more = f"; more where the server has {as_option(Arg('sizes'))}" if menu.by_request else ""
        raise refuse("size", name, " or ".join(["auto", *sizes]) + more)
    if name != "auto":
        return sizes[name]
    if not sources:
        return menu.sizes[0]
    height, width = sources[0].size
    return min(menu.sizes, key=lambda size: abs(math.log(size[0] * width / size[1] / height)))


def read_method(given: Mapping[str, Any], menu: ServedModel) -> ServedMethod:
    names = list(menu.methods)
    text: str = given.get("method", "auto")
    name = text.partition("@")[0].partition(":")[0]
    if name != "auto" and name not in menu.methods:
        raise refuse("method", text, ", ".join(["auto", *names]))
    return menu.methods[names[0] if name == "auto" else name]


def read_setting(given: Mapping[str, Any], served: Resolved, menu: ServedModel) -> Resolved:
    """What is served, relaxed as the request asks.

    Raises:
        OptionError: it cannot be read.
        ApiError: its tree is not the one that is served.
    """
    text = given.get("method", "auto")
    head, at, tree = text.partition("@")
    if at and tree not in (served.tree.name, tree_text(served.tree)):  # a request opens no file
        allowed = f"the tree {tree_text(served.tree)}, which {served.method} serves"
        raise refuse("method", text, allowed)
    asked = Setting.parse(head)
    if asked.relaxation is None:
        return served
    relaxation = asked.relaxation.fit(menu.codes)
    usual = served.relaxation.verify
    return replace(served, relaxation=verified(relaxation, served.tree, usual))


def check_graph(need: Spec, served: ServedMethod, given: Mapping[str, Any]) -> None:
    """Raise an ApiError where a request needs what the recorded step does not do."""
    has, method = served.spec, served.setting.method
    if (need.grid, need.prefix) not in served.shapes:
        most = max(prefix or 0 for _, prefix in served.shapes)
        what = f"prompt and pictures are padded to {need.prefix} tokens, at most {most} here"
        hint = f"send fewer or smaller pictures, or ask for more {as_option(Arg('sources'))}"
        raise ApiError(400, f"{what}; {hint}", "image", "invalid_value")
    lacking = has.first_missing(need)
    if not lacking:
        return
    no_k = (f"no k with {method} on this server; some", "PRESET")
    some_k = (f"k of 0 to {has.neighbours - 1} with {method} on this server", "")
    # By what is missing: the field, its values, and what the server would have to allow for more
    field, values, option = {
        "guidance": ("cfg_scale", "1, this server draws without guidance", ""),
        "use_greedy": ("temperature", "0.01 to 10; 0", "greedy"),
        "max_top_k": ("top_k", f"0 (off) to {has.max_top_k}; more", "top_k"),
        "use_top_p": ("top_p", "1 (off); less", "top_p"),
        "neighbours": ("method", *(some_k if has.neighbours > 1 else no_k)),
        "annealed": ("method", f"no omega: {method} is served without weights of depth", ""),
        "ranks": ("method", f"ranks up to {has.ranks}; more", "gsd"),
        "blended": ("method", "tv of 0; more", "tv"),
        "logprobs": ("logprobs", "false; true", "logprobs"),
        "residual": ("method", f"residual={has.residual}", ""),
        "together": ("method", f"verify={'block' if has.together else 'token'} with {method}", ""),
    }[lacking]
    if option:
        values += f" where the server has {as_option(Arg('allow', option))}"
    raise refuse(field, given.get(field), values)


def translated(error: LanternError) -> ApiError:
    """An error in the words of a body's fields."""
    fields = {*EditsRequest.model_fields, "image"}
    text = error.text(as_field, fields.__contains__)
    field = error.field if error.field in fields else None
    return ApiError(400, " ".join(text.split()), field, "invalid_value")


def as_field(arg: Arg) -> str:
    """In a body: `cfg_scale 0`, `method "eagle"`."""
    return arg.name if arg.value is None else f"{arg.name} {json.dumps(arg.value, default=str)}"
