"""A stretched model computes what the small one computes, all of it at the large size, and says what it is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from lantern_hpu.backends import host
from lantern_hpu.backends.base import DevicePlan, get_backend
from lantern_hpu.commands import generate
from lantern_hpu.core import Request
from lantern_hpu.decode import memory
from lantern_hpu.decode.requirements import find_model
from lantern_hpu.decode.spec import Spec
from lantern_hpu.errors import DeviceError, OptionError
from lantern_hpu.methods.relaxation import Clustered
from lantern_hpu.methods.setting import Setting
from lantern_hpu.models.config import DrafterConfig, TransformerConfig
from lantern_hpu.models.files.load import open_model, write_model
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.model import ImageModel, Placement, parameters_of
from lantern_hpu.ops.sampling import SamplingParams, to_probs
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.tree import DraftTree, load_tree
from lantern_hpu.zoo import registry
from lantern_hpu.zoo.find import find_parts
from lantern_lab.commands import stretch
from lantern_lab.commands.stretch import LLAMAGEN, find_sizes
from lantern_lab.stretch import kept_share, repeat, stretch_model, stretched_config
from tests.folder import write_folder
from tests.marks import mostly_slow
from tests.tiny import CONFIG, request, tiny_config

# Of twice the features, heads and codes, and of sizes that do not divide
TWICE = tiny_config(dim=128, heads=4, layers=4, ffn_dim=192, vocab_size=64, prefix=7)
ODD = tiny_config(dim=160, heads=5, layers=3, ffn_dim=250, vocab_size=50, prefix=1)
PROMPTS = ["red cat", "blue apple on cat", "apple"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("stretch") / "tiny")


def stretched(
    folder: Path, large: TransformerConfig, dtype: torch.dtype = torch.float32
) -> ImageModel:
    return stretch_model(
        open_model(find_parts(str(folder))), "large", large, dtype, tqdm(disable=True)
    )


@pytest.fixture(scope="module")
def base(folder: Path) -> ImageModel:
    return open_model(find_parts(str(folder))).load(Placement())


@pytest.fixture(scope="module")
def models(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, ImageModel]:
    """By their width, as they are read from the folders that they were written to."""
    about = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(about | {"fastest": {"cpu": ["ar", None]}}))
    result = {}
    for large in (TWICE, ODD):
        path = tmp_path_factory.mktemp("wide")
        write_model(stretched(folder, large), path, tqdm(disable=True))
        result[large.dim] = open_model(find_parts(str(path))).load(Placement())
        assert result[large.dim].fastest == {}  # which was measured at the small sizes
    return result


@pytest.fixture(params=[TWICE, ODD], ids=["twice", "odd"])
def model(request: pytest.FixtureRequest, models: dict[int, ImageModel]) -> ImageModel:
    return models[request.param.dim]


def pipelines(*models: ImageModel, mode: str = "eager") -> list[LanternPipeline]:
    backend = get_backend("cpu")
    return [LanternPipeline(m, DevicePlan(backend, m.target.dtype, mode)) for m in models]


def features(model: ImageModel) -> tuple[Tensor, Tensor, Tensor]:
    """Of prefixes and some tokens after them: the target's, its logits, and the drafter's guesses, past the pads."""
    from lantern_hpu.models.transformer import rope_table
    from lantern_hpu.ops.buffers import additive_mask, prefix_mask

    prefix, config = model.condition.rows(list(map(Request, PROMPTS)), True), model.target.config
    assert prefix.embeddings.shape[1:] == (config.prefix, config.dim) and model.drafter is not None
    tokens = torch.arange(9).repeat(len(prefix.valid), 1) * 3 % 32  # [R, 9]
    x = torch.cat([prefix.embeddings, model.target.embed(tokens)], 1)  # [R, T, H]
    valid = torch.cat([prefix.valid, torch.ones_like(tokens, dtype=torch.bool)], 1)
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    mask = additive_mask(prefix_mask(valid, causal), x.dtype)
    rope = rope_table(config, x.shape[1]).expand(len(x), -1, -1, -1).to(x.dtype)
    hidden = model.target(x, rope, mask)
    guess = model.drafter(tokens, hidden[:, config.prefix :], rope[:, -9:], mask[..., -9:, -9:])
    image = slice(config.prefix, None)
    return hidden[:, image], model.target.head(hidden[:, image]), guess


# ------------------------------------------------------------------------------------ the same function


def test_features_are_repeated_and_logits_are_the_small_models(
    base: ImageModel, model: ImageModel
) -> None:
    small, large = features(base), features(model)
    width = large[0].shape[-1]
    for here, there in ((small[0], large[0]), (small[2], large[2])):
        want = repeat(here.movedim(-1, 0), width).movedim(0, -1)
        torch.testing.assert_close(there, want, rtol=0, atol=1e-4)
    torch.testing.assert_close(large[1][..., : model.codes], small[1], rtol=0, atol=1e-4)
    assert large[1].shape[-1] == model.vocabulary > model.codes == CONFIG.vocab_size


METHODS: dict[str, tuple[TransformerConfig, str, str | None, dict[str, Any]]] = {
    "ar": (TWICE, "ar", None, {}),
    "eagle, greedy": (ODD, "eagle", "broad_7", {"temperature": 0.0}),
    "eagle, filtered": (TWICE, "eagle", "flat_4", {"top_k": 5, "top_p": 0.8}),
    "eagle2": (TWICE, "eagle2", "dynamic:3x1x6", {}),
    "lantern++": (ODD, "lantern++", "broad_7", {}),
    "jacobi": (ODD, "jacobi", "jacobi:4", {}),
    "scd": (TWICE, "scd", "scd:3", {}),
    "sjd-pac": (ODD, "sjd-pac", "sjd-pac:4:3x2", {}),
    "clusters": (TWICE, "scd", "scd:3", {"relaxation": Clustered(distance=9.0)}),
}


@pytest.mark.parametrize("case", mostly_slow(METHODS, "lantern++", "scd"))
def test_promise_pictures_and_steps_are_the_small_models(
    base: ImageModel, models: dict[int, ImageModel], case: str
) -> None:
    """So tokens a step are equal, as are the drafts that were accepted at each depth."""
    large, method, tree, given = METHODS[case]
    setting = Setting(method, given.get("relaxation"), load_tree(tree) if tree else None)
    settings = {name: x for name, x in given.items() if name != "relaxation"}
    small, wide = (
        pipeline(PROMPTS[:2], method=setting, guidance_scale=2.0, **settings)
        for pipeline in pipelines(base, models[large.dim])
    )
    assert (wide.tokens == small.tokens).all()
    for here, there in zip(small.records, wide.records, strict=True):
        assert (here.steps, here.accepted_by_depth) == (there.steps, there.accepted_by_depth)
        assert here.relaxed_accepts == there.relaxed_accepts
    same = zip(small.images, wide.images, strict=True)
    assert all(one.tobytes() == other.tobytes() for one, other in same)


@pytest.mark.slow
def test_the_step_can_be_captured(models: dict[int, ImageModel]) -> None:
    (large,) = pipelines(models[TWICE.dim], mode="strict")
    result = large(PROMPTS[:1], method="lantern++@flat_4")
    assert result.graph["recompiles_after_warmup"] == 0


def test_padding_that_a_drafter_sees_is_not_added() -> None:
    config = replace(
        find_model("builtin", PartOverrides()).config, drafter=DrafterConfig(sees_pads=True)
    )
    large = replace(config.target, dim=640, heads=10, prefix=120)
    assert stretched_config(config, "x", large).target.prefix == config.target.prefix
    other = replace(config, drafter=DrafterConfig(norm_eps=1e-6, ffn_dim=64))
    found = stretched_config(other, "x", replace(large, dim=704, heads=11))
    assert found.target.prefix == 120 and found.drafter is not None
    assert found.drafter.norm_eps == pytest.approx(1e-6 * 640 / 704)
    assert found.drafter.ffn_dim is None


def test_repetition_is_by_group_and_ends_in_zeros() -> None:
    x = torch.arange(1, 5)[:, None]  # two groups of two rows
    assert repeat(x, 10, 2).flatten().tolist() == [1, 2, 1, 2, 0, 3, 4, 3, 4, 0]
    assert kept_share(CONFIG, ODD) == 128 / 160 and kept_share(CONFIG, TWICE) == 1


# ------------------------------------------------------------------------------------ at the large size


def test_promise_every_layer_is_computed(folder: Path) -> None:
    """A NaN planted in any matrix or norm of an added layer shows in the features."""
    model = stretched(folder, TWICE)
    last = dict(model.target.layers[-1].named_parameters())
    assert {name: float(w.abs().sum()) > 0 for name, w in last.items()} == {
        "attention_norm.weight": True,
        "attention.qkv.weight": True,
        "attention.out.weight": False,
        "ffn_norm.weight": True,
        "ffn.gate_up.weight": True,
        "ffn.down.weight": False,
    }
    for weight in last.values():
        kept = weight.flatten()[0].clone()
        weight.flatten()[0] = float("nan")
        assert features(model)[0].isnan().any()
        weight.flatten()[0] = kept
    assert not features(model)[0].isnan().any()


def test_sizes_are_the_large_ones_as_memory_counts_them(model: ImageModel) -> None:
    config, held = model.config, sum(p.numel() for p in model.target.parameters())
    assert held == config.target.parameters
    assert model.drafter is not None and config.drafter is not None
    drafted = sum(p.numel() for p in model.drafter.parameters())
    assert drafted == parameters_of(config)["drafter"]
    assert model.target.config.grid == CONFIG.grid
    assert all(not p.is_meta and p.isfinite().all() for p in model.target.parameters())


def test_promise_weights_are_the_same_each_time_in_every_format(folder: Path) -> None:
    once, again = stretched(folder, ODD), stretched(folder, ODD)
    rough = stretched(folder, ODD, torch.bfloat16)
    others = dict(again.target.named_parameters()), dict(rough.target.named_parameters())
    for name, weight in once.target.named_parameters():
        assert torch.equal(weight, others[0][name])
        assert others[1][name].dtype == torch.bfloat16
        torch.testing.assert_close(others[1][name].float(), weight, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_promise_spare_codes_have_no_probability(folder: Path, dtype: torch.dtype) -> None:
    """Whatever guidance and temperature are."""
    model = stretched(folder, TWICE, dtype)
    hidden = torch.randn(4, 8, TWICE.dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits = model.target.head(hidden)
    spare = model.target.head.weight[model.codes :]
    assert float((hidden @ spare.T).float().std()) > 0.5  # they are computed
    params = SamplingParams(
        torch.tensor([100.0, 1.5]),
        torch.tensor([0.01, 10.0]),
        torch.tensor([64, 40], dtype=torch.int32),
        torch.tensor([1.0, 0.99]),
        torch.tensor([False, False]),
    )
    unconditional, conditional = logits.float().chunk(2)
    guided = unconditional + params.cfg_scale[:, None, None] * (conditional - unconditional)
    probs = to_probs(guided, params, 64, True)
    assert not probs.isnan().any()
    assert (probs[..., model.codes :] == 0).all()
    assert probs.sum(-1).allclose(torch.ones(()), atol=1e-4)


def test_neighbours_of_all_tokens_are_codes(base: ImageModel, model: ImageModel) -> None:
    near = model.nearest(5)
    assert near.shape == (model.vocabulary, 5) and int(near.max()) < model.codes
    assert torch.equal(near[: model.codes], base.nearest(5))


# ------------------------------------------------------------------------------------ the command


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> str:
    """A large model, which is tiny."""
    entry = registry.entries()["llamagen-t2i-256"]
    own = replace(entry, name="tiny-xl", config=replace(entry.config, target=TWICE))
    found = registry.entries() | {"tiny-xl": own}
    monkeypatch.setattr(registry, "entries", lambda: found)
    return "tiny-xl"


def test_promise_a_folder_is_written_that_draws_the_small_models_pictures(
    folder: Path, known: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = tmp_path / "wide"
    written = [known, "--model", str(folder), "--output", str(wide)]
    assert stretch.main(written) == 0
    said = capsys.readouterr().out
    assert f"stretched to {known}" in said and "output projections are zero" in said
    assert stretch.main(written) == 2 and "exists" in capsys.readouterr().err
    prompt = ["--prompt", "red cat on blue apple red", "--temperature", "0", "--method", "eagle"]
    for name, model in (("small", folder), ("large", wide)):
        files = ["--output", str(tmp_path / f"{name}.png")]
        files += ["--save-tokens", str(tmp_path / f"{name}.npz")]
        assert (
            generate.main(["--model", str(model), *prompt, "--method", "auto@flat_4", *files]) == 0
        )
    assert "output projections are zero" in capsys.readouterr().err
    again = ["--from-png", str(tmp_path / "large.png"), "--output", str(tmp_path / "again.png")]
    assert generate.main([*again, "--save-tokens", str(tmp_path / "again.npz")]) == 0
    tokens = [np.load(tmp_path / f"{n}.npz")["tokens"] for n in ("small", "large", "again")]
    assert (tokens[0] == tokens[1]).all() and (tokens[0] == tokens[2]).all()
    pixels = [np.asarray(Image.open(tmp_path / f"{n}.png")) for n in ("small", "large")]
    assert (pixels[0] == pixels[1]).all()


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_what_does_not_fit_is_refused_before_it_is_made(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if place == "memory":
        monkeypatch.setattr(host, "available_bytes", lambda: 10**9)
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    assert stretch.main(["llamagen-xl", "--output", str(tmp_path / "xl")]) == 2
    error = capsys.readouterr().err
    assert "needs 1." in error and "1.00 GB are free" in error and "--dtype bfloat16" in error
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("large", "said"),
    [
        (tiny_config(layers=1), "it is smaller: layers 1 of 2"),
        (tiny_config(dim=32, heads=1, ffn_dim=95), "width 32 of 64, FFN width 95 of 96"),
        (tiny_config(vocab_size=31), "codes 31 of 32"),
        (tiny_config(dim=128, heads=2), "head_dim 32 and 64"),
        (tiny_config(rope="1d"), "they differ in kind: rope 2d and 1d"),
        (tiny_config(qk_norm=True, dim=128, heads=4), "qk_norm False and True"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    folder: Path, large: TransformerConfig, said: str
) -> None:
    with pytest.raises(OptionError) as refused:
        stretched(folder, large)
    assert said in str(refused.value)


def test_the_embedded_model_stretches_to_what_is_offered() -> None:
    config = find_model("builtin", PartOverrides()).config
    for name in LLAMAGEN:
        large = find_sizes(name).config.target
        found = stretched_config(config, name, large).target
        sizes = ("dim", "layers", "heads", "ffn_dim", "vocab_size")
        assert all(getattr(found, size) == getattr(large, size) for size in sizes)
        assert found.grid == (16, 16) and found.codes == 4096
        assert found.parameters - large.parameters == large.vocab_size  # the head's bias


# ------------------------------------------------------------------------------------ the host's memory


def test_the_batch_that_is_offered_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = LanternPipeline.from_pretrained(str(folder), device="cpu")
    spec = Spec.of([request()], DraftTree.root_only(), 1000, CONFIG)
    monkeypatch.setattr(host, "available_bytes", lambda: 10**7)
    with pytest.raises(DeviceError) as refused:
        pipeline.engines.make(spec)
    fitting = refused.value.hint.args[0].value
    assert isinstance(fitting, int)
    assert 1 < fitting < 1000
    small = pipeline.engines.get(Spec.of([request()], DraftTree.root_only(), 1, CONFIG))
    with pytest.raises(DeviceError):  # though the other one was given up for it
        pipeline.engines.get(spec)
    assert small not in pipeline.engines.engines.values()
    check = (pipeline.model.config, pipeline.backend, "float32")
    memory.check_batch(check[0], replace(spec, images=fitting), *check[1:])
    with pytest.raises(DeviceError):
        memory.check_batch(check[0], replace(spec, images=fitting + 1), *check[1:])
    monkeypatch.setattr(host, "available_bytes", lambda: 10)
    with pytest.raises(DeviceError, match="1 images at a time") as refused:
        memory.check_batch(check[0], replace(spec, images=1), *check[1:])
    assert "smaller tree" in refused.value.hint


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    monkeypatch.setattr(host, "MEMINFO", info)
    names = ("memory.max", "memory.current", "inactive_file")
    monkeypatch.setattr(host, "GROUPS", [(str(tmp_path), *names)])
    assert host.available_bytes() == 4_096_000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert host.available_bytes() == 4_096_000
    (tmp_path / "memory.max").write_text("3000000\n")
    assert host.available_bytes() == 1_001_000
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "none")
    assert host.available_bytes() is None
