"""Options: what is out of range or contradicts itself is refused, with its name, its value and the allowed ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lantern_hpu.errors import OptionError, TreeError
from lantern_hpu.methods.methods import MAX_SEED, METHODS, Request, Sampling, choose_method
from lantern_hpu.methods.relaxation import (
    EXACT,
    Additive,
    Annealed,
    Clustered,
    Multiplicative,
    Relaxation,
    RelaxationOptions,
)

ADDITIVE = partial(Additive, 1)
MULTIPLICATIVE = partial(Multiplicative, 1)


def complete(method: str, **options: Any) -> Relaxation | None:
    return RelaxationOptions(**options).relaxation(METHODS[method].relaxation)


OUT_OF_RANGE: list[tuple[Callable[..., Any], str, float, str, str]] = [
    (Sampling, "cfg_scale", 0.9, "--cfg-scale", "1 (off) to 100"),
    (Sampling, "cfg_scale", 101, "--cfg-scale", "1 (off) to 100"),
    (Sampling, "cfg_scale", float("nan"), "--cfg-scale", "1 (off) to 100"),
    (Sampling, "temperature", -0.1, "--temperature", "0 (greedy), or 0.01 to 10"),
    (Sampling, "temperature", 10.5, "--temperature", "0 (greedy), or 0.01 to 10"),
    (Sampling, "top_k", -1, "--top-k", "0 (off) or more"),
    (Sampling, "top_p", 0.0, "--top-p", "above 0, up to 1 (off)"),
    (Sampling, "top_p", 1.1, "--top-p", "above 0, up to 1 (off)"),
    (Multiplicative, "k", -1, "--relax-k", "0 (exact) or more"),
    (ADDITIVE, "bound", -0.1, "--relax-delta", "0 (exact) to 1"),
    (ADDITIVE, "bound", 1.5, "--relax-delta", "0 (exact) to 1"),
    (MULTIPLICATIVE, "lam", 0.5, "--relax-lambda", "1 (exact) or more"),
    (MULTIPLICATIVE, "lam", float("nan"), "--relax-lambda", "1 (exact) or more"),
    (Annealed, "omega", -1, "--relax-omega", "0 to 1000; a weight up to 1 is exact"),
    (Annealed, "nu", 11, "--relax-nu", "-10 to 10"),
    (Annealed, "mu", float("nan"), "--relax-mu", "-10 to 10"),
    (Clustered, "distance", -0.1, "--relax-distance", "0 (exact) or more"),
    (Clustered, "distance", float("nan"), "--relax-distance", "0 (exact) or more"),
    (Clustered, "ranks", -1, "--relax-ranks", "0 (exact) to 1000"),
    (Clustered, "gap", 1.1, "--relax-gap", "0 (exact) to 1"),
]


@pytest.mark.parametrize(("make", "field", "value", "option", "allowed"), OUT_OF_RANGE)
def test_out_of_range_option_is_refused_by_name(
    make: Callable[..., Any], field: str, value: float, option: str, allowed: str
) -> None:
    with pytest.raises(OptionError) as refused:
        make(**{field: value})
    assert str(refused.value) == f"{option} is {value}: allowed: {allowed}"


def test_borders_of_every_range_are_allowed() -> None:
    for cfg_scale, temperature, top_p in ((1, 0, 1.0), (100, 10, 1e-6)):
        Sampling(cfg_scale, temperature, 0, top_p)
    for relaxation in (
        Additive(0, bound=0),
        Additive(1, bound=1),
        Multiplicative(1, lam=1),
    ):
        assert relaxation.residual == "sound"
    assert Request("x", MAX_SEED).seed == MAX_SEED


def test_temperature_zero_is_greedy() -> None:
    assert Sampling(temperature=0).greedy
    assert not Sampling(temperature=0.01).greedy


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delta": 0.1, "lam": 2.0}, "--relax-delta and --relax-lambda exclude each other"),
        ({"lam": 2.0, "omega": 2.0}, "--relax-lambda and --relax-omega exclude each other"),
        ({"preset": "delta-0.1", "lam": 2.0}, "--relax and --relax-lambda exclude each other"),
        ({"preset": "magic"}, "unknown preset 'magic'"),
        ({"omega": 2.0, "k": 3}, "--relax-k is 3"),
        ({"omega": 2.0, "distance": 0.5}, "--relax-omega and --relax-distance exclude each other"),
        ({"distance": 0.5, "k": 3}, "--relax-k is 3"),
        ({"preset": "gsd", "k": 3}, "--relax-k is 3"),
        ({"preset": "delta-0.1", "ranks": 3}, "belong to --relax-distance"),
        ({"gap": 0.1}, "--relax-ranks and --relax-gap belong to --relax-distance"),
        ({"nu": 1.0}, "--relax-nu and --relax-mu belong to --relax-omega"),
    ],
    ids=str,
)
def test_contradicting_relaxations_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        complete("lantern", **options)


@pytest.mark.parametrize(
    ("method", "options", "meant"),
    [
        ("lantern", {}, None),
        ("lantern", {"k": 5}, Additive(5, bound=0.2)),
        ("lantern++", {"k": 5}, Multiplicative(5, lam=5.0)),
        ("lantern++", {"delta": 0.1}, Additive(1000, bound=0.1)),
        ("lantern", {"lam": 3.0}, Multiplicative(10, lam=3.0)),
        ("lantern", {"preset": "lambda-20", "k": 7}, Multiplicative(7, lam=20.0)),
        ("lantern", {"residual": "official"}, Additive(1000, "official", 0.2)),
        ("lantern", {"omega": 1.5, "nu": 0.7}, Annealed(omega=1.5, nu=0.7)),
        ("scd", {"preset": "gsd"}, Clustered(0, "sound", 0.5, 7, 0.15)),
        ("scd", {"preset": "gsd", "ranks": 3}, Clustered(0, "sound", 0.5, 3, 0.15)),
        ("scd", {"distance": 0.2, "gap": 0.1}, Clustered(0, "sound", 0.2, 7, 0.1)),
    ],
    ids=str,
)
def test_what_is_not_said_is_the_published_default(
    method: str, options: dict[str, Any], meant: Relaxation | None
) -> None:
    assert complete(method, **options) == meant


def test_annealed_weights_fall_with_depth() -> None:
    weights = Annealed(omega=2.0, nu=0.5, mu=0.1).weights(4)
    want = [2.0 * math.exp(-0.5 * i - 0.1) for i in range(4)]
    assert weights == pytest.approx(want)
    assert Additive(3, bound=0.1).weights(2) == [1.0, 1.0]


def test_unknown_residual_lists_the_known_ones() -> None:
    with pytest.raises(
        OptionError, match="unknown residual 'lumina'\n  try: one of sound, official"
    ):
        Multiplicative(residual="lumina")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("relaxation", "active"),
    [
        (EXACT, False),
        (Multiplicative(10), False),
        (Multiplicative(10, lam=1.0), False),
        (Additive(10, bound=0.0), False),
        (Multiplicative(0, lam=5.0), False),
        (Additive(0, bound=0.5), False),
        (Multiplicative(1, lam=1.01), True),
        (Additive(1, bound=0.01), True),
        (Annealed(omega=1.0), False),
        (Annealed(omega=1.0, nu=0.1), True),
        (Annealed(omega=1.5), True),
        (Clustered(distance=0.0), False),
        (Clustered(distance=0.5, ranks=0), False),
        (Clustered(distance=0.5, gap=0.0), False),
        (Clustered(distance=0.5), True),
    ],
)
def test_relaxation_is_active_only_if_it_can_change_anything(
    relaxation: Relaxation, active: bool
) -> None:
    assert relaxation.active is active


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_empty_prompt_is_refused(prompt: str) -> None:
    with pytest.raises(OptionError, match="the prompt is empty"):
        Request(prompt)


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1])
def test_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(OptionError, match=f"--seed is {seed}"):
        Request("x", seed)


def test_methods_stand_for_their_tree_and_relaxation() -> None:
    tree, relaxation = choose_method("ar")
    assert (tree.size, relaxation) == (1, EXACT)
    tree, relaxation = choose_method("eagle")
    assert (tree.name, relaxation) == ("naive_extend_57", EXACT)
    tree, relaxation = choose_method("lantern++")
    assert (tree.name, relaxation) == ("naive_extend_57", Multiplicative(10, lam=5.0))
    tree, relaxation = choose_method("eagle2")
    assert (tree.name, relaxation) == ("dynamic:10x4x58", EXACT)
    tree, relaxation = choose_method("lantern", "dynamic:4x2x9")
    assert (tree.name, relaxation) == ("dynamic:4x2x9", Additive(1000, bound=0.2))
    mine = Additive(5, bound=0.2)
    tree, relaxation = choose_method("lantern++", "chain", mine)
    assert (tree.name, relaxation) == ("chain", mine)


def test_explicitly_exact_relaxation_is_not_replaced_by_the_default() -> None:
    exact = Multiplicative(10, lam=1.0)
    assert choose_method("lantern++", None, exact)[1] == exact
    assert not choose_method("lantern++", None, EXACT)[1].active


def test_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match="unknown method 'magic'") as refused:
        choose_method("magic")
    assert all(name in str(refused.value) for name in METHODS)


def test_method_refuses_options_it_has_no_use_for() -> None:
    with pytest.raises(OptionError, match="known to a loaded model alone"):
        choose_method("eagle", "auto")
    with pytest.raises(OptionError, match="--tree has no meaning for ar"):
        choose_method("ar", "chain")
    for method in ("ar", "eagle", "eagle2"):
        with pytest.raises(OptionError, match=f"{method} is exact"):
            choose_method(method, None, Multiplicative(10, lam=5.0))


@pytest.mark.parametrize(
    ("method", "tree", "kind"),
    [
        ("eagle", "dynamic", "static"),
        ("lantern++", "dynamic:4x2x9", "static"),
        ("eagle2", "chain", "dynamic"),
        ("lantern", "chain", "dynamic"),
    ],
)
def test_method_refuses_trees_of_the_other_kind(method: str, tree: str, kind: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f"{method} drafts a {kind} tree")):
        choose_method(method, tree)


def test_method_reports_an_unknown_tree() -> None:
    with pytest.raises(TreeError, match="unknown tree 'oak'"):
        choose_method("eagle", "oak")
