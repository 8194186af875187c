"""Ways to record the step: each draws the same image, and the strict one refuses what no graph can record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lantern_hpu.backends.base import get_backend
from lantern_hpu.core import Request
from lantern_hpu.errors import CaptureError, DeviceError
from lantern_hpu.graphs import RUNNERS, make_runner
from lantern_hpu.graphs.strict import StrictRunner
from lantern_hpu.methods.relaxation import (
    PRESETS,
    Additive,
    Annealed,
    Blended,
    Clustered,
    Multiplicative,
    Relaxation,
)
from lantern_hpu.tree import DraftTree, DynamicTree, Tree, load_static, load_tree
from tests.marks import mostly_slow
from tests.tiny import (
    decoded,
    draw,
    make_engine,
    prefix_for,
    request,
    sample,
    spec_for,
    tiny_config,
    tiny_models,
)

AR = DraftTree.root_only()
RELAXED = Multiplicative(6, lam=4.0)
GROWN = DynamicTree(3, 2, 8)
CLUSTERS = Clustered(distance=100.0, ranks=3)
TV = Blended(tv=0.2, budget=1.0)
TOGETHER, TOGETHER_TV = Multiplicative(verify="block"), replace(TV, verify="block")
OFFICIAL = Additive(6, "official", 0.3)
SMALL = load_static("broad_7")
METHODS: dict[str, tuple[Tree, dict[str, Any]]] = {
    "ar": (AR, {}),
    "ar greedy": (AR, {"temperature": 0.0}),
    "eagle": (load_static("naive_extend_57"), {}),
    "eagle unguided": (SMALL, {"cfg_scale": 1.0}),
    "eagle greedy": (SMALL, {"temperature": 0.0}),
    "eagle top-k, top-p": (SMALL, {"top_k": 8, "top_p": 0.9}),
    "lantern++": (SMALL, {"relaxation": RELAXED}),
    "lantern++ greedy": (SMALL, {"temperature": 0.0, "relaxation": RELAXED}),
    "lantern++ official": (SMALL, {"relaxation": OFFICIAL}),
    "lantern++ annealed": (SMALL, {"relaxation": Annealed(omega=1.5, nu=0.5)}),
    "lantern++ tv": (SMALL, {"relaxation": TV}),
    "lantern++ tv together": (load_static("mc_sim_7b_63"), {"relaxation": TOGETHER_TV}),
    "lantern++ clusters": (SMALL, {"relaxation": CLUSTERS}),
    "eagle together": (load_static("chain"), {"relaxation": TOGETHER}),
    "eagle2": (DynamicTree(), {}),
    "eagle2 greedy": (GROWN, {"temperature": 0.0}),
    "lantern": (GROWN, {"relaxation": Additive(6, bound=0.3)}),
    "lantern official": (GROWN, {"relaxation": OFFICIAL}),
    "lantern greedy": (GROWN, {"temperature": 0.0, "relaxation": RELAXED}),
    "jacobi": (load_tree("jacobi:6"), {}),
    "jacobi alone": (load_tree("jacobi:0"), {}),
    "scd": (load_tree("scd:6"), {"top_k": 8, "top_p": 0.9}),
    "scd relaxed": (load_tree("scd:6"), {"relaxation": RELAXED}),
    "scd clusters": (load_tree("scd:6"), {"relaxation": CLUSTERS, "top_k": 20}),
    "scd tv": (load_tree("scd:6"), {"relaxation": TV, "top_k": 20}),
    "sjd-pac": (load_tree("sjd-pac:6:3x2"), {}),
    "sjd-pac greedy": (load_tree("sjd-pac:6:3x2"), {"temperature": 0.0}),
    "sjd-pac relaxed": (load_tree("sjd-pac:6"), {"relaxation": RELAXED}),
    "sjd-pac tv": (load_tree("sjd-pac:6"), {"relaxation": PRESETS["tv"]}),
    "sjd-pac clusters": (load_tree("sjd-pac:6"), {"relaxation": CLUSTERS}),
}


QUICK = ("ar", "lantern++", "scd tv")
WINDOWS = [load_tree("scd:6"), load_tree("sjd-pac:6:3x2")]


def batch(**settings: Any) -> list[Request]:
    return [request("abcd", 1, **settings), request("xy", 2, **settings)]


# The real step


@pytest.mark.parametrize("method", mostly_slow(METHODS, *QUICK))
def test_step_is_capture_legal(method: str) -> None:
    tree, settings = METHODS[method]
    models, requests = tiny_models(), batch(**settings)
    strict = make_engine(models, spec_for(tree, requests), "strict")
    decoded = draw(strict, requests)
    eager = sample(models, tree, requests)
    assert decoded.tokens.tolist() == eager.tokens.tolist()
    assert (decoded.steps, decoded.accepted, decoded.relaxed) == (
        eager.steps,
        eager.accepted,
        eager.relaxed,
    )
    report = strict.report()
    assert (report.runner, report.captures, report.recompiles_after_warmup) == ("strict", 2, 0)
    # Warm-up runs each function twice, then prefill once and every step.
    assert report.replays == 4 + 1 + max(decoded.steps)


@pytest.mark.parametrize(
    "tree",
    mostly_slow([load_static("mc_sim_7b_63"), GROWN, *WINDOWS], WINDOWS[0]),
    ids=lambda tree: tree.name,
)
def test_mixed_batch_is_capture_legal(tree: Tree) -> None:
    requests = [
        request("ab", 1),
        request("xyz", 2, temperature=0.0),
        request("q", 3, relaxation=RELAXED),
        *([] if tree is GROWN else [request("q", 3, relaxation=Blended(tv=0.3))]),
    ]
    models = tiny_models()
    strict = sample(models, tree, requests, mode="strict")
    assert strict.tokens.tolist() == sample(models, tree, requests).tokens.tolist()


@pytest.mark.slow
def test_kwargs_are_not_part_of_graph_key() -> None:
    """Prompts, seeds and settings of one spec are data: other values need no other capture."""
    models, tree = tiny_models(), load_static("mc_sim_7b_63")
    spec = spec_for(tree, [request(top_k=8)] * 2)
    engine = make_engine(models, spec, "strict")
    for seed in range(4):
        requests = [
            request("abcd"[seed:], seed, cfg_scale=1.5 + seed, top_k=seed + 2),
            request("xy", 9, temperature=0.5 + seed),
        ]
        alone = make_engine(models, spec, "eager")
        assert draw(engine, requests).tokens.tolist() == draw(alone, requests).tokens.tolist()
    assert engine.report().captures == 2


COMPILED = [
    (DraftTree.from_paths("three", [[0], [1]]), None),
    (load_tree("jacobi:2"), None),
    # Rules that ask what drafts were drawn with
    (load_tree("scd:2"), PRESETS["tv"]),
    (load_tree("sjd-pac:2:2x1"), CLUSTERS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("tree", "relaxation"), COMPILED, ids=str)
def test_compiled_step_draws_the_same_image(tree: Tree, relaxation: Relaxation | None) -> None:
    models = tiny_models(tiny_config(vocab_size=16, dim=16, layers=1, ffn_dim=16, grid=(2, 4)))
    requests = batch(**({} if relaxation is None else {"relaxation": relaxation}))
    engine = make_engine(models, spec_for(tree, requests), "compile")
    decoded = draw(engine, requests)
    assert decoded.tokens.tolist() == sample(models, tree, requests).tokens.tolist()
    assert (engine.report().captures, engine.report().recompiles_after_warmup) == (2, 0)


# After warm-up


def test_no_recompile_after_warmup() -> None:
    requests = batch()
    engine = make_engine(tiny_models(), spec_for(load_static("chain"), requests), "strict")
    draw(engine, requests)
    assert engine.report().recompiles_after_warmup == 0
    engine.step.stats.captures += 1  # what a runner does when it records again
    with pytest.raises(
        CaptureError, match="recorded again while decoding: 1 captures after warm-up"
    ):
        draw(engine, requests)


def test_engines_in_turn_read_their_own_results() -> None:
    """What a step returns is a tensor of its engine's state: graphs that share memory do not write over it."""
    models, requests = tiny_models(), batch()
    trees = (AR, load_static("chain"))
    alone = [sample(models, tree, requests).tokens.tolist() for tree in trees]
    engines = [make_engine(models, spec_for(tree, requests)) for tree in trees]
    seeds = [one.seed for one in requests]
    for engine in engines:
        assert engine.prefill_batch(prefix_for(engine, requests), requests) == [1] * len(requests)
    total = models[0].config.tokens
    for step in range(1, total):
        for engine in engines:
            engine.run_steps(seeds, step, 1)
            assert engine.known is not None
            assert engine.known.data_ptr() == engine.state.known.data_ptr()
        known = [engine.read(engine.known) for engine in engines if engine.known is not None]
        assert known[0] == [min(step + 1, total)] * len(requests)
        assert all(n > step for n in known[1])
    assert [decoded(engine, requests).tokens.tolist() for engine in engines] == alone


# What the strict runner refuses


@dataclass
class Numbers:
    """A state of two tensors."""

    x: Tensor
    total: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {"x": self.x, "total": self.total}

    def restorable(self) -> dict[str, Tensor]:
        return self.tensors()


def numbers() -> Numbers:
    return Numbers(torch.arange(6.0), torch.zeros(6))


class Function(nn.Module):
    """A function of the state, made from a lambda."""

    def __init__(self, body: Callable[[Numbers], Tensor]) -> None:
        super().__init__()
        self.body = body

    def forward(self, state: Numbers) -> Tensor:
        return self.body(state)


def strict(body: Callable[[Numbers], Tensor], state: Numbers) -> StrictRunner:
    return StrictRunner(Function(body), state, get_backend("cpu"))


def legal(state: Numbers) -> Tensor:
    state.total.add_(state.x)
    return state.total * 2


def test_strict_runs_a_legal_function_once_a_call() -> None:
    state = numbers()
    runner = strict(legal, state)
    runner()
    state.x.fill_(1.0)
    assert runner().tolist() == [2, 4, 6, 8, 10, 12]
    assert state.total.tolist() == [1, 2, 3, 4, 5, 6]  # checking the rules changed nothing
    assert (runner.stats.captures, runner.stats.replays) == (1, 2)


def write_slice(state: Numbers) -> Tensor:
    state.total[2:4] = state.x[2:4]
    return state.x * 1


def mask_select(state: Numbers) -> Tensor:
    return state.x[state.x > 2]


def branch(state: Numbers) -> Tensor:
    return state.x * 2 if state.x.sum() > 0 else state.x * 3


def write_twice(state: Numbers) -> Tensor:
    """Two layers of a cache that lie in one tensor."""
    for layer in range(2):
        index = state.x[3 * layer : 3 * layer + 3].long()
        state.total.index_copy_(0, index, state.x[:3])
    return state.total * 1


CAPTURED = torch.ones(6)

ILLEGAL: dict[str, tuple[Callable[[Numbers], Tensor], str]] = {
    "host read": (lambda s: s.x * s.x.sum().item(), "item|data-dependent|DataDependent"),
    "branch on data": (branch, "DataDependent"),
    "list": (lambda s: s.x * s.x.tolist()[0], "DataDependent|item"),
    "boolean indexing": (mask_select, "DynamicOutputShape"),
    "nonzero": (lambda s: s.x.nonzero().float(), "DynamicOutputShape"),
    "slice write into a view": (write_slice, "writes into a view"),
    "in-place on a view": (lambda s: s.total.view(2, 3).add_(1.0) * 1, "writes into a view"),
    "a tensor written twice by index": (write_twice, "written before"),
    "copy to the host": (lambda s: s.x.cpu() * 2, "copy from meta to cpu"),
    "copy from the host": (
        lambda s: s.total.copy_(torch.empty(6, device="cpu")),
        "copy from cpu to meta",
    ),
    "torch.tensor": (lambda s: s.x + torch.tensor([1.0] * 6), "FakeTensor|makes a constant"),
    "arange": (lambda s: s.x + torch.arange(6, device=s.x.device), "aten::arange makes a constant"),
    "zeros": (lambda s: s.x + torch.zeros(6, device=s.x.device), "aten::zeros makes a constant"),
    "full": (
        lambda s: s.x + torch.full((6,), 2.0, device=s.x.device),
        "aten::full makes a constant",
    ),
    "noise": (lambda s: s.x + torch.rand(6, device=s.x.device), "aten::rand makes a constant"),
    "tensor from outside": (lambda s: s.x + CAPTURED, "cannot be captured"),
}


def test_strict_refuses_state_tensors_on_one_storage() -> None:
    both = torch.arange(12.0).view(2, 6)
    with pytest.raises(CaptureError, match="'x' and 'total' share a storage"):
        strict(legal, Numbers(both[0], both[1]))()


@pytest.mark.parametrize("name", ILLEGAL)
def test_strict_refuses(name: str) -> None:
    body, complaint = ILLEGAL[name]
    state = numbers()
    with pytest.raises(CaptureError, match=complaint) as refused:
        strict(body, state)()
    assert str(refused.value).startswith("Function cannot be captured")
    assert state.x.tolist() == list(range(6)) and not state.total.any()


def test_strict_refuses_a_state_tensor_that_was_replaced() -> None:
    for field in ("x", "total"):
        state = numbers()
        runner = strict(legal, state)
        runner()
        setattr(state, field, getattr(state, field).clone())
        with pytest.raises(
            CaptureError, match=f"state tensor '{field}' was replaced after capture"
        ):
            runner()


def test_strict_poisons_a_result_that_was_kept_too_long() -> None:
    state = numbers()
    runner = strict(legal, state)
    kept = runner()
    assert kept.tolist() == [0, 2, 4, 6, 8, 10]
    runner.function = Function(lambda s: kept * 1)  # a function that reads its last result
    assert runner().isnan().all()
    counting = strict(lambda s: s.x.long(), numbers())
    first = counting()
    counting.function = Function(lambda s: first * 1)
    assert counting().tolist() == [-1] * 6


# Choosing


def test_every_mode_of_the_processor_has_a_runner() -> None:
    backend = get_backend("cpu")
    others = ("hpu", "cuda", "compile_layers")
    assert set(backend.graph_modes) == {m for m in RUNNERS if not m.startswith(others)}
    assert backend.graph_mode("auto") == next(iter(backend.graph_modes))
    for mode in backend.graph_modes:
        runner = make_runner(Function(legal), numbers(), backend, mode)
        assert runner.mode == runner.stats.mode == backend.graph_mode(mode) == mode


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (
            lambda: get_backend("cpu").graph_mode("cuda_graph"),
            "one of auto, eager, strict, compile",
        ),
        (lambda: get_backend("cpu").number_format("int8"), "one of float32, bfloat16"),
        (lambda: get_backend("tpu"), "one of auto, hpu, cuda, cpu"),
    ],
)
def test_what_is_unknown_is_refused_with_the_known_ones(
    ask: Callable[[], object], said: str
) -> None:
    with pytest.raises(DeviceError, match=said):
        ask()
