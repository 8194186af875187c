"""What a model is made of: sizes and variants. Needs no torch, but to count parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lantern_hpu.errors import Arg

# What a file may ask for before its weights are looked at
MOST_LAYERS, MOST_TOKENS = 1000, 2**24
LARGEST = 2**53  # a whole number that JSON holds exactly

types_of = cache(get_type_hints)  # of a dataclass, by field


def check_types(config: Any) -> None:
    """Raise a ValueError unless each value of a config is of its field's type: a file may hold anything.

    JSON's lists, and those in them, become tuples: the two compare unequal.
    """
    for name, kind in types_of(type(config)).items():  # type: ignore[arg-type]
        value = getattr(config, name)
        if not is_of(value, kind):
            raise ValueError(f"{name} is {repr(value)[:60]}")
        if isinstance(value, list):
            parts = (tuple(part) if isinstance(part, list) else part for part in value)
            object.__setattr__(config, name, tuple(parts))


def is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, as annotations have it.

    No number is below 0 or infinite; True is none; and where None is allowed, that is how nothing is written, not 0.
    """
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return any(value == each and type(value) is type(each) for each in inner)
    if get_origin(kind) is tuple:
        fits = isinstance(value, list | tuple) and (... in inner or len(value) == len(inner))
        return fits and all(is_of(part, inner[0]) for part in value)
    if inner:  # of a union
        return any(is_of(value, each) for each in inner) and (value is False or value != 0)
    if kind is float:
        return type(value) in (int, float) and 0 <= value < math.inf
    return type(value) is kind and (kind is not int or 0 <= value <= LARGEST)


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and variants of a decoder; the values are the checkpoint's, never the user's."""

    vocab_size: int
    dim: int
    layers: int
    heads: int
    ffn_dim: int
    prefix: int  # P, condition positions before the first image token
    grid: tuple[int, int]  # rows, columns of image tokens
    kv_heads: int | None = None  # None: as many as heads
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    # By grid row and column (LlamaGen), by position (Chameleon), or by three positions, each for a share of the
    # frequencies: a word's place three times, or the picture's start and a code's row and column (GLM-Image)
    rope: Literal["2d", "1d", "mrope"] = "2d"
    # Which features form a pair: (0, 1), (2, 3), ... as in LlamaGen's files, or (0, hd/2), ... as in
    # Chameleon's. "half" reads memory in order; the two differ by a permutation of q and k features.
    rope_pairs: Literal["interleaved", "half"] = "interleaved"
    # LlamaGen's condition positions have cos = sin = 0, so their queries and keys vanish; "identity"
    # leaves them unrotated, and image tokens can look at single words.
    rope_prefix: Literal["zero", "identity"] = "zero"
    # Norms of each head's queries and keys: True, LayerNorm with a weight and a bias a head (Chameleon); "rms", by root
    # mean square with one weight for all heads (Emu3.5)
    qk_norm: bool | Literal["rms"] = False
    head_size: int | None = None  # features of a head; None: the width divided by the heads
    # Rows of the embedding where it knows more than image tokens: those come first, words follow (Chameleon).
    embed_rows: int | None = None
    # Width of image embeddings that an MLP brings to the model's; None: they have it (Janus)
    code_dim: int | None = None
    head_hidden: int | None = None  # width inside a head that is an MLP; None: one matrix (Janus)
    # Whether each row of codes is closed by one more token, the last of the vocabulary (Lumina-mGPT, Emu3)
    row_ends: bool = False
    # Whether top-p is taken before top-k, or of what top-k leaves (LANTERN's sampler for Chameleon; all others)
    top_p_first: bool = False
    # The last tokens of the vocabulary that stand for nothing: the head computes them, and they are never drawn
    spare_codes: int = 0
    qkv_bias: bool = False
    # Norms also of what attention and SwiGLU return, before it is added (GLM)
    sandwich_norms: bool = False
    # Norms of what attention and SwiGLU read; without them those of `sandwich_norms` are the only ones (Chameleon 30B)
    input_norms: bool = True
    # How many features of a head are rotated; None: all. Those that are not form pairs too, behind the rotated ones.
    rotary_dim: int | None = None
    # Frequencies of each axis of "mrope"
    rope_sections: tuple[int, ...] = ()
    # A smaller picture in the same proportions is drawn first, of about this many codes squared; 0: none (GLM-Image)
    preview: int = 0
    # Pixels along a code, where requests choose the picture's size; 0: all pictures are of `grid` (GLM-Image)
    code_pixels: int = 0
    # What rows and columns are multiples of: tokens say a picture's size in steps (Lumina-mGPT)
    grid_step: int = 1
    grids: tuple[tuple[int, int], ...] = ()  # the only ones that were trained; empty: any (Emu3.5)
    # Shorter prefixes, rising, for prompts that fit into one; they take less to read (GLM-Image)
    prefixes: tuple[int, ...] = ()
    # Prefixes of prompts with pictures in them, rising; no preview is drawn then (GLM-Image, Lumina-mGPT)
    source_prefixes: tuple[int, ...] = ()
    max_positions: int | None = None  # of the rotary embedding, as it was trained
    # The last layers in which words have a SwiGLU of their own, and rows of the embedding that are words, behind the
    # vocabulary's; all other rows are image tokens (MammothModa2)
    word_layers: int = 0
    word_rows: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        sizes = (self.vocab_size, self.dim, self.layers, self.heads, self.kv, self.ffn_dim)
        is_whole = min(*sizes, self.prefix, *self.grid) > 0 and self.layers <= MOST_LAYERS
        odd = self.head_size is None and self.dim % self.heads
        if not is_whole or odd or self.heads % self.kv:
            heads = f"{self.heads} heads on {self.kv} key heads, width {self.dim}"
            why = f"{heads}, {self.layers} layers, grid {self.grid}"
            raise ValueError(f"sizes that no model has: {why}")
        if not self.norm_eps < 1 <= self.rope_base:
            raise ValueError(f"norm_eps is {self.norm_eps}, rope_base is {self.rope_base}")
        if self.tokens > MOST_TOKENS or not self.grid_step:
            raise ValueError(f"grid {self.grid} in steps of {self.grid_step}")
        for prefixes in (self.prefixes, self.source_prefixes):
            if (0, *prefixes) != tuple(sorted({0, *prefixes})):
                raise ValueError(f"prefixes {prefixes} do not rise")
        if not 0 <= self.word_layers <= self.layers or (self.word_layers and not self.word_rows):
            why = f"{self.word_layers} of {self.layers} layers, {self.word_rows} words"
            raise ValueError(f"words cannot have layers of their own: {why}")
        if self.row_ends and self.rope == "2d":
            raise ValueError("a row's end has no place on a 2-D grid of positions")
        pairs = self.rotated // 2
        if self.rope == "mrope" and (
            len(self.rope_sections) != 3 or sum(self.rope_sections) != pairs
        ):
            raise ValueError(f"sections {self.rope_sections} of {pairs} frequencies")
        if self.rotated % 2 or not 0 < self.rotated <= self.head_dim:
            raise ValueError(f"{self.rotated} rotated features of {self.head_dim}")
        small = self.preview and not self.sourced and not min(self.preview_grid)
        if small or (self.preview and (self.row_ends or self.rope != "mrope")):
            raise ValueError(f"a preview of {self.preview_grid} codes and a grid of {self.grid}")
        if not 0 <= self.spare_codes < self.vocab_size - self.row_ends or (
            self.spare_codes and (self.row_ends or self.head_hidden is not None)
        ):
            raise ValueError(f"{self.spare_codes} spare codes of {self.vocab_size}")

    def of_grid(
        self, grid: tuple[int, int] | None, words: int = 0, sourced: bool = False
    ) -> TransformerConfig:
        """The same for pictures of another grid, and with the shortest prefix for `words` tokens (0: any).

        Args:
            sourced: of prompts with pictures in them.
        """
        prefixes, longest = self.prefixes, self.prefix
        if sourced:
            prefixes, longest = self.source_prefixes, self.source_prefixes[-1]
        prefix = next((p for p in prefixes if 0 < words <= p), longest)
        if (grid or self.grid, prefix) == (self.grid, self.prefix):
            return self
        other = replace(self, grid=grid or self.grid, prefix=prefix)
        drawn = max(other.grid) + max(other.preview_grid) if self.rope == "mrope" else other.tokens
        last = longest + drawn
        if self.max_positions is not None and last > self.max_positions:
            raise ValueError(f"it takes {last} positions, {self.max_positions} were trained")
        return other

    @property
    def columns(self) -> int:
        """Tokens of a row: its codes, and what closes it."""
        return self.grid[1] + self.row_ends

    def rows_known(self, known: int) -> int:
        """Whole rows of the picture that the first `known` tokens hold."""
        return min(max(known - self.preview_tokens, 0) // self.columns, self.grid[0])

    @property
    def sourced(self) -> bool:
        """Whether these are the sizes for prompts with pictures in them."""
        return self.prefix in self.source_prefixes

    @property
    def has_axes(self) -> bool:
        """Whether places of a prompt's tokens are given, as they do not follow from their order."""
        return self.sourced and self.rope == "mrope"

    @cached_property
    def preview_grid(self) -> tuple[int, int]:
        """Rows and columns of the preview; zeros if there is none."""
        if self.sourced:
            return 0, 0
        ratio = self.grid[0] / self.grid[1]
        return int(math.sqrt(ratio) * self.preview), int(math.sqrt(1 / ratio) * self.preview)

    @property
    def preview_tokens(self) -> int:
        return math.prod(self.preview_grid)

    @cached_property
    def tokens(self) -> int:
        """N, image tokens of one image, its preview included."""
        return self.preview_tokens + self.grid[0] * self.columns

    @property
    def codes(self) -> int:
        """Tokens of the vocabulary that are codes of the tokenizer: the first ones."""
        return self.vocab_size - self.row_ends - self.spare_codes

    @property
    def head_dim(self) -> int:
        return self.head_size or self.dim // self.heads

    @property
    def rotated(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv * self.head_dim

    @cached_property
    def parameters(self) -> int:
        """Numbers of a target of these sizes: of its layers, its embedding, its head and its last norm."""
        projections = (self.width + 2 * self.kv_width) * (self.dim + self.qkv_bias)
        attention = projections + self.width * self.dim
        if self.qk_norm == "rms":
            attention += 2 * self.head_dim
        elif self.qk_norm:  # weights and biases of each head
            attention += 2 * (self.width + self.kv_width)
        norms = 2 * self.dim * (self.input_norms + self.sandwich_norms)
        swiglu = 3 * self.dim * self.ffn_dim
        layers = self.layers * (attention + norms + swiglu) + self.word_layers * swiglu
        embed = (self.embed_rows or self.vocab_size) * self.dim
        if self.code_dim is not None:
            embed = self.vocab_size * self.code_dim + (self.code_dim + self.dim + 2) * self.dim
        head = self.vocab_size * (self.dim + (self.spare_codes > 0))
        if self.head_hidden is not None:
            head = (self.dim + 1) * self.head_hidden + (self.head_hidden + 1) * self.vocab_size
        return layers + embed + head + self.dim


@dataclass(frozen=True)
class DrafterConfig:
    """An EAGLE drafter, where it differs from its target; None: as the target's."""

    input_norm: bool = False  # whether the block normalises its input (Anole)
    # Whether padded condition positions are visible (LlamaGen's published drafters)
    sees_pads: bool = False
    # 1 where entry i reads token i + 1, as EAGLE does; 0 where it reads token i, as a drafter trained on unshifted
    # tokens does: it predicts the same for the children of all siblings
    shift: Literal[0, 1] = 1
    norm_eps: float | None = None
    ffn_dim: int | None = None
    qk_norm: bool | Literal["rms"] | None = None
    aux_layers: tuple[int, ...] = ()  # target layers whose outputs it reads too (EAGLE-3)

    def __post_init__(self) -> None:
        check_types(self)
        if self.norm_eps is not None and self.norm_eps >= 1:
            raise ValueError(f"norm_eps is {self.norm_eps}")

    def sizes(self, target: TransformerConfig) -> TransformerConfig:
        """The block's, with the target's `layers` left as it is."""
        changed = {name: getattr(self, name) for name in ("norm_eps", "ffn_dim", "qk_norm")}
        return replace(target, **{n: value for n, value in changed.items() if value is not None})

    def as_json(self) -> dict[str, Any]:
        """As `model.json` holds it: what is usual is left out."""
        usual = {"shift": 1, "aux_layers": ()}
        values = asdict(self).items()
        return {n: value for n, value in values if value not in (None, usual.get(n))}


@dataclass(frozen=True)
class VQConfig:
    """The shape of a tokenizer. One code covers `downsample` x `downsample` pixels."""

    channels: int = 128
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    res_blocks: int = 2
    z_channels: int = 256
    code_dim: int = 8
    codebook_size: int = 16384
    groups: int = 32
    normalize_codebook: bool = True
    # At the coarsest level, as LlamaGen's have; Chameleon's has it in the middle alone
    attention: bool = True
    # Finest levels that the decoder alone has: the encoder reads pictures averaged over 2 x 2 pixels for each
    decoder_only: int = 0
    # "image": `models/vq.py`; "video": Emu3's, "movq": the same without time, "cosmos": NVIDIA's, of which pictures
    # need the decoder alone
    kind: Literal["image", "video", "movq", "cosmos"] = "image"

    def __post_init__(self) -> None:
        check_types(self)
        levels, codes = len(self.multipliers), (self.codebook_size, self.code_dim, self.z_channels)
        sizes = (levels, self.channels, self.groups, *self.multipliers, *codes)
        if min(sizes) < 1 or self.res_blocks > MOST_LAYERS or levels > MOST_LAYERS:
            why = f"{levels} levels of {self.res_blocks} blocks, {codes[0]} codes"
            raise ValueError(f"sizes that no tokenizer has: {why}")
        # Cosmos' has its doubling of time at the second coarsest
        if self.decoder_only >= levels or (self.kind == "cosmos" and levels == 1):
            why = f"{self.decoder_only} of {levels} levels are the decoder's alone"
            raise ValueError(f"levels that no tokenizer has: {why}")

    @property
    def downsample(self) -> int:
        return (4 if self.kind == "cosmos" else 1) << (len(self.multipliers) - 1)


@dataclass(frozen=True)
class VisionConfig:
    """What makes codes of pictures where no tokenizer does, GLM-Image's vision tower, and which pictures it reads."""

    dim: int
    layers: int
    heads: int
    ffn_dim: int
    patch: int  # pixels along a patch, of a picture of half the source's size
    side: int  # rows and columns of the table of positions
    code_dim: int
    least: int = 512  # pixels along the shorter side of a source; smaller ones are enlarged
    most: int = 2048  # the same of the longer side
    problem: str = ""  # why it cannot be used; empty if it can

    def __post_init__(self) -> None:
        check_types(self)
        sizes = [size for size in vars(self).values() if isinstance(size, int)]
        whole = min(sizes) > 0 and self.layers <= MOST_LAYERS and not self.dim % self.heads
        if not whole or self.least % self.step or self.most % self.step:
            raise ValueError(f"sizes that no vision tower has: {sizes}")

    @property
    def step(self) -> int:
        """Pixels of a source along a code."""
        return 2 * self.patch


@dataclass(frozen=True)
class T5Config:
    """A T5 encoder; names and defaults are those of transformers' config.json."""

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    feed_forward_proj: str = "relu"

    def __post_init__(self) -> None:
        check_types(self)
        sizes = [size for size in vars(self).values() if isinstance(size, int)]
        if min(sizes) < 1 or self.num_layers > MOST_LAYERS:
            raise ValueError(f"sizes that no text encoder has: {sizes}")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> T5Config:
        return cls(**{name: values[name] for name in asdict(cls()) if name in values})

    @property
    def parameters(self) -> int:
        gates = 2 if self.feed_forward_proj.startswith("gated-") else 1
        attention = 4 * self.d_model * self.num_heads * self.d_kv
        block = attention + (gates + 1) * self.d_model * self.d_ff + 2 * self.d_model
        tables = self.vocab_size * self.d_model
        tables += self.relative_attention_num_buckets * self.num_heads
        return tables + self.num_layers * block + self.d_model

    @property
    def float32_parameters(self) -> int:
        """Those that transformers leaves in float32 where float16 would overflow."""
        return self.num_layers * self.d_model * self.d_ff


# What a kind of condition has in `model.json`
KINDS = {
    "words": ("dim", "words", "positions", "remarks"),
    "t5": ("dim", "text"),
    "classes": ("classes",),
    "tokens": ("frame", "rows"),
}


@dataclass(frozen=True)
class ConditionConfig:
    """How a prompt becomes the target's prefix.

    By a table of words and LlamaGen's projection, features of a T5 and the projection, a table of labels, or tokens of
    a language model.
    """

    kind: Literal["words", "t5", "classes", "tokens"]
    dim: int = 0  # width of caption features
    classes: int = 0  # labels
    words: tuple[str, ...] = ()  # of the table
    text: str | None = None  # folder of the text encoder, where it is known
    frame: str = "anole"  # how tokens are framed: a name of `text.frames`
    rows: int = 0  # of the tokens' own table; 0: they are in the target's
    positions: int = 0  # words that are read of a prompt; 0: as many as the prefix has positions
    remarks: tuple[tuple[str, str], ...] = ()  # a word of prompts, and what users are told of it

    def __post_init__(self) -> None:
        check_types(self)

    def as_json(self) -> dict[str, Any]:
        """As `model.json` holds it: what the kind has."""
        return {name: getattr(self, name) for name in ("kind", *KINDS[self.kind])}


@dataclass(frozen=True)
class ModelConfig:
    """All parts of a text-to-image model; None where there is none."""

    target: TransformerConfig
    condition: ConditionConfig
    drafter: DrafterConfig | None = None
    vq: VQConfig | None = None
    text: T5Config | None = None  # of the text encoder; None, too, where it is not here
    codebook: int = 0  # width of the codes' vectors, where those alone are known of their tokenizer
    vision: VisionConfig | None = None
    # Parameters of the diffusion model that makes pictures of the codes, where known
    diffusion: int = 0

    def __post_init__(self) -> None:
        check_types(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelConfig:
        kinds: dict[str, type[Any]] = {"drafter": DrafterConfig, "vq": VQConfig, "text": T5Config}
        kinds["vision"] = VisionConfig
        there = {name: kind for name, kind in kinds.items() if values.get(name) is not None}
        return cls(
            TransformerConfig(**values["target"]),
            ConditionConfig(**values["condition"]),
            codebook=values.get("codebook", 0),
            diffusion=values.get("diffusion", 0),
            **{name: kind(**values[name]) for name, kind in there.items()},
        )

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels; codes if there is no tokenizer."""
        rows, columns = self.target.grid
        pixels = self.vq.downsample if self.vq else self.target.code_pixels or 1
        return rows * pixels, columns * pixels

    @property
    def result(self) -> Arg:
        """The option of `generate` for what it makes: pictures, or states where no part that is known makes those."""
        if self.vq or self.codebook or self.diffusion:
            return Arg("output", "picture.png")
        return Arg("save_states", "states.safetensors")

    @property
    def encodes_pictures(self) -> bool:
        """Whether one of its parts makes codes of pictures."""
        if self.vision is not None:
            return not self.vision.problem
        return self.vq is not None and self.vq.kind == "image"

    @property
    def lacks_text(self) -> bool:
        """Whether there is a text encoder of unknown sizes."""
        return self.condition.kind == "t5" and self.text is None
