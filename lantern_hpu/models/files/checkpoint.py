"""Checkpoint files of every container, and recipes: from their named tensors to ours.

Tensors are read one at a time, straight to the device and dtype where they stay, so that the host never holds more than
a file maps.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lantern_hpu.errors import WeightsError
from lantern_hpu.files import check_content, check_regular, some_names
from lantern_hpu.models.files.names import (
    GGUF,
    GPTQ_PARTS,
    PICKLES,
    SAFE,
    SCRIPT,
    check_folder,
    check_plain,
    gptq_in,
    indexed_files,
    quantised,
    series_of,
    weights_files,
)
from lantern_hpu.ops.quantized import (
    GROUPS,
    PARTS,
    QuantizedLinear,
    dequantized,
    halves,
    matrix_layers,
    put,
)

SINGLES = ("model.safetensors", "pytorch_model.bin", "decoder.jit")  # in transformers' order
# Keys under which training frameworks put the weights; of `model` and `ema` LlamaGen's sampler reads the first
CONTAINERS = ("model", "module", "state_dict", "ema")
# In names of tensors: around parts of a network that was compiled, or trained on many devices
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# In what torch says of a pickle that names a function or class to call
CODE = ("GLOBAL", "Unsupported global", "Unsupported class")
# What sizes raise that do not make a module
MISSIZED = (
    *(RuntimeError, ValueError, TypeError, AttributeError, AssertionError),
    *(ArithmeticError, LookupError),
)
# Of torch: before it, `weights_only` could be led to run code (CVE-2025-32434)
PICKLES_SINCE = (2, 6)
# What weights may be stored as: all that torch can turn into another
FLOATS = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
Rules = Sequence[tuple[str, str]]  # what to find in names, and what replaces it


@dataclass
class Checkpoint:
    """The named tensors of a file or folder, read when asked for."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    note: str = ""  # what a user should know of them

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def renamed(self, change: Callable[[str], str]) -> Checkpoint:
        old = {change(name): name for name in self.shapes}
        shapes = {name: self.shapes[before] for name, before in old.items()}
        return replace(self, shapes=shapes, read=lambda name: self.read(old[name]))

    def rewritten(self, rules: Rules) -> Checkpoint:
        """With each rule applied to all names, one after the other."""

        def change(name: str) -> str:
            for old, new in rules:
                name = re.sub(old, new, name)
            return name

        return self.renamed(change)

    def with_tensor(self, name: str, tensor: Tensor | str) -> Checkpoint:
        """With one more tensor, or with one of its own under one more name."""
        shape = self.shapes[tensor] if isinstance(tensor, str) else tuple(tensor.shape)

        def read(wanted: str) -> Tensor:
            if wanted != name:
                return self.read(wanted)
            return self.read(tensor) if isinstance(tensor, str) else tensor

        return replace(self, shapes={**self.shapes, name: shape}, read=read)

    def only(self, wanted: Callable[[str], bool]) -> Checkpoint:
        shapes = {name: shape for name, shape in self.shapes.items() if wanted(name)}
        return replace(self, shapes=shapes)

    def within(self, *prefixes: str) -> Checkpoint:
        """Names without prefixes that all of them may have, one after the other."""
        result = self
        for prefix in prefixes:
            if result.shapes and all(name.startswith(prefix) for name in result.shapes):
                result = result.renamed(lambda name, prefix=prefix: name.removeprefix(prefix))  # type: ignore[misc]
        return result

    def count(self, prefix: str) -> int:
        """How many layers there are by the highest number that follows a prefix, lacking ones included."""
        rest = [n.removeprefix(prefix).split(".")[0] for n in self.shapes if n.startswith(prefix)]
        return 1 + max((int(number) for number in rest if number.isdigit()), default=-1)


def open_checkpoint(path: Path) -> Checkpoint:
    """A weights file, a series of them by one of its files, or a folder that holds one or an index of several.

    Names are those of the network: what torch.compile, DDP and FSDP wrapped around its parts is left out.

    Raises:
        WeightsError: it cannot be read, or is a quantised copy or an adapter.
    """
    stored = with_gptq(open_as_stored(path))
    check_plain(path, stored.shapes)
    return stored


def with_gptq(stored: Checkpoint) -> Checkpoint:
    """With each matrix in GPTQ's layout by its usual name, X.weight, as floats; what `QuantizedLinear` keeps of it is
    X.weight.weight, X.weight.scale and X.weight.zero.

    Of a layer X qweight int32 [in / 8, out], qzeros int32 [groups, out / 8] and scales [groups, out] are stored, and
    maybe g_idx [in], the group of each input.
    """
    stated = gptq_in(stored.path, stored.shapes)
    if stated is None:
        return stored
    less = int(stated.get("checkpoint_format") != "gptq_v2")  # than the zeros
    shapes = {name: shape for name, shape in stored.shapes.items() if not name.endswith(GPTQ_PARTS)}
    for name in stored.shapes:
        if name.endswith(".qweight"):
            shapes |= gptq_shapes(stored, name.removesuffix(".qweight"))

    def read(name: str) -> Tensor:
        layer, _, part = name.partition(".weight")
        packed = f"{layer}.qweight" in stored
        return gptq_part(stored, layer, part, less) if packed else stored.read(name)

    return replace(stored, shapes=shapes, read=read)


def gptq_shapes(stored: Checkpoint, layer: str) -> dict[str, tuple[int, ...]]:
    """Of a matrix in GPTQ's layout and its parts; a WeightsError unless its groups of inputs are in order."""
    weight, zeros, scales = (stored.shapes.get(layer + part) for part in GPTQ_PARTS[:3])
    rows, outputs = weight or (0, 0)
    groups = (scales or (0,))[0]
    sizes = [groups * size for size in GROUPS]
    if 8 * rows not in sizes or (zeros, scales) != ((groups, outputs // 8), (groups, outputs)):
        why = f"{layer} has {GPTQ_PARTS[:3]} of {weight}, {zeros}, {scales}"
        raise WeightsError(f"{stored.path} has no groups of 4 bits", why)
    order = f"{layer}.g_idx"
    wanted = torch.arange(groups).repeat_interleave(8 * rows // groups)
    if order in stored and not torch.equal(stored.read(order).long(), wanted):
        raise quantised(stored.path, "GPTQ with desc_act", f"{order} is not in order")
    each = dict.fromkeys((".scale", ".zero"), (outputs, groups))
    parts = {"": (outputs, 8 * rows), ".weight": (outputs, 4 * rows), **each}
    return {f"{layer}.weight{part}": shape for part, shape in parts.items()}


def gptq_part(stored: Checkpoint, layer: str, part: str, less: int) -> Tensor:
    """What follows `X.weight` of a matrix in GPTQ's layout."""
    if part == ".weight":
        return stored.read(f"{layer}.qweight").T.contiguous().view(torch.uint8)
    if part == ".scale":
        return stored.read(f"{layer}.scales").T.float().contiguous()
    if part == ".zero":
        packed = stored.read(f"{layer}.qzeros").contiguous().view(torch.uint8)  # [groups, out / 2]
        return halves(packed).T.contiguous() + less
    numbers, scale, zero = (gptq_part(stored, layer, f".{name}", less) for name in PARTS)
    return dequantized(numbers, scale, torch.float32, zero)


def open_as_stored(path: Path) -> Checkpoint:
    """The same of a checkpoint that may be quantised."""
    if path.is_dir():
        return open_weights_folder(path)
    series = [path.with_name(name) for name in series_of(path)]
    return open_shards(series, {}) if series else open_file(path)


def open_file(path: Path) -> Checkpoint:
    check_regular(path)
    if not path.is_file():
        raise WeightsError(f"{path} does not exist")
    if path.suffix == GGUF:
        raise quantised(path, "llama.cpp (GGUF)")
    if path.suffix not in (SAFE, *PICKLES, SCRIPT):
        why = f"expected {', '.join((SAFE, *PICKLES, SCRIPT))}"
        raise WeightsError(f"{path} is not a weights file", why)
    check_content(path)
    if path.suffix == SCRIPT:
        tensors = read_torchscript(path)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return Checkpoint(path, shapes, tensors.__getitem__)
    stored = open_safetensors(path) if path.suffix == SAFE else open_pickle(path)
    bare = stored.renamed(unwrapped)
    return bare if len(bare.shapes) == len(stored.shapes) else stored


def unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def open_weights_folder(folder: Path) -> Checkpoint:
    """The weights of a folder in the Hugging Face layout, as transformers chooses them, or its only weights."""
    for name in SINGLES:
        if (folder / name).is_file():
            return open_file(folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            places = indexed_files(index)
            return open_shards(sorted(set(places.values())), places)
    files = weights_files(folder)
    if files and len({tuple(series_of(file)) or file for file in files}) == 1:
        return open_as_stored(files[0])
    if not files:
        check_folder(folder)
    result = ", ".join(file.name for file in files) or "nothing"
    raise WeightsError(f"{folder} holds no weights that can be distinguished", f"found {result}")


def open_shards(files: Sequence[Path], index: Mapping[str, Path]) -> Checkpoint:
    """One model of several files.

    Args:
        index: the file of each tensor. Others in the files belong to the model as well.
    """
    folder = files[0].parent
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise WeightsError(f"files are missing in {folder}", ", ".join(absent), "download again")
    again = "download them again"
    parts = {file: open_file(file) for file in files}
    held = [(name, file) for file, part in parts.items() for name in part.shapes]
    found = dict(held)
    places = {unwrapped(name): file for name, file in index.items()}
    if lost := sorted(places.keys() - found.keys()):
        what = f"tensors are missing in the files of {folder}"
        raise WeightsError(what, some_names(lost), again)
    if len(found) < len(held) and not places:
        twice = sorted({name for name, file in held if found[name] != file})
        raise WeightsError(f"the files of {folder} are not one model", some_names(twice), again)
    found |= {name: file for name, file in places.items() if name in parts[file]}
    shapes = {name: parts[file].shapes[name] for name, file in found.items()}
    return Checkpoint(folder, shapes, lambda name: parts[found[name]].read(name))


def open_safetensors(path: Path) -> Checkpoint:
    try:
        file = safe_open(path, "pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        why = f"damaged or cut off ({error})"
        raise WeightsError(f"cannot read {path}", why, "download it again") from error
    return Checkpoint(path, shapes, file.get_tensor)


def open_pickle(path: Path) -> Checkpoint:
    """One file of torch.save: weights under one of `CONTAINERS`, or alone."""
    content = load_pickle(path)
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds no weights", f"it is a {type(content).__name__}")
    within = [key for key in CONTAINERS if isinstance(content.get(key), dict)]
    holder = content[within[0]] if within else content
    note = ""
    if len(within) > 1:
        places = f"{path.name} holds weights under {' and '.join(within)}"
        note = f"{places}: {within[0]} is read, as by LlamaGen's sampler"
    tensors = {str(name): value for name, value in holder.items() if isinstance(value, Tensor)}
    if not tensors:
        keys = some_names(sorted(map(str, content)))
        raise WeightsError(f"{path} holds no weights", f"its keys are {keys}")
    odd = [name for name, tensor in tensors.items() if not is_plain(tensor)]
    if odd:
        why = f"not plain arrays of numbers: {some_names(odd)}"
        raise WeightsError(f"cannot read {path}", why, "a safetensors file")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Checkpoint(path, shapes, tensors.__getitem__, note)


def is_plain(tensor: Tensor) -> bool:
    """Whether memory holds all numbers of a tensor as they are: not sparse, nested, or on `meta`."""
    dense = tensor.layout == torch.strided and not tensor.is_nested
    return dense and not (tensor.is_meta or tensor.is_neg() or tensor.is_quantized)


def load_pickle(path: Path) -> Any:
    """What a file of torch.save holds; nothing in it may run code."""
    hint = "a copy from its publisher"
    broken = "damaged, cut off, or no file of torch.save"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < PICKLES_SINCE:
        why = f"torch {torch.__version__} can be led to run code by it (CVE-2025-32434)"
        raise WeightsError(f"{path} is refused", why, "a safetensors file, or torch 2.6")
    # On the host, also if a device saved it
    read = partial(torch.load, path, map_location=lambda storage, _: storage, weights_only=True)
    try:
        # Training scripts of LlamaGen store their arguments with the weights; a Namespace is only a record.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return read(mmap=zipfile.is_zipfile(path))  # those of torch before 1.6 cannot be mapped
    except pickle.UnpicklingError as error:
        if any(word in str(error) for word in CODE):
            kind = re.search(r"(?:GLOBAL|global:|class) ([\w.]*\.\w+)", str(error))
            held = kind[1] if kind else "more than weights"
            why = f"it holds {held} and would run code when loaded"
            hint = (
                "a safetensors file; where you trust it, save the weights alone: "
                "torch.save(torch.load(FILE, weights_only=False)['model'], NEW)"
            )
            raise WeightsError(f"{path} is refused", why, hint) from error
        raise WeightsError(f"cannot read {path}", broken, hint) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise WeightsError(f"cannot read {path}", broken, hint) from error


@dataclass(frozen=True)
class Source:
    """What one of our tensors is made of: published tensors put one under another, or rows of them.

    Attributes:
        rows: from and to, of each stretch of rows in the order in which they are wanted; None: all. Of several tensors
            they count through, and all rows are wanted.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def of(cls, *names: str, rows: tuple[tuple[int, int], ...] | None = None) -> Source:
        return cls(names, rows)


Recipe = Mapping[str, Source]


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
    """Modules made inside are on `meta`: no storage, and not filled (there a normal distribution loads a compiler)."""
    try:
        with torch.device("meta"), Unfilled():
            yield
    except MISSIZED as error:
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


def whole(name: str) -> str:
    """The name of a matrix in GPTQ's layout, of its parts and its own."""
    return re.sub(r"(?<=\.weight)\.(weight|scale|zero)$", "", name)


def mistakes(
    module: nn.Module, checkpoint: Checkpoint, recipe: Recipe, ignored: tuple[str, ...]
) -> Iterator[str]:
    """What keeps a checkpoint from filling a module: missing, unknown and misshapen tensors, all of them."""
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    for name, layer in module.named_modules():
        if isinstance(layer, QuantizedLinear) and f"{name}.scale" not in recipe:  # made of floats
            expected[f"{name}.weight"] = layer.out_features, layer.in_features
    used = {name for source in recipe.values() for name in source.names}
    missing = sorted(used - checkpoint.shapes.keys())
    known = {whole(name) for name in used}
    others = (name for name in checkpoint.shapes if whole(name) not in known)
    unknown = sorted(name for name in others if not any(i in name for i in ignored))
    if missing:
        yield f"{len(missing)} tensors missing ({some_names(missing)})"
    if unknown:
        yield f"{len(unknown)} unknown ({some_names(unknown)})"
    wrong = []
    for name, source in recipe.items():
        if all(part in checkpoint for part in source.names):
            result = shape_of(source, checkpoint)
            if result != expected[name]:
                names = " + ".join(map(whole, source.names))
                wrong.append(f"{names} {list(result)} for {list(expected[name])}")
    if wrong:
        yield f"{len(wrong)} of another shape ({some_names(wrong)})"


def read_source(
    source: Source,
    checkpoint: Checkpoint,
    device: Any,
    dtype: torch.dtype | None,
    allowed: Sequence[torch.dtype] = FLOATS,
) -> Tensor:
    parts = []
    for name in source.names:
        part = checkpoint.read(name)
        if part.dtype not in allowed:
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
        quantized: layers whose matrices have scales in it become such, and the others stay.
    """

    checkpoint: Checkpoint
    recipe: Recipe | None = None
    ignored: tuple[str, ...] = ()
    digest: str | None = None
    quantized: bool = False

    def fill(
        self, module: nn.Module, dtype: torch.dtype | None, device: torch.device | None
    ) -> str:
        """Fill a module made on `meta`, tensor by tensor; None keeps each tensor's dtype. -> the digest

        Matrices that the module has in few bits, and the checkpoint has not, are quantised as they are read.
        """
        if self.quantized:
            self.quantize_layers(module)
        recipe = self.recipe_of(module)
        wrong = list(mistakes(module, self.checkpoint, recipe, self.ignored))
        if wrong:
            raise WeightsError(f"{self.checkpoint.path} does not fit", "; ".join(wrong))
        for name, source in recipe.items():
            place, _, leaf = name.rpartition(".")
            owner = module.get_submodule(place)
            if isinstance(owner, QuantizedLinear) and leaf != "bias":
                allowed = (getattr(owner, leaf).dtype,) if self.quantized else FLOATS
                tensor = read_source(source, self.checkpoint, device, None, allowed)
                if self.quantized and not owner.allows(leaf, tensor):
                    why = f"{name} holds numbers that a quantised matrix does not have"
                    raise WeightsError(f"{self.checkpoint.path} is damaged", why, "convert again")
                owner.take(leaf, tensor)
                continue
            tensor = read_source(source, self.checkpoint, device, dtype)
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
            else:
                owner._buffers[leaf] = tensor
        module.requires_grad_(False).eval()
        return self.digest or self.fingerprint(module)

    def quantize_layers(self, module: nn.Module) -> None:
        """Make layers on `meta` such as the files have them."""
        recipe = self.recipe_of(module)
        for name, layer in matrix_layers(module, nn.Linear):
            group = self.group_of(recipe[f"{name}.weight"], layer.in_features)
            if group is not None:
                put(module, name, QuantizedLinear(layer, group))

    def group_of(self, matrix: Source, inputs: int) -> int | None:
        """Inputs of a group of a matrix of 4 bits, 0 for 8 bits; None where some of its rows are floats."""
        scales = self.part_of(matrix, "scale").names
        groups = {self.checkpoint.shapes.get(name, (0, 0))[1:] for name in scales}
        if len(groups) > 1 or (0,) in groups:
            return None
        (columns,) = groups
        return inputs // columns[0] if columns else 0

    def part_of(self, matrix: Source, part: str) -> Source:
        """Where numbers, scales or zeros are of a matrix that is quantised in the files."""
        apart = f"{matrix.names[0]}.scale" in self.checkpoint  # of GPTQ's layout
        names = (name if apart else name.removesuffix(".weight") for name in matrix.names)
        return replace(matrix, names=tuple(f"{name}.{part}" for name in names))

    def recipe_of(self, module: nn.Module) -> Recipe:
        """What fills a module: not all that a checkpoint holds is needed, and scales may be made on the way."""
        own = {name: Source.of(name) for name in module.state_dict()}
        recipe = dict(own if self.recipe is None else self.recipe)
        layers = (item for item in module.named_modules() if isinstance(item[1], QuantizedLinear))
        for name, layer in layers:
            matrix = recipe[f"{name}.weight"]
            for part in PARTS:
                if self.quantized and getattr(layer, part) is not None:
                    recipe[f"{name}.{part}"] = self.part_of(matrix, part)
                elif part != "weight":
                    recipe.pop(f"{name}.{part}", None)
        return recipe

    def fingerprint(self, module: nn.Module) -> str:
        """Which weights a module is filled with, the same for any container."""
        return fingerprint(self.checkpoint, self.recipe_of(module))


class Weights(NamedTuple):
    """The weights of a whole model."""

    target: Stored  # and the parts of its condition
    vq: Stored | None  # None where no pictures are wanted
    drafter: Stored | None = None
    files: Mapping[str, str] = {}  # digests that are known already
    fingerprint: str | None = None  # of the target; None where it is the digest
    vision: Stored | None = None  # of what makes codes of pictures, where that is no tokenizer


def fingerprint(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """A digest of a few numbers of each of our tensors: quick, and the same for any container.

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


# ------------------------------------------------------------------------------------- TorchScript


class Inert:
    """What stands for every class and function that the file names: it keeps a state and does nothing."""

    state: Any = None

    def __new__(cls, *args: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class TensorReader(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{root}data.pkl")))
        self.archive, self.root, self.storages = archive, root, dict[str, Tensor]()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, at, size, stride, *_: storage.as_strided(size, stride, at)
        # `torch.HalfStorage` is of `torch.half`; of what a name leads to nothing else is used
        dtype = getattr(torch, name.removesuffix("Storage").lower(), None)
        return dtype if module == "torch" and isinstance(dtype, torch.dtype) else Inert

    def persistent_load(self, pid: Any) -> Tensor:
        _, dtype, key, *_ = pid
        if key not in self.storages:
            content = bytearray(self.archive.read(f"{self.root}data/{key}"))
            self.storages[key] = torch.frombuffer(content, dtype=dtype)
        return self.storages[key]


def named_tensors(module: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in (module.state if isinstance(module.state, dict) else {}).items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Inert):
            yield from named_tensors(value, f"{prefix}{name}.")


def read_torchscript(path: Path) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            (data,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
            return dict(named_tensors(TensorReader(archive, data.removesuffix("data.pkl")).load()))
    except PermissionError as error:
        raise WeightsError(f"cannot read {path}", error.strerror or str(error)) from error
    except Exception as error:  # a damaged pickle may raise anything
        why = "damaged, cut off, or no TorchScript file"
        raise WeightsError(f"cannot read {path}", why, "download it again") from error
