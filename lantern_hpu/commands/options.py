"""Options that several commands have: how they are declared, and what they mean. Needs no torch."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from typing import Any

from lantern_hpu.backends import BACKENDS
from lantern_hpu.backends.hpu.releases import DEFAULT, RELEASES, choose
from lantern_hpu.graphs import RUNNERS
from lantern_hpu.methods.relaxation import PRESETS, RelaxationOptions
from lantern_hpu.methods.request import Sampling
from lantern_hpu.methods.setting import Setting, window_tree
from lantern_hpu.methods.table import AUTO, DEFAULT_TREE, DEFAULT_WINDOW, METHODS
from lantern_hpu.models.files.parts import Given
from lantern_hpu.models.options import KEPT, DeviceOptions
from lantern_hpu.tree import DYNAMIC, DynamicTree
from lantern_hpu.tree.named import NAMED

Group = argparse._ActionsContainer  # a parser, or a group of one


def taken(kind: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a dataclass that a command has options for and that were given."""
    found = {field.name: getattr(args, field.name, None) for field in fields(kind)}
    return {name: value for name, value in found.items() if value is not None}


# ------------------------------------------------------------------------------------ model and device


def add_device_options(group: Group, graphs: bool = True) -> None:
    """`--device`, `--dtype`, and `--graphs` unless a command settles it."""
    add = group.add_argument
    add("--device", default="auto", help=f"auto, {', '.join(BACKENDS)} (auto)")
    add("--dtype", help="auto, or one the device offers (auto)")
    if graphs:
        add("--graphs", default="auto", help=f"auto, {', '.join(RUNNERS)} (auto)")


def add_running_options(group: Group) -> None:
    """What else decides how a model runs."""
    add = group.add_argument
    kept = f"where a text encoder stays once the prompts are encoded: {', '.join(KEPT)} (host)"
    emulator = "with --device hpu: an emulator of its contract, for machines without one"
    add("--keep-text", default="host", help=kept)
    add("--emulate", action="store_true", help=emulator)
    add_bridge_option(group)
    add("--kernels", default="auto", help="auto: the device's fused ones; plain: torch's (auto)")
    add_processor_options(group)
    add_quantize_option(group)


def add_bridge_option(group: Group) -> None:
    """Which release of Gaudi's software an emulator stands in for."""
    what = f"release of Gaudi's software to emulate: {', '.join(RELEASES)} ({DEFAULT.name})"
    group.add_argument("--bridge", metavar="RELEASE", help=what)


def add_processor_options(group: Group) -> None:
    """What is left to the clock on a processor."""
    packed = "packed once for the processor, half (float16, packed), plain, or auto: the fastest"
    group.add_argument("--layout", help=f"of the matrices: {packed} (auto)")
    threads = "of the processor; 0 for the fastest number (0)"
    group.add_argument("--threads", type=int, metavar="N", help=threads)


def add_quantize_option(group: Group) -> None:
    group.add_argument("--quantize", metavar="int8", help="the target's weights in 8 bits")


def add_stretch_option(group: Group) -> None:
    """`--stretch`; which names there are is the zoo's to say."""
    what = "widen the model and its drafter to a known one's sizes: the same pictures at its cost (llamagen-xl)"
    group.add_argument("--stretch", metavar="NAME", help=what)


def device_options(args: argparse.Namespace) -> DeviceOptions:
    """The options of a device; `--bridge` holds from here on, also in the processes that this one starts.

    Raises:
        OptionError: one is out of range.
    """
    choose(getattr(args, "bridge", None))
    return DeviceOptions(**taken(DeviceOptions, args))


def add_part_options(group: Group) -> None:
    """Parts in place of the model's own, under the names that `Given` has for them."""
    add = group.add_argument
    text = "T5, the features it made (.npy, .safetensors, a folder of .npy), or the tokenizer"
    add("--drafter", help="a published one, or one of lantern_hpu.train")
    add("--vq", metavar="FILE", help="the VQ tokenizer")
    add("--text-encoder", dest="text", metavar="PATH", help=text)
    add("--neighbours", metavar="FILE.npy", help="nearest codes")
    add("--image-size", type=int, help="pixels, where a checkpoint does not say its own")


def given_parts(args: argparse.Namespace) -> Given:
    """Parts named on the command line."""
    return Given(**taken(Given, args))


# ------------------------------------------------------------------------------------ method and sampling


def add_method_options(group: Group) -> None:
    """`--method`, `--tree` and the relaxation."""
    add = group.add_argument
    methods = "; ".join(f"{name}: {method.about}" for name, method in METHODS.items())
    add("--method", help=f"auto: the fastest measured on the device; {methods} (auto)")
    add(
        "--tree",
        help=f"{', '.join(NAMED)}, a .json file, or {AUTO}: the one that lantern_hpu.lab.tune found for this model "
        f"and device ({DEFAULT_TREE}); for eagle2 and lantern {DYNAMIC}, or "
        f"{DYNAMIC}:KxExN for top-k K, E expansions and N drafts ({DynamicTree().name})",
    )
    add("--window", type=int, metavar="W", help=f"drafts of a window ({DEFAULT_WINDOW})")
    add(
        "--window-tree",
        metavar="KxD",
        help="sjd-pac: K siblings at the first D levels of the window (3x3)",
    )
    lenders = "neighbours that may stand in (lantern: 1000, lantern++: 10)"
    annealed = "annealed: weight OMEGA exp(-NU i - MU) of a draft i after the first; exact where that is at most 1"
    left = "what is left after a relaxed rejection: sound, or official as published (sound)"
    add("--relax", metavar="PRESET", help=", ".join(PRESETS))
    add("--relax-k", type=int, help=lenders)
    add("--relax-delta", type=float, help="additive bound, 0 to 1 (lantern: 0.2)")
    add("--relax-lambda", type=float, help="multiplicative bound, 1 or more (lantern++: 5)")
    add("--relax-omega", type=float, help=annealed)
    add("--relax-nu", type=float, metavar="NU", help="see omega (0)")
    add("--relax-mu", type=float, metavar="MU", help="see omega (0)")
    clusters = "squared distance in the codebook within which codes stand in for a draft (gsd: 0.5)"
    add("--relax-distance", type=float, metavar="D", help=clusters)
    add("--relax-ranks", type=int, metavar="N", help="of them, ranks up and down (gsd: 7)")
    add("--relax-gap", type=float, metavar="P", help="of them, in probability (gsd: 0.15)")
    add("--residual", help=left)


def setting_of(args: argparse.Namespace) -> Setting:
    """One setting of `--method`, `--tree`, `--window` and the relaxation.

    Raises:
        OptionError, TreeError: they contradict each other, or one is out of range.
    """
    method = args.method or AUTO
    setting = Setting.of(method)
    tree = window_tree(setting.method, args.tree, args.window, args.window_tree)
    bounds = relaxation_options(args).relaxation(METHODS[setting.drafting].relaxation)
    return Setting.of(method, bounds, tree)


def relaxation_options(args: argparse.Namespace) -> RelaxationOptions:
    return RelaxationOptions(
        k=args.relax_k,
        delta=args.relax_delta,
        lam=args.relax_lambda,
        omega=args.relax_omega,
        nu=args.relax_nu,
        mu=args.relax_mu,
        distance=args.relax_distance,
        ranks=args.relax_ranks,
        gap=args.relax_gap,
        residual=args.residual,
        preset=args.relax,
    )


def add_sampling_options(group: Group) -> None:
    add = group.add_argument
    add("--cfg-scale", type=float, help="guidance; 1 is off")
    add("--temperature", type=float, help="0 is greedy")
    add("--top-k", type=int, help="0 is off")
    add("--top-p", type=float, help="1 is off")


def sampling_options(args: argparse.Namespace, default: Sampling) -> Sampling:
    """The model's settings with the ones that were given put in."""
    return replace(default, **taken(Sampling, args))
