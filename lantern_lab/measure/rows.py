"""A measured setting is one `Row`, in every report; and the tables of rows that a terminal shows. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import wrap
from typing import Any, NamedTuple

from lantern_hpu.methods.relaxation import PRESETS, read_relaxation
from lantern_hpu.methods.setting import METHODS, Resolved
from lantern_hpu.results.tables import WIDTH, Columns, Table, between, figure, percent, ratio

EAGER = "eager"
PARTS = ("draft", "tables", "verify", "accept", "commit", "host")  # of a step
IDENTITY = ("method", "tree", "relaxation", "graphs", "batch_size")
# A step over more tokens takes at least this share of one of `ar`, but for what clocks are off
LEAST_STEP = 0.85
MOST_STEP = 1.5  # and at most this many times as many steps of `ar` as it has tokens
MOST_SPREAD = 1.5  # the median of equal steps over the fastest, where nothing else runs

NEWER = {"tv_per_token": None, "projected_ms": None}  # what reports of earlier programs lack
# Figures of `bench` by name, with what each means: seconds, bytes and counts; ms where a name says so
SPEED = {
    "images": "timed images",
    "batch_seconds": "of each timed batch, prompt to pixels",
    "seconds_per_image": "mean, prompt to pixels, the batch's time shared by its images",
    "p50_seconds_per_image": "median over batches",
    "p95_seconds_per_image": "95th percentile over batches",
    "p50_batch_s": "latency of an image in a batch, median",
    "p95_batch_s": "the same, 95th percentile",
    "images_per_second": "throughput",
    "prefill_s_per_image": "of the prompt",
    "steps_s_per_image": "of decode steps",
    "vq_decode_s_per_image": "of pixels",
    "tokens_per_step": "bonus token included",
    "accepted_per_step": "drafts alone",
    "accepted_by_depth": "share of steps that accepted a draft at depth 1, 2, ..",
    "accept_rate_by_depth": "share of the steps that accepted the depth before; null where none did",
    "relaxed_accepts_per_image": "drafts that exact acceptance would have rejected",
    "tv_per_token": "total variation that relaxation cost, mean; null where it was not metered",
    "steps": "timed steps of the batch",
    "ms_per_step": "of the batch, mean; its share of uploads and host reads included",
    "p50_ms_per_step": "over blocks, the steps between two host reads",
    "p95_ms_per_step": "the same, 95th percentile",
    "step_alone_ms": "the same step repeated without inputs or host reads",
    "host_share": "share of ms_per_step that step_alone_ms leaves; 0 or more",
    "eager_step_ms": "parts of an eager step, with a sync after each; host is the rest",
    "step_passes": "[tokens, logits] of each pass of the drafter and of the target, a row",
    "floor_ms": "least time of the step by the device's measured rates",
    "floor_ratio": "floor_ms over ms_per_step; above 1 where weights stay in a cache",
    "verify_floor_ms": "the same of the target's pass",
    "verify_floor_ratio": "of the eager split's verify",
    "floor_bound": "bandwidth or arithmetic",
    "projected_ms": "of a step, from and to, by speeds published of other models on this card; null without",
    "host_reads": "of the timed batches",
    "host_reads_per_image": "their mean",
    "graph_replays": "of the timed batches",
    "recompiles_after_warmup": "captures after the warm-up: more than 0 is a bug",
    "warmup_s": "building, capturing, replaying, and the first steps",
    "capture_s": "of it, recording graphs",
    "startup_s": "import, load and warm-up: until the first image could begin",
    "state_bytes": "of the tensors that a step changes, caches included",
    "peak_memory_bytes": "while the row was measured, on CUDA and HPU; elsewhere of the process so far",
    "speed_against_ar": "of the same graph mode and batch; null without one",
    "speed_against_eager": "of the same method, tree and batch; null without one",
}


class Case(NamedTuple):
    """What a row is to measure."""

    setting: Resolved
    graphs: str
    batch: int

    def __str__(self) -> str:
        return f"{self.setting}, {self.graphs}, batch {self.batch}"


@dataclass(frozen=True)
class Row:
    """A setting in one graph mode and batch size, with all that was measured of it.

    Attributes:
        tree: name of the draft tree; `root` for ar.
        relaxation: as `Relaxation.as_json` has it.
        figures: by name; `row["tokens_per_step"]` is one of them.
    """

    method: str
    tree: str
    relaxation: Mapping[str, Any]
    graphs: str
    batch_size: int
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, figures: Mapping[str, Any]) -> Row:
        setting, graphs, batch = case
        rule = setting.relaxation.as_json()
        return cls(setting.method, setting.tree.name, rule, graphs, batch, figures)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Row:
        """What `as_json` wrote; `projected` of earlier programs is left out."""
        known = {**NEWER, **values}
        figures = {n: known[n] for n in known if n not in (*IDENTITY, "projected")}
        return cls(**{name: known[name] for name in IDENTITY}, figures=figures)

    def __getitem__(self, figure: str) -> Any:
        return self.figures[figure]

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in IDENTITY} | dict(self.figures)

    def adding(self, **figures: Any) -> Row:
        return replace(self, figures={**self.figures, **figures})

    @property
    def name(self) -> str:
        """The method, with its relaxation where that is not the method's own."""
        return relaxed_name(self.method, self.relaxation)

    @property
    def draft(self) -> tuple[str, str, int]:
        """The same for rows of one setting in several graph modes: name, tree, batch size."""
        return self.name, self.tree, self.batch_size


def relaxed_name(method: str, relaxation: Mapping[str, Any]) -> str:
    """A method, and its relaxation if that is not the method's own: `scd:lambda-5`, in the written form of settings."""
    rule = read_relaxation(dict(relaxation))
    verify = ":verify=token" if rule.verify == "token" else ""
    rule = replace(rule, verify="auto")
    rule = next((preset for preset in PRESETS.values() if preset == rule), rule)  # has its name
    known = METHODS[method]
    own = not rule.active or rule == known.relaxation or not known.takes_relaxation(rule)
    return (method if own else f"{method}:{rule}") + verify


def in_numbers(tree: str) -> list[tuple[int, str]]:
    """A key that sorts `scd:8` before `scd:16`."""
    return [(int(part or 0) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", tree)]


def with_speeds(rows: Sequence[Row]) -> list[Row]:
    """Rows with their speed against `ar` of the same graph mode and batch and against their eager runs, where known."""
    seconds = "seconds_per_image"
    base = {(row.graphs, row.batch_size): row[seconds] for row in rows if row.method == "ar"}
    eager = {row.draft: row[seconds] for row in rows if row.graphs == EAGER}

    def speed(row: Row, other: float | None) -> float | None:
        return other and other / row[seconds]

    return [
        row.adding(
            speed_against_ar=speed(row, base.get((row.graphs, row.batch_size))),
            speed_against_eager=speed(row, eager.get(row.draft)),
        )
        for row in rows
    ]


def doubtful_step(tokens: int, step: float, alone: float) -> str:
    """Why a step over so many tokens cannot have taken `step` ms on a quiet machine, if one of `ar` took `alone`;
    empty where it can."""
    took = f"a step over {tokens} tokens took {step:.1f} ms, one of ar {alone:.1f}"
    if step < LEAST_STEP * alone:
        return f"{took}: it cannot take less"
    if step > MOST_STEP * tokens * alone:
        return f"{took}: it cannot take more than {tokens} of these"
    return ""


# ------------------------------------------------------------------------------------ what a terminal shows

NAMES: Columns = {
    "method": lambda row: row.name,
    "tree": lambda row: row.tree,
    "graphs": lambda row: row.graphs,
    "batch": lambda row: str(row.batch_size),
}
FIGURES: Columns = {
    "s an image": lambda row: figure(row["seconds_per_image"]),
    "p95": lambda row: figure(row["p95_seconds_per_image"]),
    "tokens a step": lambda row: ratio(row["tokens_per_step"]),
    "TV a token": lambda row: figure(row["tv_per_token"]),
    "ms a step": lambda row: figure(row["ms_per_step"]),
    "x ar": lambda row: ratio(row["speed_against_ar"]),
    "host": lambda row: percent(row["host_share"]),
    "of floor": lambda row: percent(row["floor_ratio"]),
}
LEGEND = (
    "s an image: mean, from prompt to pixels; p95: 95 % took no longer. x ar: speed against ar of the same graph mode "
    "and batch. host: share of a step that the host takes. of floor: the least time of a step by the rates above, of "
    "ms a step. A written report has the rest."
)


def square_table(rows: Sequence[Row]) -> str:
    """{ar, method} x {eager, recorded}: what each costs, and how much faster than the first mode the others are."""
    modes = list(dict.fromkeys(row.graphs for row in rows))
    if len(modes) < 2:
        return ""
    cells = {(row.draft, row.graphs): row["seconds_per_image"] for row in rows}
    head = ["method", "tree", "batch", *(f"{mode}, s an image" for mode in modes)]
    head += [f"{mode} x {modes[0]}" for mode in modes[1:]]
    lines = []
    for key in dict.fromkeys(row.draft for row in rows):
        first, *others = costs = [cells.get((key, mode)) for mode in modes]
        gains = [ratio(first / other if first and other else None) for other in others]
        lines.append([*map(str, key), *map(figure, costs), *gains])
    return Table(head, lines).markdown()


def split_table(rows: Iterable[Row]) -> str:
    """The parts of an eager step; each row once, as they do not depend on its graphs."""

    def share(part: str) -> Callable[[Row], str]:
        return lambda row: percent(row["eager_step_ms"][part] / sum(row["eager_step_ms"].values()))

    columns: Columns = {
        **{name: NAMES[name] for name in ("method", "tree", "batch")},
        "eager step, ms": lambda row: figure(sum(row["eager_step_ms"].values())),
        **{part: share(part) for part in PARTS},
        "verify floor, ms": lambda row: figure(row["verify_floor_ms"]),
        "of floor": lambda row: percent(row["verify_floor_ratio"]),
    }
    return Table.of(columns, {row.draft: row for row in rows}.values()).markdown()


def projected_line(rows: Iterable[Row]) -> str:
    """Measured steps against projected ones; empty where none are projected."""
    steps = [
        f"{row.name} {row.tree} {row['ms_per_step']:.2f} against {between(row['projected_ms'])}"
        for row in rows
        if row["projected_ms"]
    ]
    return f"measured against projected ms a step: {'; '.join(steps)}" if steps else ""


def reference_line(report: Mapping[str, Any]) -> str:
    """The model, and the device's measured rates."""
    rates = report["rates"]
    dtype = report["dtype"]
    said = [f"copies {rates['copy_bytes_per_s'] / 1e9:.3g} GB/s (read and written)"]
    matrices = {"bfloat16": rates["bf16_operations_per_s"], dtype: rates["operations_per_s"]}
    said += [f"{name} matrices {v / 1e12:.3g} TFLOP/s" for name, v in matrices.items() if v]
    return f"{report['model']}, {dtype}, {report['device_title']}: {'; '.join(said)}"


def speed_tables(report: Mapping[str, Any]) -> str:
    """What `bench` prints of its report."""
    rows = [Row.from_json(row) for row in report["rows"]]
    notes = "\n".join(f"note: {note}" for note in report["notes"])
    shown = Table.of({**NAMES, **FIGURES}, rows).markdown()
    legend = "\n".join(wrap(LEGEND, WIDTH, break_on_hyphens=False))
    tables = [shown, legend, square_table(rows), split_table(rows)]
    parts = [reference_line(report), *tables, projected_line(rows), notes]
    return "\n\n".join(part for part in parts if part)
