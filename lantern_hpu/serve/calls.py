"""From a request to what is to be drawn, or to an error that says what is allowed on this server."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lantern_hpu.decode.spec import Spec
from lantern_hpu.errors import LanternError
from lantern_hpu.methods.relaxation import Relaxation, RelaxationOptions
from lantern_hpu.methods.request import MAX_SEED, Request
from lantern_hpu.methods.setting import check_drawn, check_relaxation, check_schedule
from lantern_hpu.serve.menu import Menu, Served
from lantern_hpu.serve.protocol import ApiError, ImagesRequest, refuse
from lantern_hpu.tree import is_name_of


@dataclass(frozen=True)
class Call:
    """A request that can be honoured."""

    served: Served
    requests: list[Request]  # one an image
    stream: bool
    shows: tuple[int, ...]  # image rows at which a partial picture is sent
    size: tuple[int, int]  # height, width
    need: Spec  # of one of its images


RELAXED = {
    "relax": "preset",
    "relax_k": "k",
    "relax_delta": "delta",
    "relax_lambda": "lam",
    "relax_omega": "omega",
    "relax_nu": "nu",
    "relax_mu": "mu",
    "relax_distance": "distance",
    "relax_ranks": "ranks",
    "relax_gap": "gap",
    "relax_tv": "tv",
    "relax_budget": "budget",
    "residual": "residual",
}
SAMPLED = ("cfg_scale", "temperature", "top_k", "top_p")
CLUSTERS = ("relax_ranks", "relax_distance", "relax_gap")


def read_call(asked: ImagesRequest, menu: Menu) -> Call:
    given = asked.given()
    if given.get("model", menu.model) != menu.model:
        what = f"model {given['model'][:60]!r} is not served here; allowed: {menu.model}"
        raise ApiError(404, what, "model", "model_not_found")
    size = read_size(given, menu)
    count, stream = given.get("n", 1), given.get("stream", False)
    if stream and count > 1:
        raise refuse("n", count, "1 while streaming")
    shows = read_shows(given, menu.rows, stream)
    served = read_method(given, menu)
    try:
        sampling = replace(menu.sampling, **{n: given[n] for n in SAMPLED if n in given})
        if sampling.top_k > menu.vocabulary:
            raise refuse("top_k", sampling.top_k, f"0 (off) to {menu.vocabulary}")
        relaxation = request_relaxation(given, served, menu)
        seed = given.get("seed", secrets.randbelow(1 << 53))
        if seed > MAX_SEED - count:
            raise refuse("seed", seed, f"0 to {MAX_SEED - count}")
        asked_size = size if menu.by_request else None
        requests = [
            Request(asked.prompt, seed + i, sampling, relaxation, size=asked_size)
            for i in range(count)
        ]
        need = menu.spec_of(requests[0], served.setting.tree)
        check_graph(need, served, menu, given)
    except LanternError as error:
        raise translated(error, given) from error
    return Call(served, requests, stream, shows, size, need)


def read_size(given: Mapping[str, Any], menu: Menu) -> tuple[int, int]:
    """Height and width; a size that was not captured beforehand would make all others wait."""
    sizes = {f"{width}x{height}": (height, width) for height, width in menu.sizes}
    name = given.get("size", "auto")
    if name != "auto" and name not in sizes:
        more = "; more where the server has --sizes" if menu.by_request else ""
        raise refuse("size", name, " or ".join(["auto", *sizes]) + more)
    return menu.sizes[0] if name == "auto" else sizes[name]


def read_shows(given: Mapping[str, Any], rows: int, stream: bool) -> tuple[int, ...]:
    """Rows of partial pictures, evenly spread; OpenAI allows three, here it is one for each row but the last."""
    count = given.get("partial_images", 0)
    if count and not stream:
        raise refuse("partial_images", count, "0 unless stream is true")
    if count >= rows:
        most = f"0 to {rows - 1}" if rows > 1 else "0: pictures are made of whole images alone"
        raise refuse("partial_images", count, most)
    return tuple(dict.fromkeys(rows * (i + 1) // (count + 1) for i in range(count)))


def read_method(given: Mapping[str, Any], menu: Menu) -> Served:
    names = list(menu.methods)
    name = given.get("method", "auto")
    if name != "auto" and name not in menu.methods:
        raise refuse("method", name, ", ".join(["auto", *names]))
    served = menu.methods[names[0] if name == "auto" else name]
    tree = served.setting.tree
    if not is_name_of(tree, given.get("tree", tree.name)):
        raise refuse("tree", given["tree"], f"{tree.name}, which {served.setting.method} serves")
    final = served.setting.commit
    if given.get("commit", final) != final:
        raise refuse("commit", given["commit"], f"{final}, as {served.setting.method} is served")
    return served


def request_relaxation(given: Mapping[str, Any], served: Served, menu: Menu) -> Relaxation:
    loose = {kind: given[name] for name, kind in RELAXED.items() if name in given}
    setting = served.setting
    asked = RelaxationOptions(**loose).relaxation(setting.relaxation)
    if asked is None:
        return setting.relaxation
    check_relaxation(setting.method, asked)
    check_drawn(setting.tree, asked)
    check_schedule(setting.tree, asked)
    return asked.fitted(menu.codes)


def check_graph(need: Spec, served: Served, menu: Menu, given: Mapping[str, Any]) -> None:
    """Raise an ApiError where a request needs what the recorded step does not do."""
    has, method = served.spec, served.setting.method
    if need.guidance and not has.guidance:
        raise refuse("cfg_scale", "not 1", "1, this server draws without guidance")
    if need.use_greedy and not has.use_greedy:
        raise refuse("temperature", 0, "0.01 to 10; 0 where the server has --allow greedy")
    if need.max_top_k > has.max_top_k:
        most = f"up to {has.max_top_k}, or 0" if has.max_top_k else "0 (off)"
        raise refuse("top_k", "more", f"{most}; more where the server has --allow top_k")
    if need.use_top_p and not has.use_top_p:
        raise refuse("top_p", "below 1", "1 (off); less where the server has --allow top_p")
    if need.neighbours > has.neighbours:
        last = max(has.neighbours - 1, 0)
        asked = "relax" if "relax" in given and "relax_k" not in given else "relax_k"
        most = f"relax_k of 0 to {last} with {method} on this server"
        if not last:
            most = f"none with {method} on this server; some where it has --allow"
            most += f" {given.get('relax') or 'PRESET'}"
        raise refuse(asked, given.get(asked, "more"), most)
    if need.annealed and not has.annealed:
        raise refuse("relax_omega", "given", f"none: {method} is served without weights of depth")
    if need.ranks > has.ranks:
        most = f"up to {has.ranks}" if has.ranks else "none; some where the server has --allow gsd"
        asked = next((name for name in CLUSTERS if name in given), "relax")
        raise refuse(asked, given.get(asked), most)
    if need.blended and not has.blended:
        raise refuse("relax_tv", "given", "0; more where the server has --allow tv")
    if need.neighbours and need.residual != has.residual:
        raise refuse("residual", need.residual, has.residual)


def translated(error: LanternError, given: Collection[str] = ()) -> ApiError:
    """An error of options, whose names are those of a command line, as one of the fields that were given."""
    text = re.sub(
        r"--([a-z][a-z-]*)", lambda m: m[1].replace("-", "_"), " ".join(str(error).split())
    )
    named = [name for name in ImagesRequest.model_fields if re.search(rf"\b{name}\b", text)]
    best = max(named, key=lambda name: (name in given, len(name)), default=None)
    return ApiError(400, text, best, "invalid_value")
