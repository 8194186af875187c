"""How much memory drawing with a model takes, before anything is loaded: weights, state, working memory.

Weights and state are exact: what makes them makes them on `meta`. What is called an estimate was fitted to the peaks of
tensors alive, and errs on the high side. A run has phases that need different things; what counts is the largest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.backends import ACCELERATOR, BYTES, QUANTIZED, DeviceOptions, DraftingDefaults
from lantern_hpu.backends.base import Backend, DevicePlan, dtype_name
from lantern_hpu.decode.accelerators import Accelerator
from lantern_hpu.decode.spec import Spec, capacity
from lantern_hpu.decode.state import DecodeState, PrefillInput, walk_tensors
from lantern_hpu.decode.step import make_drafting
from lantern_hpu.errors import Arg, DeviceError, OptionError, Words, words
from lantern_hpu.fields import IMAGE_PARAMS
from lantern_hpu.files import amount
from lantern_hpu.models.config import ModelConfig, TransformerConfig
from lantern_hpu.models.model import EmptyModel, count_vision, parameters_of
from lantern_hpu.ops.quantized import matrix_bytes
from lantern_hpu.tree import DraftTree

META = torch.device("meta")
# Measured
FULL_MAPS = 5  # feature maps at full resolution that the image decoder holds at its peak
PROMPT_FEATURES = 20  # times a prompt's features that T5 holds at its peak
QUANTIZING = 8  # bytes for each number of the matrix that is just being quantised
TIGHT = 0.9  # of the memory: past it, fragments and the device's own software may not fit as well
POOL = "graph pool (estimate)"
# What a run does, one after the other
LOADING = "loading"
ENCODING = "encoding prompts"
DRAWING = "drawing"
# Parts of the state by how their names begin
STATE = {
    "kv_cache.": "target KV cache",
    "drafting.kv_cache.": "drafter KV cache",
    "drafting.": "drafts",
    "": "prompts, tokens, uniforms",
}
Rows = list[tuple[str, int]]


@dataclass(frozen=True)
class Setup:
    """What decides the memory that a model takes."""

    spec: Spec
    dtype: str
    keep_text: str = "host"  # where the text encoder goes once the prompts are encoded
    quantize: str | None = None  # a smaller format of the matrices of target and drafter
    is_host: bool = False  # the device is the processor itself
    loads_drafter: bool = True  # whether a drafter that drafts nothing is loaded all the same

    @property
    def bytes(self) -> int:
        return BYTES[self.dtype]

    def having(self, **change: Any) -> Setup:
        """The same with other values, of its own or of its spec."""
        own = {name: change.pop(name) for name in [*change] if name in vars(self)}
        return replace(self, spec=replace(self.spec, **change), **own)

    @property
    def text_stays(self) -> bool:
        """Whether the text encoder is on the device while images are drawn."""
        return self.keep_text == "device" or (self.keep_text != "free" and self.is_host)


def phases(model: ModelConfig, setup: Setup) -> dict[str, Rows]:
    """What each phase of a run takes on the device, by name, in bytes; in the order of time.

    Target, drafter and image tokenizer are loaded, then caches are allocated, and both stay. Prompts are encoded
    before the first step.
    """
    tree = setup.spec.tree
    if tree.needs_drafter and model.drafter is None:
        what = f"the tree {tree.name} needs a drafter"
        raise OptionError(what, "the model has none", words(Arg("method", "ar"), "or scd"))
    held = weights(model, setup) + state(model, setup)
    text = text_weights(model, setup)
    result: dict[str, Rows] = {}
    if setup.quantize:
        turned = [("a matrix being quantised (estimate)", QUANTIZING * largest_matrix(model))]
        result[LOADING] = weights(model, setup) + turned
    if model.condition.kind == "t5":
        result[ENCODING] = held + encoding(model, setup)
    result[DRAWING] = held + (text if setup.text_stays else []) + working(model, setup)
    return {phase: [(name, n) for name, n in rows if n] for phase, rows in result.items()}


def largest_phase(model: ModelConfig, setup: Setup) -> tuple[str, Rows]:
    """The phase that needs most, and what it needs."""
    return max(phases(model, setup).items(), key=lambda phase: summed(phase[1]))


def largest_matrix(model: ModelConfig) -> int:
    """Numbers of the largest of those that may be kept in a smaller format."""
    return max(matrix.numel() for each in EmptyModel.of(model).matrices for matrix in each)


def summed(rows: Rows) -> int:
    return sum(count for _, count in rows)


def peak(model: ModelConfig, setup: Setup) -> int:
    """Bytes that a run needs."""
    return summed(largest_phase(model, setup)[1])


def weights(model: ModelConfig, setup: Setup) -> Rows:
    """Parameters in the number format of the run; the image tokenizer stays float32."""
    held = parameters_of(model)
    in_target, in_drafter = EmptyModel.of(model).matrices if setup.quantize else ((), ())
    drafter = held["drafter"] * setup.bytes - saved_bytes(in_drafter, setup)
    drafts = setup.spec.tree.needs_drafter or setup.loads_drafter
    reads = setup.spec.sizes(model.target).sourced
    return [
        ("target weights", held["target"] * setup.bytes - saved_bytes(in_target, setup)),
        ("drafter weights", drafter if drafts else 0),
        ("VQ weights (float32)", held["vq"] * 4),
        ("vision tower weights", count_vision(model.vision) * setup.bytes if reads else 0),
        ("diffusion model weights (estimate)", model.diffusion * setup.bytes),
    ]


def saved_bytes(matrices: Iterable[Tensor], setup: Setup) -> int:
    """What these matrices take less in the smaller format."""
    form = setup.quantize or ""
    return sum(matrix.numel() * setup.bytes - matrix_bytes(matrix, form) for matrix in matrices)


def text_weights(model: ModelConfig, setup: Setup) -> Rows:
    """Of the text encoder; transformers keeps some in float32 where float16 would overflow."""
    if model.text is None:
        return []
    more = model.text.float32_parameters * 2 if setup.dtype == "float16" else 0
    return [("text encoder weights", model.text.parameters * setup.bytes + more)]


def encoding(model: ModelConfig, setup: Setup) -> Rows:
    """Of the text encoder, and of what it computes for one prompt: they are encoded one at a time."""
    features = setup.spec.sizes(model.target).prefix * model.condition.dim * setup.bytes
    one = ("encoding a prompt (estimate)", PROMPT_FEATURES * features)
    return [*text_weights(model, setup), one]


@lru_cache(256)
def state(model: ModelConfig, setup: Setup) -> Rows:
    """What an engine allocates once for its batches."""
    empty = EmptyModel.of(model)
    spec = setup.spec
    target = empty.target.sized(spec.sizes(model.target))
    dtype = getattr(torch, setup.dtype)
    drafting = make_drafting(target, empty.drafter, spec)
    drafts = None if drafting is None else drafting.allocate(dtype, META)
    made = DecodeState.allocate(target.config, spec, dtype, META, drafts)
    one = PrefillInput.allocate(target.config, spec, 1, dtype, META) if spec.open else None
    sums = dict.fromkeys(STATE.values(), 0)
    entry = dict(walk_tensors("", one)) if one else {}
    for name, tensor in [*made.tensors().items(), *entry.items()]:
        part = next(part for start, part in STATE.items() if name.startswith(start))
        sums[part] += tensor.nbytes
    return [*sums.items(), ("nearest codes", model.target.vocab_size * spec.neighbours * 4)]


def working(model: ModelConfig, setup: Setup) -> Rows:
    """What comes and goes. A recorded graph keeps its own, hence the pool."""
    spec = setup.spec
    config = spec.sizes(model.target)
    width = model.condition.dim
    step = activations(model, setup, spec.tree.size)
    prefill = activations(model, setup, config.prefix)
    # Caption features of a batch, the same again for what they become, and that once more in the state
    captions = spec.rows * config.prefix * (2 * width + config.dim) * setup.bytes
    probs = probs_bytes(config, setup)
    sized = replace(model, target=config)
    # Where no kernel reads few bits, a product takes its matrix dequantised
    widened = largest_matrix(model) * setup.bytes if setup.quantize and not setup.is_host else 0
    maps = FULL_MAPS * (model.vq.channels if model.vq else 0) * prod(sized.image_size) * 4
    return [
        ("prompts of a batch (estimate)", captions),
        ("logits and probabilities (estimate)", probs),
        ("activations (estimate)", max(step, prefill)),
        ("decoding one image (estimate)", maps),
        (POOL, step + prefill + probs + widened),
    ]


def activations(model: ModelConfig, setup: Setup, positions: int) -> int:
    """Of one layer over some positions a row: features, the mask, and scores where attention is not fused."""
    config = setup.spec.sizes(model.target)
    keys = capacity(config, setup.spec.tree)
    widest = max(config.ffn_dim, model.drafter.sizes(config).ffn_dim if model.drafter else 0)
    features = (6 * config.dim + 4 * widest) * setup.bytes
    mask = keys * (2 + 2 * setup.bytes)
    scores = config.heads * keys * setup.bytes
    return setup.spec.rows * positions * (features + mask + scores)


def probs_bytes(config: TransformerConfig, setup: Setup) -> int:
    """Logits of all rows in their own format and float32; those of target and drafter, and one on the way."""
    tree = setup.spec.tree
    inner = len(tree.judged) if isinstance(tree, DraftTree) else tree.size
    logits = setup.spec.rows * (4 + (setup.bytes if setup.bytes < 4 else 0))
    return inner * config.vocab_size * (logits + setup.spec.images * 4 * 3)


# ------------------------------------------------------------------------------------ does it fit


@dataclass(frozen=True)
class DeviceMemory:
    """What of a device matters here; `memory` is None where it is unknown."""

    memory: int | None
    where: str  # the number is from
    dtype: str = "bfloat16"  # the best one
    quantized: tuple[str, ...] = tuple(QUANTIZED)
    is_host: bool = False
    drafting: DraftingDefaults = ACCELERATOR
    shares_pool: bool = False  # see `Backend`
    name: str = ""
    card: Accelerator | None = None  # that it is, where that is known


def remedies(model: ModelConfig, setup: Setup, device: DeviceMemory) -> Iterator[tuple[Words, int]]:
    """What takes less, and how much: from what costs least to what changes most, each on top of those before it."""
    fetched = ("(the model fetched", Arg("without_drafter", True), ")")
    autoregressive = words(Arg("method", "ar"), *(() if setup.loads_drafter else fetched))
    unguided = IMAGE_PARAMS["cfg_scale"].named(1)
    goes = "free" if setup.is_host else "host"
    spec = setup.spec
    changes: list[tuple[bool, Words, dict[str, Any]]] = [
        (setup.text_stays, words(Arg("keep_text", goes)), {"keep_text": goes}),
        (setup.bytes > 2, words(Arg("dtype", "bfloat16")), {"dtype": "bfloat16"}),
        (spec.images > 1, words(Arg("batch_size", 1)), {"images": 1}),
        ("int8" in device.quantized, words(Arg("quantize", "int8")), {"quantize": "int8"}),
        (
            "int4" in device.quantized,
            words(Arg("quantize", "int4"), "instead"),
            {"quantize": "int4"},
        ),
        (spec.tree.depth > 0, autoregressive, {"tree": DraftTree.root_only(), "neighbours": 0}),
        (spec.guidance, words(unguided, "(no guidance)"), {"guidance": False}),
    ]
    for applies, name, change in changes:
        other = setup.having(**change)
        if applies and peak(model, other) < peak(model, setup):
            setup = other
            yield name, peak(model, setup)


def fit_report(
    model: ModelConfig, setup: Setup, device: DeviceMemory, memory: int
) -> Iterator[Words]:
    """Whether it fits into `memory` bytes, and what would if it does not."""
    need = peak(model, setup)
    where = f"{amount(memory)} ({device.where})"
    if need <= memory:
        tight = need > TIGHT * memory
        but = ", but little is left for the device's own software" if tight else ""
        without = ", without the text encoder" if model.lacks_text else ""
        yield words(f"fits in {where}{without}, {amount(memory - need)} left{but}")
        return
    yield words(f"does not fit in {where}: {amount(need - memory)} too much")
    before: tuple[str, ...] = ()
    for name, less in remedies(model, setup, device):
        fits = ", fits" if less <= memory else ""
        yield words(*before, name, f": {amount(less)}{fits}")
        if fits:
            return
        before = ("and",)
    yield words("nothing makes it fit: a smaller model, or a larger device")


def check_room(
    name: str, model: ModelConfig, fit: DevicePlan, options: DeviceOptions = DeviceOptions()
) -> None:
    """Refuse, before it is loaded, a model that cannot draw even one image on a device, one token a step.

    A processor is not asked: weights that lie in files need not all be in memory.
    """
    backend = fit.backend
    free = backend.memory().free
    if free is None or backend.is_host:
        return
    spec = Spec(1, False, DraftTree.root_only())
    kept = options.quantize if options.quantize in backend.quantized else None
    setup = Setup(spec, dtype_name(fit.dtype), options.keep_text, kept)
    need = peak(model, setup)
    if need <= free:
        return
    best, _ = backend.best_dtype(model.target.parameters)
    device = DeviceMemory(free, f"free on {backend.name}", best, backend.quantized)
    why, *fitting = fit_report(model, setup, device, free)
    raise DeviceError(f"{name} needs {amount(need)}", why, words(*fitting))


def engine_bytes(
    model: ModelConfig,
    specs: Sequence[Spec],
    dtype: str,
    records: bool = False,
    shared: bool = False,
) -> tuple[int, int]:
    """What engines of these specs hold in addition to the weights, and what one of them at a time computes with.

    Where it is recorded (`records`), each recording keeps its own memory, or all have one (`shared`).
    """
    setups = [Setup(spec, dtype) for spec in specs]
    works = [dict(working(model, setup)) for setup in setups]
    pools = [work.pop(POOL) * records for work in works]
    pool = max(pools, default=0) if shared else sum(pools)
    held = pool + sum(summed(state(model, setup)) for setup in setups)
    return held, max((sum(work.values()) for work in works), default=0)


def check_batch(model: ModelConfig, spec: Spec, backend: Backend, dtype: str) -> None:
    """Refuse, before it is allocated, a batch that the host has no memory for; cards say so themselves."""

    def need(images: int) -> int:
        return sum(engine_bytes(model, [replace(spec, images=images)], dtype))

    free = backend.memory().free
    if free is None or not backend.is_host or need(spec.images) <= free:
        return
    most = bisect_right(range(1, spec.images), free, key=need)
    what = f"{spec.images} images at a time need {amount(need(spec.images))} more than the weights"
    fewer = words(Arg("batch_size", most), ", fits")
    hint = fewer if most else words(Arg("method", "ar"), ", or a smaller tree")
    raise DeviceError(what, f"{amount(free)} are free on {backend.name}", hint)
