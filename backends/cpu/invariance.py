"""Whether a row's bits depend on the rows beside it, by trial, and what is done where they do.

Libraries choose another kernel, and with it another order of sums, by the number of rows: then an image would depend on
its batch. The reference here is a product of `UNIT` rows by one thread. A product of another number of rows, or by more
threads, is tried against it when it is first asked for, which is in the warm-up; where a bit differs, rows are padded
to a number for which none does, or multiplied in pieces of such a number. Few rows of a large model are also padded
where that is faster: a library may multiply six rows in less time than two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.backends.cpu.timing import SAMPLED, time_forms
from lantern_hpu.ops.kernels import Kernels, Sizes
from lantern_hpu.ops.sampling import SamplingParams

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
