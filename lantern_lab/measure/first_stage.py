"""The tokens of a known model without its files: milliseconds a step and seconds an image, beside what others print.

Random weights of the published sizes take as long as trained ones; only what is accepted differs, so a method with
drafts has the tokens a step at which it equals `ar` in place of seconds. Where not all layers fit into memory, two
shallower models are timed, a layer takes their difference, and the others are added in proportion.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lantern_hpu.backends.base import DevicePlan, dtype_name, get_backend
from lantern_hpu.core import Request, Sampling
from lantern_hpu.decode.accelerators import Rates, least_seconds
from lantern_hpu.decode.engine import Engine
from lantern_hpu.decode.spec import Spec
from lantern_hpu.errors import DeviceError
from lantern_hpu.generator import describe_environment
from lantern_hpu.methods.setting import ResolveContext, Resolved, resolve
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.model import EmptyModel, count_numbers
from lantern_hpu.models.text.prefix import Prefix, wordless
from lantern_hpu.models.transformer import Target
from lantern_hpu.ops.quantized import quantized_layer, replace_layers
from lantern_hpu.results.tables import figure, markdown
from lantern_hpu.zoo.registry import KnownModel, get
from lantern_lab.measure import meter
from lantern_lab.measure.options import BenchRequest

ROOM = 0.6  # share of the free memory for weights; they need more while they are laid out
Case = tuple[Resolved, int]  # a setting, and images at a time
TURNS = 3  # timings of a step, of which the fastest counts
QUANTIZED_PARTS = {"scale": 1e-3, "zero": 8}  # of a matrix of 8 or 4 bits
OTHERS = Path(__file__).with_suffix(".json")


class Timing(NamedTuple):
    """Of a batch."""

    prefill_s: float
    step_ms: float


def depths_that_fit(known: KnownModel, room: float) -> list[int]:
    """How many layers are timed: all, or those of two shallower models; `room` is a count of weights."""
    target = EmptyModel.of(known.config).target
    depth = known.config.target.layers
    of_layers = count_numbers(target.layers)
    most = (room - count_numbers(target) + of_layers) * depth / of_layers
    if most >= depth:
        return [depth]
    if most < 2:
        raise DeviceError("there is no room for two layers", hint="a smaller model")
    return [int(most) // 2, int(most)]


def random_target(
    config: TransformerConfig, depth: int, fit: DevicePlan, quantize: str | None
) -> Target:
    """A model of `depth` layers; its weights repeat one block of random numbers."""
    apart = config.word_layers * depth // config.layers
    device = fit.backend.device
    with torch.device("meta"):
        target = Target(replace(config, layers=depth, word_layers=apart), fit.kernels)
    target = target.to(fit.dtype).requires_grad_(False)
    if quantize:
        replace_layers(target, nn.Linear, partial(quantized_layer, form=quantize))
    target = target.to_empty(device=device).eval()
    floats = torch.empty(2**20, device=device).uniform_(-0.02, 0.02).to(fit.dtype)
    whole = torch.randint(128, (2**20,), device=device)
    for name, weight in target.named_parameters():
        block = floats if weight.is_floating_point() else whole
        for part in weight.view(-1).split(len(block)):
            part.copy_(block[: len(part)])
        if (constant := QUANTIZED_PARTS.get(name.rpartition(".")[2])) is not None:
            weight.fill_(constant)
    if quantize:
        fit.keep_quantized([target], quantize)
    return target


def random_prefix(engine: Engine) -> Prefix:
    """A prompt as long as the prefix."""
    config, rows, device = engine.target.config, engine.spec.rows, engine.target.device
    valid = torch.ones(rows, config.prefix, dtype=torch.bool, device=device)
    prefix = wordless(torch.randn(*valid.shape, config.dim).to(engine.target.norm.weight), valid)
    places = torch.arange(config.prefix, dtype=torch.int32, device=device).expand(rows, 3, -1)
    return prefix._replace(axes=places.contiguous()) if config.rope == "mrope" else prefix


def timing(target: Target, plan: DevicePlan, case: Case, requests: Sequence[Request]) -> Timing:
    """A prefill of a short prompt, and steps in the middle of an image, where half of its keys and values are there."""
    spec = Spec.of(requests, case[0].tree, case[1], target.config)
    spec = replace(spec, prefix=min(target.config.prefixes, default=spec.prefix))
    engine, backend = Engine(target, None, spec, plan), plan.backend
    prefix = random_prefix(engine)
    engine.prefill_batch(prefix, requests)
    prefill = meter.seconds_of(backend, lambda: engine.prefill_into(0, prefix, requests))
    most = meter.BRIEF_STEPS if backend.is_host else meter.SPLIT_STEPS
    half = target.config.tokens // 2
    steps = (meter.step_alone(engine, prefix, requests, most, known=half) for _ in range(TURNS))
    step = min(steps)
    engine.close()
    return Timing(prefill, step)


@torch.no_grad()
def timings(
    known: KnownModel, depth: int, fit: DevicePlan, cases: Sequence[Case], wanted: BenchRequest
) -> tuple[list[Timing], DevicePlan]:
    """Of a model with so many layers, which is gone afterwards; and how it ran."""
    values: dict[str, Any] = {**known.sampling}
    with fit.backend.errors(), fit.backend.loading(known.config.target.parameters):
        target = random_target(known.config.target, depth, fit, wanted.options.quantize)
        plan = fit.lay_out([target])
        found = []
        for setting, images in cases:
            one = Request("any", sampling=Sampling(**values), relaxation=setting.relaxation)
            requests = [replace(one, seed=wanted.seed + image) for image in range(images)]
            found.append(timing(target, plan, (setting, images), requests))
    return found, plan


def measure(wanted: BenchRequest, argv: Sequence[str]) -> dict[str, Any]:
    """The report of a known model's first stage."""
    backend, known = get_backend(wanted.options.device, wanted.mode), get(wanted.model)
    config = known.config.target
    fit = backend.fit(config, replace(wanted.options, graphs=wanted.mode))
    free = backend.memory().free
    quantize = wanted.options.quantize
    each = fit.weight_bytes(quantize)
    depths = depths_that_fit(known, inf if free is None else ROOM * free / each)
    context = ResolveContext(config.codes, config.tokens, has_drafter=False)
    cases = [(resolve(s, context), images) for images in wanted.batches for s in wanted.settings]
    several = [timings(known, depth, fit, cases, wanted) for depth in depths]
    few, deep = several[0][0], several[-1][0]
    if len(depths) > 1 and any(b.step_ms <= a.step_ms for a, b in zip(few, deep, strict=True)):
        what = f"steps of {depths[1]} layers took no longer than those of {depths[0]}"
        raise DeviceError(what, "other programs use this device", "again while it is quiet")
    more = (config.layers - depths[-1]) / max(depths[-1] - depths[0], 1)
    whole = [
        Timing(*(most + more * (most - least) for least, most in zip(a, b, strict=True)))
        for a, b in zip(few, deep, strict=True)
    ]
    measured = meter.measure_rates(backend, fit.dtype)
    speeds = measured["copy_bytes_per_s"], measured["operations_per_s"]
    rates = Rates(*speeds, fit.dtype.itemsize, each)
    others = json.loads(OTHERS.read_text())["figures"]
    return {
        "kind": "lantern_hpu.first_stage",
        "date": datetime.date.today().isoformat(),
        "command": "lantern-hpu bench " + " ".join(argv),
        "model": known.name,
        "layers": {"timed": depths, "all": config.layers},
        "dtype": dtype_name(fit.dtype),
        "quantize": quantize,
        "environment": describe_environment(several[-1][1], None),
        "rates": measured,
        "rows": rows_of(known, rates, list(zip(cases, whole, strict=True))),
        "others": others.get(known.name, []),
    }


def rows_of(known: KnownModel, rates: Rates, found: Sequence[tuple[Case, Timing]]) -> list[Any]:
    """A row a case. Only `ar` takes a step a token; of others it is known how many tokens make up for a step."""
    steps, guided = known.config.target.tokens - 1, 1 + (known.sampling["cfg_scale"] != 1)
    ar = {images: time.step_ms for (setting, images), time in found if not setting.tree.depth}
    rows = []
    for (setting, images), time in found:
        plain = setting.tree.depth == 0
        least = 1000 * max(least_seconds(known.config, rates, guided * images, 1, 1))
        row = {
            "method": str(setting),
            "images": images,
            "prefill_s": time.prefill_s,
            "ms_per_step": time.step_ms,
            "first_stage_s": time.prefill_s + steps * time.step_ms / 1000 if plain else None,
            "share_of_least_time": least / time.step_ms if plain else None,
            "tokens_per_step_to_equal_ar": time.step_ms / ar[images] if images in ar else None,
        }
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    def cell(value: Any) -> str:
        return figure(value) or "-" if value is None or isinstance(value, float) else str(value)

    head = [name.replace("_", " ") for name in rows[0]]
    return markdown(head, [[cell(value) for value in row.values()] for row in rows])


def tables(report: dict[str, Any]) -> str:
    """The figures of this device, then those of others by name and source."""
    timed, whole = report["layers"]["timed"], report["layers"]["all"]
    small = f", {report['quantize']} matrices" if report["quantize"] else ""
    how = f"{report['dtype']}{small}, {report['environment']['device']}"
    parts = [
        f"{report['model']}, random weights, {how}: {' and '.join(map(str, timed))} of {whole} layers timed",
        table(report["rows"]),
    ]
    if report["others"]:
        parts += [
            "What others print, on their hardware; not measured here:",
            table(report["others"]),
        ]
    return "\n\n".join(parts)
