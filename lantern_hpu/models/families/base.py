"""A checkpoint family as data: how its files are recognised, what they are made of, and what most families share, the
names and sizes of transformers' Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from lantern_hpu.core import Sampling
from lantern_hpu.errors import Arg, OptionError, WeightsError, Words, shell, words
from lantern_hpu.files import reading
from lantern_hpu.models.config import ConditionConfig, ModelConfig, TransformerConfig, VisionConfig
from lantern_hpu.models.files.checkpoint import Checkpoint, Recipe, Rules, Source, Stored, Weights
from lantern_hpu.models.files.names import CODE_PIXELS, Parts, folder_of
from lantern_hpu.models.text.frames import FRAMES, TokenOrder
from lantern_hpu.models.text.prefix import PROMPT_POSITIONS

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
HEAD = "lm_head.weight"
GENERATION = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}  # transformers' defaults


@dataclass(frozen=True)
class Files:
    """A target as it is found: its tensors, its config.json, and the other parts."""

    checkpoint: Checkpoint
    hf_config: dict[str, Any]
    parts: Parts

    @property
    def known_as(self) -> str:
        """By what names it goes: those of its file or folder, and what its config.json says."""
        names = (self.parts.name, self.parts.target.name, self.hf_config.get("_name_or_path", ""))
        return " ".join(map(str, names)).lower()


def llama_config(family: Family, files: Files, **own: Any) -> TransformerConfig:
    """Sizes of a network with the tensors of transformers' Llama; `own` has those that a family reads otherwise."""
    shapes = files.checkpoint.shapes
    text = family.section(files.hf_config)
    layer = f"{family.model}layers.0."
    rows, dim = shapes[f"{family.model}embed_tokens.weight"]
    width = shapes[f"{layer}self_attn.q_proj.weight"][0]
    heads = own.get("heads") or int(text.get("num_attention_heads", width // family.head_dim))
    sizes: dict[str, Any] = {
        "dim": dim,
        "heads": heads,
        "layers": text.get("num_hidden_layers") or files.checkpoint.count(f"{family.model}layers."),
        "kv_heads": shapes[f"{layer}self_attn.k_proj.weight"][0] * heads // width,
        "head_size": None if width == dim else width // heads,
        "ffn_dim": shapes[f"{layer}mlp.down_proj.weight"][1],
        "prefix": PROMPT_POSITIONS,
        "norm_eps": 1e-5,
        "rope_base": 10000.0,
        "rope": "1d",
        "rope_pairs": "half",
        "rope_prefix": "identity",
        "embed_rows": rows,
    }
    if family.order is not None:
        sizes["vocab_size"] = family.order.drawn
        sizes["row_ends"] = family.row_ends
    sizes |= family.sizes
    rope = text.get("rope_parameters") or {}  # transformers 5 moved the base there
    base = rope.get("rope_theta", sizes["rope_base"])
    sizes["layers"] = int(sizes["layers"])
    sizes["norm_eps"] = float(text.get("rms_norm_eps", sizes["norm_eps"]))
    sizes["rope_base"] = float(text.get("rope_theta", base))
    config = TransformerConfig(**sizes | own)
    check_sizes(files.checkpoint, text, config)
    return config


def llama_recipe(family: Family, files: Files, config: TransformerConfig) -> dict[str, Source]:
    """Recipe of `target.*` from the tensors of transformers' Llama; of the head's rows those that are drawn."""
    rows = drawn = None
    if family.order is not None:
        (first, _), *ends = family.order.first
        rows = family.order.stretches(config.embed_rows or 0)
        drawn = ((first, first + config.codes), *ends)
    recipe = {
        "target.embed.weight": Source.of(f"{family.model}embed_tokens.weight", rows=rows),
        "target.norm.weight": Source.of(f"{family.model}norm.weight"),
        "target.head.weight": Source.of(HEAD, rows=drawn),
    }
    for i in range(config.layers):
        ours, theirs = f"target.layers.{i}.", f"{family.model}layers.{i}."
        recipe |= llama_block(ours, theirs, config.qkv_bias)
        recipe |= head_norms(ours, theirs, files.checkpoint, config)
    return recipe


def llama_block(ours: str, theirs: str, bias: bool = False) -> dict[str, Source]:
    """One layer of ours from one by transformers' names; `q`, `k`, `v` are one matrix here, as are gate and up."""
    attention = f"{theirs}self_attn."
    mlp = f"{theirs}mlp."
    recipe = {
        f"{ours}attention.qkv.weight": Source.of(*(f"{attention}{p}_proj.weight" for p in "qkv")),
        f"{ours}attention.out.weight": Source.of(f"{attention}o_proj.weight"),
        f"{ours}attention_norm.weight": Source.of(f"{theirs}input_layernorm.weight"),
        f"{ours}ffn_norm.weight": Source.of(f"{theirs}post_attention_layernorm.weight"),
        f"{ours}ffn.gate_up.weight": Source.of(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
        f"{ours}ffn.down.weight": Source.of(f"{mlp}down_proj.weight"),
    }
    if bias:
        names = (f"{attention}{p}_proj.bias" for p in "qkv")
        recipe[f"{ours}attention.qkv.bias"] = Source.of(*names)
    return recipe


def head_norms(
    ours: str, theirs: str, checkpoint: Checkpoint, config: TransformerConfig
) -> dict[str, Source]:
    """A layer's query and key norms, a row a head; of fewer stored rows each serves as many consecutive heads."""
    if config.qk_norm == "rms":
        names = (f"{part}_norm.weight" for part in "qk")
        return {f"{ours}attention.{n}": Source.of(f"{theirs}self_attn.{n}") for n in names}
    if not config.qk_norm:
        return {}
    recipe = {}
    for part, count in (("q_norm", config.heads), ("k_norm", config.kv)):
        for name in (f"{part}.weight", f"{part}.bias"):
            source = f"{theirs}self_attn.{name}"
            stored = (checkpoint.shapes.get(source) or (count,))[0]
            few = 0 < stored < count and count % stored == 0  # else `mistakes` compares it
            rows = tuple((i * stored // count, i * stored // count + 1) for i in range(count))
            recipe[f"{ours}attention.{name}"] = Source.of(source, rows=rows if few else None)
    return recipe


@dataclass(frozen=True)
class Family:
    """One family of checkpoints: what its files are recognised by, and what they are made of."""

    name: str  # as the list of known models has it
    sampling: Sampling  # published settings
    marker: str = ""  # in the name of a tensor that tells it from the others
    rows: int = 0  # of its table of tokens, where they tell it
    also: Callable[[Files], bool] = lambda _: True  # what else must hold
    frame: str = ""  # how it frames prompts: a name of `text.frames`
    rename: Rules = ()  # from names of other layouts to those used here
    model: str = "model."  # before the names of the network's tensors
    reads: tuple[str, ...] = ()  # what names of tensors that are read begin with; empty: all
    ignored: tuple[str, ...] = (COMPUTED,)  # in names of tensors that are not needed
    vq: str = ""  # the published file of its image tokenizer, where that is one of its own
    tokenizer: str = ""  # before names of the image tokenizer's tensors, where the file holds it
    normalized_codes: bool = False  # whether codes are used at length 1
    codebook: str = ""  # the codes' vectors, where no tokenizer is published
    # Of config.json: the first that is there describes the network, "" is all of it
    sections: tuple[str, ...] = ("",)
    # Of each section, known values of those that change what is computed; files with others are refused
    keys: Keys = field(default_factory=lambda: LLAMA)
    other_keys: Keys = field(default_factory=dict)  # the same of all of config.json
    head_dim: int = 128  # where config.json does not say the number of heads
    # Of the network, where neither tensors nor config.json say them
    sizes: dict[str, Any] = field(default_factory=dict)
    config: Callable[[Family, Files], TransformerConfig] = llama_config
    recipe: Callable[[Family, Files, TransformerConfig], dict[str, Source]] = llama_recipe
    condition: Callable[[Family, Checkpoint], ConditionConfig] | None = None  # None: of its frame
    # Tensors that no file holds, by the names that the recipe uses
    computed: Callable[[TransformerConfig], dict[str, Tensor]] = lambda _: {}
    tied: bool = False  # whether the head is the embedding where config.json does not say
    # What makes codes of pictures where no tokenizer does, and its weights
    vision: Callable[[Files], tuple[VisionConfig | None, Stored | None]] = lambda _: (None, None)
    generation: str = ""  # a file next to the weights with settings of sampling
    diffusion: bool = False  # whether a diffusion model makes pictures of its codes and prompt
    states: bool = False  # whether another program makes pictures, of its hidden states

    @property
    def order(self) -> TokenOrder | None:
        """Of the rows of its table, where that holds codes and words."""
        return FRAMES[self.frame].order if self.frame else None

    @property
    def row_ends(self) -> bool:
        return self.order is not None and len(self.order.first) > 1

    @property
    def code_pixels(self) -> int:
        return self.sizes.get("code_pixels") or CODE_PIXELS

    @property
    def all_keys(self) -> Keys:
        """The known value of each key that is checked, those of a section as "section.key"."""
        inner = [(part and f"{part}.", self.keys) for part in self.sections]
        return {
            f"{before}{name}": value
            for before, keys in (*inner, ("", self.other_keys))
            for name, value in keys.items()
        }

    def section(self, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
        """What config.json says of the network."""
        for path in self.sections:
            found = hf_config
            for part in filter(None, path.split(".")):
                found = found.get(part) or {}
            if found:
                return found
        return {}

    def renamed(self, files: Files) -> Files:
        return replace(files, checkpoint=files.checkpoint.rewritten(self.rename))

    def matches(self, files: Files) -> bool:
        named = self.renamed(files)
        shapes = named.checkpoint.shapes
        rows = shapes.get(f"{self.model}embed_tokens.weight", (0,))[0]
        marked = any(self.marker in name for name in shapes)
        return marked and self.rows in (0, rows) and self.also(named)

    def read(self, files: Files) -> tuple[ModelConfig, Sampling, Weights]:
        """Its sizes, its settings, and how its tensors become ours; no weight is read.

        `Weights.vq` is a whole image tokenizer as it was published, where the target's own file holds one.
        """
        check_keys(files.checkpoint, files.hf_config, self.all_keys)
        named = self.renamed(files)
        target, tokenizer = self.split(named.checkpoint)
        named = replace(named, checkpoint=target)
        config = self.config(self, named)
        recipe = self.recipe(self, named, config)
        condition = ConditionConfig("tokens", frame=self.frame)
        if self.condition is not None:
            condition = self.condition(self, target)
        vectors = target.shapes.get(self.codebook, (0, 0))[1]
        if vectors:
            recipe["codebook.weight"] = Source.of(self.codebook)
        sampling, note = self.sampling_of(files.parts.target)
        for name, tensor in self.computed(config).items():
            target = target.with_tensor(name, tensor)
        target = with_tied_head(target, recipe, files.hf_config, self.tied)
        target = replace(target, note=target.note or note)
        vision, tower = self.vision(named)
        sizes = ModelConfig(config, condition, codebook=vectors, vision=vision)
        packed = any(name.endswith(".weight.scale") for name in target.shapes)
        main = Stored(target, recipe, self.ignored, quantized=packed)
        weights = Weights(main, Stored(tokenizer) if tokenizer else None, vision=tower)
        return sizes, sampling, weights

    def split(self, checkpoint: Checkpoint) -> tuple[Checkpoint, Checkpoint | None]:
        """The target's tensors, and those of a whole image tokenizer."""
        target = checkpoint.only(lambda name: name.startswith(self.reads or ""))
        if not self.tokenizer:
            return target, None
        inside = checkpoint.only(lambda name: name.startswith(self.tokenizer))
        inside = inside.within(self.tokenizer)
        target = target.only(lambda name: not name.startswith(self.tokenizer))
        return target, inside if "decoder.conv_in.weight" in inside else None

    def sampling_of(self, target: Path) -> tuple[Sampling, str]:
        """The settings that its files state, else the published ones; and what of them is not applied.

        What `generation` leaves out is as transformers has it, and so diffusers' pipeline: the most probable 50.
        """
        file = folder_of(target) / self.generation
        if not file.is_file():
            return self.sampling, ""
        with reading(file, "download it again") as stated:
            given = {n: stated[n] for n in GENERATION if stated.get(n) is not None}
            usual = GENERATION | given
            temperature = usual["temperature"] if stated.get("do_sample") else 0.0
            sampling = replace(
                self.sampling,
                temperature=float(temperature),
                top_k=int(usual["top_k"]),
                top_p=float(usual["top_p"]),
            )
            penalty = float(stated.get("repetition_penalty") or 1.0)
        note = f"{self.generation} has a repetition penalty, which is not applied"
        return sampling, "" if penalty == 1 else note


def with_tied_head(
    checkpoint: Checkpoint, recipe: Recipe, hf_config: Mapping[str, Any], usual: bool
) -> Checkpoint:
    """With the embedding as the head, where the file has none and config.json says so, or it is usual."""
    sections = [part for part in (hf_config, *hf_config.values()) if isinstance(part, dict)]
    stated = [part["tie_word_embeddings"] for part in sections if "tie_word_embeddings" in part]
    head = recipe.get("target.head.weight")
    embed = recipe.get("target.embed.weight")
    if head is None or embed is None or not (any(stated) if stated else usual):
        return checkpoint
    if head.names[0] in checkpoint or embed.names[0] not in checkpoint:
        return checkpoint
    return checkpoint.with_tensor(head.names[0], embed.names[0])


def unknown_format(checkpoint: Checkpoint, why: str) -> NoReturn:
    hint = f"another model: `{shell('models')}` lists them"
    raise WeightsError(f"{checkpoint.path} is of an unknown format", why, hint)


def check_keys(checkpoint: Checkpoint, stated: Keys, known: Keys) -> None:
    """Raise a WeightsError unless each key that is stated has the value that is known, or one of several.

    A section of several, as of rotary positions by the kind of a layer, is of none that is known.
    """
    for name, wanted in known.items():
        value: Any = stated
        for part in name.split("."):
            if not isinstance(value, Mapping):
                break  # a section that is none
            several = [kind for kind, one in value.items() if isinstance(one, Mapping)]
            if part in ("rope_type", "type") and several:
                section = name.rpartition(".")[0]
                unknown_format(checkpoint, f"{section} is {several}, where one is known")
            value = value.get(part)
        allowed = wanted if isinstance(wanted, tuple) else (wanted,)
        for each in value if isinstance(value, list) else [value]:
            if each is not None and each not in allowed:
                values = " or ".join(map(str, allowed))
                unknown_format(checkpoint, f"{name} is {each}, where {values} is known")


def check_sizes(checkpoint: Checkpoint, hf_config: Keys, config: TransformerConfig) -> None:
    """Raise a WeightsError unless config.json says what was read of the tensors, and the same in all places."""
    sizes = {
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_key_value_heads": config.kv,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_base,
        "rope_parameters.rope_theta": config.rope_base,
    }
    check_keys(checkpoint, hf_config, sizes)


def square(pixels: int, code: int = CODE_PIXELS) -> tuple[int, int]:
    """Rows and columns of codes of a picture of this side."""
    return pixels // code, pixels // code


def size_hint(sizes: tuple[int, ...]) -> Words:
    return words(Arg("image_size", sizes[0]), *(f"or {size}" for size in sizes[1:]))


def agreed_size(files: Files, known: Mapping[str, int], sizes: tuple[int, ...]) -> int:
    """The pixels of a side, on which all that state it must agree."""
    target = files.parts.target
    if len(set(known.values())) > 1:
        why = "; ".join(f"{who} means {pixels} pixels" for who, pixels in known.items())
        hint = words("leave", Arg("image_size"), "out, or the file under its published name")
        raise WeightsError(f"the image size of {target} is contradictory", why, hint)
    if not known:
        why = "neither its name nor a config.json says it"
        raise WeightsError(f"the image size of {target} is unknown", why, size_hint(sizes))
    return next(iter(known.values()))


def check_trained(size: int, model: str, sizes: tuple[int, ...]) -> None:
    """Raise an OptionError for pictures of a size that no model of a family draws."""
    if size not in sizes:
        why = f"{model} was published for " + ", ".join(map(str, sizes))
        raise OptionError(f"no {model} draws {size} pixels", why, size_hint(sizes))
