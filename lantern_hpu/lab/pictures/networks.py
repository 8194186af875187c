"""The networks of the literature's metrics, by the libraries that keep them: torch-fidelity, transformers, open_clip.

Weights come from a path or a cache and are never downloaded. Each network turns pictures and captions into rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from lantern_hpu.errors import OptionError, WeightsError, needing
from lantern_hpu.files import reported_as
from lantern_hpu.lab.pictures.folder import read_picture
from lantern_hpu.lab.pictures.protocols import Library, Preset, Source
from lantern_hpu.lab.pictures.statistics import Array

BATCH = 16
INCEPTION_SIDE = 299
HPS_MODEL = "ViT-H-14"
Pictures = Iterator[Image.Image]
Network = Callable[[Pictures, Sequence[str]], dict[str, Array]]

# ------------------------------------------------------------------------------------ weights


def found(network: str, library: Library) -> Path | None:
    """Where the weights of a network are: as given, else in the caches of torch and the Hub."""
    given, source = library.given(network), library.preset.sources[network]
    if given is not None:
        return given if given.exists() else None
    hub = Path(torch.hub.get_dir()) / "checkpoints" / source.what
    if hub.exists():
        return hub
    return in_hub_cache(source)


def in_hub_cache(source: Source) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    folder = source.what.count("/") == 1
    repository, name = (source.what, "config.json") if folder else ("xswu/HPSv2", source.what)
    file = try_to_load_from_cache(repository, name)
    if not isinstance(file, str):
        return None
    return Path(file).parent if folder else Path(file)


def locate(library: Library) -> dict[str, Path]:
    """The weights of all networks that the metrics need.

    Raises:
        WeightsError: some are missing, all of them named; or a file is another than the published one.
    """
    places = {name: found(name, library) for name in library.networks()}
    sources = library.preset.sources
    missing = [sources[name] for name, place in places.items() if place is None]
    if missing:
        each = "; ".join(f"{one.what} ({one.where}), {one.option} PATH" for one in missing)
        hint = "--metrics with those whose weights are here"
        raise WeightsError("weights of metrics are missing", each, hint)
    here = {name: place for name, place in places.items() if place is not None}
    for name, place in here.items():
        if not library.any_weights:
            check_digest(place, sources[name])
    return here


def check_digest(file: Path, source: Source) -> None:
    """
    Raises:
        WeightsError: the file is not the published one.
    """
    if source.digest and not digest_of(file).startswith(source.digest):
        why = f"its SHA-256 does not begin with {source.digest}, so figures would not be comparable"
        hint = f"{source.what} of {source.where}; or --any-weights"
        raise WeightsError(f"{file} is not {source.what}", why, hint)


def digest_of(path: Path) -> str:
    """Of a file, or of all that lie in a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in (one for one in files if one.is_file()):
        digest.update(b"" if path.is_file() else file.name.encode())
        with open(file, "rb") as data:
            while block := data.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def safe(file: Path) -> dict[str, Any]:
    """A state dictionary.

    Raises:
        WeightsError: it is none, or holds more than tensors.
    """
    with reported_as(f"cannot read {file}"):
        try:
            state = torch.load(file, map_location=torch.get_default_device(), weights_only=True)
        except Exception as error:
            raise ValueError(str(error).splitlines()[0]) from error
        if not isinstance(state, dict):
            raise ValueError("it holds no weights by name")
        return state


# ------------------------------------------------------------------------------------ pictures


def cropped(image: Image.Image, preset: Preset) -> Image.Image:
    """A picture as the protocol compares it: whole, or the middle square at its size."""
    if preset.crop is None:
        return image
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return square.resize((preset.crop, preset.crop), Image.Resampling.LANCZOS)


def cleanly(image: Image.Image, side: int) -> Image.Image:
    """Resized as clean-fid does, channel by channel in floats; rounded to 8 bits, which clean-fid does not."""
    if image.size == (side, side):
        return image
    planes = [
        np.asarray(
            Image.fromarray(np.asarray(plane, np.float32)).resize(
                (side, side), Image.Resampling.BICUBIC
            )
        )
        for plane in image.split()
    ]
    return Image.fromarray(np.stack(planes, -1).clip(0, 255).round().astype(np.uint8))


def batches(images: Pictures) -> Iterator[Tensor]:
    """[b, 3, H, W] uint8, pictures of one size together."""
    for _, alike in groupby(images, key=lambda image: image.size):
        part: list[Tensor] = []
        for image in alike:
            part.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
            if len(part) == BATCH:
                yield torch.stack(part)
                part = []
        if part:
            yield torch.stack(part)


def gathered(parts: Sequence[Tensor]) -> Array:
    return np.asarray(torch.cat(list(parts)).double().numpy())


# ------------------------------------------------------------------------------------ networks


@contextmanager
def kept(package: str, purpose: str) -> Iterator[None]:
    """Around imports of a library: also one that is there and does not load, as a torchvision of another torch.

    Raises:
        OptionError: it cannot be used.
    """
    with needing(package, purpose, "evaluate"):
        try:
            yield
        except (RuntimeError, OSError, AttributeError) as error:
            raise ImportError(f"it does not load: {error}") from error


@contextmanager
def refused(place: Path) -> Iterator[None]:
    """Around the making of a network.

    Raises:
        WeightsError: the files are not its weights.
    """
    try:
        yield
    except (RuntimeError, OSError, KeyError, ValueError, TypeError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(f"{place} does not hold this network's weights", why) from error


def inception(file: Path, preset: Preset) -> Network:
    """Rows `inception` [n, 2048] and `logits` [n, 1008] of torch-fidelity's InceptionV3."""
    with kept("torch-fidelity", "it has the network of FID"):
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    safe(file)
    layers = ["2048", "logits_unbiased"]
    with refused(file):
        net = FeatureExtractorInceptionV3(
            "inception-v3-compat", layers, feature_extractor_weights_path=str(file)
        )

    def rows(images: Pictures, captions: Sequence[str]) -> dict[str, Array]:
        sized = (cleanly(image, INCEPTION_SIDE) if preset.clean else image for image in images)
        features, logits = zip(*map(net, batches(sized)), strict=True)
        return {"inception": gathered(features), "logits": gathered(logits)}

    return rows


def vgg(file: Path, preset: Preset) -> Network:
    """Rows `vgg` [n, 4096] of torch-fidelity's VGG16: fc2 before its ReLU."""
    with kept("torch-fidelity", "it has the network of precision and recall"):
        from torch_fidelity.feature_extractor_vgg16 import FeatureExtractorVGG16
    safe(file)
    with refused(file):
        net = FeatureExtractorVGG16("vgg16", ["fc2"], feature_extractor_weights_path=str(file))

    def rows(images: Pictures, captions: Sequence[str]) -> dict[str, Array]:
        return {"vgg": gathered([net(part)[0] for part in batches(images)])}

    return rows


def clip(folder: Path, preset: Preset) -> Network:
    """Rows `clip` [n]: cosine of picture and caption by transformers' CLIP, times the protocol's scale."""
    with kept("transformers", "it has CLIP"):
        from transformers import CLIPModel, CLIPProcessor
    with refused(folder):
        model = CLIPModel.from_pretrained(folder, local_files_only=True).eval()
        processor = CLIPProcessor.from_pretrained(folder, local_files_only=True)

    def rows(images: Pictures, captions: Sequence[str]) -> dict[str, Array]:
        found, texts = [], [preset.prefix + caption for caption in captions]
        for start, part in chunks(images):
            given = processor(
                text=texts[start : start + len(part)],
                images=part,
                return_tensors="pt",
                padding=True,
                truncation=True,
            )
            out = model(**given)
            found.append((out.image_embeds * out.text_embeds).sum(-1))
        return {"clip": preset.scale * gathered(found)}

    return rows


def hps(file: Path, preset: Preset) -> Network:
    """Rows `hps` [n]: HPSv2's cosine of picture and caption, by open_clip with its checkpoint."""
    with kept("open_clip", "it has the network of HPSv2"):
        import open_clip
    state = safe(file)
    with refused(file):
        model, _, transform = open_clip.create_model_and_transforms(HPS_MODEL)
        model.load_state_dict(state.get("state_dict", state))
    model.eval()
    tokenizer = open_clip.get_tokenizer(HPS_MODEL)

    def rows(images: Pictures, captions: Sequence[str]) -> dict[str, Array]:
        found = []
        for start, part in chunks(images):
            pixels = torch.stack([transform(image) for image in part])
            picture = model.encode_image(pixels, normalize=True)
            text = model.encode_text(
                tokenizer(list(captions[start : start + len(part)])), normalize=True
            )
            found.append((picture * text).sum(-1))
        return {"hps": gathered(found)}

    return rows


def chunks(images: Pictures) -> Iterator[tuple[int, list[Image.Image]]]:
    """(number of the first, pictures)"""
    start, part = 0, list[Image.Image]()
    for image in images:
        part.append(image)
        if len(part) == BATCH:
            yield start, part
            start, part = start + BATCH, []
    if part:
        yield start, part


NETWORKS: dict[str, Callable[[Path, Preset], Network]] = {
    "inception": inception,
    "vgg": vgg,
    "clip": clip,
    "hps": hps,
}


@torch.no_grad()
def rows_of(
    network: Network,
    preset: Preset,
    files: Sequence[Path],
    captions: Sequence[str],
    title: str,
    alike: bool,
) -> dict[str, Array]:
    """What a network makes of picture files.

    Args:
        alike: refuse pictures of several sizes.

    Raises:
        OptionError: a file is no whole picture, or of another size than the first.
    """
    first: tuple[int, int] | None = None

    def pictures() -> Pictures:
        nonlocal first
        for file in tqdm(files, desc=title, unit="picture", leave=False):
            image = read_picture(file)
            first = first or image.size
            if alike and image.size != first:
                size, usual = ("{} x {}".format(*one) for one in (image.size, first))
                raise OptionError(f"{file} is {size} pixels", f"the first picture is {usual}")
            yield cropped(image, preset)

    return network(pictures(), captions)


def cache_key(paths: Mapping[str, Path]) -> dict[str, str]:
    """Digests of the weights, by network."""
    return {name: digest_of(path) for name, path in paths.items()}
