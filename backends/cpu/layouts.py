"""How a processor's linear layers keep their matrices: as torch does, or packed once for the library that multiplies.

`packed` calls oneDNN as inductor's freezing does: torch has no public way to multiply a dense input by a packed matrix
without copies. `half` calls FBGEMM, which reads matrices of float16 and multiplies in float32: half of the bytes. The
plain twin of both is `nn.Linear`; they agree within rounding, not bit by bit, so which one runs is part of what an
image is drawn with. Whether a row's bits depend on the rows beside it is another question: see `RowPlans`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lantern_hpu.backends.host import processor_name
from lantern_hpu.errors import DeviceError, OutputError
from lantern_hpu.files import cache_folder, write_file
from lantern_hpu.ops.kernels import Kernels, Sizes
from lantern_hpu.ops.sampling import SamplingParams

# ------------------------------------------------------------------------------------------ timing

# Which form of a product is faster here, by the clock.

SAMPLED = 128 * 2**20  # bytes of the matrices that are timed: more than a core's share of a cache


def time_forms(
    forms: Sequence[Sequence[Callable[[Tensor], Tensor]]], inputs: Sequence[Tensor], rounds: int = 3
) -> list[float]:
    """Least seconds of each form over all inputs; they take turns, so that a busy moment meets all."""
    least = [inf] * len(forms)
    for _ in range(rounds):
        for number, form in enumerate(forms):
            began = time.perf_counter()
            for layer, x in zip(form, inputs, strict=True):
                layer(x)
            least[number] = min(least[number], time.perf_counter() - began)
    return least


# -------------------------------------------------------------------------------------- invariance

# Whether a row's bits depend on the rows beside it, by trial, and what is done where they do.
#
# Libraries choose another kernel, and with it another order of sums, by the number of rows: then an image would depend
# on its batch. The reference here is a product of `UNIT` rows by one thread. A product of another number of rows, or by
# more threads, is tried against it when it is first asked for, which is in the warm-up; where a bit differs, rows are
# padded to a number for which none does, or multiplied in pieces of such a number. Few rows of a large model are also
# padded where that is faster: a library may multiply six rows in less time than two.

UNIT = 16  # rows of the reference
PIECES = (256, 128, 64, 32, UNIT)  # numbers of rows that a product may be cut into, best first
TRIED = (1, 2, 4, 8, 34, 68, 136)  # rows that a form is tried with before it is chosen
FEW = (2, 4, 6, 8)  # numbers of rows that fewer may be padded to for speed
ROUNDS = 9  # of timing plans
GAIN = 0.99  # the share of the time as it comes that another plan must reach: more would leave gains to chance

Product = Callable[[Tensor], Tensor]  # [M, in] -> [M, out]


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def padded_rows(x: Tensor, rows: int) -> Tensor:
    """x [M, in] with its own rows again behind it: [rows, in]."""
    return x if len(x) == rows else torch.cat([x] * -(-rows // len(x)))[:rows]


@dataclass(frozen=True)
class Plan:
    """How M rows are multiplied.

    Attributes:
        size: of a piece; the last one is padded. alone: by one thread.
    """

    size: int
    alone: bool = False

    def apply(self, product: Product, x: Tensor) -> Tensor:
        """x [M, in] -> [M, out]."""
        if self.alone:
            with one_thread():
                return replace(self, alone=False).apply(product, x)
        pieces = [product(padded_rows(part, self.size))[: len(part)] for part in x.split(self.size)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def __str__(self) -> str:
        return f"{self.size} rows at a time" + (", by one thread" if self.alone else "")


class RowPlans:
    """How products of one matrix size and form are multiplied, by their number of rows and of threads."""

    def __init__(self, width: int, dtype: torch.dtype, changed: Callable[[], None] = lambda: None):
        """
        Args:
            width: of a row. changed: called when a number of rows was tried.
        """
        self.width, self.dtype, self.changed = width, dtype, changed
        self.sample: list[Product] = []  # by matrices of this size and form
        self.sampled = 0  # bytes of theirs
        self.plans: dict[tuple[int, int], Plan | None] = {}  # None: all rows at once

    def __call__(self, product: Product, x: Tensor) -> Tensor:
        """x [.., in] -> [.., out]."""
        if x.is_meta:  # of a trial on shapes alone
            return product(x)
        key = x.numel() // self.width, torch.get_num_threads()
        if key not in self.plans:
            self.plans[key] = self.trial(product, key[0])
            self.changed()
        plan = self.plans[key]
        if plan is None:
            return product(x)
        return plan.apply(product, x.reshape(key[0], -1)).unflatten(0, x.shape[:-1])

    def add(self, product: Product, size: int) -> None:
        """Another matrix of so many bytes."""
        if self.sampled < SAMPLED:
            self.sample.append(product)
            self.sampled += size

    def trial(self, product: Product, rows: int) -> Plan | None:
        """The cheapest way to multiply so many rows in which each has the bits of the reference."""
        x = torch.randn(rows, self.width, generator=torch.Generator().manual_seed(rows))
        x, reference = x.to(self.dtype), Plan(UNIT, alone=True)
        want = reference.apply(product, x)
        if torch.equal(product(x), want):
            few = (Plan(size) for size in FEW if size > rows)
            same = [plan for plan in few if torch.equal(plan.apply(product, x), want)]
            return self.quickest([None, *same], x)
        padded = sorted({-(-rows // size) * size for size in (2, 4, 8, UNIT)})
        sizes = [*padded, *(size for size in PIECES if size < rows)]
        plans = (Plan(size) for size in sizes)
        return next(
            (plan for plan in plans if torch.equal(plan.apply(product, x), want)), reference
        )

    def quickest(self, plans: Sequence[Plan | None], x: Tensor) -> Plan | None:
        """By the clock, if there are matrices that no cache holds; else the first."""
        if len(plans) == 1 or self.sampled < SAMPLED:
            return plans[0]
        forms = [
            [product if plan is None else partial(plan.apply, product) for product in self.sample]
            for plan in plans
        ]
        least = time_forms(forms, [x] * len(self.sample), ROUNDS)
        best = min(range(len(plans)), key=least.__getitem__)
        return plans[best if least[best] < GAIN * least[0] else 0]

    @property
    def cut(self) -> dict[int, Plan]:
        """The numbers of rows that are not multiplied as they come."""
        return {rows: plan for (rows, _), plan in self.plans.items() if plan is not None}


def keeps_rows(product: Product, width: int, dtype: torch.dtype) -> bool:
    """Whether rows keep their bits in products of every number that is tried."""
    plans = RowPlans(width, dtype)
    return all(plans.trial(product, rows) is None for rows in TRIED)


# ------------------------------------------------------------------------------------ kernels


PER_ROW = {
    "attention": 4,
    "rms_norm": 1,
    "swiglu": 1,
    "sample": 2,
}  # arguments with a row each sequence


def alone(kernel: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    """A kernel called for each row of its first `count` arguments by itself."""

    def each(*arguments: Any) -> Tensor:
        rows, others = [x.split(1) for x in arguments[:count]], arguments[count:]
        return torch.cat([kernel(*row, *others) for row in zip(*rows, strict=True)])

    each.__name__ = f"{kernel.__name__}, a row at a time"
    return each


def probs_alone(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`Kernels.probs` for each image by itself: with guidance it has two rows."""

    def each(logits: Tensor, params: SamplingParams, guidance: bool, *filters: Any) -> Tensor:
        images, out = len(logits) // (2 if guidance else 1), []
        for image in range(images):
            mine = SamplingParams(
                *(getattr(params, f.name)[image : image + 1] for f in fields(params))
            )
            out.append(kernel(logits[image::images], mine, guidance, *filters))
        return torch.cat(out)

    each.__name__ = f"{kernel.__name__}, an image at a time"
    return each


Calls = Sequence[tuple[Any, ...]]


def calls_of(sizes: Sizes, dtype: torch.dtype) -> Mapping[str, Calls]:
    """Arguments like those of a step, by kernel: several rows [R, ..], a place and more of each."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in (*PER_ROW, "probs")}
    ones = torch.ones(2)
    for rows, places in ((4, 1), (4, 17), (16, 1)):
        q = normal(rows, sizes.heads, places, sizes.head_dim).to(dtype)
        k, v = normal(2, rows, sizes.kv, 192, sizes.head_dim).to(dtype)
        hidden = torch.arange(192) > torch.randint(
            64, 192, (rows, 1, places, 1), generator=random
        )  # [R, 1, T, S]
        mask = hidden.to(dtype) * torch.finfo(dtype).min
        found["attention"].append((q, k, v, mask))
        x, weight = normal(rows, places, sizes.dim).to(dtype), normal(sizes.dim).to(dtype)
        found["rms_norm"].append((x, weight, sizes.norm_eps))
        found["swiglu"].append((normal(rows, places, 2 * sizes.ffn_dim).to(dtype),))
    logits = normal(4, 3, sizes.vocab_size).to(dtype)
    whole, greedy = torch.tensor([sizes.vocab_size, 20], dtype=torch.int32), ones < 0
    params = SamplingParams(4 * ones, ones, whole, ones - 0.1, greedy)
    for top_k, top_p in ((0, False), (32, False), (0, True)):
        found["probs"].append((logits, params, True, top_k, top_p, False))
    found["sample"].append((normal(4, sizes.vocab_size).softmax(-1), normal(4).abs() % 1))
    return found


@torch.no_grad()
def independent(kernels: Kernels, sizes: Sizes, dtype: torch.dtype) -> Kernels:
    """The kernels, with those whose rows depend on one another called for each row by itself."""
    changed = {}
    for name, calls in calls_of(sizes, dtype).items():
        kernel = getattr(kernels, name)
        apart = probs_alone(kernel) if name == "probs" else alone(kernel, PER_ROW[name])
        if not all(torch.equal(kernel(*each), apart(*each)) for each in calls):
            changed[name] = apart
    return replace(kernels, **changed)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------- layouts

LAYOUTS = {
    "native": "the layers of a pass in one call of C: least time, and rows keep their bits by construction",
    "packed": "each matrix in the order that oneDNN reads it: nothing is rearranged in a step",
    "half": "float32 models: matrices in float16, packed for FBGEMM; inputs, products and sums stay float32",
    "plain": "as torch keeps it: exact float32 figures of version 0.1 hold",
}
LARGE = (
    256 * 2**20
)  # bytes of a model in float32 that caches do not hold: reading them is what its steps wait for
ROWS = (2, 12, 52)  # an image with guidance: one token, a chain of 6 nodes, a tree of 26
HALF_MOST, HALF_BYTES = torch.finfo(torch.float16).max, torch.float16.itemsize


class Linears(NamedTuple):
    """Where a plain linear layer sits, and the layer."""

    parent: nn.Module
    name: str
    layer: nn.Linear


class Matrix(nn.Module):
    """A linear layer for inference. Subclasses set `in_features`, `out_features`, and `dtype` of what they multiply."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    rows: RowPlans | None = None  # how many rows are multiplied at a time; None: as they come

    def forward(self, x: Tensor) -> Tensor:  # [.., in] -> [.., out]
        return self.multiply(x) if self.rows is None else self.rows(self.multiply, x)

    def multiply(self, x: Tensor) -> Tensor:
        """[.., in] -> [.., out], all rows at once."""
        raise NotImplementedError


class PlainLinear(Matrix):
    """`nn.Linear`, whose rows can be held to their bits."""

    gain = 1.0

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.plain, self.dtype = plain, plain.weight.dtype

    def multiply(self, x: Tensor) -> Tensor:
        result: Tensor = self.plain(x)
        return result


class PackedLinear(Matrix):
    """A linear layer whose matrix was packed once for oneDNN."""

    agree: ClassVar = {
        torch.float32: 1e-4,
        torch.bfloat16: 2e-2,
    }  # with plain; of the largest value
    gain = 0.95  # of the best time so far: what it must reach to be worth other rounding

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), None)
        self.weight = nn.Parameter(packed, requires_grad=False)  # [out, in], opaque
        self.bias, self.dtype = plain.bias, plain.weight.dtype

    def multiply(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return result


class HalfLinear(Matrix):
    """A float32 linear layer whose matrix was rounded to float16 and packed once for FBGEMM."""

    agree: ClassVar = {torch.float32: 2e-3}
    gain = 0.8

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        weight = plain.weight.detach()
        if not weight.abs().max() <= HALF_MOST:
            raise RuntimeError(f"a weight is beyond float16's {HALF_MOST:.0f}")
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight, plain.bias)  # opaque
        self.dtype = torch.float32

    def multiply(self, x: Tensor) -> Tensor:
        if x.is_meta:  # judges of captures ask for a shape, and torch has no rule for this operator
            return x.new_empty(*x.shape[:-1], self.out_features)
        result: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return result


Form = type[PackedLinear] | type[HalfLinear]
FORMS: dict[str, Form] = {"packed": PackedLinear, "half": HalfLinear}  # in place of `nn.Linear`
Shares = dict[str, dict[int, float]]  # time in that of plain: by form, by rows of the input


class Plans:
    """How many rows are multiplied at a time, by form and size of a matrix: those of one model."""

    def __init__(self, changed: Callable[[str], None] = lambda text: None) -> None:
        """
        Args:
            changed: is given what is to be said of all of them, each time a number of rows was tried.
        """
        self.changed = changed
        self.by_size = dict[tuple[type[Matrix], int, int], RowPlans]()

    def of(self, matrix: Matrix) -> RowPlans:
        size = (type(matrix), matrix.in_features, matrix.out_features)
        if size not in self.by_size:
            plans = RowPlans(matrix.in_features, matrix.dtype, self.note)
            self.by_size[size] = plans
        number = HALF_BYTES if type(matrix) is HalfLinear else matrix.dtype.itemsize
        self.by_size[size].add(matrix.multiply, number * size[1] * size[2])
        return self.by_size[size]

    def note(self) -> None:
        tried = {rows for plans in self.by_size.values() for rows, _ in plans.plans}
        cut = {rows: plan for plans in self.by_size.values() for rows, plan in plans.cut.items()}
        text = f"each row keeps its bits in products of {', '.join(map(str, sorted(tried)))} rows"
        if cut:
            details = ", ".join(f"{rows} as {plan}" for rows, plan in sorted(cut.items()))
            text += f", multiplied {details}"
        self.changed(text)


def linears(modules: Iterable[nn.Module], quantized: bool = False) -> Iterator[Linears]:
    """The layers that can be packed; or those in 8 bits, which have a form of their own."""
    for module in modules:
        for parent in module.modules():
            for name, child in parent.named_children():
                if (
                    type(child) is nn.Linear
                    and (type(child.weight) is not nn.Parameter) == quantized
                ):
                    yield Linears(parent, name, child)


@torch.no_grad()
def lay_out(
    modules: Sequence[nn.Module], choice: str = "auto", plans: Plans | None = None
) -> tuple[str, str]:
    """Bring the linear layers of modules into a layout. -> its name, and why it is that one

    Args:
        modules: of one number format, without gradients.
        choice: one of `LAYOUTS`, or `auto`. A model that caches do not hold takes what is fastest here by the clock; a
            float32 model that they may hold takes what loses nothing and keeps rows' bits, whatever a clock says, so
            that one command draws the same on two days.
        plans: where it is kept how many rows are multiplied at a time, if rows are to keep their bits.
    """
    found = list(linears(modules))
    if plans is not None:
        for parent, attribute, layer in list(linears(modules, quantized=True)):
            setattr(parent, attribute, made("plain", layer, plans))
    if not found:
        return "plain", "there is nothing to pack"
    name, why = chosen([layer for _, _, layer in found], choice, plans)
    if name != "plain" or plans is not None:
        for parent, attribute, layer in found:  # one matrix at a time is held twice
            setattr(parent, attribute, made(name, layer, plans))
    return name, why


def made(name: str, layer: nn.Linear, plans: Plans | None) -> Matrix:
    matrix = FORMS.get(name, PlainLinear)(layer)
    matrix.rows = None if plans is None else plans.of(matrix)
    return matrix


def chosen(layers: Sequence[nn.Linear], choice: str, plans: Plans | None) -> tuple[str, str]:
    """The layout for the layers of a model, and why."""
    hindrances = {name: obstacle(form, layers) for name, form in FORMS.items()}
    if choice != "auto":
        if why := hindrances.get(choice):
            raise DeviceError(f"--layout {choice} cannot be used here", why, "--layout auto")
        return choice, "asked for"
    offered = [name for name, why in hindrances.items() if not why]
    if not offered:
        return "plain", hindrances["packed"]
    held = sum(layer.weight.nbytes for layer in layers)
    if layers[0].weight.dtype == torch.float32 and held < LARGE:
        return lossless_form(layers, offered)
    shares = known_shares(layers, offered, plans is not None)
    return fastest_form(shares), f"{describe_shares(shares)} rows of plain's time on this processor"


def lossless_form(layers: Sequence[nn.Linear], offered: Sequence[str]) -> tuple[str, str]:
    """For a small float32 model: what reads least, rounds no weight and keeps rows' bits; no clock is asked."""
    exact = "half" in offered and all(
        torch.equal(layer.weight, layer.weight.half().float()) for layer in layers
    )
    whys = {"half": "no weight loses a bit by float16", "packed": "float32 as it is"}
    sizes = {(each.in_features, each.out_features): each for each in layers}.values()
    for name, why in whys.items():
        if (
            name in offered
            and (name != "half" or exact)
            and all(
                keeps_rows(made(name, each, None), each.in_features, each.weight.dtype)
                for each in sizes
            )
        ):
            return name, f"{why}, and an image does not depend on its batch"
    return "plain", "the other forms round weights, or rows by the rows beside them"


def fastest_form(shares: Shares) -> str:
    """The form that needs the smallest share on average, each only if it gains enough over those before it."""
    best, least = "plain", inf
    for name, by_rows in {"plain": {0: 1.0}, **shares}.items():
        share = sum(by_rows.values()) / len(by_rows)
        if share <= FORMS.get(name, PlainLinear).gain * least:
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


def known_shares(layers: Sequence[nn.Linear], forms: Sequence[str], held: bool = True) -> Shares:
    """`measured_shares`, from the cache if these sizes were timed on this processor; they are put there otherwise.

    Where nothing can be written they are timed every time.

    Args:
        held: whether rows are to keep their bits.
    """
    file = kept_in(layers, held)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        read = json.loads(file.read_text(encoding="utf-8"))["shares"]
        names = [*(["plain"] if held else []), *forms]
        return {name: {rows: float(read[name][str(rows)]) for rows in ROWS} for name in names}
    shares = measured_shares(layers, forms, held)
    content = {"about": situation(layers, held), "shares": shares}
    with suppress(OutputError):
        write_file(file, json.dumps(content).encode(), force=True)
    return shares


def kept_in(layers: Sequence[nn.Linear], held: bool) -> Path:
    about = json.dumps(situation(layers, held), sort_keys=True)
    digest = hashlib.sha256(about.encode()).hexdigest()
    return cache_folder() / "layouts" / f"{digest[:32]}.json"


def situation(layers: Sequence[nn.Linear], held: bool) -> dict[str, Any]:
    """What decides how fast a form is."""
    sizes = [f"{layer.out_features}x{layer.in_features}" for layer in layers]
    return {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(layers[0].weight.dtype),
        "sizes": {size: sizes.count(size) for size in sizes},
        "held": held,
    }


def measured_shares(layers: Sequence[nn.Linear], forms: Sequence[str], held: bool = True) -> Shares:
    """Time of each form in that of `nn.Linear`; a second or less.

    Where rows are to keep their bits, `plain` is among them: it may have to be multiplied in pieces.
    """
    sample = list[nn.Linear]()
    for layer in layers:
        sample.append(layer)
        if sum(each.weight.nbytes for each in sample) >= SAMPLED:
            break
    plans = Plans() if held else None
    names = [*(["plain"] if held else []), *forms]
    shaped: list[Sequence[Callable[[Tensor], Tensor]]] = [sample]
    shaped += [[made(name, layer, plans) for layer in sample] for name in names]
    shares: Shares = {name: {} for name in names}
    for rows in ROWS:
        inputs = [torch.ones(rows, each.in_features, dtype=each.weight.dtype) for each in sample]
        plain_s, *others_s = time_forms(shaped, inputs)
        for name, seconds in zip(names, others_s, strict=True):
            shares[name][rows] = seconds / plain_s
    return shares
