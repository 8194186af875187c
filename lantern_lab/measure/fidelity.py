"""How far a method moves the distribution of the next token: what a relaxation costs.

Exact decoding draws images up to places spread over the image. There the target's distribution p of the next token is
known, and so is, for given drafts, that of the token which acceptance lets through: `expectation` has the
chances and residuals of decoding, multiplied out instead of drawn. Averaged over the drafts this is the method's own,
and

    TV = 1/2 sum |method's - p|

is the share of next tokens that are not the model's own choice. A dynamic tree's drafts are not drawn, so one
evaluation is exact. A static tree's are: `averaged_expectation` sums over all codes that a child may be, and draws
only which code the refused siblings before it were. That leaves little noise even where thousands of codes are
likely, and the figure of `eagle`, whose TV is 0, says how much. The interval is that of the mean over the places.

The measured token is the first of a step. Tokens a step and milliseconds an image are those of real drawing.

What smaller weights cost is the same distance between the two models' distributions, each after guidance, temperature
and filters: at all tokens but the first of images that the model draws as it is, and the quantised one only reads.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.core import Request
from lantern_hpu.decode.engine import Engine, StepTrace, upload_prefix, upload_settings
from lantern_hpu.decode.rules import Blend, Node, Rules
from lantern_hpu.decode.state import Bounds
from lantern_hpu.errors import OptionError
from lantern_hpu.methods.relaxation import Relaxation
from lantern_hpu.methods.request import in_turn
from lantern_hpu.methods.setting import METHODS, Resolved, Setting
from lantern_hpu.models.text.prefix import Prefix
from lantern_hpu.ops.sampling import gather, sample
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import tokens_per_step
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.results.prompts import usual_prompts
from lantern_hpu.tree import DraftTree, Tree
from lantern_lab.measure.meter import Meter, take_turns, usual_requests
from lantern_lab.measure.options import FidelityOptions
from lantern_lab.measure.rows import Case, Row

BATCH = 8  # images whose places are found together
MOST_NUMBERS = 2**23  # of a table that is made for several draws together


@dataclass
class Place:
    """Where an image stands before a step: what the distribution of its next token depends on."""

    p: Tensor  # [1, V] the target's probabilities after the root
    q: Tensor | None  # [1, V] the drafter's; None: the drafts are not drawn
    tokens: Tensor  # [1, C] the root's children
    exists: Tensor  # [1, C] bool

    @classmethod
    def of(cls, step: StepTrace, image: int) -> Place:
        """Of one image; a copy, as the trace continues."""
        drafts, one = step.drafts, slice(image, image + 1)
        child = drafts.tables.child[one, 0]  # [1, C]
        q = None if drafts.q is None else drafts.q[one, 0].clone()
        tokens = gather(drafts.tokens[one], 1, child)
        return cls(step.accepted.probs[one, 0].clone(), q, tokens, child > 0)


def prompts_of(pipeline: LanternPipeline) -> Sequence[str]:
    return usual_prompts(pipeline.model.condition.classes)


def tries_drafts(setting: Resolved) -> bool:
    """Whether drafts are tried; `ar` and `jacobi` draw each token from the target's own distribution.

    On a fixed schedule nothing is tried, and the meter tells what that costs.
    """
    method = METHODS[setting.method]
    return method.drafts and method.rule != "jacobi" and not setting.commit


# ------------------------------------------------------------------------------------ places


def find_places(
    pipeline: LanternPipeline, tree: Tree, requests: Sequence[Request], shares: Sequence[float]
) -> list[Place]:
    """Of a batch that is drawn with this tree, each image up to its share of the whole."""
    engine = pipeline.engines.get(pipeline.spec(requests, tree, len(requests)))
    # One step past its place an image must not be over.
    last = pipeline.model.target.config.tokens - 1 - engine.spec.max_step_tokens
    until = [max(1, round(share * last)) for share in shares]
    result: dict[int, Place] = {}
    for step in engine.trace(pipeline.prefix(engine, requests), requests):
        for image, known in enumerate(step.before):
            if image not in result and known >= until[image]:
                result[image] = Place.of(step, image)
        if len(result) == len(requests):
            break
    return [result[image] for image in range(len(requests))]


def all_places(
    pipeline: LanternPipeline, tree: Tree, options: FidelityOptions, bar: ProgressBar
) -> list[Place]:
    """As many as asked for, one an image and evenly over the images, which are drawn exactly."""
    result: list[Place] = []
    for start in range(0, options.images, BATCH):
        index = range(start, min(options.images, start + BATCH))
        requests = in_turn(prompts_of(pipeline), index, options.seed, pipeline.model.sampling)
        # Neighbours in the list are far apart in the image, so that a batch has both ends of it.
        shares = [(i * 0.618 + 0.5 / options.images) % 1 for i in index]
        result += find_places(pipeline, tree, requests, shares)
        bar.update(len(index))
    return result


# ------------------------------------------------------------------------------------ distances


def tv_distances(
    pipeline: LanternPipeline,
    tree: Tree,
    places: Sequence[Place],
    relaxation: Relaxation,
    options: FidelityOptions,
) -> list[float]:
    request = Request("any", sampling=pipeline.model.sampling, relaxation=relaxation)
    spec, device = pipeline.spec([request], tree, 1), pipeline.backend.device
    neighbours, codes = pipeline.model.code_tables(spec.neighbours, spec.ranks)
    rules = Rules(spec, neighbours, codes).to(device)
    bounds = Bounds.of([relaxation], 1, device)
    generator, result = torch.Generator().manual_seed(options.seed), []
    for place in places:
        uniform = torch.rand(options.draws, place.tokens.shape[1], generator=generator)
        result.append(tv_at(place, rules, bounds, uniform.to(device)))
    return result


def tv_at(place: Place, rules: Rules, bounds: Bounds, uniform: Tensor) -> float:
    """The TV at a place.

    Args:
        bounds: of one image.
        uniform: [n, C], for n draws of the refused drafts, where drafts are drawn.
    """
    if place.q is None:
        expected = expectation(rules, root(place.p, None, bounds), place.tokens, place.exists)
    else:
        together = max(1, MOST_NUMBERS // (place.p.shape[1] * width_of(rules)))
        parts = uniform[:, : int(place.exists.sum())].split(together)
        sums = [
            averaged_expectation(rules, place.p, place.q, part, bounds).sum(0) for part in parts
        ]
        expected = torch.stack(sums).sum(0) / len(uniform)
    return float((expected - place.p).abs().sum()) / 2


def width_of(rules: Rules) -> int:
    """Numbers that are gathered for each draft that is tried."""
    neighbours, clusters = rules.neighbours, rules.clusters
    near = 0 if neighbours is None else neighbours.table.shape[1]
    return max(1, near, 0 if clusters is None else len(clusters.offset) * clusters.codes.shape[1])


def root(p: Tensor, q: Tensor | None, bounds: Bounds) -> Node:
    """A root with these probabilities."""
    return Node(p, q, bounds.weight[:, :1], bounds)


def blend_at(rules: Rules, node: Node) -> Blend | None:
    q = None if node.q is None else node.q[:, None]
    return rules.blend(node.p[:, None], q, node.bounds)


def expectation(rules: Rules, node: Node, tokens: Tensor, exists: Tensor) -> Tensor:
    """`Rules.siblings` averaged over its uniforms: probabilities of the token after the node [B, V].

    Args:
        tokens: [B, c] the children's in the order they are tried. exists: [B, c] bool.
    """
    result, left = torch.zeros_like(node.p), torch.ones_like(node.p[:, :1])
    blend = blend_at(rules, node)
    for child in range(tokens.shape[1]):
        token = tokens[:, child : child + 1]
        trial = rules.trial(node, token, blend if child == 0 else None)
        mass = trial.mass if trial.drawn is None else trial.mass / trial.drawn
        tried = trial.really_drawn(exists[:, child])[:, None]
        chance = mass.clamp(max=1).where(tried, 0.0)  # [B, 1]
        result = result.scatter_add(1, token.long(), left * chance)
        left = left * (1 - chance)  # [B, 1] chance that every child so far was refused
        node = replace(trial.rest, p=torch.where(tried, trial.rest.p, node.p))
    return result + left * node.p


def averaged_expectation(
    rules: Rules, p: Tensor, q: Tensor, uniform: Tensor, bounds: Bounds
) -> Tensor:
    """`expectation` averaged over drawn children, but for the codes of the refused ones, which are drawn.

    Args:
        p, q: [1, V] the target's and the drafter's probabilities at a node.
        uniform: [n, c], one a child.

    Returns n estimates [n, V] of the probabilities of the token after the node; without bias.
    """
    p, q = p.expand(len(uniform), -1), q.expand(len(uniform), -1)  # [n, V]
    every = torch.arange(p.shape[1], device=p.device).expand_as(p)  # [n, V] codes a child may be
    result, left, node = torch.zeros_like(p), torch.ones_like(p[:, :1]), root(p, q, bounds)
    blend = blend_at(rules, node)
    for child in range(uniform.shape[1]):
        # [n, V] what each code would be accepted with
        mass, _ = rules.accept_mass(node, every, node.p)
        assert node.q is not None
        if blend is not None and child == 0:
            mass = blend.accept_mass(mass, node.q)
        passed = torch.minimum(mass, node.q)  # [n, V] drawn and accepted
        result = result + left * passed
        refused = (node.q - passed).clamp(min=0)  # [n, V] drawn and refused
        share = refused.sum(-1, keepdim=True)  # [n, 1]
        token = sample(refused / share.clamp(min=1e-30), uniform[:, child])[:, None]
        rest = rules.trial(node, token).rest
        node = replace(rest, p=torch.where(share > 0, rest.p, node.p))
        left = left * share
    return result + left * node.p


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of their mean; a single value has none."""
    if len(values) < 2:
        return None
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values))


# ------------------------------------------------------------------------------------ all of it


def speed(pipeline: LanternPipeline, case: Case, options: FidelityOptions) -> dict[str, float]:
    """Tokens a step and milliseconds an image, one image at a time."""
    meter = Meter(pipeline, case, usual_requests(pipeline, case, options.timed, options.seed))
    with ProgressBar(disable=True) as bar:
        take_turns([meter], options.timed, bar)
    records = [record for batch in meter.batches for record in batch.records]
    seconds = sum(batch.seconds for batch in meter.batches)
    return {
        "tokens_per_step": tokens_per_step(records),
        "ms_per_image": 1000 * seconds / options.timed,
    }


def metered_tv(
    pipeline: LanternPipeline, setting: Resolved, options: FidelityOptions
) -> list[float]:
    """What the meter says of each image, as the mean of a token."""
    index, sampling = range(options.images), pipeline.model.sampling
    requests = in_turn(prompts_of(pipeline), index, options.seed, sampling, setting.relaxation)
    records = pipeline.draw(requests, setting, BATCH, decode=False).records
    return [record.tv_mean or 0.0 for record in records]


@torch.no_grad()
def fidelity_rows(
    pipeline: LanternPipeline,
    settings: Sequence[Setting],
    options: FidelityOptions,
    bar: ProgressBar,
) -> Iterator[Row]:
    """A row a setting; `row` of its figures is how it was asked for."""
    if pipeline.model.sampling.greedy:
        why = "its tokens have no distribution to move"
        raise OptionError(f"{pipeline.model.name} is greedy", why)
    places: dict[Tree, list[Place]] = {}  # methods that draft alike share them
    for asked in settings:
        bar.set_description(str(asked))
        setting = pipeline.resolve(asked)
        tree = setting.tree
        tv = [0.0]  # what tries nothing draws from p itself
        if tries_drafts(setting):
            if tree not in places:
                places[tree] = all_places(pipeline, tree, options, bar)
            tv = tv_distances(pipeline, tree, places[tree], setting.relaxation, options)
        elif setting.commit > 1:
            tv = metered_tv(pipeline, setting, options)
        bar.update(options.images)
        case = Case(setting, pipeline.fit.graphs, 1)
        drawn = speed(pipeline, case, options)
        bar.update(options.timed)
        moved = {
            "row": str(asked),
            "places": len(tv),
            "tv": statistics.fmean(tv),
            "tv_interval": interval(tv) if tv != [0.0] else 0.0,
        }
        yield Row.of(case, moved | drawn)


def follow(
    engine: Engine, prefix: Prefix, requests: Sequence[Request]
) -> Generator[Tensor, Tensor, None]:
    """Read images that another engine draws, a token a step: yields the probs [B, V] behind each token [B] sent."""
    state = engine.state
    with engine.pinned():
        upload_prefix(engine, prefix, state.prefill)
        upload_settings(engine, requests, state.prefill)
        engine.prefill_function(state)
        root = yield state.uniforms  # of no meaning: a generator is begun so
        while True:
            state.root.copy_(root)
            state.cursor.zero_()
            made = dict(engine.step_function.stages(state))
            root = yield made["accept"].probs[:, 0]


def batch_tv(whole: LanternPipeline, small: LanternPipeline, requests: Sequence[Request]) -> Tensor:
    """At each token of a batch but its first: [B, N - 1]."""
    tree, size = DraftTree.root_only(), len(requests)
    leader, follower = (p.engines.get(p.spec(requests, tree, size)) for p in (whole, small))
    following = follow(follower, small.prefix(follower, requests), requests)
    next(following)
    result = []
    for number, step in enumerate(leader.trace(whole.prefix(leader, requests), requests)):
        p = step.accepted.probs[:, 0]  # [B, V]
        other = following.send(leader.token_rows()[:, number])
        result.append((p - other).abs().sum(-1) / 2)
    following.close()
    return torch.stack(result, 1)


@torch.no_grad()
def weights_cost(
    whole: LanternPipeline, small: LanternPipeline, options: FidelityOptions, bar: ProgressBar
) -> dict[str, Any]:
    """Total variation of a token's distribution that smaller weights cost, on images of the same model as it is.

    `tokens` were measured of all images; `tv` is their mean, its interval that of the images' means.
    """
    bar.set_description("weights")
    parts = []
    for index in torch.arange(options.images).split(BATCH):
        sampling = whole.model.sampling
        requests = in_turn(prompts_of(whole), index.tolist(), options.seed, sampling)
        parts.append(batch_tv(whole, small, requests))
        bar.update(len(requests))
    tv = torch.cat(parts)  # [images, N - 1]
    return {
        "images": options.images,
        "tokens": tv.numel(),
        "tv": float(tv.mean()),
        "tv_interval": interval(tv.mean(1).tolist()),
        "tv_largest": float(tv.max()),
    }


def images_total(
    pipeline: LanternPipeline, settings: Sequence[Setting], options: FidelityOptions
) -> int:
    resolved = [pipeline.resolve(setting) for setting in settings]
    trees = {setting.tree for setting in resolved if tries_drafts(setting)}
    return options.images * (len(trees) + len(settings)) + options.timed * len(settings)
