"""Make pictures of saved tokens; of the model only what makes pixels is loaded.

    python -m lantern_hpu.generate --model MODEL --prompt "a red apple" --save-tokens tokens.npz
    lantern-hpu pixels tokens.npz --model MODEL --output pictures

The pictures are those that `generate` makes of these tokens, and carry what the file says of how they came about.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lantern_hpu.backends import prepare
from lantern_hpu.commands import options
from lantern_hpu.errors import OptionError, WeightsError, exit_code, option
from lantern_hpu.files import check_free, write_file
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.files.names import VQ, Given
from lantern_hpu.models.options import DeviceOptions

if TYPE_CHECKING:
    from PIL import Image

    from lantern_hpu.models.files.load import Opened
    from lantern_hpu.results.images import SavedTokens


@dataclass(frozen=True)
class PixelsRequest:
    """Which tokens, of which model, and where the pictures go."""

    tokens: Path = option(
        MISSING,
        "tokens of `generate --save-tokens`, or a .npy",
        metavar="TOKENS.npz",
        positional=True,
    )
    model: str = option("builtin", "model that the tokens are of")
    output: Path = option(Path("out"), "a .png file, or a folder")
    force: bool = option(False, "replace existing files")
    given: Given = field(default_factory=Given)
    device: DeviceOptions = field(default_factory=DeviceOptions)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern-hpu pixels", description="Decode saved tokens to images."
    )
    options.add_fields(parser, PixelsRequest)
    options.add_part_options(parser)
    options.add_device_options(parser, graphs=False)
    return parser


def check_tokens(tokens: NDArray[np.int64], config: TransformerConfig, file: Path) -> None:
    """
    Args:
        tokens: [images, N].
    """
    from lantern_hpu.decode.pixels import codes_of

    what, hint = f"the tokens in {file} are of another model", "--model with the one that drew them"
    if tokens.shape[1] != config.tokens:
        why = f"a picture of them has {tokens.shape[1]}, the model's have {config.tokens}"
        raise OptionError(what, why, hint)
    ends = tokens.reshape(-1, config.grid[0], config.columns)[:, :, config.grid[1] :]
    if (ends != config.vocab_size - 1).any():
        why = f"a row of codes does not end in token {config.vocab_size - 1}"
        raise OptionError(what, why, hint)
    check_codes(codes_of(config, tokens), config, what)


def check_codes(codes: NDArray[np.int64], config: TransformerConfig, what: str) -> None:
    """Raise an OptionError, which says `what`, unless all are codes of the model."""
    if codes.min() < 0 or codes.max() >= config.codes:
        why = f"they go from {codes.min()} to {codes.max()}, its codes from 0 to {config.codes - 1}"
        raise OptionError(what, why, "--model with the one that drew them")


def check_tokenizer(saved: SavedTokens, same: Collection[str], file: Path) -> None:
    """
    Args:
        same: digests of the tokenizer at hand: of its file, and of its weights in any container.
    """
    known = [one.get("config", {}).get("weights", {}).get(VQ) for one in saved.metadata]
    stated = {saved.tokenizer} if saved.tokenizer else {other for other in known if other}
    if not stated <= set(same):
        what = f"the tokens in {file} are of another VQ tokenizer"
        raise WeightsError(what, "it has other weights", "--model and --vq as they were drawn with")


def diffused(saved: SavedTokens, opened: Opened, asked: PixelsRequest) -> Iterator[Image.Image]:
    """Pictures of codes that a diffusion model reads, one at a time."""
    from lantern_hpu.backends import get_backend
    from lantern_hpu.models.diffusion import DiffusionPixels

    folder, config, file = opened.pixels, opened.config.target, asked.tokens
    assert folder is not None
    grid, what = saved.grid, f"the tokens in {file} become no pictures"
    if len(grid) != 2 or len(saved.seeds) != len(saved.tokens):
        hint = "a .npz of `generate --save-tokens`"
        raise OptionError(what, "their grid and seeds are not known", hint)
    if saved.tokens.shape[1] != grid[0] * grid[1]:
        why = f"{saved.tokens.shape[1]} a picture, the grid has {grid[0]} x {grid[1]}"
        raise OptionError(what, why)
    check_codes(saved.tokens, config, f"the tokens in {file} are of another model")
    sized = config.of_grid((grid[0], grid[1]))
    with closing(get_backend(asked.device.device, "eager")) as backend, backend.errors():
        number = backend.tuning.dtype(asked.device.dtype, config.parameters)
        pictures = DiffusionPixels(folder, number, backend.device)
        for row, prompt, seed in zip(saved.tokens, saved.prompts, saved.seeds, strict=True):
            yield from pictures(row[None], sized, [prompt], [seed])


def decoded(saved: SavedTokens, opened: Opened, asked: PixelsRequest) -> Iterator[Image.Image]:
    """Pictures by the model's VQ tokenizer, one at a time."""
    from lantern_hpu.backends import get_backend
    from lantern_hpu.decode.pixels import decode_pixels
    from lantern_hpu.models.files.load import load_vq

    config = opened.config.target
    check_tokens(saved.tokens, config, asked.tokens)
    with closing(get_backend(asked.device.device, "eager")) as backend, backend.errors():
        stored = opened.weights().vq
        assert stored is not None and opened.config.vq is not None
        vq, digest = load_vq(opened.config.vq, stored, backend.device)
        check_tokenizer(saved, {digest, stored.fingerprint(vq)}, asked.tokens)
        for row in saved.tokens:
            yield from decode_pixels(vq, config, backend, row[None])


def decode_saved(asked: PixelsRequest) -> str:
    """The whole command after parsing. -> what was done"""
    from lantern_hpu.results.images import encode, image_files, read_saved_tokens, with_metadata

    saved, device = read_saved_tokens(asked.tokens), asked.device
    files, _ = image_files(asked.output, saved.prompts, False)
    check_free(files, asked.force)
    prepare(device.device, "eager")
    from tqdm import tqdm

    from lantern_hpu.models.files.load import open_model
    from lantern_hpu.zoo.find import find_parts

    opened = open_model(find_parts(asked.model, asked.given, spared=("text",)))
    make = decoded if opened.pixels is None else diffused
    named = zip(tqdm(files, unit="image"), saved.metadata, strict=True)
    # Files last, so that what makes the pictures is given back once all are made
    for image, (file, settings) in zip(make(saved, opened, asked), named, strict=True):
        data = with_metadata(image, settings) if settings else encode(image)
        write_file(file, data, asked.force)
    return f"{len(files)} image(s) -> {asked.output}"


def main(argv: Sequence[str] | None = None) -> int:
    """The `pixels` command; returns the exit code."""
    args = make_parser().parse_args(argv)

    def command() -> None:
        parts = {"given": options.given_parts(args), "device": options.device_options(args)}
        print(decode_saved(options.filled(PixelsRequest, args, **parts)))

    return exit_code(command)
