"""The contract of a checkpoint family: how its files are recognised, and what they are made of; and what most share,
names and sizes of transformers' Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lantern_hpu.errors import WeightsError
from lantern_hpu.methods.request import Sampling
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.files.checkpoint import Checkpoint, Recipe, Source, llama_block, take
from lantern_hpu.models.files.names import CODE_PIXELS, Parts
from lantern_hpu.models.text.frames import TokenOrder
from lantern_hpu.models.text.tokens import PROMPT_POSITIONS

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


def called(about: dict[str, Any], parts: Parts) -> str:
    """By what names a checkpoint goes: those of its file or folder, and what its config.json says."""
    return f"{parts.name} {parts.target.name} {about.get('_name_or_path', '')}".lower()


def check_known(checkpoint: Checkpoint, *settings: tuple[str, Any, Any]) -> None:
    """Raise a WeightsError unless each setting, a name and a value, has the value that is known."""
    for name, value, known in settings:
        if value != known:
            raise unknown_setting(checkpoint, name, value, (known,))


def unknown_setting(
    checkpoint: Checkpoint, name: str, value: object, known: Sequence[object]
) -> WeightsError:
    why = f"{name} is {value}, where {' or '.join(map(str, known))} is known"
    return WeightsError(f"{checkpoint.path} is of an unknown format", why)


# What a config.json may say that changes the arithmetic of a transformer, and what of it is computed here. Sizes, the
# epsilon of norms, the base and kind of rotary positions and ties are read; biases and norms are tensors.
ARITHMETIC: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "swin_norm": (False,),
    "parallel_residual": (False,),
    "partial_rotary_factor": (1.0,),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "clip_qkv": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
}
ROPE_TYPES = (
    "default",
    "mrope",
)  # of which the second is the first where all axes have one position


def check_arithmetic(
    checkpoint: Checkpoint, about: Mapping[str, Any], read: Sequence[str] = ()
) -> None:
    """Raise a WeightsError for a setting of a config.json that changes the arithmetic and is not computed here.

    Args:
        read: settings that the family reads itself.
    """
    ropes = [about.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    for name, known in ARITHMETIC.items():
        for said in (about, *ropes):
            value = said.get(name)
            if value is not None and value not in known and name not in read:
                raise unknown_setting(checkpoint, name, value, known or ("nothing",))
    for rope in ropes:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise unknown_setting(checkpoint, "rope_type", kind, ROPE_TYPES)
    layers = set(about.get("layer_types") or ()) - {"full_attention"}
    if layers:
        raise unknown_setting(checkpoint, "layer_types", sorted(layers), ("full_attention",))
    window = about.get("sliding_window")
    if window is not None and about.get("use_sliding_window") is None:
        raise unknown_setting(checkpoint, "sliding_window", window, ("nothing",))


def llama_config(
    checkpoint: Checkpoint,
    about: Mapping[str, Any],
    model: str,
    head_dim: int,
    norm_eps: float,
    rope_base: float,
    read: Sequence[str] = (),
    **sizes: Any,
) -> TransformerConfig:
    """Sizes of a network with the tensors of transformers' Llama.

    Args:
        about: what config.json says of it. model: before the names of its tensors.
        head_dim, norm_eps, rope_base: where config.json does not say them (of heads, their number).
        read: settings that the family reads itself. sizes: what else it has.
    """
    check_arithmetic(checkpoint, about, read)
    layer, rope = f"{model}layers.0.", about.get("rope_parameters") or {}
    rows, dim = checkpoint.shapes[f"{model}embed_tokens.weight"]
    heads = int(about.get("num_attention_heads", dim // head_dim))
    kv_heads = checkpoint.shapes[f"{layer}self_attn.k_proj.weight"][0] * heads // dim
    check_known(
        checkpoint,
        ("head_dim", about.get("head_dim") or dim // heads, dim // heads),
        ("num_key_value_heads", about.get("num_key_value_heads") or kv_heads, kv_heads),
    )
    base = rope.get("rope_theta", rope_base)  # transformers 5 moved it there
    usual: dict[str, Any] = {
        "layers": int(about.get("num_hidden_layers", 0)) or checkpoint.count(f"{model}layers."),
        "kv_heads": kv_heads,
        "ffn_dim": checkpoint.shapes[f"{layer}mlp.gate_proj.weight"][0],
        "prefix": PROMPT_POSITIONS,
        "norm_eps": float(about.get("rms_norm_eps", norm_eps)),
        "rope_base": float(about.get("rope_theta", base)),
        "rope": "1d",
        "rope_pairs": "half",
        "rope_prefix": "identity",
        "embed_rows": rows,
    }
    return TransformerConfig(dim=dim, heads=heads, **usual | sizes)


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
        rows = order.stretches(config.embed_rows or 0)
        drawn = order.drawn(config.codes)
    recipe = {
        "target.embed.weight": take(*(tables or [f"{model}embed_tokens.weight"]), rows=rows),
        "target.norm.weight": take(f"{model}norm.weight"),
        "target.head.weight": take(head, rows=drawn),
    }
    for i in range(config.layers):
        goal, old = f"target.layers.{i}.", f"{model}layers.{i}."
        recipe |= llama_block(goal, old, bias=config.qkv_bias)
    return recipe
