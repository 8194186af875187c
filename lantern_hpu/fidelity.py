"""How far each method moves the law of the next token, measured: what a relaxation costs.

    python -m lantern_hpu.fidelity --images 64 --output fidelity.json

Exact decoding draws images up to places spread over the image. There the target's law p of the next token is
known, and so is, for given drafts, the law of the token that acceptance lets through: its chances and residuals
are those that decoding computes (`accept.py`), multiplied out instead of drawn. Averaged over many draws of the
drafts this is the method's own law, and

    TV = 1/2 sum |method's law - p|

is the share of next tokens that are not the model's own choice. A dynamic tree's drafts are not drawn, so one
evaluation is exact. For a static tree the same draws go through the exact rule, whose law is p, and the
difference of the two averages is taken: what the draws have in common cancels. `eagle` itself is compared with p
directly, so its figure is what is left of the draws' noise. The interval is that of the mean over the places.

The measured token is the first of a step. Tokens a step and milliseconds an image are those of real drawing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import prepare
from lantern_hpu.bench import PROMPTS, split
from lantern_hpu.config import (
    EXACT,
    GROWING,
    METHODS,
    PRESETS,
    RELAXED,
    Relaxation,
    Request,
    choose_method,
    require,
)
from lantern_hpu.errors import OptionError, choices, exit_code

if TYPE_CHECKING:
    from torch import Tensor
    from tqdm import tqdm

    from lantern_hpu.accept import Acceptance, Bounds
    from lantern_hpu.engine import Engine
    from lantern_hpu.pipeline import LanternPipeline

BATCH = 8  # images whose places are measured together
DEFAULT_ROWS = (
    "ar,eagle,eagle2,lantern:delta-0.1,lantern:delta-0.2,lantern:delta-0.4,"
    "lantern++:lambda-5,lantern++:lambda-20,lantern++:omega-2"
)


@dataclass(frozen=True)
class Row:
    """A method with a setting of its relaxation."""

    name: str
    method: str
    relaxation: Relaxation

    @classmethod
    def parse(cls, text: str) -> Row:
        """`eagle`, or `lantern:delta-0.2` with the name of a preset.

        Raises:
            OptionError: unknown method or preset, or a preset for an exact method.
        """
        method, _, preset = text.partition(":")
        if method not in METHODS:
            raise OptionError(f"unknown method {method!r}", hint=choices(METHODS))
        if preset and preset not in PRESETS:
            raise OptionError(f"unknown preset {preset!r}", hint=choices(PRESETS))
        relaxation = PRESETS[preset] if preset else None
        return cls(text, method, choose_method(method, None, relaxation)[1])


@dataclass
class Place:
    """A batch of images somewhere in the middle: what the next token's law depends on."""

    engine: Engine
    requests: list[Request]
    p: Tensor  # [B, V] the target's law after the root
    q: Tensor | None  # [B, V] the drafter's; None: the drafts are not drawn
    tokens: Tensor  # [B, C] the root's children
    exists: Tensor  # [B, C] bool


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.fidelity",
        description="Measure how far each method moves the law of the next token.",
    )
    parser.add_argument("--model", default="builtin", help="`builtin`, or a model folder (builtin)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--rows",
        default=DEFAULT_ROWS,
        help=f"comma-separated METHOD or METHOD:PRESET, of {', '.join(PRESETS)} ({DEFAULT_ROWS})",
    )
    parser.add_argument("--images", type=int, default=64, help="places that are measured (64)")
    parser.add_argument(
        "--draws", type=int, default=256, help="draws of a static tree's drafts at each (256)"
    )
    parser.add_argument(
        "--timed", type=int, default=8, help="images drawn for tokens a step and time (8)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, metavar="FILE.json")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    return parser


def expected(
    acceptance: Acceptance,
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    exists: Tensor,
    bounds: Bounds,
) -> Tensor:
    """The law of the token after a node for given drafts: `Acceptance.siblings` averaged over its uniforms.

    Args:
        p: [B, V]. q: [B, V], or None. tokens, exists: [B, c].

    Returns [B, V].
    """
    from lantern_hpu.accept import without
    from lantern_hpu.sampling import gather

    whole, weight = p, bounds.weight[:, :1]
    law, left = p * 0, p[:, :1] * 0 + 1  # [B, V], [B, 1]
    for child in range(tokens.shape[1]):
        token = tokens[:, child : child + 1]
        own = gather(p, 1, token)
        drawn = gather(q, 1, token) if q is not None else own * 0 + 1
        tried = exists[:, child : child + 1] & (drawn > 0)
        mass = acceptance.raised(p, token, own, bounds, weight)
        chance = (mass / drawn).clamp(max=1).where(tried, 0.0)
        law = law.scatter_add(1, token.long(), left * chance)
        left = left * (1 - chance)
        p = acceptance.rest(p, q, token, own, bounds, weight, whole).where(tried, p)
        if q is not None:
            q = without(q, token)
    return law + left * p


def find_places(
    pipeline: LanternPipeline, method: str, images: int, seed: int, bar: tqdm[Any]
) -> list[Place]:
    """Images drawn by an exact method, each batch as far as its share of the whole."""
    from lantern_hpu.plan import Plan, Sampler
    from lantern_hpu.step import Step

    tree, _ = choose_method(method)
    batches, places = -(-images // BATCH), []
    model = pipeline.model
    for number in range(batches):
        requests = [
            Request(PROMPTS[i % len(PROMPTS)], seed + i, model.sampling)
            for i in range(number * BATCH, min(images, (number + 1) * BATCH))
        ]
        engine, _ = pipeline.engine(requests, tree, len(requests))
        pipeline.warm_up(engine, requests[0])
        prefix, valid = model.prefix([r.prompt for r in requests], engine.plan.shapes.guidance)
        known, step = engine.start(prefix, valid, requests), 0
        until = (number + 0.5) / batches * (model.target.config.tokens - 1)
        while min(known) < until:
            step += 1
            known = engine.advance([r.seed for r in requests], step, 1)
        function, plan = engine.step.function, engine.plan
        assert isinstance(function, Step) and isinstance(plan, Plan)
        drafts = engine.draft()
        length = function.slots.per_row(engine.state.count) + function.prefix
        hidden = function.verify(drafts, length, engine.state)[:, :1]
        p = Sampler(model.target, plan)(hidden, engine.state)[:, 0]
        child = drafts.tables.child[:, 0]  # [B, C]
        tokens = drafts.tokens.gather(1, child.long())
        q = None if drafts.q is None else drafts.q[:, 0]
        places.append(Place(engine, requests, p, q, tokens, child > 0))
        bar.update(len(requests))
    return places


def distances(
    place: Place, pipeline: LanternPipeline, row: Row, draws: int, seed: int
) -> list[float]:
    """The TV of each image of a place."""
    import torch

    from lantern_hpu.accept import Acceptance
    from lantern_hpu.sampling import choose_distinct

    rule, tree = row.relaxation, place.engine.plan.shapes.tree
    requests = [replace(request, relaxation=rule) for request in place.requests]
    near = pipeline.nearest(pipeline.plan(requests, tree, len(requests)).neighbours)
    relaxed = Acceptance(tree, near, rule.residual, rule.weighs).to(place.p.device)
    exact = Acceptance(tree).to(place.p.device)
    place.engine.load(requests)
    bounds = place.engine.state.bounds
    if place.q is None:
        law = expected(relaxed, place.p, None, place.tokens, place.exists, bounds)
        return halved(law - place.p)
    generator = torch.Generator().manual_seed(seed)
    moved = torch.zeros_like(place.p)
    for _ in range(draws):
        uniform = torch.rand(place.tokens.shape, generator=generator).to(place.p.device)
        tokens = choose_distinct(place.q, uniform)
        given = (place.p, place.q, tokens, place.exists, bounds)
        against = expected(exact, *given) if rule.active else place.p
        moved += expected(relaxed, *given) - against
    return halved(moved / draws)


def halved(difference: Tensor) -> list[float]:
    """Half the sum of absolute values of each row."""
    rows: list[float] = (difference.abs().sum(-1) / 2).tolist()
    return rows


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of their mean."""
    if len(values) < 2:
        return math.nan
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values))


def drawn(pipeline: LanternPipeline, row: Row, images: int, seed: int) -> dict[str, float]:
    """Tokens a step and milliseconds an image, one image at a time, after a first one."""
    from lantern_hpu.results import tokens_per_step

    tree, _ = choose_method(row.method)
    sampling = pipeline.model.sampling
    requests = [
        Request(PROMPTS[i % len(PROMPTS)], seed + i, sampling, row.relaxation)
        for i in range(images)
    ]
    pipeline.draw(requests[:1], tree, row.method, 1)
    result = pipeline.draw(requests, tree, row.method, 1)
    spent = result.timing["generate_s"] + result.timing["text_s"] + result.timing["decode_s"]
    return {
        "tokens_per_step": tokens_per_step(result.records),
        "ms_per_image": 1000 * spent / images,
    }


def measure(args: argparse.Namespace, rows: list[Row], argv: Sequence[str]) -> dict[str, Any]:
    """Every row."""
    import torch
    from tqdm import tqdm

    prepare(args.device, "eager")
    from lantern_hpu.pipeline import LanternPipeline

    kinds = {row.method in GROWING for row in rows if row.method != "ar"}
    total = args.images * len(kinds) + len(rows) * args.timed + args.images * len(rows)
    pipeline = LanternPipeline.from_pretrained(args.model, args.device, args.dtype, "eager")
    found: list[dict[str, Any]] = []
    with closing(pipeline), tqdm(total=total, unit="image", file=sys.stderr) as bar:
        places: dict[bool, list[Place]] = {}
        for row in rows:
            row = replace(row, relaxation=pipeline.fitted(row.relaxation))
            bar.set_description(row.name)
            grows, tv = row.method in GROWING, [0.0]  # `ar` draws from p itself
            with torch.no_grad():
                if row.method != "ar":
                    if grows not in places:
                        base = "eagle2" if grows else "eagle"
                        places[grows] = find_places(pipeline, base, args.images, args.seed, bar)
                    parts = [
                        distances(place, pipeline, row, args.draws, args.seed)
                        for place in places[grows]
                    ]
                    tv = [value for part in parts for value in part]
            bar.update(args.images)
            figures = drawn(pipeline, row, args.timed, args.seed)
            bar.update(args.timed)
            found.append(
                {
                    "row": row.name,
                    "method": row.method,
                    "relaxation": asdict(row.relaxation),
                    "places": len(tv),
                    "tv": statistics.fmean(tv),
                    "tv_interval": 0.0 if row.method == "ar" else interval(tv),
                    **figures,
                }
            )
        environment = pipeline.environment()
    return {
        "kind": "lantern_hpu.fidelity",
        "date": datetime.date.today().isoformat(),
        "command": "python -m lantern_hpu.fidelity " + " ".join(argv),
        "model": pipeline.model.name,
        "dtype": str(pipeline.model.target.head.weight.dtype).removeprefix("torch."),
        "images": args.images,
        "draws": args.draws,
        "timed": args.timed,
        "environment": environment,
        "rows": found,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| method | setting | tokens a step | ms an image | TV of the next token |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        method, _, preset = row["row"].partition(":")
        lines.append(
            f"| {method} | {preset or said(row)} | {row['tokens_per_step']:.2f} "
            f"| {row['ms_per_image']:.0f} | {distance(row)} |"
        )
    return "\n".join(lines)


def said(row: dict[str, Any]) -> str:
    return "default" if row["method"] in RELAXED else "exact"


def distance(row: dict[str, Any]) -> str:
    """The figure with its interval; an exact method's is what the estimate's noise leaves."""
    figure = f"{row['tv']:.3f} ± {row['tv_interval']:.3f}"
    if row["method"] == "ar":
        return "0"
    return f"0 (measured {figure})" if row["relaxation"] == asdict(EXACT) else figure


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Check the options, measure, print and write."""
    rows = [Row.parse(text) for text in split(args.rows, "--rows")]
    for name in ("images", "draws", "timed"):
        require(getattr(args, name) >= 1, f"--{name}", getattr(args, name), "1 or more")
    from lantern_hpu.results import check_free, write_file

    if args.output:
        check_free([args.output], args.force)
    result = measure(args, rows, argv)
    print(table(result["rows"]))
    if args.output:
        write_file(args.output, json.dumps(result, indent=2).encode(), args.force)
        print(f"wrote {args.output}")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """The `fidelity` command; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)
    return exit_code(lambda: run(args, given))


if __name__ == "__main__":
    sys.exit(main())
