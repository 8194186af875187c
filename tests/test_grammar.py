"""What closes a row of codes stands at every row's end and nowhere else, by every method."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch

from lantern_hpu.methods.relaxation import EXACT
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.ops.sampling import RowEnds
from lantern_hpu.tree import DraftTree, Rule, Tree, Window
from tests import tiny
from tests.marks import mostly_slow

CODES = 32
CONFIG = tiny.tiny_config(
    vocab_size=CODES + 1, row_ends=True, rope="1d", rope_pairs="half", grid=(4, 4)
)
AT_ENDS = torch.arange(1, CONFIG.tokens + 1) % 5 == 0
# Deeper than a row is long, so that drafts cross rows' ends
DEEP = DraftTree.from_paths(
    "deep", [[0], [1], [0, 0], [0, 1], [0, 0, 0], [0] * 4, [0] * 5, [0] * 6]
)


def tree_of(method: str) -> Tree:
    return DEEP if METHODS[method].tree == "static" else METHODS[method].default_tree()


def test_a_row_counts_its_end() -> None:
    assert (CONFIG.columns, CONFIG.tokens, CONFIG.codes) == (5, 20, CODES)
    plain = dataclasses.replace(CONFIG, row_ends=False)
    assert (plain.columns, plain.tokens, plain.codes) == (4, 16, CODES + 1)
    with pytest.raises(ValueError, match="row's end"):
        dataclasses.replace(CONFIG, rope="2d")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_a_rows_end_may_stand_at_a_rows_end(dtype: torch.dtype) -> None:
    grammar = RowEnds(4, 20, CODES + 1)
    logits = torch.full((2, 24, CODES + 1), 5.0, dtype=dtype)
    place = torch.arange(24, dtype=torch.int32).expand(2, -1)
    conditional, bare = grammar(logits, place).float().chunk(2)
    guided = bare + 7.5 * (conditional - bare)  # guidance keeps what is forbidden forbidden
    for scale in (0.01, 1.0, 10.0):
        probs = (guided / scale).softmax(-1)[0]
        assert not probs.isnan().any()
        for t in range(24):
            at_end = min(t, 19) % 5 == 4  # places past the picture count as its last
            want = torch.full((CODES + 1,), 0.0 if at_end else 1 / CODES)
            want[-1] = float(at_end)
            torch.testing.assert_close(probs[t], want)


@pytest.mark.parametrize("temperature", mostly_slow([0.0, 1.0], 1.0))
@pytest.mark.parametrize("method", METHODS)
def test_row_ends_stand_where_they_must(method: str, temperature: float) -> None:
    """Also with drafts that cross rows' ends, with top-k, and with a drafter that would draw them elsewhere."""
    relaxation = METHODS[method].relaxation
    if relaxation is not None:
        relaxation = dataclasses.replace(relaxation, k=min(relaxation.k, CODES - 1))
    models = tiny.tiny_models(CONFIG)
    settings: dict[str, Any] = {
        "temperature": temperature,
        "top_k": 6,
        "relaxation": relaxation or EXACT,
    }
    requests = [tiny.request(p, seed, **settings) for seed, p in enumerate(("ab", "cdef", "gh"))]
    result = tiny.sample(models, tree_of(method), requests)
    tokens = torch.from_numpy(result.tokens)
    assert tokens.shape == (3, 20)
    assert torch.equal(tokens == CODES, AT_ENDS.expand(3, -1))


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].drafts])
def test_greedy_drafts_give_the_tokens_of_plain_decoding(method: str) -> None:
    models = tiny.tiny_models(CONFIG, 3)
    requests = [tiny.request(p, seed, temperature=0.0) for seed, p in enumerate(("ab", "cdef"))]
    plain = tiny.sample(models, METHODS["ar"].default_tree(), requests)
    drafted = tiny.sample(models, tree_of(method), requests)
    assert (plain.tokens == drafted.tokens).all()
    assert max(drafted.steps) <= 19  # a row's end is drafted and accepted like any other token


def test_a_rows_end_is_always_accepted() -> None:
    """A chain of one draft after the last code of a row: target and drafter both give the end all mass."""
    models = tiny.tiny_models(CONFIG, likeness=0.0)
    requests = [tiny.request("ab", seed) for seed in range(20)]
    steps = tiny.sample(models, "chain", requests, images=20).steps
    assert (
        max(steps) <= 19 - 3
    )  # four ends, of which the first can be the one token that a step needs


@pytest.mark.parametrize("temperature", mostly_slow([0.0, 1.0], 1.0))
@pytest.mark.parametrize("rule", get_args(Rule))
def test_row_ends_stand_where_they_must_on_a_fixed_schedule(rule: Any, temperature: float) -> None:
    tree = Window.of(rule, 12, commit=7)  # more than a row in each step
    requests = [tiny.request(p, 2, temperature=temperature) for p in ("ab", "cdef", "gh")]
    result = tiny.sample(tiny.tiny_models(CONFIG), tree, requests)
    assert torch.equal(torch.from_numpy(result.tokens) == CODES, AT_ENDS.expand(3, -1))
    assert result.steps == [3] * 3
    alone = tiny.sample(tiny.tiny_models(CONFIG), Window.of(rule, 12, commit=1), requests)
    plain = tiny.sample(tiny.tiny_models(CONFIG), Window.of("jacobi", 0), requests)
    assert rule == "sjd-pac" or (alone.tokens == plain.tokens).all()


@pytest.mark.parametrize("commit", [None, 5])
@pytest.mark.parametrize("rule", get_args(Rule))
def test_a_windows_drafts_are_what_may_stand_at_their_places(rule: Any, commit: int | None) -> None:
    """The first ones too, which have no distribution of their own, and those that enter behind a row's end."""
    tree = Window.of(rule, 12, commit=commit)
    requests = [tiny.request(p, seed) for seed, p in enumerate(("ab", "cdef", "gh"))]
    engine = tiny.make_engine(
        tiny.tiny_models(CONFIG), tiny.spec_for(tree, requests, config=CONFIG)
    )
    for steps in range(5 if commit is None else 3):
        tiny.advance(engine, requests, steps)
        own = engine.state.drafting
        place = engine.state.count[:, None] + 1 + torch.arange(tree.width)  # [B, W]
        inside = place < CONFIG.tokens
        ends = AT_ENDS[place.clamp(max=CONFIG.tokens - 1)]
        assert torch.equal((own.drafts == CODES)[inside], ends[inside])
        assert bool(ends[inside].any())
        if own.q is not None:
            torch.testing.assert_close(own.q[..., CODES][inside], ends[inside].float())
            torch.testing.assert_close(own.q.sum(-1), torch.ones(own.q.shape[:2]))
