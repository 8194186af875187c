"""The step: exact decoding keeps the distribution, caches stay true, images do not disturb each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_hpu.backends.base import Transfers
from lantern_hpu.backends.cpu.backend import CPUBackend
from lantern_hpu.core import Request
from lantern_hpu.decode.batch import Batch
from lantern_hpu.decode.state import DecodeState
from lantern_hpu.methods.relaxation import (
    Additive,
    Annealed,
    Blended,
    Clustered,
    Multiplicative,
    Relaxation,
)
from lantern_hpu.models.transformer import Drafter, Target, rope_table
from lantern_hpu.ops.buffers import additive_mask
from lantern_hpu.ops.kv_cache import KVCache
from lantern_hpu.tree import DraftTree, DynamicTree, Tree, load_static, load_tree
from tests.marks import mostly_slow
from tests.reference import Relaxed
from tests.tiny import (
    CONFIG,
    NAMES,
    SMALL_TREE,
    Decoded,
    Models,
    advance,
    circle,
    condition,
    decoded,
    draw,
    make_engine,
    prefix_for,
    request,
    ring,
    sample,
    spec_for,
    tiny_config,
    tiny_models,
)
from tests.twin import Twin, features, full_mask

AR = DraftTree.root_only()
GROWN = DynamicTree(top_k=3, expansions=2, drafts=8)
N = CONFIG.tokens
SETTINGS: dict[str, dict[str, Any]] = {
    "guided": {},
    "unguided": {"cfg_scale": 1.0},
    "top-k": {"top_k": 6},
    "top-p": {"top_p": 0.8, "temperature": 1.3},
    "greedy": {"temperature": 0.0},
    "greedy unguided": {"temperature": 0.0, "cfg_scale": 1.0},
}
SLOW_SETTINGS = [name for name in SETTINGS if name not in ("guided", "top-k")]
WITHOUT_PADS = {"rope": "1d", "rope_pairs": "half", "qk_norm": True}
PROMPTS = ["abcd", "xy", "q", "abc"]


def same_images(one: Decoded, other: Decoded) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert (one.steps, one.accepted, one.relaxed) == (other.steps, other.accepted, other.relaxed)


def batch(**settings: Any) -> list[Request]:
    return [request(prompt, 10 + seed, **settings) for seed, prompt in enumerate(PROMPTS)]


# The whole decoder against a slow loop


def slow_images(
    models: Models, tree: Tree, requests: Sequence[Request], rule: Relaxed | None = None
) -> list[list[int]]:
    images = []
    for one in requests:
        rows = condition(models[0].config, [one.prompt], one.sampling.cfg_scale != 1)[:2]
        images.append(Twin(models, one, *rows, rule).decode(tree))
    return images


CHAIN, NAMED, BROAD = map(load_tree, ("chain", "mc_sim_7b_63", "dynamic"))
FLAT = DraftTree.from_paths("flat", [[0], [1], [2]])
ENDS = (FLAT, *map(load_tree, ("dynamic:1x3x4", "dynamic:3x0x2")))  # of a tree's sizes


@pytest.mark.parametrize(
    ("tree", "settings"),
    [
        *((AR, "guided"), (SMALL_TREE, "guided"), (GROWN, "top-k"), (NAMED, "guided")),
        *mostly_slow([(AR, "top-k"), (SMALL_TREE, "top-k"), (GROWN, "guided")]),
        *mostly_slow((tree, "guided") for tree in (CHAIN, *ENDS)),
        *mostly_slow((tree, name) for tree in (AR, SMALL_TREE, GROWN) for name in SLOW_SETTINGS),
        *mostly_slow([(CHAIN, "top-k"), (CHAIN, "greedy"), (NAMED, "greedy"), (BROAD, "guided")]),
    ],
    ids=str,
)
def test_images_are_those_of_the_slow_loop(models: Models, tree: Tree, settings: str) -> None:
    requests = batch(**SETTINGS[settings])[: 2 if tree in (NAMED, BROAD) else 4]
    decoded = sample(models, tree, requests)
    assert decoded.tokens.tolist() == slow_images(models, tree, requests)
    if tree in (SMALL_TREE, GROWN):
        counts = torch.tensor(decoded.accepted).sum(0)
        assert 0 < counts[0] < sum(decoded.steps)  # some drafts were accepted, some refused


TOGETHER = {
    "exact": (Multiplicative(verify="block"), Relaxed()),
    "tv": (Blended(tv=0.2, verify="block"), Relaxed(tv=0.2)),
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("tree", mostly_slow([SMALL_TREE, CHAIN, FLAT, NAMED], SMALL_TREE), ids=str)
def test_images_of_drafts_verified_together_are_those_of_the_slow_loop(
    models: Models, tree: DraftTree, name: str
) -> None:
    relaxation, rule = TOGETHER[name]
    requests = batch(relaxation=relaxation)[: 1 if tree == NAMED else 4]
    decoded = sample(models, tree, requests)
    assert decoded.tokens.tolist() == slow_images(models, tree, requests, rule)
    other = sample(models, tree, batch(relaxation=replace(relaxation, verify="token")))
    if tree.depth > 1:
        assert decoded.tokens.tolist() != other.tokens.tolist()


@pytest.mark.parametrize(
    ("tree", "config", "drafter"),
    [
        (SMALL_TREE, {}, {"sees_pads": True}),
        (SMALL_TREE, {}, {"input_norm": True}),
        (SMALL_TREE, {}, {"likeness": 0.0}),
        (SMALL_TREE, {}, {"shift": 0}),
        pytest.param(GROWN, {}, {"shift": 0}, marks=pytest.mark.slow),
        (SMALL_TREE, {"prefix": 1}, {}),
        (SMALL_TREE, {"prefix": 2}, {}),
        (SMALL_TREE, WITHOUT_PADS, {}),
        pytest.param(GROWN, WITHOUT_PADS, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_variants_of_networks_equal_the_slow_loop(
    tree: Tree, config: dict[str, Any], drafter: dict[str, Any]
) -> None:
    models, requests = tiny_models(tiny_config(**config), **drafter), batch()
    assert sample(models, tree, requests).tokens.tolist() == slow_images(models, tree, requests)


RELAXED: list[tuple[Tree, Relaxation]] = [
    (SMALL_TREE, Multiplicative(6, lam=4.0)),
    (GROWN, Additive(6, bound=0.3)),
    (SMALL_TREE, Multiplicative(6, "official", lam=4.0)),
    (GROWN, Additive(6, "official", bound=0.3)),
    (SMALL_TREE, Clustered(distance=0.5)),
    (SMALL_TREE, Annealed(omega=2.0, nu=0.4)),
    (GROWN, Annealed(omega=2.0, nu=0.4)),
]


@pytest.mark.parametrize("settings", mostly_slow(["guided", "top-k", "greedy"], "guided"))
@pytest.mark.parametrize(
    ("tree", "rule"),
    mostly_slow(RELAXED, RELAXED[0], RELAXED[3], RELAXED[4], RELAXED[5]),
    ids=str,
)
def test_relaxed_images_are_those_of_the_slow_loop(
    models: Models, tree: Tree, rule: Relaxation, settings: str
) -> None:
    requests = batch(**SETTINGS[settings], relaxation=rule)
    decoded = sample(models, tree, requests)
    slow = Relaxed(
        neighbours=ring(32).tolist(),
        k=rule.k,
        delta=rule.delta,
        lam=rule.factor + 1,
        residual=rule.residual,
        weights=rule.weights(tree.depth) if rule.weighs else (),
        codes=circle(32).tolist() if rule.clusters else (),
        limits=rule.limits,
    )
    assert decoded.tokens.tolist() == slow_images(models, tree, requests, slow)
    assert sum(decoded.relaxed) > 0


def test_filters_come_in_the_order_of_the_family() -> None:
    """Each equals its slow loop, and where both cut the images differ."""
    requests, found = batch(top_k=3, top_p=0.6), []
    chain = load_static("chain")  # one child a node: few tokens are left
    for top_p_first in (False, True):
        models = tiny_models(tiny_config(top_p_first=top_p_first))
        tokens = sample(models, chain, requests).tokens.tolist()
        assert tokens == slow_images(models, chain, requests)
        found.append(tokens)
    assert found[0] != found[1]


# Exact means exact


@pytest.mark.parametrize("name", mostly_slow(NAMES, "chain", "mc_sim_7b_63"))
def test_greedy_fp32_equals_plain_ar(models: Models, name: str) -> None:
    requests = batch(temperature=0.0)
    drafted = sample(models, name, requests)
    assert drafted.tokens.tolist() == sample(models, AR, requests).tokens.tolist()
    assert max(drafted.steps) < N - 1


@pytest.mark.parametrize("residual", mostly_slow(["sound", "official"], "sound"))
@pytest.mark.parametrize("settings", mostly_slow(["guided", "top-k", "greedy"], "guided"))
@pytest.mark.parametrize(
    "rule",
    [
        Multiplicative(10, lam=1.0),
        Additive(10, bound=0.0),
        Multiplicative(0, lam=5.0),
        Additive(0, bound=0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "tree", mostly_slow([load_static("mc_sim_7b_63"), GROWN], GROWN), ids=lambda tree: tree.name
)
def test_relaxed_with_zero_bound_is_exact(
    models: Models, tree: Tree, rule: Relaxation, settings: str, residual: Any
) -> None:
    zero = batch(**SETTINGS[settings], relaxation=replace(rule, residual=residual))
    # The spec has a neighbour table all the same, as it would beside an image that is relaxed.
    relaxed = sample(models, tree, zero, neighbours=11, residual=residual)
    exact = sample(models, tree, batch(**SETTINGS[settings]))
    same_images(relaxed, exact)
    assert relaxed.relaxed == [0] * len(zero)


def bigram_models(config: Any) -> Models:
    """A target that looks at its last token alone, and a drafter that is exactly that target.

    Blocks that add nothing leave norm(embed(token)) as the target's feature. The drafter stores these
    vectors as its embedding and passes them on, so its guess is the feature itself.
    """
    target, drafter = tiny_models(config)
    with torch.no_grad():
        for block in [*target.layers, drafter.block]:
            block.attention.out.weight.zero_()
            block.ffn.down.weight.zero_()
        drafter.embed.weight.copy_(target.norm(target.embed.weight))
        eye = torch.eye(config.dim)
        drafter.fc.weight.copy_(torch.cat([eye, 0 * eye], 1))
    return target, drafter


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["chain", "naive_extend_57"])
def test_target_as_drafter_accepts_everything(name: str, settings: str) -> None:
    decoded = sample(bigram_models(tiny_config(grid=(5, 5))), name, batch(**SETTINGS[settings]))
    assert decoded.steps == [4] * len(PROMPTS)  # 24 tokens after the first, six a step
    assert decoded.accepted == [[4] * 5] * len(PROMPTS)


# Exact keeps the distribution

SMALL = tiny_config(vocab_size=6, dim=16, layers=1, ffn_dim=16, prefix=2, grid=(1, 3))
IMAGES, BATCHES = 3000, 2


def exact_probs(target: Target, sampling: Request) -> Tensor:
    """The probabilities of whole three-token images [6, 6, 6], by the chain rule over all contexts."""
    rows = condition(target.config, [sampling.prompt], sampling.sampling.cfg_scale != 1)[:2]
    twin = Twin((target, Drafter(target.config)), sampling, *rows)
    probs = torch.zeros(6, 6, 6, dtype=torch.float64)
    first = twin.target_probs([])
    for a in range(6):
        second = twin.target_probs([a])
        for b in range(6):
            third = torch.tensor(twin.target_probs([a, b]), dtype=torch.float64)
            probs[a, b] = first[a] * second[b] * third
    return probs


def count_images(models: Models, tree: Tree, **settings: Any) -> tuple[Tensor, Request]:
    """How often each three-token image was drawn [6, 6, 6], over many seeds."""
    requests = [request("ab", 0, **settings)] * IMAGES
    engine = make_engine(models, spec_for(tree, requests, config=models[0].config))
    counts = torch.zeros(6, 6, 6, dtype=torch.float64)
    for number in range(BATCHES):
        first = number * IMAGES
        requests = [request("ab", first + seed, **settings) for seed in range(IMAGES)]
        drawn = torch.from_numpy(draw(engine, requests).tokens)
        counts.index_put_(tuple(drawn.T), torch.ones(IMAGES, dtype=torch.float64), accumulate=True)
    return counts, requests[0]


def surprise(counts: Tensor, probs: Tensor) -> float:
    """Chi-square in standard deviations from its mean; rare cells are taken together."""
    expected, observed = (probs * counts.sum()).flatten(), counts.flatten()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    assert not observed[expected == 0].any()
    full = expected > 0
    chi2 = ((observed - expected)[full] ** 2 / expected[full]).sum()
    freedom = int(full.sum()) - 1
    return float((chi2 - freedom) / (2 * freedom) ** 0.5)


@pytest.fixture(scope="module")
def strangers() -> Models:
    """A target and a drafter that have nothing in common, so that drafts are often refused."""
    return tiny_models(SMALL, seed=3, likeness=0.0)


DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "unguided": {"cfg_scale": 1.0},
    "guided": {"cfg_scale": 2.0},
    "guided top-k": {"cfg_scale": 2.0, "top_k": 3},
    "unguided top-p": {"cfg_scale": 1.0, "top_p": 0.8, "temperature": 1.2},
}


@torch.no_grad()
@pytest.mark.parametrize("settings", mostly_slow(DISTRIBUTIONS, "guided top-k"))
@pytest.mark.parametrize(
    "tree", mostly_slow([AR, SMALL_TREE, GROWN], SMALL_TREE), ids=lambda tree: tree.name
)
def test_exact_keeps_distribution(strangers: Models, tree: Tree, settings: str) -> None:
    counts, one = count_images(strangers, tree, **DISTRIBUTIONS[settings])
    probs = exact_probs(strangers[0], one)
    assert int((probs > 0).sum()) > 20  # far from a trivial distribution
    assert surprise(counts, probs) < 4


@torch.no_grad()
def test_distribution_test_notices_a_wrong_distribution(strangers: Models) -> None:
    counts, one = count_images(strangers, SMALL_TREE, cfg_scale=1.0)
    warmer = request(one.prompt, cfg_scale=1.0, temperature=1.2)
    assert surprise(counts, exact_probs(strangers[0], warmer)) > 10


@pytest.mark.slow
@torch.no_grad()
def test_distribution_test_notices_relaxation(strangers: Models) -> None:
    counts, one = count_images(
        strangers, SMALL_TREE, cfg_scale=1.0, relaxation=Multiplicative(3, lam=3.0)
    )
    assert surprise(counts, exact_probs(strangers[0], one)) > 10


# Caches


def fresh_cache(
    model: Target | Drafter, x: Tensor, valid: Tensor, first: int, **inputs: Tensor
) -> KVCache:
    """The cache of one pass over a whole sequence; `first` is the slot of its first position."""
    config, rows, length = model.config, len(x), x.shape[1]
    layers = config.layers if isinstance(model, Target) else 1
    cpu = torch.device("cpu")
    cache = KVCache.allocate(layers, rows, length, config.kv, config.head_dim, torch.float32, cpu)
    rope = rope_table(config, first + length)[first:].expand(rows, -1, -1, -1)
    mask = additive_mask(full_mask(valid, length), torch.float32)
    whole = cache if isinstance(model, Target) else cache.layers[0]
    model(x, **inputs, rope=rope, mask=mask, cache=whole, index=torch.arange(rows * length))
    return cache


def move_pending(state: DecodeState, rows: int) -> None:
    """What the next step will move, moved one position after the other."""
    if state.moves is None:
        return
    images = len(state.moves.goal)
    for layer in state.kv_cache.layers:
        for tensor in layer.read():  # views [R, S, kv, hd]
            before = tensor.clone()
            for row in range(rows):
                pairs = zip(
                    state.moves.goal[row % images], state.moves.source[row % images], strict=True
                )
                for goal, source in pairs:
                    tensor[row, int(goal)] = before[row, int(source)]


def same_entries(got: KVCache, want: KVCache, rows: list[int]) -> None:
    for kept, wanted in zip(got.layers, want.layers, strict=True):
        for mine, fresh in zip(kept.read(), wanted.read(), strict=True):
            size = fresh.shape[1]
            torch.testing.assert_close(mine[rows][:, :size], fresh, rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("settings", ["guided", "greedy", "unguided"])
def test_caches_after_commit_are_those_of_a_fresh_pass(settings: str, steps: int) -> None:
    target, drafter = models = tiny_models(tiny_config(grid=(6, 6)))  # not done after three steps
    requests = batch(**SETTINGS[settings])
    spec = spec_for(load_static("naive_extend_57"), requests)
    engine = make_engine(models, spec)
    advance(engine, requests, steps)
    state, images = engine.state, len(requests)
    move_pending(state, spec.rows)
    prefix, valid, *_ = condition(CONFIG, PROMPTS, spec.guidance)
    for image in range(images):
        rows = list(range(image, spec.rows, images))
        count, owed = int(state.count[image]), int(state.drafting.pending_count[image])
        tokens = state.tokens.view(images, -1)[image, : count + 1]
        assert int(tokens[-1]) == int(state.root[image])
        shown = target.embed(tokens[:-1]).expand(len(rows), -1, -1)
        whole = torch.cat([prefix[rows], shown], 1)
        same_entries(state.kv_cache, fresh_cache(target, whole, valid[rows], 0), rows)
        # The drafter still owes the pairs of the last step.
        hidden = features(target, prefix[rows], valid[rows], tokens[:-1].tolist())
        stable = CONFIG.prefix + count - owed
        fillers = tokens.new_zeros(CONFIG.prefix - 1)
        ids = torch.cat([fillers, tokens])[:stable].expand(len(rows), -1)
        fresh = fresh_cache(drafter, ids, valid[rows], 1, features=hidden[:, :stable])
        same_entries(state.drafting.kv_cache, fresh, rows)


# Batches

MIXED = [
    request("abcd", 1),
    request("xy", 2, temperature=0.0),
    request("q", 3, top_k=5),
    request("abcd", 4, cfg_scale=5.0, top_p=0.7),
    request("abc", 5, temperature=0.6, relaxation=Multiplicative(6, lam=4.0)),
    request("abcd", 6, relaxation=Additive(3, bound=0.2)),
    request("xyz", 7, relaxation=Annealed(omega=1.5, nu=0.5)),
]


@pytest.mark.parametrize(
    "chosen",
    mostly_slow([AR, load_static("mc_sim_7b_63"), GROWN], AR, GROWN),
    ids=lambda tree: tree.name,
)
def test_image_independent_of_batch_neighbours(models: Models, chosen: Tree) -> None:
    together = sample(models, chosen, MIXED)
    backwards = sample(models, chosen, MIXED[::-1])
    for image, one in enumerate(MIXED):
        alone = sample(models, chosen, [one])
        tokens = alone.tokens[0].tolist()
        for many, place in ((together, image), (backwards, len(MIXED) - 1 - image)):
            assert many.tokens[place].tolist() == tokens
            assert many.steps[place] == alone.steps[0]
            assert many.accepted[place] == alone.accepted[0]
            assert many.relaxed[place] == alone.relaxed[0]


def test_engine_draws_the_same_batch_again_after_another_one(models: Models) -> None:
    engine = make_engine(models, spec_for(load_static("mc_sim_7b_63"), MIXED))
    first = draw(engine, MIXED)
    draw(engine, MIXED[::-1])
    again = draw(engine, MIXED)
    same_images(first, again)


def test_seeds_prompts_and_settings_change_the_image(models: Models) -> None:
    variants = [
        request("abcd", 1),
        request("abcd", 2),
        request("abce", 1),
        request("abcd", 1, cfg_scale=5.0),
        request("abcd", 1, temperature=0.0),
        request("abcd", 1, top_k=2),
    ]
    images = sample(models, SMALL_TREE, variants).tokens.tolist()
    assert len({tuple(image) for image in images}) == len(variants)


# Ends and counts


@pytest.mark.parametrize(
    "grid",
    [(3, 5), (1, 2), *(pytest.param(grid, marks=pytest.mark.slow) for grid in [(4, 4), (1, 7)])],
    ids=str,
)
@pytest.mark.parametrize(
    "tree",
    mostly_slow([AR, SMALL_TREE, GROWN, *map(load_static, NAMES)], AR, SMALL_TREE, GROWN),
    ids=lambda tree: tree.name,
)
def test_images_end_exactly_and_counts_add_up(tree: Tree, grid: tuple[int, int]) -> None:
    models, total = tiny_models(tiny_config(grid=grid)), grid[0] * grid[1]
    requests = [request("abcd", seed) for seed in range(8)]
    engine = make_engine(models, spec_for(tree, requests))
    batch = Batch(engine, partial(prefix_for, engine))
    batch.admit(requests)
    while batch.running:
        batch.advance()
    found = decoded(engine, requests)
    assert found.tokens.shape == (8, total)
    assert found.tokens.min() >= 0 and found.tokens.max() < CONFIG.vocab_size
    assert batch.steps == max(found.steps)  # no step after the slowest image was done
    for steps, accepted in zip(found.steps, found.accepted, strict=True):
        # Each step adds its accepted drafts and one token; the last bonus may lie past the end.
        assert steps + sum(accepted) in (total - 1, total)
        assert accepted == sorted(accepted, reverse=True)
        assert steps >= (accepted[0] if accepted else total - 1)


def test_image_of_one_token_needs_no_step() -> None:
    models = tiny_models(tiny_config(grid=(1, 1)))
    decoded = sample(models, SMALL_TREE, batch())
    assert decoded.tokens.tolist() == slow_images(models, SMALL_TREE, batch())
    assert decoded.steps == [0] * len(PROMPTS)


@pytest.mark.parametrize("grid", [(4, 4), (3, 5)], ids=str)
def test_overshoot_stays_in_range_and_leaves_finished_images_alone(grid: tuple[int, int]) -> None:
    config = tiny_config(grid=grid)
    models, requests = bigram_models(config), batch()
    tree = load_static("chain")  # all drafts are accepted: the widest overshoot
    engine = make_engine(models, spec_for(tree, requests))
    before = draw(engine, requests)
    assert engine.state.count.tolist() == [config.tokens - 1] * len(requests)
    with torch.no_grad():  # an index out of range raises an error here
        for number in range(20):
            engine.upload_uniforms([r.seed for r in requests], 100 + number, 1)
            engine.step()
    after = decoded(engine, requests)
    same_images(before, after)
    assert engine.state.count.tolist() == [config.tokens - 1] * len(requests)


# Looking inside


@pytest.mark.parametrize("settings", ["guided", "greedy"])
@pytest.mark.parametrize("tree", [AR, SMALL_TREE, GROWN], ids=lambda tree: tree.name)
def test_trace_draws_the_same_images_and_shows_how(
    models: Models, tree: Tree, settings: str
) -> None:
    requests = batch(**SETTINGS[settings])
    engine, times = make_engine(models, spec_for(tree, requests)), iter(range(10**6))
    want, known = draw(engine, requests), [1] * len(requests)
    for step in engine.trace(prefix_for(engine, requests), requests, clock=lambda: next(times)):
        assert step.before == known
        known = step.known
        assert step.drafts.tokens.shape == (len(requests), tree.size)
        total = step.accepted.probs.sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total))
        stages = ["draft", "tables", "verify", "accept", "commit"]
        assert list(step.seconds) == [
            s for s in stages if s != "tables" or isinstance(tree, DynamicTree)
        ]
        taken = step.drafts.tables.depth.gather(1, step.accepted.node[:, None].long())[:, 0]
        for old, new, more in zip(step.before, known, taken.tolist(), strict=True):
            assert new == min(old + more + 1, N)
    assert decoded(engine, requests).tokens.tolist() == want.tokens.tolist()


# Reading while the device goes on


class AheadTransfers(Transfers):
    """That of a device which would go on while the host reads; counts the reads."""

    runs_ahead, reads = True, 0

    def read(self, values: Tensor) -> Callable[[], list[int]]:
        self.reads += 1
        return super().read(values)


class Ahead(CPUBackend):
    transfers = AheadTransfers()


@pytest.mark.parametrize("tree", [AR, SMALL_TREE], ids=lambda tree: tree.name)
def test_reading_ahead_takes_the_same_steps(models: Models, tree: DraftTree) -> None:
    requests, backend = batch(), Ahead()
    plain = make_engine(models, spec_for(tree, requests))
    ahead = make_engine(models, spec_for(tree, requests))
    ahead.backend = backend
    batches = [Batch(e, partial(prefix_for, e)) for e in (plain, ahead)]
    for running in batches:
        running.admit(requests)
        while running.running:
            running.advance()
    want, got = (decoded(engine, requests) for engine in (plain, ahead))
    assert got.tokens.tolist() == want.tokens.tolist() and got.steps == want.steps
    # No step runs that the slowest image does not need.
    assert [running.steps for running in batches] == [max(want.steps)] * 2
    assert ahead.step.stats.replays == plain.step.stats.replays
    assert backend.transfers.reads > 0
