"""Write small random checkpoints in the public formats, to try loaders without downloading anything.

    python -m scripts.checkpoints.synthetic DIR [--seed 0] [--force]

Names, containers, dtypes and file layouts are those of the published files; sizes are tiny. Head width (64, and 100 in
the 3B file), vocabulary layout (Chameleon's 65536 ids), classes, caption slots and grids are real. `DIR/index.json`
says what each folder is and what to ask of it. Needs transformers, tokenizers and safetensors.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from lantern_hpu.models.config import VQConfig
from lantern_hpu.models.vq import VQModel
from scripts.checkpoints.files import (
    WORDS,
    Shapes,
    State,
    draw_all,
    fill,
    merges,
    shapes_of,
    write_json,
    write_pickle,
    write_safetensors,
    write_shards,
)
from scripts.checkpoints.glm_image import write_glm_image
from scripts.checkpoints.language_models import (
    write_authors_emu3,
    write_emu3,
    write_hub_janus,
    write_janus,
)

# LlamaGen: every file has the same small geometry but for the 3B one's head width.
CODES, DIM, FFN, LAYERS, HEADS, CAPTION = 64, 128, 96, 2, 2, 48
CLASSES, SLOTS = 1000, 120
VQ = VQConfig(channels=32, res_blocks=1, z_channels=32, code_dim=8, codebook_size=CODES)
VQ16 = replace(VQ, multipliers=(1, 1, 1, 1, 1), res_blocks=2)
VQ16_WIDER = replace(VQ, multipliers=(1, 1, 1, 1, 2))  # has shortcuts
VQ8 = replace(VQ, multipliers=(1, 1, 1, 2))

# Chameleon: real ids, narrow layers.
IMAGE_CODES, FIRST_IMAGE, VOCABULARY = 8192, 4, 65536
BOS, PAD, EOS, EOI, BOI, SEP, IMAGE = 0, 1, 2, 8196, 8197, 8710, 8711
TEXT = 16384  # the first id of the text's alphabet
VQGAN: dict[str, Any] = {"ch": 32, "ch_mult": (1, 1, 1, 1, 2), "res_blocks": 1, "z": 32, "embed": 8}
NARROW_VQGAN = VQGAN | {"ch_mult": (1, 1, 1, 1, 1)}


# ---------------------------------------------------------------------------------------------------
# LlamaGen


def gpt_shapes(
    dim: int = DIM, ffn: int = FFN, layers: int = LAYERS, caption: int | None = None
) -> Shapes:
    """A GPT of FoundationVision's LlamaGen (specification 4.1): class table, or caption projection."""
    shapes: Shapes = {"tok_embeddings.weight": (CODES, dim)}
    if caption is None:
        shapes["cls_embedding.embedding_table.weight"] = (CLASSES + 1, dim)
    else:
        shapes["cls_embedding.uncond_embedding"] = (SLOTS, caption)
        shapes["cls_embedding.cap_proj.fc1.weight"] = (dim, caption)
        shapes["cls_embedding.cap_proj.fc2.weight"] = (dim, dim)
    for layer in range(layers):
        shapes |= {
            f"layers.{layer}.attention.wqkv.weight": (3 * dim, dim),
            f"layers.{layer}.attention.wo.weight": (dim, dim),
            f"layers.{layer}.feed_forward.w1.weight": (ffn, dim),
            f"layers.{layer}.feed_forward.w3.weight": (ffn, dim),
            f"layers.{layer}.feed_forward.w2.weight": (dim, ffn),
            f"layers.{layer}.attention_norm.weight": (dim,),
            f"layers.{layer}.ffn_norm.weight": (dim,),
        }
    return shapes | {"norm.weight": (dim,), "output.weight": (CODES, dim)}


def gpt_hf_shapes() -> Shapes:
    """The same network under the names of jadohu/LlamaGen-T2I (specification 4.3)."""
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
    """A drafter (specification 4.4); one with `heads` is Anole's, with query-key and input norms."""
    shapes: Shapes = {
        "embed_tokens.weight": (rows, dim),
        "fc.weight": (dim, 2 * dim),
        "fc.bias": (dim,),
    }
    shapes |= block_shapes("layers.0.", dim, ffn)
    if heads is not None:
        norms = ((f"{x}_norm.{y}") for x in "qk" for y in ("weight", "bias"))
        shapes |= {f"layers.0.self_attn.{name}": (heads, dim // heads) for name in norms}
        shapes["layers.0.input_layernorm.weight"] = (dim,)
    return shapes


def llamagen_config(layers: int, input_type: str, block_size: int, eps: float) -> dict[str, Any]:
    """config.json of LlamaGen's models and drafters in the form of the hub (specification 4.3)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "block_size": block_size,
        "caption_dim": CAPTION,
        "class_dropout_p": 0.1,
        "cls_token_num": SLOTS,
        "ffn_dropout_p": 0.1,
        "hidden_act": "silu",
        "hidden_size": DIM,
        "initializer_range": 0.02,
        "input_type": input_type,
        "intermediate_size": FFN,
        "max_position_embeddings": 2048,
        "num_attention_heads": HEADS,
        "num_classes": CLASSES,
        "num_hidden_layers": layers,
        "num_key_value_heads": HEADS,
        "resid_dropout_p": 0.1,
        "rms_norm_eps": eps,
        "rope_base": 10000,
        "tie_word_embeddings": False,
        "token_dropout_p": 0.1,
        "use_cache": True,
        "vocab_size": CODES,
    }


def rope_buffer(grid: int, head_dim: int) -> Tensor:
    """The table that some training checkpoints carry along as `freqs_cis`: [1 + grid^2, head_dim / 2, 2]."""
    half = head_dim // 2
    frequency = 10000 ** (-torch.arange(0, half, 2).float() / half)  # [half / 2]
    place = torch.arange(grid).float()
    row, column = (torch.outer(p, frequency) for p in (place, place))  # [grid, half / 2]
    angles = torch.cat(
        [row[:, None].expand(-1, grid, -1), column[None].expand(grid, -1, -1)], -1
    ).flatten(0, 1)
    table = torch.stack([angles.cos(), angles.sin()], -1)  # [grid^2, half, 2]
    return torch.cat([torch.zeros(1, *table.shape[1:]), table])


def write_llamagen_vq(
    file: Path, config: VQConfig, generator: Generator, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A tokenizer .pt (specification 4.2): weights and the training's counter under "model".

    Returns the raw codebook.
    """
    with torch.device("meta"):
        shapes = shapes_of(VQModel(config).state_dict())
    state = draw_all(shapes, generator, dtype)
    write_pickle(file, {"model": state | {"quantize.codebook_used": torch.zeros(65536)}})
    return state["quantize.embedding.weight"].float()


def write_neighbours(folder: Path, codebook: Tensor, columns: int, dtype: type) -> None:
    """vq_distances/top_K_indices.npy (specification 4.8): other codes by distance of raw rows."""
    table, near = codebook.double(), []
    squares = table.square().sum(1)  # [V]
    for start in range(0, len(table), 512):
        part = table[start : start + 512]
        distance = squares - 2 * part @ table.T  # [512, V]: squared, less what all of a row share
        distance.diagonal(start).fill_(math.inf)  # a code is no neighbour of itself
        near.append(distance.topk(columns, largest=False).indices)
    (folder / "vq_distances").mkdir(parents=True, exist_ok=True)
    indices: np.ndarray = torch.cat(near).numpy().astype(dtype)
    np.save(folder / "vq_distances" / f"top_{columns}_indices.npy", indices)


def write_text_encoder(folder: Path, generator: Generator) -> None:
    """A tiny T5 encoder in the form of google/flan-t5-xl (specification 4.7)."""
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


def llamagen_entry(name: str, file: str, pixels: int, **more: Any) -> dict[str, Any]:
    """What index.json says of a LlamaGen checkpoint; `more` overrides."""
    side = pixels // 16
    text = file.startswith("t2i") or not file
    return {
        "name": name,
        "family": "llamagen-t2i" if text else "llamagen-c2i",
        "model": f"{name}/{file}".rstrip("/"),
        "prompt": "a red apple on the tree" if text else None,
        "class_label": None if text else 207,
        "image_size": pixels,
        "tokens": side * side,
        "grid": [side, side],
        "prefix": SLOTS if text else 1,
        "codes": CODES,
        "dim": DIM,
        "heads": HEADS,
        "layers": LAYERS,
        "norm_eps": 1e-5,
        "text": f"{name}/text" if text else None,
        "drafter": f"{name}/drafter" if text else None,
        "neighbours": f"{name}/vq_distances/top_{CODES - 1}_indices.npy" if text else None,
    } | more


def write_class_model(root: Path, generator: Generator) -> Iterator[dict[str, Any]]:
    """A training checkpoint: "model" beside an optimiser, an argparse.Namespace and a RoPE buffer."""
    folder = root / "llamagen-c2i"
    state = draw_all(gpt_shapes(), generator, torch.bfloat16)
    arguments = argparse.Namespace(
        gpt_model="GPT-B",
        gpt_type="c2i",
        image_size=256,
        downsample_size=16,
        num_classes=CLASSES,
        cls_token_num=1,
        vocab_size=CODES,
        mixed_precision="bf16",
    )
    optimizer = {"state": {0: {"step": torch.tensor(5.0), "exp_avg": torch.zeros(4)}}}
    content = {
        "model": state | {"freqs_cis": rope_buffer(16, DIM // HEADS)},
        "optimizer": optimizer | {"param_groups": [{"lr": 1e-4, "params": [0]}]},
        "steps": 5,
        "args": arguments,
    }
    write_pickle(folder / "c2i_B_256.pt", content)
    write_llamagen_vq(folder / "vq_ds16_c2i.pt", VQ16, generator)
    vq = "llamagen-c2i/vq_ds16_c2i.pt"
    yield llamagen_entry(
        folder.name, "c2i_B_256.pt", 256, container="model", dtype="bfloat16", vq=vq
    )


def write_sharded_class_models(root: Path, generator: Generator) -> Iterator[dict[str, Any]]:
    """The FSDP releases: raw state dicts in float32, several models beside one tokenizer.

    The 3B file's tensors carry Python attributes, which pickle as torch.Tensor with a state: that file's list of
    imports on the hub says so. Its heads are 100 wide.
    """
    folder = root / "llamagen-c2i-384-fsdp"
    vq = f"{folder.name}/vq_ds16_c2i.pt"
    write_llamagen_vq(root / vq, VQ16, generator, torch.bfloat16)
    facts = {"container": None, "dtype": "float32", "vq": vq}
    write_pickle(folder / "c2i_XXL_384.pt", draw_all(gpt_shapes(), generator))
    yield llamagen_entry(folder.name, "c2i_XXL_384.pt", 384, **facts)
    state = draw_all(gpt_shapes(dim=200, layers=1), generator)
    for tensor in state.values():
        tensor._fsdp_flattened = False  # type: ignore[attr-defined]
    write_pickle(folder / "c2i_3B_384.pt", state)
    yield llamagen_entry(folder.name, "c2i_3B_384.pt", 384, dim=200, layers=1, **facts)


def write_other_containers(root: Path, generator: Generator) -> Iterator[dict[str, Any]]:
    """Weights under "module" (DeepSpeed) and under "state_dict"; no tokenizer beside them."""
    folder = root / "llamagen-c2i-containers"
    for file, container, pixels in (
        ("c2i_B_384.pt", "module", 384),
        ("c2i_L_256.pt", "state_dict", 256),
    ):
        state = draw_all(gpt_shapes(layers=1), generator, torch.bfloat16)
        write_pickle(folder / file, {container: state})
        facts = {"container": container, "dtype": "bfloat16", "layers": 1}
        yield llamagen_entry(folder.name, file, pixels, vq="llamagen-c2i/vq_ds16_c2i.pt", **facts)


def write_text_model(root: Path, generator: Generator) -> Iterator[dict[str, Any]]:
    """FoundationVision's text-to-image .pt with a drafter as a pickle with `module.` names."""
    folder = root / "llamagen-t2i-256"
    state = draw_all(gpt_shapes(caption=CAPTION), generator)
    write_pickle(folder / "t2i_XL_stage1_256.pt", {"model": state})
    codebook = write_llamagen_vq(folder / "vq_ds16_t2i.pt", VQ16_WIDER, generator, torch.bfloat16)
    write_neighbours(folder, codebook, CODES - 1, np.uint16)
    write_text_encoder(folder / "text", generator)
    drafter = draw_all(drafter_shapes(CODES, DIM, FFN), generator)
    drafter["embed_tokens.weight"] = state["output.weight"].clone()  # D-33
    prefixed = {f"module.{name}": tensor for name, tensor in drafter.items()}
    write_pickle(folder / "drafter" / "pytorch_model.bin", prefixed)
    write_json(folder / "drafter" / "config.json", llamagen_config(1, "t2i", 256, 1e-6))
    facts = {"container": "model", "dtype": "float32", "drafter_eps": 1e-6}
    vq = f"{folder.name}/vq_ds16_t2i.pt"
    yield llamagen_entry(folder.name, "t2i_XL_stage1_256.pt", 256, vq=vq, **facts)


def write_hub_text_model(root: Path, generator: Generator) -> Iterator[dict[str, Any]]:
    """jadohu/LlamaGen-T2I-2: config.json, two shards; its eps differs from the .pt files' on purpose."""
    folder = root / "llamagen-t2i-512"
    state = draw_all(gpt_hf_shapes(), generator, torch.bfloat16)
    write_shards(folder, state, 2)
    config = llamagen_config(LAYERS, "t2i", 1024, 1e-6) | {"torch_dtype": "bfloat16"}
    write_json(folder / "config.json", config)
    codebook = write_llamagen_vq(folder / "vq_ds16_t2i.pt", VQ16, generator, torch.bfloat16)
    write_neighbours(folder, codebook, CODES - 1, np.uint16)
    write_text_encoder(folder / "text", generator)
    drafter = draw_all(drafter_shapes(CODES, DIM, FFN), generator)
    drafter["embed_tokens.weight"] = state["lm_head.weight"].float()  # D-33
    write_safetensors(folder / "drafter" / "model.safetensors", drafter)
    write_json(folder / "drafter" / "config.json", llamagen_config(1, "t2i2", 1024, 1e-6))
    facts = {"container": "hf", "dtype": "bfloat16", "norm_eps": 1e-6, "drafter_eps": 1e-6}
    yield llamagen_entry(folder.name, "", 512, vq=f"{folder.name}/vq_ds16_t2i.pt", **facts)


def write_vq8(root: Path, generator: Generator) -> Iterator[dict[str, Any]]:
    """The tokenizer with 8 pixels a code, alone."""
    write_llamagen_vq(root / "llamagen-vq8" / "vq_ds8_c2i.pt", VQ8, generator, torch.bfloat16)
    yield {
        "name": "llamagen-vq8",
        "family": "llamagen-vq",
        "model": None,
        "vq": "llamagen-vq8/vq_ds8_c2i.pt",
        "downsample": 8,
        "codes": CODES,
    }


# ---------------------------------------------------------------------------------------------------
# Chameleon and Anole


def image_token(code: int) -> str:
    """A code's name in Chameleon's vocabulary: its decimal digits as letters A to J."""
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"


def special_tokens() -> dict[str, int]:
    """Chameleon's ids below the text (specification 4.5); `<image>` is `<reserved08707>` renamed."""
    names = {"<s>": BOS, "<pad>": PAD, "</s>": EOS, "<unk>": 3}
    names |= {image_token(code): FIRST_IMAGE + code for code in range(IMAGE_CODES)}
    names |= {"<eoss>": EOI, "<racm3:break>": BOI}
    names |= {f"<reserved{i - 4:05d}>": i for i in range(BOI + 1, TEXT) if i != IMAGE}
    return names | {"<image>": IMAGE}


def vocabulary() -> dict[str, int]:
    """The whole map: special tokens, image tokens, the 256 bytes from 16384 ("!") on, words."""
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = [*sorted(ByteLevel.alphabet()), *dict.fromkeys(a + b for a, b in merges())]
    return special_tokens() | {piece: TEXT + i for i, piece in enumerate(pieces)}


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and the small files around it, as in leloy/Anole-7b-v0.1-hf."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=merges(), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    named = ["<s>", "<pad>", "</s>", "<unk>", "<eoss>", "<racm3:break>", "<reserved08706>"]
    tokenizer.add_special_tokens([*named, "<image>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "sep_token": "<reserved08706>",
        "unk_token": "<unk>",
    }
    write_json(folder / "special_tokens_map.json", special)
    config = special | {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096}
    write_json(folder / "tokenizer_config.json", config)
    processor = {"image_seq_length": 1024, "image_token": "<image>"}
    write_json(
        folder / "processor_config.json", processor | {"processor_class": "ChameleonProcessor"}
    )


def taming_shapes(
    ch: int = 128,
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4),
    res_blocks: int = 2,
    z: int = 256,
    embed: int = 256,
    codes: int = IMAGE_CODES,
) -> Shapes:
    """Meta's vqgan.ckpt (specification 4.5): attention in the middle alone; the defaults are its sizes."""
    last, deepest = len(ch_mult) - 1, ch * ch_mult[-1]
    shapes = conv("encoder.conv_in", 3, ch)
    width = ch
    for level, multiplier in enumerate(ch_mult):
        for block in range(res_blocks):
            shapes |= res_block(f"encoder.down.{level}.block.{block}", width, ch * multiplier)
            width = ch * multiplier
        if level != last:
            shapes |= conv(f"encoder.down.{level}.downsample.conv", width, width)
    shapes |= middle("encoder", deepest) | conv("encoder.conv_out", deepest, z)
    shapes |= norm("encoder.norm_out", deepest)
    shapes |= conv("decoder.conv_in", z, deepest) | middle("decoder", deepest)
    for level in range(last, -1, -1):
        for block in range(res_blocks + 1):
            shapes |= res_block(f"decoder.up.{level}.block.{block}", width, ch * ch_mult[level])
            width = ch * ch_mult[level]
        if level != 0:
            shapes |= conv(f"decoder.up.{level}.upsample.conv", width, width)
    shapes |= norm("decoder.norm_out", width) | conv("decoder.conv_out", width, 3)
    shapes["quantize.embedding.weight"] = (codes, embed)
    return shapes | conv("quant_conv", z, embed, 1) | conv("post_quant_conv", embed, z, 1)


def conv(name: str, inputs: int, outputs: int, size: int = 3) -> Shapes:
    return {f"{name}.weight": (outputs, inputs, size, size), f"{name}.bias": (outputs,)}


def norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def res_block(name: str, inputs: int, outputs: int) -> Shapes:
    shapes = norm(f"{name}.norm1", inputs) | conv(f"{name}.conv1", inputs, outputs)
    shapes |= norm(f"{name}.norm2", outputs) | conv(f"{name}.conv2", outputs, outputs)
    return shapes | (conv(f"{name}.nin_shortcut", inputs, outputs, 1) if inputs != outputs else {})


def middle(side: str, width: int) -> Shapes:
    shapes = res_block(f"{side}.mid.block_1", width, width)
    shapes |= norm(f"{side}.mid.attn_1.norm", width)
    for part in ("q", "k", "v", "proj_out"):
        shapes |= conv(f"{side}.mid.attn_1.{part}", width, width, 1)
    return shapes | res_block(f"{side}.mid.block_2", width, width)


def taming_config(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of leloy/Anole-7b-v0.1-vqvae-hf with these sizes: old and new names side by side."""
    multipliers = list(sizes["ch_mult"])
    return {
        "attn_resolutions": [],
        "attn_type": "vanilla",
        "base_channels": sizes["ch"],
        "ch": sizes["ch"],
        "ch_mult": multipliers,
        "channel_multiplier": multipliers,
        "double_latent": False,
        "double_z": False,
        "dropout": 0.0,
        "embed_dim": sizes["embed"],
        "in_channels": 3,
        "initializer_range": 0.02,
        "latent_channels": sizes["z"],
        "model_type": "chameleon_vqgan",
        "n_embed": IMAGE_CODES,
        "num_embeddings": IMAGE_CODES,
        "num_res_blocks": sizes["res_blocks"],
        "out_ch": 3,
        "out_channels": 3,
        "quant_state_dims": [32, 32],
        "resolution": 512,
        "torch_dtype": "float32",
        "transformers_version": "4.43.0.dev0",
        "z_channels": sizes["z"],
    }


def chameleon_model(
    dim: int, layers: int, sizes: Mapping[str, Any], vqgan: State, generator: Generator
) -> Any:
    """A ChameleonForConditionalGeneration in bfloat16 with its tokenizer's encoder side in float32.

    The encoder side loads strictly: so its names are checked to be Meta's.
    """
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    used = "attn_resolutions attn_type base_channels channel_multiplier double_latent dropout embed_dim in_channels"
    used += " latent_channels num_embeddings num_res_blocks resolution"
    config = ChameleonConfig(
        hidden_size=dim,
        intermediate_size=2 * dim,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        vocabulary_map=vocabulary(),
        vq_config={key: taming_config(sizes)[key] for key in used.split()},
    )
    model: Any = ChameleonForConditionalGeneration(config)
    fill(model, generator)
    model.to(torch.bfloat16)
    model.model.vqmodel.float()
    model.model.vqmodel.load_state_dict(
        {name: tensor for name, tensor in vqgan.items() if not name.startswith("decoder.")}
    )
    return model


def older_config(dim: int, layers: int, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as transformers 4.43 wrote it: the form of the published Chameleon and Anole."""
    return {
        "architectures": ["ChameleonForConditionalGeneration"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,  # so in the published file, though the tokenizer's is 0
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": dim,
        "initializer_range": 0.02,
        "intermediate_size": 2 * dim,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "model_parallel_size": 1,
        "model_type": "chameleon",
        "num_attention_heads": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "swin_norm": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": VOCABULARY,
        "vocabulary_map": vocabulary(),
        "vq_config": taming_config(sizes),
    }


def chameleon_entry(name: str, dim: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "family": "anole",
        "model": name,
        "prompt": "a photo of a red apple",
        "class_label": None,
        "image_size": 512,
        "tokens": 1024,
        "grid": [32, 32],
        "codes": IMAGE_CODES,
        "dim": dim,
        "heads": 2,
        "layers": layers,
        "norm_eps": 1e-5,
        "dtype": "bfloat16",
        "vq": None,
        "drafter": None,
        "neighbours": None,
    } | more


def write_anole(root: Path, generator: Generator) -> Iterator[dict[str, Any]]:
    """Anole as today's transformers saves it, Meta's tokenizer twice, a drafter and a cut neighbour table."""
    folder, dim, layers = root / "anole", 32, 2
    vqgan = draw_all(taming_shapes(**VQGAN), generator)
    model = chameleon_model(dim, layers, VQGAN, vqgan, generator)
    model.save_pretrained(folder, max_shard_size="6MB")
    write_tokenizer(folder)
    write_pickle(folder / "vqgan.ckpt", {"state_dict": vqgan})
    write_safetensors(folder / "vqvae" / "model.safetensors", vqgan)
    config = {"architectures": ["ChameleonVQVAE"]} | taming_config(VQGAN)
    write_json(folder / "vqvae" / "config.json", config)
    write_neighbours(folder, vqgan["quantize.embedding.weight"], 64, np.int32)
    drafter = draw_all(drafter_shapes(VOCABULARY, dim, 2 * dim, heads=2), generator)
    drafter["embed_tokens.weight"] = model.model.embed_tokens.weight.detach().float()
    write_safetensors(folder / "drafter" / "model.safetensors", drafter)
    config = older_config(dim, 1, VQGAN)
    del config["vocabulary_map"]
    write_json(folder / "drafter" / "config.json", config)
    facts = {"drafter": "anole/drafter", "drafter_eps": 1e-5}
    table = "anole/vq_distances/top_64_indices.npy"
    yield chameleon_entry(
        folder.name, dim, layers, vq="anole/vqgan.ckpt", neighbours=table, **facts
    )


def write_hub_anole(root: Path, generator: Generator) -> Iterator[dict[str, Any]]:
    """Anole as leloy/Anole-7b-v0.1-hf seems to be: the tokenizer's decoder lies in the shards, in float32.

    That repository's weights are larger than Chameleon's by just the decoder's size.
    """
    folder, dim, layers = root / "anole-hub", 8, 1
    vqgan = draw_all(taming_shapes(**NARROW_VQGAN), generator)
    state = chameleon_model(dim, layers, NARROW_VQGAN, vqgan, generator).state_dict()
    state |= {f"model.vqmodel.{name}": tensor for name, tensor in vqgan.items()}
    write_shards(folder, state, 3)
    write_json(folder / "config.json", older_config(dim, layers, NARROW_VQGAN))
    write_tokenizer(folder)
    yield chameleon_entry(folder.name, dim, layers, vq="anole-hub")


def write_chameleon(root: Path, generator: Generator) -> Iterator[dict[str, Any]]:
    """The base model, which cannot draw: same names and shapes, no decoder.

    Nothing in the published files tells it from Anole but the values of the head's image rows; the flag in config.json
    is the one of Lumina-mGPT's conversions and stands in for it.
    """
    folder, dim, layers = root / "chameleon-base", 8, 1
    vqgan = draw_all(taming_shapes(**NARROW_VQGAN), generator)
    write_shards(
        folder, chameleon_model(dim, layers, NARROW_VQGAN, vqgan, generator).state_dict(), 2
    )
    write_json(
        folder / "config.json",
        older_config(dim, layers, NARROW_VQGAN) | {"mask_image_logits": True},
    )
    write_tokenizer(folder)
    yield chameleon_entry(folder.name, dim, layers, family="chameleon", prompt=None)


def write_lumina(root: Path, generator: Generator) -> Iterator[dict[str, Any]]:
    """Lumina-mGPT: Chameleon's files, a training option of its own, and Meta's tokenizer beside it."""
    folder, dim, layers = root / "lumina-mgpt", 32, 2
    vqgan = draw_all(taming_shapes(**NARROW_VQGAN), generator)
    model = chameleon_model(dim, layers, NARROW_VQGAN, vqgan, generator)
    write_shards(folder, model.state_dict(), 2)
    own = {"z_loss_weight": 1e-5, "_name_or_path": "Alpha-VLLM/Lumina-mGPT-7B-512"}
    write_json(folder / "config.json", older_config(dim, layers, NARROW_VQGAN) | own)
    write_tokenizer(folder)
    write_pickle(folder / "vqgan.ckpt", {"state_dict": vqgan})
    yield chameleon_entry(
        folder.name, dim, layers, family="lumina", tokens=32 * 33, vq="lumina-mgpt/vqgan.ckpt"
    )


# ---------------------------------------------------------------------------------------------------

WRITERS = {
    "llamagen-c2i": write_class_model,
    "llamagen-c2i-384-fsdp": write_sharded_class_models,
    "llamagen-c2i-containers": write_other_containers,
    "llamagen-t2i-256": write_text_model,
    "llamagen-t2i-512": write_hub_text_model,
    "llamagen-vq8": write_vq8,
    "anole": write_anole,
    "anole-hub": write_hub_anole,
    "chameleon-base": write_chameleon,
    "lumina-mgpt": write_lumina,
    "janus-pro": write_janus,
    "janus-pro-hub": write_hub_janus,
    "emu3": write_emu3,
    "emu3-authors": write_authors_emu3,
    "glm-image": write_glm_image,
}


def write_all(root: Path, seed: int = 0, only: set[str] | None = None) -> list[dict[str, Any]]:
    """Write the folders and index.json; each folder's values depend on the seed alone, not on `only`."""
    root.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    for number, (name, writer) in enumerate(WRITERS.items()):
        if only is None or name in only:
            generator = torch.Generator().manual_seed(1000 * seed + number)
            entries += writer(root, generator)
    write_json(root / "index.json", {"seed": seed, "checkpoints": entries})
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description="Write small random checkpoints.")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="write into a folder that has files")
    parser.add_argument("--only", nargs="+", choices=WRITERS, help="some of the folders")
    arguments = parser.parse_args()
    root: Path = arguments.directory
    if root.exists() and not root.is_dir():
        raise SystemExit(f"{root} is a file")
    if not arguments.force and root.is_dir() and any(root.iterdir()):
        raise SystemExit(f"{root} is not empty; --force writes into it nevertheless")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    entries = write_all(root, arguments.seed, set(arguments.only) if arguments.only else None)
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    print(f"{len(entries)} checkpoints in {root}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
