"""Networks: positions, masks and caches - whatever the order of computing, the same features come out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_hpu.decode.common import Drafts, StaticTables
from lantern_hpu.decode.drafting.eagle import EagleDrafting
from lantern_hpu.models.config import VQConfig
from lantern_hpu.models.transformer import rope_table
from lantern_hpu.models.vq import VQModel
from lantern_hpu.ops.buffers import additive_mask
from lantern_hpu.ops.kernels import rotate
from lantern_hpu.ops.kv_cache import KVCache
from lantern_hpu.tree import DraftTree, load_static
from tests.marks import mostly_slow
from tests.tiny import (
    NAMES,
    advance,
    condition,
    make_engine,
    request,
    spec_for,
    tiny_config,
    tiny_models,
)
from tests.twin import features, full_mask, guesses

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped heads": {"heads": 4, "kv_heads": 2},
    "qk norm": {"qk_norm": True},
    "1d half": {"rope": "1d", "rope_pairs": "half"},
    "zero prefix": {"rope_prefix": "zero"},
    "chameleon": {"rope": "1d", "rope_pairs": "half", "qk_norm": True, "heads": 4, "kv_heads": 1},
    "wide heads": {"rope": "1d", "qk_norm": "rms", "heads": 4, "kv_heads": 2, "head_size": 24},
}
PROMPTS = ["abcd", "xy", "q"]  # the last two are padded on the left


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


def test_interleaved_and_half_differ_by_the_feature_permutation() -> None:
    half = 8
    order = torch.arange(2 * half).view(half, 2).T.flatten()  # 0, 2, 4, ..., 1, 3, 5, ...
    for rope in ("1d", "2d"):
        table = rope_table(tiny_config(rope=rope, dim=32), 20)[None]
        for feature in range(2 * half):
            unit = torch.zeros(1, 20, 1, 2 * half)
            unit[..., feature] = 1.0
            interleaved, by_half = rotate(unit, table, True), rotate(unit, table, False)
            assert torch.equal(interleaved[..., order], rotate(unit[..., order], table, False))
            if feature not in (0, 2 * half - 1):
                assert not torch.equal(interleaved, by_half)


def test_2d_positions_turn_with_row_and_column() -> None:
    config = tiny_config(grid=(3, 5), dim=32)  # 8 angles: 4 for the row, 4 for the column
    table = rope_table(config, 4 + 15 + 6)
    row, column = 2, 4
    cosines, sines = table[4 + 5 * row + column]
    for i in range(4):
        speed = 10000.0 ** (-i / 4)
        assert float(cosines[i]) == pytest.approx(math.cos(row * speed), abs=1e-6)
        assert float(sines[i]) == pytest.approx(math.sin(row * speed), abs=1e-6)
        assert float(cosines[4 + i]) == pytest.approx(math.cos(column * speed), abs=1e-6)
        assert float(sines[4 + i]) == pytest.approx(math.sin(column * speed), abs=1e-6)
    assert not table[19:].any()  # overshoot


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_slots_get_no_weight_and_an_empty_row_no_nan(dtype: torch.dtype) -> None:
    mask = additive_mask(torch.tensor([[[True, False], [False, False]]]), dtype)
    assert mask.shape == (1, 1, 2, 2) and mask.dtype == dtype
    weights = (mask + torch.tensor([0.0, 30.0], dtype=dtype)).softmax(-1)[0, 0]
    assert weights[0].tolist() == [1.0, 0.0]
    assert weights.isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_forward_equals_the_whole_sequence_at_once(variant: str) -> None:
    target, _ = tiny_models(tiny_config(**VARIANTS[variant]))
    config = target.config
    prefix, valid, *_ = condition(config, PROMPTS)
    tokens = torch.randint(config.vocab_size, (12,), generator=torch.Generator().manual_seed(1))
    want = features(target, prefix, valid, tokens.tolist())
    rows, size = len(prefix), 4 + 12
    cache = KVCache.allocate(
        config.layers, rows, size, config.kv, config.head_dim, torch.float32, torch.device("cpu")
    )
    x = torch.cat([prefix, target.embed(tokens).expand(rows, -1, -1)], 1)
    rope, mask = rope_table(config, size).expand(rows, -1, -1, -1), full_mask(valid, size)
    start, got = 0, []
    for width in (4, 1, 1, 5, 2, 3):  # prefill, single tokens, blocks
        part = slice(start, start + width)
        slots = (torch.arange(rows)[:, None] * size + torch.arange(start, start + width)).flatten()
        got.append(
            target(x[:, part], rope[:, part], additive_mask(mask[:, part], x.dtype), cache, slots)
        )
        start += width
    close(torch.cat(got, 1), want)


def leaves(tree: DraftTree) -> list[int]:
    return [node for node, below in enumerate(tree.children) if not below]


@pytest.mark.parametrize(
    ("name", "variant"),
    [("chain", v) for v in ("plain", "chameleon")]
    + mostly_slow((n, v) for n in NAMES for v in ("plain", "chameleon") if n != "chain")
    + [("mc_sim_7b_63", v) for v in VARIANTS],
)
def test_tree_verification_equals_a_sequential_pass_over_each_path(name: str, variant: str) -> None:
    tree, images = load_static(name), len(PROMPTS)
    models = tiny_models(tiny_config(**VARIANTS[variant], grid=(6, 6)))
    requests = [request(prompt, 80 + seed) for seed, prompt in enumerate(PROMPTS)]
    engine = make_engine(models, spec_for(tree, requests))
    advance(engine, requests, 2)
    state, step = engine.state, engine.step_function
    config = engine.target.config
    generator = torch.Generator().manual_seed(2)
    drafts = torch.randint(config.vocab_size, (images, tree.size), generator=generator)
    drafts[:, 0] = state.root
    assert len(set(state.count.tolist())) > 1  # images of one batch stand at different places
    with torch.no_grad():
        trees = Drafts(drafts, None, StaticTables(tree)(images))
        hidden = step.verify(trees, state.count + config.prefix, state)
    prefix, valid, *_ = condition(config, PROMPTS)
    for image in range(images):
        rows = [image, image + images]
        committed = state.tokens.view(images, -1)[image, : int(state.count[image])].tolist()
        for leaf in leaves(tree):
            path = list(dict.fromkeys(tree.path_table[leaf]))
            sequence = committed + drafts[image, path].tolist()
            want = features(engine.target, prefix[rows], valid[rows], sequence)[:, -len(path) :]
            close(hidden[rows][:, path], want)


@pytest.mark.parametrize("sees_pads", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafter_catch_up_equals_one_pass_over_all_pairs(variant: str, sees_pads: bool) -> None:
    models = tiny_models(
        tiny_config(**VARIANTS[variant], grid=(6, 6)), sees_pads=sees_pads, input_norm=sees_pads
    )
    requests = [request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    engine = make_engine(models, spec_for(load_static("mc_sim_7b_63"), requests))
    advance(engine, requests, 3)
    state, drafting = engine.state, engine.step_function.drafting
    assert isinstance(drafting, EagleDrafting)
    length = state.count + engine.target.config.prefix
    with torch.no_grad():
        guess = drafting.catch_up(length, state)
    prefix, valid, *_ = condition(engine.target.config, PROMPTS)
    for image in range(len(PROMPTS)):
        rows = [image, image + len(PROMPTS)]
        count = int(state.count[image])
        tokens = state.tokens.view(len(PROMPTS), -1)[image, : count + 1].tolist()
        hidden = features(engine.target, prefix[rows], valid[rows], tokens[:-1])
        close(guess[rows, 0], guesses(models[1], hidden, valid[rows], tokens)[:, -1])


def test_pads_hide_from_the_drafter_unless_it_was_trained_with_them() -> None:
    config = tiny_config()
    hidden = torch.randn(1, 8, config.dim, generator=torch.Generator().manual_seed(3))
    changed = hidden.clone()
    changed[:, :2] += 1.0  # features of the two pads
    valid = torch.tensor([[False, False, True, True]])
    for sees_pads in (False, True):
        _, drafter = tiny_models(config, sees_pads=sees_pads)
        one, other = (guesses(drafter, h, valid, range(8))[:, 2:] for h in (hidden, changed))
        assert torch.equal(one, other) != sees_pads


@pytest.mark.parametrize("decoder_only", [0, 1, 2])
def test_a_tokenizer_may_draw_finer_than_it_reads(decoder_only: int) -> None:
    """With levels of the decoder alone, the encoder is that of a coarser tokenizer on pictures averaged over areas."""
    config = VQConfig(8, (1, 2, 2), 1, 8, 4, 32, groups=4, decoder_only=decoder_only)
    model = VQModel(config).eval()
    widths = (8, 16, 16)[decoder_only:]
    multipliers = tuple(width // widths[0] for width in widths)
    coarse = VQModel(replace(config, channels=widths[0], multipliers=multipliers, decoder_only=0))
    known = {n: t for n, t in model.state_dict().items() if not n.startswith("decoder")}
    assert not coarse.load_state_dict(known, strict=False).unexpected_keys
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    size = 16 >> decoder_only
    averaged = images.unflatten(2, (size, -1)).unflatten(4, (size, -1)).mean((3, 5))
    with torch.no_grad():
        codes = model.encode(images)  # [2, 4, 4]
        assert torch.equal(codes, coarse.encode(averaged)) and len(codes.unique()) > 1
        assert model.decode_codes(codes.flatten(1), (4, 4)).shape == images.shape
