"""Write small random checkpoints in the public formats, to try loaders without downloading anything.

    python -m tests.checkpoints.synthetic DIR [--seed 0] [--force]

Names, containers, dtypes and file layouts are those of the published files; sizes are tiny. Head width (64, and 100 in
the 3B file), vocabulary layout (Chameleon's 65536 ids), classes, caption slots and grids are real. Needs transformers,
tokenizers and safetensors.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2]))  # for who runs it by its path

from tests.checkpoints import (
    chameleon,
    emu35,
    glm_image,
    language_models,
    llamagen,
    mammothmoda2,
    simplear,
)

WRITERS = {
    "llamagen-c2i": llamagen.write_class_model,
    "llamagen-c2i-384-fsdp": llamagen.write_sharded_class_models,
    "llamagen-c2i-containers": llamagen.write_other_containers,
    "llamagen-t2i-256": llamagen.write_text_model,
    "llamagen-t2i-512": llamagen.write_hub_text_model,
    "llamagen-vq8": llamagen.write_vq8,
    "anole": chameleon.write_anole,
    "anole-hub": chameleon.write_hub_anole,
    "chameleon-base": chameleon.write_chameleon,
    "lumina-mgpt": chameleon.write_lumina,
    "janus-pro": language_models.write_janus,
    "janus-pro-hub": language_models.write_hub_janus,
    "emu3": language_models.write_emu3,
    "emu3-authors": language_models.write_authors_emu3,
    "glm-image": glm_image.write_glm_image,
    "simplear": simplear.write_simplear,
    "mammothmoda2": mammothmoda2.write_mammothmoda2,
    "lumina-mgpt-2.0": chameleon.write_lumina2,
    "emu3.5-image": emu35.write_emu35,
    "u0-4b": emu35.write_u0,
}


def write_all(root: Path, seed: int = 0, only: set[str] | None = None) -> None:
    """Write the folders; the values of each depend on the seed alone, not on `only`."""
    for number, (name, writer) in enumerate(WRITERS.items()):
        if only is None or name in only:
            writer(root / name, torch.Generator().manual_seed(1000 * seed + number))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write small random checkpoints.")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="write into a folder that has files")
    parser.add_argument("--only", nargs="+", choices=WRITERS, help="some of the folders")
    args = parser.parse_args()
    root: Path = args.directory
    if root.exists() and not root.is_dir():
        raise SystemExit(f"{root} is a file")
    if not args.force and root.is_dir() and any(root.iterdir()):
        raise SystemExit(f"{root} is not empty; --force writes into it nevertheless")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    write_all(root, args.seed, set(args.only) if args.only else None)
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    print(f"{len(list(root.iterdir()))} checkpoints in {root}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
