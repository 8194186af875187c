"""How much memory a model needs: weights, caches, working memory. Arithmetic alone, before anything is loaded.

    python -m lantern_hpu.plan llamagen-t2i-512 --memory 24GB --batch-size 4

Weights and caches are exact: they are counted from the sizes that the decoder allocates. What is called an estimate
was fitted to the peaks of tensors alive in prefill, step and image decoder, and errs on the high side.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from lantern_hpu.config import DEFAULT_RELAXATION, DEFAULT_TREE, METHODS, choose_method, require
from lantern_hpu.errors import DeviceError, OptionError, WeightsError, choices, exit_code
from lantern_hpu.registry import FILE, Entry, Geometry, entries, find, get, size, sources
from lantern_hpu.tree import DraftTree, Tree, load_tree

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
FULL_MAPS = 5  # feature maps at full resolution that the image decoder holds at its peak (measured)
TIGHT = 0.9  # of the memory: past it, fragments and the device's own software may not fit beside it
Rows = list[tuple[str, int]]


@dataclass(frozen=True)
class Setup:
    """What decides the memory beside the model."""

    dtype: str
    batch_size: int
    guidance: bool
    tree: Tree
    text: bool  # the text encoder stays loaded while images are drawn
    neighbours: int  # nearest codes kept of each code

    @property
    def rows(self) -> int:
        """R, sequences on the device."""
        return self.batch_size * (2 if self.guidance else 1)

    @property
    def bytes(self) -> int:
        """Of a number."""
        return DTYPES[self.dtype]


def capacity(geometry: Geometry, tree: Tree) -> int:
    """S, slots of a row in the cache: prefix, image, and one step beyond, in blocks of 64 (see `state.py`)."""
    step = max(tree.size, tree.depth + 1, tree.scratch)
    return -(-(geometry.prefix + geometry.tokens + step) // 64) * 64


def cache_bytes(geometry: Geometry, layers: int, rows: int, slots: int, number: int) -> int:
    """Keys and values of some layers."""
    return 2 * layers * rows * slots * geometry.width * number


def estimate(
    model: Entry | Geometry,
    dtype: str = "bfloat16",
    batch_size: int = 1,
    guidance: bool = True,
    tree: Tree | None = None,
    text: bool = True,
    neighbours: int = 0,
) -> Rows:
    """What drawing takes on the device, by name, in bytes.

    Args:
        tree: the default one if not given, or the root alone where the model has no drafter.
        text: whether the text encoder stays while images are drawn.
        neighbours: nearest codes kept for relaxed acceptance.

    Raises:
        OptionError: unknown dtype, or a tree for a model without a drafter.
    """
    geometry = model.geometry if isinstance(model, Entry) else model
    if tree is None:
        tree = load_tree(DEFAULT_TREE) if geometry.drafter else DraftTree.root_only()
    return estimate_setup(geometry, Setup(dtype, batch_size, guidance, tree, text, neighbours))


def estimate_setup(geometry: Geometry, setup: Setup) -> Rows:
    """See `estimate`."""
    require(setup.dtype in DTYPES, "--dtype", setup.dtype, ", ".join(DTYPES))
    require(setup.batch_size > 0, "--batch-size", setup.batch_size, "1 or more")
    if setup.tree.depth and geometry.drafter is None:
        why = "no drafter is published for it"
        raise OptionError(f"the tree {setup.tree.name} needs a drafter", why, "--method ar")
    rows = weights(geometry, setup) + state(geometry, setup) + working(geometry, setup)
    return [(name, count) for name, count in rows if count]


def weights(geometry: Geometry, setup: Setup) -> Rows:
    """Parameters in the number format of the run; the image tokenizer stays float32."""
    drafter = geometry.drafter_parameters if setup.tree.depth else 0
    return [
        ("target weights", geometry.target_parameters * setup.bytes),
        ("drafter weights", drafter * setup.bytes),
        ("VQ weights (float32)", geometry.vq_parameters * 4),
        ("text encoder weights", geometry.text_parameters * setup.bytes * setup.text),
        ("nearest codes", geometry.vocab * setup.neighbours * 4),
    ]


def state(geometry: Geometry, setup: Setup) -> Rows:
    """What is allocated once for a batch."""
    slots = capacity(geometry, setup.tree)
    drafter = geometry.drafter["layers"] if geometry.drafter and setup.tree.depth else 0
    sizes = (setup.rows, slots, setup.bytes)
    prefix = setup.rows * geometry.prefix * geometry.dim * setup.bytes
    captions = setup.rows * geometry.prefix * geometry.caption_dim * 4
    return [
        ("target KV cache", cache_bytes(geometry, geometry.layers, *sizes)),
        ("drafter KV cache", cache_bytes(geometry, drafter, *sizes)),
        ("prefix", prefix + captions),
    ]


def working(geometry: Geometry, setup: Setup) -> Rows:
    """What comes and goes. A recorded graph keeps its own, hence the pool."""
    tree = setup.tree
    step, prefill = (
        activations(geometry, setup, tree.size),
        activations(geometry, setup, geometry.prefix),
    )
    laws = law_bytes(geometry, setup)
    maps = FULL_MAPS * geometry.vq_channels * geometry.image_size**2 * 4
    return [
        ("logits and laws (estimate)", laws),
        ("activations (estimate)", max(step, prefill)),
        ("decoding one image (estimate)", maps),
        ("graph pool (estimate)", step + prefill + laws),
    ]


def activations(geometry: Geometry, setup: Setup, positions: int) -> int:
    """Of one layer over some positions a row: features, the mask, and scores where attention is not fused."""
    slots = capacity(geometry, setup.tree)
    features = (6 * geometry.dim + 4 * geometry.ffn_dim) * setup.bytes
    mask, scores = slots * (2 + 2 * setup.bytes), geometry.heads * slots * setup.bytes
    return setup.rows * positions * (features + mask + scores)


def law_bytes(geometry: Geometry, setup: Setup) -> int:
    """Logits of all rows in their own format and float32; laws of target and drafter, and one on the way."""
    tree = setup.tree
    inner = len(tree.expanded) if isinstance(tree, DraftTree) else tree.size
    logits = setup.rows * (4 + (setup.bytes if setup.bytes < 4 else 0))
    return max(inner, 1) * geometry.vocab * (logits + setup.batch_size * 4 * 3)


# ------------------------------------------------------------------------------------ does it fit


def remedies(geometry: Geometry, setup: Setup) -> list[tuple[str, Setup]]:
    """What takes less, from what costs least to what changes most; each on top of those before it."""
    found: list[tuple[str, Setup]] = []

    def add(applies: bool, name: str, **change: Any) -> None:
        if applies:
            found.append((name, replace(found[-1][1] if found else setup, **change)))

    frees = setup.text and geometry.text_parameters > 0
    add(frees, "text encoder freed after the prompts (--free-text)", text=False)
    add(setup.bytes > 2, "--dtype bfloat16", dtype="bfloat16")
    add(setup.batch_size > 1, "--batch-size 1", batch_size=1)
    add(bool(setup.tree.depth), "--method ar", tree=DraftTree.root_only(), neighbours=0)
    add(setup.guidance, "--cfg-scale 1 (no guidance)", guidance=False)
    return found


def total(rows: Rows) -> int:
    return sum(count for _, count in rows)


def verdict(geometry: Geometry, setup: Setup, memory: int, where: str) -> list[str]:
    """Whether it fits, and what would if it does not."""
    need = total(estimate_setup(geometry, setup))
    if need <= memory:
        tight = (
            "" if need <= TIGHT * memory else ", but little is left for the device's own software"
        )
        return [f"fits in {size(memory)} ({where}), {size(memory - need)} left{tight}"]
    lines = [f"does not fit in {size(memory)} ({where}): {size(need - memory)} too much"]
    for name, other in remedies(geometry, setup):
        less = total(estimate_setup(geometry, other))
        word = "" if len(lines) == 1 else "and "
        lines.append(f"  {word}{name}: {size(less)}{', fits' if less <= memory else ''}")
        if less <= memory:
            return lines
    return [*lines, "  nothing makes it fit: a smaller model, or a larger device"]


def report(name: str, geometry: Geometry, setup: Setup) -> str:
    """The table with its total."""
    rows = estimate_setup(geometry, setup)
    guided = "with guidance" if setup.guidance else "without guidance"
    images = f"{setup.batch_size} image{'s' * (setup.batch_size > 1)} at a time"
    slots = capacity(geometry, setup.tree)
    head = f"{name}, {setup.dtype}, {images}, {guided}, tree {setup.tree.name}, {slots} slots a row"
    wide = max(len(label) for label, _ in rows)
    lines = [f"  {label:<{wide}}  {size(count):>9}" for label, count in rows]
    return "\n".join([head, *lines, f"  {'total':<{wide}}  {size(total(rows)):>9}"])


# ------------------------------------------------------------------------------------ models and devices


def geometry_of(name: str) -> Geometry:
    """Sizes of a known model, of the embedded one, or of a folder of our own.

    Raises:
        OptionError: there is no such model.
    """
    if name == "builtin":
        return read_folder(FILE.parent / "builtin")
    if (Path(name) / "model.json").is_file():
        return read_folder(Path(name))
    if find(name) is None and not sources(name):
        hint = choices(["builtin", *entries(), "a folder with a model.json"])
        raise OptionError(f"unknown model {name!r}", hint=hint)
    return get(name).geometry


def read_folder(folder: Path) -> Geometry:
    """Sizes of a model folder of our own, from its configuration and the headers of its files.

    Raises:
        WeightsError: unreadable.
    """
    try:
        config = json.loads((folder / "model.json").read_text())
        target, vq = config["target"], config["vq"]
        rows, columns = target["grid"]
        return Geometry(
            layers=target["layers"],
            dim=target["dim"],
            heads=target["kv_heads"] or target["heads"],
            head_dim=target["dim"] // target["heads"],
            ffn_dim=target["ffn_dim"],
            vocab=target["vocab_size"],
            embed_rows=target.get("embed_rows") or target["vocab_size"],
            prefix=target["prefix"],
            grid=(rows, columns),
            image_size=rows << (len(vq["multipliers"]) - 1),
            vq_parameters=stored(folder / "vq.safetensors"),
            vq_channels=vq["channels"],
            qk_norm=target["qk_norm"],
            drafter={
                "layers": 1,
                "embed_rows": target["vocab_size"],
                "input_norm": config["drafter"].get("input_norm", False),
                "qk_norm": target["qk_norm"],
            },
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"cannot read the model in {folder}", repr(error)) from error


def stored(file: Path) -> int:
    """Numbers in a safetensors file: its header has the shapes (format: huggingface/safetensors)."""
    with open(file, "rb") as data:
        header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
    return sum(prod(about["shape"]) for name, about in header.items() if name != "__metadata__")


def parse_memory(text: str) -> int:
    """Bytes of `24GB`, `96 GiB`, `500MB`.

    Raises:
        OptionError: not an amount.
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?)(i?)b?\s*", text.lower())
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or number <= 0:
        raise OptionError(f"--memory is {text!r}", "not an amount", "24GB or 96GiB")
    unit = UNITS[match[2]]
    if match[3]:
        unit = 1024 ** list(UNITS).index(match[2])
    return int(number * unit)


def find_memory(device: str, memory: str | None) -> tuple[int | None, str, str]:
    """Bytes of a device, where the number is from, and the device's best dtype.

    `NAME:24GB` says how much a device has; otherwise it is asked, which loads torch.

    Raises:
        DeviceError: unknown device.
    """
    name, _, amount = device.partition(":")
    given = memory or amount
    if given:
        return parse_memory(given), "as given", "bfloat16"
    from contextlib import closing

    from lantern_hpu.backends import BACKENDS, get_backend, prepare

    prepare(name)
    try:
        with closing(get_backend(name)) as backend:
            total, where = backend.memory().total, f"device {backend.name}"
            where += " does not tell its memory" * (total is None)
            return total, where, next(iter(backend.dtypes))
    except DeviceError as error:
        if name not in BACKENDS:
            raise
        return None, f"no {name} device can be asked here ({error.why})", "bfloat16"


# ------------------------------------------------------------------------------------ the command


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.plan", description="How much memory drawing with a model takes."
    )
    parser.add_argument("name", metavar="NAME", help="builtin, a known model, or a model folder")
    parser.add_argument("--device", default="auto", help="auto, a device, or DEVICE:24GB (auto)")
    parser.add_argument("--memory", metavar="24GB", help="instead of asking the device")
    parser.add_argument("--batch-size", type=int, default=1, help="images decoded together (1)")
    parser.add_argument("--cfg-scale", type=float, help="1: without guidance, half the rows")
    parser.add_argument("--dtype", default="auto", help=f"auto, {', '.join(DTYPES)} (auto)")
    parser.add_argument("--method", help=f"{', '.join(METHODS)} (lantern++; ar without a drafter)")
    parser.add_argument("--tree", help=f"a named tree, or a .json file ({DEFAULT_TREE})")
    parser.add_argument(
        "--free-text", action="store_true", help="the text encoder is freed after the prompts"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def setup_of(args: argparse.Namespace, geometry: Geometry, dtype: str) -> Setup:
    """What the options mean for a model."""
    method = args.method or ("lantern++" if geometry.drafter else "ar")
    tree, relaxation = choose_method(method, args.tree)
    return Setup(
        dtype=dtype if args.dtype == "auto" else args.dtype,
        batch_size=args.batch_size,
        guidance=args.cfg_scale != 1,
        tree=tree,
        text=not args.free_text,
        neighbours=relaxation.k if method in DEFAULT_RELAXATION else 0,
    )


def run(args: argparse.Namespace) -> None:
    geometry = geometry_of(args.name)
    memory, where, dtype = find_memory(args.device, args.memory)
    setup = setup_of(args, geometry, dtype)
    rows = estimate_setup(geometry, setup)
    if args.json:
        facts = {"bytes": dict(rows), "total": total(rows), "memory": memory, "memory_from": where}
        fits = None if memory is None else total(rows) <= memory
        print(json.dumps({**facts, "fits": fits}, indent=2))
        return
    print(report(args.name, geometry, setup))
    if memory is None:
        print(f"{where}\n  try: --memory 24GB says whether it fits")
    else:
        print("\n".join(verdict(geometry, setup, memory, where)))


def main(argv: Sequence[str] | None = None) -> int:
    """The `plan` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
