"""Does a device draw from the model's own distribution? First tokens of thousands of seeds, by method.

    python -m scripts.measure.law --device cpu --seeds 4096 --output law.json
    python -m scripts.measure.law --device cuda --method ar,scd@16,eagle --relaxed scd:tv=0.2@16

The exact distribution is that of the plain model on the CPU in float32; see `lantern_lab/verify/distribution.py`. Of
lossless methods the chance of what was seen has to be 1e-4 or more, or the program ends with 1. Of relaxed ones the
distance that the tokens show is printed next to the meter's. `lantern-hpu verify` asks the same of fewer seeds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lantern_hpu.errors import exit_code
from lantern_hpu.files import write_file
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.prompts import usual_prompts
from lantern_hpu.results.tables import aligned
from lantern_lab.verify.distribution import LEAST_CHANCE, measure

LOSSLESS = "ar,scd@4,sjd-pac@4,jacobi@4,eagle,eagle@chain,eagle@deep_7,eagle2"
RELAXED = "scd:tv=0.2@4,scd:lambda-5@4,lantern++,lantern++:tv=0.2@deep_7"


def run(args: argparse.Namespace) -> int:
    options: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "graphs": args.graphs}
    pipeline = LanternPipeline.from_pretrained(args.model, **options)
    host = LanternPipeline.from_pretrained(
        args.model, device="cpu", dtype="float32", graphs="eager", kernels="plain", layout="plain"
    )
    prompt = args.prompt or usual_prompts(pipeline.model.condition.takes_classes)[0]
    rows: list[dict[str, Any]] = []
    lossless = [name for name in args.method.split(",") if name]
    for name in tqdm([*lossless, *(n for n in args.relaxed.split(",") if n)], unit="method"):
        found = measure(pipeline, host, pipeline.resolve(name), prompt, args.seeds)
        rows.append({"row": name, "lossless": name in lossless, **found._asdict()})
    document = {"model": args.model, "prompt": prompt, "seeds": args.seeds, **options}
    document |= {"hardware": pipeline.backend.describe(), "rows": rows}
    if args.output:
        write_file(args.output, json.dumps(document, indent=1).encode(), force=True)
    print(aligned([("method", "chance", "TV seen", "TV metered"), *map(line, rows)]))
    return int(any(row["lossless"] and row["chance"] < LEAST_CHANCE for row in rows))


def line(row: dict[str, Any]) -> tuple[str, ...]:
    metered = "-" if row["metered"] is None else f"{row['metered']:.3f}"
    return row["row"], f"{row['chance']:.2g}", f"{row['tv']:.3f}", metered


def main() -> int:
    parser = argparse.ArgumentParser("scripts.measure.law", description=__doc__)
    add = parser.add_argument
    add("--model", default="builtin", help="as for `generate` (builtin)")
    add("--device", default="auto", help="as for `generate` (auto)")
    add("--dtype", default="float32", help="of the device (float32)")
    add("--graphs", default="auto", help="as for `generate` (auto)")
    add("--prompt", help="of all images (the first of the usual ones)")
    add("--seeds", type=int, default=4096, help="of each method, a multiple of 64 (4096)")
    add("--method", default=LOSSLESS, help=f"lossless settings ({LOSSLESS})")
    add(
        "--relaxed",
        default=RELAXED,
        help=f"relaxed settings, which are compared with the meter ({RELAXED})",
    )
    add("--output", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
