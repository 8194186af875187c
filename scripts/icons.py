"""Openly licensed emoji pictures with captions, for training the embedded model.

    python scripts/icons.py --data-dir data

fetches pinned npm packages, checks them, renders every icon that is kept and writes `icons.npz` to
the data folder: the other scripts read it with `load_icons`, and scripts/variants.py makes captioned
pictures of it. The same pins give the same pixels.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

RENDER = 128  # pixels of a stored render: twice a picture's, so that a smaller copy is still sharp


@dataclass(frozen=True)
class Pack:
    """One npm package of icons."""

    version: str
    sha256: str
    word: str  # how captions name the style
    licence: str
    scale: float = (
        1.0  # for packs that draw up to the edge, so that a background can be seen around them
    )


PACKS = {
    "fluent-emoji-flat": Pack(
        "1.2.6",
        "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175",
        "fluent",
        "MIT",
    ),
    "twemoji": Pack(
        "1.2.5",
        "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7",
        "twemoji",
        "CC-BY-4.0",
        0.9,
    ),
    "noto": Pack(
        "1.2.9",
        "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad",
        "noto",
        "Apache-2.0",
        0.95,
    ),
    "fluent-emoji": Pack(
        "1.2.7",
        "8044210dbf11e016d4de85f15d01a243423bd832457e7e2491df1b751c0e272b",
        "fluent 3d",
        "MIT",
    ),
}
DEFAULT_STYLES = "fluent-emoji-flat,twemoji"

# Skin tones multiply the people fivefold, and their names say little of what is drawn.
_SKIN = re.compile(
    r"(-|^)((medium-)?(dark|light)|medium|tone\d?|(light|medium|dark)-skin-tone)(-|$)"
)
_NOT_SKIN = re.compile(
    r"light-(bulb|rail|blue-heart)|car-light|traffic-light|medium(-small)?-square"
)
# Flags are mostly stripes whose names are countries; couples and families by gender are one drawing
# many times over.
_UNHELPFUL = re.compile(
    r"^flag|^keycap|^(couple|kiss|family)-.*(man|woman|men|women|person|people|girl|boy|adult|child)"
    r"|facing-right$|^(wo)?man-.*-facing-right|^japanese-.*-button$|-thirty$|^regional-indicator"
    r"|^tag-|^digit|variation|^zero-width|^letter-|^combining|^women-|^men-"
)
# The packs have two names for some things; one concept should have one.
_RENAMES = {
    "black-bird": "blackbird",
    "person-blond-hair": "person-blonde-hair",
    "person-deaf": "deaf-person",
    "person-merpeople": "merperson",
    "phoenix-bird": "phoenix",
    "piata": "pinata",
    "pouting-face": "enraged-face",
}
for _being in ("elf", "fairy", "genie", "mage", "superhero", "supervillain", "vampire", "zombie"):
    _RENAMES[f"person-{_being}"] = _being
# A gendered person is dropped where the same icon without the gender is there.
_GENDERED = re.compile(r"^(man|woman)-(.+)$")


@dataclass
class Icons:
    """The renders and what they are called."""

    images: NDArray[np.uint8]  # [n, 128, 128, 4], straight alpha
    names: list[str]  # the concept, as words
    styles: list[str]  # a key of PACKS

    def __len__(self) -> int:
        return len(self.names)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that an interruption leaves the old one or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)


def write_npz(path: Path, **arrays: NDArray[Any]) -> None:
    """Write arrays to a compressed .npz, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    os.replace(part, path)


# ------------------------------------------------------------------------------ fetching, rendering


def fetch(style: str, folder: Path) -> Path:
    """The package's tarball, from the folder if it is there, else from npm; always checked."""
    pack = PACKS[style]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"iconify-json-{style}-{pack.version}.tgz"
    if not path.exists():
        # A folder of its own keeps a broken download out of the way.
        staging = folder / f".{style}.part"
        staging.mkdir(exist_ok=True)
        package = f"@iconify-json/{style}@{pack.version}"
        subprocess.run(["npm", "pack", "--silent", package], cwd=staging, check=True)
        os.replace(staging / path.name, path)
        staging.rmdir()
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != pack.sha256:
        raise SystemExit(
            f"{path} has sha256 {found}, expected {pack.sha256}: delete it and run again"
        )
    return path


def read_pack(path: Path) -> dict[str, Any]:
    """The package's icons.json."""
    with tarfile.open(path) as tar:
        member = tar.extractfile("package/icons.json")
        if member is None:
            raise SystemExit(f"{path} holds no icons.json")
        data: dict[str, Any] = json.load(member)
    return data


def keep(name: str, names: set[str]) -> bool:
    """Whether an icon is worth training on, by its name and its neighbours' names."""
    if _UNHELPFUL.search(name) or (_SKIN.search(name) and not _NOT_SKIN.search(name)):
        return False
    gendered = _GENDERED.match(name)
    if gendered:
        rest = gendered.group(2)
        return rest not in names and f"person-{rest}" not in names
    return True


def render(icon: dict[str, Any], pack: dict[str, Any]) -> NDArray[np.uint8]:
    """One icon as [128, 128, 4] uint8, straight alpha."""
    import resvg_py

    width = icon.get("width", pack.get("width", 16))
    height = icon.get("height", pack.get("height", 16))
    box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{RENDER}" height="{RENDER}" viewBox="{box}">{icon["body"]}</svg>'
    )
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, skip_system_fonts=True))
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))


def render_pack(style: str, path: Path) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """(name as words, render) of each icon kept of a package."""
    pack = read_pack(path)
    names = {name for name, icon in pack["icons"].items() if not icon.get("hidden")}
    kept = sorted(name for name in names if keep(name, names))
    for name in tqdm(kept, desc=f"render {style}", unit="icon"):
        yield _RENAMES.get(name, name).replace("-", " "), render(pack["icons"][name], pack)


def build_icons(data_dir: Path, styles: list[str]) -> Icons:
    """Fetch and render the styles, and write them to the data folder."""
    images: list[NDArray[np.uint8]] = []
    names: list[str] = []
    owners: list[str] = []
    for style in styles:
        for name, image in render_pack(style, fetch(style, data_dir / "packs")):
            images.append(image)
            names.append(name)
            owners.append(style)
    icons = Icons(np.stack(images), names, owners)
    write_npz(
        data_dir / "icons.npz",
        images=icons.images,
        names=np.array(names),
        styles=np.array(owners),
    )
    return icons


def load_icons(data_dir: Path) -> Icons:
    """The icons that `build_icons` wrote."""
    path = data_dir / "icons.npz"
    if not path.exists():
        raise SystemExit(f"{path} is missing: run scripts/icons.py --data-dir {data_dir} first")
    with np.load(path) as data:
        return Icons(data["images"], data["names"].tolist(), data["styles"].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument(
        "--styles",
        default=DEFAULT_STYLES,
        help=f"comma-separated, of: {', '.join(PACKS)}",
    )
    arguments = parser.parse_args()
    styles = arguments.styles.split(",")
    unknown = [style for style in styles if style not in PACKS]
    if unknown:
        parser.error(f"no such style: {', '.join(unknown)} (there are {', '.join(PACKS)})")
    icons = build_icons(arguments.data_dir, styles)
    concepts = len(set(icons.names))
    print(f"{len(icons)} icons of {concepts} concepts in {arguments.data_dir / 'icons.npz'}")


if __name__ == "__main__":
    main()
