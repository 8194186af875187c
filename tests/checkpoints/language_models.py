"""Small random checkpoints of language models that draw: Janus-Pro, Emu3.

Token ids and names are real, layers are narrow, and the pictures are small, so that a test draws one in a second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from tests.checkpoints.files import (
    State,
    byte_pieces,
    fill,
    write_byte_tokenizer,
    write_json,
    write_pickle,
    write_safetensors,
)

DIM = 32
JANUS_CODES, JANUS_SIDE = 64, 8  # 8 x 8 codes of 16 pixels
NETWORK: dict[str, Any] = {"vocab_size": 102400, "hidden_size": DIM, "intermediate_size": 48}
NETWORK |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
JANUS_TOKENS = {
    "<｜begin▁of▁sentence｜>": 100000,
    "<｜end▁of▁sentence｜>": 100001,
    "<｜▁pad▁｜>": 100015,
    "<begin_of_image>": 100016,
    "<image_placeholder>": 100581,
    "<end_of_image>": 100593,
    "<|User|>": 100601,
    "<|Assistant|>": 100602,
}


def write_words(folder: Path, special: dict[str, int], codes: Mapping[str, int]) -> None:
    """A tokenizer of bytes, words, special tokens, and codes that no text gives."""
    pieces = {piece: i for i, piece in enumerate(byte_pieces())}
    write_byte_tokenizer(folder, pieces | special | dict(codes), special)


# ---------------------------------------------------------------------------------------------------
# Janus-Pro


def janus_model(generator: Generator) -> Any:
    """A JanusForConditionalGeneration of tiny sizes."""
    from transformers import JanusConfig, JanusForConditionalGeneration

    ends = {"pad_token_id": 100015, "bos_token_id": 100000, "eos_token_id": 100001}
    llama = {"model_type": "llama", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    vision: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"patch_size": 16, "image_size": 16 * JANUS_SIDE, "projection_dim": DIM}
    vision |= {"num_image_tokens": JANUS_SIDE**2, "mlp_ratio": 2.0}
    vq: dict[str, Any] = {"embed_dim": 8, "num_embeddings": JANUS_CODES, "latent_channels": 32}
    vq |= {"num_res_blocks": 1, "image_token_embed_dim": DIM, "projection_dim": DIM}
    config = JanusConfig(
        text_config=NETWORK | ends | llama,
        vision_config=vision,
        vq_config=vq | {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1, 2]},
        tie_word_embeddings=False,
    )
    model: Any = JanusForConditionalGeneration(config)
    fill(model, generator)
    with torch.no_grad():
        model.model.generation_head.vision_head.weight.mul_(3)  # distributions far from flat
        model.model.generation_embeddings.weight.mul_(4)  # and codes that differ once widened
    return model.eval()


# transformers' names at the beginning and within the tokenizer's, and those of the authors' files
JANUS_PLACES = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.generation_embeddings.": "gen_embed.",
    "model.generation_aligner.fc1.": "gen_aligner.layers.0.",
    "model.generation_aligner.hidden_layers.0.": "gen_aligner.layers.2.",
    "model.generation_head.proj_out.": "gen_head.output_mlp_projector.",
    "model.generation_head.": "gen_head.",
    "model.vqmodel.": "gen_vision_model.",
    "model.vision_model.": "vision_model.vision_tower.",
    "model.aligner.": "aligner.layers.",
}
JANUS_PARTS = {
    ".encoder.down.": ".encoder.conv_blocks.",
    ".decoder.up.": ".decoder.conv_blocks.",
    ".block.": ".res.",
    ".mid.block_1.": ".mid.0.",
    ".mid.attn_1.": ".mid.1.",
    ".mid.block_2.": ".mid.2.",
}


def authors_janus(state: State) -> State:
    """transformers' names turned into those of the authors' files; the parts that read pictures become stand-ins."""
    found = {}
    for name, tensor in state.items():
        start = next(old for old in JANUS_PLACES if name.startswith(old))
        own = JANUS_PLACES[start] + name.removeprefix(start)
        if own.startswith("gen_vision_model."):
            for old, new in JANUS_PARTS.items():
                own = own.replace(old, new)
        found[own] = tensor
    return found | {"gen_vision_model.quantize.codebook_used": torch.zeros(65536)}


def write_janus(folder: Path, generator: Generator) -> None:
    """Janus-Pro as its authors published it: one pickle, and a config.json with a section for each part."""
    write_pickle(folder / "pytorch_model.bin", authors_janus(janus_model(generator).state_dict()))
    head = {"image_token_size": JANUS_CODES, "n_embed": DIM}
    tower = {"image_size": 16 * JANUS_SIDE, "model_name": "siglip_large_patch16_384"}
    config = {
        "architectures": ["MultiModalityCausalLM"],
        "model_type": "multi_modality",
        "gen_head_config": {"cls": "vision_head", "model_type": "gen_head", "params": head},
        "gen_vision_config": {"cls": "VQ-16", "model_type": "gen_vision"},
        "language_config": NETWORK | {"model_type": "llama"},
        "vision_config": {"cls": "CLIPVisionTower", "params": tower},
    }
    write_json(folder / "config.json", config)
    write_words(folder, JANUS_TOKENS, {})


def write_hub_janus(folder: Path, generator: Generator) -> None:
    """Janus-Pro as transformers saves it (deepseek-community/Janus-Pro-1B)."""
    janus_model(generator).save_pretrained(folder)
    write_words(folder, JANUS_TOKENS, {})


# ---------------------------------------------------------------------------------------------------
# Emu3-Gen

EMU3_VOCABULARY, EMU3_CODES, EMU3_FIRST, EMU3_SIDE = 184622, 32768, 151854, 8
EMU3_TOKENS = {
    "<|endoftext|>": 151643,
    "<|extra_200|>": 151846,
    "<|extra_201|>": 151847,
    "<|extra_203|>": 151849,
    "<|extra_204|>": 151850,
    "<|image token|>": 151851,
    "<|image start|>": 151852,
    "<|image end|>": 151853,
}
EMU3_NAMES = {f"<|visual token {code:06d}|>": EMU3_FIRST + code for code in range(EMU3_CODES)}


def emu3_model(generator: Generator) -> Any:
    """An Emu3ForConditionalGeneration of tiny sizes; its tokenizer stays float32."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    text = NETWORK | {"vocab_size": EMU3_VOCABULARY, "num_attention_heads": 4}
    vq = {"codebook_size": EMU3_CODES, "base_channels": 32, "channel_multiplier": [1, 1, 1, 2]}
    make: Any = Emu3Config  # it keeps what it does not know, as it does when it reads a file
    config = make(
        text_config=text,
        vq_config=vq | {"num_res_blocks": 1, "hidden_size": 64},
        vocabulary_map={"<image>": 151655, "<|extra_200|>": 151846},
        image_area=(8 * EMU3_SIDE) ** 2,
    )
    model: Any = Emu3ForConditionalGeneration(config)
    fill(model, generator)
    with torch.no_grad():
        for name, tensor in model.named_buffers():
            if name.endswith("running_mean"):
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
            if name.endswith("running_var"):
                tensor.copy_(1 + torch.rand(tensor.shape, generator=generator))
    return model.eval()


def write_emu3(folder: Path, generator: Generator) -> None:
    """Emu3-Gen as transformers saves it, its tokenizer inside."""
    emu3_model(generator).save_pretrained(folder, max_shard_size="30MB")
    write_words(folder, EMU3_TOKENS, EMU3_NAMES)


# transformers' names within the tokenizer, and those of the authors' class Emu3VisionVQModel
EMU3_VQ_PARTS = {
    ".middle_block.attn_norm.": ".mid.attn_1.norm.",
    ".middle_block.": ".mid.",
    ".down_block.down.": ".down.",
    ".up_block.up.": ".up.",
    "out_proj.": "proj_out.",
    **{f"{part}_proj.": f"{part}." for part in "qkv"},
}


def authors_emu3_vq(state: State) -> State:
    """transformers' names turned into those of Emu3-VisionTokenizer, where projections are 1 x 1 convolutions."""
    found = {}
    for name, tensor in state.items():
        own = re.sub(r"\.attn_norms\.(\d+)\.", r".attn.\1.norm.", name)
        for old, new in EMU3_VQ_PARTS.items():
            own = own.replace(old, new)
        is_projection = name.endswith("_proj.weight")
        found[own] = tensor[:, :, None, None] if is_projection else tensor
    return found


def write_authors_emu3(folder: Path, generator: Generator) -> None:
    """Emu3-Gen by its authors' names, and Emu3-VisionTokenizer next to it."""
    model = emu3_model(generator)
    network = model.model.text_model.state_dict(prefix="model.")
    head, vq = model.lm_head.state_dict(prefix="lm_head."), model.model.vqmodel.state_dict()
    write_safetensors(folder / "model.safetensors", network | head)
    write_safetensors(folder / "vqvae" / "model.safetensors", authors_emu3_vq(vq))
    config = model.config.text_config.to_dict() | {"image_area": (8 * EMU3_SIDE) ** 2}
    write_json(folder / "config.json", config | {"rope_theta": 1e6})
    write_words(folder, EMU3_TOKENS, EMU3_NAMES)
