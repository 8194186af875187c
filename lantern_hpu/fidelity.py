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
import math
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import prepare
from lantern_hpu.bench import PROMPTS, heading, show, split
from lantern_hpu.config import (
    EXACT,
    GROWING,
    METHODS,
    PRESETS,
    RELAXED,
    Relaxation,
    Request,
    choose_method,
    in_turn,
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
class Places:
    """One place in each of B images: what the law of the next token there depends on."""

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
        lenders = acceptance.lenders(p, token, own, bounds)
        mass = acceptance.raised(own, weight, lenders)
        chance = (mass / drawn).clamp(max=1).where(tried, 0.0)
        law = law.scatter_add(1, token.long(), left * chance)
        left = left * (1 - chance)
        p = acceptance.rest(p, q, token, own, weight, lenders, bounds, whole).where(tried, p)
        if q is not None:
            q = without(q, token)
    return law + left * p


def look(engine: Engine, seeds: list[int], number: int) -> tuple[Tensor | None, ...]:
    """p, q, tokens and exists, as in `Places`, of all images where they stand before step `number`."""
    from lantern_hpu.layout import Sampler
    from lantern_hpu.step import Step

    step, state = engine.step.function, engine.state
    assert isinstance(step, Step)
    drafts = engine.draft(seeds, number)
    length = step.slots.per_row(state.count) + step.prefix
    hidden = step.verify(drafts, length, state)[:, :1]
    p = Sampler(engine.target, engine.plan)(hidden, state)[:, 0]
    child = drafts.tables.child[:, 0]  # [B, C]
    q = None if drafts.q is None else drafts.q[:, 0]
    return p, q, drafts.tokens.gather(1, child.long()), child > 0


def find_places(
    pipeline: LanternPipeline, method: str, requests: list[Request], shares: list[float]
) -> Places:
    """A batch drawn by an exact method, each image up to its share of the whole."""
    import torch

    tree, _ = choose_method(method)
    engine, _ = pipeline.engine(requests, tree, len(requests))
    pipeline.warm_up(engine, requests[0])
    prefix = pipeline.prefix(engine, requests)
    seeds = [r.seed for r in requests]
    # One step past `until` must still be inside the image.
    last = pipeline.model.target.config.tokens - 1 - engine.longest
    until = [max(1, round(share * last)) for share in shares]
    known, number = engine.start(prefix, requests), 1
    found: dict[int, tuple[Tensor | None, ...]] = {}
    while len(found) < len(requests):
        new = [i for i in range(len(requests)) if i not in found and known[i] >= until[i]]
        if new:
            seen = look(engine, seeds, number)
            found |= {i: tuple(None if x is None else x[i].clone() for x in seen) for i in new}
        known, number = engine.advance(seeds, number, 1), number + 1
    parts = list(zip(*[found[i] for i in range(len(requests))], strict=True))
    p, q, tokens, exists = (None if part[0] is None else torch.stack(part) for part in parts)
    assert p is not None and tokens is not None and exists is not None
    return Places(engine, requests, p, q, tokens, exists)


def all_places(pipeline: LanternPipeline, method: str, args: Any, bar: tqdm[Any]) -> list[Places]:
    """As many images as asked for, their places evenly over the image, in batches."""
    found = []
    for start in range(0, args.images, BATCH):
        index = range(start, min(args.images, start + BATCH))
        requests = in_turn(PROMPTS, index, args.seed, pipeline.model.sampling)
        # Neighbours in the list lie far apart in the image, so that a batch has both ends of it.
        shares = [(i * 0.618 + 0.5 / args.images) % 1 for i in index]
        found.append(find_places(pipeline, method, requests, shares))
        bar.update(len(index))
    return found


def distances(
    place: Places, pipeline: LanternPipeline, row: Row, draws: int, seed: int
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


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of their mean; a single value has none."""
    if len(values) < 2:
        return None
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values))


def drawn(pipeline: LanternPipeline, row: Row, images: int, seed: int) -> dict[str, float]:
    """Tokens a step and milliseconds an image, one image at a time, after a first one."""
    from lantern_hpu.results import tokens_per_step

    tree, _ = choose_method(row.method)
    sampling = pipeline.model.sampling
    requests = in_turn(PROMPTS, range(images), seed, sampling, row.relaxation)
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
    if pipeline.model.sampling.greedy:
        raise OptionError(f"{pipeline.model.name} is greedy", "its tokens have no law to move")
    found: list[dict[str, Any]] = []
    with closing(pipeline), tqdm(total=total, unit="image", file=sys.stderr) as bar:
        places: dict[bool, list[Places]] = {}
        for row in rows:
            row = replace(row, relaxation=pipeline.fitted(row.relaxation))
            bar.set_description(row.name)
            grows, tv = row.method in GROWING, [0.0]  # `ar` draws from p itself
            with torch.no_grad():
                if row.method != "ar":
                    if grows not in places:
                        base = "eagle2" if grows else "eagle"
                        places[grows] = all_places(pipeline, base, args, bar)
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
        head = heading("lantern_hpu.fidelity", pipeline, argv)
    sizes = {name: getattr(args, name) for name in ("images", "draws", "timed")}
    return head | sizes | {"rows": found}


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
    around = row["tv_interval"]
    figure = f"{row['tv']:.3f}" + ("" if around is None else f" ± {around:.3f}")
    if row["method"] == "ar":
        return "0"
    return f"0 (measured {figure})" if row["relaxation"] == asdict(EXACT) else figure


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Check the options, measure, print and write."""
    rows = [Row.parse(text) for text in split(args.rows, "--rows")]
    for name in ("images", "draws", "timed"):
        require(getattr(args, name) >= 1, f"--{name}", getattr(args, name), "1 or more")
    from lantern_hpu.results import check_free

    if args.output:
        check_free([args.output], args.force)
    result = measure(args, rows, argv)
    show(result, table(result["rows"]), args)


def main(argv: Sequence[str] | None = None) -> int:
    """The `fidelity` command; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)
    return exit_code(lambda: run(args, given))


if __name__ == "__main__":
    sys.exit(main())
