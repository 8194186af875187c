"""How a processor's linear layers keep their matrices: as torch does, or packed once for the library that multiplies.

`packed` calls oneDNN as inductor's freezing does: torch has no public way to multiply a dense input by a packed matrix
without copies. `half` calls FBGEMM, which reads matrices of float16 and multiplies in float32: half of the bytes. The
plain twin of both is `nn.Linear`; they agree within rounding, not bit by bit, so which one runs is part of what an
image is drawn with.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lantern_hpu.backends.host import processor_name
from lantern_hpu.errors import DeviceError, OutputError
from lantern_hpu.files import cache_folder, write_file

LAYOUTS = {
    "packed": "each matrix in the order that oneDNN reads it: nothing is rearranged in a step",
    "half": "float32 models: matrices in float16, packed for FBGEMM; inputs, products and sums stay float32",
    "plain": "as torch keeps it: exact float32 figures of version 0.1 hold",
}
LARGE = (
    256 * 2**20
)  # bytes of a model in float32 that caches do not hold: reading them is what its steps wait for
SAMPLED = 128 * 2**20  # bytes of the matrices that are timed: more than a core's share of a cache
ROWS = (2, 12, 52)  # an image with guidance: one token, a chain of 6 nodes, a tree of 26
ROUNDS = 3  # of each timing; the fastest counts
HALF_MOST, HALF_BYTES = torch.finfo(torch.float16).max, torch.float16.itemsize


class Linears(NamedTuple):
    """Where a plain linear layer sits, and the layer."""

    parent: nn.Module
    name: str
    layer: nn.Linear


class PackedLinear(nn.Module):
    """A linear layer whose matrix was packed once for oneDNN; for inference."""

    agree: ClassVar = {
        torch.float32: 1e-4,
        torch.bfloat16: 2e-2,
    }  # with plain; of the largest value
    gain = 0.95  # of the best time so far: what it must reach to be worth other rounding

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


class HalfLinear(nn.Module):
    """A float32 linear layer whose matrix was rounded to float16 and packed once for FBGEMM; for inference."""

    agree: ClassVar = {torch.float32: 2e-3}
    gain = 0.8

    def __init__(self, plain: nn.Linear) -> None:
        """
        Raises:
            RuntimeError: FBGEMM is not there, or a weight is beyond float16.
        """
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        weight = plain.weight.detach()
        if not weight.abs().max() <= HALF_MOST:
            raise RuntimeError(f"a weight is beyond float16's {HALF_MOST:.0f}")
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight, plain.bias)  # opaque

    def forward(self, x: Tensor) -> Tensor:  # [.., in] -> [.., out]
        if x.is_meta:  # judges of captures ask for a shape, and torch has no rule for this operator
            return x.new_empty(*x.shape[:-1], self.out_features)
        found: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return found


Form = type[PackedLinear] | type[HalfLinear]
FORMS: dict[str, Form] = {"packed": PackedLinear, "half": HalfLinear}
Shares = dict[str, dict[int, float]]  # time in that of plain: by form, by rows of the input


def linears(modules: Iterable[nn.Module]) -> Iterator[Linears]:
    """The layers that can be packed; those in 8 bits have a form of their own."""
    for module in modules:
        for parent in module.modules():
            for name, child in parent.named_children():
                if type(child) is nn.Linear and type(child.weight) is nn.Parameter:
                    yield Linears(parent, name, child)


@torch.no_grad()
def lay_out(modules: Sequence[nn.Module], choice: str = "auto") -> tuple[str, str]:
    """Bring the linear layers of modules into a layout. -> its name, and why it is that one

    Args:
        modules: of one number format, without gradients.
        choice: one of `LAYOUTS`, or `auto`: the fastest here; a float32 model that caches may hold stays plain, so
            that its figures are the same on every processor.

    Raises:
        DeviceError: the one asked for is not offered here.
    """
    found = list(linears(modules))
    if choice == "plain" or not found:
        return "plain", "asked for" if choice == "plain" else "there is nothing to pack"
    name, why = chosen([layer for _, _, layer in found], choice)
    if name != "plain":
        for parent, attribute, layer in found:  # one matrix at a time is held twice
            setattr(parent, attribute, FORMS[name](layer))
    return name, why


def chosen(layers: Sequence[nn.Linear], choice: str) -> tuple[str, str]:
    """The layout for the layers of a model, and why."""
    hindrances = {name: obstacle(form, layers) for name, form in FORMS.items()}
    if choice != "auto":
        if why := hindrances[choice]:
            raise DeviceError(f"--layout {choice} cannot be used here", why, "--layout auto")
        return choice, "asked for"
    offered = [name for name, why in hindrances.items() if not why]
    if not offered:
        return "plain", hindrances["packed"]
    held = sum(layer.weight.nbytes for layer in layers)
    if layers[0].weight.dtype == torch.float32 and held < LARGE:
        return "plain", f"{held / 2**20:.0f} MiB of float32: its exact figures are kept"
    shares = known_shares(layers, offered)
    return fastest_form(shares), f"{describe_shares(shares)} rows of plain's time on this processor"


def fastest_form(shares: Shares) -> str:
    """The form that needs the smallest share on average, each only if it gains enough over those before it."""
    best, least = "plain", 1.0
    for name, by_rows in shares.items():
        share = sum(by_rows.values()) / len(by_rows)
        if share <= FORMS[name].gain * least:
            best, least = name, share
    return best


def describe_shares(shares: Shares) -> str:
    return "; ".join(
        f"{name} took " + ", ".join(f"{share:.2f} for {rows}" for rows, share in by_rows.items())
        for name, by_rows in shares.items()
    )


def obstacle(form: Form, layers: Sequence[nn.Linear]) -> str:
    """Why these layers cannot take a form here, or nothing."""
    dtype = layers[0].weight.dtype
    if form is PackedLinear and not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    if dtype not in form.agree:
        offered = ", ".join(str(each).removeprefix("torch.") for each in form.agree)
        return f"it is made for {offered}"
    plain = nn.Linear(64, 48, dtype=dtype)
    x = torch.linspace(-1, 1, 4 * 64).to(dtype).unflatten(0, (4, 64))
    try:
        off = (form(plain)(x) - plain(x)).abs().max()
    except (RuntimeError, AttributeError) as error:
        return f"torch does not offer it here ({str(error).splitlines()[0]})"
    if off > form.agree[dtype] * plain(x).abs().max():
        return "its products are off here"
    if form is HalfLinear and not all(layer.weight.abs().max() <= HALF_MOST for layer in layers):
        return f"a weight is beyond float16's {HALF_MOST:.0f}"
    return ""


# ------------------------------------------------------------------------------------ by the clock


def known_shares(layers: Sequence[nn.Linear], forms: Sequence[str]) -> Shares:
    """`measured_shares`, from the cache if these sizes were timed on this processor; they are put there otherwise.

    Where nothing can be written they are timed every time.
    """
    file = kept_in(layers)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        read = json.loads(file.read_text(encoding="utf-8"))["shares"]
        return {name: {rows: float(read[name][str(rows)]) for rows in ROWS} for name in forms}
    shares = measured_shares(layers, forms)
    content = {"about": situation(layers), "shares": shares}
    with suppress(OutputError):
        write_file(file, json.dumps(content).encode(), force=True)
    return shares


def kept_in(layers: Sequence[nn.Linear]) -> Path:
    digest = hashlib.sha256(json.dumps(situation(layers), sort_keys=True).encode()).hexdigest()
    return cache_folder() / "layouts" / f"{digest[:32]}.json"


def situation(layers: Sequence[nn.Linear]) -> dict[str, Any]:
    """What decides how fast a form is."""
    sizes = [f"{layer.out_features}x{layer.in_features}" for layer in layers]
    return {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(layers[0].weight.dtype),
        "sizes": {size: sizes.count(size) for size in sizes},
    }


def measured_shares(layers: Sequence[nn.Linear], forms: Sequence[str]) -> Shares:
    """Time of each form in that of the plain one; a second or less."""
    sample = list[nn.Linear]()
    for layer in layers:
        sample.append(layer)
        if sum(each.weight.nbytes for each in sample) >= SAMPLED:
            break
    shaped: list[Sequence[Callable[[Tensor], Tensor]]] = [sample]
    shaped += [[FORMS[name](layer) for layer in sample] for name in forms]
    shares: Shares = {name: {} for name in forms}
    for rows in ROWS:
        inputs = [torch.ones(rows, each.in_features, dtype=each.weight.dtype) for each in sample]
        plain_s, *others_s = time_forms(shaped, inputs)
        for name, seconds in zip(forms, others_s, strict=True):
            shares[name][rows] = seconds / plain_s
    return shares


def time_forms(
    forms: Sequence[Sequence[Callable[[Tensor], Tensor]]], inputs: Sequence[Tensor]
) -> list[float]:
    """Least seconds of each form over all inputs; they take turns, so that a busy moment meets all."""
    least = [inf] * len(forms)
    for _ in range(ROUNDS):
        for number, form in enumerate(forms):
            began = time.perf_counter()
            for layer, x in zip(form, inputs, strict=True):
                layer(x)
            least[number] = min(least[number], time.perf_counter() - began)
    return least
