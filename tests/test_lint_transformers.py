"""`lint --transformers`: small models of transformers on the emulated card, and the page that lists what it finds."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gaudi_emulator import __main__ as emulator
from gaudi_emulator import emulate
from gaudi_emulator.lint import PROFILES
from tests.marks import mostly_slow

transformers = pytest.importorskip("transformers", minversion="5.0")
models: Any = pytest.importorskip("gaudi_emulator.transformers_models")

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "after-optimum-habana.md"


@cache
def listed() -> dict[tuple[str, str, str], set[str]]:
    """Of the page's first table: rules by model type, mode and release."""
    found = {}
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|([^|]*)\|$", PAGE.read_text(), re.MULTILINE)
    for model_type, *cells in rows:
        for profile, cell in zip(PROFILES, cells, strict=True):
            parts = dict(re.findall(r"(1\.\d+): ([^;]*)", cell))
            for release in ("1.19", "1.24"):
                rules = set(re.findall(r"H\d{3}", parts.get(release, cell)))
                found[model_type, profile, release] = rules
    return found


def hits(asked: str, profile: str, release: str) -> set[str]:
    """Rules whose findings are errors or warnings."""
    (card,), ended = models.lint_model_type(asked, profile == "lazy", release=release)
    found = {f.rule.id for f in card.findings.sorted() if f.severity != "info"}
    assert ended is None or "H040" in found, ended
    return found


def test_cheapest_model_has_the_findings_of_the_page() -> None:
    assert len(listed()) == 8 * len(PROFILES) * 2
    assert hits("gpt2", "lazy", "1.24") == listed()["gpt2", "lazy", "1.24"] != set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "profile"),
    [
        ("mistral", "lazy"),
        ("mistral", "compile"),
        ("mixtral", "lazy"),
        ("t5", "lazy"),
        ("t5", "compile"),
    ],
)
def test_rows_of_the_page_are_made_again(model_type: str, profile: str) -> None:
    for release in ("1.19", "1.24"):
        assert hits(model_type, profile, release) == listed()[model_type, profile, release]


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        f"{model_type}:attn_implementation=eager"
        for model_type in ("llama", "qwen3", "gpt2", "mixtral:experts_implementation=batched_mm")
    ],
)
def test_changes_of_the_page_leave_nothing_to_find(asked: str) -> None:
    assert not hits(asked, "lazy", "1.19") | hits(asked, "lazy", "1.24")


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["gemma2", "mistral:attn_implementation=eager"])
def test_full_layers_in_the_cache_serve_sliding_windows(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = models.new_caches

    def full(config: Any) -> Any:
        caches = plain(config)
        for cache_ in caches.values():
            cache_.layers = [
                transformers.cache_utils.StaticLayer(models.ROOM) for _ in cache_.layers
            ]
        return caches

    monkeypatch.setattr(models, "new_caches", full)
    assert not hits(asked, "lazy", "1.19") | hits(asked, "lazy", "1.24")


def test_what_is_no_language_model_is_refused_with_near_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for asked, said in (
        ("qwen4", "qwen3"),
        ("vit", "one of"),
        ("llama:num_hidden_layers=x", "small"),
    ):
        words = ["lint", "--transformers", asked, "--profile", "lazy", "--bridge", "1.24"]
        assert emulator.main(words) == 2
        assert said in capsys.readouterr().err
    assert emulator.main(["lint", "--transformers", "llama", "--json"]) == 2


# What these models need of the emulator


def test_replay_names_the_operator_whose_index_is_out_of_range() -> None:
    with emulate(lazy=True) as card:
        place = torch.zeros(1, dtype=torch.int64, device="hpu")
        cache_ = torch.zeros(4, 2, device="hpu")
        graph = torch.hpu.HPUGraph()  # type: ignore[attr-defined]
        with torch.hpu.graph(graph):  # type: ignore[attr-defined]
            cache_.index_copy_(0, place, torch.ones(1, 2, device="hpu"))  # HERE
        place.fill_(5)
        graph.replay()
        (found,) = (f for f in card.findings.sorted() if f.rule.id == "H051")
        assert "HERE" in Path(__file__).read_text().splitlines()[found.line - 1]


def test_conversion_of_an_infinity_is_no_wrapped_number() -> None:
    with emulate(lazy=True) as card:
        buckets = torch.tensor([0.0, 4.0], device="hpu").log().to(torch.int64)
        assert buckets.clamp(min=-1).tolist() == [-1, 1]
        assert not [f for f in card.findings.sorted() if f.rule.id == "H031"]


def test_grouped_products_read_their_sizes_and_are_the_cpus() -> None:
    x, weights = torch.randn(8, 16).bfloat16(), torch.randn(2, 16, 8).bfloat16()
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1], dtype=torch.int32)
    want = torch._grouped_mm(x, weights, offs=torch.tensor([3, 8], dtype=torch.int32))
    for lazy in (True, False):
        with emulate("1.24", lazy) as card:

            def experts(x: Any, weights: Any, ids: Any) -> Any:
                sizes = torch.histc(ids, bins=2, min=0, max=1)
                return torch._grouped_mm(x, weights, offs=sizes.cumsum(0, dtype=torch.int32))

            run = experts if lazy else torch.compile(experts, backend="hpu_backend", dynamic=False)
            got = run(x.to("hpu"), weights.to("hpu"), ids.to("hpu")).cpu()
            assert torch.allclose(got.float(), want.float(), atol=0.05)
            assert "H010" in {f.rule.id for f in card.findings.sorted()}


class Counting(torch.nn.Module):
    """Adds how often it has run, a Python number."""

    turns = 0

    def forward(self, x: Any) -> Any:
        turns = torch.tensor(float(self.turns), device=x.device)
        return x + torch.where(x > 0, turns, 0.0)


@pytest.mark.parametrize(
    "what", mostly_slow(["function", "method", "module", "module in place"], "module in place")
)
def test_what_is_compiled_no_more_runs_operator_by_operator(what: str) -> None:
    module = Counting()
    options: dict[str, Any] = {"backend": "hpu_backend", "dynamic": False}
    with emulate("1.24", lazy=False) as card:
        run: Any = module
        if what == "module in place":
            module.compile(**options)
        else:
            known = {"function": lambda x: Counting.forward(module, x), "method": module.forward}
            run = torch.compile(known.get(what, module), **options)
        for turn in range(11):
            module.turns = turn
            assert run(torch.ones(2, device="hpu")).tolist() == [1 + turn] * 2
        assert "H023" in {f.rule.id for f in card.findings.sorted()}


def test_only_rounding_is_no_divergence() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.0, torch.finfo(torch.bfloat16).min]]).bfloat16()
    models.check_logits(logits + torch.tensor([[0.0, 0.004, -0.004, 0.0]]).bfloat16(), logits)
    for wrong in ([0.5, 0.25, 0.02, -3e38], [0.5, 0.25, 0.0, 0.1], [0.5, float("nan"), 0, -3e38]):
        with pytest.raises(AssertionError, match="of the largest"):
            models.check_logits(torch.tensor([wrong]).bfloat16(), logits)
