"""The NumPy twins against transformers where it has the same network, and against facts worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from lantern_hpu.models.config import VQConfig
from lantern_hpu.models.vq import VQModel
from tests import numpy_twins as twins
from tests.checkpoints import chameleon, llamagen, synthetic
from tests.checkpoints import files as synthetic_files

RNG = np.random.default_rng(0)
NAMES = ["llamagen-t2i-256", "llamagen-t2i-512", "anole", "anole-hub"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the synthetic checkpoints."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("synthetic")
    synthetic.write_all(root, only=set(NAMES))
    return root


@pytest.fixture(scope="module")
def text_model() -> dict[str, twins.Array]:
    """The weights of a text-to-image .pt under the hub's names."""
    shapes = llamagen.gpt_shapes(caption=llamagen.CAPTION)
    return twins.from_gpt(twins.arrays(synthetic_files.draw_all(shapes, generator(0))))


def caption(slots: int, words: int) -> tuple[twins.Array, list[bool]]:
    features = RNG.normal(size=(slots, llamagen.CAPTION))
    return twins.flip(features, [i < words for i in range(slots)])


# ---------------------------------------------------------------------------------------------------
# Against transformers


def test_chameleon_equals_transformers(folder: Path) -> None:
    from transformers import ChameleonForConditionalGeneration

    # Read anew: a model cast to bfloat16 and back has rounded rotary frequencies.
    model = ChameleonForConditionalGeneration.from_pretrained(folder / "anole", dtype=torch.float32)
    weights = shards(folder / "anole")
    text, image = [16448, 16653], [4, 8195, 77]
    for guided in (True, False):
        ids, valid, positions = twins.anole_row(text, guided, image)
        with torch.no_grad():
            hidden = model.model(
                input_ids=torch.tensor([ids]),
                attention_mask=torch.tensor([valid]).long(),
                position_ids=torch.tensor([positions]),
            ).last_hidden_state
            logits = model.lm_head(hidden)[0].numpy()  # the head itself masks nothing
        ours, features = twins.chameleon_target(weights, 2, ids, valid, positions)
        real = np.flatnonzero(valid)
        assert logits.std() > 0.5
        np.testing.assert_allclose(features[real], hidden[0].numpy()[real], atol=1e-5)
        np.testing.assert_allclose(ours[real], logits[real], atol=5e-5)


def shards(folder: Path) -> dict[str, twins.Array]:
    """All weights of a folder's safetensors files."""
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        state |= load_file(file)
    return twins.arrays(state)


def test_a_block_equals_llama() -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        rms_norm_eps=1e-3,
    )
    model = LlamaForCausalLM(config)
    synthetic_files.fill(model, generator(0))
    weights = twins.arrays(model.state_dict())
    ids = [3, 1, 4, 1, 5, 9, 2]
    table = twins.rope_1d(12, range(len(ids)))
    for pairs in ("half", "interleaved"):
        if pairs == "interleaved":  # the same network with its heads' features in another order
            weights = {
                n: interleave(w, 2) if "q_" in n or "k_" in n else w for n, w in weights.items()
            }
        x = weights["model.embed_tokens.weight"][ids]
        for layer in range(2):
            mask, name = twins.causal_mask(len(ids)), f"model.layers.{layer}."
            x = twins.block(x, weights, name, 2, table, mask, pairs, 1e-3)
        ours = twins.rms_norm(x, weights["model.norm.weight"], 1e-3) @ weights["lm_head.weight"].T
        with torch.no_grad():
            theirs = model(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def interleave(weight: twins.Array, heads: int) -> twins.Array:
    """Rows of q or k: from halves to pairs."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(0, 2, 1, 3).reshape(rows, columns)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------------------
# By hand


@pytest.mark.parametrize("head_dim", [8, 20, 64, 100])
def test_rope_table(head_dim: int) -> None:
    half = head_dim // 2
    table = twins.rope_2d(head_dim, prefix=3, grid=(4, 5), length=30)
    assert table.shape == (30, half, 2)
    assert not table[:3].any() and not table[23:].any()  # condition and overshoot
    cell = table[3 + 2 * 5 + 4]  # row 2, column 4
    angles = np.arctan2(cell[:, 1], cell[:, 0])
    assert angles[0] == pytest.approx(2) and angles[half // 2] == pytest.approx(4 - 2 * math.pi)
    last = 10000.0 ** (-(half - 2 if half % 2 == 0 else half - 1) / half)
    assert angles[half // 2 - 1] == pytest.approx(2 * last)
    assert angles[-1] == pytest.approx(4 * last)


def test_masks() -> None:
    valid = [False, False, True]
    own = twins.padded_mask(valid, 5).astype(int).tolist()
    assert own == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    earlier = twins.padded_mask(valid, 5, "earlier").astype(int).tolist()
    assert earlier[1] == [1, 1, 0, 0, 0] and earlier[:1] + earlier[2:] == own[:1] + own[2:]


def test_caption_projection_equals_torch(text_model: dict[str, twins.Array]) -> None:
    features, valid = caption(6, 4)
    name = "model.cls_embedding.cap_proj."
    fc1, fc2 = (torch.from_numpy(text_model[f"{name}{fc}.weight"]) for fc in ("fc1", "fc2"))
    theirs = F.gelu(torch.from_numpy(features) @ fc1.T, approximate="tanh") @ fc2.T
    ours = twins.text_prefix(text_model, features)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-12)
    assert valid == [False] * 2 + [True] * 4 and not ours[:2].any()


def test_anole_rows() -> None:
    ids, valid, positions = twins.anole_row([20000, 20001, 20002], False, [9, 10])
    assert ids == [1, 1, 1, 1, 0, 8197, 9, 10]
    assert valid == [False] * 4 + [True] * 4
    assert positions == [0, 0, 0, 0, 0, 1, 2, 3]
    ids, valid, positions = twins.anole_row([20000], True, [9])
    assert ids == [0, 20000, 8710, 8197, 9] and all(valid) and positions == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------------------------------------------
# What the networks must do


def test_nobody_looks_ahead_or_at_pads(text_model: dict[str, twins.Array]) -> None:
    grid, tokens = (16, 16), [5, 63, 0, 17]
    features, valid = caption(6, 4)
    prefix = twins.text_prefix(text_model, features)

    def run(prefix: twins.Array, tokens: list[int], **more: Any) -> twins.Array:
        return twins.llamagen_target(text_model, 2, grid, prefix, valid, tokens, **more)[0]

    logits = run(prefix, tokens)
    assert logits.shape == (10, llamagen.CODES)
    np.testing.assert_allclose(run(prefix, tokens[:2]), logits[:8], atol=1e-12)
    noisy = prefix + (np.arange(6) < 2)[:, None]
    for pads in ("self", "earlier"):
        np.testing.assert_allclose(run(noisy, tokens, pads=pads)[2:], logits[2:], atol=1e-12)
    assert np.abs(run(prefix, [5, 63, 1, 17])[8:] - logits[8:]).max() > 0.1


def test_the_condition_is_seen_evenly(text_model: dict[str, twins.Array]) -> None:
    """Their queries and keys are zero: a real condition slot mixes those before it in equal parts."""
    features, valid = caption(5, 5)
    prefix = twins.text_prefix(text_model, features)
    swapped = prefix[[1, 0, 2, 3, 4]]
    weights = {n: w for n, w in text_model.items() if not n.startswith("model.layers.1.")}
    a, b = (
        twins.llamagen_target(weights, 2, (16, 16), p, valid, [1, 2])[1] for p in (prefix, swapped)
    )
    np.testing.assert_allclose(a[2:], b[2:], atol=1e-12)
    assert np.abs(a[0] - b[0]).max() > 0.1


def test_drafter_positions(text_model: dict[str, twins.Array]) -> None:
    """An entry stands where the target's next token stands, and sees every entry before it."""
    shapes = llamagen.drafter_shapes(llamagen.CODES, llamagen.DIM, llamagen.FFN)
    weights = twins.arrays(synthetic_files.draw_all(shapes, generator(3)))
    head = text_model["lm_head.weight"]
    features, valid = caption(6, 2)
    prefix, tokens = twins.text_prefix(text_model, features), [5, 63, 0]
    _, hidden = twins.llamagen_target(text_model, 2, (16, 16), prefix, valid, tokens)

    def run(hidden: twins.Array, tokens: list[int]) -> twins.Array:
        return twins.llamagen_drafter(weights, head, 2, (16, 16), 6, hidden, tokens)[1]

    logits = run(hidden[:8], tokens)
    assert logits.shape == (8, llamagen.CODES)
    np.testing.assert_allclose(run(hidden[:7], tokens[:2]), logits[:7], atol=1e-12)
    np.testing.assert_allclose(run(hidden[:8], [7, 63, 0])[:5], logits[:5], atol=1e-12)
    assert np.abs(run(hidden[:8], [7, 63, 0])[5] - logits[5]).max() > 0.1  # the first token
    pad = hidden.copy()
    pad[0] += 1
    assert np.abs(run(pad[:8], tokens)[7] - logits[7]).max() > 1e-3
    table = twins.rope_2d(64, 5, (16, 16), 8)
    np.testing.assert_array_equal(table, twins.rope_2d(64, 6, (16, 16), 9)[1:])


def test_anole_drafter_hides_pads() -> None:
    shapes = llamagen.drafter_shapes(32, 16, 24, heads=2)
    weights = twins.arrays(synthetic_files.draw_all(shapes, generator(0)))
    hidden, head = RNG.normal(size=(6, 16)), RNG.normal(size=(9, 16))
    valid, positions = [False, False, True, True, True, True], [0, 0, 0, 1, 2, 3]
    ids = [1, 1, 5, 6, 7, 8]
    a = twins.anole_drafter(weights, head, 2, hidden, ids, valid, positions)[1]
    hidden[:2] += 1
    b = twins.anole_drafter(weights, head, 2, hidden, ids, valid, positions)[1]
    np.testing.assert_allclose(a[2:], b[2:], atol=1e-12)
    alone = twins.anole_drafter(weights, head, 2, hidden[2:], ids[2:], valid[2:], positions[2:])[1]
    np.testing.assert_allclose(a[2:], alone, atol=1e-12)


# ---------------------------------------------------------------------------------------------------
# Images


def llamagen_vq(config: VQConfig) -> tuple[VQModel, dict[str, Tensor]]:
    model = VQModel(config).double().eval()
    state = synthetic_files.draw_all(synthetic_files.shapes_of(model.state_dict()), generator(0))
    model.load_state_dict(state)
    return model, state


def test_llamagen_image_equals_the_package() -> None:
    model, state = llamagen_vq(replace(llamagen.VQ, multipliers=(1, 2)))
    codes = RNG.integers(0, 64, 16)
    ours = twins.llamagen_image(twins.arrays(state), codes.tolist())
    with torch.no_grad():
        theirs = model.decode_codes(torch.from_numpy(codes)[None], (4, 4))[0].numpy()
    assert ours.shape == (3, 8, 8) and ours.std() > 0.1
    np.testing.assert_allclose(np.clip(ours, -1, 1), theirs, atol=1e-6)


def test_anole_image_equals_the_package_without_attention() -> None:
    """LlamaGen's decoder is the same one with other names and attention on the deepest level: cut that out."""
    sizes: dict[str, Any] = {"ch": 32, "ch_mult": (1, 2), "res_blocks": 1}
    sizes |= {"z": 32, "embed": 8, "codes": 64}
    state = synthetic_files.draw_all(chameleon.taming_shapes(**sizes), generator(0))
    model, other = llamagen_vq(replace(llamagen.VQ, multipliers=(1, 2), normalize_codebook=False))
    for name in other:
        if "conv_blocks" in name and ".attn." in name and "proj_out" in name:
            other[name].zero_()
    for name, tensor in state.items():
        if name.startswith(("decoder.", "post_quant", "quantize.")):
            name = name.replace("mid.block_1", "mid.0").replace("mid.attn_1", "mid.1")
            name = name.replace("mid.block_2", "mid.2").replace(".block.", ".res.")
            name = name.replace("up.1.", "conv_blocks.0.").replace("up.0.", "conv_blocks.1.")
            assert other[name].shape == tensor.shape
            other[name] = tensor
    model.load_state_dict(other)
    codes = RNG.integers(0, 64, 16)
    ours = twins.anole_image(twins.arrays(state), codes.tolist())
    with torch.no_grad():
        theirs = model.decode_codes(torch.from_numpy(codes)[None], (4, 4))[0].numpy()
    np.testing.assert_allclose(np.clip(ours, -1, 1), theirs, atol=1e-6)
    pixels = twins.anole_pixels(np.array([-2.0, 0.0, 1.0]).reshape(3, 1, 1))
    assert pixels.tolist() == [[[0, 127, 255]]]


# ---------------------------------------------------------------------------------------------------
# The checkpoints themselves


def test_drafters_embed_with_the_targets_head(folder: Path) -> None:
    """D-33."""
    place = folder / "llamagen-t2i-256"
    drafter = torch.load(place / "drafter" / "pytorch_model.bin", weights_only=True)
    target = torch.load(place / "t2i_XL_stage1_256.pt", weights_only=True)["model"]
    assert torch.equal(drafter["module.embed_tokens.weight"], target["output.weight"])
    assert not any("input_layernorm" in name for name in drafter)


def test_hub_names_run(folder: Path) -> None:
    weights = shards(folder / "llamagen-t2i-512")
    _, valid = caption(4, 3)
    prefix = twins.text_prefix(weights, None)[:4]
    logits, _ = twins.llamagen_target(weights, 2, (32, 32), prefix, valid, [1], eps=1e-6)
    assert logits.shape == (5, 64) and np.isfinite(logits).all() and logits.std() > 1
