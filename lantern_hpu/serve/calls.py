"""From a request to what is to be drawn, or to an error that says what is allowed on this server."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lantern_hpu.core import Request, Sampling, SourcePicture
from lantern_hpu.decode.spec import Spec
from lantern_hpu.errors import Arg, LanternError, as_option
from lantern_hpu.fields import MAX_SEED, RANDOM, given_params, only
from lantern_hpu.methods import relaxation as relaxations
from lantern_hpu.methods.request import in_turn
from lantern_hpu.methods.setting import Resolved, verified
from lantern_hpu.models.text.frames import no_negative
from lantern_hpu.serve.protocol import ApiError, EditsRequest, ImagesRequest, refuse
from lantern_hpu.serve.served import ServedMethod, ServedModel
from lantern_hpu.tree import Tree, Window


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
        image = given_params({"seed": RANDOM} | given, "field")
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
        settings = sampling, setting.relaxation, negative, asked_size, sources
        requests = in_turn([asked.prompt], range(images), seed, *settings)
        need = menu.spec_of(requests[0], setting.tree)
        check_graph(need, served, given)
        rows = need.grid[0] if need.grid and menu.rows > 1 else menu.rows
        count = read_partials(given, stream)
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


def read_partials(given: Mapping[str, Any], stream: bool) -> int:
    """How many partial pictures are asked for; OpenAI allows three, and says that fewer may come."""
    count: int = given.get("partial_images", 0)
    if count and not stream:
        raise refuse("partial_images", count, "0 unless stream is true")
    return count


def read_method(given: Mapping[str, Any], menu: ServedModel) -> ServedMethod:
    names = list(menu.methods)
    name = given.get("method", "auto")
    if name != "auto" and name not in menu.methods:
        raise refuse("method", name, ", ".join(["auto", *names]))
    served = menu.methods[names[0] if name == "auto" else name]
    for field in ("tree", "window"):
        if field in given and not is_served(str(given[field]), served.setting.tree):
            allowed = f"{served.setting.tree.name}, which {served.setting.method} serves"
            raise refuse(field, given[field], allowed)
    return served


def is_served(text: str, tree: Tree) -> bool:
    """Whether a text names a tree; of a window, by its width and the rest or by its whole name."""
    if not isinstance(tree, Window):
        return text == tree.name
    try:
        return Window.parse(text if text.startswith(tree.rule) else f"{tree.rule}:{text}") == tree
    except LanternError:
        return False


def read_setting(given: Mapping[str, Any], setting: Resolved, menu: ServedModel) -> Resolved:
    """What is served, relaxed as the request asks."""
    if "relax" not in given:
        return setting
    relaxation = relaxations.parse(given["relax"], setting.relaxation).fit(menu.codes)
    usual = setting.relaxation.verify
    return replace(setting, relaxation=verified(relaxation, setting.tree, usual))


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
        "neighbours": ("relax", *(some_k if has.neighbours > 1 else no_k)),
        "annealed": ("relax", f"no omega: {method} is served without weights of depth", ""),
        "ranks": ("relax", f"ranks up to {has.ranks}; more", "gsd"),
        "blended": ("relax", "tv of 0; more", "tv"),
        "residual": ("relax", f"residual={has.residual}", ""),
        "together": ("relax", f"verify={'block' if has.together else 'token'} with {method}", ""),
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
