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
from collections.abc import Iterator, Sequence
from ctypes import Structure, addressof, byref, c_double, c_int, c_int64, c_void_p, string_at
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from lantern_hpu.backends.base import operator
from lantern_hpu.errors import DeviceError
from lantern_hpu.ops.kv_cache import KVCache, WrittenCache

BUILD = "pip install --force-reinstall --no-deps -e . (or the wheel)"
BUILT_FOR = ("linux", "x86_64")
HIDDEN = -1e30  # of an additive mask: less than this hides a position
LANES = 16  # numbers of the widest vector: sizes that the native form takes are multiples of it

# ---------------------------------------------------------------------------------- the interface


def read_header(text: str) -> dict[str, Any]:
    """What `decoder.h` declares, by name: numbers, structures, and of functions the result and then the arguments.

    Raises:
        DeviceError: a line is written otherwise than those of `decoder.h`.
    """
    known: dict[str, Any] = {"void": None, "int": c_int, "int64_t": c_int64, "double": c_double}
    members: list[tuple[str, Any]] = []

    def declared(line: str) -> list[tuple[str, Any]]:
        """Names and types of "const float *rope, *mask" or "int64_t rows, tokens"."""
        if found := re.fullmatch(r"(?:const )?\w+ (\*\w+(?:, \*\w+)*)", line):
            return [(name[1:], c_void_p) for name in found[1].split(", ")]
        if (found := re.fullmatch(r"(\w+) (\w+(?:, \w+)*)", line)) and found[1] in known:
            return [(name, known[found[1]]) for name in found[2].split(", ")]
        raise DeviceError("decoder.h cannot be read", f"it says {line!r}", BUILD)

    for line in map(str.strip, re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).splitlines()):
        if found := re.fullmatch(r"#define (\w+) (\d+)", line):
            known[found[1]] = int(found[2])
        elif found := re.fullmatch(r"} (\w+);", line):
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
BFLOAT16, FLOAT16, FLOAT32 = (HEADER[name] for name in ("BFLOAT16", "FLOAT16", "FLOAT32"))
CMatrix, CLayer, CCall, CWalk = (HEADER[name] for name in ("Matrix", "Layer", "Call", "Walk"))


# ------------------------------------------------------------------------------------ the library


@cache
def open_library() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None, and why: the instruction set in use, or what is missing."""
    if (sys.platform, platform.machine()) != BUILT_FOR:
        return None, "the native decoder is for Linux on x86-64"
    files = sorted(Path(__file__).parent.glob("_decoder*.so"))
    if not files:
        return None, f"the native decoder was not built (no C compiler?); {BUILD} builds it"
    try:
        share_openmp()
        library = ctypes.CDLL(str(files[-1]))
        found = library.lantern_abi()
    except (OSError, AttributeError) as error:
        return None, f"the native decoder does not load ({error}); {BUILD} builds it anew"
    if found != ABI:
        return None, f"the native decoder is of version {found}, not {ABI}; {BUILD} builds it anew"
    for name in (name for name in HEADER if name.startswith("lantern_")):
        function = getattr(library, name)
        function.restype, *function.argtypes = HEADER[name]
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":  # torch's own limit
        library.lantern_use(b"avx2")
    isa = string_at(library.lantern_isa()).decode()
    return (library, isa) if isa else (None, "this processor has no AVX2")


def library() -> ctypes.CDLL:
    """What `obstacle` has found to be there."""
    found, why = open_library()
    if found is None:
        raise RuntimeError(why)
    return found


def isa() -> str:
    """The instruction set in use, or nothing."""
    found, name = open_library()
    return name if found else ""


def missing() -> str:
    """What is wrong where the native decoder should be, or nothing."""
    found, why = open_library()
    return why if found is None and (sys.platform, platform.machine()) == BUILT_FOR else ""


def share_openmp() -> None:
    """Let the library find the OpenMP of torch: two runtimes would keep two teams that spin against each other."""
    with open("/proc/self/maps") as maps:
        names = {line.split()[-1] for line in maps if ".so" in line}
    found = [
        n for n in sorted(names) if any(k in Path(n).name for k in ("libgomp", "libiomp", "libomp"))
    ]
    ctypes.CDLL(found[0] if found else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


def check_code(code: int) -> None:
    if code:
        raise RuntimeError("out of memory" if code == -1 else "sizes that the native decoder lacks")


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


# --------------------------------------------------------------------------------------- matrices


def format_of(dtype: torch.dtype, weights: Sequence[Tensor]) -> int:
    """float16 for the matrices of a float32 model where that loses no bit."""
    if dtype == torch.bfloat16:
        return BFLOAT16
    exact = all(torch.equal(weight, weight.half().float()) for weight in weights)
    return FLOAT16 if exact else FLOAT32


MODULES: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by the number an operator is given
STORED = (torch.bfloat16, torch.float16, torch.float32)  # by format

native_linear = operator(
    "native_linear(Tensor x, int number) -> Tensor",
    lambda x, number: x.new_empty(*x.shape[:-1], MODULES[number].out_features),
)(lambda x, number: MODULES[number].multiply(x))


class NativeLinear(nn.Module):
    """`nn.Linear` for inference, [.., in] -> [.., out]: a matrix in the order that `decoder.c` reads it.

    Args:
        number: of a format. gated: the first half of the outputs are gates of the second half.
    """

    packed: Tensor
    bias: Tensor | None  # [out] float32

    def __init__(self, layer: nn.Linear, number: int, gated: bool = False) -> None:
        super().__init__()
        weight, self.format = layer.weight.detach().to(STORED[number]).contiguous(), number
        self.out_features, self.in_features = weight.shape
        sizes = self.in_features, self.out_features
        size = library().lantern_packed_bytes(number, *sizes)
        self.register_buffer("packed", torch.empty(size, dtype=torch.uint8), persistent=False)
        packed = self.packed.data_ptr()
        library().lantern_pack(number, weight.data_ptr(), *sizes, gated, packed)
        bias = None if layer.bias is None else layer.bias.detach().float().contiguous()
        self.register_buffer("bias", bias, persistent=False)
        self.matrix = CMatrix(packed, pointer(bias), *sizes)
        MODULES[id(self)] = self

    def multiply(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y, rows = x.new_empty(*x.shape[:-1], self.out_features), x.numel() // self.in_features
        how = self.format, torch.get_num_threads(), byref(self.matrix)
        check_code(library().lantern_linear(*how, x.data_ptr(), rows, y.data_ptr()))
        return y

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = native_linear(x, id(self))
        return result


# ---------------------------------------------------------------------------------------- decoder


native_decode = operator(
    "native_decode(Tensor x, Tensor rope, Tensor mask, Tensor(a!)[] cache, Tensor index, Tensor? source, "
    "int[] aux_layers, Tensor? words, bool alone, int number) -> Tensor",
    lambda x, rope, mask, cache, index, source, aux_layers, words, alone, number: x.new_empty(
        *x.shape[:-1], x.shape[-1] * (1 + len(aux_layers))
    ),
)(lambda *arguments: MODULES[arguments[-1]].run(*arguments[:-1]))


NORMS = ("norm", "post_norm", "ffn_norm", "ffn_post_norm")
HEAD_NORMS = ("q_norm", "q_norm_bias", "k_norm", "k_norm_bias")
MATRICES = ("qkv", "out", "gate_up", "down", "word_gate_up", "word_down")


class NativeDecoder(nn.Module):
    """Blocks of `models/transformer.py`, and the norm behind them, with the signature of `Target.forward`.

    Args:
        blocks: of one model. norm: behind the last one; None for the drafter's.
    """

    def __init__(self, blocks: Sequence[Any], norm: Any | None) -> None:
        super().__init__()
        attention = blocks[0].attention
        self.heads, self.kv, self.head_dim = attention.heads, attention.kv, attention.head_dim
        self.interleaved, self.eps = attention.interleaved, blocks[0].ffn_norm.eps
        self.dtype = blocks[0].ffn_norm.weight.dtype
        matrices = [m.weight for block in blocks for m in linears_of(block)]
        self.format = format_of(self.dtype, matrices)
        self.parts = nn.ModuleList()
        self.norms: list[Tensor] = []  # what `layers` points to
        self.layers = (CLayer * len(blocks))(*(self.pack(block) for block in blocks))
        self.final_norm = None if norm is None else self.keep(norm.weight)
        self.dim, self.ffn = blocks[0].ffn.down.out_features, blocks[0].ffn.down.in_features
        MODULES[id(self)] = self

    def keep(self, weight: Tensor) -> int:
        self.norms.append(weight.detach().float().contiguous())
        return self.norms[-1].data_ptr()

    def pack(self, block: Any) -> Any:
        layer = CLayer()
        names = ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm")
        for field, name in zip(NORMS, names, strict=True):
            if (weight := getattr(getattr(block, name), "weight", None)) is not None:
                setattr(layer, field, self.keep(weight))
        for field in ("q_norm", "k_norm"):
            norm = getattr(block.attention, field)
            if (weight := getattr(norm, "weight", None)) is not None:
                setattr(layer, field, self.keep(weight))
                setattr(layer, f"{field}_bias", self.keep(norm.bias))
        for field, linear in zip(MATRICES, linears_of(block), strict=False):
            gated = field.endswith("gate_up")
            self.parts.append(NativeLinear(linear, self.format, gated))
            setattr(layer, field, self.parts[-1].matrix)
        return layer

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
        alone = isinstance(cache.layers[0], WrittenCache)
        # A `ScratchCache` needs no copy here: its positions are masked until the next step writes them
        tensors = [x for layer in cache.layers for x in (layer.k, layer.v)]
        result: Tensor = native_decode(
            x, rope, mask, tensors, index, source, list(aux_layers), words, alone, id(self)
        )
        return result

    def run(
        self,
        x: Tensor,
        rope: Tensor,
        mask: Tensor,
        cache: Sequence[Tensor],
        index: Tensor,
        source: Tensor | None,
        aux_layers: Sequence[int],
        words: Tensor | None,
        alone: bool,
    ) -> Tensor:
        """Rows that attend to nothing, of images that are done, are left out: their features are zeros."""
        rows, capacity = len(x), mask.shape[-1]
        moves = None if source is None else source.int().view(rows, -1)
        index = index.view(rows, -1)
        starts = index[:, 0] if alone else torch.arange(0, rows * capacity, capacity)
        each = (x, rope.float(), mask.float(), index.int(), moves, starts.long(), words)
        seen = (mask > HIDDEN).flatten(1).any(1)
        if bool(seen.all()):
            return self.call(cache, aux_layers, *each)
        kept = seen.nonzero()[:, 0]
        result = x.new_zeros(*x.shape[:2], self.dim * (1 + len(aux_layers)))
        if len(kept):
            some = (None if one is None else one[kept] for one in each)
            result[kept] = self.call(cache, aux_layers, *some)
        return result

    def call(
        self, cache: Sequence[Tensor], aux_layers: Sequence[int], *each: Tensor | None
    ) -> Tensor:
        """The call of C, for x, rope, mask, index, source, starts and words of some rows."""
        some: list[Any] = [None if one is None else one.contiguous() for one in each]
        x, rope, mask, index, source, starts, words = some
        x = x.clone()  # the layers add to it
        features = x.new_empty(*x.shape[:2], self.dim * (1 + len(aux_layers)))
        for number, layer in enumerate(self.layers):
            layer.keys, layer.values = map(pointer, cache[2 * number : 2 * number + 2])
        aux = (c_int64 * max(1, len(aux_layers)))(*aux_layers)
        call = CCall(
            format=self.format, threads=torch.get_num_threads(), dim=self.dim, heads=self.heads, kv=self.kv,
            head_dim=self.head_dim, ffn=self.ffn, interleaved=self.interleaved, eps=self.eps,
            layer_count=len(self.layers), layers=addressof(self.layers), final_norm=self.final_norm, rows=len(x),
            tokens=x.shape[1], capacity=mask.shape[-1], moves=0 if source is None else source.shape[1],
            position_stride=cache[0].stride(0), head_stride=cache[0].stride(1), rope=rope.data_ptr(),
            mask=mask.data_ptr(), index=index.data_ptr(), source=pointer(source), starts=starts.data_ptr(),
            words=pointer(words), x=x.data_ptr(), features=features.data_ptr(), aux=addressof(aux),
            aux_count=len(aux_layers),
        )  # fmt: skip
        check_code(library().lantern_decode(byref(call)))
        return features


def linears_of(block: Any) -> Iterator[Any]:
    """In the order of `MATRICES`."""
    yield from (block.attention.qkv, block.attention.out, block.ffn.gate_up, block.ffn.down)
    if block.word_ffn is not None:
        yield from (block.word_ffn.gate_up, block.word_ffn.down)


# ------------------------------------------------------------------------------------ a whole model


def pack_model(modules: Sequence[nn.Module]) -> int:
    """Bring a target, its drafter and what else has matrices into the native form, in place. -> the target's format

    The plain matrices are given back: what is left of them has no numbers.
    """
    for module in modules:
        if blocks := blocks_of(module):
            module.decoder = NativeDecoder(blocks, getattr(module, "norm", None))
            for linear in (linear for block in blocks for linear in linears_of(block)):
                linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
        for parent, name, layer in list(plain_linears(module)):
            number = format_of(layer.weight.dtype, [layer.weight])
            setattr(parent, name, NativeLinear(layer, number))
    return next(
        (x.format for m in modules for x in m.modules() if isinstance(x, NativeDecoder)), FLOAT32
    )


def blocks_of(module: nn.Module) -> list[Any]:
    """Those of a target, or the one of a drafter."""
    block = getattr(module, "block", None)
    return [*getattr(module, "layers", ())] or ([] if block is None else [block])


def obstacle(modules: Sequence[nn.Module]) -> str:
    """Why these models cannot take the native form here, or nothing."""
    found, why = open_library()
    if found is None:
        return why
    for block in (block for module in modules for block in blocks_of(module)):
        sizes = (
            ("width", block.ffn.down.out_features, LANES),
            ("head size", block.attention.head_dim, LANES),
            ("feed-forward width", block.ffn.down.in_features, 2 * LANES),
        )
        odd = [f"the {name} is no multiple of {step}" for name, size, step in sizes if size % step]
        if any(type(linear.weight) is not nn.Parameter for linear in linears_of(block)):
            odd.append("its matrices are quantized")
        if odd:
            return ", ".join(odd)
    return ""


def plain_linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Where linear layers that still have their matrices are, and the layers."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child.weight.numel() and child.in_features % 2 == 0:
                yield parent, name, child
