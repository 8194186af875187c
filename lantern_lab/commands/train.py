"""The `train` command.

    lantern-hpu train drafter --data prompts.txt --output my-drafter
    lantern-hpu train codes --data pictures --output codes.npz
    torchrun --nproc_per_node 4 -m lantern_hpu train drafter --data prompts.txt --output my-drafter

The target draws images of the prompts at its own sampling settings, the drafter learns from them - and from pictures as
tokens, if there are any; `train codes` makes those of files - and the weights with the most accepted drafts on held-out
images are kept. `generate --drafter my-drafter` uses them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lantern_hpu.backends import DeviceOptions, prepare
from lantern_hpu.commands.options import Parser, add_device_options, add_fields, from_args
from lantern_hpu.errors import exit_code
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.zoo.cards import MEASURED
from lantern_lab.train.options import (
    CodesRequest,
    TrainOptions,
    TrainRequest,
    check_output,
    check_training,
)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser("lantern-hpu train", description="Train a drafter; encode pictures for it.")
    commands = parser.add_subparsers(dest="command", required=True)
    drafter = commands.add_parser(
        "drafter", help="train an EAGLE drafter for a target model, from prompts"
    )
    add_fields(drafter, TrainRequest)
    add_fields(drafter, TrainOptions)
    add_device_options(drafter, graphs=False)
    add_fields(drafter, PartOverrides)
    drafter.only_keys("vq", "text_encoder", "image_size")
    codes = commands.add_parser("codes", help="encode pictures of your own for --tokens of drafter")
    add_fields(codes, CodesRequest)
    add_fields(codes, DeviceOptions, "device")
    add_fields(codes, PartOverrides, "vq", "image_size")
    codes.only_keys("vq", "image_size")
    return parser


def training_summary(report: dict[str, Any], folder: Path) -> str:
    depths = ", ".join(f"{share:.2f}" for share in report["eagle"]["by_depth"])
    methods = (name for name in MEASURED if name in report)
    each = ", ".join(f"{name} {report[name]['tokens_per_step']:.2f}" for name in methods)
    return (
        f"tokens a step on held-out prompts: {each}; accepted by depth {depths}\n"
        f"kept step {report['kept_step']} -> {folder}"
    )


def train_drafter(args: argparse.Namespace) -> None:
    device = replace(from_args(DeviceOptions, args), graphs="eager", layout="plain")
    parts = {"options": from_args(TrainOptions, args), "given": from_args(PartOverrides, args)}
    wanted = from_args(TrainRequest, args, device=device, **parts)
    check_training(wanted)
    prepare(wanted.device.device, wanted.device.graphs)  # before torch is imported
    from lantern_lab.train.drafter_training import train

    if report := train(wanted):
        print(training_summary(report, wanted.output))


def encode_pictures(args: argparse.Namespace) -> None:
    parts = {"given": from_args(PartOverrides, args), "device": from_args(DeviceOptions, args)}
    wanted = from_args(CodesRequest, args, **parts)
    check_output(wanted.output)
    prepare(wanted.device.device, "eager")  # before torch is imported
    from lantern_lab.train.codes import write_codes

    print(write_codes(wanted))


COMMANDS = {"drafter": train_drafter, "codes": encode_pictures}


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return exit_code(lambda: COMMANDS[args.command](args))
