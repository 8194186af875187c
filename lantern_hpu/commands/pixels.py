"""Make pictures of saved tokens; of the model only its VQ tokenizer is loaded.

    python -m lantern_hpu.generate --model MODEL --prompt "a red apple" --save-tokens tokens.npz
    lantern-hpu pixels tokens.npz --model MODEL --output pictures

The pictures are those that `generate` makes of these tokens, and carry what the file says of how they came about.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lantern_hpu.backends import prepare
from lantern_hpu.commands import options
from lantern_hpu.errors import OptionError, WeightsError, exit_code
from lantern_hpu.files import check_free, write_file
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.files.names import VQ

if TYPE_CHECKING:
    from lantern_hpu.results.images import SavedTokens


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern-hpu pixels", description="Make pictures of saved tokens."
    )
    add = parser.add_argument
    add("tokens", type=Path, metavar="TOKENS.npz", help="of `generate --save-tokens`; or a .npy")
    add("--model", default="builtin", help="that drew them (builtin)")
    options.add_part_options(parser)
    options.add_device_options(parser, graphs=False)
    add("--output", type=Path, default=Path("out"), help="a .png file, or a folder (out)")
    add("--force", action="store_true", help="replace existing files")
    return parser


def check_tokens(tokens: NDArray[np.int64], config: TransformerConfig, file: Path) -> None:
    """
    Args:
        tokens: [images, N].

    Raises:
        OptionError: they are no pictures of a model of these sizes.
    """
    from lantern_hpu.decode.pixels import codes_of

    what, hint = f"the tokens in {file} are of another model", "--model with the one that drew them"
    if tokens.shape[1] != config.tokens:
        why = f"a picture of them has {tokens.shape[1]}, the model's have {config.tokens}"
        raise OptionError(what, why, hint)
    codes = codes_of(config, tokens)  # [images, codes of a picture]
    if codes.min() < 0 or codes.max() >= config.codes:
        why = f"they go from {codes.min()} to {codes.max()}, its codes from 0 to {config.codes - 1}"
        raise OptionError(what, why, hint)


def check_tokenizer(saved: SavedTokens, digest: str, file: Path) -> None:
    """Raise a WeightsError if the tokens were drawn beside another tokenizer."""
    known = [one.get("config", {}).get("weights", {}).get(VQ) for one in saved.metadata]
    if any(other not in (None, digest) for other in known):
        what = f"the tokens in {file} are of another VQ tokenizer"
        raise WeightsError(what, "it has other weights", "--model and --vq as they were drawn with")


def decode_saved(args: argparse.Namespace) -> str:
    """The whole command after parsing. -> what was done"""
    from lantern_hpu.results.images import encode, image_files, read_saved_tokens, with_metadata

    saved = read_saved_tokens(args.tokens)
    files, _ = image_files(args.output, saved.prompts, False)
    check_free(files, args.force)
    device = options.device_options(args)
    prepare(device.device, "eager")
    from tqdm import tqdm

    from lantern_hpu.backends import get_backend
    from lantern_hpu.decode.pixels import decode_pixels
    from lantern_hpu.models.files.load import open_model
    from lantern_hpu.zoo.find import find_parts

    opened = open_model(find_parts(args.model, options.given_parts(args), spared=("text",)))
    config = opened.config.target
    check_tokens(saved.tokens, config, args.tokens)
    with closing(get_backend(device.device, "eager")) as backend, backend.errors():
        vq, digest = opened.load_vq(opened.source.weights(), backend.device)
        check_tokenizer(saved, digest, args.tokens)
        for file, row, settings in zip(
            tqdm(files, unit="image"), saved.tokens, saved.metadata, strict=True
        ):
            (image,) = decode_pixels(vq, config, backend, row[None])
            write_file(
                file, with_metadata(image, settings) if settings else encode(image), args.force
            )
    return f"{len(files)} image(s) -> {args.output}"


def main(argv: Sequence[str] | None = None) -> int:
    """The `decode` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: print(decode_saved(args)))
