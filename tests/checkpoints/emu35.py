"""Small random Emu3.5-Image and Xiaomi-Robotics-U0 in the published layout; sizes of the vocabulary are real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Generator

from tests.checkpoints.chameleon import VQGAN, attention, taming_shapes
from tests.checkpoints.files import State, draw_all, fill, write_json, write_pickle, write_shards
from tests.checkpoints.language_models import write_words

VOCABULARY, CODES = 282926, 131072
TOKENS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
TOKENS |= {"<tool_call>": 151657}
NETWORK: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def emu35_model(generator: Generator) -> Any:
    """transformers' Qwen3, which is the same network, of tiny sizes in bfloat16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model: Any = Qwen3ForCausalLM(Qwen3Config(**NETWORK))
    fill(model, generator)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(4)  # codes that differ
    return model.bfloat16().eval()


def ibq(generator: Generator) -> State:
    """Emu3.5-VisionTokenizer: Meta's VQGAN with attention at the coarsest level too, and its own codes."""
    shapes = taming_shapes(**VQGAN, codes=CODES)
    for side, count in (("encoder.down.4", 1), ("decoder.up.4", 2)):
        for block in range(count):
            shapes |= attention(f"{side}.attn.{block}", VQGAN["ch"] * 2)
    return draw_all(shapes, generator)


def write_emu35(folder: Path, generator: Generator, model_type: str = "Emu3") -> None:
    """Emu3.5-Image: shards in bfloat16, its image tokenizer and Qwen2.5's for words in folders next to them."""
    write_shards(folder, emu35_model(generator).state_dict(), 2)
    about: dict[str, Any] = {
        "architectures": ["Emu3ForCausalLM"],
        "model_type": model_type,
        "rope_scaling": None,
    }
    about |= {"attention_dropout": 0.1, "image_area": 720 * 720, "max_position_embeddings": 32768}
    write_json(folder / "config.json", NETWORK | about | {"torch_dtype": "bfloat16"})
    content = {"state_dict": ibq(generator)}
    write_pickle(folder / "Emu3.5-VisionTokenizer" / "model.ckpt", content)
    write_words(folder / "text", TOKENS, {})


def write_u0(folder: Path, generator: Generator) -> None:
    """Xiaomi-Robotics-U0: the same with a name of its own."""
    write_emu35(folder, generator, "UNIS")
