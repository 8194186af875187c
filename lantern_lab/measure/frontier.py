"""Tokens a step against what they cost: the meter's TV of a token, by rule, over many settings.

    python -m lantern_lab.measure.frontier --num-images 32 --output tv.json --plot tv.png
    python -m lantern_lab.measure.frontier --num-images 32 --output tv.json --method scd:tv=0.2@16,scd:distance=3@16

Settings that the file has are not drawn again, so that a run that was stopped goes on, and more can be added. It counts
steps, so it needs no quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lantern_hpu.core import ImageRecord
from lantern_hpu.files import write_file
from lantern_hpu.methods.request import in_turn
from lantern_hpu.methods.setting import Resolved, typed
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import tokens_per_step
from lantern_hpu.results.prompts import usual_prompts
from lantern_lab.measure import plots
from lantern_lab.measure.fidelity import interval

ROWS = (
    "scd@16,scd:tv=0.05@16,scd:tv=0.07@16,scd:tv=0.1@16,scd:tv=0.12@16,scd:tv=0.15@16,scd:tv=0.2@16,scd:tv=0.3@16,"
    "scd:lambda-5@16,scd:lambda-20@16,scd:delta-0.1@16,scd:omega-2@16,scd:distance=3@16,"
    "sjd-pac@16,sjd-pac:tv=0.1@16,sjd-pac:tv=0.12@16,"
    "eagle@deep_7,lantern++:tv=0.1@deep_7,lantern++:tv=0.15@deep_7,lantern++:tv=0.3@deep_7,"
    "lantern++:lambda-5@deep_7,lantern++:lambda-20@deep_7,lantern++:distance=3@deep_7"
)


MOST = 0.3  # TV that the plot goes up to


def row_of(asked: str, setting: Resolved, records: Sequence[ImageRecord]) -> dict[str, Any]:
    """A setting's figures, with half the widths of their 95 % intervals over the images."""
    rate, steps = tokens_per_step(records), [record.steps for record in records]
    spent = [record.tv_mean for record in records if record.tv_mean is not None]
    metered, rule = len(spent) == len(records), setting.relaxation
    return {
        "row": asked,
        "tree": setting.tree.name,
        "rule": rule.rule if rule.active else "exact",
        "images": len(records),
        "tokens_per_step": rate,
        "tokens_per_step_around": rate * (interval(steps) or 0.0) / statistics.fmean(steps),
        "tv_per_token": statistics.fmean(spent) if metered else None,
        "tv_per_token_around": interval(spent) if metered else None,
    }


def plot(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Tokens a step by TV of a token: a panel for each tree or window, a colour for each rule."""
    metered = [
        row for row in rows if row["tv_per_token"] is not None and row["tv_per_token"] < MOST
    ]
    trees, rules = (dict.fromkeys(row[name] for row in metered) for name in ("tree", "rule"))
    colours = {rule: f"C{i}" for i, rule in enumerate(rules)}
    with plots.in_style("evaluate"):
        figure, panels = plots.panels(3.2 * len(trees), 4.2, len(trees))
        for axes, tree in zip(panels, trees, strict=True):
            for i, rule in enumerate(rules):
                mine = [row for row in metered if (row["tree"], row["rule"]) == (tree, rule)]
                mine.sort(key=lambda row: float(row["tv_per_token"]))
                x, y = ([row[n] for row in mine] for n in ("tv_per_token", "tokens_per_step"))
                around = [
                    [row[f"{n}_around"] for row in mine]
                    for n in ("tv_per_token", "tokens_per_step")
                ]
                marker = plots.MARKERS[i]
                axes.errorbar(
                    x, y, around[1], around[0], color=colours[rule], marker=marker, label=rule
                )
                for row, across, up in zip(mine, x, y, strict=True):
                    about = row["row"].partition("@")[0].partition(":")[2]
                    plots.label_point(axes, about, (across, up), colours[rule])
            axes.set_title(typed(tree))
            axes.set_xlabel("TV a token")
            axes.set_xlim(-0.03, max(row["tv_per_token"] for row in metered) + 0.04)
        panels[0].set_ylabel("tokens a step")
        plots.legend_under(figure, panels[0], 6)
        return plots.saved(figure, "png")


def main() -> None:
    parser = argparse.ArgumentParser("frontier", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", default="builtin", help="as for `generate` (builtin)")
    add("--method", default=ROWS, help="settings")
    add("--num-images", type=int, default=32, help="of each setting (32)")
    add("--batch-size", type=int, default=8, help="images decoded together (8)")
    add("--output", type=Path, required=True, metavar="FILE.json", help="what it has is kept")
    add("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    known = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    missing = [text for text in args.method.split(",") if text not in {row["row"] for row in known}]
    pipeline = LanternPipeline.from_pretrained(args.model)
    prompts = usual_prompts(pipeline.model.condition.classes)
    for asked in tqdm(missing, unit="setting"):
        setting = pipeline.resolve(asked)
        how = pipeline.model.sampling, setting.relaxation
        requests = in_turn(prompts, range(args.num_images), 0, *how)
        result = pipeline.draw(requests, setting, args.batch_size, decode=False)
        known.append(row_of(asked, setting, result.records))
        document = {"model": args.model, "weights": pipeline.model.files, "rows": known}
        write_file(args.output, json.dumps(document, indent=1).encode(), force=True)
    if args.plot:
        write_file(args.plot, plot(known), force=True)


if __name__ == "__main__":
    main()
