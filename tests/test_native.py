"""The native decoder equals the plain one within rounding, for every family's layers, format and instruction set; and
a row's result depends on nothing but itself."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lantern_hpu import LanternPipeline
from lantern_hpu.backends.base import DevicePlan
from lantern_hpu.backends.cpu import native
from lantern_hpu.backends.cpu.backend import CPUBackend
from lantern_hpu.backends.cpu.native import NativeDecoder, NativeLinear, open_library
from lantern_hpu.backends.cpu.native.sampling import (
    native_commit,
    native_distinct,
    native_place,
    native_probs,
    native_race,
    native_sample,
    native_traverse,
    native_walk,
)
from lantern_hpu.core import Request, RunStats
from lantern_hpu.decode.engine import Engine
from lantern_hpu.errors import DeviceError
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.transformer import Block, Target
from lantern_hpu.ops.kernels import PLAIN, place_tokens
from lantern_hpu.ops.kv_cache import KVCache, LayerCache
from lantern_hpu.ops.quantized import quantized_layer, replace_layers
from lantern_hpu.ops.sampling import (
    guided_probs,
    race,
    sample_distinct_in_order,
    sample_in_order,
)
from lantern_hpu.tree import DraftTree, load_tree
from tests.marks import mostly_slow
from tests.test_kernels import (
    RULES,
    TREES_TO_COMMIT,
    Walked,
    check_commit,
    logits_to_try,
    places_to_try,
    same_traversal,
)
from tests.tiny import draw, request, spec_for, tiny_config, tiny_models

LIBRARY, WHY = open_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=WHY)

LLAMA = {"rope": "1d", "rope_pairs": "half"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llamagen": {},
    "janus": LLAMA,
    "chameleon": {"qk_norm": True, "heads": 4, **LLAMA},
    "emu3": {"heads": 4, "kv_heads": 2, **LLAMA},
    "emu3.5": {"heads": 4, "kv_heads": 2, "head_size": 48, "qk_norm": "rms", **LLAMA},
    "qwen2": {"heads": 4, "kv_heads": 1, "qkv_bias": True, **LLAMA},
    "mammothmoda2": {"heads": 4, "qkv_bias": True, "word_layers": 2, "word_rows": 9, **LLAMA},
    "glm": {"heads": 4, "kv_heads": 2, "qkv_bias": True, "sandwich_norms": True, **LLAMA},
}
FORMATS = {
    "bfloat16": (torch.bfloat16, 2e-2),
    "half": (torch.float32, 2e-6),
    "float32": (torch.float32, 2e-6),
    "int8": (torch.bfloat16, 2e-2),
    "int8 float32": (torch.float32, 2e-4),
    "int4 float32": (torch.float32, 2e-4),
}
NUMBERS = {"bfloat16": 0, "half": 1, "float32": 2, "int8": 3, "int8 float32": 4, "int4 float32": 4}
S = 48  # cache positions of a row


def test_the_limit_that_torch_knows_is_kept(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    found = open_library.__wrapped__()
    assert found[1] == "avx2", found


def make_target(changes: dict[str, Any], form: str = "float32") -> Target:
    torch.manual_seed(0)
    config = tiny_config(**{"dim": 128, "layers": 3, "ffn_dim": 192, **changes})
    target = Target(config).requires_grad_(False)
    for weight in target.parameters():
        weight.add_(0.05 * torch.randn_like(weight))
        if form == "half":
            weight.copy_(weight.half().float())
    target = target.to(FORMATS[form][0])
    if form.startswith("int"):
        replace_layers(target, nn.Linear, partial(quantized_layer, form=form.split()[0]))
    return target


def native_of(target: Target) -> NativeDecoder:
    return NativeDecoder(list(target.layers), target.norm)


def make_rope(config: TransformerConfig, rows: int, tokens: int, dtype: torch.dtype) -> Tensor:
    angles = torch.randn(rows, tokens, 1, config.head_dim // 2)
    return torch.cat([angles.cos(), angles.sin()], 2).to(dtype)


def make_cache(
    config: TransformerConfig, rows: int, dtype: torch.dtype, by_head: bool = False
) -> KVCache:
    sizes = config.layers, rows, S, config.kv, config.head_dim
    cache = KVCache.allocate(*sizes, dtype, torch.device("cpu"), by_head)
    for layer in cache.layers:
        layer.k.copy_(torch.randn(layer.k.shape))
        layer.v.copy_(torch.randn(layer.v.shape))
    return cache


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, T, S] bool -> [R, 1, T, S]"""
    return (~visible)[:, None].to(dtype) * torch.finfo(dtype).min


def step_arguments(
    config: TransformerConfig, rows: int, tokens: int, dtype: torch.dtype
) -> dict[str, Any]:
    """A tree step: two accepted positions move, the new ones see what is committed and their ancestors."""
    length = torch.arange(rows) * 7 % 13 + 10  # [R]
    start = torch.arange(rows) * S + length
    goal, source = start[:, None] + torch.tensor([0, 1]), start[:, None] + torch.tensor([3, 5])
    new = start[:, None] + 8 + torch.arange(tokens)
    visible = (torch.arange(S) < (length + 2)[:, None]).unsqueeze(1).repeat(1, tokens, 1)
    for row in range(rows):
        for token in range(tokens):
            seen = torch.arange(token % 3, token + 1, 2)  # its ancestors and itself
            visible[row, token, length[row] + 8 + seen] = True
            visible[row, token, length[row] + 8 + token] = True
    return {
        "x": torch.randn(rows, tokens, config.dim).to(dtype),
        "rope": make_rope(config, rows, tokens, dtype),
        "mask": additive(visible, dtype),
        "index": torch.cat([goal, new], 1).flatten().int(),
        "source": source.flatten().int(),
    }


def assert_close(mine: Tensor, plain: Tensor, tolerance: float) -> None:
    assert mine.shape == plain.shape and mine.dtype == plain.dtype
    assert (mine.float() - plain.float()).abs().max() <= tolerance * plain.float().abs().max()


@pytest.mark.parametrize("by_head", mostly_slow([False, True], True))
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_equals_the_plain_one(family: str, form: str, by_head: bool, isa: str) -> None:
    target, (dtype, tolerance) = make_target(FAMILIES[family], form), FORMATS[form]
    decoder = native_of(target)
    for tokens in (1, 5, 9):
        results = []
        for forward in (target, decoder):
            torch.manual_seed(tokens)
            cache = make_cache(target.config, 3, dtype, by_head)
            arguments = step_arguments(target.config, 3, tokens, dtype)
            features = forward(**arguments, cache=cache, aux_layers=(0, 1))
            results.append([features, *(x for layer in cache.layers for x in (layer.k, layer.v))])
        for plain, mine in zip(*results, strict=True):
            assert_close(mine, plain, tolerance)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_equals_the_plain_one(family: str, form: str, isa: str) -> None:
    """Two of three rows are admitted: they attend to themselves alone, behind their pads."""
    target, (dtype, tolerance) = make_target(FAMILIES[family], form), FORMATS[form]
    decoder, width = native_of(target), 12
    index = (torch.tensor([2, 0])[:, None] * S + torch.arange(width)).flatten().int()
    visible = torch.ones(width, width, dtype=torch.bool).tril().repeat(2, 1, 1)
    visible[0, :, :5] = False
    results = []
    for forward in (target, decoder):
        torch.manual_seed(3)
        cache = make_cache(target.config, 3, dtype)
        x = torch.randn(2, width, target.config.dim).to(dtype)
        rope, words = make_rope(target.config, 2, width, dtype), None
        if target.config.word_layers:  # runs of one token and of many, which rows share
            words = torch.tensor([1, 1, 1, 0, 1, 1, 0, 0, 0, 1, 0, 1]).bool().repeat(2, 1)
        mask, kept = additive(visible, dtype), cache.written(index, 2)
        features = forward(x, rope, mask, kept, index, words=words)
        results.append([features[0, 5:], features[1], *(layer.k for layer in cache.layers[:1])])
    for plain, mine in zip(*results, strict=True):
        assert_close(mine, plain, tolerance)


def test_a_drafters_block_equals_the_plain_one(isa: str) -> None:
    """No norm before its attention, none behind it."""
    torch.manual_seed(0)
    config = tiny_config(dim=128, layers=1, ffn_dim=192)
    block = Block(config, PLAIN, input_norm=False).requires_grad_(False)
    decoder, results = NativeDecoder([block], None), []
    for native_form in (False, True):
        torch.manual_seed(1)
        cache = make_cache(config, 3, torch.float32)
        arguments = step_arguments(config, 3, 4, torch.float32)
        layer: Any = cache if native_form else cache.layers[0]
        results.append((decoder if native_form else block)(**arguments, cache=layer))
    assert_close(results[1], results[0], 2e-6)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("sizes", [(128, 96), (192, 100), (64, 1)])
def test_a_matrix_equals_the_plain_one(form: str, sizes: tuple[int, int], isa: str) -> None:
    torch.manual_seed(0)
    dtype, tolerance = FORMATS[form]
    plain: Any = nn.Linear(*sizes).requires_grad_(False)
    if form == "half":
        plain.weight.copy_(plain.weight.half().float())
    plain = plain.to(dtype)
    if form.startswith("int"):
        plain = quantized_layer(plain, form.split()[0])
    mine, x = NativeLinear(plain, NUMBERS[form]), torch.randn(3, 7, sizes[0]).to(dtype)
    assert_close(mine(x), plain(x), tolerance)


@pytest.mark.parametrize("form", FORMATS)
def test_a_rows_bits_depend_on_nothing_but_itself(form: str, isa: str) -> None:
    """From 1 to 300 rows of a product; 1 to 40 rows of a step; one thread or two."""
    target, (dtype, _) = make_target(FAMILIES["emu3"], form), FORMATS[form]
    decoder, linear = native_of(target), target.head
    matrix = NativeLinear(linear, decoder.format)
    torch.manual_seed(5)
    x = torch.randn(300, target.config.dim).to(dtype)
    whole = matrix(x)
    for rows in (1, 2, 3, 5, 6, 7, 11, 64, 299):
        assert torch.equal(matrix(x[:rows]), whole[:rows])
        assert torch.equal(matrix(x[-rows:]), whole[-rows:])
    arguments = step_arguments(target.config, 40, 3, dtype)
    cache = make_cache(target.config, 40, dtype)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(decoder(**arguments, cache=copied(cache, 0, 40)))
    torch.set_num_threads(threads)
    assert torch.equal(*results)
    for first, rows in ((0, 1), (7, 1), (3, 2), (10, 13)):
        mine = copied(cache, first, rows)
        part = {
            k: v[first : first + rows] for k, v in arguments.items() if k in ("x", "rope", "mask")
        }
        for name in ("index", "source"):
            every = arguments[name].unflatten(0, (40, -1))[first : first + rows] - first * S
            part[name] = every.flatten().contiguous()
        assert torch.equal(decoder(**part, cache=mine), results[0][first : first + rows])


def copied(cache: KVCache, first: int, rows: int) -> KVCache:
    """A copy of some rows of a cache."""
    part = slice(first * S, (first + rows) * S)
    each = cache.layers
    return KVCache(tuple(LayerCache(x.k[part].clone(), x.v[part].clone(), rows) for x in each))


def test_positions_that_are_masked_change_no_bit(isa: str) -> None:
    target = make_target(FAMILIES["llamagen"])
    decoder = native_of(target)
    arguments = step_arguments(target.config, 2, 3, torch.float32)
    cache = make_cache(target.config, 2, torch.float32)
    spoiled = copied(cache, 0, 2)
    clean = decoder(**arguments, cache=copied(cache, 0, 2))
    hidden = (arguments["mask"] != 0).all(2).flatten()  # [R S]
    hidden[arguments["source"].long()] = False  # these are read before they are masked
    for layer in spoiled.layers:
        layer.k[hidden] = torch.where(layer.k[hidden] > 0, 1e4, -1e4)
        layer.v[hidden] = 1e6
    assert bool(hidden.any()) and torch.equal(decoder(**arguments, cache=spoiled), clean)


@torch.no_grad()
def test_left_padding_is_not_read(isa: str) -> None:
    """Whole blocks of positions before the first one that a row's queries attend to, whatever lies there."""
    target = make_target(FAMILIES["llamagen"])
    decoder = native_of(target)
    arguments = step_arguments(target.config, 2, 3, torch.float32)
    arguments["mask"][1, ..., :16] = torch.finfo(torch.float32).min
    cache = make_cache(target.config, 2, torch.float32)
    assert_close(
        decoder(**arguments, cache=cache), target(**arguments, cache=deepcopy(cache)), 1e-5
    )
    clean = decoder(**arguments, cache=cache)
    for layer in cache.layers:
        layer.k[S + 6 : S + 16], layer.v[S + 6 : S + 16] = torch.nan, torch.nan
    assert torch.equal(decoder(**arguments, cache=cache), clean)


@pytest.mark.parametrize("vocabulary", [1, 5, 100, 4097])
def test_draws_are_those_of_torch(vocabulary: int) -> None:
    """Sharp and flat distributions, such with zeros, and such with fewer tokens than there are draws."""
    for seed in range(40):
        torch.manual_seed(seed)
        probs, uniform = torch.rand(3, 2, vocabulary) ** (seed % 5), torch.rand(3, 2, 1 + seed % 6)
        probs = probs * (torch.rand(probs.shape) < (1, 0.3, 0.001)[seed % 3])
        one = uniform[..., 0]
        assert torch.equal(native_sample(probs, one), sample_in_order(probs, one))
        drawn = native_distinct(probs, uniform)
        assert torch.equal(drawn, sample_distinct_in_order(probs, uniform))


@pytest.mark.parametrize("rule", RULES)
def test_a_walk_is_torchs_to_the_last_bit(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the distribution too, from which the next token is drawn."""
    for vocabulary in (13, 1700):
        monkeypatch.setattr("tests.test_kernels.V", vocabulary)
        for seed in range(12):
            got, want = Walked("cpu", seed).both(rule, native_walk)
            for name, value in vars(want).items():
                assert torch.equal(getattr(got, name), value), name


@pytest.mark.parametrize("rule", ["exact", "blended"])
def test_drafts_verified_together_are_torchs_to_the_last_bit(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for vocabulary in (13, 1700):
        monkeypatch.setattr("tests.test_kernels.V", vocabulary)
        for seed in range(60 if vocabulary == 13 else 6):
            walked = Walked("cpu", seed, sharpness=(2, 0.5, 6)[seed % 3])
            got, want = walked.together(rule, native_traverse)
            same_traversal(walked.tree, got, want, exactly=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocabulary", "top_k"), [(5, [2, 5]), (1000, [37, 1000]), (130, [1, 120])], ids=str
)
def test_probs_are_torchs_to_the_last_bit(
    dtype: torch.dtype, vocabulary: int, top_k: list[int]
) -> None:
    for given in logits_to_try("cpu", dtype, vocabulary, top_k):
        for use_top_p in (False, True):
            got, want = (f(*given, use_top_p, False) for f in (native_probs, guided_probs))
            assert torch.equal(got, want) and got.dtype == want.dtype


@pytest.mark.parametrize("images", [1, 3])
def test_places_are_torchs(images: int) -> None:
    for given in places_to_try("cpu", images):
        pairs = zip(native_place(*given), place_tokens(*given), strict=True)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize("vocabulary", [1, 7, 100, 4096])
def test_races_are_won_by_the_first_of_the_largest(vocabulary: int) -> None:
    """Of many ties, too, and where probabilities are NaN."""
    torch.manual_seed(0)
    probs, noise = torch.rand(3, 5, vocabulary), torch.rand(3, 5, vocabulary)
    token = torch.arange(vocabulary).int()
    for x, e in (
        (probs, noise),
        ((9 * probs).round(), (3 * noise).round()),
        (probs * torch.nan, noise),
    ):
        assert torch.equal(native_race(x, e, token), race(x, e, token))


@pytest.mark.parametrize("healthy", [True, False])
@pytest.mark.parametrize("name", TREES_TO_COMMIT)
def test_a_commit_leaves_the_state_that_torchs_leaves(name: str, healthy: bool) -> None:
    check_commit(native_commit, name, healthy)


@pytest.mark.parametrize(
    "method", ["ar", "eagle@deep_7", "scd@4", "sjd-pac@2:2x1", "lantern++@broad_7"]
)
def test_native_kernels_draw_the_tokens_of_the_plain_ones(model: Path, method: str) -> None:
    drawn = []
    for kernels in ("auto", "plain"):
        pipe = LanternPipeline.from_pretrained(str(model), device="cpu", kernels=kernels)
        drawn.append(pipe(["a red cat"] * 3, seed=5, method=method, output_type="tokens").tokens)
    assert [x.tolist() for x in drawn[0]] == [x.tolist() for x in drawn[1]]


def test_sizes_that_it_lacks_are_refused() -> None:
    target = make_target({"dim": 72, "heads": 3, "ffn_dim": 96})  # heads of 24
    decoder = native_of(target)
    arguments = step_arguments(target.config, 1, 1, torch.float32)
    with pytest.raises(RuntimeError, match="lacks"):
        decoder(**arguments, cache=make_cache(target.config, 1, torch.float32))


@pytest.mark.parametrize("broken", ["absent", "damaged", "foreign", "another version"])
def test_a_library_that_cannot_be_used_is_named(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No exception: one line that says why, and how it is built."""
    file = tmp_path / "_decoder.so"
    if broken == "damaged":
        file.write_bytes(b"\x7fELF" + bytes(60))
    if broken == "foreign":
        file.write_bytes(b"MZ" + bytes(60))
    if broken == "another version":
        (real,) = sorted(Path(native.__file__).parent.glob("_decoder*.so"))[-1:]
        file.write_bytes(real.read_bytes())
        monkeypatch.setattr(native, "ABI", native.ABI + 1)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    open_library.cache_clear()
    library, why = open_library()
    monkeypatch.undo()
    open_library.cache_clear()
    assert library is None and "native decoder" in why and "pip install" in why


def loaded_openmp() -> list[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line[73:] for line in maps if " r-xp " in line and "omp" in line[73:]})


@pytest.mark.parametrize("folder", ["torch/lib", "torch.libs"])
def test_openmp_is_the_one_that_torch_has_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Another would be a second runtime, and a mapped file is no library, even a copy of one: that would be run."""
    before = loaded_openmp()
    real = Path(before[0]).read_bytes()
    home = tmp_path / "a user"
    (home / folder).mkdir(parents=True)
    places = [home / folder, tmp_path]
    decoys = [place / name for place in places for name in ("libgomp-98b2.so.1", "libomp.npy")]
    for decoy in decoys:
        decoy.write_bytes(real)
    maps = [np.memmap(decoy, mode="r") for decoy in decoys]
    for package in (torch.__file__, str(home / "torch" / "__init__.py")):
        monkeypatch.setattr(torch, "__file__", package)
        native.share_openmp()
        assert loaded_openmp() == before
    opened = list[str]()
    monkeypatch.setattr("ctypes.CDLL", lambda name, mode: opened.append(name))
    native.share_openmp()
    assert opened == [str(home / folder / "libgomp-98b2.so.1")]
    del maps


@pytest.mark.parametrize("line", ["long rows;", "float x[4];", "enum { A };", "int f(int a,"])
def test_a_header_that_is_written_otherwise_is_one_error(line: str) -> None:
    with pytest.raises(DeviceError, match=r"decoder\.h cannot be read"):
        native.read_header(f"typedef struct {{\n    {line}\n}} Sizes;")


@pytest.mark.slow
def test_a_model_in_the_native_form_draws_what_it_draws_alone() -> None:
    """The embedded model with its drafter: two images of a batch are those of two calls."""
    pipe = LanternPipeline.from_pretrained("builtin", layout="native", pictures=False)
    assert pipe.fit.layout == "native"
    for method in ("ar", "scd@4", "eagle@chain_2"):
        both = pipe(["a red apple", "a blue bird"], seed=4, method=method, output_type="tokens")
        alone = pipe("a blue bird", seed=5, method=method, output_type="tokens")
        assert both.tokens[1].tolist() == alone.tokens[0].tolist()
    pipe.close()


class Operators(TorchDispatchMode):
    """Counts torch's operators, views included, and the native calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


# Of one image of the embedded model
MOST_OPERATORS = {"ar": 27, "scd@4": 63, "sjd-pac@2:2x1": 108, "eagle@chain_2": 119}


def test_a_step_takes_no_more_operators_than_this() -> None:
    pipe = LanternPipeline.from_pretrained("builtin", layout="native", pictures=False)
    for method, most in MOST_OPERATORS.items():
        setting = pipe.resolve(method)
        requests = [Request("a red apple", 0, pipe.model.sampling, setting.relaxation)]
        engine = pipe.engines.get(pipe.spec(requests, setting.tree, 1))
        pipe.prepare(engine, requests, RunStats())
        with torch.no_grad(), Operators() as operators:
            engine.step()
        assert operators.count <= most, method
    pipe.close()


def test_a_model_that_the_native_form_lacks_is_told_apart() -> None:
    why = native.why_unsupported([make_target({"dim": 72, "heads": 3, "ffn_dim": 96})])
    assert "the head size is not a multiple of 16" in why
    assert native.why_unsupported([make_target({})]) == ""


def test_both_orders_of_a_cache_take_the_same_writes_and_moves() -> None:
    here, there = (
        KVCache.allocate(1, 2, 5, 3, 4, torch.bfloat16, torch.device("cpu"), by_head).layers[0]
        for by_head in (False, True)
    )
    goal, news = torch.tensor([7, 2, 4]), torch.randn(3, 3, 4).bfloat16()
    for cache in (here, there):
        for part in cache.prepare_write():
            part.index_copy_(0, goal, news)
            part.index_copy_(0, goal[:2], part.index_select(0, goal.flip(0)[:2]))
    for one, other in zip(here.read(), there.read(), strict=True):
        assert torch.equal(one, other) and one.shape == (2, 5, 3, 4)
    assert here.read()[0].stride() == (60, 12, 4, 1) and there.read()[0].stride() == (20, 4, 40, 1)


@pytest.mark.parametrize("mode", mostly_slow(["eager", "strict"], "eager"))
@pytest.mark.parametrize("tree", [None, "scd:4", "broad_7", "dynamic:2x2x5"])
def test_an_engine_draws_the_same_with_either_order(tree: str | None, mode: str) -> None:
    target, drafter = tiny_models()
    models = target.bfloat16(), drafter.bfloat16()
    native.pack_model(models)
    drafted = load_tree(tree) if tree else DraftTree.root_only()
    requests = [request("abcd", seed) for seed in range(2)]
    engines: list[Engine] = []
    for by_head in (False, True):
        fit = DevicePlan(CPUBackend(), torch.bfloat16, mode, keys_by_head=by_head)
        engines.append(Engine(*models, spec_for(drafted, requests), fit))
        assert engines[-1].state.kv_cache.layers[0].k.is_contiguous() is not by_head
    tokens = [draw(engine, requests).tokens.tolist() for engine in engines]
    assert tokens[0] == tokens[1]
    caches = [engine.state.kv_cache.layers for engine in engines]
    for layer, other in zip(*caches, strict=True):
        assert torch.equal(layer.k, other.k) and torch.equal(layer.v, other.v)


@torch.no_grad()
@pytest.mark.parametrize("form", FORMATS)
def test_rows_that_attend_to_nothing_are_left_out(form: str, isa: str) -> None:
    """As those of images that are done: the others keep their bits, and nothing of a row left out is written."""
    target = make_target({}, form)
    dtype, decoder = FORMATS[form][0], native_of(target)
    arguments = step_arguments(target.config, 3, 4, dtype)
    whole = make_cache(target.config, 3, dtype)
    some = deepcopy(whole)
    want = decoder(**arguments, cache=whole)
    before = [layer.k.clone() for layer in some.layers]
    arguments["mask"] = arguments["mask"].clone()
    arguments["mask"][1] = torch.finfo(dtype).min
    got = decoder(**arguments, cache=some)
    assert torch.equal(got[[0, 2]], want[[0, 2]]) and not got[1].any()
    for layer, known, old in zip(some.layers, whole.layers, before, strict=True):
        rows = [one.unflatten(0, (3, -1)) for one in (layer.k, known.k, old)]
        assert torch.equal(rows[0][[0, 2]], rows[1][[0, 2]]) and torch.equal(rows[0][1], rows[2][1])


def test_idle_slots_of_a_server_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two images in eight slots cost the decoder what two cost, and are drawn as alone."""
    rows: list[int] = []
    decode = NativeDecoder.decode

    def counted(self: NativeDecoder, each: list[Any], *others: Any) -> Tensor:
        rows.append(len(each[0]))
        return decode(self, each, *others)

    models = tiny_models()
    native.pack_model(models)
    requests = [request("abcd", seed) for seed in range(2)]
    spec = spec_for(load_tree("scd:4"), requests)
    closed = draw(Engine(*models, spec, DevicePlan(CPUBackend(), torch.float32)), requests).tokens
    eight = replace(spec, images=8, open=True)
    engine = Engine(*models, eight, DevicePlan(CPUBackend(), torch.float32))
    engine.warm_up(Request("cat"))
    monkeypatch.setattr(NativeDecoder, "decode", counted)
    tokens = draw(engine, requests).tokens
    assert max(rows) <= 2 * (2 if spec.guidance else 1)
    assert tokens[:2].tolist() == closed.tolist()
