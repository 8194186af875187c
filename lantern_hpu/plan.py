"""Whether a model fits on a device, before anything is loaded.

    python -m lantern_hpu.plan llamagen-t2i-512 --memory 24GB --batch-size 4

See `lantern_hpu/memory.py` for what is counted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import BACKENDS, get_backend, prepare
from lantern_hpu.config import (
    AUTO,
    DEFAULT_RELAXATION,
    DEFAULT_TREE,
    KEPT,
    METHODS,
    choose_method,
)
from lantern_hpu.errors import DeviceError, OptionError, choices, exit_code
from lantern_hpu.generate import add_part_options, given_parts
from lantern_hpu.memory import (
    DTYPES,
    Device,
    Model,
    Setup,
    capacity,
    largest_phase,
    of_files,
    of_known,
    phases,
    total,
    verdict,
)
from lantern_hpu.parts import Given, exists, resolve
from lantern_hpu.registry import entries, find, get, size, sources

if TYPE_CHECKING:
    from lantern_hpu.backends.base import Backend
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def find_model(name: str, given: Given) -> Model:
    """What there is to count of a known model, the embedded one, a folder or a weights file.

    Raises:
        OptionError: there is no such model. WeightsError: its files cannot be read, or parts are missing.
    """
    if name == "builtin" or exists(Path(name)) or given != Given():
        return of_files(resolve(name, given))
    if find(name) is None and not sources(name):
        hint = choices(["builtin", *entries(), "a folder or a weights file"])
        raise OptionError(f"unknown model {name!r}", hint=hint)
    return of_known(get(name))


# ------------------------------------------------------------------------------------ devices


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


def find_device(device: str, memory: str | None) -> Device:
    """A device by name. `NAME:24GB` says how much it has; otherwise it is asked, which loads torch.

    Raises:
        DeviceError: unknown device. OptionError: not an amount of memory.
    """
    name, _, amount = device.partition(":")
    text = memory or amount
    given = parse_memory(text) if text else None
    if given and name not in BACKENDS:
        return Device(given, "as given")
    prepare(name)
    if given:
        return described(unasked(name), given, "as given")
    try:
        with closing(get_backend(name)) as backend:
            found, where = backend.memory().total, f"device {backend.name}"
            return described(backend, found, where + " does not tell its memory" * (found is None))
    except DeviceError as error:
        if name not in BACKENDS:
            raise
        why = f"no {name} device can be asked here ({error.why})"
        return described(unasked(name), None, why)


def unasked(name: str) -> Backend:
    """A backend whether or not its device is here: good for what is the same on all such devices."""
    module, _, cls = BACKENDS[name].partition(":")
    backend: Backend = getattr(import_module(module), cls)()
    return backend


def described(backend: Backend, memory: int | None, where: str) -> Device:
    best = next(iter(backend.dtypes))
    return Device(memory, where, best, backend.quantized, backend.is_host)


# ------------------------------------------------------------------------------------ the command


def report(name: str, model: Model, setup: Setup) -> str:
    """The table of the phase that needs most, with its total and those of the others."""
    phase, rows = largest_phase(model, setup)
    guided = "with guidance" if setup.guidance else "without guidance"
    images = f"{setup.batch_size} image{'s' * (setup.batch_size > 1)} at a time"
    slots = capacity(model.sizes, setup.tree)
    dtype = f"{setup.dtype}, {setup.quantize} blocks" if setup.quantize else setup.dtype
    head = f"{name}, {dtype}, {images}, {guided}, tree {setup.tree.name}, {slots} slots a row"
    sums = [(f"total while {phase}", total(rows))]
    sums += [(f"(while {p}", total(r)) for p, r in phases(model, setup).items() if p != phase]
    wide = max(len(label) for label, _ in rows + sums)
    lines = [f"  {label:<{wide}}  {size(count):>9}" for label, count in rows + sums]
    lines = [line + ")" * line.startswith("  (") for line in lines]
    if model.text is None:
        lines.append("  the text encoder is not here and not counted: --text-encoder FOLDER")
    return "\n".join([head, *lines])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.plan", description="How much memory drawing with a model takes."
    )
    parser.add_argument("name", metavar="NAME", help="what `generate --model` takes")
    parser.add_argument("--device", default="auto", help="auto, a device, or DEVICE:24GB (auto)")
    parser.add_argument("--memory", metavar="24GB", help="instead of asking the device")
    parser.add_argument("--batch-size", type=int, default=1, help="images decoded together (1)")
    parser.add_argument("--cfg-scale", type=float, help="1: without guidance, half the rows")
    parser.add_argument("--dtype", default="auto", help=f"auto, {', '.join(DTYPES)} (auto)")
    parser.add_argument("--quantize", metavar="int8", help="the target's weights in 8 bits")
    parser.add_argument("--method", help=f"{', '.join(METHODS)} (lantern++; ar without a drafter)")
    parser.add_argument("--tree", help=f"a named tree, or a .json file ({DEFAULT_TREE})")
    parser.add_argument(
        "--keep-text",
        default="host",
        help=f"where a text encoder goes once the prompts are encoded: {', '.join(KEPT)} (host)",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    add_part_options(parser.add_argument_group("parts in place of the model's own"))
    return parser


def setup_of(args: argparse.Namespace, model: Model, device: Device) -> Setup:
    """What the options mean for a model on a device.

    Raises:
        OptionError: an option is out of range. DeviceError: the device offers no such weights.
    """
    if args.quantize is not None and args.quantize not in device.quantized:
        hint = choices(device.quantized) if device.quantized else "--dtype bfloat16"
        raise DeviceError(f"this device does not offer {args.quantize!r} weights", hint=hint)
    own = args.method not in (None, AUTO)
    method = args.method if own else "lantern++" if model.drafter else "ar"
    tree, relaxation = choose_method(method, args.tree)
    # The published residual looks one neighbour further; a code has one neighbour less than there are codes.
    most = min(relaxation.k + 1, model.sizes.vocab - 1) if method in DEFAULT_RELAXATION else 0
    return Setup(
        dtype=device.dtype if args.dtype == "auto" else args.dtype,
        batch_size=args.batch_size,
        guidance=args.cfg_scale != 1,
        tree=tree,
        keep_text=args.keep_text,
        neighbours=most,
        quantize=args.quantize,
        is_host=device.is_host,
    )


def facts(model: Model, setup: Setup, device: Device) -> dict[str, Any]:
    """What the report says, for programs; `fits` is None where that is unknown."""
    phase, rows = largest_phase(model, setup)
    need, memory, unknown = total(rows), device.memory, model.text is None
    fits = None if memory is None or (unknown and need <= memory) else need <= memory
    return {
        "phase": phase,
        "bytes": dict(rows),
        "total": need,
        "phases": {name: total(found) for name, found in phases(model, setup).items()},
        "not_counted": ["text encoder weights"] if unknown else [],
        "memory": memory,
        "memory_from": device.where,
        "fits": fits,
    }


def run(args: argparse.Namespace) -> None:
    model = find_model(args.name, given_parts(args))
    device = find_device(args.device, args.memory)
    setup = setup_of(args, model, device)
    if args.json:
        print(json.dumps(facts(model, setup, device), indent=2))
        return
    print(report(args.name, model, setup))
    print("\n".join(verdict(model, setup, device)))


def main(argv: Sequence[str] | None = None) -> int:
    """The `plan` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
