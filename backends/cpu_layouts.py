"""How a processor's linear layers keep their matrices: as torch does, or packed once in the order that oneDNN reads.

The packed form calls oneDNN as inductor's freezing does: torch has no public way to multiply a dense input by a packed
matrix without copies. Its plain twin is `nn.Linear`; they agree within the rounding of the number format, not bit by
bit, so which one runs is part of what an image is drawn with.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lantern_hpu.backends.processor import processor_name
from lantern_hpu.errors import DeviceError, OutputError
from lantern_hpu.files import cache_folder, write_file

LAYOUTS = {
    "packed": "each matrix in the order that oneDNN reads it: nothing is rearranged in a step",
    "plain": "as torch keeps it: exact float32 figures of version 0.1 hold",
}
LARGE = (
    256 * 2**20
)  # bytes of a model in float32 that caches do not hold: reading them is what its steps wait for
SAMPLED = 128 * 2**20  # bytes of the matrices that are timed: more than a core's share of a cache
ROWS = (2, 12, 52)  # an image with guidance: one token, a chain of 6 nodes, a tree of 26
ROUNDS = 3  # of each timing; the fastest counts
GAIN = 0.95  # of the plain form's time: what packing must reach to be worth other rounding
AGREE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the largest value


class Linears(NamedTuple):
    """Where a plain linear layer sits, and the layer."""

    parent: nn.Module
    name: str
    layer: nn.Linear


class PackedLinear(nn.Module):
    """A linear layer whose matrix was packed once; for inference."""

    def __init__(self, plain: nn.Linear) -> None:
        """
        Raises:
            RuntimeError: oneDNN has no such form for the number format on this processor.
        """
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), None)
        self.weight = nn.Parameter(packed, requires_grad=False)  # [out, in], opaque
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:  # [.., in] -> [.., out]
        found: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return found


def linears(modules: Iterable[nn.Module]) -> Iterator[Linears]:
    """The layers that can be packed; those in 8 bits have a form of their own."""
    for module in modules:
        for parent in module.modules():
            for name, child in parent.named_children():
                if type(child) is nn.Linear and type(child.weight) is nn.Parameter:
                    yield Linears(parent, name, child)


def pack(found: Iterable[Linears]) -> None:
    """Put the packed form in the place of each; one matrix at a time is held twice."""
    for parent, name, layer in found:
        setattr(parent, name, PackedLinear(layer))


@torch.no_grad()
def lay_out(modules: Sequence[nn.Module], choice: str = "auto") -> tuple[str, str]:
    """Bring the linear layers of modules into a layout. -> its name, and why it is that one

    Args:
        modules: of one number format, without gradients.
        choice: `plain`, `packed`, or `auto`: packed where that is faster here; a float32 model that caches may hold
            stays plain, so that its figures are the same on every processor.

    Raises:
        DeviceError: `packed` was asked for, and oneDNN does not offer it here.
    """
    found = list(linears(modules))
    if choice == "plain" or not found:
        return "plain", "asked for" if choice == "plain" else "there is nothing to pack"
    dtype = found[0].layer.weight.dtype
    hindrance = obstacle(dtype)
    if choice == "packed":
        if hindrance:
            raise DeviceError("--layout packed cannot be used here", hindrance, "--layout auto")
        pack(found)
        return "packed", "asked for"
    if hindrance:
        return "plain", hindrance
    held = sum(layer.weight.nbytes for _, _, layer in found)
    if dtype == torch.float32 and held < LARGE:
        return "plain", f"{held / 2**20:.0f} MiB of float32: its exact figures are kept"
    shares = known_shares([layer for _, _, layer in found])
    told = ", ".join(f"{share:.2f} for {rows}" for rows, share in shares.items())
    why = f"packed took {told} rows of plain's time on this processor"
    if sum(shares.values()) / len(shares) > GAIN:
        return "plain", why
    pack(found)
    return "packed", why


def obstacle(dtype: torch.dtype) -> str:
    """Why layers of a number format cannot be packed here, or nothing."""
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    if dtype not in AGREE:
        return f"oneDNN packs {', '.join(str(d).removeprefix('torch.') for d in AGREE)} here"
    plain = nn.Linear(64, 48, dtype=dtype)
    x = torch.linspace(-1, 1, 4 * 64).to(dtype).unflatten(0, (4, 64))
    try:
        off = (PackedLinear(plain)(x) - plain(x)).abs().max()
    except (RuntimeError, AttributeError) as error:
        return f"oneDNN packs none here ({str(error).splitlines()[0]})"
    return "" if off <= AGREE[dtype] * plain(x).abs().max() else "oneDNN's product is off here"


# ------------------------------------------------------------------------------------ by the clock


def known_shares(layers: Sequence[nn.Linear]) -> dict[int, float]:
    """`measured_shares`, from the cache if these sizes were timed on this processor; they are put there otherwise.

    Where nothing can be written they are timed every time.
    """
    file = kept_in(layers)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        read = json.loads(file.read_text(encoding="utf-8"))["shares"]
        return {rows: float(read[str(rows)]) for rows in ROWS}
    shares = measured_shares(layers)
    content = {"about": situation(layers), "shares": shares}
    with suppress(OutputError):
        write_file(file, json.dumps(content).encode(), force=True)
    return shares


def kept_in(layers: Sequence[nn.Linear]) -> Path:
    digest = hashlib.sha256(json.dumps(situation(layers), sort_keys=True).encode()).hexdigest()
    return cache_folder() / "layouts" / f"{digest[:32]}.json"


def situation(layers: Sequence[nn.Linear]) -> dict[str, Any]:
    """What decides how fast either form is."""
    sizes = [f"{layer.out_features}x{layer.in_features}" for layer in layers]
    return {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(layers[0].weight.dtype),
        "sizes": {size: sizes.count(size) for size in sizes},
    }


def measured_shares(layers: Sequence[nn.Linear]) -> dict[int, float]:
    """Time of the packed form in those of the plain one, by rows of the input; a fraction of a second."""
    sample = list[nn.Linear]()
    for layer in layers:
        sample.append(layer)
        if sum(each.weight.nbytes for each in sample) >= SAMPLED:
            break
    packed, shares = [PackedLinear(layer) for layer in sample], dict[int, float]()
    for rows in ROWS:
        inputs = [torch.ones(rows, each.in_features, dtype=each.weight.dtype) for each in sample]
        forms: tuple[Sequence[Callable[[Tensor], Tensor]], ...] = (sample, packed)
        plain_s, packed_s = fastest(forms, inputs)
        shares[rows] = packed_s / plain_s
    return shares


def fastest(
    forms: Sequence[Sequence[Callable[[Tensor], Tensor]]], inputs: Sequence[Tensor]
) -> list[float]:
    """Least seconds of each form over all inputs; they take turns, so that a busy moment meets both."""
    least = [inf] * len(forms)
    for _ in range(ROUNDS):
        for number, form in enumerate(forms):
            began = time.perf_counter()
            for layer, x in zip(form, inputs, strict=True):
                layer(x)
            least[number] = min(least[number], time.perf_counter() - began)
    return least
