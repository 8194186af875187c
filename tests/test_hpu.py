"""Gaudi's code on the emulated card: the same images, one launch a step, nothing compiled after the warm-up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gaudi_emulator import compiler, emulate, hpex
from lantern_hpu.backends.base import get_backend
from lantern_hpu.backends.hpu import backend as hpu_backend
from lantern_hpu.backends.hpu.backend import HPUBackend, matmul_attention
from lantern_hpu.backends.hpu.env import RECIPE_CACHE, RELEASES
from lantern_hpu.cli import main
from lantern_hpu.errors import Arg, CaptureError, DeviceError, Words
from lantern_hpu.graphs import make_runner
from lantern_hpu.graphs.compiled import CompiledRunner, PartCompiler
from lantern_hpu.methods.relaxation import PRESETS, Clustered
from lantern_hpu.methods.setting import METHODS, SMALL_TREE, Setting
from lantern_hpu.models.config import VisionConfig
from lantern_hpu.models.pictures import VisionTower, bilinear_rows
from lantern_hpu.models.text.prefix import CaptionProjection
from lantern_hpu.ops import kernels
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.tree import DynamicTree, Tree, Window, load_tree
from lantern_lab.lint_model import rehearsed_captures
from tests.emulated import draw_warm, emulated, rules
from tests.marks import mostly_slow


def backend_of(pipeline: LanternPipeline) -> HPUBackend:
    assert isinstance(pipeline.backend, HPUBackend)
    return pipeline.backend


PROMPTS = ["a red apple", "blue cat"]
# What these draft on a processor, where a card drafts more
OF_THE_CPU: dict[str, Tree] = {
    "lantern++": load_tree(SMALL_TREE),
    "scd": Window.of("scd", 2),
    "sjd-pac": Window.of("sjd-pac", 2),
}


RULES = {"clusters": Clustered(distance=100.0, ranks=3), "tv": PRESETS["tv"]}


@pytest.mark.parametrize("preset", mostly_slow(["clusters", "tv"], "clusters"))
@pytest.mark.parametrize("method", mostly_slow(["lantern++", "scd", "sjd-pac"], "scd"))
def test_rules_that_ask_for_q_are_recorded_and_draw_the_tokens_of_the_cpu(
    model: Path, method: str, preset: str
) -> None:
    want = LanternPipeline.from_pretrained(str(model), device="cpu", dtype="float32")
    setting: dict[str, Any] = {"seed": 3}
    setting["method"] = Setting(method, RULES[preset], OF_THE_CPU[method])
    with emulated(model) as (pipeline, card):
        got, counts = draw_warm(pipeline, card, PROMPTS, **setting)
        expected = want(PROMPTS, **setting)
        assert got.tokens.tolist() == expected.tokens.tolist()
        costs = [r.tv_sum for r in got.records], [r.tv_sum for r in expected.records]
        assert costs[0] == pytest.approx(costs[1], rel=1e-4) and all(costs[0])
        assert (got.graph["captures"], got.graph["recompiles_after_warmup"]) == (2, 0)
        assert counts["cpu_fallbacks"] == counts["errors"] == counts["warnings"] == 0


QUICK = [
    ("ar", "hpu_graph", "1.19"),
    ("lantern++", "hpu_graph", "1.24"),
]
CELLS = [
    *QUICK,
    *((method, "hpu_graph", release) for method in METHODS for release in RELEASES),
    *((method, "compile", "1.24") for method in METHODS),
    *((method, "compile", "1.19") for method in ("ar", "eagle2", "scd")),
    *((method, "hpu_graph_split", "1.24") for method in METHODS),
    *((method, "compile_layers", "1.24") for method in ("ar", "eagle", "scd")),
    *((method, "eager", "1.24") for method in ("ar", "eagle2")),
    *((method, "hpu_graph", "1.24") for method in ("scd:tv=0.3@4", "scd@4:commit=2")),
    *((method, "compile", "1.24") for method in ("scd:tv=0.3@4", "scd@4:commit=2")),
]
LAUNCHES = {"hpu_graph": 1, "hpu_graph_split": 2, "compile": 1}  # of a step; a prefix has one
# Compiled outside of it: words and their projection, and the pixels of each image
PARTS = 2 + len(PROMPTS)
SINGLE = 40  # operators that are launched alone for two images, with what is uploaded and read


def small_tree(name: str) -> Tree | None:
    """Of the kind that a method drafts, and quickly traced; None for those that draft none or name it."""
    method = METHODS.get(name)
    if method is None or not method.drafts:
        return None
    if method.rule is not None:
        return Window.of(method.rule, 4)
    return DynamicTree(3, 2, 8) if method.tree == "dynamic" else load_tree("chain")


@pytest.mark.parametrize(("method", "graphs", "release"), mostly_slow(dict.fromkeys(CELLS), *QUICK))
def test_both_releases_draw_the_images_of_the_cpu_and_have_nothing_to_say(
    model: Path, method: str, graphs: str, release: str
) -> None:
    """What `lint --strict` asks: no error, no warning, no fallback, no cut, nothing compiled after the warm-up."""
    setting = replace(Setting.parse(method), tree=tree) if (tree := small_tree(method)) else method
    want = LanternPipeline.from_pretrained(str(model), device="cpu", dtype="float32")
    expected = want(PROMPTS, seed=3, method=setting)
    with emulated(model, graphs, release) as (pipeline, card), rehearsed_captures(card):
        assert card.release.name == release
        got, counts = draw_warm(pipeline, card, PROMPTS, seed=3, method=setting)
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert [r.steps for r in got.records] == [r.steps for r in expected.records]
        pairs = zip(got.images, expected.images, strict=True)
        assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
        # Without a graph each operation is a launch, which is warned of
        assert not rules(card, "error", *(["warn"] if graphs != "eager" else []))
        graph = got.graph
        assert graph["recompiles_after_warmup"] == 0
        assert counts["cpu_fallbacks"] == card.counts.cuts.total() == 0
        if graphs in LAUNCHES:
            steps = graph["replays"] - 1  # and a prefill
            assert graph["captures"] == 2
            parts = PARTS if graphs == "compile" else 0
            assert counts["graph_launches"] == LAUNCHES[graphs] * steps + 1 + parts
        if graphs.startswith("compile"):
            # 1.19 copies what is read before it is written: a cache whose accepted paths move
            tree = pipeline.resolve(setting).tree
            assert bool(counts["whole_copies"]) == (release == "1.19" and not tree.is_chain)
        if graphs == "compile":
            assert counts["launches"] - counts["graph_launches"] <= SINGLE
        if graphs.startswith("hpu_graph"):
            assert graph["device"]["graph_compilations"] == 0
            # The engine's own reads, and one for the pixels of each image
            assert counts["host_syncs"] == graph["host_reads"] + len(PROMPTS)


def tower() -> tuple[nn.Module, tuple[Tensor, ...]]:
    sizes = VisionConfig(dim=16, layers=3, heads=2, ffn_dim=16, patch=8, side=4, code_dim=4)
    return VisionTower(sizes), (torch.randn(1, 3, 16, 24), bilinear_rows(2, 4), bilinear_rows(3, 4))


def projection() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return CaptionProjection(8, 16, 4), (torch.randn(2, 4, 8),)


def encoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=16, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4
    )
    made = transformers.T5EncoderModel(config)
    made.whole = ("forward",)
    return made, (torch.tensor([[3, 4, 1, 0]]), torch.tensor([[1, 1, 1, 0]]))


@pytest.mark.parametrize(
    ("make", "launches", "graphs"),
    mostly_slow([(projection, 1, 1), (tower, 5, 3), (encoder, 1, 1)], (projection, 1, 1)),
)
def test_what_runs_outside_of_the_step_is_compiled_by_parts(
    make: Any, launches: int, graphs: int
) -> None:
    """Once for all parts that are alike, however many of them there are and however often they run."""
    module, given = make()
    module.eval().requires_grad_(False)
    with emulate() as card, torch.no_grad():
        want = module(*given)[0]
        backend = get_backend("hpu", "compile")
        assert backend.compiles_parts and not get_backend("hpu", "eager").compiles_parts
        PartCompiler(backend)(module.to(backend.device))
        uploaded = [values.to(backend.device) for values in given]
        for _ in range(2):
            before = card.counts.launches
            got = module(*uploaded)
            assert card.counts.launches - before == launches
        assert card.counts.recipes == graphs
        torch.testing.assert_close(got[0].cpu(), want)


@pytest.mark.parametrize("release", RELEASES)
def test_a_path_is_moved_in_place(release: str) -> None:
    """1.24 writes a cache in place that the same graph read before; 1.19 copies it."""

    def step(cache: Tensor, source: Tensor, goal: Tensor, new: Tensor) -> Tensor:
        moved = torch.cat([cache.index_select(0, source), new])
        return cache.index_copy_(0, goal, moved).sum()

    given = [torch.zeros(8, 2), torch.tensor([3]), torch.tensor([1, 4]), torch.ones(1, 2)]
    with emulate(release) as card, torch.no_grad():
        compiled = get_backend("hpu", "compile").compile(step)
        assert compiled(*(values.to("hpu") for values in given)).item() == 2
        assert card.counts.whole_copies == (release == "1.19")


def test_a_card_draws_in_bfloat16_with_the_defaults_of_a_card(model: Path) -> None:
    with emulated(model, dtype="auto") as (pipeline, card):
        assert pipeline.model.target.dtype == torch.bfloat16
        pipeline("a red apple", method="lantern++")
        assert not rules(card)


# The runner


class Broken(nn.Module):
    def forward(self, state: Any) -> Tensor:
        raise RuntimeError("synStatus=26 [Generic failure]")


class Fine(nn.Module):
    def forward(self, state: Any) -> Tensor:
        return state["x"] + 1


def test_failed_capture_leaves_the_process_usable() -> None:
    with emulate(), torch.no_grad():
        backend = get_backend("hpu")
        state: Any = {"x": torch.ones(2, device=backend.device)}
        with pytest.raises(CaptureError, match=r"Broken cannot be captured: .*synStatus=26"):
            make_runner(Broken(), state, backend, "hpu_graph")()
        runner = make_runner(Fine(), state, backend, "hpu_graph")
        runner()
        state["x"].fill_(5)
        assert runner().tolist() == [6, 6]
        assert (runner.stats.captures, runner.stats.replays) == (1, 2)


def test_warm_compiled_runners_leave_out_guards_and_never_run_each_others_graph() -> None:
    """Two of one class and of one code, as engines of a model are: without guards nothing else tells them apart."""
    with emulate(), torch.no_grad():
        backend = get_backend("hpu", "compile")
        states: list[Any] = [{"x": torch.ones(n, device=backend.device)} for n in (2, 3)]
        runners = [make_runner(Fine(), state, backend, "compile") for state in states]
        for turn in range(4):
            for state, runner in zip(states, runners, strict=True):
                assert isinstance(runner, CompiledRunner) and runner.unguarded == (turn >= 2)
                state["x"].fill_(turn)
                assert runner().tolist() == [turn + 1] * len(state["x"])
        assert [(r.stats.captures, r.stats.replays) for r in runners] == [(1, 4), (1, 4)]


def test_graph_that_gaudis_compiler_fails_on_is_answered_by_what_exists_in_the_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(card: Any, graph: Any) -> Any:
        raise RuntimeError("Graph compile failed. synStatus=synStatus 26 [Generic failure].")

    monkeypatch.setattr(compiler, "lower", failing)
    with emulate(), torch.no_grad():
        backend = get_backend("hpu", "compile")
        assert "compile_layers" in backend.graph_modes
        state: Any = {"x": torch.ones(2, device=backend.device)}
        with pytest.raises(DeviceError, match="could not make a recipe") as caught:
            make_runner(Fine(), state, backend, "compile")()
        hint = caught.value.hint
        assert isinstance(hint, Words) and Arg("graphs", "compile_layers") in hint.args


# Kernels


def test_fused_kernels_equal_their_plain_twins() -> None:
    with emulate(), torch.no_grad():
        backend = get_backend("hpu")
        fused = backend.kernels()
        assert fused.names() == {
            "attention": "fused_sdpa",
            "rms_norm": "fused_rms_norm",
            "rotate": "fused_rope",
            "swiglu": "plain",
            **dict.fromkeys(("place", "probs", "sample", "sample_distinct", "race"), "plain"),
        }
        assert backend.kernels("plain") is kernels.PLAIN
        q, k, v, mask = (
            torch.randn(s, device="hpu")
            for s in ((2, 4, 3, 16), (2, 2, 8, 16), (2, 2, 8, 16), (2, 1, 3, 8))
        )
        for plain in (matmul_attention, kernels.attention):
            apart = fused.attention(q, k, v, mask) - plain(q, k, v, mask)
            assert apart.abs().max().item() < 1e-5
        x, rope = torch.randn(2, 3, 4, 16, device="hpu"), torch.randn(2, 3, 2, 8, device="hpu")
        for interleaved in (True, False):
            got, want = fused.rotate(x, rope, interleaved), kernels.rotate(x, rope, interleaved)
            assert torch.equal(got.cpu(), want.cpu())


def test_kernel_that_is_missing_or_wrong_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulate():
        backend = get_backend("hpu")
        assert isinstance(backend, HPUBackend)
        module = backend.part("hpex.kernels")
        monkeypatch.delattr(module, "FusedSDPA")
        monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda p, *rest: p)
        assert backend.kernels().names() == {
            "attention": "matmul_attention",
            "rms_norm": "fused_rms_norm",
            **dict.fromkeys(("rotate", "swiglu", "place"), "plain"),
            **dict.fromkeys(("probs", "sample", "sample_distinct", "race"), "plain"),
        }


def test_a_mask_too_large_for_the_kernel_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-gaudi 1749: the queries are given in parts, each with its part of the mask."""
    with emulate(), torch.no_grad():
        fused = get_backend("hpu").kernels("auto", torch.float32).attention
        shapes = ((2, 4, 7, 16), (2, 2, 8, 16), (2, 2, 8, 16), (2, 1, 7, 8))
        given = [torch.randn(s, device="hpu") for s in shapes]
        whole, calls = fused(*given), list[tuple[int, ...]]()
        monkeypatch.setattr(hpu_backend, "MASK_BYTES", 200)
        real = hpex.run_fused

        def noted(name: str, kernel: Any, q: Tensor, *rest: Any) -> Any:
            calls.append(tuple(q.shape))
            return real(name, kernel, q, *rest)

        monkeypatch.setattr(hpex, "run_fused", noted)
        torch.testing.assert_close(fused(*given).cpu(), whole.cpu())
        assert [shape[2] for shape in calls] == [3, 2, 2]


def test_the_fallback_softmax_is_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, softmax = list[torch.dtype](), Tensor.softmax

    def noted(x: Tensor, dim: int) -> Tensor:
        seen.append(x.dtype)
        return softmax(x, dim)

    monkeypatch.setattr(Tensor, "softmax", noted)
    q, k, v = (torch.randn(1, heads, 4, 16).bfloat16() for heads in (4, 2, 2))
    got = matmul_attention(q, k, v, torch.zeros(1, 1, 4, 4).bfloat16())
    assert seen == [torch.float32] and got.dtype == torch.bfloat16


# The front door


@pytest.mark.slow
def test_command_draws_what_the_cpu_draws(model: Path, tmp_path: Path) -> None:
    common = ["--model", str(model), "--prompt", "a red apple", "--seed", "7", "--dtype", "float32"]
    for name, options in {
        "hpu": ["--emulate", "--method", "scd@4"],
        "cpu": ["--method", "scd@4"],
    }.items():
        files = [
            f"--{o}={tmp_path / name}.{e}" for o, e in {"output": "png", "report": "json"}.items()
        ]
        files.append(f"--save-tokens={tmp_path / name}.npz")
        assert main(["generate", *common, "--device", name, *options, *files]) == 0
    tokens = [np.load(tmp_path / f"{name}.npz")["tokens"].tolist() for name in ("hpu", "cpu")]
    assert tokens[0] == tokens[1]
    report = json.loads((tmp_path / "hpu.json").read_text())
    assert report["environment"]["card"] == "GAUDI2 (emulated, bridge 1.24: contract-checked)"
    assert report["environment"]["plugin"] == "1.24.0+emulated"
    assert report["graph"]["recompiles_after_warmup"] == 0
    assert report["graph"]["device"]["cpu_fallbacks"] == 0
    assert not hasattr(torch, "hpu")  # the emulator has gone


def test_without_a_card_the_reasons_and_the_ways_out_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = str(tmp_path / "x.png")
    drawn = ["generate", "--prompt", "a sun", "--output", output]
    assert main([*drawn, "--device", "hpu"]) == 2
    said = capsys.readouterr().err
    for part in ("habana_frameworks", "--device cpu", "--emulate", "lantern-hpu doctor"):
        assert part in said
    assert main([*drawn, "--device", "cpu", "--emulate"]) == 2
    assert "cpu cannot be emulated" in capsys.readouterr().err


def test_reports_do_not_name_the_users_home(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(model) as (pipeline, _):
        backend = backend_of(pipeline)
        assert backend.flags is not None
        folder = Path((backend.flags.chosen | backend.flags.respected)[RECIPE_CACHE].split(",")[0])
        monkeypatch.setenv("HOME", str(folder.parent))
        flags: Any = backend.describe()["flags"]
    assert flags[RECIPE_CACHE].startswith(f"~/{folder.name}")
