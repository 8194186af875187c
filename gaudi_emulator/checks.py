"""The rules that look at one operator and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gaudi_emulator import ops
from gaudi_emulator.card import Card
from gaudi_emulator.ops import Op
from gaudi_emulator.releases import NAMES, operators
from gaudi_emulator.rules import Severity, Site
from gaudi_emulator.tensor import Args, HPUTensor, Kwargs, each, raw

INT32 = torch.iinfo(torch.int32)
E4M3 = 240.0  # the largest float8_e4m3fn of a Gaudi 2 (any_mode/test_hpu_fp8_ops_any_mode.py)
INT64 = torch.iinfo(torch.int64)
NUMBERS = (bool, int, float)
MEGABYTE = 2**20
DYNAMIC: dict[str, str] = NAMES["operators_dynamic"]  # -> the rule
COMPLEX = ("view_as_complex", "view_as_real", "polar", "complex", "fft", "_fft")
PAYLOADS = operators("payloads")
PRODUCTS = operators("products")
# Operators that only move numbers: what was in range stays so
MOVES = operators("moves")
INDEXED = operators("indexed")
WRITES_ONCE = operators("writes_once")
INDEX_WRITES = operators("index_writes")
WHOLE_COPIES = operators("whole_copies")
# Number formats that the bridge has none for
REFUSED = frozenset(
    getattr(torch, name) for name in "uint16 uint32 uint64 float8_e4m3fnuz float8_e5m2fnuz".split()
)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def before(device: Card, op: Op, args: Args, kwargs: Kwargs) -> None:
    """Everything that can be said of an operator before it runs."""
    hit = device.findings.hit
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if op.packet in DYNAMIC:
        dynamic(device, op, DYNAMIC[op.packet])
    if op.packet == "repeat_interleave" and kwargs.get("output_size") is None:
        dynamic(device, op, "H011")
    for target in ops.written_arguments(op, args, kwargs):
        if isinstance(target, HPUTensor):
            view_write(device, op, target)
    if op.packet.startswith(COMPLEX) or (first is not None and first.is_complex()):
        hit("H034", op.name)
    if first is None:
        return
    if first.dtype == torch.float64:
        hit("H033", op.name)
    if op.packet in PAYLOADS and first.dtype == torch.int64 and first.dim() and device.lazy:
        hit("H032", op.name)
    if (
        op.packet in ("sort", "argsort", "msort")
        and first.dim()
        and first.shape[sort_dim(args, kwargs)] > 1024
    ):
        hit("H044", op.name)
    half = first.dtype in (torch.bfloat16, torch.float16)
    if op.packet == "multinomial" and half and first.shape[-1] > 32767:
        hit("H046", op.name)
    if op.packet in INDEXED:
        indexed(device, op, args, kwargs)


def sort_dim(args: Args, kwargs: Kwargs) -> int:
    numbers = [a for a in args[1:] if type(a) is int]
    dim: int = kwargs.get("dim", numbers[0] if numbers else -1)
    return dim


def falls_back(device: Card, op: Op, args: Args, kwargs: Kwargs) -> str:
    """Why an operator falls back for these arguments; empty if it does not.

    First whether it has a kernel, then the bridge's named checks, then its lists of number formats."""
    if not op.native and (device.lazy or op.packet not in device.release.eager_operators):
        return "no kernel"
    hit = device.findings.hit
    first = next((a for a in args if isinstance(a, Tensor)), None)
    if first is None:
        return ""
    release, dtype = device.release, dtype_name(first.dtype)
    given = {a.name: v for a, v in zip(op.arguments, args, strict=False)} | kwargs
    if op.name in ("sort.stable", "sort.values_stable") and given.get("stable"):
        dim = sort_dim(args, kwargs) % max(first.dim(), 1)
        limit = release.sort_limit
        if limit is not None and (dim == 0 or first.shape[dim] > limit):
            hit("H041", op.name)
            return "stable"
    by_dim = op.packet.startswith("arg") or len(args) > 1 or "dim" in kwargs
    if op.packet in release.unreduced and by_dim and dtype in release.unreduced_formats:
        hit("H042", f"{op.name} on {dtype}")
        return f"on {dtype}"
    if op.packet in PRODUCTS and not first.is_floating_point() and not first.is_complex():
        hit("H043", op.name)
        return f"on {dtype}"
    check = FALLBACK_CHECKS.get(op.packet)
    if op.packet == "binary_cross_entropy_with_logits" and not isinstance(first, HPUTensor):
        check = None  # a compiled graph's
    if op.packet in release.fallback_checks and check is not None and check(given):
        return "with these arguments"
    promoted = kwargs.get("dtype") or computed_in(given, first)
    taken = ops.takes(op, promoted, device.lazy, release)
    return "" if taken else f"on {dtype_name(promoted)}"


def computed_in(given: dict[str, Any], first: Tensor) -> torch.dtype:
    """The number format that an operator is checked for: two tensors meet in their common one."""
    mine, other = given.get("self", first), given.get("other")  # `where` has a condition first
    if not isinstance(other, (Tensor, *NUMBERS)) or not isinstance(mine, (Tensor, *NUMBERS)):
        return first.dtype
    if getattr(mine, "dtype", None) == getattr(other, "dtype", ()):
        return mine.dtype  # type: ignore[union-attr]  # float8 meets nothing but itself
    return torch.result_type(raw(mine), raw(other))


# hpu_ops: embedding_gen.cpp, binary_cross_entropy_gen.cpp, unique_gen.cpp, where_gen.cpp, index_select_gen.cpp
FALLBACK_CHECKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "embedding": lambda given: bool(given.get("scale_grad_by_freq") or given.get("sparse")),
    "binary_cross_entropy_with_logits": lambda given: given["self"].dim() >= 5,
    "unique_dim": lambda given: bool(given.get("sorted", True)),
    "where": lambda given: given["condition"].dtype != torch.bool,
    "index_select": lambda given: given["self"].dim() > 5,
    "index_reduce": lambda given: (
        given.get("reduce") == "prod" and not given.get("include_self", True)
    ),
    "div": lambda given: (
        given.get("rounding_mode") is not None
        and getattr(given["self"], "dtype", None) == torch.bool
    ),
}


def dynamic(device: Card, op: Op, rule: str) -> None:
    """An operator whose result's shape depends on data: it reads the size back."""
    device.findings.hit(rule, op.name)
    device.wait("dynamic shape")


def view_write(device: Card, op: Op, target: HPUTensor) -> None:
    if target.base is not None:
        device.findings.hit("H060", op.name)


def foreign(device: Card, op: Op, value: Tensor) -> None:
    """A CPU tensor among device tensors: lazy mode uploads it without a word (habana_lazy/lazy_kernels.h)."""
    no_bare_meta((value,), op.name)
    if value.dim() == 0:
        return
    if device.lazy or op.packet in ("index", "index_put", "index_put_"):
        if device.recording is None:  # an upload in a capture is a finding of its own
            device.findings.hit("H061", f"{op.name} uploads a CPU tensor", "warn")
        upload(device, value)
        device.book_upload()
        return
    device.findings.hit("H061", op.name)
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, hpu:0 and cpu! "
        f"({op.name})"
    )


def no_bare_meta(values: Iterable[Any], where: str) -> None:
    """Raise for a tensor that has no numbers: to torch itself an emulated one is on `meta` too, and it would make
    nothing of both without a word."""
    if any(isinstance(value, Tensor) and value.device.type == "meta" for value in values):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, hpu:0 and meta! "
            f"({where})"
        )


# Numbers


def known_format(dtype: torch.dtype) -> None:
    if dtype in REFUSED:
        raise TypeError(f"{dtype_name(dtype)} is not supported on HPU")


def upload(device: Card, values: Tensor) -> None:
    """The range check of an upload, which the bridge makes on the host."""
    if values.device.type == "meta":
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    if values.is_complex():
        device.findings.hit("H034", "upload")
    if values.dtype == torch.float64:
        device.findings.hit("H033", "upload")
    if not device.lazy or not values.numel() or values.dtype != torch.int64:
        return
    low, high = int(values.min()), int(values.max())
    if low < INT32.min or high > INT32.max:
        device.findings.hit("H030", f"[{low}, {high}]")
        on = device.flags.get("PT_HPU_ENABLE_VALID_DATA_RANGE_CHECK", "1").lower()
        if on in ("1", "true"):
            raise RuntimeError(
                f"Error when trying to cast Long to Int, Input values range [{low}, {high}] exceeds "
                f"Int range [{INT32.min}, {INT32.max}]"
            )


def stored(device: Card, raw: Tensor) -> None:
    """An upload as the device stores it; what is out of range wraps where the check of it is off."""
    if raw.dtype == torch.float64:
        raw.copy_(raw.float())
    elif raw.dtype == torch.int64 and device.lazy:
        raw.copy_(raw.int())
    elif raw.dtype == torch.float8_e4m3fn and bool((beyond := raw.float().abs() > E4M3).any()):
        device.findings.hit("H035", "an upload, which is infinite or NaN there", "error")
        raw.copy_(raw.float().masked_fill(beyond, torch.nan))


def saturated(device: Card, op: Op, args: Args, kwargs: Kwargs) -> Args:
    """The arguments of a cast: a Gaudi 2's float8_e4m3fn ends at 240, and what is beyond becomes that."""
    *goal, source = args[: 1 + (op.packet == "copy_")]
    dtype = goal[0].dtype if goal else kwargs.get("dtype")
    if dtype != torch.float8_e4m3fn or dtype == source.dtype:
        return args
    wide = source.float()
    if not (wide.abs() > E4M3).any():
        return args
    device.findings.hit("H035", "a cast")
    return (*goal, wide.clamp(-E4M3, E4M3))


def stored_size(device: Card, raw: Tensor) -> int:
    """Bytes on the device."""
    halved = raw.dtype in (torch.float64, torch.int64 if device.lazy else None)
    return raw.nbytes // (1 + halved)


def narrow(device: Card, op: Op, values: Iterable[Any]) -> None:
    """Store results as the device does: float64 as float32, and int64 as int32 in lazy mode."""
    for value in values:
        if isinstance(value, (list, tuple)):
            narrow(device, op, value)
        elif not isinstance(value, Tensor) or value.is_sparse or not value.numel():
            continue
        elif value.dtype == torch.float64:
            value.copy_(value.float())
        elif value.dtype == torch.int64 and device.lazy and op.packet not in MOVES:
            if op.packet == "_to_copy":  # what came of NaN and infinities is no number
                value.masked_fill_(value == INT64.min, INT32.min)
            low, high = (int(x) for x in torch.aminmax(value))
            if low >= INT32.min and high <= INT32.max:
                continue
            if not op.random:
                device.findings.hit("H031", f"{op.name}: [{low}, {high}]")
            value.copy_(value.int())


# Indices


def indexed(device: Card, op: Op, args: Args, kwargs: Kwargs) -> None:
    """Rules for reads and writes through index tensors."""
    hit = device.findings.hit
    first = args[0]
    if op.packet in ("index", "index_put", "index_put_"):
        if masked(op, args):
            boolean_index(device, op, args)
            return
        if any(i is None for i in args[1]):
            hit("H047", op.name)
        if first.dim() > (5 if op.packet == "index" else 8):
            hit("H045", f"{op.name} on {first.dim()} dimensions")
    if op.packet == "index_select" and first.dim() > 5:
        hit("H045", f"{op.name} on {first.dim()} dimensions")
    if op.packet in WHOLE_COPIES and first.numel() * first.element_size() > MEGABYTE:
        hit("H054", op.name)
    source = args[3] if op.packet.startswith("scatter") and len(args) > 3 else None
    if isinstance(source, HPUTensor) and source.raw.data_ptr() == raw(first).data_ptr():
        hit("H053", op.name)
    report_indices(device, op, args, kwargs.get("accumulate") is True or "reduce" in kwargs)


def masked(op: Op, args: tuple[Any, ...]) -> bool:
    """Whether an index is a mask."""
    return op.packet in ("index", "index_put", "index_put_") and any(
        i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    )


def boolean_index(device: Card, op: Op, args: tuple[Any, ...]) -> None:
    if op.packet == "index":
        dynamic(device, op, "H010")
        return
    if args[2].dim() == 0:
        device.findings.hit("H012", op.name)
        return
    device.findings.hit("H012", op.name, "error")
    dynamic(device, op, "H010")


def index_tensors(op: Op, args: tuple[Any, ...]) -> list[tuple[int, Tensor]]:
    """(size of the indexed dimension, index) of each index tensor."""
    first = args[0]
    if op.packet == "embedding":
        return [(first.shape[0], raw(args[1]))]
    if op.packet == "take":
        return [(first.numel(), raw(args[1]))]
    if op.packet in ("index", "index_put", "index_put_"):
        return [(first.shape[d], raw(i)) for d, i in enumerate(args[1]) if i is not None]
    return [(first.shape[args[1]] if first.dim() else 1, raw(args[2]))]


def clamped(op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments on the CPU with every index inside its dimension; negative ones count from the end."""
    bounded = {id(i): i.clamp(-n, n - 1) % max(n, 1) for n, i in index_tensors(op, args)}

    return tuple(each(lambda value: bounded.get(id(value), value), one) for one in args)


def report_indices(
    device: Card,
    op: Op,
    args: Args,
    accumulates: bool = False,
    when: str = "",
    severity: Severity | None = None,
    site: Site | None = None,
) -> None:
    """Indices are data: they are looked at each time that an operator runs, replayed and compiled ones too."""
    if masked(op, args):
        return
    packet, indices = op.packet, index_tensors(op, args)

    def hit(rule: str, detail: str, own: Severity | None = None) -> None:
        device.findings.hit(rule, f"{op.name}{when}: {detail}", own or severity, site)

    for size, index in ((size, slim(index)) for size, index in indices):
        if not index.numel():
            continue
        low, high = (int(x) for x in torch.aminmax(index))
        if low < 0 and not packet.startswith("index_put"):
            pads = low == -1 and high >= 0
            said = "-1, as padding has: what is there must not matter" if pads else f"{low}"
            hit("H050", said, "warn" if pads else None)
        if high >= size or low < -size:
            hit("H051", f"{high if high >= size else low} of {size}")
    accumulates |= len(args) > 3 and args[3] is True
    if packet in WRITES_ONCE and not accumulates and repeats(packet, indices, args):
        hit("H052", "two writes to one place")


def slim(index: Tensor) -> Tensor:
    """An expanded index once: its repetitions say nothing new."""
    for dim, (size, stride) in enumerate(zip(index.shape, index.stride(), strict=True)):
        if stride == 0 and size > 1:
            index = index.narrow(dim, 0, 1)
    return index


def repeats(packet: str, indices: list[tuple[int, Tensor]], args: Any) -> bool:
    """Whether one place is given two values."""
    padded, (size, index) = True, indices[0]
    source = raw(args[2 if packet.startswith("index_put") else 3])
    if packet.startswith("index_copy"):
        index, rows = index % max(size, 1), source.movedim(args[1], 0) if source.dim() else source
    elif packet.startswith("index_put"):
        flat = torch.broadcast_tensors(*(i for _, i in indices))
        size, index = 1, torch.zeros_like(flat[0], dtype=torch.int64)
        for (n, _), part in zip(indices, flat, strict=True):
            size, index = size * n, index * n + part % n
        rows = source.flatten(0, index.dim() - 1) if source.dim() >= index.dim() > 0 else source
    elif not isinstance(source, Tensor) or not index.dim() or not index.numel():
        return False  # scatter of a number, or of one element
    else:  # scatter: the places [as index] of single elements
        target, padded = raw(args[0]), False
        every = torch.arange(target.numel()).view(target.shape)
        for dim, n in enumerate(index.shape):
            every = every if dim == args[1] % index.dim() else every.narrow(dim, 0, n)
            source = source.narrow(dim, 0, n)
        index = every.gather(args[1], index.long().clamp(-size, size - 1) % size)
        rows = source.reshape(-1)
    index = index.reshape(-1)
    places, which, counts = index.unique(return_inverse=True, return_counts=True)
    if len(places) == len(index) or rows.numel() == 1:
        return False
    twice = places[counts > 1].tolist()
    if padded and len(places) > len(twice) == 1 and twice[0] in (0, size - 1):
        return False  # a first or last row that is kept for padding
    if not rows.dim() or len(rows) != len(index):
        return False  # one value for all
    last = torch.empty_like(which[: len(places)]).scatter_(0, which, torch.arange(len(index)))
    return not torch.equal(rows, rows[last[which]])
