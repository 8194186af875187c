"""Small random checkpoints of language models that draw: Janus-Pro, Emu3. See `make_synthetic_checkpoints`.

Token ids and names are real, layers are narrow, and the pictures are small, so that a test draws one in a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Generator

from scripts.checkpoints.files import (
    State,
    fill,
    merges,
    write_json,
    write_pickle,
    write_safetensors,
)

DIM, LAYERS, HEADS, FFN = 32, 2, 2, 48
# Janus: 8 x 8 codes of 16 pixels
JANUS_CODES, JANUS_VOCABULARY, JANUS_SIDE = 64, 102400, 8
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


def write_byte_tokenizer(
    folder: Path,
    special: Mapping[str, int],
    others: Mapping[str, int] = MappingProxyType({}),
    first: int = 0,
) -> None:
    """tokenizer.json of bytes, words and special tokens with these ids, and others that no text gives.

    Args:
        first: the id of the first byte.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *dict.fromkeys(a + b for a, b in merges()),
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces, first)} | dict(special) | dict(others)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges()))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


# ---------------------------------------------------------------------------------------------------
# Janus-Pro


def janus_model(generator: Generator) -> Any:
    """A JanusForConditionalGeneration of tiny sizes."""
    from transformers import JanusConfig, JanusForConditionalGeneration

    pixels = 16 * JANUS_SIDE
    config = JanusConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": JANUS_VOCABULARY,
            "hidden_size": DIM,
            "intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "rms_norm_eps": 1e-6,
            "pad_token_id": 100015,
            "bos_token_id": 100000,
            "eos_token_id": 100001,
            "tie_word_embeddings": False,
        },
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": pixels,
            "patch_size": 16,
            "projection_dim": DIM,
            "num_image_tokens": JANUS_SIDE**2,
            "mlp_ratio": 2.0,
        },
        vq_config={
            "embed_dim": 8,
            "num_embeddings": JANUS_CODES,
            "latent_channels": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1, 2],
            "num_res_blocks": 1,
            "projection_dim": DIM,
            "image_token_embed_dim": DIM,
        },
        tie_word_embeddings=False,
    )
    model: Any = JanusForConditionalGeneration(config)
    fill(model, generator)
    with torch.no_grad():
        model.model.generation_head.vision_head.weight.mul_(3)  # distributions far from flat
        model.model.generation_embeddings.weight.mul_(4)  # and codes that differ once widened
    return model.eval()


def authors_janus(state: State) -> State:
    """transformers' names turned into those of the authors' files; the parts that read pictures become stand-ins."""
    places = {
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
    parts = {
        ".encoder.down.": ".encoder.conv_blocks.",
        ".decoder.up.": ".decoder.conv_blocks.",
        ".block.": ".res.",
        ".mid.block_1.": ".mid.0.",
        ".mid.attn_1.": ".mid.1.",
        ".mid.block_2.": ".mid.2.",
    }
    found = {}
    for name, tensor in state.items():
        start = next(old for old in places if name.startswith(old))
        own = places[start] + name.removeprefix(start)
        if own.startswith("gen_vision_model."):
            for old, new in parts.items():
                own = own.replace(old, new)
        found[own] = tensor
    return found | {"gen_vision_model.quantize.codebook_used": torch.zeros(65536)}


def janus_entry(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "family": "janus",
        "model": name,
        "prompt": "a photo of a red apple",
        "class_label": None,
        "image_size": 16 * JANUS_SIDE,
        "tokens": JANUS_SIDE**2,
        "grid": [JANUS_SIDE, JANUS_SIDE],
        "codes": JANUS_CODES,
        "dim": DIM,
        "heads": HEADS,
        "layers": LAYERS,
        "norm_eps": 1e-6,
        "dtype": "float32",
        "vq": None,
        "drafter": None,
        "neighbours": None,
    } | more


def write_janus(root: Path, generator: Generator) -> Iterator[dict[str, Any]]:
    """Janus-Pro as its authors published it: one pickle, and a config.json with a section for each part."""
    folder = root / "janus-pro"
    state = authors_janus(janus_model(generator).state_dict())
    write_pickle(folder / "pytorch_model.bin", state)
    part = {"model_type": "gen_head", "params": {"image_token_size": JANUS_CODES, "n_embed": DIM}}
    config = {
        "architectures": ["MultiModalityCausalLM"],
        "model_type": "multi_modality",
        "gen_head_config": {"cls": "vision_head"} | part,
        "gen_vision_config": {"cls": "VQ-16", "model_type": "gen_vision"},
        "language_config": {
            "model_type": "llama",
            "hidden_size": DIM,
            "intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "vocab_size": JANUS_VOCABULARY,
        },
        "vision_config": {
            "cls": "CLIPVisionTower",
            "params": {"image_size": 16 * JANUS_SIDE, "model_name": "siglip_large_patch16_384"},
        },
    }
    write_json(folder / "config.json", config)
    write_byte_tokenizer(folder, JANUS_TOKENS)
    yield janus_entry(folder.name)


def write_hub_janus(root: Path, generator: Generator) -> Iterator[dict[str, Any]]:
    """Janus-Pro as transformers saves it (deepseek-community/Janus-Pro-1B)."""
    folder = root / "janus-pro-hub"
    janus_model(generator).save_pretrained(folder)
    write_byte_tokenizer(folder, JANUS_TOKENS)
    yield janus_entry(folder.name)


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


def emu3_model(generator: Generator) -> Any:
    """An Emu3ForConditionalGeneration of tiny sizes; its tokenizer stays float32."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    make: Any = Emu3Config  # it keeps what it does not know, as it does when it reads a file
    config = make(
        text_config={
            "vocab_size": EMU3_VOCABULARY,
            "hidden_size": DIM,
            "intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        vq_config={
            "codebook_size": EMU3_CODES,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 2],
            "num_res_blocks": 1,
            "hidden_size": 64,
        },
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


def write_emu3(root: Path, generator: Generator) -> Iterator[dict[str, Any]]:
    """Emu3-Gen as transformers saves it, its tokenizer inside."""
    folder = root / "emu3"
    emu3_model(generator).save_pretrained(folder, max_shard_size="30MB")
    codes = {f"<|visual token {code:06d}|>": EMU3_FIRST + code for code in range(EMU3_CODES)}
    write_byte_tokenizer(folder, EMU3_TOKENS, others=codes)
    yield emu3_entry(folder.name)


def write_authors_emu3(root: Path, generator: Generator) -> Iterator[dict[str, Any]]:
    """Emu3-Gen by its authors' names, and Emu3-VisionTokenizer beside it."""
    folder = root / "emu3-authors"
    model = emu3_model(generator)
    network = model.model.text_model.state_dict()
    state = {f"model.{name}": tensor for name, tensor in network.items()}
    write_safetensors(
        folder / "model.safetensors", state | model.lm_head.state_dict(prefix="lm_head.")
    )
    write_safetensors(folder / "vqvae" / "model.safetensors", model.model.vqmodel.state_dict())
    config = model.config.text_config.to_dict() | {"image_area": (8 * EMU3_SIDE) ** 2}
    write_json(folder / "config.json", config | {"rope_theta": 1e6})
    codes = {f"<|visual token {code:06d}|>": EMU3_FIRST + code for code in range(EMU3_CODES)}
    write_byte_tokenizer(folder, EMU3_TOKENS, others=codes)
    yield emu3_entry(folder.name, vq="emu3-authors/vqvae")


def emu3_entry(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "family": "emu3",
        "model": name,
        "prompt": "a photo of a red apple",
        "class_label": None,
        "image_size": 8 * EMU3_SIDE,
        "tokens": EMU3_SIDE * (EMU3_SIDE + 1),
        "grid": [EMU3_SIDE, EMU3_SIDE],
        "codes": EMU3_CODES,
        "dim": DIM,
        "heads": 4,
        "layers": LAYERS,
        "norm_eps": 1e-5,
        "dtype": "float32",
        "vq": None,
        "drafter": None,
        "neighbours": None,
    } | more
