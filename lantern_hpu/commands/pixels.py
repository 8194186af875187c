"""Make pictures of saved tokens; of the model only what makes pixels is loaded.

    python -m lantern_hpu.generate --model MODEL --prompt "a red apple" --save-tokens tokens.npz
    lantern-hpu pixels tokens.npz --model MODEL --output pictures

The pictures are those that `generate` makes of these tokens, and carry what the file says of how they came about.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lantern_hpu.backends import DeviceOptions, prepare
from lantern_hpu.commands import options
from lantern_hpu.errors import OptionError, WeightsError, exit_code
from lantern_hpu.files import (
    check_content,
    check_free,
    check_regular,
    reported_as,
    some_names,
    write_file,
)
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.files.names import PICKLES, SAFE, VQ, PartOverrides

if TYPE_CHECKING:
    from PIL import Image

    from lantern_hpu.models.files.load import OpenedModel
    from lantern_hpu.results.outputs import SavedTokens


CONTAINERS = (".npy", ".npz", SAFE)


def make_parser() -> argparse.ArgumentParser:
    about = "Decode saved tokens to images."
    parser = options.Parser("lantern-hpu pixels", description=about)
    add = parser.add_argument
    tokens = "tokens of `generate --save-tokens`, or codes: .npy, .npz, .safetensors, a folder"
    add("tokens", type=options.file_path, metavar="TOKENS.npz", help=tokens)
    add("--model", default="builtin", help="model that the tokens are of (builtin)")
    output = "a .png file, or a folder (out)"
    add("--output", type=options.output_path, default="out", help=output)
    add("--force", action="store_true", help="replace existing files")
    options.add_fields(parser, PartOverrides, "vq")
    options.add_device_options(parser, graphs=False)
    return parser


def read_tokens(path: Path, config: TransformerConfig) -> SavedTokens:
    """The tokens of a file, or of all files of a folder in the order of the numbers in their names.

    Raises:
        OptionError, WeightsError: they cannot be read.
    """
    from lantern_hpu.results.outputs import SavedTokens

    if not path.is_dir():
        return read_file(path, config)
    files = [file for file in path.iterdir() if file.suffix in CONTAINERS]
    files.sort(key=lambda file: [part.zfill(20) for part in re.split(r"(\d+)", file.name)])
    if not files:
        raise OptionError(f"{path} holds no tokens", f"expected {', '.join(CONTAINERS)}")
    parts = [read_file(file, config) for file in files]
    for part, file in zip(parts, files, strict=True):
        check_tokens(part.tokens, config, file)
    tokens = np.concatenate([part.tokens for part in parts])
    prompts = [prompt for part in parts for prompt in part.prompts]
    metadata = [about for part in parts for about in part.metadata]
    tokenizers = {part.tokenizer for part in parts if part.tokenizer}
    if len(tokenizers) > 1:
        raise OptionError(f"the files in {path} are of several VQ tokenizers")
    return SavedTokens(tokens, prompts, metadata, "".join(tokenizers))


def read_file(path: Path, config: TransformerConfig) -> SavedTokens:
    from lantern_hpu.results.outputs import read_saved_tokens

    held = held_arrays(path)
    fitting = {name: fit for name in held if (fit := picture_rows(held[name], config)) is not None}
    if "tokens" in held:
        return read_saved_tokens(path, held | {"tokens": fitting.get("tokens", held["tokens"])})
    if len(held) == 1 or len(fitting) == 1:
        return read_saved_tokens(path, {"tokens": next(iter((fitting or held).values()))})
    rows, columns = config.grid
    found = some_names(f"{name} {list(array.shape)}" for name, array in held.items())
    why = f"expected one array of {config.tokens} or {rows} x {columns} codes a picture"
    raise OptionError(f"cannot read tokens from {path}", f"{why}, it has {found or 'none'}")


def held_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file by name, of safetensors those of whole numbers."""
    from lantern_hpu.models.files.checkpoint import open_safetensors
    from lantern_hpu.results.outputs import read_arrays

    if path.suffix in PICKLES:
        why = f"it is a file of torch.save; read are {', '.join(CONTAINERS)}"
        hint = "numpy.save('tokens.npy', tokens) writes one"
        raise OptionError(f"cannot read tokens from {path}", why, hint)
    if path.suffix != SAFE:
        return read_arrays(path)
    check_regular(path)
    check_content(path)
    stored = open_safetensors(path)
    tensors = {name: stored.read(name) for name in stored.shapes}
    return {
        name: tensor.numpy()
        for name, tensor in tensors.items()
        if not (tensor.is_floating_point() or tensor.is_complex())
    }


def picture_rows(array: NDArray[Any], config: TransformerConfig) -> NDArray[np.int64] | None:
    """Tokens [images, N] of [..., N] or [..., rows, columns]; None where they do not fit.

    What closes a row is added where codes lack it.
    """
    if array.dtype.kind not in "iu":
        return None
    rows, columns = config.grid
    grids = array.astype(np.int64)
    if array.shape[-1:] == (config.tokens,):
        return grids.reshape(-1, config.tokens)
    if array.shape[-1:] == (rows * columns,):
        grids = grids.reshape(-1, rows, columns)
    if config.row_ends and grids.shape[-2:] == (rows, columns):
        grids = np.insert(grids, columns, config.vocab_size - 1, axis=-1)
    fits = grids.shape[-2:] == (rows, config.columns)
    return grids.reshape(-1, config.tokens) if fits else None


def check_tokens(tokens: NDArray[np.int64], config: TransformerConfig, file: Path) -> None:
    """Raise an OptionError where tokens [images, N] are not of the model."""
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
    """Raise a WeightsError unless one of the digests `same`, of the tokenizer's file and of its weights, is stated."""
    known = [one.get("config", {}).get("weights", {}).get(VQ) for one in saved.metadata]
    stated = {saved.tokenizer} if saved.tokenizer else {other for other in known if other}
    if not stated <= set(same):
        what = f"the tokens in {file} are of another VQ tokenizer"
        raise WeightsError(what, "it has other weights", "--model and --vq as they were drawn with")


def diffused(
    saved: SavedTokens, opened: OpenedModel, file: Path, device: DeviceOptions
) -> Iterator[Image.Image]:
    """Pictures of codes that a diffusion model reads, one at a time."""
    from lantern_hpu.backends.base import get_backend
    from lantern_hpu.models.pictures import DiffusionPixels

    assert opened.pixels is not None
    config, grid = opened.config.target, saved.grid
    what = f"the tokens in {file} become no pictures"
    if len(grid) != 2 or len(saved.seeds) != len(saved.tokens):
        hint = "a .npz of `generate --save-tokens`"
        raise OptionError(what, "their grid and seeds are not known", hint)
    if any(one.get("config", {}).get("sources") for one in saved.metadata):
        hint = "`generate --image` with the same pictures and `--output`"
        raise OptionError(what, "they were drawn from pictures, which it reads as well", hint)
    if saved.tokens.shape[1] != grid[0] * grid[1]:
        why = f"{saved.tokens.shape[1]} a picture, the grid has {grid[0]} x {grid[1]}"
        raise OptionError(what, why)
    check_codes(saved.tokens, config, f"the tokens in {file} are of another model")
    with reported_as(what):
        sized = config.of_grid((grid[0], grid[1]))
    backend = get_backend(device.device, "eager")
    with backend.errors():
        dtype, _ = backend.number_format(device.dtype, config.parameters)
        pictures = DiffusionPixels(opened.pixels, dtype, backend.device)
        for row, prompt, seed in zip(saved.tokens, saved.prompts, saved.seeds, strict=True):
            yield from pictures(row[None], sized, [prompt], [seed])


def decoded(
    saved: SavedTokens, opened: OpenedModel, file: Path, device: DeviceOptions
) -> Iterator[Image.Image]:
    """Pictures by the model's VQ tokenizer, one at a time."""
    from lantern_hpu.backends.base import get_backend
    from lantern_hpu.decode.pixels import codes_of, decode_codes
    from lantern_hpu.models.files.load import load_vq

    config = opened.config.target
    check_tokens(saved.tokens, config, file)
    backend = get_backend(device.device, "eager")
    with backend.errors():
        stored = opened.weights().vq
        assert stored is not None and opened.config.vq is not None
        vq, digest = load_vq(opened.config.vq, stored, backend.device)
        check_tokenizer(saved, {digest, stored.fingerprint(vq)}, file)
        for row in saved.tokens:
            yield from decode_codes(vq, config, backend, codes_of(config, row[None]))


def decode_saved(args: argparse.Namespace) -> str:
    """The whole command after parsing. -> what was done"""
    from lantern_hpu.results.images import encode, with_metadata
    from lantern_hpu.results.outputs import image_files

    given, device = options.from_args(PartOverrides, args), options.from_args(DeviceOptions, args)
    if not os.path.exists(args.tokens):
        raise OptionError(f"cannot read {args.tokens}", "No such file or folder")
    prepare(device.device, "eager")
    from tqdm import tqdm

    from lantern_hpu.models.files.load import open_model
    from lantern_hpu.zoo.find import find_parts

    opened = open_model(find_parts(args.model, given, optional=("text",)))
    opened.check_pictures()
    saved = read_tokens(args.tokens, opened.config.target)
    files, _ = image_files(args.output, saved.prompts, False)
    check_free(files, args.force)
    make = decoded if opened.pixels is None else diffused
    named = zip(tqdm(files, unit="image"), saved.metadata, strict=True)
    # Files last, so that what makes the pictures is given back once all are made
    pictures = make(saved, opened, args.tokens, device)
    for image, (file, settings) in zip(pictures, named, strict=True):
        data = with_metadata(image, settings) if settings else encode(image)
        write_file(file, data, args.force)
    return f"{len(files)} image(s) -> {args.output}"


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return exit_code(lambda: print(decode_saved(args)))
