"""Options: what is out of range or contradicts itself is refused, with its name, its value and the allowed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lantern_hpu.config import (
    EXACT,
    MAX_SEED,
    METHODS,
    Relaxation,
    Request,
    Sampling,
    choose_method,
)
from lantern_hpu.errors import OptionError, TreeError

OUT_OF_RANGE: list[tuple[Callable[..., Any], str, float, str, str]] = [
    (Sampling, "cfg_scale", 0.9, "--cfg-scale", "1 (off) to 100"),
    (Sampling, "cfg_scale", 101, "--cfg-scale", "1 (off) to 100"),
    (Sampling, "cfg_scale", float("nan"), "--cfg-scale", "1 (off) to 100"),
    (Sampling, "temperature", -0.1, "--temperature", "0 (greedy), or 0.01 to 10"),
    (Sampling, "temperature", 10.5, "--temperature", "0 (greedy), or 0.01 to 10"),
    (Sampling, "top_k", -1, "--top-k", "0 (off) or more"),
    (Sampling, "top_p", 0.0, "--top-p", "above 0, up to 1 (off)"),
    (Sampling, "top_p", 1.1, "--top-p", "above 0, up to 1 (off)"),
    (Relaxation, "k", -1, "--relax-k", "0 (exact) or more"),
    (Relaxation, "delta", -0.1, "--relax-delta", "0 (exact) to 1"),
    (Relaxation, "delta", 1.5, "--relax-delta", "0 (exact) to 1"),
    (Relaxation, "lam", 0.5, "--relax-lambda", "1 (exact) or more"),
    (Relaxation, "lam", float("nan"), "--relax-lambda", "1 (exact) or more"),
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
    for relaxation in (Relaxation(0, delta=0), Relaxation(1, delta=1), Relaxation(1, lam=1)):
        assert relaxation.residual == "sound"
    assert Request("x", MAX_SEED).seed == MAX_SEED


def test_temperature_zero_is_greedy() -> None:
    assert Sampling(temperature=0).greedy
    assert not Sampling(temperature=0.01).greedy


def test_delta_and_lambda_exclude_each_other() -> None:
    with pytest.raises(OptionError, match="--relax-delta and --relax-lambda exclude each other"):
        Relaxation(k=10, delta=0.1, lam=2.0)


def test_unknown_residual_lists_the_known_ones() -> None:
    with pytest.raises(
        OptionError, match="unknown residual 'lumina'\n  try: one of sound, official"
    ):
        Relaxation(residual="lumina")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("relaxation", "active"),
    [
        (EXACT, False),
        (Relaxation(k=10), False),
        (Relaxation(k=10, lam=1.0), False),
        (Relaxation(k=10, delta=0.0), False),
        (Relaxation(k=0, lam=5.0), False),
        (Relaxation(k=0, delta=0.5), False),
        (Relaxation(k=1, lam=1.01), True),
        (Relaxation(k=1, delta=0.01), True),
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
    assert (tree.name, relaxation) == ("naive_extend_57", Relaxation(k=10, lam=5.0))
    mine = Relaxation(k=5, delta=0.2)
    tree, relaxation = choose_method("lantern++", "chain", mine)
    assert (tree.name, relaxation) == ("chain", mine)


def test_explicitly_exact_relaxation_is_not_replaced_by_the_default() -> None:
    exact = Relaxation(k=10, lam=1.0)
    assert choose_method("lantern++", None, exact)[1] == exact
    assert not choose_method("lantern++", None, EXACT)[1].active


def test_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match="unknown method 'magic'") as refused:
        choose_method("magic")
    assert all(name in str(refused.value) for name in METHODS)


def test_method_refuses_options_it_has_no_use_for() -> None:
    with pytest.raises(OptionError, match="--tree has no meaning for ar"):
        choose_method("ar", "chain")
    for method in ("ar", "eagle"):
        with pytest.raises(OptionError, match=f"{method} is exact"):
            choose_method(method, None, Relaxation(k=10, lam=5.0))


def test_method_reports_an_unknown_tree() -> None:
    with pytest.raises(TreeError, match="unknown tree 'oak'"):
        choose_method("eagle", "oak")
