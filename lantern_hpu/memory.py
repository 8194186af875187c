"""How much memory drawing with a model takes: weights, caches, working memory. Arithmetic alone.

Weights and caches are exact: weights are counted from the sizes of a known model or from the files of another one,
caches from what the decoder allocates. What is called an estimate was fitted to the peaks of tensors alive, and errs
on the high side. A run has phases that need different things; what counts is the largest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.config import KEPT, require
from lantern_hpu.errors import DeviceError, OptionError, WeightsError
from lantern_hpu.hub import CONFIG, again, reading
from lantern_hpu.parts import Parts
from lantern_hpu.registry import Entry, Geometry, locate, size
from lantern_hpu.tree import DraftTree, Tree

if TYPE_CHECKING:
    from lantern_hpu.backends.base import Backend

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
QUANTIZED = ("int8",)
ROW_BYTES = 5  # of an int8 matrix, beside its numbers: a float32 scale and a zero point, as torchao has them
# Measured
FULL_MAPS = 5  # feature maps at full resolution that the image decoder holds at its peak
PROMPT_FEATURES = 20  # times a prompt's features that T5 holds at its peak
QUANTIZING = 8  # bytes for each number of the matrix that is just being made int8
TIGHT = 0.9  # of the memory: past it, fragments and the device's own software may not fit beside it
# What a run does, one after the other
LOADING, ENCODING, DRAWING = "loading", "encoding prompts", "drawing"
Rows = list[tuple[str, int]]
Shapes = Mapping[str, Sequence[int]]  # of tensors, by name
# Files of our own folders and the matrices in them, as `lantern_hpu.models` names them; it would load torch
TARGET, DRAFTER_WEIGHTS, VQ = "target.safetensors", "drafter.safetensors", "vq.safetensors"
MATRIX = re.compile(r"target\.layers\.\d+\.(attention\.(qkv|out)|ffn\.(gate_up|down))\.weight")
T5 = {  # what a T5's config.json leaves out is that of transformers
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "feed_forward_proj": "relu",
}


@dataclass(frozen=True)
class Model:
    """What there is to count.

    Attributes:
        sizes: of the target, for caches and working memory.
        target, drafter, vq, text: numbers that each holds, 0 for none; None for a text encoder that is not here.
        matrices: rows and columns of those in the target's blocks.
        ffn_dim: the widest of target and drafter.
        text_float32: numbers of the text encoder that float16 leaves in float32.
        drafter_optional: whether a drafter that is not used is not loaded either.
    """

    sizes: Geometry
    target: int
    matrices: tuple[tuple[int, int], ...]
    drafter: int
    vq: int
    text: int | None
    ffn_dim: int
    text_float32: int = 0
    drafter_optional: bool = False


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

    @property
    def rows(self) -> int:
        """R, sequences on the device."""
        return self.batch_size * (2 if self.guidance else 1)

    @property
    def bytes(self) -> int:
        """Of a number."""
        return DTYPES[self.dtype]

    @property
    def text_stays(self) -> bool:
        """Whether the text encoder is on the device while images are drawn."""
        return self.keep_text == "device" or (self.keep_text == "host" and self.is_host)


def capacity(geometry: Geometry, tree: Tree) -> int:
    """S, slots of a row in the cache: prefix, image, and one step beyond, in blocks of 64 (see `state.py`)."""
    step = max(tree.size, tree.depth + 1, tree.scratch)
    return -(-(geometry.prefix + geometry.tokens + step) // 64) * 64


def cache_bytes(geometry: Geometry, layers: int, rows: int, slots: int, number: int) -> int:
    """Keys and values of some layers."""
    return 2 * layers * rows * slots * geometry.kv_width * number


def phases(model: Model, setup: Setup) -> dict[str, Rows]:
    """What each phase of a run takes on the device, by name, in bytes; in the order of time.

    Target, drafter and image tokenizer are loaded, then caches are allocated, and both stay. Prompts are encoded
    before the first step.

    Raises:
        OptionError: an option is out of range, or the tree needs a drafter and there is none.
    """
    require(setup.dtype in DTYPES, "--dtype", setup.dtype, ", ".join(DTYPES))
    require(setup.batch_size > 0, "--batch-size", setup.batch_size, "1 or more")
    require(setup.keep_text in KEPT, "--keep-text", setup.keep_text, ", ".join(KEPT))
    if setup.tree.depth and not model.drafter:
        what = f"the tree {setup.tree.name} needs a drafter"
        raise OptionError(what, "the model has none", "--method ar")
    held, text = weights(model, setup) + state(model, setup), text_weights(model, setup)
    found: dict[str, Rows] = {}
    if setup.quantize:
        largest = max(map(prod, model.matrices), default=0)
        turned = [("a matrix on its way to int8 (estimate)", QUANTIZING * largest)]
        found[LOADING] = weights(model, replace(setup, quantize=None)) + turned
    if model.text != 0:
        found[ENCODING] = held + text + [("encoding a prompt (estimate)", encoding(model, setup))]
    found[DRAWING] = held + (text if setup.text_stays else []) + working(model, setup)
    return {phase: [(name, n) for name, n in rows if n] for phase, rows in found.items()}


def largest_phase(model: Model, setup: Setup) -> tuple[str, Rows]:
    """The phase that needs most, and what it needs."""
    return max(phases(model, setup).items(), key=lambda phase: total(phase[1]))


def total(rows: Rows) -> int:
    return sum(count for _, count in rows)


def peak(model: Model, setup: Setup) -> int:
    """Bytes that a run needs."""
    return total(largest_phase(model, setup)[1])


def weights(model: Model, setup: Setup) -> Rows:
    """Parameters in the number format of the run; the image tokenizer stays float32."""
    target = model.target * setup.bytes
    if setup.quantize:
        for rows, columns in model.matrices:
            target -= rows * columns * (setup.bytes - 1) - rows * ROW_BYTES
    drafts = setup.tree.depth or not model.drafter_optional
    return [
        ("target weights", target),
        ("drafter weights", model.drafter * setup.bytes if drafts else 0),
        ("VQ weights (float32)", model.vq * 4),
    ]


def text_weights(model: Model, setup: Setup) -> Rows:
    """Of the text encoder; transformers keeps some in float32 where float16 would overflow."""
    more = model.text_float32 * 2 if setup.dtype == "float16" else 0
    return [("text encoder weights", (model.text or 0) * setup.bytes + more)]


def state(model: Model, setup: Setup) -> Rows:
    """What is allocated once for a batch."""
    sizes, drafts = model.sizes, setup.tree.depth > 0
    shape = (setup.rows, capacity(sizes, setup.tree), setup.bytes)
    return [
        ("target KV cache", cache_bytes(sizes, sizes.layers, *shape)),
        ("drafter KV cache", cache_bytes(sizes, 1, *shape) if drafts else 0),
        ("prefix", setup.rows * sizes.prefix * sizes.dim * setup.bytes),
        ("nearest codes", sizes.vocab * setup.neighbours * 4),
    ]


def encoding(model: Model, setup: Setup) -> int:
    """What T5 computes for one prompt; prompts are encoded one at a time."""
    return PROMPT_FEATURES * model.sizes.prefix * model.sizes.caption_dim * setup.bytes


def working(model: Model, setup: Setup) -> Rows:
    """What comes and goes. A recorded graph keeps its own, hence the pool."""
    sizes = model.sizes
    step = activations(model, setup, setup.tree.size)
    prefill = activations(model, setup, sizes.prefix)
    # Caption features of a batch, the same again for what they become, and that once more beside the state's
    captions = setup.rows * sizes.prefix * (2 * sizes.caption_dim + sizes.dim) * setup.bytes
    laws = law_bytes(sizes, setup)
    maps = FULL_MAPS * sizes.vq_channels * sizes.image_size**2 * 4
    return [
        ("prompts of a batch (estimate)", captions),
        ("logits and laws (estimate)", laws),
        ("activations (estimate)", max(step, prefill)),
        ("decoding one image (estimate)", maps),
        ("graph pool (estimate)", step + prefill + laws),
    ]


def activations(model: Model, setup: Setup, positions: int) -> int:
    """Of one layer over some positions a row: features, the mask, and scores where attention is not fused."""
    sizes = model.sizes
    slots = capacity(sizes, setup.tree)
    features = (6 * sizes.dim + 4 * model.ffn_dim) * setup.bytes
    mask, scores = slots * (2 + 2 * setup.bytes), sizes.heads * slots * setup.bytes
    return setup.rows * positions * (features + mask + scores)


def law_bytes(geometry: Geometry, setup: Setup) -> int:
    """Logits of all rows in their own format and float32; laws of target and drafter, and one on the way."""
    tree = setup.tree
    inner = len(tree.expanded) if isinstance(tree, DraftTree) else tree.size
    logits = setup.rows * (4 + (setup.bytes if setup.bytes < 4 else 0))
    return max(inner, 1) * geometry.vocab * (logits + setup.batch_size * 4 * 3)


# ------------------------------------------------------------------------------------ does it fit


@dataclass(frozen=True)
class Device:
    """What of a device matters here; `memory` is None where it is unknown."""

    memory: int | None
    where: str  # the number is from
    dtype: str = "bfloat16"  # the best one
    quantized: tuple[str, ...] = QUANTIZED
    is_host: bool = False


def remedies(model: Model, setup: Setup, device: Device) -> list[tuple[str, Setup]]:
    """What takes less, from what costs least to what changes most; each on top of those before it."""
    autoregressive = "--method ar"
    if model.drafter_optional:
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
    found: list[tuple[str, Setup]] = []
    for applies, name, change in changes:
        other = replace(setup, **change)
        if applies and peak(model, other) < peak(model, setup):
            setup = other
            found.append((name, other))
    return found


def verdict(model: Model, setup: Setup, device: Device) -> list[str]:
    """Whether it fits, and what would if it does not."""
    memory, need = device.memory, peak(model, setup)
    if memory is None:
        return [device.where, "  try: --memory 24GB says whether it fits"]
    where = f"{size(memory)} ({device.where})"
    if need <= memory:
        tight = need > TIGHT * memory
        but = ", but little is left for the device's own software" if tight else ""
        without = ", without the text encoder" if model.text is None else ""
        return [f"fits in {where}{without}, {size(memory - need)} left{but}"]
    lines = [f"does not fit in {where}: {size(need - memory)} too much"]
    for name, other in remedies(model, setup, device):
        less = peak(model, other)
        word = "" if len(lines) == 1 else "and "
        lines.append(f"  {word}{name}: {size(less)}{', fits' if less <= memory else ''}")
        if less <= memory:
            return lines
    return [*lines, "  nothing makes it fit: a smaller model, or a larger device"]


def check_room(
    name: str,
    count: Callable[[], Model],
    backend: Backend,
    dtype: str,
    keep_text: str = "host",
    quantize: str | None = None,
    quantized: tuple[str, ...] = (),
) -> None:
    """Refuse, before it is loaded, a model that cannot draw even one image on a device, one token a step.

    A processor is not asked: its memory can be swapped out.

    Args:
        count: what there is to load. If its files cannot be read, loading says so better.
        quantized: smaller formats to name as a remedy.

    Raises:
        DeviceError: too little memory is free; it says how much is needed, and what would fit.
    """
    free = backend.memory().free
    if backend.is_host or free is None:
        return
    try:
        model = count()
    except WeightsError:
        return
    setup = Setup(dtype, 1, False, DraftTree.root_only(), keep_text, quantize=quantize)
    need = peak(model, setup)
    if need <= free:
        return
    device = Device(free, f"free on {backend.name}", next(iter(backend.dtypes)), quantized)
    why, *fitting = verdict(model, setup, device)
    hint = " ".join(line.strip() for line in fitting)
    raise DeviceError(f"{name} needs {size(need)}", why, hint)


# ------------------------------------------------------------------------------------ models


def of_known(entry: Entry) -> Model:
    """By the sizes of a known model, which may have been fetched without its drafter."""
    sizes = entry.geometry
    return Model(
        sizes,
        target=sizes.target_parameters,
        matrices=sizes.block_matrices * sizes.layers,
        drafter=sizes.drafter_parameters,
        vq=sizes.vq_parameters,
        text=sizes.text_parameters,
        text_float32=sizes.text_float32,
        ffn_dim=sizes.ffn_dim,
        drafter_optional=locate(entry).get("drafter") is None,
    )


def of_files(parts: Parts) -> Model:
    """By the files of a model; of the large ones only shapes are read.

    Raises:
        WeightsError: parts are missing, or cannot be read.
    """
    folder, ours = parts.target, (parts.target / CONFIG).is_file()
    try:
        model = of_folder(folder) if ours else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = str(error) if isinstance(error, OSError) else repr(error)
        raise WeightsError(f"cannot read the model in {folder}", why, again(folder)) from error
    if model is None:
        model = of_published(parts)
    elif parts.vq is not None:
        model = with_vq(model, parts.vq)
    if parts.drafter is not None:
        model = with_drafter(model, parts.drafter)
    return with_text(model, parts.text) if parts.text and model.text != 0 else model


def of_folder(folder: Path) -> Model:
    """By `model.json` and the headers of the files beside it."""
    about = json.loads((folder / CONFIG).read_text())
    shapes, vq = header(folder / TARGET), about["vq"]
    drafter, condition = about["drafter"] or {}, about["condition"]
    sizes = sizes_of(about["target"], condition, vq["channels"], len(vq["multipliers"]))
    model = Model(
        sizes,
        target=numbers(shapes),
        matrices=block_matrices(shapes),
        drafter=numbers(header(folder / DRAFTER_WEIGHTS)) if drafter else 0,
        vq=numbers(header(folder / VQ)),
        text=0,
        ffn_dim=max(sizes.ffn_dim, drafter.get("ffn_dim", 0)),
    )
    return with_text(model, condition.get("text")) if condition["kind"] == "t5" else model


def of_published(parts: Parts) -> Model:
    """By published checkpoints; their shapes are read as when they are loaded."""
    from lantern_hpu.models.load import check_parts, recognise
    from lantern_hpu.models.weights import describing, open_checkpoint, shape_of

    stored = open_checkpoint(parts.target)
    with describing(parts.target):
        family, checkpoint = recognise(stored, parts)
        shapes = {name: shape_of(made, checkpoint) for name, made in family.recipe.items()}
    inside = "model.vqmodel.decoder.conv_in.weight" in checkpoint
    check_parts(family, parts, {"vq"} if inside else set())
    vq = checkpoint.below("model.vqmodel.") if parts.vq is None else open_checkpoint(parts.vq)
    count, channels, levels = vq_sizes(vq)
    sizes = sizes_of(asdict(family.config), family.about_condition, channels, levels)
    return Model(
        sizes,
        target=numbers(shapes),
        matrices=block_matrices(shapes),
        drafter=0,
        vq=count,
        text=None if "text" in family.needs else 0,
        ffn_dim=sizes.ffn_dim,
    )


def sizes_of(
    target: Mapping[str, Any], condition: Mapping[str, Any], channels: int, levels: int
) -> Geometry:
    """From the fields of a `TransformerConfig`, of a condition, and of an image tokenizer."""
    rows, columns = target["grid"]
    same = ("layers", "dim", "heads", "ffn_dim", "prefix", "qk_norm", "kv_heads")
    return Geometry(
        **{name: target.get(name) for name in same},  # type: ignore[arg-type]
        head_dim=target["dim"] // target["heads"],
        vocab=target["vocab_size"],
        embed_rows=target.get("embed_rows") or target["vocab_size"],
        grid=(rows, columns),
        image_size=rows << (levels - 1),
        vq_parameters=0,
        vq_channels=channels,
        caption_dim=condition.get("dim", 0),
    )


# ------------------------------------------------------------------------------------ parts


def header(file: Path) -> Shapes:
    """Shapes of a safetensors file's tensors (format: huggingface/safetensors)."""
    with open(file, "rb") as data:
        length = int.from_bytes(data.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file} is damaged or cut off")
        found = json.loads(data.read(length))
    return {name: about["shape"] for name, about in found.items() if name != "__metadata__"}


def numbers(shapes: Shapes) -> int:
    """Of all tensors together."""
    return sum(prod(shape) for shape in shapes.values())


def block_matrices(shapes: Shapes) -> tuple[tuple[int, int], ...]:
    """Rows and columns of those that `--quantize` makes smaller."""
    return tuple((s[0], s[1]) for name, s in shapes.items() if MATRIX.fullmatch(name))


def vq_sizes(checkpoint: Any) -> tuple[int, int, int]:
    """Numbers, channels and levels of a published image tokenizer."""
    import torch

    from lantern_hpu.models.folder import Placement
    from lantern_hpu.models.load import load_vq

    vq, _ = load_vq(checkpoint, False, Placement(device=torch.device("meta")))
    count = sum(weight.numel() for weight in vq.parameters())
    return count, vq.config.channels, len(vq.config.multipliers)


def with_vq(model: Model, path: Path) -> Model:
    """With an image tokenizer that the user named."""
    from lantern_hpu.models.weights import open_checkpoint

    count, channels, _ = vq_sizes(open_checkpoint(path))
    return replace(model, vq=count, sizes=replace(model.sizes, vq_channels=channels))


def with_drafter(model: Model, path: Path) -> Model:
    """With a drafter of our own training, or a published one."""
    from lantern_hpu.models.eagle import open_drafter
    from lantern_hpu.models.weights import open_checkpoint

    ours = path / DRAFTER_WEIGHTS
    checkpoint = open_checkpoint(ours) if ours.is_file() else open_drafter(path)[0]
    down = ("block.ffn.down.weight", "layers.0.mlp.down_proj.weight")
    wide = [checkpoint.shapes[name][-1] for name in down if name in checkpoint]
    count = numbers(checkpoint.shapes)
    return replace(model, drafter=count, ffn_dim=max([model.ffn_dim, *wide]))


def with_text(model: Model, folder: Path | str | None) -> Model:
    """With a T5, by its config.json; unknown where that is not here.

    Raises:
        WeightsError: it cannot be read.
    """
    file = Path(folder or "") / "config.json"
    if not folder or not file.is_file():
        return replace(model, text=None)
    with reading(file, "download it again") as found:
        about: dict[str, Any] = T5 | found
        dim, ffn, layers = (int(about[name]) for name in ("d_model", "d_ff", "num_layers"))
        heads = int(about["num_heads"])
        gates = 2 if str(about["feed_forward_proj"]).startswith("gated-") else 1
        block = 4 * dim * heads * int(about["d_kv"]) + (gates + 1) * dim * ffn + 2 * dim
        tables = int(about["vocab_size"]) * dim
        tables += int(about["relative_attention_num_buckets"]) * heads
    return replace(model, text=tables + layers * block + dim, text_float32=layers * dim * ffn)
