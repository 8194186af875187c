"""Scores by the protocols of the literature: their networks, what pictures are compared with, and notes for readers.

Networks are those of the libraries that keep them: torch-fidelity, transformers, open_clip. Weights come from a path or
a cache and are never downloaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from lantern_hpu.errors import Arg, OptionError, WeightsError, needing, words
from lantern_hpu.files import reported_as, sha256
from lantern_lab.evaluate.drawing import Cache, pictures_in, read_picture, stamps
from lantern_lab.evaluate.metrics import (
    NEIGHBOURS,
    PUBLISHED,
    SUBSET,
    Array,
    Gaussian,
    Rows,
    manifold_rows,
)
from lantern_lab.evaluate.options import FEW, Library, PictureSource, Preset
from lantern_lab.evaluate.sets import read_set

BATCH = 16
INCEPTION_SIDE = 299
HPS_MODEL = "ViT-H-14"
Pictures = list[Image.Image]
# Pictures of one size [b] and their captions, if there are any, to rows by name [b, ...]
Network = Callable[[Pictures, Sequence[str]], dict[str, Tensor]]

# ------------------------------------------------------------------------------------ weights


def find_weights(network: str, library: Library) -> Path | None:
    """Where the weights of a network are: as given, else in the caches of torch and the Hub."""
    given: Path | None = getattr(library, network)
    source = library.preset.sources[network]
    if given is not None:
        return given if given.exists() else None
    cached = Path(torch.hub.get_dir()) / "checkpoints" / source.what
    return cached if cached.exists() else in_hub_cache(source)


def in_hub_cache(source: PictureSource) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    is_folder = "/" in source.what
    repository, name = (source.what, "config.json") if is_folder else (source.hub, source.what)
    file = try_to_load_from_cache(repository, name) if repository else None
    if not isinstance(file, str):
        return None
    return Path(file).parent if is_folder else Path(file)


def locate_networks(library: Library) -> dict[str, Path]:
    sources = library.preset.sources
    places = {name: find_weights(name, library) for name in library.networks()}
    missing = {name: sources[name] for name, place in places.items() if place is None}
    if missing:
        each = [
            words(f"{source.what} ({source.where}):", Arg(name, "PATH"))
            for name, source in missing.items()
        ]
        hint = words(Arg("metrics"), "with those whose weights are here")
        raise WeightsError("weights of metrics are missing", words(*each), hint)
    here = {name: place for name, place in places.items() if place is not None}
    for name, place in here.items():
        if not library.any_weights:
            check_network(place, sources[name])
    return here


def check_network(file: Path, source: PictureSource) -> None:
    if source.digest and not sha256(file).startswith(source.digest):
        why = f"its SHA-256 does not begin with {source.digest}, so figures would not be comparable"
        hint = words(f"{source.what} of {source.where}; or", Arg("any_weights", True))
        raise WeightsError(f"{file} is not {source.what}", why, hint)


def load_state(file: Path) -> dict[str, Any]:
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
    # Halves are rounded to even, as torchvision's CenterCrop does
    left, top = round((image.width - side) / 2), round((image.height - side) / 2)
    square = image.crop((left, top, left + side, top + side))
    return square.resize((preset.crop, preset.crop), Image.Resampling.LANCZOS)


def cleanly(image: Image.Image, side: int) -> Image.Image:
    """Resized as clean-fid does, channel by channel in floats; rounded to 8 bits, which clean-fid does not."""
    if image.size == (side, side):
        return image
    planes = (Image.fromarray(np.asarray(plane, np.float32)) for plane in image.split())
    sized = [np.asarray(one.resize((side, side), Image.Resampling.BICUBIC)) for one in planes]
    return Image.fromarray(np.stack(sized, -1).clip(0, 255).round().astype(np.uint8))


# ------------------------------------------------------------------------------------ networks


@contextmanager
def loading(place: Path) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, KeyError, ValueError, TypeError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(f"{place} does not hold this network's weights", why) from error


def stacked(images: Pictures) -> Tensor:
    """[b, 3, H, W] uint8."""
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])


def inception(file: Path, preset: Preset) -> Network:
    """Rows `inception` [b, 2048] and `logits` [b, 1008] of torch-fidelity's InceptionV3."""
    with needing("torch-fidelity", "it has the network of FID", "evaluate"):
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    load_state(file)
    layers, where = ["2048", "logits_unbiased"], {"feature_extractor_weights_path": str(file)}
    with loading(file):
        net = FeatureExtractorInceptionV3("inception-v3-compat", layers, **where)

    def rows(images: Pictures, captions: Sequence[str]) -> dict[str, Tensor]:
        sized = [cleanly(image, INCEPTION_SIDE) for image in images] if preset.clean else images
        return dict(zip(("inception", "logits"), net(stacked(sized)), strict=True))

    return rows


def vgg(file: Path, preset: Preset) -> Network:
    """Rows `vgg` [b, 4096] of torch-fidelity's VGG16: fc2 before its ReLU."""
    with needing("torch-fidelity", "it has the network of precision and recall", "evaluate"):
        from torch_fidelity.feature_extractor_vgg16 import FeatureExtractorVGG16
    load_state(file)
    with loading(file):
        net = FeatureExtractorVGG16("vgg16", ["fc2"], feature_extractor_weights_path=str(file))
    return lambda images, captions: {"vgg": net(stacked(images))[0]}


def clip(folder: Path, preset: Preset) -> Network:
    """Rows `clip` [b]: cosine of picture and caption by transformers' CLIP, times the protocol's scale."""
    with needing("transformers", "it has CLIP", "evaluate"):
        from transformers import CLIPModel, CLIPProcessor
    with loading(folder):
        model = CLIPModel.from_pretrained(folder, local_files_only=True).eval()
        processor = CLIPProcessor.from_pretrained(folder, local_files_only=True)
    how = {"return_tensors": "pt", "padding": True, "truncation": True}

    def rows(images: Pictures, captions: Sequence[str]) -> dict[str, Tensor]:
        texts = [preset.prefix + caption for caption in captions]
        out = model(**processor(text=texts, images=images, **how))
        return {"clip": preset.scale * (out.image_embeds * out.text_embeds).sum(-1).double()}

    return rows


def hps(file: Path, preset: Preset) -> Network:
    """Rows `hps` [b]: HPSv2's cosine of picture and caption, by open_clip with its checkpoint."""
    with needing("open_clip", "it has the network of HPSv2", "evaluate"):
        import open_clip
    state = load_state(file)
    with loading(file):
        model, _, transform = open_clip.create_model_and_transforms(HPS_MODEL)
        model.load_state_dict(state.get("state_dict", state))
    model.eval()
    tokenizer = open_clip.get_tokenizer(HPS_MODEL)

    def rows(images: Pictures, captions: Sequence[str]) -> dict[str, Tensor]:
        pixels = torch.stack([transform(image) for image in images])
        picture = model.encode_image(pixels, normalize=True)
        text = model.encode_text(tokenizer(list(captions)), normalize=True)
        return {"hps": (picture * text).sum(-1)}

    return rows


NETWORKS: dict[str, Callable[[Path, Preset], Network]] = {
    "inception": inception,
    "vgg": vgg,
    "clip": clip,
    "hps": hps,
}


def batches(images: Iterable[Image.Image]) -> Iterator[Pictures]:
    """Pictures of one size together, at most `BATCH`."""
    for _, alike in groupby(images, key=lambda image: image.size):
        while batch := list(islice(alike, BATCH)):
            yield batch


@torch.no_grad()
def rows_of(
    network: Network,
    preset: Preset,
    files: Sequence[Path],
    captions: Sequence[str],
    title: str,
    alike: bool,
) -> dict[str, Array]:
    """What a network makes of picture files: rows by name [n, ...].

    Args:
        alike: refuse pictures of several sizes.
    """
    first: tuple[int, int] | None = None

    def pictures() -> Iterator[Image.Image]:
        nonlocal first
        for file in tqdm(files, desc=title, unit="picture", leave=False):
            image = read_picture(file)
            first = first or image.size
            if alike and image.size != first:
                size, usual = ("{} x {}".format(*one) for one in (image.size, first))
                raise OptionError(f"{file} is {size} pixels", f"the first picture is {usual}")
            yield cropped(image, preset)

    parts, done = defaultdict[str, list[Tensor]](list), 0
    for batch in batches(pictures()):
        for name, rows in network(batch, captions[done : done + len(batch)]).items():
            parts[name].append(rows.double())
        done += len(batch)
    return {name: torch.cat(rows).numpy() for name, rows in parts.items()}


@dataclass(frozen=True)
class Reference:
    """What pictures are compared with: pictures, or the statistics of some."""

    files: Sequence[Path] = ()
    statistics: Gaussian | None = None

    @classmethod
    def of(cls, path: Path | None, library: Library) -> Reference:
        wanted = {
            name: PUBLISHED[name].reference for name in library.wanted if PUBLISHED[name].reference
        }
        if path is None:
            if wanted:
                why = f"{', '.join(wanted)} compare with pictures"
                hint = words(
                    Arg("reference", "FOLDER"), "of pictures, or a .npz of statistics for fid"
                )
                raise OptionError(words(Arg("reference"), "is missing"), why, hint)
            return cls()
        if path.is_dir():
            files = pictures_in(path)
            if len(files) <= NEIGHBOURS + 1:
                raise OptionError(f"{path} holds {len(files)} pictures", "too few to compare with")
            return cls(files)
        pictures = [name for name, need in wanted.items() if need == "pictures"]
        if pictures:
            why = f"{', '.join(pictures)} compare with pictures"
            hint = words(Arg("reference", "FOLDER"), ", or", Arg("metrics", "fid"))
            raise OptionError(f"{path} holds no pictures", why, hint)
        return cls(statistics=read_statistics(path, library.preset.name))


def read_statistics(file: Path, preset: str) -> Gaussian:
    """Mean and covariance of a .npz: `mu` and `sigma`, as ADM, torch-fidelity and clean-fid name them.

    A `protocol` next to them says what they were made for; without it they are taken for ADM's, as the published ones
    are.
    """
    with reported_as(f"cannot read {file}"):
        try:
            with np.load(file, allow_pickle=False) as data:
                made = str(data["protocol"]) if "protocol" in data.files else "imagenet"
                result = Gaussian(data["mu"].astype(np.float64), data["sigma"].astype(np.float64))
        except (BadZipFile, EOFError) as error:
            raise ValueError(str(error)) from error
    if made != preset:
        why = f"it was made for {made}, and figures would not be comparable"
        raise OptionError(f"{file} is no reference of {preset}", why, Arg("preset", made))
    return result


class LibraryScorer:
    def __init__(self, library: Library, count: int | None, folder: Path) -> None:
        """
        Args:
            count: pictures of the set that are drawn; all if not given.
        """
        preset = library.preset
        self.library, self.name, self.folder = library, preset.name, folder
        self.prompts = library.prompts or preset.prompts
        self.items = read_set(self.prompts, library.prompts_file, preset.captions, count)
        least = NEIGHBOURS + 2 if {"precision", "recall"} & set(library.wanted) else 2
        if len(self.items) < least:
            why = f"its metrics need {least} or more"
            raise OptionError(f"a set of {len(self.items)} pictures is too small", why)
        self.reference = Reference.of(library.reference, library)
        self.paths = locate_networks(library)

    def prepare(self) -> None:
        """Read the networks and the reference: what takes time, once the pictures are drawn."""
        preset, reference = self.library.preset, self.reference
        weights = {
            name: stamps(sorted(place.iterdir()) if place.is_dir() else [place])
            for name, place in self.paths.items()
        }
        self.cache = Cache(self.folder, [preset.name, weights])
        self.networks = {name: NETWORKS[name](path, preset) for name, path in self.paths.items()}
        self.real: dict[str, Array] = {}
        if reference.files:
            wanted = [PUBLISHED[name] for name in self.library.wanted]
            names = list(dict.fromkeys(one.network for one in wanted if one.reference))
            self.real = self.cache.rows(
                "reference",
                [names, stamps(reference.files)],
                lambda: self.network_rows(names, reference.files, [], alike=False),
            )
        self.metrics = [
            PUBLISHED[name].make(self.real, reference.statistics) for name in self.library.wanted
        ]

    def network_rows(
        self, networks: Sequence[str], files: Sequence[Path], captions: Sequence[str], alike: bool
    ) -> dict[str, Array]:
        rows: dict[str, Array] = {}
        for name in networks:
            network, preset = self.networks[name], self.library.preset
            rows |= rows_of(network, preset, files, captions, name, alike)
        return rows

    def rows(self, name: str, files: Sequence[Path]) -> Rows:
        """Of the pictures of a setting, in the order of the items.

        Precision and recall are shares: by picture, whether it lies in the manifold of the other set.
        """
        captions, names = [item.prompt for item in self.items], list(self.networks)
        key = [names, stamps(files), captions]
        rows = self.cache.rows(name, key, lambda: self.network_rows(names, files, captions, True))
        if "vgg" in rows and "vgg" in self.real:
            rows |= manifold_rows(rows["vgg"], self.real["vgg"])
        return rows

    def baselines(self) -> dict[str, Rows]:
        return {}

    def notes(self) -> list[str]:
        preset, count, wanted = self.library.preset, len(self.items), self.library.wanted
        sources = ", ".join(f"{n} of {p.name}" for n, p in self.paths.items())
        large = (
            f"FID of {count} pictures is too large: 2,048 features need more than {FEW} pictures."
        )
        subsets = f"KID: subsets of {min(count, SUBSET)} pictures in place of {SUBSET}."
        spread = "Recall's interval is over reference pictures, that of all else over drawn ones."
        unchecked = "Weights were taken unchecked: the figures may compare with nothing published."
        rounded = "Pillow's bicubic resizing is rounded to 8 bits, which clean-fid's is not."
        notes = [
            (True, f"Networks: {sources}."),
            ("fid" in wanted and count <= FEW, f"{large} Compare it with that of as many alone."),
            ("kid" in wanted and count < SUBSET, subsets),
            ("recall" in wanted, spread),
            (self.library.any_weights, unchecked),
            (preset.clean, rounded),
        ]
        return [note for applies, note in notes if applies]

    def protocol(self) -> str:
        preset, real = self.library.preset, self.reference
        given = "statistics" if real.statistics else "nothing"
        against = f"{len(real.files)} pictures" if real.files else given
        drawn = f"{len(self.items)} pictures of {self.prompts}"
        return f"Protocol `{preset.name}`, {preset.about}. {drawn}, against {against}."
