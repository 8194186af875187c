"""A small random MammothModa2-Preview in the published layout: the autoregressive stage, and scraps of all else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Generator

from tests.checkpoints.files import Shapes, draw_all, write_json, write_shards
from tests.checkpoints.language_models import write_words

WORDS, IMAGE_TOKENS = 152064, 32800
DIM, INNER, LAYERS, FIRST, HEADS, KV = 32, 64, 4, 2, 2, 1
TOKENS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
TEXT: dict[str, Any] = {
    "model_type": "mammothmoda2_qwen2_5_vl_text",
    "vocab_size": WORDS,
    "hidden_size": DIM,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default"},
    "tie_word_embeddings": False,
    "extra_gen_vocab": True,
    "gen_vocab_size": IMAGE_TOKENS,
    "gen_vocab_start_index": WORDS,
    "moe_type": f"ffn-{FIRST}:{LAYERS}",
}
# Of what is not read here, a tensor each
REST: Shapes = {
    "llm_model.model.visual.patch_embed.proj.weight": (4, 3, 2, 14, 14),
    "gen_transformer.x_embedder.weight": (4, 4),
    "gen_vae.decoder.conv_in.weight": (4, 4, 3, 3),
    "gen_image_condition_refiner.query": (4, DIM),
}


def layer_shapes(i: int) -> Shapes:
    """Of a layer by the published names."""
    name, size = f"llm_model.model.language_model.layers.{i}.", DIM // HEADS
    shapes: Shapes = {f"{name}self_attn.o_proj.weight": (DIM, DIM)}
    for part, heads in (("q", HEADS), ("k", KV), ("v", KV)):
        shapes[f"{name}self_attn.{part}_proj.weight"] = (heads * size, DIM)
        shapes[f"{name}self_attn.{part}_proj.bias"] = (heads * size,)
    for mlp in ("mlp", "gen_mlp")[: 1 + (i >= FIRST)]:
        for part in ("gate", "up"):
            shapes[f"{name}{mlp}.{part}_proj.weight"] = (INNER, DIM)
        shapes[f"{name}{mlp}.down_proj.weight"] = (DIM, INNER)
    for norm in ("input", "post_attention"):
        shapes[f"{name}{norm}_layernorm.weight"] = (DIM,)
    return shapes


def write_mammothmoda2(folder: Path, generator: Generator) -> None:
    """Shards in bfloat16 with their configurations, and Qwen2.5's tokenizer, which its users put next to it."""
    model = "llm_model.model.language_model."
    shapes: Shapes = {
        f"{model}embed_tokens.weight": (WORDS, DIM),
        f"{model}gen_embed_tokens.weight": (IMAGE_TOKENS, DIM),
        f"{model}norm.weight": (DIM,),
        "llm_model.lm_head.weight": (WORDS, DIM),
        "llm_model.gen_head.weight": (IMAGE_TOKENS, DIM),
    }
    for i in range(LAYERS):
        shapes |= layer_shapes(i)
    state = draw_all(shapes | REST, generator)
    for name in state:
        if name.endswith(("embed_tokens.weight", "gen_head.weight")):
            state[name] *= 3  # distributions far from flat
    write_shards(folder, {name: value.bfloat16() for name, value in state.items()}, 2)
    llm = {"model_type": "mammothmoda2_qwen2_5_vl", "text_config": TEXT}
    about: dict[str, Any] = {"model_type": "mammothmoda2", "gen_condition_mode": "text_image"}
    about |= {"llm_config": llm, "torch_dtype": "bfloat16"}
    write_json(folder / "config.json", about)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 2048, "top_p": 1.0}
    write_json(folder / "t2i_generation_config.json", sampling | {"eol_token_id": WORDS})
    write_words(folder / "text", TOKENS, {})
