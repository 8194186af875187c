"""What writers of small random checkpoints share: numbers, files, and the pieces of a tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Generator, Tensor

Shapes = dict[str, tuple[int, ...]]
State = dict[str, Tensor]
WORDS = "a an the of on and photo picture image red blue green apple cat dog tree sky house".split()


# ---------------------------------------------------------------------------------------------------
# Random values


def draw(name: str, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """One float32 tensor at a scale at which it matters: no zero bias, no norm weight of one."""
    values = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return 0.1 * values
    if len(shape) == 1 or "norm" in name:
        return 1 + 0.2 * values
    # A sharp head makes distributions that are far from flat
    sharp = 3 if name.endswith(("output.weight", "lm_head.weight")) else 1
    return values * sharp / math.sqrt(math.prod(shape[1:]))


def draw_all(shapes: Shapes, generator: Generator, dtype: torch.dtype = torch.float32) -> State:
    return {name: draw(name, shape, generator).to(dtype) for name, shape in shapes.items()}


def shapes_of(state: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def fill(model: torch.nn.Module, generator: Generator) -> None:
    """Draw all weights of a module."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, tuple(parameter.shape), generator))


# ---------------------------------------------------------------------------------------------------
# Files


def write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_pickle(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, file)


def write_safetensors(file: Path, state: State) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # Without this mark older transformers refuse the file.
    save_file({n: t.contiguous() for n, t in state.items()}, file, metadata={"format": "pt"})


def write_shards(folder: Path, state: State, count: int) -> None:
    """model-0000i-of-0000n.safetensors and their index, as transformers names them."""
    names, where = list(state), {}
    for i in range(count):
        part = names[i * len(names) // count : (i + 1) * len(names) // count]
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        write_safetensors(folder / file, {name: state[name] for name in part})
        where.update(dict.fromkeys(part, file))
    size = sum(t.numel() * t.element_size() for t in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    write_json(folder / "model.safetensors.index.json", index)


# ---------------------------------------------------------------------------------------------------
# Tokenizers


def merges() -> list[tuple[str, str]]:
    """Byte-pair merges that make whole tokens of the words, with and without a space before."""
    found: dict[tuple[str, str], None] = {}
    for word in [*(f"Ġ{word}" for word in WORDS), *WORDS]:
        for end in range(1, len(word)):
            found[word[:end], word[end]] = None
    return list(found)


def byte_pieces() -> list[str]:
    """The pieces of a byte-level tokenizer: 256 bytes, then what `merges` makes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*sorted(ByteLevel.alphabet()), *dict.fromkeys(a + b for a, b in merges())]


def write_byte_tokenizer(
    folder: Path,
    vocabulary: Mapping[str, int],
    special: Iterable[str],
    processor: Any = None,
    **options: Any,
) -> None:
    """tokenizer.json of a byte-level vocabulary, of which `special` are matched whole."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=merges(), **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if processor is not None:
        tokenizer.post_processor = processor
    tokenizer.add_special_tokens(list(special))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
