"""Scores by the protocols of the literature: rows of their networks, and what is made of them.

FID is the Frechet distance of `statistics`, which agrees with torch-fidelity's; KID, the inception score and the
manifolds of precision and recall are torch-fidelity's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from lantern_hpu.errors import OptionError
from lantern_hpu.files import reported_as
from lantern_hpu.lab.pictures.folder import Cache, stamps
from lantern_hpu.lab.pictures.networks import NETWORKS, importing, locate, rows_of
from lantern_hpu.lab.pictures.protocols import FEW, NEEDS, Library
from lantern_hpu.lab.pictures.report import Row
from lantern_hpu.lab.pictures.sets import read_set
from lantern_hpu.lab.pictures.statistics import (
    Array,
    Gaussian,
    Metric,
    Rows,
    frechet,
    mean_metric,
)

NEIGHBOURS = 3  # of the manifolds of precision and recall
COSTLY = 20  # bootstrap rounds of a metric that takes seconds
SUBSET = 1000  # pictures of a subset of KID
ENDINGS = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True)
class Reference:
    """What pictures are compared with: pictures, or the statistics of some."""

    files: Sequence[Path] = ()
    statistics: Gaussian | None = None

    @classmethod
    def of(cls, path: Path | None, library: Library) -> Reference:
        """
        Raises:
            OptionError: missing, empty, of another protocol, or not enough for a metric.
        """
        wanted = {name: NEEDS[name][1] for name in library.wanted if NEEDS[name][1]}
        if path is None:
            if wanted:
                why = f"{', '.join(wanted)} compare with pictures"
                hint = "--reference FOLDER of pictures, or a .npz of statistics for fid"
                raise OptionError("--reference is missing", why, hint)
            return cls()
        if path.is_dir():
            files = sorted(f for f in path.rglob("*") if f.suffix.lower() in ENDINGS)
            if len(files) <= NEIGHBOURS + 1:
                raise OptionError(f"{path} holds {len(files)} pictures", "too few to compare with")
            return cls(files)
        pictures = [name for name, need in wanted.items() if need == "pictures"]
        if pictures:
            why = f"{', '.join(pictures)} compare with pictures"
            raise OptionError(
                f"{path} holds no pictures", why, "--reference FOLDER, or --metrics fid"
            )
        return cls(statistics=read_statistics(path, library.preset.name))


def read_statistics(file: Path, preset: str) -> Gaussian:
    """Mean and covariance of a .npz: `mu` and `sigma`, as ADM, torch-fidelity and clean-fid name them.

    A `protocol` beside them says what they were made for; without it they are taken for ADM's, as the published ones
    are.

    Raises:
        OptionError: of another protocol. WeightsError: unreadable.
    """
    with reported_as(f"cannot read {file}"):
        try:
            with np.load(file, allow_pickle=False) as data:
                made = str(data["protocol"]) if "protocol" in data.files else "imagenet"
                found = Gaussian(data["mu"].astype(np.float64), data["sigma"].astype(np.float64))
        except (BadZipFile, EOFError) as error:
            raise ValueError(str(error)) from error
    if made != preset:
        why = f"it was made for {made}, and figures would not be comparable"
        raise OptionError(f"{file} is no reference of {preset}", why, f"--preset {made}")
    return found


class LibraryScorer:
    """Pictures to rows of the library's metrics."""

    def __init__(self, library: Library, count: int | None, folder: Path) -> None:
        """
        Args:
            count: pictures of the set that are drawn; all if not given.

        Raises:
            LanternError: weights, prompts or the reference are missing or do not fit.
        """
        preset = library.preset
        self.library, self.name = library, preset.name
        prompts = library.prompts or preset.prompts
        self.items = read_set(prompts, library.prompts_file, preset.captions, count)
        self.prompts = prompts
        if len(self.items) < 2:
            raise OptionError(f"{len(self.items)} picture is too few", "2 or more have a spread")
        few = [name for name in library.wanted if name in ("precision", "recall")]
        if few and len(self.items) <= NEIGHBOURS + 1:
            raise OptionError(
                f"{len(self.items)} pictures are too few", f"{few[0]} needs 5 or more"
            )
        self.reference = Reference.of(library.reference, library)
        self.paths = locate(library)
        self.folder = folder

    def prepare(self) -> None:
        """Read the networks and the reference: what takes time, once the pictures are drawn."""
        preset = self.library.preset
        weights = {
            name: stamps(sorted(place.iterdir()) if place.is_dir() else [place])
            for name, place in self.paths.items()
        }
        self.cache = Cache(self.folder, [preset.name, weights])
        self.networks = {name: NETWORKS[name](path, preset) for name, path in self.paths.items()}
        self.real: dict[str, Array] = {}
        if self.reference.files:
            needed = list(dict.fromkeys(NEEDS[m][0] for m in self.library.wanted if NEEDS[m][1]))
            key = stamps(self.reference.files)
            self.real = self.cache.rows(
                "reference",
                [needed, key],
                lambda: self.seen(needed, self.reference.files, [], False),
            )
        self.metrics = list(map(self.metric, self.library.wanted))

    def seen(
        self, networks: Sequence[str], files: Sequence[Path], captions: Sequence[str], alike: bool
    ) -> dict[str, Array]:
        """Rows of these networks."""
        found: dict[str, Array] = {}
        for name in networks:
            network, preset = self.networks[name], self.library.preset
            found |= rows_of(network, preset, files, captions, name, alike)
        return found

    def rows(self, name: str, files: Sequence[Path]) -> Rows:
        """Of the pictures of a setting, in the order of the items."""
        captions = [item.prompt for item in self.items]
        names = list(self.networks)
        key = [names, stamps(files), captions]
        found = self.cache.rows(name, key, lambda: self.seen(names, files, captions, True))
        return found | self.manifolds(found)

    def manifolds(self, found: Mapping[str, Array]) -> dict[str, Array]:
        """Precision and recall as shares: by picture, whether it lies in the other set's manifold."""
        names = [name for name in ("precision", "recall") if name in self.library.wanted]
        drawn, real = found.get("vgg"), self.real.get("vgg")
        if not names or drawn is None or real is None:
            return {}
        pairs = {"precision": (drawn, real), "recall": (real, drawn)}
        return {name: inside(*pairs[name]) for name in names}

    def metric(self, name: str) -> Metric:
        """By name."""
        if name == "fid":
            return self.fid()
        if name == "kid":
            return Metric("kid", "KID", self.kid, "lower", 2, 5, of="inception", rounds=0)
        if name == "is":
            return Metric(
                "is", "inception score", inception_score, "higher", 2, 2, "logits", COSTLY
            )
        titles = {"clip": "CLIP score", "hps": "HPSv2"}
        return mean_metric(name, titles.get(name, name), "higher", 4)

    def fid(self) -> Metric:
        reference = self.reference.statistics or Gaussian.of(self.real["inception"])
        distance = frechet(reference)
        return Metric(
            "fid",
            "FID",
            lambda rows: distance(Gaussian.of(rows)),
            "lower",
            2,
            2,
            "inception",
            COSTLY,
        )

    def kid(self, rows: Array) -> float:
        """torch-fidelity's, 100 subsets of 1,000 pictures, or of all where there are fewer."""
        with importing("torch-fidelity", "it has KID"):
            from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric

        real = self.real["inception"]
        size = min(SUBSET, len(rows), len(real))
        both = (torch.from_numpy(x) for x in (rows, real))
        found = kid_features_to_metric(*both, kid_subset_size=size, verbose=False)
        return float(found[KEY_METRIC_KID_MEAN])

    def baselines(self, rounds: int) -> list[Row]:
        return []

    def notes(self) -> list[str]:
        """What a reader must know of the figures."""
        preset, count = self.library.preset, len(self.items)
        sources = ", ".join(f"{n} of {p.name}" for n, p in self.paths.items())
        found = [f"Networks: {sources}."]
        if "fid" in self.library.wanted and count <= FEW:
            found.append(
                f"FID of {count} pictures is too large: 2,048 features need more than {FEW} pictures. Compare it with "
                "that of as many pictures alone."
            )
        if "kid" in self.library.wanted and count < SUBSET:
            found.append(f"KID: subsets of {min(count, SUBSET)} pictures in place of {SUBSET}.")
        if "recall" in self.library.wanted:
            found.append(
                "Recall's interval is over reference pictures, that of all else over drawn ones."
            )
        if self.library.any_weights:
            found.append(
                "Weights were taken unchecked: the figures may compare with nothing published."
            )
        if preset.clean:
            found.append(
                "Pillow's bicubic resizing is rounded to 8 bits, which clean-fid's is not."
            )
        return found

    def protocol(self) -> str:
        """In a sentence."""
        preset, real = self.library.preset, self.reference
        against = (
            f"{len(real.files)} pictures"
            if real.files
            else "statistics"
            if real.statistics
            else "nothing"
        )
        return (
            f"Protocol `{preset.name}`, {preset.about}. {len(self.items)} pictures of {self.prompts}, against "
            f"{against}."
        )


def inside(points: Array, others: Array) -> Array:
    """[n] 1 where a point [n, d] is as near to one of the others [m, d] as that one's third neighbour among them.

    Kynkäänniemi et al. 2019.
    """
    a, b = (torch.from_numpy(np.ascontiguousarray(x)) for x in (points, others))
    reach = torch.cat(
        [torch.cdist(part, b).kthvalue(NEIGHBOURS + 1).values for part in b.split(1000)]
    )  # [m]; a point's own distance of 0 counts as the first
    hits = [(torch.cdist(part, b) <= reach).any(1) for part in a.split(1000)]
    return np.asarray(torch.cat(hits).double().numpy())


def inception_score(rows: Array) -> float:
    """torch-fidelity's, of logits [n, 1008] in ten parts."""
    with importing("torch-fidelity", "it has the inception score"):
        from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, isc_features_to_metric

    found = isc_features_to_metric(torch.from_numpy(rows), splits=min(10, len(rows)))
    value = float(found[KEY_METRIC_ISC_MEAN])
    return value if math.isfinite(value) else math.nan
