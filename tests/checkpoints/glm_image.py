"""A small random GLM-Image in the layout that is published: a pipeline of diffusers.

Names, files and rules are real: preview grids, special tokens behind the codes, words behind those. Sizes are tiny. The
diffusion model is written where diffusers is installed.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import Generator

from tests.checkpoints.files import (
    byte_pieces,
    fill,
    write_byte_tokenizer,
    write_json,
    write_shards,
)

CODES, SPECIAL, DIM, HEADS, LAYERS = 64, 128, 64, 4, 2
WORDS_FROM = CODES + SPECIAL
END = f"<|dit_token_{CODES + 1}|>"
NAMED = ("<sop>", "<eop>", "<|image|>", "<|endoftext|>")
ROWS = 1024  # of the table
GLYPHS = 32  # width of the encoder of quoted text
PICTURE = f"<|dit_token_{CODES}|><|image|><|dit_token_{CODES + 1}|>"
TEMPLATE = (
    "{%- for m in messages -%}{%- for c in m.content -%}{%- if c.type == 'image' -%}"
    + PICTURE
    + "{%- else -%}{{ c.text }}{%- endif -%}{%- endfor -%}{%- endfor -%}"
)
# As published, but for sources from 64 to 512 pixels a side
PICTURES: dict[str, Any] = {
    "min_pixels": 64**2,
    "max_pixels": 512**2,
    "patch_size": 16,
    "temporal_patch_size": 1,
    "merge_size": 1,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def special_ids() -> dict[str, int]:
    return {name: ROWS - len(NAMED) + i for i, name in enumerate(NAMED)}


def write_processor(folder: Path) -> None:
    """The tokenizer and what frames a prompt."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.glm_image.image_processing_pil_glm_image import (
        GlmImageImageProcessorPil,
    )
    from transformers.models.glm_image.processing_glm_image import GlmImageProcessor

    start = f"<|dit_token_{CODES}|>"
    names = [*(f"<|dit_token_{i}|>" for i in range(WORDS_FROM)), *byte_pieces()]
    vocabulary = {name: i for i, name in enumerate(names)} | special_ids()
    write_byte_tokenizer(folder, vocabulary, [*NAMED, start])
    make: Any = PreTrainedTokenizerFast
    ends = {"bos_token": start, "eos_token": END, "pad_token": "<|endoftext|>"}
    grids = {"grid_bos_token": "<sop>", "grid_eos_token": "<eop>", "image_token": "<|image|>"}
    file = str(folder / "tokenizer.json")
    tokenizer = make(tokenizer_file=file, padding_side="left", extra_special_tokens=grids, **ends)
    pictures: Any = GlmImageImageProcessorPil(**PICTURES)
    processor: Any = GlmImageProcessor(pictures, tokenizer, TEMPLATE)
    processor.save_pretrained(folder)
    # The published folder has a file of its own for pictures
    more = {"processor_class": "GlmImageProcessor", "resample": 3}
    write_json(folder / "preprocessor_config.json", PICTURES | more)


def autoregressive_model(generator: Generator) -> Any:
    """A GlmImageForConditionalGeneration of tiny sizes."""
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration

    named = special_ids()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    text: dict[str, Any] = {"vocab_size": ROWS, "vision_vocab_size": WORDS_FROM}
    text |= {"max_position_embeddings": 4096}
    text |= {"hidden_size": DIM, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    text |= {"num_attention_heads": HEADS, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    text |= {"pad_token_id": named["<|endoftext|>"], "eos_token_id": CODES + 1}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    config = GlmImageConfig(
        text_config=text | {"rope_parameters": rope | {"mrope_section": [1, 2, 1]}},
        vision_config=vision | {"patch_size": 16, "image_size": 64},
        vq_config={"embed_dim": 24, "latent_channels": 32, "num_embeddings": CODES},
        image_token_id=named["<|image|>"],
        image_start_token_id=CODES,
        image_end_token_id=CODES + 1,
    )
    model: Any = GlmImageForConditionalGeneration(config)
    fill(model, generator)
    return model.eval()


def diffusion_parts(generator: Generator) -> dict[str, Any]:
    """What makes pixels: diffusers' own classes, tiny."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, GlmImageTransformer2DModel
    from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

    make: Any = T5Config
    encoder = T5EncoderModel(
        make(vocab_size=384, d_model=GLYPHS, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )
    transformer = GlmImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=GLYPHS,
        time_embed_dim=16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=CODES,
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        norm_num_groups=4,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    parts: dict[str, Any] = {"text_encoder": encoder, "transformer": transformer, "vae": vae}
    for module in parts.values():
        fill(module, generator)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, time_shift_type="linear", base_shift=0.25, max_shift=0.75
    )
    return parts | {"scheduler": scheduler, "tokenizer": ByT5Tokenizer()}


def write_glm_image(folder: Path, generator: Generator) -> None:
    """The published layout: a folder a part, the autoregressive stage in four shards of bfloat16."""
    try:
        from transformers import GlmImageConfig  # noqa: F401
    except ImportError:  # before 5.0
        return
    inner = folder / "vision_language_encoder"
    model = autoregressive_model(generator)
    state = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    write_shards(inner, state, 4)
    model.config.dtype = "bfloat16"
    model.config.architectures = ["GlmImageForConditionalGeneration"]
    model.config.save_pretrained(inner)
    drawing = {"do_sample": True, "temperature": 0.9, "top_p": 0.75, "eos_token_id": CODES + 1}
    pad = special_ids()["<|image|>"]
    write_json(inner / "generation_config.json", drawing | {"pad_token_id": pad})
    write_processor(folder / "processor")
    ours = {"processor": "GlmImageProcessor", "tokenizer": "ByT5Tokenizer"}
    ours |= {"vision_language_encoder": "GlmImageForConditionalGeneration"}
    ours |= {"text_encoder": "T5EncoderModel"}
    theirs = {"transformer": "GlmImageTransformer2DModel", "vae": "AutoencoderKL"}
    theirs |= {"scheduler": "FlowMatchEulerDiscreteScheduler"}
    index = {name: ["transformers", kind] for name, kind in ours.items()}
    index |= {name: ["diffusers", kind] for name, kind in theirs.items()}
    write_json(folder / "model_index.json", {"_class_name": "GlmImagePipeline"} | index)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = diffusion_parts(generator)
    except ImportError:
        return
    for name, part in parts.items():
        part.save_pretrained(folder / name)
