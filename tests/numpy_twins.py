"""The networks of the published checkpoints once more: NumPy in float64, loops, no cache, no batch.

Written from the specification of the files alone, to judge the loaders and the networks of the package; nothing
here imports the package. Weights are a mapping from the public names to arrays (`arrays` makes it from tensors). A
sequence is one row; L is its length, P the number of condition slots, T of image tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Weights = Mapping[str, Array]
Pairs = Literal["interleaved", "half"]


def arrays(state: Mapping[str, Tensor]) -> dict[str, Array]:
    """A state dict as float64 arrays under the same names."""
    return {name: tensor.detach().double().numpy() for name, tensor in state.items()}


# ---------------------------------------------------------------------------------------------------
# Parts


def linear(x: Array, weight: Array) -> Array:
    """[..., in] and [out, in] to [..., out]."""
    return x @ weight.T


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def head_norm(x: Array, weight: Array, bias: Array, eps: float = 1e-5) -> Array:
    """LayerNorm of each head's features with weights of its own.

    Args:
        x: [L, heads, hd]
        weight, bias: [heads, hd], or [shards, hd], each shard's row serving the heads next to each other.
    """
    out = np.empty_like(x)
    heads = x.shape[1]
    for head in range(heads):
        row = head * len(weight) // heads
        centred = x[:, head] - x[:, head].mean(-1, keepdims=True)
        variance = (centred * centred).mean(-1, keepdims=True)
        out[:, head] = centred / np.sqrt(variance + eps) * weight[row] + bias[row]
    return out


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def attention(q: Array, k: Array, v: Array, mask: Bools) -> Array:
    """Each query over the keys that it may see.

    Args:
        q, k, v: [L, heads, hd]
        mask: [L, L], True where query i sees key j; no row is empty.

    Returns [L, heads, hd].
    """
    length, heads, head_dim = q.shape
    out = np.zeros_like(q)
    for head in range(heads):
        for i in range(length):
            seen = np.flatnonzero(mask[i])
            scores = k[seen, head] @ q[i, head] / math.sqrt(head_dim)
            probs = np.exp(scores - scores.max())
            out[i, head] = (probs / probs.sum()) @ v[seen, head]
    return out


# ---------------------------------------------------------------------------------------------------
# Positions and masks


def rope_2d(
    head_dim: int, prefix: int, grid: tuple[int, int], length: int, base: float = 10000.0
) -> Array:
    """LlamaGen's table [length, head_dim / 2, 2] of cosines and sines.

    The first half of the angles turns with the grid's row, the second with its column, cells row by row. The
    condition slots before the grid and the slots after it hold zeros, not the identity.
    """
    half = head_dim // 2
    frequencies = [base ** (-2 * j / half) for j in range(half // 2)]
    rows, columns = grid
    table = np.zeros((length, half, 2))
    for slot in range(prefix, min(length, prefix + rows * columns)):
        row, column = divmod(slot - prefix, columns)
        for m, frequency in enumerate(frequencies):
            for place, angle in ((m, row * frequency), (m + len(frequencies), column * frequency)):
                table[slot, place] = math.cos(angle), math.sin(angle)
    return table


def rope_1d(head_dim: int, positions: Sequence[int], base: float = 10000.0) -> Array:
    """The usual table [L, head_dim / 2, 2] for these positions."""
    table = np.zeros((len(positions), head_dim // 2, 2))
    for i, position in enumerate(positions):
        for m in range(head_dim // 2):
            angle = position * base ** (-2 * m / head_dim)
            table[i, m] = math.cos(angle), math.sin(angle)
    return table


def rotate(x: Array, table: Array, pairs: Pairs) -> Array:
    """Rotate [L, heads, hd]; a pair is features (2m, 2m + 1), or (m, m + hd / 2)."""
    out = np.empty_like(x)
    half = x.shape[-1] // 2
    for m in range(half):
        a, b = (2 * m, 2 * m + 1) if pairs == "interleaved" else (m, m + half)
        cos, sin = table[:, None, m, 0], table[:, None, m, 1]  # [L, 1]
        out[..., a] = x[..., a] * cos - x[..., b] * sin
        out[..., b] = x[..., b] * cos + x[..., a] * sin
    return out


def padded_mask(valid: Sequence[bool], length: int, earlier: bool = False) -> Bools:
    """[length, length]: causal, keys at pads hidden; a pad sees itself alone, as in LlamaGen.

    Args:
        valid: of the first slots, False at pads; slots after them are no pads.
        earlier: a pad sees those before it too.
    """
    real = np.array([*valid, *[True] * (length - len(valid))][:length])
    unseen = causal_mask(length) & ~real[:, None] & ~real
    return (causal_mask(length) & real) | (unseen if earlier else np.eye(length, dtype=bool))


def causal_mask(length: int) -> Bools:
    return np.tril(np.ones((length, length), dtype=bool))


# ---------------------------------------------------------------------------------------------------
# One block


def block(
    x: Array,  # [L, d]
    weights: Weights,
    prefix: str,  # of the names, which are transformers': "layers.0."
    heads: int,
    table: Array,  # [L, hd / 2, 2]
    mask: Bools,  # [L, L]
    pairs: Pairs,
    eps: float,
) -> Array:
    """A pre-norm block. Norms that the weights do not have are left out: input, query and key."""
    own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
    h = x
    if "input_layernorm.weight" in own:
        h = rms_norm(x, own["input_layernorm.weight"], eps)
    q, k, v = (
        linear(h, own[f"self_attn.{part}_proj.weight"]).reshape(len(x), heads, -1) for part in "qkv"
    )
    if "self_attn.q_norm.weight" in own:
        q = head_norm(q, own["self_attn.q_norm.weight"], own["self_attn.q_norm.bias"])
        k = head_norm(k, own["self_attn.k_norm.weight"], own["self_attn.k_norm.bias"])
    mixed = attention(rotate(q, table, pairs), rotate(k, table, pairs), v, mask)
    x = x + linear(mixed.reshape(len(x), -1), own["self_attn.o_proj.weight"])
    h = rms_norm(x, own["post_attention_layernorm.weight"], eps)
    gate, up, down = (own[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return x + swiglu(h, gate, up, down)


def count_layers(weights: Weights, prefix: str) -> int:
    return 1 + max(
        int(n.removeprefix(prefix).split(".")[0]) for n in weights if n.startswith(prefix)
    )


# ---------------------------------------------------------------------------------------------------
# LlamaGen


def from_gpt(weights: Weights) -> dict[str, Array]:
    """A .pt file's weights under the names of the hub's LlamaGen-T2I (specification 4.3, read backwards)."""
    whole = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    parts = {
        "attention.wo.weight": "self_attn.o_proj.weight",
        "feed_forward.w1.weight": "mlp.gate_proj.weight",
        "feed_forward.w3.weight": "mlp.up_proj.weight",
        "feed_forward.w2.weight": "mlp.down_proj.weight",
        "attention_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
    }
    found: dict[str, Array] = {}
    for name, weight in weights.items():
        if name.startswith("layers."):
            _, layer, part = name.split(".", 2)
            if part == "attention.wqkv.weight":
                d = weight.shape[1]
                for i, letter in enumerate("qkv"):
                    rows = weight[i * d : (i + 1) * d]
                    found[f"model.layers.{layer}.self_attn.{letter}_proj.weight"] = rows
            else:
                found[f"model.layers.{layer}.{parts[part]}"] = weight
        elif name.startswith("cls_embedding."):
            found[f"model.{name}"] = weight
        elif name != "freqs_cis":
            found[whole[name]] = weight
    return found


def text_prefix(weights: Weights, features: Array | None) -> Array:
    """The prefix [P, d] of a caption's features [P, C], or of no caption (None)."""
    if features is None:
        features = weights["model.cls_embedding.uncond_embedding"]
    name = "model.cls_embedding.cap_proj."
    h = gelu_tanh(linear(features, weights[name + "fc1.weight"]))
    return linear(h, weights[name + "fc2.weight"])


def class_prefix(weights: Weights, label: int | None) -> Array:
    """The prefix [1, d] of a class, or of no class (None): the table's last row."""
    table = weights["model.cls_embedding.embedding_table.weight"]
    return table[-1:] if label is None else table[label : label + 1]


def llamagen_target(
    weights: Weights,
    heads: int,
    grid: tuple[int, int],
    prefix: Array,
    valid: Sequence[bool],
    tokens: Sequence[int],
    eps: float = 1e-5,
    earlier: bool = False,
    base: float = 10000.0,
) -> tuple[Array, Array]:
    """The target over a condition and image tokens in one pass.

    Args:
        weights: under the hub's names; those of a .pt file go through `from_gpt`.
        prefix: [P, d] of `text_prefix` or `class_prefix`.
        valid: [P], False at pads.
        tokens: [T] image tokens known so far.

    Returns logits [P + T, V] and final-normed hidden states [P + T, d]. Row P - 1 + t is of image token t.
    """
    x = np.concatenate([prefix, weights["model.embed_tokens.weight"][list(tokens)]])
    head_dim = x.shape[1] // heads
    table = rope_2d(head_dim, len(prefix), grid, len(x), base)
    mask = padded_mask(valid, len(x), earlier)
    for layer in range(count_layers(weights, "model.layers.")):
        x = block(x, weights, f"model.layers.{layer}.", heads, table, mask, "interleaved", eps)
    hidden = rms_norm(x, weights["model.norm.weight"], eps)
    return linear(hidden, weights["lm_head.weight"]), hidden


def drafter_input(weights: Weights, hidden: Array, tokens: Sequence[int]) -> Array:
    """[E, d] of pairs of a hidden state [E, d] and the token after it: embedding first."""
    x = np.concatenate([weights["embed_tokens.weight"][list(tokens)], hidden], 1)
    x = linear(x, weights["fc.weight"])
    return x + weights["fc.bias"] if "fc.bias" in weights else x


def llamagen_drafter(
    weights: Weights,
    head: Array,
    heads: int,
    grid: tuple[int, int],
    prefix: int,
    hidden: Array,
    tokens: Sequence[int],
    eps: float = 1e-6,
    base: float = 10000.0,
) -> tuple[Array, Array]:
    """The drafter over a whole sequence in one pass.

    Entry i is made from hidden state i and the token of slot i + 1, guesses hidden state i + 1, and stands at the
    grid cell of slot i + 1: the table has one zero row less than the target's. Condition slots carry token 0. All
    entries are visible, pads too.

    Args:
        weights: of the drafter, without `module.`
        head: [V, d], the target's.
        prefix: P
        hidden: [E, d], E <= P - 1 + T, final-normed hidden states of slots 0 to E - 1.
        tokens: [T] image tokens.

    Returns guessed hidden states [E, d] and their logits [E, V]. Row P - 1 + t guesses image token t + 1.
    """
    entries = len(hidden)
    ids = [0] * prefix + list(tokens)  # of all slots
    x = drafter_input(weights, hidden, ids[1 : entries + 1])
    head_dim = x.shape[1] // heads
    table = rope_2d(head_dim, prefix - 1, grid, entries, base)
    x = block(x, weights, "layers.0.", heads, table, causal_mask(entries), "interleaved", eps)
    return x, linear(x, head)


# ---------------------------------------------------------------------------------------------------
# Chameleon and Anole


def anole_row(
    text: Sequence[int], guided: bool, tokens: Sequence[int] = ()
) -> tuple[list[int], list[bool], list[int]]:
    """Ids, validity and positions of one row: the prompt's, or (not guided) the one without a prompt.

    Args:
        text: ids of the prompt's words, without the beginning of the sequence.
        tokens: image tokens known so far, as ids of the vocabulary.
    """
    prompt = [0, *text, 8710, 8197]
    if guided:
        ids = [*prompt, *tokens]
        return ids, [True] * len(ids), list(range(len(ids)))
    pads = len(prompt) - 2
    ids = [1] * pads + [0, 8197, *tokens]
    return ids, [i >= pads for i in range(len(ids))], [max(i - pads, 0) for i in range(len(ids))]


def chameleon_target(
    weights: Weights,
    heads: int,
    ids: Sequence[int],
    valid: Sequence[bool],
    positions: Sequence[int],
    eps: float = 1e-5,
    base: float = 10000.0,
) -> tuple[Array, Array]:
    """Logits [L, 65536], image tokens not masked, and final-normed hidden states [L, d].

    At pads the values mean nothing.
    """
    x = weights["model.embed_tokens.weight"][list(ids)]
    table = rope_1d(x.shape[1] // heads, positions, base)
    mask = padded_mask(valid, len(x))
    for layer in range(count_layers(weights, "model.layers.")):
        x = block(x, weights, f"model.layers.{layer}.", heads, table, mask, "half", eps)
    hidden = rms_norm(x, weights["model.norm.weight"], eps)
    return linear(hidden, weights["lm_head.weight"]), hidden


def anole_drafter(
    weights: Weights,
    head: Array,
    heads: int,
    hidden: Array,
    tokens: Sequence[int],
    valid: Sequence[bool],
    positions: Sequence[int],
    eps: float = 1e-5,
    base: float = 10000.0,
) -> tuple[Array, Array]:
    """The drafter over a whole row; entries whose hidden state is a pad's are hidden.

    Args:
        hidden: [E, d] of the target.
        tokens: [E] ids paired with them: those of the next slots, or (D-35) of the same slots.
        valid, positions: [E], the target's for the same hidden states.

    Returns guessed hidden states [E, d] and their logits [E, 65536].
    """
    x = drafter_input(weights, hidden, tokens)
    table = rope_1d(x.shape[1] // heads, positions, base)
    mask = padded_mask(valid, len(x))
    x = block(x, weights, "layers.0.", heads, table, mask, "half", eps)
    return x, linear(x, head)


# ---------------------------------------------------------------------------------------------------
# From codes to images (with torch's convolution)


def convolve(weights: Weights, name: str, x: Tensor) -> Tensor:
    weight = torch.from_numpy(weights[f"{name}.weight"])
    bias = torch.from_numpy(weights[f"{name}.bias"])
    return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)


def group_norm(weights: Weights, name: str, x: Tensor, groups: int = 32) -> Tensor:
    _, channels, height, width = x.shape
    parts = x.reshape(groups, -1)
    parts = (parts - parts.mean(1, keepdim=True)) / (
        parts.var(1, correction=0, keepdim=True) + 1e-6
    ).sqrt()
    scale, shift = (torch.from_numpy(weights[f"{name}.{p}"]) for p in ("weight", "bias"))
    x = parts.reshape(1, channels, height, width)
    return x * scale[:, None, None] + shift[:, None, None]


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def res_block(weights: Weights, name: str, x: Tensor) -> Tensor:
    h = convolve(weights, f"{name}.conv1", swish(group_norm(weights, f"{name}.norm1", x)))
    h = convolve(weights, f"{name}.conv2", swish(group_norm(weights, f"{name}.norm2", h)))
    if f"{name}.nin_shortcut.weight" in weights:
        x = convolve(weights, f"{name}.nin_shortcut", x)
    return x + h


def pixel_attention(weights: Weights, name: str, x: Tensor) -> Tensor:
    h = group_norm(weights, f"{name}.norm", x)
    q, k, v = (convolve(weights, f"{name}.{part}", h).flatten(2)[0] for part in "qkv")  # [C, HW]
    probs = torch.softmax(q.T @ k / math.sqrt(len(q)), 1)  # [HW, HW]
    return x + convolve(weights, f"{name}.proj_out", (v @ probs.T).reshape(x.shape))


def upsample(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Twice the size by repeating pixels, then a convolution, if this level has one."""
    if f"{name}.conv.weight" not in weights:
        return x
    return convolve(weights, f"{name}.conv", x.repeat_interleave(2, 2).repeat_interleave(2, 3))


def grid_of(vectors: Array) -> Tensor:
    """[N, c] code vectors, row by row, to [1, c, sqrt N, sqrt N]."""
    side = math.isqrt(len(vectors))
    return torch.from_numpy(vectors).T.reshape(1, -1, side, side)


def members(weights: Weights, name: str) -> list[str]:
    """`name`.0, `name`.1, ... as far as the weights have them."""
    found: list[str] = []
    while any(n.startswith(f"{name}.{len(found)}.") for n in weights):
        found.append(f"{name}.{len(found)}")
    return found


def decoded(
    weights: Weights, names: tuple[str, str, str, str], levels: list[str], z: Array
) -> Array:
    """Vectors of codes [N, c] to an image [3, H, W], not clamped.

    Args:
        names: of the middle's three parts, and of a level's blocks. levels: names, from the deepest.
    """
    first, between, last, blocks = names
    x = convolve(weights, "decoder.conv_in", convolve(weights, "post_quant_conv", grid_of(z)))
    x = res_block(weights, f"decoder.mid.{first}", x)
    x = pixel_attention(weights, f"decoder.mid.{between}", x)
    x = res_block(weights, f"decoder.mid.{last}", x)
    for level in levels:
        for j, name in enumerate(members(weights, f"{level}.{blocks}")):
            x = res_block(weights, name, x)
            if f"{level}.attn.{j}.q.weight" in weights:
                x = pixel_attention(weights, f"{level}.attn.{j}", x)
        x = upsample(weights, f"{level}.upsample", x)
    x = convolve(weights, "decoder.conv_out", swish(group_norm(weights, "decoder.norm_out", x)))
    return x[0].numpy()


def llamagen_image(weights: Weights, codes: Sequence[int]) -> Array:
    """Codes to an image; codebook rows are normalised."""
    rows = weights["quantize.embedding.weight"][list(codes)]
    rows = rows / np.sqrt((rows * rows).sum(1, keepdims=True))
    levels = members(weights, "decoder.conv_blocks")
    return decoded(weights, ("0", "1", "2", "res"), levels, rows)


def anole_image(weights: Weights, codes: Sequence[int]) -> Array:
    """Codes (ids - 4) to an image; rows as they are, levels counted from the image."""
    rows = weights["quantize.embedding.weight"][list(codes)]
    levels = members(weights, "decoder.up")[::-1]
    return decoded(weights, ("block_1", "attn_1", "block_2", "block"), levels, rows)
