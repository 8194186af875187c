"""The NumPy twins have the numbers of transformers where that has the same network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import numpy_twins as twins
from tests.checkpoints import files as synthetic_files
from tests.checkpoints import synthetic


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("synthetic")
    synthetic.write_all(root, only={"anole"})
    return root


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
