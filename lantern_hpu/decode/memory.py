"""How much memory drawing with a model takes: weights, caches, working memory. Arithmetic alone, no torch.

Weights and caches are exact: weights are counted from the model's sizes, caches from what the decoder allocates. What
is called an estimate was fitted to the peaks of tensors alive, and errs on the high side. A run has phases that need
different things; what counts is the largest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import (
    ACCELERATOR,
    BYTES,
    KEEP_TEXT,
    QUANTIZED,
    DeviceOptions,
    DraftingDefaults,
)
from lantern_hpu.decode.spec import Spec, capacity, keeps_noise
from lantern_hpu.errors import DeviceError, OptionError, require
from lantern_hpu.files import amount
from lantern_hpu.models.config import ModelConfig, TransformerConfig
from lantern_hpu.tree import DraftTree, Tree, Window

if TYPE_CHECKING:
    from lantern_hpu.backends.base import Backend, Fit

ROW_BYTES = 5  # of an int8 matrix, beside its numbers: a float32 scale and a zero point, as torchao has them
# Measured
FULL_MAPS = 5  # feature maps at full resolution that the image decoder holds at its peak
PROMPT_FEATURES = 20  # times a prompt's features that T5 holds at its peak
QUANTIZING = 8  # bytes for each number of the matrix that is just being made int8
TIGHT = 0.9  # of the memory: past it, fragments and the device's own software may not fit beside it
POOL = "graph pool (estimate)"
# What a run does, one after the other
LOADING, ENCODING, DRAWING = "loading", "encoding prompts", "drawing"
Rows = list[tuple[str, int]]


@dataclass(frozen=True)
class Setup:
    """What decides the memory beside the model."""

    dtype: str
    batch_size: int
    guidance: bool
    tree: Tree
    keep_text: str = "host"  # where the text encoder goes once the prompts are encoded
    neighbours: int = 0  # nearest codes kept of each code
    quantize: str | None = None  # a smaller format of the matrices in the target's blocks
    is_host: bool = False  # the device is the processor itself
    loads_drafter: bool = True  # whether a drafter that drafts nothing is loaded all the same

    @property
    def rows(self) -> int:
        """R, sequences on the device."""
        return self.batch_size * (2 if self.guidance else 1)

    @property
    def bytes(self) -> int:
        return BYTES[self.dtype]

    @property
    def text_stays(self) -> bool:
        """Whether the text encoder is on the device while images are drawn."""
        return self.keep_text == "device" or (self.keep_text != "free" and self.is_host)


def cache_bytes(config: TransformerConfig, layers: int, setup: Setup) -> int:
    """Keys and values of some layers."""
    positions = capacity(config, setup.tree)
    return 2 * layers * setup.rows * positions * config.kv_width * setup.bytes


def phases(model: ModelConfig, setup: Setup) -> dict[str, Rows]:
    """What each phase of a run takes on the device, by name, in bytes; in the order of time.

    Target, drafter and image tokenizer are loaded, then caches are allocated, and both stay. Prompts are encoded
    before the first step.
    """
    require(setup.dtype in BYTES, "dtype", setup.dtype, ", ".join(BYTES))
    require(setup.batch_size > 0, "batch_size", setup.batch_size, "1 or more")
    require(setup.keep_text in KEEP_TEXT, "keep_text", setup.keep_text, ", ".join(KEEP_TEXT))
    if setup.tree.needs_drafter and model.drafter is None:
        what = f"the tree {setup.tree.name} needs a drafter"
        raise OptionError(what, "the model has none", "--method ar or scd")
    held, text = weights(model, setup) + state(model, setup), text_weights(model, setup)
    result: dict[str, Rows] = {}
    if setup.quantize:
        largest = max(map(prod, model.target.block_matrices))
        turned = [("a matrix on its way to int8 (estimate)", QUANTIZING * largest)]
        result[LOADING] = weights(model, replace(setup, quantize=None)) + turned
    if model.condition.kind == "t5":
        result[ENCODING] = held + encoding(model, setup)
    result[DRAWING] = held + (text if setup.text_stays else []) + working(model, setup)
    return {phase: [(name, n) for name, n in rows if n] for phase, rows in result.items()}


def largest_phase(model: ModelConfig, setup: Setup) -> tuple[str, Rows]:
    """The phase that needs most, and what it needs."""
    return max(phases(model, setup).items(), key=lambda phase: summed(phase[1]))


def summed(rows: Rows) -> int:
    return sum(count for _, count in rows)


def peak(model: ModelConfig, setup: Setup) -> int:
    """Bytes that a run needs."""
    return summed(largest_phase(model, setup)[1])


def weights(model: ModelConfig, setup: Setup) -> Rows:
    """Parameters in the number format of the run; the image tokenizer stays float32."""
    held = model.parameters
    target = held["target"] * setup.bytes
    if setup.quantize:
        for layers, rows, columns in model.target.all_matrices:
            saved = rows * columns * (setup.bytes - 1) - rows * ROW_BYTES
            target -= layers * saved
    drafts = setup.tree.needs_drafter or setup.loads_drafter
    return [
        ("target weights", target),
        ("drafter weights", held["drafter"] * setup.bytes if drafts else 0),
        ("VQ weights (float32)", held["vq"] * 4),
        ("diffusion model weights", model.diffusion * setup.bytes),
    ]


def text_weights(model: ModelConfig, setup: Setup) -> Rows:
    """Of the text encoder; transformers keeps some in float32 where float16 would overflow."""
    if model.text is None:
        return []
    more = model.text.float32_parameters * 2 if setup.dtype == "float16" else 0
    return [("text encoder weights", model.text.parameters * setup.bytes + more)]


def encoding(model: ModelConfig, setup: Setup) -> Rows:
    """Of the text encoder, and of what it computes for one prompt: they are encoded one at a time."""
    features = model.target.prefix * model.condition.dim * setup.bytes
    one = ("encoding a prompt (estimate)", PROMPT_FEATURES * features)
    return [*text_weights(model, setup), one]


def state(model: ModelConfig, setup: Setup) -> Rows:
    """What is allocated once for a batch."""
    config, drafts = model.target, setup.tree.needs_drafter
    return [
        ("target KV cache", cache_bytes(config, config.layers, setup)),
        ("drafter KV cache", cache_bytes(config, 1, setup) if drafts else 0),
        ("distributions and noise of a window", window_bytes(config, setup)),
        ("prefix", setup.rows * config.prefix * config.dim * setup.bytes),
        ("nearest codes", config.vocab_size * setup.neighbours * 4),
    ]


def window_bytes(config: TransformerConfig, setup: Setup) -> int:
    """What a window keeps: the distributions of its drafts, and the noise of whole images if that fits its budget."""
    tree = setup.tree
    if not isinstance(tree, Window):
        return 0
    drawn = tree.rule == "sjd-pac" or (tree.rule == "scd" and not tree.commit)
    probs = (tree.width if drawn else 0) + max(tree.commit - 1, 0)
    places = config.tokens if keeps_noise(config, tree, setup.batch_size) else 0
    return 4 * setup.batch_size * config.vocab_size * (probs + places)


def working(model: ModelConfig, setup: Setup) -> Rows:
    """What comes and goes. A recorded graph keeps its own, hence the pool."""
    config, width = model.target, model.condition.dim
    step = activations(model, setup, setup.tree.size)
    prefill = activations(model, setup, config.prefix)
    # Caption features of a batch, the same again for what they become, and that once more beside the state's
    captions = setup.rows * config.prefix * (2 * width + config.dim) * setup.bytes
    probs = probs_bytes(config, setup)
    maps = FULL_MAPS * (model.vq.channels if model.vq else 0) * prod(model.image_size) * 4
    return [
        ("prompts of a batch (estimate)", captions),
        ("logits and probabilities (estimate)", probs),
        ("activations (estimate)", max(step, prefill)),
        ("decoding one image (estimate)", maps),
        (POOL, step + prefill + probs),
    ]


def activations(model: ModelConfig, setup: Setup, positions: int) -> int:
    """Of one layer over some positions a row: features, the mask, and scores where attention is not fused."""
    config, keys = model.target, capacity(model.target, setup.tree)
    widest = max(config.ffn_dim, model.drafter.sizes(config).ffn_dim if model.drafter else 0)
    features = (6 * config.dim + 4 * widest) * setup.bytes
    mask, scores = keys * (2 + 2 * setup.bytes), config.heads * keys * setup.bytes
    return setup.rows * positions * (features + mask + scores)


def probs_bytes(config: TransformerConfig, setup: Setup) -> int:
    """Logits of all rows in their own format and float32; those of target and drafter, and one on the way."""
    tree = setup.tree
    inner = len(tree.judged) if isinstance(tree, DraftTree) else tree.size
    logits = setup.rows * (4 + (setup.bytes if setup.bytes < 4 else 0))
    return inner * config.vocab_size * (logits + setup.batch_size * 4 * 3)


# ------------------------------------------------------------------------------------ does it fit


@dataclass(frozen=True)
class DeviceMemory:
    """What of a device matters here; `memory` is None where it is unknown."""

    memory: int | None
    where: str  # the number is from
    dtype: str = "bfloat16"  # the best one
    quantized: tuple[str, ...] = QUANTIZED
    is_host: bool = False
    drafting: DraftingDefaults = ACCELERATOR
    shares_pool: bool = False  # see `Backend`


def remedies(model: ModelConfig, setup: Setup, device: DeviceMemory) -> Iterator[tuple[str, int]]:
    """What takes less, and how much: from what costs least to what changes most, each on top of those before it."""
    autoregressive = "--method ar"
    if not setup.loads_drafter:
        autoregressive += " (the model fetched --without-drafter)"
    goes = "free" if setup.is_host else "host"
    alone = DraftTree.root_only()
    changes: list[tuple[bool, str, dict[str, Any]]] = [
        (setup.text_stays, f"--keep-text {goes}", {"keep_text": goes}),
        (setup.bytes > 2, "--dtype bfloat16", {"dtype": "bfloat16"}),
        (setup.batch_size > 1, "--batch-size 1", {"batch_size": 1}),
        ("int8" in device.quantized, "--quantize int8", {"quantize": "int8"}),
        (setup.tree.depth > 0, autoregressive, {"tree": alone, "neighbours": 0}),
        (setup.guidance, "--cfg-scale 1 (no guidance)", {"guidance": False}),
    ]
    for applies, name, change in changes:
        other = replace(setup, **change)
        if applies and peak(model, other) < peak(model, setup):
            setup = other
            yield name, peak(model, setup)


def fit_report(model: ModelConfig, setup: Setup, device: DeviceMemory) -> list[str]:
    """Whether it fits, and what would if it does not."""
    memory, need = device.memory, peak(model, setup)
    if memory is None:
        return [device.where, "  try: --memory 24GB says whether it fits"]
    where = f"{amount(memory)} ({device.where})"
    if need <= memory:
        tight = need > TIGHT * memory
        but = ", but little is left for the device's own software" if tight else ""
        without = ", without the text encoder" if model.lacks_text else ""
        return [f"fits in {where}{without}, {amount(memory - need)} left{but}"]
    lines = [f"does not fit in {where}: {amount(need - memory)} too much"]
    for name, less in remedies(model, setup, device):
        word = "" if len(lines) == 1 else "and "
        lines.append(f"  {word}{name}: {amount(less)}{', fits' if less <= memory else ''}")
        if less <= memory:
            return lines
    return [*lines, "  nothing makes it fit: a smaller model, or a larger device"]


def check_room(
    name: str,
    model: ModelConfig,
    fit: Fit,
    options: DeviceOptions = DeviceOptions(),
) -> None:
    """Refuse, before it is loaded, a model that cannot draw even one image on a device, one token a step.

    A processor is not asked: weights that lie in files need not all be in memory.
    """
    from lantern_hpu.backends.base import dtype_name

    backend = fit.backend
    free = backend.memory().free
    if free is None or backend.is_host:
        return
    alone, dtype = DraftTree.root_only(), dtype_name(fit.dtype)
    setup = Setup(dtype, 1, False, alone, options.keep_text, quantize=options.quantize)
    need = peak(model, setup)
    if need <= free:
        return
    best, _ = backend.best_dtype(model.target.parameters)
    device = DeviceMemory(free, f"free on {backend.name}", best, backend.quantized)
    why, *fitting = fit_report(model, setup, device)
    hint = " ".join(line.strip() for line in fitting)
    raise DeviceError(f"{name} needs {amount(need)}", why, hint)


def setup_for(model: ModelConfig, spec: Spec, dtype: str) -> tuple[ModelConfig, Setup]:
    """A batch of a spec to be counted."""
    setup = Setup(dtype, spec.images, spec.guidance, spec.tree, neighbours=spec.neighbours)
    return replace(model, target=spec.sizes(model.target)), setup


def engine_bytes(
    engines: Sequence[tuple[ModelConfig, Setup]], records: bool = False, shared: bool = False
) -> tuple[int, int]:
    """What engines hold beside the weights, and what one of them at a time computes with.

    Where it is recorded (`records`), each recording keeps its own memory, or all have one (`shared`).
    """
    works = [dict(working(*engine)) for engine in engines]
    pools = [work.pop(POOL) * records for work in works]
    pool = max(pools, default=0) if shared else sum(pools)
    held = pool + sum(summed(state(*engine)) for engine in engines)
    return held, max((sum(work.values()) for work in works), default=0)


def check_batch(model: ModelConfig, spec: Spec, backend: Backend, dtype: str) -> None:
    """Refuse, before it is allocated, a batch that the host has no memory for; cards say so themselves."""

    def need(images: int) -> int:
        return sum(engine_bytes([setup_for(model, replace(spec, images=images), dtype)]))

    free = backend.memory().free
    if free is None or not backend.is_host or need(spec.images) <= free:
        return
    most = bisect_right(range(1, spec.images), free, key=need)
    what = f"{spec.images} images at a time need {amount(need(spec.images))} beside the weights"
    hint = f"--batch-size {most}, fits" if most else "--method ar, or a smaller tree"
    raise DeviceError(what, f"{amount(free)} are free on {backend.name}", hint)
