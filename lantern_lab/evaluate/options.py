"""What `lantern-hpu evaluate` draws, and the protocols of the literature as data. Needs no torch.

Figures of two protocols cannot be compared with each other; so each has a name, and a reference made for one is
refused together with another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lantern_hpu.backends import DeviceOptions
from lantern_hpu.core import Sampling
from lantern_hpu.errors import Arg, OptionError, choices, words
from lantern_hpu.fields import MAX_IMAGES, check_ranges, option
from lantern_hpu.methods.setting import AUTO, Setting
from lantern_hpu.models.files.names import PartOverrides
from lantern_lab.evaluate.metrics import PUBLISHED
from lantern_lab.evaluate.sets import SETS

WEIGHTS = "path of the network's weights, if they are not cached"
SCENES = "scenes"  # the embedded model's
SCENES_ROWS = (
    "ar,eagle,eagle2,lantern:delta-0.1,lantern:delta-0.2,lantern:delta-0.4,"
    "lantern++:lambda=2,lantern++:lambda-5,lantern++:lambda-20"
)
FEW = 2048  # pictures below which a Frechet distance of 2,048 features is of a singular covariance


@dataclass(frozen=True)
class PictureSource:
    """A network that a metric needs: nothing is downloaded, but its place is known.

    Attributes:
        what: the file, or the Hub's name of a folder. where: it is published.
        digest: how its SHA-256 begins, where its publisher gives it. hub: repository of a file on the Hub.
    """

    what: str
    where: str
    digest: str = ""
    hub: str = ""


HUB = "https://huggingface.co/"
INCEPTION = PictureSource(
    "weights-inception-2015-12-05-6726825d.pth",
    "https://github.com/toshas/torch-fidelity/releases/tag/v0.2.0",
    "6726825d",
)
VGG_FILE = "vgg16-397923af.pth"
VGG = PictureSource(VGG_FILE, f"https://download.pytorch.org/models/{VGG_FILE}", "397923af")
HPS = PictureSource("HPS_v2.1_compressed.pt", f"{HUB}xswu/HPSv2", hub="xswu/HPSv2")
CLIP_32, CLIP_16 = (
    PictureSource(name, HUB + name)
    for name in ("openai/clip-vit-base-patch32", "openai/clip-vit-base-patch16")
)


@dataclass(frozen=True)
class Preset:
    """A protocol.

    Attributes:
        prompts: the set that is drawn unless another is asked for. captions: which of a picture's captions.
        crop: side of the square that pictures are cropped and resized to (LANCZOS); None leaves them.
        clean: resized to the network's size by Pillow's bicubic filter, as clean-fid does, and not by the network.
        clip: the CLIP. prefix: before captions. scale: of its cosine.
        sampling: by a part of the model's name, "" for all others.
        rows: settings that are drawn unless others are asked for.
    """

    name: str
    about: str
    prompts: str
    captions: Literal["longest", "first"]
    metrics: tuple[str, ...]
    clip: PictureSource = CLIP_32
    prefix: str = ""
    scale: float = 1.0
    crop: int | None = None
    clean: bool = False
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rows: str = "ar,eagle,eagle2,lantern,lantern++"

    def sampling_for(self, model: str) -> dict[str, Any]:
        """Settings of the protocol for a model of this name."""
        known = [part for part in self.sampling if part and part in model.lower()]
        return dict(self.sampling.get(known[0] if known else "", {}))

    @property
    def sources(self) -> dict[str, PictureSource]:
        """By the name of the network."""
        return {"inception": INCEPTION, "vgg": VGG, "hps": HPS, "clip": self.clip}


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="lantern",
            about="LANTERN's: the longest captions of COCO val2017; pictures cropped to 256 x 256; FID with Pillow's "
            "bicubic resizing; raw cosine of CLIP ViT-B/32 after `A photo depicts `",
            prompts="coco-val2017",
            captions="longest",
            metrics=("fid", "precision", "recall", "clip", "hps"),
            prefix="A photo depicts ",
            crop=256,
            clean=True,
            sampling={"": {"cfg_scale": 7.5, "top_k": 1000}},
            rows="ar,eagle2,lantern:delta-0.2,lantern++:lambda-5",
        ),
        Preset(
            name="sjd",
            about="speculative Jacobi decoding's: first captions of COCO val2017; pictures as they are; FID with the "
            "network's own resizing; 100 x cosine of CLIP ViT-B/16",
            prompts="coco-val2017",
            captions="first",
            metrics=("fid", "is", "clip"),
            clip=CLIP_16,
            scale=100.0,
            sampling={
                "lumina": {"cfg_scale": 3.0, "top_k": 2000},
                "janus": {"cfg_scale": 5.0, "top_k": 1000},
            },
        ),
        Preset(
            name="imagenet",
            about="ADM's: 50 pictures of each class of ImageNet against the reference's statistics; FID with the "
            "network's own resizing",
            prompts="imagenet-50k",
            captions="first",
            metrics=("fid", "is"),
        ),
    )
}


def preset_of(name: str) -> Preset:
    if name not in PRESETS:
        raise OptionError(f"unknown preset {name!r}", hint=choices([SCENES, *PRESETS]))
    return PRESETS[name]


@dataclass(frozen=True)
class Library:
    """What the protocols of the literature need in addition to the model.

    Attributes:
        metrics: in place of the preset's, where given.
        any_weights: take weights with another checksum than the published ones.
    """

    preset: Preset
    prompts: str | None = option(None, f"{', '.join(SETS)} (the preset's)")
    prompts_file: Path | None = option(
        None, "file with the prompts of the set, where it is not downloaded", metavar="FILE"
    )
    metrics: tuple[str, ...] | None = None
    reference: Path | None = option(
        None, "reference images: a folder, or a .npz of statistics", metavar="PATH"
    )
    inception: Path | None = option(None, WEIGHTS, metavar="PATH")
    vgg: Path | None = option(None, WEIGHTS, metavar="PATH")
    clip: Path | None = option(None, WEIGHTS, metavar="PATH")
    hps: Path | None = option(None, WEIGHTS, metavar="PATH")
    any_weights: bool = option(False, "accept weights other than the published ones")

    @property
    def wanted(self) -> tuple[str, ...]:
        return self.preset.metrics if self.metrics is None else self.metrics

    def networks(self) -> list[str]:
        """Those that the metrics need, once each."""
        return list(dict.fromkeys(PUBLISHED[name].network for name in self.wanted))


# Sets whose benchmarks read pictures in a layout of their own
EXPORTED = ("geneval", "dpg", "t2i-compbench")


@dataclass(frozen=True)
class PaintedOptions:
    """Pictures of the embedded model's protocol; a Frechet distance of 64 features needs more than 64."""

    images: int = option(
        400, "captions that are drawn once each", name="num_images", low=65, high=MAX_IMAGES
    )
    panels: int = option(
        25, "captions with four images each, to compare by eye", low=2, high=MAX_IMAGES
    )
    fresh: int = option(4000, "reference images from the scene generator", low=65, high=MAX_IMAGES)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class EvaluateRequest:
    """What is drawn, by which protocol it is scored, and where it goes.

    Attributes:
        library: of a protocol of the literature; None is the embedded model's, of which `painted` says how much.
        sampling: in place of the protocol's and the model's.
        images: of the set's first prompts; None is all.
        folders: pictures drawn elsewhere, by the names of their rows. floor: draw `ar` with a second set of seeds.
    """

    output: Path
    settings: Sequence[Setting]
    library: Library | None = None
    painted: PaintedOptions = field(default_factory=PaintedOptions)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    given: PartOverrides = field(default_factory=PartOverrides)
    device: DeviceOptions = field(default_factory=DeviceOptions)
    folders: Mapping[str, Path] = field(default_factory=dict)
    floor: bool = True
    images: int | None = option(None, "", name="num_images")
    seed: int = option(0, "seed of the first image", low=0)
    batch_size: int = option(8, "images per batch", low=1)
    rounds: int = option(200, "bootstrap samples", low=2)
    places: int = option(
        0,
        "positions at which to measure the next-token distribution, as `fidelity` does",
        low=0,
        marks={0: "none"},
    )
    model: str = option("builtin", "model name, Hub id, folder or weights file")
    workers: int | None = option(
        None,
        "Ray processes that generate, one per card; this process scores (default: generate in this process)",
        metavar="N",
        low=1,
        high=4096,
    )
    export: Path | None = option(
        None,
        "also copy the images in the layout of GenEval, DPG-Bench or T2I-CompBench",
        metavar="FOLDER",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        Sampling(**self.sampling)
        if self.export and (self.library is None or self.library.prompts not in EXPORTED):
            hint = words(Arg("prompts", "geneval"), ", dpg or t2i-compbench")
            raise OptionError(words(Arg("export"), "needs the prompts of a benchmark"), hint=hint)
        tuned = any(setting.tree == AUTO for setting in self.settings)
        if self.workers is not None and (self.places or tuned):
            what = words(Arg("workers"), "excludes", Arg("places"), "and tuned trees")
            hint = words(
                "the same command without", Arg("workers"), "continues with what was drawn"
            )
            raise OptionError(what, "the process that scores does not draw", hint)


def folders_of(texts: Sequence[str]) -> dict[str, Path]:
    """Folders of pictures by their names, of options of the form NAME=FOLDER."""
    folders: dict[str, Path] = {}
    for text in texts:
        name, equals, place = text.partition("=")
        if not equals or not name or name in folders:
            raise OptionError(words(Arg("folder"), f"is {text}"), "a new NAME=FOLDER was expected")
        if not Path(place).is_dir():
            raise OptionError(words(Arg("folder"), f"is {text}"), f"{place} is not a folder")
        folders[name] = Path(place)
    return folders
