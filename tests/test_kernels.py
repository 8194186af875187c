"""Triton kernels: each gives what its plain twin gives, and serves only where it does.

On a processor the tests run in Triton's interpreter, on an NVIDIA GPU natively (marker `cuda`). What is interpreted
is settled when Triton is first imported, and other tests import it too: so that part runs in a process of its own.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_hpu.backends import BACKENDS
from lantern_hpu.backends.base import Candidate, outcome, tensors
from lantern_hpu.backends.cuda.backend import CUDABackend
from lantern_hpu.backends.cuda.forms import CUBLAS, Card, Forms, install
from lantern_hpu.backends.cuda.kernels import checks, triton_candidates, triton_kernels
from lantern_hpu.backends.cuda.kernels.programs import FORMS
from lantern_hpu.decode.common import Drafts, StaticTables
from lantern_hpu.decode.rules import Verdict
from lantern_hpu.decode.spec import Spec
from lantern_hpu.decode.state import Bounds
from lantern_hpu.decode.traversal import Traversal
from lantern_hpu.decode.walk import Acceptance
from lantern_hpu.graphs.strict import check_rules
from lantern_hpu.methods.relaxation import Multiplicative
from lantern_hpu.models.transformer import Target, rope_table
from lantern_hpu.ops.buffers import additive_mask
from lantern_hpu.ops.kernels import (
    PLAIN,
    CacheWrite,
    Commit,
    HeadNorms,
    Kernels,
    Traverse,
    Walk,
    add_norm,
    attend,
    place_tokens,
    product,
)
from lantern_hpu.ops.kv_cache import KVCache
from lantern_hpu.ops.quantized import group_of, quantized
from lantern_hpu.ops.sampling import SamplingParams, guided_probs, sample, sample_distinct
from lantern_hpu.tree import DraftTree, load_tree
from lantern_hpu.zoo.registry import entries
from tests.marks import mostly_slow
from tests.tiny import (
    SMALL_TREE,
    advance,
    make_engine,
    random_tree,
    request,
    ring,
    spec_for,
    tiny_config,
    tiny_models,
)

DEVICES = [
    pytest.param("cpu", id="interpreter"),
    pytest.param(
        "cuda",
        id="native",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
        ],
    ),
]
MODULES = ("accept", "attention", "forward", "products", "sample")


@cache
def interpreter() -> ProcessPoolExecutor:
    """A process in which Triton interprets."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool.submit(int).result()  # the process starts, and takes this environment with it
    return pool


def run_here(name: str, arguments: dict[str, Any]) -> None:
    test = getattr(sys.modules[__name__], name).__wrapped__
    with torch.no_grad():
        test(**arguments)


def run_there(name: str, arguments: dict[str, Any]) -> None:
    try:
        run_here(name, arguments)
    except BaseException:  # not every one of them can travel
        raise AssertionError(traceback.format_exc()) from None


def on_devices(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test in the interpreter's process, and here on a GPU."""

    @wraps(test)
    def run(**arguments: Any) -> None:
        if arguments["device"] == "cpu":
            interpreter().submit(run_there, test.__name__, arguments).result()
        else:
            run_here(test.__name__, arguments)

    there = find_spec("triton") is not None
    run = pytest.mark.skipif(not there, reason="no Triton")(run)
    return pytest.mark.parametrize("device", DEVICES)(run)


@cache
def kernels() -> Kernels:
    candidates = triton_candidates(torch.device("cpu"), torch.float32)
    return replace(PLAIN, **{name: found.make() for name, found in candidates.items()})


def near(got: Tensor, want: Tensor) -> None:
    """But for the order of sums of a few hundred numbers."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def slack_of(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps


class Random:
    """Seeded tensors on a device."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator).to(self.device)

    def whole(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator).to(self.device)


# --------------------------------------------------------------------------------------------- probabilities


def params(device: str, top_k: list[int], cfg_scale: float = 3.0) -> SamplingParams:
    images = len(top_k)

    def each(*values: float) -> Tensor:
        return torch.tensor(values[:images], device=device)

    return SamplingParams(
        each(cfg_scale, 1.5, 7.0),
        each(0.7, 1.0, 1.3),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.ones(images, device=device),
        torch.zeros(images, dtype=torch.bool, device=device),
    )


def same_probs(logits: Tensor, chosen: SamplingParams, guidance: bool, most: int) -> Tensor:
    """What the kernel gives, once it was found to be what its plain twin gives."""
    got = kernels().probs(logits, chosen, guidance, most, False, False)
    want = guided_probs(logits, chosen, guidance, most, False)
    assert got.dtype == torch.float32 and got.is_contiguous()
    assert torch.equal(got > 0, want > 0)
    near(got, want)
    return got


def logits_to_try(
    device: str, dtype: torch.dtype, vocabulary: int, top_k: list[int]
) -> Iterator[tuple[Tensor, SamplingParams, bool, int]]:
    """Logits, parameters, guidance and the largest top-k."""
    random, chosen = Random(vocabulary, device), params(device, top_k)
    most = max((k for k in top_k if k < vocabulary), default=0)
    logits = (3 * random.normal(4, 2, vocabulary)).to(dtype)
    yield logits, chosen, True, most
    few = (2 * logits).round()[
        :2
    ]  # of a few values each, so that many tokens are as likely as the k-th
    yield few, chosen, False, most
    if vocabulary == 1000:
        found = guided_probs(few, chosen, False, most, False)
        assert int((found[0] > 0).sum(-1).min()) > 37
        yield logits[:2], chosen, False, 0


@pytest.mark.parametrize(
    "dtype", mostly_slow([torch.float32, torch.bfloat16, torch.float16], torch.float32)
)
@pytest.mark.parametrize(
    ("vocabulary", "top_k"),
    mostly_slow([(5, [2, 5]), (1000, [37, 1000]), (130, [1, 120])], (130, [1, 120])),
    ids=str,
)
@on_devices
def test_probs(device: str, dtype: torch.dtype, vocabulary: int, top_k: list[int]) -> None:
    for given in logits_to_try(device, dtype, vocabulary, top_k):
        same_probs(*given)


@on_devices
def test_probs_of_odd_logits(device: str) -> None:
    chosen = params(device, [2, 3, 24])
    flat = torch.zeros(3, 1, 24, device=device)
    assert (same_probs(flat, chosen, False, 3) == 1 / 24).all()
    signs = torch.tensor([1.0, 0.0, -0.0, -1.0] * 6, device=device).expand(3, 1, -1)
    same_probs(signs, chosen, False, 3)
    few = flat.clone()
    few[..., 1:] = float("-inf")  # fewer tokens than k
    assert (same_probs(few, chosen, False, 3)[..., 0] == 1).all()
    extremes = torch.linspace(-3e4, 3e4, 24, device=device).expand(3, 1, -1)
    same_probs(extremes.contiguous(), chosen, False, 3)
    same_probs(-extremes, chosen, False, 0)
    assert (same_probs(flat[..., :1], params(device, [1, 1, 1]), False, 1) == 1).all()
    broken = flat.clone()
    broken[:2, 0, 7] = torch.nan  # one such number spoils the row, which is found, and no other
    for most in (3, 0):
        got = kernels().probs(broken, chosen, False, most, False, False)
        assert got.isnan().all(-1).flatten().tolist() == [True, True, False]


@on_devices
def test_probs_with_top_p_is_the_plain_one(device: str) -> None:
    logits, chosen = Random(0, device).normal(2, 1, 50), params(device, [5, 50])
    chosen.top_p[0] = 0.5
    got = kernels().probs(logits, chosen, False, 5, True, True)
    assert torch.equal(got, guided_probs(logits, chosen, False, 5, True, True))


# -------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize("vocabulary", [3, 64, 1000, 131073])
@on_devices
def test_draws_of_masses_that_add_up_exactly(device: str, vocabulary: int) -> None:
    """Whole masses and uniforms in eighths: no rounding, so the draws are the same to the last one."""
    random = Random(vocabulary, device)
    masses = random.whole(4, 3, 2, vocabulary).float()
    masses[..., -1] += 1
    masses[0, :, vocabulary // 2 :] = 0  # as after top-k: the last tokens have no mass
    masses[0, :, 0] += 1
    uniform = random.whole(8, 3, 2, 4) / 8
    got = kernels().sample_distinct(masses, uniform)
    want = sample_distinct(masses, uniform)
    assert got.dtype == torch.int32
    # Once all that had mass are drawn, the tokens mean nothing.
    drawable = (masses > 0).sum(-1, keepdim=True)
    meant = torch.arange(4, device=device) < drawable
    assert torch.equal(got[meant], want[meant]) and bool(meant.any())
    assert bool(((got >= 0) & (got < vocabulary)).all())
    assert torch.equal(kernels().sample(masses, uniform[..., 0]), sample(masses, uniform[..., 0]))


@on_devices
def test_draws_of_real_distributions_lie_where_the_uniforms_say(device: str) -> None:
    random = Random(3, device)
    probs = (3 * random.normal(12, 300)).softmax(-1)
    uniform = random.uniform(12, 5)
    drawn = kernels().sample_distinct(probs, uniform).long().cpu()
    left, uniform = probs.double().cpu(), uniform.double().cpu()
    for rank in range(5):
        token = drawn[:, rank : rank + 1]
        mass = left.cumsum(-1)
        target, total = uniform[:, rank : rank + 1] * mass[:, -1:], mass[:, -1:]
        end, size = mass.gather(-1, token), left.gather(-1, token)
        assert (size > 0).all()
        assert (target < end + 1e-6 * total).all()
        assert (target > end - size - 1e-6 * total).all()
        left.scatter_(-1, token, 0.0)


@on_devices
def test_no_draw_takes_a_token_without_mass(device: str) -> None:
    probs = (3 * Random(8, device).normal(40, 700)).softmax(-1)
    probs[:, 350:] = 0
    probs[:, :20] = 0
    for u in (0.0, 1 - 2**-24):
        tokens = kernels().sample(probs, torch.full((40,), u, device=device))
        assert bool((probs.gather(-1, tokens[:, None].long()) > 0).all())
    large = torch.zeros(1, 32769, device=device)  # Emu3's, one past a power of two
    large[0, -1] = 1
    assert kernels().sample(large, torch.zeros(1, device=device)).tolist() == [32768]
    nothing = kernels().sample(torch.zeros(2, 9, device=device), torch.rand(2).to(device))
    assert nothing.tolist() == [8, 8]  # as the plain one


# --------------------------------------------------------------------------------------------- walk

RULES = {  # k, delta, factor, weight at each depth
    "exact": (0, 0.0, 0.0, (1.0, 1.0, 1.0, 1.0)),
    "additive": (6, 0.2, 0.0, (1.0, 1.0, 1.0, 1.0)),
    "multiplicative": (3, 0.0, 2.0, (1.0, 1.0, 1.0, 1.0)),
    "annealed": (0, 0.0, 0.0, (1.8, 1.2, 0.8, 0.5)),
    "blended": (0, 0.0, 0.0, (1.0, 1.0, 1.0, 1.0)),
}
V, B = 13, 3


class Walked:
    """A tree with random probs for a batch of images, walked by the kernel and by its plain twin."""

    def __init__(self, device: str, seed: int, sharpness: float = 2.0) -> None:
        random = Random(seed, device)
        self.random, self.device, self.tree = random, device, random_tree(seed)
        nodes = len(self.tree.expanded)
        # Peaked, with exact zeros; the drafter's sometimes has fewer tokens than a node has children.
        p, q = (sharpness * random.normal(B, nodes, V) for _ in range(2))
        p, q = (
            x.masked_fill(x < x.topk(k, -1).values[..., -1:], float("-inf")).softmax(-1)
            for x, k in ((p, 8), (q, 2 + seed % 5))
        )
        self.p, self.q = p, q
        self.tokens = random.whole(V, B, self.tree.size).int()
        for row, node in enumerate(self.tree.expanded):
            below = list(self.tree.children[node])
            uniform = random.uniform(B, len(below))
            self.tokens[:, below] = sample_distinct(q[:, row].contiguous(), uniform)
        # A slice, as the step has it
        wide = random.uniform(B, self.tree.depth * self.tree.max_children + 3)
        self.uniform = wide[:, :-3].unflatten(1, (self.tree.depth, -1))

    def bounds(self, rule: tuple[int, float, float, tuple[float, ...]]) -> Bounds:
        k, delta, factor, weight = rule

        def each(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((B,), value, dtype=dtype, device=self.device)

        weights = torch.tensor(weight, device=self.device)[: self.tree.depth].expand(B, -1)
        budget = torch.tensor([9.0, 0.3, 0.2], device=self.device)
        found = Bounds(each(k, torch.int32), each(delta), each(factor), weights)
        return replace(found, tv=each(0.2), budget=budget)

    def together(self, name: str, kernel: Traverse | None = None) -> tuple[Verdict, Verdict]:
        """Of drafts that are verified together, by the kernel and by its plain twin."""
        wide = self.random.uniform(B, self.tree.size + 2)
        spec = Spec(B, False, self.tree, blended=name == "blended", metered=True, together=True)
        made = (Acceptance(spec, traverse=one) for one in (kernel or kernels().traverse, None))
        return self.verdicts(name, wide[:, : self.tree.size - 1], *made)

    def both(self, name: str, kernel: Walk | None = None) -> tuple[Verdict, Verdict]:
        table = ring(V).int()[:, :6] if RULES[name][0] else None
        annealed, blended = name == "annealed", name == "blended"
        spec = Spec(B, False, self.tree, annealed=annealed, blended=blended, metered=True)
        made = (Acceptance(spec, table, walk=one) for one in (kernel or kernels().walk, None))
        return self.verdicts(name, self.uniform, *made)

    def verdicts(
        self, name: str, uniform: Tensor, mine: Acceptance, plain: Acceptance
    ) -> tuple[Verdict, Verdict]:
        drafts = Drafts(self.tokens, self.q, StaticTables(self.tree).to(self.device)(B))
        given = self.p, drafts, uniform, self.bounds(RULES[name])
        return mine.to(self.device).walk_sampled(*given), plain.to(self.device).walk_sampled(*given)


def same_verdict(got: Verdict, want: Verdict) -> None:
    assert torch.equal(got.node, want.node) and got.node.dtype == torch.int32
    assert torch.equal(got.relaxed, want.relaxed)
    near(got.residual, want.residual)
    assert got.spent is not None and want.spent is not None
    near(got.spent, want.spent)


def same_traversal(tree: DraftTree, got: Verdict, want: Verdict, exactly: bool = False) -> None:
    """But for what is left at a leaf, where nothing reads it."""
    node = want.node.long()
    inner = torch.tensor([len(children) > 0 for children in tree.children], device=node.device)[
        node
    ]
    got, want = (replace(x, residual=x.residual.where(inner[:, None], 0.0)) for x in (got, want))
    same_verdict(got, want)
    assert not exactly or all(torch.equal(getattr(got, n), x) for n, x in vars(want).items())


@pytest.mark.parametrize(
    ("name", "together"),
    [*((name, False) for name in RULES), ("blended", True), *mostly_slow([("exact", True)])],
)
@on_devices
def test_walk(device: str, name: str, together: bool) -> None:
    """Of drafts that are verified one by one, or together."""
    reached = set()
    for seed in range(4 if together else 8):
        walked = Walked(device, seed)
        if together:
            got, want = walked.together(name)
            same_traversal(walked.tree, got, want)
        else:
            got, want = walked.both(name)
            same_verdict(got, want)
        reached |= {
            (int(node) > 0, bool(r.any())) for node, r in zip(got.node, got.relaxed, strict=True)
        }
    assert {accepted for accepted, _ in reached} == {False, True}
    assert any(helped for _, helped in reached) == (name != "exact")


@on_devices
def test_walk_of_degenerate_distributions(device: str) -> None:
    walked = Walked(device, 5)
    walked.p = walked.q  # every draft is accepted
    got, want = walked.both("exact")
    same_verdict(got, want)
    depth = torch.tensor(walked.tree.depths, device=device)[got.node.long()]
    assert bool((depth > 0).all())
    walked.p = walked.q / 4  # what is refused leaves nothing: the whole distribution comes back
    walked.uniform = torch.full_like(walked.uniform, 0.9)
    same_verdict(*walked.both("exact"))
    walked.p, walked.q = torch.zeros_like(walked.p), torch.zeros_like(walked.q)
    walked.p[..., 3] = walked.q[..., 4] = 1  # nothing in common
    got, want = walked.both("additive")
    same_verdict(got, want)


def test_worked_examples_are_what_the_plain_walks_give() -> None:
    tree = DraftTree.from_paths("worked", [[0], [1], [0, 0]])
    tables, walks = StaticTables(tree)(3), checks.worked_walks(torch.device("cpu"))
    (p, q, tokens, child, row, uniform, near_codes, *bounds), wanted = walks["walk"]
    assert torch.equal(tables.child, child) and torch.equal(tables.row, row)
    acceptance = Acceptance(Spec(3, False, tree, metered=True), near_codes)
    verdict = acceptance.walk_sampled(p, Drafts(tokens, q, tables), uniform, Bounds(*bounds))
    got_all = (verdict.node, verdict.residual, verdict.relaxed, verdict.spent)
    for got, want in zip(got_all, wanted, strict=True):
        torch.testing.assert_close(got, want)
    (p, q, tokens, child, row, order, _, uniform, *blend), wanted = walks["traverse"]
    acceptance = Acceptance(Spec(3, False, tree, blended=True, together=True))
    assert isinstance(acceptance.walk_sampled, Traversal)
    assert torch.equal(acceptance.walk_sampled.order, order)
    blending = replace(Bounds(*bounds), tv=blend[0], budget=blend[1])
    verdict = acceptance.walk_sampled(p, Drafts(tokens, q, tables), uniform, blending)
    same_traversal(tree, verdict, Verdict(*wanted))


# ---------------------------------------------------------------------------------------- attention

SHAPES = {  # rows, heads, heads of the keys, queries, slots, features
    "splits": (2, 2, 2, 5, 600, 20),
    "one query": (2, 4, 2, 1, 70, 64),
    "many queries": (1, 2, 1, 70, 40, 48),
}


class Looked:
    """Queries, and a cache in the order in which it lies in memory."""

    def __init__(self, device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        rows, heads, kv, tokens, slots, width = shape
        self.random, self.dtype = Random(slots, device), dtype
        self.q = self.random.normal(rows, tokens, heads, width).to(dtype).transpose(1, 2)
        wide = self.random.normal(2, rows, slots, kv, width).to(dtype)
        self.k, self.v = wide.transpose(2, 3).unbind()
        # Pads, then slots of which the queries see some, then those yet to be written
        self.seen = self.random.uniform(rows, tokens, slots) < 0.5
        self.seen[:, :, : slots // 4] = self.seen[:, :, slots // 2 :] = False
        self.seen[:, :, slots // 3] = True

    def both(self) -> tuple[Tensor, Tensor]:
        mask = additive_mask(self.seen, self.dtype)
        got, want = (some.attention(self.q, self.k, self.v, mask) for some in (kernels(), PLAIN))
        assert got.shape == want.shape and got.dtype == want.dtype
        return got, want


@pytest.mark.parametrize("name", mostly_slow(SHAPES, "one query", "many queries"))
@on_devices
def test_attention(device: str, name: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if dtype == torch.bfloat16 and device == "cpu":
            continue  # the interpreter multiplies no matrices of it
        got, want = Looked(device, SHAPES[name], dtype).both()
        slack = slack_of(dtype)
        torch.testing.assert_close(got, want, rtol=slack, atol=slack)


@on_devices
def test_attention_reads_what_a_row_sees_and_no_more(device: str) -> None:
    looked = Looked(device, SHAPES["splits"], torch.float32)
    before, _ = looked.both()
    looked.k[:, :, :128] = looked.v[:, :, :128] = torch.nan
    looked.k[:, :, 320:] = looked.v[:, :, 320:] = torch.nan
    assert torch.equal(looked.both()[0], before)
    # Nor do the bits of a row depend on its company.
    for part in ("q", "k", "v", "seen"):
        setattr(looked, part, getattr(looked, part)[1:])
    assert torch.equal(looked.both()[0], before[1:])


@pytest.mark.parametrize("name", mostly_slow(["splits", "one query"], "one query"))
@on_devices
def test_query_that_sees_nothing_spoils_nothing(device: str, name: str) -> None:
    looked = Looked(device, SHAPES[name], torch.float32)
    looked.seen[0, 0] = False
    got, want = looked.both()
    # The plain one gives a mean of all there is; nobody reads it.
    assert not got[0, :, 0].any()
    got[0, :, 0] = want[0, :, 0] = 0
    near(got, want)


@on_devices
def test_attention_lies_as_the_next_matrix_reads_it(device: str) -> None:
    looked = Looked(device, SHAPES["one query"], torch.float32)
    given = looked.q, looked.k, looked.v, additive_mask(looked.seen, torch.float32)
    got = kernels().attention(*given)
    assert got.transpose(1, 2).is_contiguous()
    assert kernels().attention(*(x.to("meta") for x in given)).stride() == got.stride()


# ---------------------------------------------------------------------------- norm, rotation, SwiGLU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_devices
def test_rms_norm_and_swiglu(device: str, dtype: torch.dtype) -> None:
    random, eps = Random(1, device), torch.finfo(dtype).eps
    some, rounding = kernels(), 1e-5 if dtype == torch.float32 else eps
    for shape in ((2, 3, 96), (5, 1), (1, 2, 1280)):
        x, weight = (5 * random.normal(*shape)).to(dtype), random.normal(shape[-1]).to(dtype)
        x[0] = 0
        got, want = some.rms_norm(x, weight, 1e-5), PLAIN.rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(got, want, rtol=rounding, atol=rounding)
        assert some.add_norm is not None
        more = random.normal(*shape).to(dtype)
        for behind in (None, random.normal(shape[-1]).to(dtype)):
            given = x, more, weight, 1e-5, behind
            for got, want in zip(some.add_norm(*given), add_norm(*given), strict=True):
                # The interpreter cuts bfloat16 off, and the norm is of a sum
                slack = (2 if behind is None else 4) * rounding
                torch.testing.assert_close(got, want, rtol=slack, atol=slack)
    slack = max(1e-5, 2 * eps)
    for shape in ((2, 3, 2 * 5), (1, 2 * 1100)):
        x = (5 * random.normal(*shape)).to(dtype)
        x[0, ..., :4] = torch.tensor([0.0, 80.0, -80.0, -0.5], device=device)
        torch.testing.assert_close(some.swiglu(x), PLAIN.swiglu(x), rtol=slack, atol=slack)


@pytest.mark.parametrize("interleaved", [True, False])
@on_devices
def test_rotate(device: str, interleaved: bool) -> None:
    random = Random(2, device)
    for heads, width in ((3, 20), (4, 64), (1, 2)):
        wide = random.normal(2, 3, heads + 5, width)  # queries are a part of a wider tensor
        rope = random.normal(2, 3, 2, width // 2)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x, angles = wide.to(dtype)[:, :, 1 : 1 + heads], rope.to(dtype)
            got = kernels().rotate(x, angles, interleaved)
            want = PLAIN.rotate(x, angles, interleaved)
            if dtype == torch.bfloat16 and device == "cpu":  # which the interpreter cuts off
                torch.testing.assert_close(got, want, rtol=0.02, atol=0.1)
            else:
                assert torch.equal(got, want)


ATTENDED = {  # heads of the keys for four of the queries, tokens, slots
    "new": (4, 3, 70),
    "moves": (4, 3, 70),
    "shared": (2, 3, 70),
    "long": (4, 3, 600),
    "long, shared": (1, 1, 600),
    "long, several tiles": (1, 17, 600),
    "long, moves": (2, 3, 600),
    "many": (4, 17, 70),
    "several tiles, moves": (1, 17, 70),
    "apart": (4, 3, 70),
    "rms": (2, 3, 600),
    "LayerNorm": (2, 3, 70),
    "LayerNorm, several tiles": (1, 17, 70),
}


def some_norms(name: str, random: Random, kv: int, width: int) -> HeadNorms | None:
    """Those that a name begins with, of four heads."""
    if not name.startswith(("rms", "LayerNorm")):
        return None
    if name == "rms":
        q, k = 1 + random.normal(2, width) / 4
        return HeadNorms(q, k, None, None, 1e-5)
    q, k, q_bias, k_bias = (random.normal(heads, width) for heads in (4, kv, 4, kv))
    return HeadNorms(q, k, q_bias, k_bias, 1e-5)


@pytest.mark.parametrize("interleaved", mostly_slow([True, False], True))
@pytest.mark.parametrize(
    "name",
    mostly_slow(ATTENDED, "moves", "shared", "rms", "LayerNorm, several tiles", "long, moves"),
)
@on_devices
def test_attend(device: str, name: str, interleaved: bool) -> None:
    """What is normed, rotated, written and moved is seen in the same call, as by one kernel after the other."""
    random, width, heads = Random(5, device), 20, 4
    kv, tokens, slots = ATTENDED[name]
    norms = some_norms(name, random, kv, width)
    start, depth = torch.tensor([slots // 2, 9], device=device), 2 * ("moves" in name)
    # The interpreter takes long over a row that many programs share
    for dtype in (torch.float16, torch.bfloat16, torch.float32)[: 2 if slots > 100 else 3]:
        if dtype == torch.bfloat16 and device == "cpu":
            continue  # the interpreter multiplies no matrices of it
        wide = random.normal(2, tokens, heads + 2 * kv, width).to(dtype)
        q, k, v = wide.split([heads, kv, kv], 2)
        if name == "apart":  # queries and keys have tensors of their own
            q, k = 2 * q, 3 * k
        rope = random.normal(2, tokens, 2, width // 2).to(dtype)
        row = (torch.arange(2, device=device) * slots)[:, None]
        # A path of nodes 2 and 3 of the last step moves behind the root; the new nodes overwrite where it was
        goal = row + start[:, None] + torch.arange(-depth, tokens, device=device)
        source = (row + start[:, None] + torch.tensor([0, 1], device=device)).flatten().int()
        seen = torch.arange(slots, device=device) <= start[:, None, None] + torch.arange(
            tokens, device=device
        ).view(1, -1, 1)
        seen[1, 0] = False  # an empty slot sees nothing
        before, outcomes = random.normal(2, 2 * slots, kv, width).to(dtype), []
        for function in (kernels().attend, attend):
            assert function is not None
            keys, values = before.clone().unbind()
            write = CacheWrite(keys, values, goal.flatten().int(), source if depth else None)
            mixed = function(q, k, v, rope, interleaved, write, additive_mask(seen, dtype), norms)
            mixed[1, :, 0] = 0
            outcomes.append((mixed, keys, values))
        slack = slack_of(dtype)
        for got, want in zip(*outcomes, strict=True):
            torch.testing.assert_close(got, want, rtol=slack, atol=slack)
        assert torch.equal(outcomes[0][2], outcomes[1][2])  # values are only moved


@on_devices
def test_gradients_flow_as_through_the_plain_ones(device: str) -> None:
    """Drafters are trained with the modules that draw."""
    random = Random(3, device)
    x, weight, rope = random.normal(2, 3, 4, 8), random.normal(8), random.normal(2, 3, 2, 4)
    mask = torch.zeros(2, 1, 4, 4, device=device)
    outcomes: list[tuple[Tensor | None, ...]] = []
    for some in (kernels(), PLAIN):
        leaf, scale = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.enable_grad():
            y = some.rotate(some.rms_norm(leaf, scale, 1e-5), rope, True)
            some.swiglu(some.attention(y, y, y, mask)).square().sum().backward()
        outcomes.append((leaf.grad, scale.grad))
    for got, want in zip(*outcomes, strict=True):
        assert got is not None and torch.equal(got, want)
    # What the kernels do not take: dtypes that are mixed, as under autocast, and wide heads
    half, seen, wide = x.half(), ~mask.bool(), x.repeat(1, 1, 1, 17)
    for some in (kernels(), PLAIN):
        results = some.rotate(half, rope, True), some.attention(x, x, x, seen)
        outcomes.append((*results, some.attention(wide, wide, wide, mask)))
    for got, want in zip(*outcomes[2:], strict=True):
        assert torch.equal(got, want)


# ----------------------------------------------------------------------------------------- products


def multiplied(
    random: Random, rows: int, columns: int, depth: int, around: str, dtype: torch.dtype
) -> Any:
    """Arguments of a product, with what is named around it."""

    def some(*shape: int) -> Tensor:
        return random.normal(*shape).to(dtype)

    gated = "gated" in around
    weight = some(columns * (1 + gated), depth) * depth**-0.5
    group = group_of(depth, "int4") if "int4" in around else 0
    small = quantized(weight, group) if "int" in around else (weight,)
    weight, scale, zero = (*small, None, None)[:3]
    return [
        some(rows, depth),
        weight,
        some(columns) if "bias" in around else None,
        some(depth) if "norm" in around else None,
        some(rows, columns) if "residual" in around else None,
        1e-5,
        gated,
        scale,
        zero,
    ]


AROUND = (
    "norm gated int8",
    "norm gated int4",
    "norm bias residual",
    "",
    "norm bias int8",
    "bias residual int4",
    "residual",
    "int8",
    "norm gated",
)
# Columns and depth that the blocks of forms divide and do not; one of each alone
SIZES = ((5, 33), (3, 320), (4, 256), (32, 1024), (1, 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("every", mostly_slow([False, True], False), ids=["some", "every"])
@on_devices
def test_product(device: str, form: str, every: bool) -> None:
    """Each form over rows that fill its block and do not, and sizes that its blocks divide and do not."""
    units, multiply = FORMS[form].kernel == "dot", kernels().product
    assert multiply is not None
    some_rows, all_rows = ((9, 70), (*range(9, 18), 33, 130)) if units else ((3,), range(1, 9))
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for dtype in dtypes if every else dtypes[:1]:
        if device == "cpu" and units and dtype == torch.bfloat16:
            continue  # the interpreter multiplies no matrices of it
        slack = slack_of(dtype)
        for i, rows in enumerate(all_rows if every else some_rows):
            for j, sizes in enumerate(SIZES if every else SIZES[:2]):
                around = AROUND[(i + j) % len(AROUND)]
                given = multiplied(Random(rows, device), rows, *sizes, around, dtype)
                got, want = multiply(*given, form), product(*given)
                assert got.shape == want.shape and got.dtype == dtype and got.is_contiguous()
                torch.testing.assert_close(got, want, rtol=slack, atol=slack)


@on_devices
def test_a_row_of_a_product_does_not_depend_on_its_company(device: str) -> None:
    """Within a form: so what a batch changes is the form alone, where its rows have another."""
    multiply = kernels().product
    assert multiply is not None
    for form, most in (("multiply_add 2x512", 8), ("dot 16x128", 16)):
        x, *rest = multiplied(Random(5, device), most, 4, 300, "norm gated", torch.float32)
        whole = multiply(x, *rest, form)
        fewest = FORMS[form].rows[0]
        part = multiply(x[most - fewest :], *rest, form)
        assert torch.equal(whole[most - fewest :], part)


def places_to_try(device: str, images: int) -> Iterator[tuple[Any, ...]]:
    """With guidance and without, pads that count or do not, one table for all images or one for each."""
    random, slots, tokens, width = Random(9, device), 50, 5, 3
    slot = torch.arange(slots, dtype=torch.int32, device=device)
    start = random.whole(slots - tokens, images).int()
    start[0] = 0  # an image without a prefix
    alone = random.whole(2, images, tokens, width).bool()
    for rows in (images, 2 * images):
        angles, pads = random.normal(60, 2, 7), random.whole(9, rows).int()
        valid = random.uniform(rows, slots) < 0.7
        valid[0] = False  # an empty slot
        for table in (alone, alone[:1].expand(images, -1, -1)):
            for dtype in (torch.float32, torch.float16):
                offset = slot[3:4].expand(images, tokens) if rows == images else alone[..., 0].int()
                what = (start, offset, slot[2 : 2 + tokens], table)
                axes = random.whole(60, 3, 60).int()
                for seen, counted, *several in (
                    (valid, pads, None, ()),
                    (None, None, None, ()),
                    (valid, pads, axes, (2, 1, 4)),
                ):
                    yield *what, seen, counted, angles, slot, slot[:rows] * slots, dtype, *several


@pytest.mark.parametrize("images", mostly_slow([1, 3], 1))
@on_devices
def test_place(device: str, images: int) -> None:
    for given in places_to_try(device, images):
        pairs = zip(kernels().place(*given), place_tokens(*given), strict=True)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


# ----------------------------------------------------------------------------------------- together


def with_kernels(target: Target, chosen: Kernels) -> Target:
    """The same target with other kernels."""
    made = Target(target.config, chosen).requires_grad_(False).eval()
    made.load_state_dict(target.state_dict())
    return made


TREES_TO_COMMIT = ["root", "small", "chain_2", "dynamic:2x2x4", "scd:3", "jacobi:3"]


def check_commit(commit: Commit, name: str, healthy: bool) -> None:
    """To the end of images that end at different steps, and behind it; with probabilities that are NaN, too."""
    named = {"root": DraftTree.root_only(), "small": SMALL_TREE}
    tree = named[name] if name in named else load_tree(name)
    greedy = name.startswith("jacobi")
    requests = [request("ab", 1, temperature=0.0 if greedy else 0.5), request("abcd", 2, top_k=12)]
    states = []
    for own in (commit, None):
        target, drafter = tiny_models()
        swapped = with_kernels(target, replace(PLAIN, commit=own))
        if not healthy:
            swapped.head.weight.fill_(torch.nan)
        engine = make_engine((swapped, drafter), spec_for(tree, requests, logprobs=True))
        advance(engine, requests, 17)
        states.append(engine.state)
    wanted = states[1].tensors()
    for key, got in states[0].tensors().items():
        assert torch.equal(got, wanted[key]) or bool(got.isnan().any()), key
    assert bool((states[1].spoiled > 0).all()) != healthy
    assert bool((states[1].count == 15).any())


@pytest.mark.parametrize(
    ("name", "healthy"),
    mostly_slow(
        [(name, healthy) for name in TREES_TO_COMMIT for healthy in (True, False)],
        *(("small", True), ("scd:3", False)),
    ),
)
@on_devices
def test_commit_leaves_the_state_that_the_plain_one_leaves(
    device: str, name: str, healthy: bool
) -> None:
    if device != "cpu":
        pytest.skip("the tiny engine is the processor's")
    commit = kernels().commit
    assert commit is not None
    check_commit(commit, name, healthy)


@pytest.mark.parametrize(
    "name",
    mostly_slow(["commit", "add_norm", "attend", "walk", "traverse"], "commit"),
)
@on_devices
def test_no_bit_depends_on_which_warp_is_ahead(device: str, name: str) -> None:
    if device != "cpu":
        pytest.skip("the interpreter's warps wait for each other")
    from tests.warps import FIRST_AHEAD, LAST_AHEAD, warps_apart

    kernel = getattr(kernels(), name)
    calls = [checks.chained_commit(drafts)[0] for drafts in (32, 96)]
    if name != "commit":
        calls = [
            call for call, _ in checks.kernel_examples(torch.device("cpu"), torch.float32)[name]
        ]
    for call in calls:
        want = outcome(kernel, call)
        for order in (FIRST_AHEAD, LAST_AHEAD):
            with warps_apart(order):
                assert all(map(torch.equal, outcome(kernel, call), want)), order
    if name == "commit":  # what the barriers are for is seen without them
        with warps_apart(FIRST_AHEAD, barriers=False):
            assert not all(map(torch.equal, outcome(kernel, calls[-1]), want))


@pytest.mark.parametrize("name", mostly_slow(BACKENDS["cuda"].kernels, "place", "commit"))
@on_devices
def test_no_bit_depends_on_the_order_of_programs(device: str, name: str) -> None:
    if device != "cpu":
        pytest.skip("the interpreter's programs wait for each other")
    from tests.warps import programs_backwards

    kernel = getattr(kernels(), name)
    for call, _ in checks.kernel_examples(torch.device("cpu"), torch.float32)[name]:
        want = outcome(kernel, call)
        with programs_backwards():
            assert all(map(torch.equal, outcome(kernel, call), want))


@pytest.mark.slow
@on_devices
def test_step_with_kernels_draws_what_the_plain_step_draws(device: str) -> None:
    """The strict runner judges the operators as a recording would."""
    if device != "cpu":
        pytest.skip("the tiny engine is the processor's")
    requests = [
        request("ab", 1, 3.0, Multiplicative(4, lam=3.0), top_k=12),
        request("abcd", 2, 2.0, temperature=0.8),
    ]
    target, drafter = tiny_models()
    # Norms and rotations are many programs, which the interpreter is slow at.
    slow = {name: getattr(PLAIN, name) for name in ("rms_norm", "rotate")}
    swapped, drawn = with_kernels(target, replace(kernels(), **slow)), []
    for models in ((swapped, drafter), (target, drafter)):
        plan = spec_for(SMALL_TREE, requests, logprobs=True)
        engine = make_engine(models, plan, "strict")
        advance(engine, requests, 2)
        drawn.append(engine.state)
    for name in ("tokens", "count", "accepted", "relaxed"):
        assert torch.equal(getattr(drawn[0], name), getattr(drawn[1], name))
    torch.testing.assert_close(drawn[0].logprobs, drawn[1].logprobs, rtol=0, atol=1e-5)
    assert bool((drawn[0].count > 2).any())  # some drafts were accepted


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@on_devices
def test_target_with_forms_of_products_is_the_plain_one(device: str, bias: bool) -> None:
    """All four products of each block in a form of their own, or some, over few rows and over more."""
    config = tiny_config(qkv_bias=bias)
    plain, random = tiny_models(config)[0], Random(7, device)
    for rows, tokens in ((2, 3), (2, 6)):
        x = random.normal(rows, tokens, config.dim)
        rope = rope_table(config, 20)[:tokens].to(device).expand(rows, -1, -1, -1)
        seen = torch.ones(rows, tokens, tokens, dtype=torch.bool, device=device).tril()
        outcomes = []
        for own in ((), ("qkv", "down"), ("out", "gate_up"), ("qkv", "out", "gate_up", "down")):
            target = with_kernels(plain, kernels()).to(device)
            made = Forms(kernels(), Card(), lambda name, why: None)
            made.choose = lambda asked, own=own: (  # type: ignore[method-assign, misc]
                asked.offered[0] if asked.name in own else CUBLAS
            )
            install([target], made)
            with torch.no_grad():
                outcomes.append(target(x, rope, additive_mask(seen, x.dtype)))
        for got in outcomes[1:]:
            torch.testing.assert_close(got, outcomes[0], rtol=1e-4, atol=1e-5)


@on_devices
@pytest.mark.parametrize(
    "norms",
    mostly_slow(
        [{"qk_norm": True}, {"qk_norm": "rms", "head_size": 48}],
        {"qk_norm": "rms", "head_size": 48},
    ),
)
def test_target_with_kernels_is_the_plain_one(device: str, norms: dict[str, Any]) -> None:
    """Over a cache, whose capacity lets several programs share the keys."""
    config, rows, size = tiny_config(kv_heads=1, **norms), 2, 128
    plain, random = tiny_models(config)[0], Random(6, device)
    x, rope = random.normal(rows, 7, config.dim), rope_table(config, 7).to(device)
    outcomes = []
    for some in (kernels(), PLAIN):
        target = with_kernels(plain, some).to(device)
        sizes = config.layers, rows, size, config.kv, config.head_dim
        cache = KVCache.allocate(*sizes, torch.float32, torch.device(device))
        features = []
        for new in (torch.arange(4), torch.arange(4, 7)):
            seen = (torch.arange(size) <= new[:, None]).expand(rows, -1, -1).to(device)
            slots = (size * torch.arange(rows)[:, None] + new).flatten().int().to(device)
            turn = rope[new].expand(rows, -1, -1, -1)
            features.append(target(x[:, new], turn, additive_mask(seen, x.dtype), cache, slots))
        outcomes.append((*features, *(x for one in cache.layers for x in (one.k, one.v))))
    for got, want in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
def test_kernels_can_be_captured() -> None:
    """The rules are tried on fake tensors, so nothing is interpreted."""
    target, drafter = tiny_models()
    target, requests = Target(target.config, kernels()), [request("ab", 1)]
    engine = make_engine((target, drafter), spec_for(SMALL_TREE, requests), "eager")
    for function in (engine.prefill_function, engine.step_function):
        check_rules(function, engine.state)


# Bytes of shared memory that a program may have on an NVIDIA GPU, by compute capability: CUDA's programming guide
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}


class Compiled:
    """Stands in for a kernel: compiles what it is called with, for a GPU that need not be here."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel, self.capability = kernel, capability
        self.shared: dict[str, int] = {}  # bytes of shared memory, by how it was called
        self.code: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.compile

    def compile(self, *args: Any, num_warps: int, **others: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.jit import mangle_type

        names = self.kernel.arg_names
        options = {"num_warps": num_warps, "num_stages": 3, "enable_fp_fusion": True}
        options |= {name: others.pop(name) for name in options if name in others}
        given = dict(zip(names, args, strict=False))
        constants = others | {name: None for name, value in given.items() if value is None}
        given = {name: value for name, value in given.items() if name not in constants}
        signature = dict.fromkeys(names, "constexpr")
        signature |= {name: mangle_type(value) for name, value in given.items()}
        values = {(names.index(name),): value for name, value in constants.items()}
        # As in a launch: memory begins at multiples of 16, and whole numbers that are some are known to be
        even = [
            n for n, x in given.items() if isinstance(x, Tensor) or (type(x) is int and not x % 16)
        ]
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in even}
        source = ASTSource(self.kernel, signature, values, attributes)
        target = GPUTarget("cuda", self.capability, 32)
        made = triton.compile(source, target, options)
        assert made.asm["cubin"]
        self.code.append(made.asm["ptx"])
        self.shared[f"{self.kernel.fn.__name__} {constants} {signature}"] = made.metadata.shared


@contextmanager
def compiled_for(capability: int) -> Iterator[list[Compiled]]:
    """Inside, all kernels are compiled in place of being launched."""
    kernels()
    stand_ins = []
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder, torch.no_grad():
        patch.setenv("TRITON_CACHE_DIR", folder)
        for name in MODULES:
            module = importlib.import_module(f"lantern_hpu.backends.cuda.kernels.{name}")
            for kernel in [n for n in dir(module) if n.endswith("_kernel")]:
                stand_ins.append(Compiled(getattr(module, kernel), capability))
                patch.setattr(module, kernel, stand_ins[-1])
        yield stand_ins
    for made in stand_ins:
        over = {how: n for how, n in made.shared.items() if n > SHARED[capability]}
        assert not over


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
def test_kernels_compile_for_each_generation(dtype: torch.dtype, capability: int) -> None:
    """The interpreter takes what the compiler refuses, so both must see a kernel."""
    calls = checks.kernel_examples(torch.device("cpu"), dtype)
    with compiled_for(capability) as stand_ins:
        for name, examples in calls.items():
            for arguments, _ in examples:
                getattr(kernels(), name)(*arguments)
    assert set(calls) == set(BACKENDS["cuda"].kernels)
    assert len(stand_ins) == 18 and all(made.shared for made in stand_ins)


ROWS_OF_FORMS = (2, 8, 16, 32, 64, 128, 256)  # the largest of each size of a program
SERVED = [  # forms with number formats and rows that they serve
    (form, kind, rows)
    for form, how in FORMS.items()
    for kind in ("bfloat16", "float32", "int8", "int4")
    for rows in ROWS_OF_FORMS
    if rows in (how.small_rows if kind.startswith("int") else how.rows)
]


@pytest.mark.parametrize("capability", mostly_slow(SHARED, 86))
@pytest.mark.parametrize(
    ("form", "kind", "rows"),
    mostly_slow(SERVED, ("dot 32x128", "bfloat16", 64), ("multiply_add 2x512", "bfloat16", 2)),
)
@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
def test_forms_fit_the_shared_memory_of_each_generation(
    capability: int, form: str, kind: str, rows: int
) -> None:
    """And `multiply_add` has all loads of a matrix under way before its threads wait for each other."""
    dtype = torch.bfloat16 if kind.startswith("int") else getattr(torch, kind)
    around = f"norm gated bias residual {kind}"
    given = multiplied(Random(0, "cpu"), rows, 256, 1024, around, dtype)
    with compiled_for(capability) as stand_ins:
        product = kernels().product
        assert product is not None
        product(*given, form)
    ((code,),) = (made.code for made in stand_ins if made.code)
    assert FORMS[form].kernel == "dot" or "bar.sync" not in code[: code.rindex("evict_first")]


@pytest.mark.slow
@on_devices
def test_fused_kernels_that_agree_serve(device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served = triton_kernels.__wrapped__(torch.device(device), torch.float32)
    assert served == kernels()
    assert served.names()["walk"] == "triton_walk"


@on_devices
def test_kernel_that_is_wrong_or_fails_is_replaced(device: str) -> None:
    from lantern_hpu.backends.cuda import kernels as package
    from lantern_hpu.backends.cuda.kernels import accept, sample

    all_candidates = package.triton_candidates

    def three(*given: Any) -> dict[str, Candidate]:
        found = all_candidates(*given)
        return {name: found[name] for name in ("probs", "walk", "sample")}

    def broken(*args: Any) -> None:
        raise RuntimeError("no compiler")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "triton_candidates", three)
        patch.setattr(sample, "triton_probs", lambda *args: 1.1 * guided_probs(*args))
        patch.setattr(accept, "triton_walk", broken)
        with pytest.warns(
            UserWarning, match="probs: .* plain one gives; walk: RuntimeError: no comp"
        ) as said:
            served = triton_kernels.__wrapped__(torch.device(device), torch.float32)
    assert len(said) == 1
    assert served.probs is guided_probs and served.walk is None
    assert served.sample is kernels().sample


MACHINE = {"card": "H", "driver": "580.1"}


class Served:
    """Kernels that are the plain ones, but for a name, and calls of theirs."""

    def __init__(self, wrong: str = "", error: Exception | None = None) -> None:
        self.calls, self.wrong, self.error = Counter[str](), wrong, error

    def kernels(self) -> Kernels:
        return replace(PLAIN, **{name: self.own(name) for name in checks.TWINS})

    def own(self, name: str) -> Callable[..., Any]:
        def kernel(*given: Any) -> Any:
            self.calls[name] += 1
            result = checks.TWINS[name](*given)
            if name != self.wrong:
                return result
            if self.error:
                raise self.error
            return tuple(1.1 * x for x in result) if isinstance(result, tuple) else result + 1

        return kernel


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_HPU_CACHE", str(tmp_path / "cache"))


def held(served: Served, machine: dict[str, str] = MACHINE, **sizes: Any) -> dict[str, str]:
    given = tiny_config(kv_heads=1, **sizes), torch.device("cpu"), torch.float32, machine
    return checks.held_to_twins(served.kernels(), *given)


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("wrong", [name for name in checks.TWINS if name != "product"])
def test_a_kernel_that_is_wrong_in_the_sizes_of_a_model_is_named_and_remembered(wrong: str) -> None:
    why = "it does not give what the plain one gives"
    assert held(Served(wrong)) == {wrong: why}
    later = Served()
    assert held(later) == {wrong: why} and not later.calls
    (line,) = checks.kept_verdicts(MACHINE)
    assert line.startswith("float32, dim 64, heads 2, kv 1, ") and f"; {wrong} is refused: " in line
    for machine, sizes in ((MACHINE | {"driver": "570.2"}, {}), (MACHINE, {"ffn_dim": 192})):
        another = Served()
        assert not held(another, machine, **sizes) and another.calls[wrong]
    assert len(checks.kept_verdicts(MACHINE)) == 2


@pytest.mark.usefixtures("own_folder")
def test_memory_that_is_short_says_nothing_of_a_kernel() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        held(Served("swiglu", torch.OutOfMemoryError("CUDA out of memory")))
    assert not checks.kept_verdicts(MACHINE)


def test_examples_lie_on_the_card_whole() -> None:
    """Also what is worked out by hand, and the state of a commit."""
    meta, names = torch.device("meta"), BACKENDS["cuda"].kernels
    for _, (call, _) in checks.sized_examples(tiny_config(), torch.float32, names):
        given = tensors(checks.moved(call, meta))
        assert given and all(x.is_meta for x in given)


@pytest.mark.slow
@on_devices
def test_kernels_agree_in_the_sizes_of_a_model(device: str) -> None:
    """Of all that there are, and so what is worked out by hand for a walk and for a commit of more drafts."""
    config = tiny_config(kv_heads=1)
    card, machine = torch.device(device), {"card": "this", "process": str(os.getpid())}
    assert not checks.held_to_twins(kernels(), config, card, torch.float32, machine)
    served = [n for n, how in kernels().names().items() if how != "plain" and n != "product"]
    assert {"walk", "traverse", "commit"} < set(served) and f"{len(served)} agree" in str(
        checks.kept_verdicts(machine)
    )


def test_cards_without_matrix_units_keep_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    own: Any = print
    fine = Candidate(lambda: own, [], 0.0)
    monkeypatch.setattr(Candidate, "agrees", lambda self: True)
    names = dict.fromkeys(BACKENDS["cuda"].kernels, fine)
    monkeypatch.setattr("lantern_hpu.backends.cuda.kernels.triton_candidates", lambda *_: names)
    for capability, units in (((7, 5), False), ((8, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        served = triton_kernels.__wrapped__(torch.device("cuda"), torch.float16)
        assert (served.attention is own) == (served.attend is own) == units
        assert served.swiglu is own


def test_walks_over_vocabularies_that_no_program_holds_are_the_plain_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Emu3.5's walks would spill 11,692 bytes a thread."""
    walk: Any = print
    made = replace(PLAIN, walk=walk, traverse=walk)
    monkeypatch.setattr(CUDABackend, "held_kernels", lambda self, made, *_: made)
    monkeypatch.setattr("lantern_hpu.backends.cuda.kernels.triton_kernels", lambda *_: made)
    served = {
        name: CUDABackend().own_kernels(torch.bfloat16, entries()[name].config.target)
        for name in ("emu3-gen", "emu3.5-image")
    }
    assert served["emu3-gen"] is made
    assert served["emu3.5-image"] == PLAIN


@on_devices
def test_large_vocabularies_are_exact(device: str) -> None:
    """5,120 of 131,073, as Emu3.5 samples, as numbers sorted by hand; ties, one number that is none, and draws."""
    random = Random(4, device)
    logits, chosen = random.normal(4, 1, 131073), params(device, [5120, 131073], 5.0)
    got = same_probs(logits, chosen, True, 5120)[0]
    guided = ((logits[2] + 5 * (logits[0] - logits[2])) / 0.7).double()
    for mine, row in zip(got.double(), guided, strict=True):
        kept = row.sort(descending=True).indices[:5120]
        want = torch.zeros_like(row).index_copy(0, kept, row[kept].softmax(0))
        assert torch.equal(mine > 0, want > 0)
    ties = (2 * logits[:2]).round()
    same_probs(ties, chosen, False, 5120)
    ties[0, 0, 100000] = torch.nan
    for most in (5120, 0):
        broken = kernels().probs(ties, chosen, False, most, False, False)
        assert broken.isnan().all(-1).tolist() == [[True], [False]]
    for u in (0.0, 0.5, 1 - 2**-24):
        token = kernels().sample(got, torch.full((1,), u, device=device))
        assert bool((got.gather(-1, token[:, None].long()) > 0).all())
    two = torch.zeros(2, 131073, device=device)
    two[0, 131072] = two[0, 70000] = 1
    drawn = kernels().sample_distinct(two, torch.zeros(2, 2, device=device))
    assert drawn.tolist() == [[70000, 131072], [131072, 131072]]


def test_kernel_that_writes_nothing_is_found() -> None:
    calls = checks.kernel_examples(torch.device("cpu"), torch.float32)["attend"]

    def fault(kernel: Any) -> str:
        return checks.fault(Candidate(lambda: kernel, calls, 1e-5))

    def unwritten(
        q: Tensor, k: Tensor, v: Tensor, rope: Tensor, pairs: bool, write: CacheWrite, *rest: Any
    ) -> Tensor:
        apart = CacheWrite(write.keys.clone(), write.values.clone(), *write[2:])
        return attend(q, k, v, rope, pairs, apart, *rest)

    assert not fault(attend)
    assert fault(unwritten)


def test_without_triton_the_plain_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.delitem(sys.modules, f"lantern_hpu.backends.cuda.kernels.{name}", raising=False)
        monkeypatch.delattr(f"lantern_hpu.backends.cuda.kernels.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(UserWarning, match="plain kernels serve: .*triton") as said:
        assert triton_kernels.__wrapped__(torch.device("cpu"), torch.float32) is PLAIN
    assert len(said) == 1
    assert CUDABackend().kernels("plain") is PLAIN
    assert set(PLAIN.names().values()) == {"plain"}
