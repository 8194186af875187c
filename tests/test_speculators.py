"""Drafters of the `speculators` package: type `eagle` is read, with what its files leave out; the others are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lantern_hpu.errors import WeightsError
from lantern_hpu.models.files.load import open_model
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.model import ImageModel, Placement
from lantern_hpu.zoo.find import find_parts


def loaded(model: Path, **given: Any) -> ImageModel:
    return open_model(find_parts(str(model), PartOverrides(**given))).load(Placement())


def written(model: Path, folder: Path, whole: bool, **about: Any) -> Path:
    """The model's drafter as EagleSpeculator.save_pretrained writes one."""
    drafter = loaded(model).drafter
    assert drafter is not None
    sizes, state, layer = drafter.config, drafter.state_dict(), "transformer."
    heights = [sizes.width, sizes.kv_width, sizes.kv_width]
    parts = dict(zip("qkv", state["block.attention.qkv.weight"].split(heights), strict=True))
    gate, up = state["block.ffn.gate_up.weight"].chunk(2)
    tensors = {f"{layer}self_attn.{name}_proj.weight": part for name, part in parts.items()}
    tensors |= {
        "fusion_fc.weight": state["fc.weight"],
        f"{layer}self_attn.o_proj.weight": state["block.attention.out.weight"],
        f"{layer}post_attention_layernorm.weight": state["block.ffn_norm.weight"],
        f"{layer}mlp.gate_proj.weight": gate,
        f"{layer}mlp.up_proj.weight": up,
        f"{layer}mlp.down_proj.weight": state["block.ffn.down.weight"],
    }
    if whole:
        head = {"lm_head.weight": torch.zeros(sizes.vocab_size, sizes.dim)}
        tensors |= {
            "embed_tokens.weight": state["embed.weight"],
            "fusion_fc.bias": state["fc.bias"],
        }
        tensors |= head
    folder.mkdir()
    save_file(
        {name: part.contiguous() for name, part in tensors.items()}, folder / "model.safetensors"
    )
    config = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "fusion_bias": whole,
        "layernorms": False,
        "transformer_layer_config": {
            "hidden_size": sizes.dim,
            "rms_norm_eps": sizes.norm_eps,
            "max_position_embeddings": 2048,
        },
    }
    (folder / "config.json").write_text(json.dumps(config | about))
    return folder


def test_a_drafter_of_the_type_eagle_is_read(model: Path, tmp_path: Path) -> None:
    """Whatever its `max_position_embeddings`, which is the language model's own."""
    folder = written(model, tmp_path / "drafter", whole=True)
    want, got = loaded(model).drafter, loaded(model, drafter=str(folder)).drafter
    assert want is not None and got is not None
    mine, theirs = want.state_dict(), got.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def test_what_the_file_leaves_out_is_the_targets(model: Path, tmp_path: Path) -> None:
    own = loaded(model, drafter=str(written(model, tmp_path / "drafter", whole=False)))
    assert own.drafter is not None and not own.drafter.fc.bias.any()
    table = own.target.embed(torch.arange(len(own.drafter.embed.weight)))
    assert torch.equal(own.drafter.embed.weight, table)


@pytest.mark.parametrize(
    ("about", "named"),
    [
        ({"speculators_model_type": "eagle3"}, "'eagle3'"),
        ({"speculators_model_type": "dflash"}, "'dflash'"),
        ({"layernorms": True}, "'eagle with layernorms'"),
    ],
)
def test_other_types_are_named(
    model: Path, tmp_path: Path, about: dict[str, Any], named: str
) -> None:
    folder = written(model, tmp_path / "drafter", True, **about)
    with pytest.raises(WeightsError) as caught:
        loaded(model, drafter=str(folder))
    assert named in caught.value.why and "0.1 to 0.4" in caught.value.why
