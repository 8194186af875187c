"""Whether a kernel does on a device what its plain twin does: a few small calls, made before it is used, and once on a
machine some in the sizes of a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern_hpu.backends.base import Candidate, Example, dtype_name, outcome, tensors
from lantern_hpu.backends.cuda.kernels.programs import FORMS, LARGEST
from lantern_hpu.errors import LanternError
from lantern_hpu.files import own_cache, reading, write_file
from lantern_hpu.ops import kernels, sampling
from lantern_hpu.ops.buffers import additive_mask
from lantern_hpu.ops.kernels import CacheWrite, HeadNorms, Kernels, Sizes
from lantern_hpu.ops.sampling import SamplingParams

TWINS: dict[str, Callable[..., Any]] = {
    "attention": kernels.attention,
    "attend": kernels.attend,
    "rms_norm": kernels.rms_norm,
    "add_norm": kernels.add_norm,
    "rotate": kernels.rotate,
    "swiglu": kernels.swiglu,
    "place": kernels.place_tokens,
    "probs": sampling.guided_probs,
    "sample": sampling.sample,
    "sample_distinct": sampling.sample_distinct,
    "product": lambda *given: kernels.product(*given[:-1]),
}


def digest(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


@cache
def text_digest(*names: str) -> str:
    """Of files beside this one: what a kernel did says nothing of another text."""
    texts = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in names]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def tolerance(dtype: torch.dtype) -> float:
    """A few roundings; sums are taken in another order."""
    return max(4 * torch.finfo(dtype).eps, 1e-5)


def fault(candidate: Candidate) -> str:
    """What is wrong with a kernel; nothing if the outcome is what is wanted."""
    try:
        return "" if candidate.agrees() else "it does not give what the plain one gives"
    except torch.OutOfMemoryError:  # which says nothing about the kernel
        raise
    except Exception as error:  # from Triton, the driver, or a compiler that is not there
        return error_line(error)


def error_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"


class SmallSizes(NamedTuple):
    """Of no model: a few features, heads that share their keys, and rows that several programs read."""

    dim: int = 96
    heads: int = 4
    kv: int = 2
    head_dim: int = 32
    ffn_dim: int = 100
    vocab_size: int = 1000
    prefix: int = 8
    tokens: int = 16
    parameters: int = 0
    qk_norm: bool | str = True


LONG, WIDE = SmallSizes(prefix=500), SmallSizes(heads=2, kv=1, head_dim=128, prefix=200)
SHARED = SmallSizes(kv=1, prefix=500)  # more queries than one program brings together
MANY = SmallSizes(vocab_size=LARGEST + 1)  # tokens, which several programs share


def kernel_examples(device: torch.device, dtype: torch.dtype) -> dict[str, list[Example]]:
    """Small calls of each kernel on a device, with what comes of its plain twin on the CPU."""
    calls = [*sized_calls(SmallSizes(), dtype, 1), *sized_calls(SmallSizes(), dtype, 3)]
    more = (*sized_calls(LONG, dtype, 3), *sized_calls(WIDE, dtype, 58))
    calls += [(name, call) for name, call in more if name in ("attention", "attend")]
    calls += [pair for pair in sized_calls(SHARED, dtype, 17) if pair[0] == "attention"]
    large = (*sized_calls(MANY, dtype, 1), *sized_calls(MANY, dtype, 2))
    calls += [pair for pair in large if pair[0] in ("probs", "sample", "sample_distinct")]
    # Those that `tl.dot` multiplies are held to theirs by themselves, where one is asked for
    few = [name for name, form in FORMS.items() if form.kernel == "multiply_add"]
    calls += [("product", multiplied(name, dtype)) for name in few]
    judged: dict[str, list[Example]] = {}
    with torch.no_grad():
        for name, call in calls:
            example = moved(call, device), outcome(TWINS[name], call)
            judged.setdefault(name, []).append(example)
    for name, (call, results) in worked_walks(device).items():
        judged[name] = [(call, [*results, *tensors(call)])]
    judged["commit"] = [worked_commit(device)]
    return judged


def multiplied(form: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """All that may stand around a product, over fewest rows."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows, width = FORMS[form].rows[0], 200
    x, weight = some(rows, width), some(10, width) * width**-0.5
    return x, weight, None, some(width), some(rows, 5), 1e-5, True, None, None, form


def sized_calls(sizes: Sizes, dtype: torch.dtype, tokens: int) -> Iterator[tuple[str, Any]]:
    """Kernels with their arguments in a step over so many tokens of a model, half of whose image is drawn.

    Over several, pairs of features are far apart, a key of each row moves, and rows have pads.
    """
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def grains(below: int, *shape: int) -> Tensor:
        """Whole numbers: as masses they add up to the same in any order."""
        return torch.randint(below, shape, generator=generator).float()

    h, kv, hd, vocabulary = sizes.heads, sizes.kv, sizes.head_dim, sizes.vocab_size
    several = tokens > 1
    slots = -(-(sizes.prefix + sizes.tokens + tokens) // 64) * 64
    slot, new, rows = (torch.arange(n).int() for n in (slots, tokens, 2))
    start, pads, rows = torch.tensor([slots // 2]).int(), rows * (slots // 4), rows * slots
    seen = (slot <= start + new[:, None]) & (slot >= pads[:, None, None])
    goal = rows[:, None] + start + torch.arange(-several, tokens).int()
    write = CacheWrite(some(2 * slots, kv, hd), some(2 * slots, kv, hd), goal.flatten())
    write = write._replace(source=rows + start + 1) if several else write
    rope, mask = some(2, tokens, 2, hd // 2), additive_mask(seen, dtype)
    q, k, v = some(2, tokens, h + 2 * kv, hd).split([h, kv, kv], 2)
    keys, values = (part.unflatten(0, (2, -1)).transpose(1, 2) for part in write[:2])
    yield "attention", (q.transpose(1, 2), keys, values, mask)
    norms = None
    if sizes.qk_norm == "rms":
        norms = HeadNorms(some(hd), some(hd), None, None, 1e-5)
    elif sizes.qk_norm:
        norms = HeadNorms(some(h, hd), some(kv, hd), some(h, hd), some(kv, hd), 1e-5)
    yield "attend", (q, k, v, rope, not several, write, mask, norms)
    yield "rotate", (q, rope, not several)
    x, norm = some(2, tokens, sizes.dim), some(sizes.dim)
    yield "rms_norm", (x, norm, 1e-5)
    yield "rms_norm", (q, some(hd), 1e-5)  # of heads, in a product of more
    yield "add_norm", (x, some(2, tokens, sizes.dim), norm, 1e-5, norm if several else None)
    yield "swiglu", (some(2, tokens, 2 * sizes.ffn_dim),)
    tree, table = torch.ones(1, tokens, tokens).tril().bool(), some(slots, 2, hd // 2).float()
    counted = (seen[:, 0].contiguous(), pads) if several else (None, None)
    placed = (start, new[None], new, tree, *counted, table, slot, rows, dtype)
    yield "place", placed
    if several:
        yield "place", (*placed, slot.expand(3, -1) % 7, (1, 2, hd // 2 - 3))
    images, most = (1, min(50, vocabulary)) if several else (2, 0)
    one = torch.ones(images)
    chosen = SamplingParams(3 * one, 0.7 * one, (50 * one).int(), one, one < 0)
    yield "probs", (3 * some(2, tokens, vocabulary), chosen, several, most, False)
    masses, uniform = grains(4, 1, tokens, vocabulary), grains(8, 1, tokens, 4) / 8
    yield "sample", (masses, uniform[..., 0])
    yield "sample_distinct", (masses, uniform)


def moved(call: Sequence[Any], device: torch.device) -> tuple[Any, ...]:

    def move(value: Any) -> Any:
        if isinstance(value, SamplingParams):
            return SamplingParams(*(getattr(value, f.name).to(device) for f in fields(value)))
        if isinstance(value, CacheWrite | HeadNorms):
            return type(value)(*map(move, value))
        if isinstance(value, tuple):
            return tuple(map(move, value))
        return value.to(device) if isinstance(value, Tensor) else value

    return tuple(map(move, call))


def worked_commit(device: torch.device) -> Example:
    """A commit worked out by hand, with the arguments as it leaves them among the results.

    Nodes 1 and 2 hang from the root, node 3 from node 1. The first image accepts 1 and 3; the second one is done.
    """

    def whole(*rows: Any) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=device)

    paths = whole([0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 1, 3]).expand(2, -1, -1)
    depth = whole(0, 1, 1, 2).expand(2, -1)
    walked = whole(3, 0), whole(9, 8), whole([1, 0], [1, 1]).bool()
    given = (
        *walked,
        torch.ones(2, 4, 5, device=device),
        paths,
        depth,
        whole([4, 5, 6, 7], [1, 2, 3, 4]),
    )
    none = whole([0, 0], [0, 0])
    state = (
        *(whole(*[0] * 18), whole(1, 5), whole(4, 1), whole(2, 6), whole(3, 3), none),
        *(whole(0, 0), whole(0, 0), none.clone(), none.clone()),
    )
    after = (
        *(whole(0, 0, 5, 7, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8), whole(4, 5), whole(9, 8)),
        *(whole(5, 6), whole(4, 3), whole([1, 1], [0, 0]), whole(1, 0), whole(0, 0)),
        *(whole([4, 6], [11, 12]), whole([4, 5], [11, 12])),
    )
    made = whole([0, 1, 3], [0, 0, 0]), whole([5, 7, 9], [8, 8, 8]), whole(3, 1), whole(1, 5)
    return (*given, state, 2, 5, 16), [*made, *given, *after]


def worked_walks(device: torch.device, vocabulary: int = 5) -> dict[str, Example]:
    """Both walks worked out by hand, as their plain forms need modules above `backends`.

    Of five tokens, which may be spread out among more that have no probability.

    The root has the children 1 and 2, node 1 has the child 3. To walk two neighbours may lend up to 1.01 times the
    own mass. The first image accepts 1 because they do, then 3; the second refuses 1 and accepts 2; the third refuses
    both. To traverse p is blended by a quarter of q; the images stop at 3, at 1, which is kept with 0.12 / 0.57, and at
    the root.
    """

    def real(*rows: Any) -> Tensor:
        return torch.tensor(rows, dtype=torch.float32, device=device)

    def whole(*rows: Any) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=device)

    five = torch.arange(5, device=device) * (vocabulary // 5)

    def spread(*rows: Any) -> Tensor:
        values = real(*rows)
        return values.new_zeros(len(rows), vocabulary).index_copy(1, five, values)

    p = spread([0.2, 0.1, 0.1, 0.3, 0.3], [0.1, 0.4, 0.2, 0.2, 0.1]).expand(3, -1, -1)
    q = spread([0.5, 0.2, 0.1, 0.1, 0.1], [0.2, 0.2, 0.2, 0.2, 0.2]).expand(3, -1, -1)
    tokens = five.int()[whole([4, 0, 3, 1], [4, 0, 3, 1], [4, 0, 1, 1]).long()]
    child = whole([1, 2], [3, 0], [0, 0], [0, 0]).expand(3, -1, -1)
    row = whole(0, 1, 0, 0).expand(3, -1)
    uniform = real([[0.79, 0.5], [0.9, 0.9]], [[0.81, 0.9], [0.5, 0.5]], [[0.81, 0.0], [0.5, 0.5]])
    nearest = whole([1, 2, 3, 4], [0, 2, 3, 4], [1, 0, 3, 4], [2, 4, 1, 0], [3, 2, 1, 0])
    near = nearest.new_zeros(vocabulary, 4).index_copy(0, five, five.int()[nearest.long()])
    bounds = (
        whole(2, 2, 2),
        real(0.0, 0.0, 0.0),
        real(1.01, 1.01, 1.01),
        real([1.0, 1.0]).expand(3, -1),
    )
    node, relaxed = whole(3, 2, 0), whole([1, 0], [0, 0], [0, 0]).bool()
    residual = spread([0.1, 0.4, 0.2, 0.2, 0.1], [0, 0, 0, 0.5, 0.5], [0, 0, 0, 0.5, 0.5])
    # Child 1 is accepted with 0.4 / 0.5, exactly with 0.2 / 0.5; what the others are lent they do not need
    spent = real([0.4, 0.0], [0.4, 0.0], [0.4, 0.0])
    tree = (tokens, child, row)
    walk: Example = (p, q, *tree, uniform, near, *bounds), (node, residual, relaxed, spent)
    p = spread([0.2, 0.1, 0.1, 0.3, 0.3], [0.1, 0.1, 0.5, 0.2, 0.1]).expand(3, -1, -1)
    q = spread([0.5, 0.2, 0.1, 0.1, 0.1], [0.3, 0.3, 0.1, 0.2, 0.1]).expand(3, -1, -1)
    uniform = real([0.5, 0.9, 0.27], [0.2, 0.9, 0.28], [0.22, 0.9, 0.28])
    order, blended = whole(3, 1, 2, 0), (real(0.1, 0.1, 0.1), real(9.0, 9.0, 9.0))
    node, relaxed = whole(3, 1, 0), whole([0, 1], [1, 0], [0, 0]).bool()
    residual = spread([0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0.5, 0.5])
    found = (node, residual, relaxed, real([0.1, 0.1], [0.1, 0.1], [0.1, 0.0]))
    return {"walk": walk, "traverse": ((p, q, *tree, order, 2, uniform, *blended), found)}


# ------------------------------------------------------------------------- in the sizes of a model

WINDOW, LONG_WINDOW = 17, 49  # tokens of a pass; more than a warp has threads
WIDTHS = ("dim", "heads", "kv", "head_dim", "ffn_dim", "vocab_size", "prefix", "tokens", "qk_norm")
# Files on which the answer depends
TEXTS = ("accept", "attention", "checks", "forward", "programs", "sample")


def sized_examples(
    sizes: Sizes, dtype: torch.dtype, names: Sequence[str]
) -> Iterator[tuple[str, Example]]:
    """Those of some kernels, with what comes of their twins on the CPU, and those that were worked out."""
    for tokens in (1, WINDOW):
        for name, call in sized_calls(sizes, dtype, tokens):
            if name in names:
                yield name, (call, outcome(TWINS[name], call))
    for name, (call, results) in worked_walks(torch.device("cpu"), sizes.vocab_size).items():
        if name in names:
            yield name, (call, [*results, *tensors(call)])
    if "commit" in names:
        yield "commit", chained_commit(LONG_WINDOW - 1)


def chained_commit(drafts: int, images: int = 2) -> Example:
    """A commit of a chain whose drafts are all accepted, with the arguments as it leaves them among the results."""
    nodes, last, before = drafts + 1, 5 * drafts, 3

    def whole(*shape: int, value: int = 0) -> Tensor:
        return torch.full((images, *shape), value, dtype=torch.int32)

    node = torch.arange(nodes, dtype=torch.int32)
    paths = torch.minimum(node[None, :], node[:, None]).expand(images, -1, -1)
    tokens, depth = (100 + node).expand(images, -1).contiguous(), node.expand(images, -1)
    judged = whole(drafts).bool(), torch.ones(images, nodes, 7)
    given = whole(value=drafts), whole(value=999), *judged, paths, depth, tokens
    counts = whole(value=before), *(whole() for _ in range(3))
    columns = last + nodes + 1
    tallies = whole(drafts), whole(), whole(), whole(drafts), whole(drafts)
    state = (whole(columns).flatten(), *counts, *tallies)
    news = torch.cat([tokens[:, 1:], whole(1, value=999)], 1)
    known = whole(columns)
    known[:, before + 1 : before + 1 + nodes] = news
    after = before + nodes
    moved = (2 + before + node[1:]).expand(images, -1)
    counted = whole(value=after), whole(value=999), whole(value=after + 1), whole(value=1)
    left = known.flatten(), *counted, whole(drafts, value=1), whole(), whole(), moved, moved
    made = node.expand(images, -1), news, whole(value=nodes), whole(value=before)
    return (*given, state, 2, last, 2 + last + 3 * nodes), [*made, *given, *left]


def held_to_twins(
    served: Kernels,
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    machine: Mapping[str, str],
) -> dict[str, str]:
    """Why kernels are refused, by name: found once on a machine, and kept there if that is possible.

    Forms of products are held to theirs where they are chosen.
    """
    names = [n for n, how in served.names().items() if how != "plain" and n != "product"]
    widths = {name: getattr(sizes, name) for name in WIDTHS}
    about = {"dtype": dtype_name(dtype), **widths, "kernels": names, "text": text_digest(*TEXTS)}

    def found() -> dict[str, str]:
        result = dict[str, str]()
        for name, (call, wanted) in sized_examples(sizes, dtype, names):
            first, example = wanted[0].dtype, (moved(call, device), wanted)
            slack = tolerance(first if first.is_floating_point else torch.float32)
            why = fault(Candidate(partial(getattr, served, name), [example], slack))
            result |= {name: why} if why else {}
        return result

    try:
        file = own_cache("kernels") / f"{digest(about)}-{digest(machine)}.json"
        if not file.exists():
            kept = {"machine": machine, "about": about, "refused": found()}
            write_file(file, json.dumps(kept, indent=1).encode())
        with reading(file, "delete it") as saved:
            return dict(saved["refused"])
    except LanternError:
        return found()


def kept_verdicts(machine: Mapping[str, str]) -> list[str]:
    """A line for each model's sizes in which kernels were held to their twins on a machine."""
    lines = []
    for file in own_cache("kernels").glob("*.json"):
        with suppress(LanternError), reading(file) as saved:
            about, wrong = saved["about"], saved["refused"]
            if saved["machine"] == machine and about["text"] == text_digest(*TEXTS):
                said = [f"{name} is refused: {why}" for name, why in wrong.items()]
                sizes = ", ".join(f"{name} {about[name]}" for name in WIDTHS)
                agree = f"{len(about['kernels']) - len(wrong)} agree"
                lines.append(f"{about['dtype']}, {sizes}: {'; '.join([agree, *said])}")
    return sorted(lines)
