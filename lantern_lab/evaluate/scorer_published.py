"""Scores by the protocols of the literature: what they need, rows of their networks, and notes for readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from lantern_hpu.errors import Arg, OptionError, words
from lantern_hpu.files import reported_as
from lantern_lab.evaluate.folder import Cache, pictures_in, stamps
from lantern_lab.evaluate.metrics import NEIGHBOURS, PUBLISHED, SUBSET, Gaussian, manifold_rows
from lantern_lab.evaluate.networks import NETWORKS, locate_networks, rows_of
from lantern_lab.evaluate.protocols import FEW, Library
from lantern_lab.evaluate.quality_rows import QualityRow
from lantern_lab.evaluate.sets import read_set
from lantern_lab.evaluate.statistics import Array, Rows


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

    def baselines(self, rounds: int) -> list[QualityRow]:
        return []

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
