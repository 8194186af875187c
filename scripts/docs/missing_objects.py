"""How often a picture of the embedded model lacks the object of its caption, by caption and sampling.

    python -m scripts.docs.missing_objects --output benchmarks/results/objects-embedded.json

A network that was trained on painted pictures (`lantern_lab.evaluate.attributes`) says what a picture shows; an object
counts as missing where it says another one, or none. Pictures are drawn by `ar`, from seeds 0 on.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lantern_hpu import LanternPipeline
from lantern_hpu.backends.host import processor_name
from lantern_hpu.files import write_file
from lantern_lab.evaluate.attributes import Classifier, small

CAPTIONS = (
    "a red apple",
    "an orange pumpkin on a table",
    "a red balloon over green hills",
    "a cactus in the desert",
    "a pyramid in the desert at sunset",
    "a house by a lake at night",
    "a lighthouse in a storm",
    "a lighthouse by the sea",
    "a lighthouse at sunset",
    "a sailboat on the sea at sunset",
    "a sailboat on the sea",
    "a windmill on green hills",
)
BATCH = 8
# Guidance and temperature, the packaged ones first
SAMPLINGS = ((3, 0.8), (3, 0.7), (4, 0.8), (4, 0.7), (5, 0.8))


def missing(
    pipeline: LanternPipeline,
    judge: Classifier,
    caption: str,
    seeds: int,
    guidance: float,
    temperature: float,
) -> int:
    """Pictures of a caption that lack its object, of so many seeds."""
    count = 0
    for first in range(0, seeds, BATCH):
        images = pipeline(
            caption,
            num_images_per_prompt=BATCH,
            seed=first,
            method="ar",
            guidance_scale=guidance,
            temperature=temperature,
        ).images
        pixels = np.stack([small(image) for image in images])
        found = judge.classify(pixels).matches([caption] * BATCH)
        count += sum(not each["thing"] for each in found)
    return count


def measured(seeds: int, other_seeds: int) -> list[dict[str, Any]]:
    """A row for each sampling, the packaged one first, with counts by caption."""
    pipeline, judge = LanternPipeline.from_pretrained("builtin"), Classifier.load()
    rows: list[dict[str, Any]] = []
    for guidance, temperature in SAMPLINGS:
        of = other_seeds if rows else seeds
        counts = {
            caption: missing(pipeline, judge, caption, of, guidance, temperature)
            for caption in tqdm(CAPTIONS, f"{guidance} : {temperature}")
        }
        sampling = {"guidance_scale": guidance, "temperature": temperature}
        rows.append({"sampling": sampling, "seeds": of, "missing": counts})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("objects-embedded.json"))
    parser.add_argument("--seeds", type=int, default=64, help="of the packaged sampling")
    parser.add_argument("--other-seeds", type=int, default=32, help="of the other ones")
    args = parser.parse_args()
    result = {
        "kind": "lantern_hpu.missing_objects",
        "date": date.today().isoformat(),
        "processor": processor_name(),
        "rows": measured(args.seeds, args.other_seeds),
    }
    write_file(args.output, (json.dumps(result, indent=1) + "\n").encode(), force=True)


if __name__ == "__main__":
    main()
