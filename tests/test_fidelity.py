"""How far methods move the next token: exact ones not at all, and the average is that of real decoding."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lantern_hpu.core import Request
from lantern_hpu.decode.rules import Rules
from lantern_hpu.decode.spec import Spec
from lantern_hpu.decode.state import Bounds
from lantern_hpu.methods.relaxation import (
    EXACT,
    Additive,
    Annealed,
    Blended,
    Clustered,
    Multiplicative,
    Relaxation,
)
from lantern_hpu.methods.setting import METHODS, Resolved
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.tree import DraftTree
from lantern_lab.commands.fidelity import main
from lantern_lab.measure.fidelity import (
    Place,
    averaged_expectation,
    batch_tv,
    blend_at,
    expectation,
    find_places,
    root,
    tv_at,
    weights_cost,
)
from lantern_lab.measure.options import FidelityOptions
from lantern_lab.train.unroll import Lesson
from tests.folder import write_folder
from tests.tiny import circle, ring

V, TRIES, CHILDREN = 12, 20_000, 3
RULES = {
    "exact": EXACT,
    "additive": Additive(6, bound=0.2),
    "multiplicative": Multiplicative(6, lam=3.0),
    "official": Additive(6, "official", 0.2),
    "annealed": Annealed(omega=1.6),
    "clusters": Clustered(distance=1.2),
    "tv": Blended(tv=0.15),
}
FLAT = DraftTree.from_paths("flat", [[rank] for rank in range(CHILDREN)])


def rules_of(rule: Relaxation) -> Rules:
    near = ring(V) if rule.lends else None
    spec = Spec(
        *(1, False, FLAT),
        residual=rule.residual,
        annealed=rule.weighs,
        ranks=7,
        blended=rule.tv > 0,
    )
    return Rules(spec, near, circle(V) if rule.clusters else None)


def two_distributions(seed: int) -> tuple[Tensor, Tensor]:
    """p and q, [1, V] each."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (2 * torch.randn(2, 1, V, generator=generator, dtype=torch.float64)).softmax(-1)
    return p, q


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "most probable"])
@pytest.mark.parametrize("name", RULES)
def test_expectation_is_the_average_over_real_acceptance(name: str, drawn: bool) -> None:
    rule, (p, q) = RULES[name], two_distributions(1)
    given = q if drawn else None
    tokens = q.topk(CHILDREN).indices
    exists = torch.ones_like(tokens, dtype=torch.bool)
    rules = rules_of(rule)
    node = root(p, given, Bounds.of([rule], 1))
    expected = expectation(rules, node, tokens, exists)
    assert float(expected.sum()) == pytest.approx(1)

    def many(x: Tensor) -> Tensor:
        return x.expand(TRIES, -1)

    uniform = torch.rand(TRIES, CHILDREN, generator=torch.Generator().manual_seed(2))
    node = root(many(p), many(q) if drawn else None, Bounds.of([rule] * TRIES, 1))
    passed, rest, *_ = rules.siblings(
        *(node, many(tokens), many(exists), uniform.double(), blend_at(rules, node))
    )
    seen = torch.zeros_like(many(p)).scatter(1, many(tokens), passed.double())
    seen = torch.where(passed.any(1, keepdim=True), seen, rest).mean(0)
    assert float((seen - expected[0]).abs().max()) < 4 * (0.25 / TRIES) ** 0.5


@pytest.mark.parametrize("name", RULES)
def test_average_over_drawn_drafts_is_the_sum_over_all_of_them(name: str) -> None:
    """`averaged_expectation`, which draws the refused drafts alone, against every sequence of children by itself."""
    rule, (p, q) = RULES[name], two_distributions(1)
    rules, bounds = rules_of(rule), Bounds.of([rule], 1)
    want = torch.zeros_like(p)
    for tokens in permutations(range(V), 2):
        first, second = (float(q[0, t]) for t in tokens)
        chance = first * second / (1 - first)  # drawn without replacement
        children, exists = torch.tensor([tokens]), torch.ones(1, 2, dtype=torch.bool)
        want += chance * expectation(rules, root(p, q, bounds), children, exists)
    uniform = torch.rand(TRIES, 2, generator=torch.Generator().manual_seed(2))
    got = averaged_expectation(rules, p, q, uniform.double(), bounds).mean(0, keepdim=True)
    assert float((got - want).abs().max()) < 0.002
    assert float(got.sum()) == pytest.approx(1)


def test_broad_distributions_leave_exact_acceptance_next_to_no_noise() -> None:
    p, q = torch.randn(2, 1, 4096, generator=torch.Generator().manual_seed(4)).softmax(-1)
    uniform = torch.rand(64, 5, generator=torch.Generator().manual_seed(5))
    place = Place(p, q, torch.zeros(1, 5, dtype=torch.int32), torch.ones(1, 5, dtype=torch.bool))
    assert tv_at(place, rules_of(EXACT), Bounds.of([EXACT], 1), uniform) < 0.002
    doubled = Annealed(omega=2.0)
    assert tv_at(place, rules_of(doubled), Bounds.of([doubled], 1), uniform) > 0.05


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    folder = tmp_path_factory.mktemp("fidelity")
    model, file = write_folder(folder / "tiny"), folder / "out.json"
    rows = "ar,eagle,eagle2,lantern,lantern++,lantern++:omega-2,scd:distance=100"
    sizes = ["--num-images", "8", "--draws", "400", "--timed", "1"]
    assert main(["--model", str(model), "--method", rows, *sizes, "--output", str(file)]) == 0
    return {row["row"]: row for row in json.loads(file.read_text())["rows"]}


def test_exact_methods_have_no_distance(figures: dict[str, dict[str, float]]) -> None:
    assert figures["ar"]["tv"] == 0
    assert figures["eagle2"]["tv"] < 1e-5
    assert figures["eagle"]["tv"] < 0.01  # what the draws leave of their noise


def test_relaxed_methods_have_a_distance_with_an_interval(
    figures: dict[str, dict[str, float]],
) -> None:
    for name in ("lantern", "lantern++", "lantern++:omega-2", "scd:distance=100"):
        assert 0.001 < figures[name]["tv"] < 1
        assert 0 < figures[name]["tv_interval"] < figures[name]["tv"]
        assert figures[name]["tokens_per_step"] > 1


@pytest.mark.parametrize("method", ["eagle", "eagle2"])
def test_places_lie_inside_their_images(tmp_path: Path, method: str) -> None:
    """The distribution at a place is the target's after the tokens that the image really has there."""
    folder = str(write_folder(tmp_path / "tiny"))
    pipeline = LanternPipeline.from_pretrained(folder, layout="plain")
    sampling = pipeline.model.sampling
    requests = [Request("red cat", seed, sampling) for seed in range(8)]
    setting = Resolved(method, tree=METHODS[method].default_tree())
    places = find_places(pipeline, setting.tree, requests, [i / 7 for i in range(8)])
    whole = pipeline.draw(requests, setting, 8).tokens
    lesson = Lesson(pipeline.model, ["red cat"] * 8, torch.from_numpy(whole))
    p = torch.stack([place.p for place in places])  # [8, 1, V]
    gaps = (lesson.p - p).abs().amax(-1)  # [8, N - 1]
    # One of the image's distributions, and a later one for a later place.
    assert float(gaps.amin(1).max()) < 1e-5
    assert len(gaps.argmin(1).unique()) > 4


def test_the_same_weights_cost_nothing_and_smaller_ones_little(tmp_path: Path) -> None:
    """A follower reads what the other engine draws: any other token would change what comes behind it.

    The native decoder's integers take inputs of 16 bits, torch's form floats.
    """
    folder = str(write_folder(tmp_path / "tiny"))
    whole, same = (LanternPipeline.from_pretrained(folder) for _ in range(2))
    small = LanternPipeline.from_pretrained(folder, quantize="int8")
    options = FidelityOptions(images=10)
    tokens = 10 * (whole.model.target.config.tokens - 1)
    with ProgressBar(20, "image") as bar:
        nothing, some = (weights_cost(whole, other, options, bar) for other in (same, small))
    assert [nothing[n] for n in ("tokens", "tv", "tv_largest")] == [tokens, 0, 0]
    assert 0 < some["tv"] < some["tv_largest"] < 0.1 and some["tv_interval"]
    # By one pass over whole images, without a cache
    requests = [Request("red cat", seed, whole.model.sampling) for seed in range(4)]
    drawn = torch.from_numpy(whole.draw(requests, whole.resolve("ar"), 4).tokens)
    plain = (
        LanternPipeline.from_pretrained(folder, layout="plain", quantize=q) for q in (None, "int8")
    )
    p, q = (Lesson(pipeline.model, ["red cat"] * 4, drawn).p for pipeline in plain)
    want = (p - q).abs().sum(-1) / 2
    torch.testing.assert_close(batch_tv(whole, small, requests), want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_what_smaller_weights_cost_is_printed(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = write_folder(tmp_path / "tiny"), tmp_path / "out.json"
    sizes = ["--method", "ar", "--num-images", "2", "--timed", "1", "--output", str(file)]
    assert main(["--model", str(folder), "--quantize", form, *sizes]) == 0
    found = json.loads(file.read_text())["weights"]
    assert f"TV of the next token {found['tv']:.4f}" in capsys.readouterr().out
