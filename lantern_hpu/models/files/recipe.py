"""Recipes: from the tensors of a checkpoint to ours.

A recipe says for each of a module's tensors which published tensors it is made of. Tensors are read one at a time,
straight to the device and dtype where they stay, so that the host never holds more than a file maps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lantern_hpu.errors import WeightsError
from lantern_hpu.models.files.checkpoint import Checkpoint, some_names


@dataclass(frozen=True)
class Source:
    """What one of our tensors is made of: published tensors put one under another, or some rows of one.

    Attributes:
        rows: from and to, of each stretch of rows in the order in which they are wanted; None takes all. Of several
            tensors they count through, and all rows are wanted.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[int, int], ...] | None = None


Recipe = Mapping[str, Source]


def take(*names: str, **how: Any) -> Source:
    return Source(names, **how)


def llama_block(goal: str, old: str, input_norm: bool = True, qk_norm: bool = False) -> Recipe:
    """One layer of ours from one by transformers' names; `q`, `k`, `v` are one matrix here, as are gate and up."""
    attention, mlp = f"{old}self_attn.", f"{old}mlp."
    recipe = {
        f"{goal}attention.qkv.weight": take(*(f"{attention}{p}_proj.weight" for p in "qkv")),
        f"{goal}attention.out.weight": take(f"{attention}o_proj.weight"),
        f"{goal}ffn_norm.weight": take(f"{old}post_attention_layernorm.weight"),
        f"{goal}ffn.gate_up.weight": take(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
        f"{goal}ffn.down.weight": take(f"{mlp}down_proj.weight"),
    }
    if input_norm:
        recipe[f"{goal}attention_norm.weight"] = take(f"{old}input_layernorm.weight")
    if qk_norm:
        for part in ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"):
            recipe[f"{goal}attention.{part}"] = take(f"{attention}{part}")
    return recipe


class Unfilled(TorchFunctionMode):
    """Leaves out the numbers that new modules fill themselves with."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        # Older versions of torch come by the tensor's own method.
        if function == Tensor.normal_ or getattr(function, "__module__", "") == nn.init.__name__:
            return args[0] if args else given["tensor"]
        return function(*args, **given)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules made inside have no storage yet: they lie on `meta`.

    Nor are they filled: on `meta` a normal distribution loads torch's compiler, which takes a second and more.

    Raises:
        WeightsError: no module has such sizes.
    """
    try:
        with torch.device("meta"), Unfilled():
            yield
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        ArithmeticError,
    ) as error:
        why = str(error).splitlines()[0] if str(error) else repr(error)
        raise WeightsError("these sizes do not make a model", why) from error


def shape_of(source: Source, checkpoint: Checkpoint) -> tuple[int, ...]:
    """What a recipe makes of a checkpoint's tensors."""
    first = checkpoint.shapes[source.names[0]]
    if not first:
        return first
    rows = sum(checkpoint.shapes[name][0] for name in source.names)
    if source.rows is not None:
        rows = sum(min(end, rows) - start for start, end in source.rows)
    return (rows, *first[1:])


def mistakes(
    module: nn.Module, checkpoint: Checkpoint, recipe: Recipe, ignored: tuple[str, ...]
) -> Iterator[str]:
    """What keeps a checkpoint from filling a module: missing, unknown and misshapen tensors, all of them."""
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    used = {name for source in recipe.values() for name in source.names}
    missing = sorted(used - checkpoint.shapes.keys())
    unknown = sorted(
        name for name in checkpoint.shapes.keys() - used if not any(i in name for i in ignored)
    )
    if missing:
        yield f"{len(missing)} tensors missing ({some_names(missing)})"
    if unknown:
        yield f"{len(unknown)} unknown ({some_names(unknown)})"
    wrong = []
    for name, source in recipe.items():
        if all(part in checkpoint for part in source.names):
            result = shape_of(source, checkpoint)
            if result != expected[name]:
                wrong.append(
                    f"{' + '.join(source.names)} {list(result)} for {list(expected[name])}"
                )
    if wrong:
        yield f"{len(wrong)} of another shape ({some_names(wrong)})"


def read_source(
    source: Source, checkpoint: Checkpoint, device: Any, dtype: torch.dtype | None
) -> Tensor:
    """One of our tensors, on its device."""
    parts = []
    for name in source.names:
        part = checkpoint.read(name)
        if not part.is_floating_point():
            raise WeightsError(f"{checkpoint.path} does not fit", f"{name} holds {part.dtype}")
        parts.append(part)
    if source.rows is not None:
        # Of several tensors many short stretches: put in order on the host, so that one copy goes up
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        parts = [whole[start:end] for start, end in source.rows]
        parts = parts if len(source.names) == 1 else [torch.cat(parts)]
    parts = [part.to(device, dtype or part.dtype) for part in parts]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.contiguous()  # where nothing had to be done it stays in the mapped file


@dataclass(frozen=True)
class Stored:
    """The weights of a part of a model, in a checkpoint.

    Attributes:
        recipe: by our names; None where the file uses them. ignored: what the names of tensors that are not
            needed have in them.
        digest: which weights these are; None: their fingerprint.
    """

    checkpoint: Checkpoint
    recipe: Recipe | None = None
    ignored: tuple[str, ...] = ()
    digest: str | None = None

    def fill(
        self, module: nn.Module, dtype: torch.dtype | None, device: torch.device | None
    ) -> str:
        """Fill a module made on `meta`, tensor by tensor. -> the digest

        Args:
            dtype: None keeps each tensor's own.

        Raises:
            WeightsError: tensors are missing, unknown or misshapen; all are listed.
        """
        recipe = self.recipe_of(module)
        wrong = list(mistakes(module, self.checkpoint, recipe, self.ignored))
        if wrong:
            raise WeightsError(f"{self.checkpoint.path} does not fit", "; ".join(wrong))
        for name, source in recipe.items():
            place, _, leaf = name.rpartition(".")
            owner = module.get_submodule(place)
            tensor = read_source(source, self.checkpoint, device, dtype)
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
            else:
                owner._buffers[leaf] = tensor
        module.requires_grad_(False).eval()
        return self.digest or self.fingerprint(module)

    def recipe_of(self, module: nn.Module) -> Recipe:
        """What fills a module: not all that a checkpoint holds is needed."""
        return self.recipe or {name: take(name) for name in module.state_dict()}

    def fingerprint(self, module: nn.Module) -> str:
        """Which weights a module is filled with, the same whatever the container."""
        return fingerprint(self.checkpoint, self.recipe_of(module))


class Weights(NamedTuple):
    """The weights of a whole model.

    Attributes:
        vq: None where no pictures are wanted.
        files: digests that are known already. fingerprint: of the target; None where it is the digest.
        neighbours: a table of neighbours that was published.
    """

    target: Stored  # and the parts of its condition
    vq: Stored | None
    drafter: Stored | None = None
    files: Mapping[str, str] = {}
    fingerprint: str | None = None
    neighbours: Path | None = None


# ------------------------------------------------------------------------------------ which weights they are


def fingerprint(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """A digest of a few numbers of each of our tensors: quick, and the same whatever the container.

    Numbers are compared as bfloat16, so that weights and their bfloat16 copy count as the same.
    """
    digest = hashlib.sha256()
    for name in sorted(recipe):
        few = [round_off(row) for row in sampled_rows(recipe[name], checkpoint)]
        digest.update(f"{name} {shape_of(recipe[name], checkpoint)} {few}\n".encode())
    return digest.hexdigest()


def sampled_rows(source: Source, checkpoint: Checkpoint) -> Iterator[Tensor]:
    """Four rows of what a recipe makes, in the file's order: the first, the last, and two between."""
    parts = [checkpoint.read(name) for name in source.names]
    if source.rows is not None and len(parts) == 1:
        parts = [parts[0][start:end] for start, end in sorted(source.rows)]
    parts = [part if part.dim() else part[None] for part in parts]
    ends = list(accumulate(len(part) for part in parts))
    for i in range(4):
        row = i * (ends[-1] - 1) // 3
        part = next(p for p, end in enumerate(ends) if row < end)
        yield parts[part][row - ends[part]]  # counted from its end


def round_off(values: Tensor) -> list[float]:
    """Four numbers of a tensor, evenly spaced."""
    flat = values.flatten()
    step = max(1, flat.numel() // 4)
    result: list[float] = flat[::step][:4].float().bfloat16().float().tolist()
    return result
