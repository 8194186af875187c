"""Scores by the protocols of the literature: rows of their networks, and what is made of them.

FID is the Frechet distance of `statistics`, which agrees with torch-fidelity's; KID, the inception score and the
manifolds of precision and recall are torch-fidelity's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from lantern_hpu.errors import OptionError, needing
from lantern_hpu.files import reported_as
from lantern_hpu.lab.evaluate.folder import Cache, stamps
from lantern_hpu.lab.evaluate.networks import NETWORKS, locate_networks, rows_of
from lantern_hpu.lab.evaluate.protocols import FEW, NEEDS, Library
from lantern_hpu.lab.evaluate.report import QualityRow
from lantern_hpu.lab.evaluate.sets import read_set
from lantern_hpu.lab.evaluate.statistics import (
    Array,
    Gaussian,
    QualityMetric,
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
                result = Gaussian(data["mu"].astype(np.float64), data["sigma"].astype(np.float64))
        except (BadZipFile, EOFError) as error:
            raise ValueError(str(error)) from error
    if made != preset:
        why = f"it was made for {made}, and figures would not be comparable"
        raise OptionError(f"{file} is no reference of {preset}", why, f"--preset {made}")
    return result


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
            names = list(dict.fromkeys(NEEDS[m][0] for m in self.library.wanted if NEEDS[m][1]))
            self.real = self.cache.rows(
                "reference",
                [names, stamps(reference.files)],
                lambda: self.network_rows(names, reference.files, [], alike=False),
            )
        self.metrics = [self.metric(name) for name in self.library.wanted]

    def network_rows(
        self, networks: Sequence[str], files: Sequence[Path], captions: Sequence[str], alike: bool
    ) -> dict[str, Array]:
        """Rows of these networks; see `rows_of`."""
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
            drawn, real = rows["vgg"], self.real["vgg"]
            rows |= {"precision": inside(drawn, real), "recall": inside(real, drawn)}
        return rows

    def metric(self, name: str) -> QualityMetric:
        """By name."""
        made: dict[str, Callable[[], QualityMetric]] = {
            "fid": self.fid,
            "kid": lambda: QualityMetric("kid", "KID", self.kid, "lower", 2, 5, "inception", 0),
            "is": lambda: QualityMetric(
                "is", "inception score", inception_score, "higher", 2, 2, "logits", COSTLY
            ),
        }
        titles = {"clip": "CLIP score", "hps": "HPSv2"}
        if name in made:
            return made[name]()
        return mean_metric(name, titles.get(name, name), "higher", 4)

    def fid(self) -> QualityMetric:
        distance = frechet(self.reference.statistics or Gaussian.of(self.real["inception"]))

        def value(rows: Array) -> float:
            return distance(Gaussian.of(rows))

        return QualityMetric("fid", "FID", value, "lower", 2, 2, "inception", COSTLY)

    def kid(self, rows: Array) -> float:
        """torch-fidelity's, 100 subsets of 1,000 pictures, or of all where there are fewer."""
        with needing("torch-fidelity", "it has KID", "evaluate"):
            from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric

        real = self.real["inception"]
        size = min(SUBSET, len(rows), len(real))
        both = (torch.from_numpy(x) for x in (rows, real))
        figures = kid_features_to_metric(*both, kid_subset_size=size, verbose=False)
        return float(figures[KEY_METRIC_KID_MEAN])

    def baselines(self, rounds: int) -> list[QualityRow]:
        return []

    def notes(self) -> list[str]:
        """What a reader must know of the figures."""
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
        """In a sentence."""
        preset, real = self.library.preset, self.reference
        given = "statistics" if real.statistics else "nothing"
        against = f"{len(real.files)} pictures" if real.files else given
        drawn = f"{len(self.items)} pictures of {self.prompts}"
        return f"Protocol `{preset.name}`, {preset.about}. {drawn}, against {against}."


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
    with needing("torch-fidelity", "it has the inception score", "evaluate"):
        from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, isc_features_to_metric

    result = isc_features_to_metric(torch.from_numpy(rows), splits=min(10, len(rows)))
    value = float(result[KEY_METRIC_ISC_MEAN])
    return value if math.isfinite(value) else math.nan
