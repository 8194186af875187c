"""Small random LlamaGen checkpoints in the containers that are published: .pt files of training and shards of the hub.

Names and layouts are those of `FoundationVision/LlamaGen` and of `jadohu/LlamaGen-T2I`; sizes are tiny.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from lantern_hpu.models.config import VQConfig
from lantern_hpu.models.vq import VQModel
from tests.checkpoints.files import (
    WORDS,
    Shapes,
    draw_all,
    fill,
    shapes_of,
    write_json,
    write_pickle,
    write_safetensors,
    write_shards,
)

# Every file has the same small geometry but for the 3B one's head width.
CODES, DIM, FFN, LAYERS, HEADS, CAPTION = 64, 128, 96, 2, 2, 48
CLASSES, SLOTS = 1000, 120
VQ = VQConfig(channels=32, res_blocks=1, z_channels=32, code_dim=8, codebook_size=CODES)
VQ16 = replace(VQ, multipliers=(1, 1, 1, 1, 1), res_blocks=2)
VQ16_WIDER = replace(VQ, multipliers=(1, 1, 1, 1, 2))  # has shortcuts
VQ8 = replace(VQ, multipliers=(1, 1, 1, 2))


def gpt_shapes(
    dim: int = DIM, ffn: int = FFN, layers: int = LAYERS, caption: int | None = None
) -> Shapes:
    """A GPT of FoundationVision's LlamaGen: class table, or caption projection."""
    shapes: Shapes = {"tok_embeddings.weight": (CODES, dim)}
    if caption is None:
        shapes["cls_embedding.embedding_table.weight"] = (CLASSES + 1, dim)
    else:
        shapes["cls_embedding.uncond_embedding"] = (SLOTS, caption)
        shapes["cls_embedding.cap_proj.fc1.weight"] = (dim, caption)
        shapes["cls_embedding.cap_proj.fc2.weight"] = (dim, dim)
    block = {"attention.wqkv": (3 * dim, dim), "attention.wo": (dim, dim)}
    block |= {f"feed_forward.w{i}": (ffn, dim) for i in (1, 3)} | {"feed_forward.w2": (dim, ffn)}
    norms = {"attention_norm": (dim,), "ffn_norm": (dim,)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{name}.weight": s for name, s in (block | norms).items()}
    return shapes | {"norm.weight": (dim,), "output.weight": (CODES, dim)}


def gpt_hf_shapes() -> Shapes:
    """The same network under the names of jadohu/LlamaGen-T2I."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (CODES, DIM),
        "model.cls_embedding.uncond_embedding": (SLOTS, CAPTION),
        "model.cls_embedding.cap_proj.fc1.weight": (DIM, CAPTION),
        "model.cls_embedding.cap_proj.fc2.weight": (DIM, DIM),
    }
    for layer in range(LAYERS):
        shapes |= block_shapes(f"model.layers.{layer}.", DIM, FFN)
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (DIM,)
    return shapes | {"model.norm.weight": (DIM,), "lm_head.weight": (CODES, DIM)}


def block_shapes(prefix: str, dim: int, ffn: int) -> Shapes:
    """One block under the names of transformers, without a norm before the attention."""
    shapes: Shapes = {f"{prefix}self_attn.{x}_proj.weight": (dim, dim) for x in "qkvo"}
    return shapes | {
        f"{prefix}mlp.gate_proj.weight": (ffn, dim),
        f"{prefix}mlp.up_proj.weight": (ffn, dim),
        f"{prefix}mlp.down_proj.weight": (dim, ffn),
        f"{prefix}post_attention_layernorm.weight": (dim,),
    }


def drafter_shapes(rows: int, dim: int, ffn: int, heads: int | None = None) -> Shapes:
    """A drafter; one with `heads` is Anole's, with query-key and input norms."""
    shapes: Shapes = {"embed_tokens.weight": (rows, dim)}
    shapes |= {"fc.weight": (dim, 2 * dim), "fc.bias": (dim,)}
    shapes |= block_shapes("layers.0.", dim, ffn)
    if heads is not None:
        norms = ((f"{x}_norm.{y}") for x in "qk" for y in ("weight", "bias"))
        shapes |= {f"layers.0.self_attn.{name}": (heads, dim // heads) for name in norms}
        shapes["layers.0.input_layernorm.weight"] = (dim,)
    return shapes


def llamagen_config(layers: int, input_type: str, block_size: int, eps: float) -> dict[str, Any]:
    """config.json of LlamaGen's models and drafters in the form of the hub."""
    sizes = {"hidden_size": DIM, "intermediate_size": FFN, "caption_dim": CAPTION}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "block_size": block_size}
    sizes |= {"num_hidden_layers": layers, "vocab_size": CODES, "num_classes": CLASSES}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "input_type": input_type}
    rest = {"cls_token_num": SLOTS, "rms_norm_eps": eps, "rope_base": 10000, "hidden_act": "silu"}
    return kind | sizes | rest


def write_llamagen_vq(
    file: Path, config: VQConfig, generator: Generator, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A tokenizer .pt: weights and the training's counter under "model".

    Returns the raw codebook.
    """
    with torch.device("meta"):
        shapes = shapes_of(VQModel(config).state_dict())
    state = draw_all(shapes, generator, dtype)
    write_pickle(file, {"model": state | {"quantize.codebook_used": torch.zeros(65536)}})
    return state["quantize.embedding.weight"].float()


def write_text_encoder(folder: Path, generator: Generator) -> None:
    """A tiny T5 encoder in the form of google/flan-t5-xl."""
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'\"()-&"
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", -3.0) for word in WORDS]
    pieces += [(letter, -6.0) for letter in letters]
    pieces += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(100))]
    T5Tokenizer(vocab=pieces).save_pretrained(folder)
    make: Any = T5Config  # its arguments are typed in some releases, and not all of them
    config = make(
        vocab_size=256,
        d_model=CAPTION,
        d_kv=12,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    model = T5EncoderModel(config)
    fill(model, generator)
    model.save_pretrained(folder)


def write_class_model(folder: Path, generator: Generator) -> None:
    """A training checkpoint: "model" next to an optimiser, an argparse.Namespace and a RoPE buffer."""
    state = draw_all(gpt_shapes(), generator, torch.bfloat16)
    state["freqs_cis"] = torch.zeros(1 + 16 * 16, DIM // HEADS // 2, 2)
    sizes = {"gpt_type": "c2i", "image_size": 256, "num_classes": CLASSES, "cls_token_num": 1}
    moments = {0: {"step": torch.tensor(5.0), "exp_avg": torch.zeros(4)}}
    optimizer = {"state": moments, "param_groups": [{"lr": 1e-4, "params": [0]}]}
    content = {"model": state, "optimizer": optimizer, "steps": 5}
    write_pickle(folder / "c2i_B_256.pt", content | {"args": argparse.Namespace(**sizes)})
    write_llamagen_vq(folder / "vq_ds16_c2i.pt", VQ16, generator)


def write_sharded_class_models(folder: Path, generator: Generator) -> None:
    """The FSDP releases: raw state dicts in float32, several models next to one tokenizer.

    The 3B file's tensors carry Python attributes, which pickle as torch.Tensor with a state: that file's list of
    imports on the hub says so. Its heads are 100 wide.
    """
    write_llamagen_vq(folder / "vq_ds16_c2i.pt", VQ16, generator, torch.bfloat16)
    write_pickle(folder / "c2i_XXL_384.pt", draw_all(gpt_shapes(), generator))
    state = draw_all(gpt_shapes(dim=200, layers=1), generator)
    for tensor in state.values():
        tensor._fsdp_flattened = False  # type: ignore[attr-defined]
    write_pickle(folder / "c2i_3B_384.pt", state)


def write_other_containers(folder: Path, generator: Generator) -> None:
    """Weights under "module" (DeepSpeed) and under "state_dict"; no tokenizer next to them."""
    for file, container in (("c2i_B_384.pt", "module"), ("c2i_L_256.pt", "state_dict")):
        state = draw_all(gpt_shapes(layers=1), generator, torch.bfloat16)
        write_pickle(folder / file, {container: state})


def write_parts(folder: Path, vq: VQConfig, generator: Generator) -> None:
    """What text-to-image models have next to them: VQ tokenizer and text encoder."""
    write_llamagen_vq(folder / "vq_ds16_t2i.pt", vq, generator, torch.bfloat16)
    write_text_encoder(folder / "text", generator)


def write_text_model(folder: Path, generator: Generator) -> None:
    """FoundationVision's text-to-image .pt with a drafter as a pickle with `module.` names."""
    state = draw_all(gpt_shapes(caption=CAPTION), generator)
    write_pickle(folder / "t2i_XL_stage1_256.pt", {"model": state})
    write_parts(folder, VQ16_WIDER, generator)
    drafter = draw_all(drafter_shapes(CODES, DIM, FFN), generator)
    drafter["embed_tokens.weight"] = state["output.weight"].clone()
    prefixed = {f"module.{name}": tensor for name, tensor in drafter.items()}
    write_pickle(folder / "drafter" / "pytorch_model.bin", prefixed)
    write_json(folder / "drafter" / "config.json", llamagen_config(1, "t2i", 256, 1e-6))


def write_hub_text_model(folder: Path, generator: Generator) -> None:
    """jadohu/LlamaGen-T2I-2: config.json, two shards; its eps differs from the .pt files' on purpose."""
    state = draw_all(gpt_hf_shapes(), generator, torch.bfloat16)
    write_shards(folder, state, 2)
    write_json(folder / "config.json", llamagen_config(LAYERS, "t2i", 1024, 1e-6))
    write_parts(folder, VQ16, generator)
    drafter = draw_all(drafter_shapes(CODES, DIM, FFN), generator)
    drafter["embed_tokens.weight"] = state["lm_head.weight"].float()
    write_safetensors(folder / "drafter" / "model.safetensors", drafter)
    write_json(folder / "drafter" / "config.json", llamagen_config(1, "t2i2", 1024, 1e-6))


def write_vq8(folder: Path, generator: Generator) -> None:
    """The tokenizer with 8 pixels a code, alone."""
    write_llamagen_vq(folder / "vq_ds8_c2i.pt", VQ8, generator, torch.bfloat16)
