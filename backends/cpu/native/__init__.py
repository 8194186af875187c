"""The decoder as one native call: all layers of a target, or the drafter's block, by `decoder.c`.

The plain twin is `Target.forward` and `Block.forward` (`models/transformer.py`); they agree within rounding. A row's
result depends on nothing but itself, so an image's bits do not depend on its batch, its slot or the threads.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from ctypes import Structure, addressof, byref, c_double, c_int, c_int64, c_void_p, string_at
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.backends.base import operator
from lantern_hpu.errors import DeviceError
from lantern_hpu.ops.kv_cache import KVCache, WrittenCache
from lantern_hpu.ops.quantized import QuantizedLinear

BUILD = "pip install --force-reinstall --no-deps -e . (or the wheel)"
BUILT_FOR = ("linux", "x86_64")
OPENMP = ("libgomp.so.1", "libiomp5.so", "libomp.so")
LANES = 16  # numbers of the widest vector: sizes that the native form takes are multiples of it

# ---------------------------------------------------------------------------------- the interface


def read_header(text: str) -> dict[str, Any]:
    """What `decoder.h` declares, by name: numbers, structures, and of functions the result and then the arguments.

    Raises:
        DeviceError: a line is written otherwise than those of `decoder.h`.
    """
    known: dict[str, Any] = {"void": None, "int": c_int, "int64_t": c_int64, "double": c_double}
    known |= {name: int(number) for name, number in re.findall(r"#define (\w+) (\d+)", text)}
    members: list[tuple[str, Any]] = []

    def declared(line: str) -> list[tuple[str, Any]]:
        """Names and types of "const float *rope, *mask" or "int64_t rows, tokens"."""
        if found := re.fullmatch(r"(?:const )?\w+ (\*\w+(?:, \*\w+)*)", line):
            return [(name[1:], c_void_p) for name in found[1].split(", ")]
        if (found := re.fullmatch(r"(\w+) (\w+(?:, \w+)*)", line)) and found[1] in known:
            return [(name, known[found[1]]) for name in found[2].split(", ")]
        raise DeviceError("decoder.h cannot be read", f"it says {line!r}", BUILD)

    for line in map(str.strip, re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).splitlines()):
        if found := re.fullmatch(r"} (\w+);", line):
            known[found[1]] = type(found[1], (Structure,), {"_fields_": members})
            members = []
        elif found := re.fullmatch(r"(.+)\((.+)\);", line):
            arguments = [] if found[2] == "void" else found[2].split(", ")
            ((name, result),) = declared(found[1])
            known[name] = [result, *(declared(argument)[0][1] for argument in arguments)]
        elif line and line[0] != "#" and line != "typedef struct {":
            members += declared(line.removesuffix(";"))
    return known


HEADER = read_header(Path(__file__).with_name("decoder.h").read_text(encoding="utf-8"))
ABI = HEADER["LANTERN_ABI"]
FORMATS = ("BFLOAT16", "FLOAT16", "FLOAT32", "INTEGERS", "INTEGERS_FLOAT32")
BFLOAT16, FLOAT16, FLOAT32, INTEGERS, INTEGERS_FLOAT32 = (HEADER[name] for name in FORMATS)
STRUCTURES = ("Matrix", "Source", "Layer", "Call", "Walk", "Place", "Commit")
CMatrix, CSource, CLayer, CCall, CWalk, CPlace, CCommit = (HEADER[name] for name in STRUCTURES)


# ------------------------------------------------------------------------------------ the library


@cache
def open_library() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None, and why: the instruction set in use, or what is missing."""
    if (sys.platform, platform.machine()) != BUILT_FOR:
        return None, "the native decoder is for Linux on x86-64"
    files = sorted(
        Path(__file__).parent.glob("_decoder*.so"), key=lambda file: file.stat().st_mtime
    )
    if not files:
        return None, f"the native decoder was not built (no C compiler?); {BUILD} builds it"
    try:
        library = loaded(files[-1])
    except (OSError, AttributeError) as error:
        return None, f"the native decoder does not load ({error}); {BUILD} rebuilds it"
    if (found := library.lantern_abi()) != ABI:
        return None, f"the native decoder is of version {found}, not {ABI}; {BUILD} rebuilds it"
    if not string_at(library.lantern_isa()):
        return None, "this processor has no AVX2"
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":  # torch's own limit
        library.lantern_use(b"avx2")
    limit = os.environ.get("LANTERN_HPU_ISA", "")
    if limit and not library.lantern_use(limit.encode()):
        return None, f"this processor has no instruction set {limit} (LANTERN_HPU_ISA)"
    return library, string_at(library.lantern_isa()).decode()


def loaded(file: Path) -> ctypes.CDLL:
    """A library, with the signatures that `decoder.h` declares where it is of this version."""
    share_openmp()
    library = ctypes.CDLL(str(file))
    if library.lantern_abi() == ABI:
        for name in (name for name in HEADER if name.startswith("lantern_")):
            function = getattr(library, name)
            function.restype, *function.argtypes = HEADER[name]
    return library


def isa() -> str:
    """The instruction set in use, or nothing."""
    found, name = open_library()
    return name if found else ""


def missing() -> str:
    """What is wrong where the native decoder should be, or nothing."""
    found, why = open_library()
    return why if found is None and (sys.platform, platform.machine()) == BUILT_FOR else ""


def share_openmp() -> None:
    """Let the library find the OpenMP of torch: two runtimes would keep two teams that spin against each other.

    It is loaded already, from a folder of torch or where the system has it. What is not loaded as a library is not
    opened, even one with such a name.
    """
    home = Path(torch.__file__).parent
    wheel = (home / "lib", home.with_name("torch.libs"))
    kinds = ("libgomp*.so*", "libiomp*.so*", "libomp*.so*")
    own = [str(file) for folder in wheel for kind in kinds for file in folder.glob(kind)]
    for name in (*own, *OPENMP):
        with suppress(OSError):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
            return
    ctypes.CDLL(OPENMP[0], mode=ctypes.RTLD_GLOBAL)


def call(function: str, *arguments: Any) -> Any:
    """What a function of `decoder.h` returns.

    Raises:
        RuntimeError: memory is short, or the sizes are not supported; or there is no library.
    """
    library, why = open_library()
    if library is None:
        raise RuntimeError(why)
    result = getattr(library, function)(*arguments)
    if result in (-1, -2):
        why = "out of memory" if result == -1 else "sizes that the native decoder lacks"
        raise RuntimeError(why)
    return result


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


# --------------------------------------------------------------------------------------- matrices


Linear = nn.Linear | QuantizedLinear


def format_of(layers: Sequence[Linear], dtype: torch.dtype) -> int:
    """Of the matrices of a model in this number format: float16 for a float32 model's where that loses no bit."""
    weights = [layer.weight for layer in layers]
    if isinstance(layers[0], QuantizedLinear):
        return INTEGERS if dtype == torch.bfloat16 else INTEGERS_FLOAT32
    if weights[0].dtype == torch.bfloat16:
        return BFLOAT16
    exact = all(torch.equal(weight, weight.half().float()) for weight in weights)
    return FLOAT16 if exact else FLOAT32


# By `id`: compilers pass whole numbers to an operator, and no modules
MODULES: WeakValueDictionary[int, Any] = WeakValueDictionary()
STORED = (torch.bfloat16, torch.float16, torch.float32)  # by format; integers stay as they are

native_linear = operator(
    "native_linear(Tensor x, int module) -> Tensor",
    lambda x, module: x.new_empty(*x.shape[:-1], MODULES[module].out_features),
)(lambda x, module: MODULES[module].multiply(x))


class NativeLinear(nn.Module):
    """`nn.Linear` for inference, [.., in] -> [.., out]: a matrix in the order that `decoder.c` reads it.

    Args:
        weight_format: of the packed matrix. gated: the first half of the outputs are gates of the second half.
    """

    packed: Tensor
    bias: Tensor | None  # [out] float32, up to a multiple of `LANES`

    def __init__(self, layer: Linear, weight_format: int, gated: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.gated = gated
        self.pack(layer, weight_format)
        MODULES[id(self)] = self

    def pack(self, layer: Linear, weight_format: int) -> None:
        """Take the numbers of a layer of its sizes."""
        self.format = weight_format
        weight = layer.weight.detach()
        if weight_format < INTEGERS:
            weight = weight.to(STORED[weight_format])
        width = (0, -self.out_features % LANES)  # that whole vectors can be read
        bias = None if layer.bias is None else F.pad(layer.bias.detach().float(), width)
        self.register_buffer("bias", bias, persistent=False)
        sizes = self.in_features, self.out_features, getattr(layer, "group", 0)
        self.matrix = CMatrix(None, pointer(bias), *sizes)
        size = call("lantern_packed_bytes", weight_format, byref(self.matrix))
        self.register_buffer("packed", torch.empty(size, dtype=torch.uint8), persistent=False)
        self.matrix.weight = self.packed.data_ptr()
        parts = weight.contiguous(), getattr(layer, "scale", None), getattr(layer, "zero", None)
        source = CSource(*map(pointer, parts), self.gated)
        call("lantern_pack", weight_format, byref(self.matrix), byref(source))

    def multiply(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y, rows = x.new_empty(*x.shape[:-1], self.out_features), x.numel() // self.in_features
        how = self.format, torch.get_num_threads(), byref(self.matrix)
        call("lantern_linear", *how, x.data_ptr(), rows, y.data_ptr())
        return y

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = native_linear(x, id(self))
        return result


# ---------------------------------------------------------------------------------------- decoder

# Of what C is given: matrices of a layer, and tensors of which each row has its own
MATRICES = ("qkv", "out", "gate_up", "down", "word_gate_up", "word_down")
EACH = ("x", "rope", "mask", "index", "source", "starts", "words")

native_decode = operator(
    "native_decode(Tensor?[] each, Tensor(a!)[] cache, int[] aux_layers, int capacity, int module) -> Tensor",
    lambda each, cache, aux_layers, _, module: MODULES[module].features_of(each[0], aux_layers),
)(lambda *given: MODULES[given[-1]].run(*given[:-1]))


class NativeDecoder(nn.Module):
    """Blocks of `models/transformer.py`, and the norm behind them, with the signature of `Target.forward`.

    Args:
        blocks: of one model. norm: behind the last one; None for the drafter's.
        emptied: each plain matrix is given back once it is packed.
    """

    def __init__(self, blocks: Sequence[Any], norm: Any | None, emptied: bool = False) -> None:
        super().__init__()
        self.emptied = emptied
        self.pack(blocks, norm)
        MODULES[id(self)] = self

    def pack(self, blocks: Sequence[Any], norm: Any | None) -> None:
        """Take the numbers of blocks of its sizes, and of the norm behind them."""
        linears = [part for block in blocks for part in linears_of(block)]
        self.format = format_of(linears, dtype_of(blocks[0]))
        self.parts = nn.ModuleList()
        self.norms: list[Tensor] = []  # what `layers` points to
        self.layers = (CLayer * len(blocks))(*map(self.pack_block, blocks))
        attention, down = blocks[0].attention, blocks[0].ffn.down
        sizes = {x: getattr(attention, x) for x in ("heads", "kv", "head_dim", "interleaved")}
        sizes |= {"dim": down.out_features, "ffn": down.in_features, "eps": blocks[0].eps}
        final_norm = None if norm is None else self.keep(norm.weight)
        layers = {"layer_count": len(blocks), "layers": addressof(self.layers)}
        self.model = {"format": self.format, **sizes, **layers, "final_norm": final_norm}

    def keep(self, weight: Tensor) -> int:
        self.norms.append(weight.detach().float().contiguous())
        return self.norms[-1].data_ptr()

    def pack_block(self, block: Any) -> Any:
        layer = CLayer()
        for path, weight in block.named_parameters():
            *_, name, kind = path.split(".")
            if name.endswith("norm"):
                setattr(layer, name if kind == "weight" else f"{name}_bias", self.keep(weight))
        for name, linear in zip(MATRICES, linears_of(block), strict=False):
            self.parts.append(NativeLinear(linear, self.format, gated=name.endswith("gate_up")))
            setattr(layer, name, self.parts[-1].matrix)
            if self.emptied:
                linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
        return layer

    def features_of(self, x: Tensor, aux_layers: Sequence[int]) -> Tensor:
        """Empty ones, [.., H * (1 + n)]."""
        return x.new_empty(*x.shape[:-1], x.shape[-1] * (1 + len(aux_layers)))

    def forward(
        self,
        x: Tensor,  # [R, T, H] embeddings
        rope: Tensor,  # [R, T, 2, hd / 2]
        mask: Tensor,  # [R, 1, T, S] additive
        cache: KVCache,
        index: Tensor,  # [R * (D + T)]
        source: Tensor | None = None,  # [R * D]
        aux_layers: Sequence[int] = (),
        words: Tensor | None = None,  # [R, T] bool
    ) -> Tensor:
        """Features [R, T, H * (1 + n)]."""
        index = index.int().view(len(x), -1)
        moves = None if source is None else source.int().view(len(x), -1)
        # A row attends to what it writes, or to all of its cache
        capacity = 0 if isinstance(cache.layers[0], WrittenCache) else mask.shape[-1]
        each = [x, rope.float(), mask.float(), index, moves, words]
        # A `ScratchCache` needs no copy here: its positions are masked until the next step writes them
        tensors = [part for layer in cache.layers for part in (layer.k, layer.v)]
        result: Tensor = native_decode(each, tensors, list(aux_layers), capacity, id(self))
        return result

    def run(
        self, each: list[Any], cache: list[Tensor], aux_layers: list[int], capacity: int
    ) -> Tensor:
        """Rows that attend to nothing, of images that are done, are left out: their features are zeros."""
        x, _, mask, index, *_ = each
        rows, mask = x.shape[0], mask.contiguous()
        starts, seen = x.new_empty(rows, dtype=torch.int64), x.new_empty(rows, dtype=torch.bool)
        sizes = (rows, index.shape[1], mask.numel() // rows, capacity)
        each = [*each[:5], starts, *each[5:]]
        if call("lantern_rows", *sizes, *map(pointer, (index, mask, starts, seen))) == rows:
            return self.decode(each, cache, aux_layers)
        result, kept = self.features_of(x, aux_layers).zero_(), seen.nonzero()[:, 0]
        if len(kept):
            some = [None if one is None else one[kept] for one in each]
            result[kept] = self.decode(some, cache, aux_layers)
        return result

    def decode(self, each: list[Any], cache: list[Tensor], aux_layers: list[int]) -> Tensor:
        """The call of C, for all rows or some."""
        each = [None if one is None else one.contiguous() for one in each]
        each[0] = each[0].clone()  # the layers add to it
        x, _, mask, index, *_ = each
        features, aux = self.features_of(x, aux_layers), (c_int64 * len(aux_layers))(*aux_layers)
        for layer, keys, values in zip(self.layers, cache[::2], cache[1::2], strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        rows, tokens = x.shape[:2]
        one_pass = CCall(
            **self.model, **dict(zip(EACH, map(pointer, each), strict=True)), features=pointer(features),
            threads=torch.get_num_threads(), rows=rows, tokens=tokens, capacity=mask.shape[-1],
            moves=index.shape[1] - tokens, position_stride=cache[0].stride(0), head_stride=cache[0].stride(1),
            aux=addressof(aux), aux_count=len(aux_layers),
        )  # fmt: skip
        call("lantern_decode", byref(one_pass))
        return features


def linears_of(block: Any) -> list[Linear]:
    """In the order of `MATRICES`, which is the one that a block makes them in."""
    return [part for part in block.modules() if isinstance(part, Linear)]


def dtype_of(module: nn.Module) -> torch.dtype:
    """Of what is not quantised in it: its norms, its embedding."""
    parts = ((name, part.dtype) for name, part in module.named_parameters())
    return next(
        dtype for name, dtype in parts if dtype.is_floating_point and not name.endswith("scale")
    )


# ------------------------------------------------------------------------------------ a whole model


def pack_model(modules: Sequence[nn.Module]) -> int:
    """Bring a target, its drafter and what else has matrices into the native form, in place. -> the target's format

    The plain matrices are given back: what is left of them has no numbers.
    """
    formats = []
    for module in modules:
        if blocks := blocks_of(module):
            module.decoder = NativeDecoder(blocks, getattr(module, "norm", None), emptied=True)
            formats.append(module.decoder.format)
        for parent in [*module.modules()]:
            for name, child in [*parent.named_children()]:
                # Without those that have just given their matrices back
                if not isinstance(child, Linear) or not child.weight.numel():
                    continue
                own = type(child) in (
                    nn.Linear,
                    QuantizedLinear,
                )  # torch reads those of others itself
                if own and child.in_features % 2 == 0:
                    form = format_of([child], dtype_of(module))
                    setattr(parent, name, NativeLinear(child, form))
    return formats[0] if formats else FLOAT32


def repack(module: Any, fresh: Any) -> None:
    """Give a packed target the numbers of another one, which is plain; the format may be another one then."""
    heads = [item for item in module.named_modules() if isinstance(item[1], NativeLinear)]
    for name, own in heads:
        if not name.startswith("decoder."):
            layer = fresh.get_submodule(name)
            own.pack(layer, format_of([layer], dtype_of(fresh)))
    module.decoder.pack(blocks_of(fresh), fresh.norm)


def blocks_of(module: nn.Module) -> list[Any]:
    """Those of a target, or the one of a drafter."""
    block = getattr(module, "block", None)
    return [*getattr(module, "layers", ())] or ([] if block is None else [block])


def why_unsupported(modules: Sequence[nn.Module]) -> str:
    """Why these models cannot take the native form here, or nothing."""
    found, why = open_library()
    if found is None:
        return why
    for module in modules:
        linears = [part for block in blocks_of(module) for part in linears_of(block)]
        if len({isinstance(part, QuantizedLinear) for part in linears}) > 1:
            return "some matrices of its layers are quantised, and some are not"
    for block in (block for module in modules for block in blocks_of(module)):
        sizes = (
            ("width", block.ffn.down.out_features, LANES),
            ("head size", block.attention.head_dim, LANES),
            ("feed-forward width", block.ffn.down.in_features, 2 * LANES),
        )
        odd = [
            f"the {name} is not a multiple of {step}" for name, size, step in sizes if size % step
        ]
        if odd:
            return ", ".join(odd)
    return ""
