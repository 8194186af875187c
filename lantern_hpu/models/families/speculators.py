"""Drafters in the layout of vllm-project/speculators, model type `eagle`: read and written.

config.json        speculators_model_type, speculators_config, transformer_layer_config, fusion_bias, layernorms
model.safetensors  fusion_fc.*, transformer.* (a Llama layer's names), embed_tokens.weight

What an image drafter has beside that stands under `lantern_hpu` in config.json: its target's fingerprint and sizes
(2-D rotary embedding, prefix, grid), and its own options. A folder without that key loads as well; then its sizes and
tensors have to fit. docs/training.md lists what the layout has no field for.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lantern_hpu.errors import OptionError, WeightsError, choices
from lantern_hpu.files import reading
from lantern_hpu.models.config import DrafterConfig, TransformerConfig
from lantern_hpu.models.families.eagle import check_family
from lantern_hpu.models.files.checkpoint import Recipe, Stored, llama_block, open_checkpoint, take
from lantern_hpu.models.model import ImageModel
from lantern_hpu.models.transformer import Drafter

FILE = "config.json"
WEIGHTS = "model.safetensors"
MODEL_TYPE = "eagle"
TYPE_KEY = "speculators_model_type"
LAYOUT = "0.1.0"  # `speculators_version`: the first with this model type
OURS = "lantern_hpu"  # the key of what the layout has no field for
# Drafts of the layout's only proposal method, a greedy chain; trees are chosen at run time
CHAIN = 5
REQUIRED = (  # of `transformer_layer_config`; its other fields are compared where they stand
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    *("vocab_size", "rms_norm_eps"),
)
EMBEDDING, BIAS = "embed_tokens.weight", "fusion_fc.bias"


class SpeculatorsDrafter:
    """A drafter in the speculators layout, opened for a target of these sizes; no weight is read yet."""

    def __init__(self, path: Path, target: TransformerConfig) -> None:
        self.path = path
        with reading(path / FILE) as about:
            kind = about[TYPE_KEY]
            if kind != MODEL_TYPE:
                why = "image drafters have one layer that reads the target's features, as EAGLE has"
                raise WeightsError(f"{path}: {TYPE_KEY} is {kind!r}", why, choices([MODEL_TYPE]))
            layer, ours = about["transformer_layer_config"], about.get(OURS, {})
            method = about["speculators_config"]["algorithm"]
            if method != MODEL_TYPE or about.get("layernorms", False):
                why = (
                    "extra norms (layernorms)" if method == MODEL_TYPE else f"algorithm {method!r}"
                )
                raise WeightsError(f"the drafter {path} cannot be used", why, "an EAGLE drafter")
            self.bias, self.fingerprint = about.get("fusion_bias", False), ours.get("target")
            self.checkpoint = open_checkpoint(path)
            self.config = self.read_options(ours.get("options"), layer, target)
            expected = layer_config(self.config, target)
            found = {name: layer[name] for name in expected if name in REQUIRED or name in layer}
        wrong = [f"{n} is {v}, not {expected[n]}" for n, v in found.items() if v != expected[n]]
        if wrong:
            hint = "the drafter that was made for this target"
            raise WeightsError(f"the drafter {path} is for another target", "; ".join(wrong), hint)

    def read_options(
        self, options: dict[str, Any] | None, layer: dict[str, Any], target: TransformerConfig
    ) -> DrafterConfig:
        """Its kind: as it was noted by `write_drafter`, else by its tensors."""
        if options is not None:
            return DrafterConfig(**options)
        sizes = {"norm_eps": float(layer["rms_norm_eps"]), "ffn_dim": layer["intermediate_size"]}
        sizes["qk_norm"] = "transformer.self_attn.q_norm.weight" in self.checkpoint
        changed = {name: size for name, size in sizes.items() if size != getattr(target, name)}
        input_norm = "transformer.input_layernorm.weight" in self.checkpoint
        return DrafterConfig(input_norm, target.rope == "2d", **changed)

    def fill(self, drafter: Drafter, model: ImageModel, dtype: torch.dtype | None) -> str:
        """Read its weights. -> their digest

        The layout leaves out an embedding that is the target's, and a bias that is not used.

        Args:
            dtype: None keeps the file's.
        """
        if self.fingerprint not in (None, model.fingerprint):
            why = f"it was trained for another target than {model.name}"
            raise WeightsError(f"the drafter in {self.path} does not fit", why, "--model")
        checkpoint, config = self.checkpoint, drafter.config
        if EMBEDDING not in checkpoint:
            rows = torch.arange(config.embed_rows or config.vocab_size, device=model.target.device)
            checkpoint = checkpoint.beside(EMBEDDING, model.target.embed(rows))
        if not self.bias:
            checkpoint = checkpoint.beside(BIAS, torch.zeros(config.dim))
        stored = Stored(checkpoint, recipe_of(self.config, config))
        digest = stored.fill(drafter, dtype, model.target.device)
        if self.fingerprint is None:
            check_family(drafter, model.target, self.path)
        return digest


def is_speculators(path: Path) -> bool:
    """Whether a folder's config.json speaks of this layout."""
    if not (path / FILE).is_file():
        return False
    with reading(path / FILE) as about:
        return TYPE_KEY in about or "speculators_config" in about


def layer_config(config: DrafterConfig, target: TransformerConfig) -> dict[str, Any]:
    """`transformer_layer_config`: the drafter's layer as a LlamaConfig of transformers has it."""
    sizes = config.sizes(target)
    return {
        "model_type": "llama",
        "hidden_size": sizes.dim,
        "intermediate_size": sizes.ffn_dim,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv,
        "head_dim": sizes.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": sizes.embed_rows or sizes.vocab_size,
        "max_position_embeddings": sizes.prefix + sizes.tokens,
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": sizes.rope_base,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def config_json(model: ImageModel) -> dict[str, Any]:
    """`config.json` of a model's drafter."""
    target, config = model.config.target, model.config.drafter
    assert config is not None and model.drafter is not None
    return {
        "architectures": ["EagleSpeculator"],
        TYPE_KEY: MODEL_TYPE,
        "speculators_version": LAYOUT,
        "speculators_config": {
            "algorithm": MODEL_TYPE,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": CHAIN}],
            "verifier": {"name_or_path": model.name, "architectures": []},
        },
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer_config(config, target),
        "fusion_bias": True,
        "layernorms": False,
        "torch_dtype": str(model.drafter.fc.weight.dtype).removeprefix("torch."),
        OURS: {
            "target": model.fingerprint,
            "options": config.as_json(),
            "target_config": asdict(target),
        },
    }


def recipe_of(config: DrafterConfig, sizes: TransformerConfig) -> Recipe:
    """Our tensors from those of the layout; for what reads lower layers it has no names, so they keep ours."""
    aux = [
        f"aux.{i}.{part}.weight"
        for i in range(len(config.aux_layers))
        for part in ("norm", "linear")
    ]
    return {
        "embed.weight": take(EMBEDDING),
        "fc.weight": take("fusion_fc.weight"),
        "fc.bias": take(BIAS),
        **llama_block("block.", "transformer.", config.input_norm, sizes.qk_norm),
        **{name: take(name) for name in aux},
    }


def tensors_of(drafter: Drafter) -> dict[str, Tensor]:
    """The layout's tensors from ours: queries, keys and values apart, as gate and up."""
    sizes, state = drafter.config, drafter.state_dict()
    heights = {3: [sizes.width, sizes.kv_width, sizes.kv_width], 2: [sizes.ffn_dim] * 2}
    result: dict[str, Tensor] = {}
    for name, source in recipe_of(drafter.drafter_config, sizes).items():
        count = len(source.names)
        parts = state[name].split(heights[count]) if count > 1 else [state[name]]
        result |= {n: part.contiguous() for n, part in zip(source.names, parts, strict=True)}
    return result


def write_drafter(model: ImageModel, folder: Path) -> None:
    """Write a model's drafter into an empty folder."""
    if model.drafter is None:
        hint = "--drafter FOLDER; `lantern-hpu train drafter` makes one"
        raise OptionError("there is nothing to convert", f"{model.name} has no drafter", hint)
    sizes = model.drafter.config
    if sizes.sandwich_norms or sizes.qkv_bias:
        why = "its layer has norms behind its parts, or biases, that a Llama layer has not"
        hint = "without --to: a model folder"
        raise OptionError(f"the drafter of {model.name} does not fit the layout", why, hint)
    save_file(tensors_of(model.drafter), folder / WEIGHTS, {"format": "pt"})
    (folder / FILE).write_text(json.dumps(config_json(model), indent=2) + "\n", encoding="utf-8")
