"""The contract of a checkpoint family: how its files are recognised, and what they are made of; and what most share,
names and sizes of transformers' Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lantern_hpu.core import Sampling
from lantern_hpu.errors import WeightsError
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.files.checkpoint import Checkpoint, Recipe, Source, llama_block, take
from lantern_hpu.models.files.names import CODE_PIXELS, Parts
from lantern_hpu.models.text.frames import TokenOrder
from lantern_hpu.models.text.tokens import PROMPT_POSITIONS

Keys = Mapping[str, Any]  # of config.json, those of a section as "section.key"
# What a Llama's keys are where config.json has them, of those that change what is computed and are not read
LLAMA: Keys = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_parameters.partial_rotary_factor": 1.0,
    "rope_parameters.rope_type": "default",
    "rope_scaling.rope_type": "default",
    "rope_scaling.type": "default",
    "rope_scaling.factor": 1.0,
    "rope_parameters.factor": 1.0,
    "use_sliding_window": False,
    "layer_types": "full_attention",
    "swin_norm": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
QWEN2 = {name: value for name, value in LLAMA.items() if name != "attention_bias"}  # it has some
COMPUTED = "rotary_emb.inv_freq"  # a buffer that some files hold and that is computed here


@dataclass(frozen=True)
class Published:
    """What a published target turned out to be."""

    kind: str  # as the list of known models has it
    config: TransformerConfig
    condition: ConditionConfig
    checkpoint: Checkpoint  # its tensors by the names that the recipe uses
    recipe: Recipe  # of `target.*` and of the condition's modules
    # A whole image tokenizer, if the target's own file holds one
    tokenizer: Checkpoint | None = None
    codebook: int = 0  # width of the codes' vectors, where the recipe has them as `codebook.weight`
    sampling: Sampling | None = None  # as its files say; None: the family's
    # Whether pictures are made by a diffusion model of its codes and prompt
    diffusion: bool = False
    states: bool = False  # whether another program makes pictures, of its hidden states


@dataclass(frozen=True)
class Family:
    """One family of checkpoints, by its tensors, the config.json beside them, and the other parts."""

    recognises: Callable[[Checkpoint, dict[str, Any], Parts], bool]
    read: Callable[[Checkpoint, dict[str, Any], Parts], Published]
    sampling: Mapping[str, Sampling]  # published settings of each kind
    ignored: tuple[str, ...] = (COMPUTED,)  # in names of tensors that are not needed
    normalized_codes: bool = False  # whether codes are used at length 1
    code_pixels: int = CODE_PIXELS  # along a code
    # Values of keys of config.json that change what is computed; files with others are refused
    keys: Keys = field(default_factory=dict)


def called(about: dict[str, Any], parts: Parts) -> str:
    """By what names a checkpoint goes: those of its file or folder, and what its config.json says."""
    return f"{parts.name} {parts.target.name} {about.get('_name_or_path', '')}".lower()


def check_known(checkpoint: Checkpoint, *settings: tuple[str, Any, Any]) -> None:
    """Raise a WeightsError unless each setting, a name and a value, has the value that is known, or one of several."""
    for name, value, known in settings:
        allowed = known if isinstance(known, tuple) else (known,)
        if value not in allowed:
            why = f"{name} is {value}, where {' or '.join(map(str, allowed))} is known"
            what = f"{checkpoint.path} is of an unknown format"
            raise WeightsError(what, why, "another model: `lantern-hpu models` lists them")


def within(section: str, keys: Keys) -> Keys:
    """The same keys in a section."""
    return {f"{section}.{name}": value for name, value in keys.items()}


def check_keys(checkpoint: Checkpoint, about: Keys, keys: Keys) -> None:
    """Raise a WeightsError unless each key that config.json has is of the value that is known.

    A section of several, as of rotary positions by the kind of a layer, is of none that is known.
    """
    for name, known in keys.items():
        value: Any = about
        for part in name.split("."):
            if not isinstance(value, Mapping):
                break  # a section that is none
            if part in ("rope_type", "type"):
                several = [kind for kind, one in value.items() if isinstance(one, Mapping)]
                section = name.rpartition(".")[0]
                check_known(checkpoint, (section, several or "one", "one"))
            value = value.get(part)
        values = value if isinstance(value, list) else [value]
        check_known(checkpoint, *((name, each, known) for each in values if each is not None))


def check_sizes(checkpoint: Checkpoint, about: Keys, config: TransformerConfig) -> None:
    """Raise a WeightsError unless config.json says what was read of the tensors, and the same in all places."""
    sizes = {
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_key_value_heads": config.kv,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_base,
        "rope_parameters.rope_theta": config.rope_base,
    }
    check_keys(checkpoint, about, sizes)


def llama_config(
    checkpoint: Checkpoint,
    about: Mapping[str, Any],
    model: str,
    head_dim: int,
    norm_eps: float,
    rope_base: float,
    **sizes: Any,
) -> TransformerConfig:
    """Sizes of a network with the tensors of transformers' Llama.

    Args:
        about: what config.json says of it. model: before the names of its tensors.
        head_dim, norm_eps, rope_base: where config.json does not say them (of heads, their number).
        sizes: what else the family has.
    """
    layer, rope = f"{model}layers.0.", about.get("rope_parameters") or {}
    rows, dim = checkpoint.shapes[f"{model}embed_tokens.weight"]
    heads = int(about.get("num_attention_heads", dim // head_dim))
    base = rope.get("rope_theta", rope_base)  # transformers 5 moved it there
    usual: dict[str, Any] = {
        "layers": int(about.get("num_hidden_layers", 0)) or checkpoint.count(f"{model}layers."),
        "kv_heads": checkpoint.shapes[f"{layer}self_attn.k_proj.weight"][0] * heads // dim,
        "ffn_dim": checkpoint.shapes[f"{layer}mlp.gate_proj.weight"][0],
        "prefix": PROMPT_POSITIONS,
        "norm_eps": float(about.get("rms_norm_eps", norm_eps)),
        "rope_base": float(about.get("rope_theta", base)),
        "rope": "1d",
        "rope_pairs": "half",
        "rope_prefix": "identity",
        "embed_rows": rows,
    }
    config = TransformerConfig(dim=dim, heads=heads, **usual | sizes)
    check_sizes(checkpoint, about, config)
    return config


def llama_recipe(
    config: TransformerConfig,
    model: str,
    order: TokenOrder | None = None,
    head: str = "lm_head.weight",
    tables: Sequence[str] = (),
) -> dict[str, Source]:
    """Recipe of `target.*` from the tensors of transformers' Llama.

    Args:
        model: before the names of its tensors, but for the head's.
        order: of the rows of its table, of which the head keeps those that are drawn; None: all as they are.
        tables: that hold the embedding one after the other, where it is not one.
    """
    rows = drawn = None
    if order is not None:
        first, rows = order.first[0][0], order.stretches(config.embed_rows or 0)
        drawn = ((first, first + config.codes), *order.first[1:])
    recipe = {
        "target.embed.weight": take(*(tables or [f"{model}embed_tokens.weight"]), rows=rows),
        "target.norm.weight": take(f"{model}norm.weight"),
        "target.head.weight": take(head, rows=drawn),
    }
    for i in range(config.layers):
        goal, old = f"target.layers.{i}.", f"{model}layers.{i}."
        recipe |= llama_block(goal, old, bias=config.qkv_bias)
    return recipe
