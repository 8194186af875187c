"""Small random checkpoints of Chameleon's family: Anole, the base model, both Lumina-mGPT. Real ids, narrow layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Generator

from tests.checkpoints.files import (
    Shapes,
    State,
    byte_pieces,
    draw_all,
    fill,
    write_byte_tokenizer,
    write_json,
    write_pickle,
    write_safetensors,
    write_shards,
)
from tests.checkpoints.language_models import write_words
from tests.checkpoints.llamagen import drafter_shapes

IMAGE_CODES, FIRST_IMAGE, VOCABULARY = 8192, 4, 65536
BOS, PAD, EOS, EOI, BOI, IMAGE = 0, 1, 2, 8196, 8197, 8711
TEXT = 16384  # the first id of the text's alphabet
VQGAN: dict[str, Any] = {"ch": 32, "ch_mult": (1, 1, 1, 1, 2), "res_blocks": 1, "z": 32, "embed": 8}
NARROW_VQGAN = VQGAN | {"ch_mult": (1, 1, 1, 1, 1)}


def image_token(code: int) -> str:
    """A code's name in Chameleon's vocabulary: its decimal digits as letters A to J."""
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"


def special_tokens() -> dict[str, int]:
    """Chameleon's ids below the text; `<image>` is `<reserved08707>` renamed."""
    names = {"<s>": BOS, "<pad>": PAD, "</s>": EOS, "<unk>": 3}
    names |= {image_token(code): FIRST_IMAGE + code for code in range(IMAGE_CODES)}
    names |= {"<eoss>": EOI, "<racm3:break>": BOI}
    names |= {f"<reserved{i - 4:05d}>": i for i in range(BOI + 1, TEXT) if i != IMAGE}
    return names | {"<image>": IMAGE}


def vocabulary() -> dict[str, int]:
    """The whole map: special tokens, image tokens, bytes from 16384 ("!") on, words."""
    return special_tokens() | {piece: TEXT + i for i, piece in enumerate(byte_pieces())}


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and the small files around it, as in leloy/Anole-7b-v0.1-hf."""
    from tokenizers import processors

    named = ["<s>", "<pad>", "</s>", "<unk>", "<eoss>", "<racm3:break>", "<reserved08706>"]
    begin = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    write_byte_tokenizer(folder, vocabulary(), [*named, "<image>"], begin, unk_token="<unk>")
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    ends |= {"sep_token": "<reserved08706>"}
    write_json(folder / "special_tokens_map.json", ends)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096}
    write_json(folder / "tokenizer_config.json", ends | about)
    processor = {"image_token": "<image>", "processor_class": "ChameleonProcessor"}
    write_json(folder / "processor_config.json", processor | {"image_seq_length": 1024})


def taming_shapes(
    ch: int = 128,
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4),
    res_blocks: int = 2,
    z: int = 256,
    embed: int = 256,
    codes: int = IMAGE_CODES,
) -> Shapes:
    """Meta's vqgan.ckpt: attention in the middle alone; the defaults are its sizes."""
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


def attention(name: str, width: int) -> Shapes:
    shapes = norm(f"{name}.norm", width)
    for part in ("q", "k", "v", "proj_out"):
        shapes |= conv(f"{name}.{part}", width, width, 1)
    return shapes


def middle(side: str, width: int) -> Shapes:
    shapes = res_block(f"{side}.mid.block_1", width, width)
    shapes |= attention(f"{side}.mid.attn_1", width)
    return shapes | res_block(f"{side}.mid.block_2", width, width)


def taming_config(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of leloy/Anole-7b-v0.1-vqvae-hf with these sizes: old and new names side by side."""
    multipliers = list(sizes["ch_mult"])
    old = {"ch": sizes["ch"], "ch_mult": multipliers, "z_channels": sizes["z"], "double_z": False}
    old |= {"embed_dim": sizes["embed"], "n_embed": IMAGE_CODES, "out_ch": 3}
    return old | {"model_type": "chameleon_vqgan", "torch_dtype": "float32"} | vq_config(sizes)


def vq_config(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The same in transformers' names."""
    new = {"base_channels": sizes["ch"], "channel_multiplier": list(sizes["ch_mult"])}
    new |= {"num_res_blocks": sizes["res_blocks"], "embed_dim": sizes["embed"], "in_channels": 3}
    new |= {"latent_channels": sizes["z"], "double_latent": False, "num_embeddings": IMAGE_CODES}
    return new | {"attn_resolutions": [], "attn_type": "vanilla", "dropout": 0.0, "resolution": 512}


def chameleon_model(
    dim: int, layers: int, sizes: Mapping[str, Any], vqgan: State, generator: Generator
) -> Any:
    """A ChameleonForConditionalGeneration in bfloat16 with its tokenizer's encoder side in float32.

    The encoder side loads strictly: so its names are checked to be Meta's.
    """
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    shape = network(dim, layers)
    config = ChameleonConfig(
        **shape, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, vq_config=vq_config(sizes)
    )
    model: Any = ChameleonForConditionalGeneration(config)
    fill(model, generator)
    model.to(torch.bfloat16)
    model.model.vqmodel.float()
    model.model.vqmodel.load_state_dict(
        {name: tensor for name, tensor in vqgan.items() if not name.startswith("decoder.")}
    )
    return model


def network(dim: int, layers: int) -> dict[str, Any]:
    sizes = {"hidden_size": dim, "intermediate_size": 2 * dim, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return sizes | heads | {"vocab_size": VOCABULARY, "vocabulary_map": vocabulary()}


def older_config(dim: int, layers: int, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as transformers 4.43 wrote it: the form of the published Chameleon and Anole."""
    kind = {"architectures": ["ChameleonForConditionalGeneration"], "model_type": "chameleon"}
    ends = {"bos_token_id": 1, "eos_token_id": 2}  # so in the file, though the tokenizer's is 0
    norms = {"rms_norm_eps": 1e-05, "swin_norm": False, "hidden_act": "silu"}
    rope = {"rope_scaling": None, "rope_theta": 10000.0, "max_position_embeddings": 4096}
    rest = {"torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0"}
    own = kind | ends | network(dim, layers) | norms | rope | rest
    return own | {"vq_config": taming_config(sizes)}


def write_anole(folder: Path, generator: Generator) -> None:
    """Anole as today's transformers saves it, Meta's tokenizer twice, and a drafter."""
    dim = 32
    vqgan = draw_all(taming_shapes(**VQGAN), generator)
    model = chameleon_model(dim, 2, VQGAN, vqgan, generator)
    model.save_pretrained(folder, max_shard_size="6MB")
    write_tokenizer(folder)
    write_pickle(folder / "vqgan.ckpt", {"state_dict": vqgan})
    write_safetensors(folder / "vqvae" / "model.safetensors", vqgan)
    config = {"architectures": ["ChameleonVQVAE"]} | taming_config(VQGAN)
    write_json(folder / "vqvae" / "config.json", config)
    drafter = draw_all(drafter_shapes(VOCABULARY, dim, 2 * dim, heads=2), generator)
    drafter["embed_tokens.weight"] = model.model.embed_tokens.weight.detach().float()
    write_safetensors(folder / "drafter" / "model.safetensors", drafter)
    config = older_config(dim, 1, VQGAN)
    del config["vocabulary_map"]
    write_json(folder / "drafter" / "config.json", config)


def write_older(
    folder: Path,
    generator: Generator,
    dim: int,
    layers: int,
    shards: int,
    change: Callable[[State], State] = dict,
    **more: Any,
) -> State:
    """A Chameleon in the published form, in so many shards, with `more` in config.json; returns Meta's tokenizer."""
    vqgan = draw_all(taming_shapes(**NARROW_VQGAN), generator)
    state = change(chameleon_model(dim, layers, NARROW_VQGAN, vqgan, generator).state_dict())
    if more.pop("decoder", False):
        state |= {f"model.vqmodel.{name}": tensor for name, tensor in vqgan.items()}
    write_shards(folder, state, shards)
    write_json(folder / "config.json", older_config(dim, layers, NARROW_VQGAN) | more)
    write_tokenizer(folder)
    return vqgan


def write_hub_anole(folder: Path, generator: Generator) -> None:
    """Anole as leloy/Anole-7b-v0.1-hf seems to be: the tokenizer's decoder is in the shards, in float32.

    That repository's weights are larger than Chameleon's by just the decoder's size.
    """
    write_older(folder, generator, dim=8, layers=1, shards=3, decoder=True)


def write_chameleon(folder: Path, generator: Generator) -> None:
    """The base model, which cannot draw: same names and shapes, no decoder.

    Nothing in the published files tells it from Anole but the values of the head's image rows; the flag in config.json
    is the one of Lumina-mGPT's conversions and stands in for it.
    """
    write_older(folder, generator, dim=8, layers=1, shards=2, mask_image_logits=True)


def share_norms(state: State) -> State:
    """The same with one row of each query and key norm, which serves all heads, as Lumina-mGPT's authors save them."""
    return {n: t[:1] if "_norm." in n and t.dim() == 2 else t for n, t in state.items()}


def write_lumina(folder: Path, generator: Generator) -> None:
    """Lumina-mGPT as its authors save it, Meta's tokenizer and the drafter of LANTERN's authors next to it."""
    own = {"z_loss_weight": 1e-5, "_name_or_path": "Alpha-VLLM/Lumina-mGPT-7B-512"}
    vqgan = write_older(folder, generator, dim=32, layers=2, shards=2, change=share_norms, **own)
    write_pickle(folder / "vqgan.ckpt", {"state_dict": vqgan})
    drafter = share_norms(draw_all(drafter_shapes(VOCABULARY, 32, 64, heads=2), generator))
    target = load_file(folder / "model-00001-of-00002.safetensors")
    drafter["embed_tokens.weight"] = target["model.embed_tokens.weight"].float()
    write_safetensors(folder / "drafter" / "model.safetensors", drafter)
    write_json(folder / "drafter" / "config.json", older_config(32, 1, NARROW_VQGAN) | own)


# ---------------------------------------------------------------------------------------------------
# Lumina-mGPT 2.0

LUMINA2_VOCABULARY, LUMINA2_CODES = 171385, 16384
LUMINA2_TOKENS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
LUMINA2_TOKENS |= {"<reserved08706>": 151671, "<reserved08799>": 151670}
LUMINA2_TOKENS |= {f"<reserved{8800 + patches:05d}>": 151700 + patches for patches in range(65)}
MOVQGAN: dict[str, Any] = {"ch": 32, "ch_mult": (1, 1, 1, 2), "res_blocks": 1, "z": 4, "embed": 4}


def lumina2_shapes(dim: int, layers: int, heads: int) -> Shapes:
    """Chameleon's, one row of norms for all heads, with a table of 2.0's own."""
    shapes: Shapes = {"model.embed_tokens.weight": (LUMINA2_VOCABULARY, dim)}
    for i in range(layers):
        layer, inner = f"model.layers.{i}.", 2 * dim
        shapes |= {f"{layer}self_attn.{p}_proj.weight": (dim, dim) for p in "qkvo"}
        for name in ("q_norm", "k_norm"):
            shapes |= {
                f"{layer}self_attn.{name}.{p}": (1, dim // heads) for p in ("weight", "bias")
            }
        shapes |= {f"{layer}mlp.{p}_proj.weight": (inner, dim) for p in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (dim, inner)
        shapes |= {f"{layer}{p}_layernorm.weight": (dim,) for p in ("input", "post_attention")}
    head: Shapes = {"model.norm.weight": (dim,), "lm_head.weight": (LUMINA2_VOCABULARY, dim)}
    return shapes | head


def movqgan_shapes(sizes: Mapping[str, Any]) -> Shapes:
    """movqgan_270M.ckpt: the decoder's norms are scaled by the codes; attention at the coarsest level."""
    width, code = sizes["ch"] * sizes["ch_mult"][-1], sizes["embed"]
    shapes = taming_shapes(**sizes, codes=LUMINA2_CODES)
    level, blocks = len(sizes["ch_mult"]) - 1, sizes["res_blocks"]
    for side, count in (("encoder.down", blocks), ("decoder.up", blocks + 1)):
        for block in range(count):
            shapes |= attention(f"{side}.{level}.attn.{block}", width)
    found: Shapes = {}
    for name, shape in shapes.items():
        stem, _, leaf = name.rpartition(".")
        if "norm" not in stem.rpartition(".")[2] or not name.startswith("decoder."):
            found[name] = shape
            continue
        found[f"{stem}.norm_layer.{leaf}"] = shape
        for part in ("conv_y", "conv_b"):
            found |= conv(f"{stem}.{part}", code, shape[0], 1)
    return found


def write_lumina2(folder: Path, generator: Generator) -> None:
    """Lumina-mGPT 2.0 as its authors save it, MoVQGAN next to it."""
    dim, layers, heads = 16, 2, 2
    state = draw_all(lumina2_shapes(dim, layers, heads), generator, torch.bfloat16)
    write_shards(folder, state, 2)
    movqgan = draw_all(movqgan_shapes(MOVQGAN), generator)
    write_pickle(folder / "movqgan_270M.ckpt", movqgan)
    config = older_config(dim, layers, MOVQGAN)
    own = {"vocab_size": LUMINA2_VOCABULARY, "max_position_embeddings": 10240}
    del config["vocabulary_map"]
    write_json(folder / "config.json", config | own)
    write_words(folder, LUMINA2_TOKENS, {})
    about = {"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    write_json(folder / "tokenizer_config.json", about | {"tokenizer_class": "Qwen2Tokenizer"})
