"""The columns of the benchmark: fields of `SpeedRow` with what each means, and which of them a terminal shows.

`measure.RunMeter` fills the fields; `report.schema` is generated from them. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from textwrap import wrap
from typing import Any

from lantern_hpu.methods.relaxation import PRESETS, read_relaxation
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.results.tables import WIDTH, Columns, Table, figure, percent, ratio

EAGER = "eager"
PARTS = ("draft", "tables", "verify", "accept", "commit", "host")  # of a step


def column(about: str = "", **more: Any) -> Any:
    """A field of a row; `more` are `kind`, its type for the schema; `above_zero`; `newer`: old files lack it."""
    given = {"default": more.pop("default")} if "default" in more else {}
    return field(**given, metadata={"about": about, **more})


def timed(about: str = "", **more: Any) -> Any:
    """A figure that is divided by: more than 0."""
    return column(about, above_zero=True, **more)


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """A method with its tree in one graph mode and batch size. Seconds, bytes and counts; ms where a name says so."""

    method: str = column(kind=tuple(METHODS))
    tree: str = column("name of the draft tree; `root` for ar")
    relaxation: dict[str, Any] = column(kind={"rule": str, "...": None})
    graphs: str = column("graph mode that ran the step")
    batch_size: int = timed()
    # Images
    images: int = timed("timed images")
    batch_seconds: list[float] = column("of each timed batch, prompt to pixels")
    seconds_per_image: float = timed(
        "mean, prompt to pixels, the batch's time shared by its images"
    )
    p50_seconds_per_image: float = timed()
    p95_seconds_per_image: float = timed()
    p50_batch_s: float = timed("what a user waits for an image of a batch, median")
    p95_batch_s: float = timed()
    images_per_second: float = timed()
    prefill_s_per_image: float = column()
    steps_s_per_image: float = column()
    vq_decode_s_per_image: float = column()
    # What was accepted
    tokens_per_step: float = timed("bonus token included")
    accepted_per_step: float = column("drafts alone")
    accepted_by_depth: list[float] = column(
        "share of steps that accepted a draft at depth 1, 2, .."
    )
    accept_rate_by_depth: list[float | None] = column("of steps that accepted the depth before")
    relaxed_accepts_per_image: float = column()
    tv_per_token: float | None = column(
        "total variation to the target's distribution that relaxation cost, mean; null where it was not metered",
        newer=True,
    )
    # Steps
    steps: int = timed("timed steps of the batch")
    ms_per_step: float = timed("of the batch, mean; its share of feeding and reading included")
    p50_ms_per_step: float = timed("over blocks, the steps between two host reads")
    p95_ms_per_step: float = timed()
    step_alone_ms: float = timed("the same step repeated, with nothing fed or read between")
    host_share: float = column("of ms_per_step, what step_alone_ms leaves; 0 or more")
    eager_step_ms: dict[str, float] = column(
        "parts of an eager step, with a wait for the device between them; host is what is left of the whole",
        kind=dict.fromkeys(PARTS, float),
    )
    step_passes: dict[str, Any] = column(
        "[tokens, logits] of each pass of the drafter and of the target, a row",
        kind={"draft": list[list[int]], "verify": list[int]},
    )
    floor_ms: float = timed("least time of the step by the device's measured rates")
    floor_ratio: float = timed("floor_ms over ms_per_step; above 1 where weights stay in a cache")
    verify_floor_ms: float = timed()
    verify_floor_ratio: float = timed("of the eager split's verify")
    floor_bound: str = column(kind=("bandwidth", "arithmetic"))
    # The host and the recording
    host_reads: int = column()
    host_reads_per_image: float = column()
    graph_replays: int = column()
    recompiles_after_warmup: int = column()
    warmup_s: float = column("building, capturing and replaying, and the first steps")
    capture_s: float = column("of it, recording graphs")
    startup_s: float = column("import, load and warm-up: until the first image could begin")
    state_bytes: int = column("of the tensors that a step changes, caches included")
    peak_memory_bytes: int | None = column(
        "while the row was measured, on CUDA and HPU; elsewhere of the process so far"
    )
    # Against other rows: see `with_speeds`
    speed_against_ar: float | None = column("of the same graph mode and batch", default=None)
    speed_against_eager: float | None = column("of the same method, tree and batch", default=None)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SpeedRow:
        """What `as_json` wrote; fields of earlier programs that mean nothing now are left out."""
        known = {part.name for part in fields(cls)}
        row = {"tv_per_token": None, **values}
        return cls(**{name: value for name, value in row.items() if name in known})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def draft(self) -> tuple[str, str, int]:
        """What rows of one setting in several graph modes share: method with relaxation, tree, batch size."""
        return relaxed_name(self.method, self.relaxation), self.tree, self.batch_size


def relaxed_name(method: str, relaxation: Mapping[str, Any]) -> str:
    """A method, and its relaxation if that is not the method's own: `scd:lambda-5`, in the written form of settings."""
    rule = read_relaxation(dict(relaxation))
    verify = ":verify=token" if rule.verify == "token" else ""
    rule = replace(rule, verify="auto")
    rule = next((preset for preset in PRESETS.values() if preset == rule), rule)  # has its name
    known = METHODS[method]
    own = not rule.active or rule == known.relaxation or not known.takes_relaxation(rule)
    return (method if own else f"{method}:{rule}") + verify


def with_speeds(rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    """Rows with their speed against `ar` of the same graph mode and batch and against their eager runs, where known."""
    base = {(r.graphs, r.batch_size): r.seconds_per_image for r in rows if r.method == "ar"}
    eager = {row.draft: row.seconds_per_image for row in rows if row.graphs == EAGER}
    result = []
    for row in rows:
        ar, own = base.get((row.graphs, row.batch_size)), eager.get(row.draft)
        against_ar, against_own = (s and s / row.seconds_per_image for s in (ar, own))
        result.append(replace(row, speed_against_ar=against_ar, speed_against_eager=against_own))
    return result


# ------------------------------------------------------------------------------------ what a terminal shows

NAMES: Columns = {
    "method": lambda row: row.draft[0],
    "tree": lambda row: row.tree,
    "graphs": lambda row: row.graphs,
    "batch": lambda row: str(row.batch_size),
}
FIGURES: Columns = {
    "s an image": lambda row: figure(row.seconds_per_image),
    "p95": lambda row: figure(row.p95_seconds_per_image),
    "tokens a step": lambda row: ratio(row.tokens_per_step),
    "TV a token": lambda row: figure(row.tv_per_token),
    "ms a step": lambda row: figure(row.ms_per_step),
    "x ar": lambda row: ratio(row.speed_against_ar),
    "host": lambda row: percent(row.host_share),
    "of floor": lambda row: percent(row.floor_ratio),
}
LEGEND = (
    "s an image: mean, from prompt to pixels; p95: 95 % took no longer. x ar: speed against ar of the same graph mode "
    "and batch. host: share of a step that the host takes. of floor: the least time of a step by the rates above, of "
    "ms a step. A written report has the rest."
)


def square_table(rows: Sequence[SpeedRow]) -> str:
    """{ar, method} x {eager, recorded}: what each costs, and how much faster than the first mode the others are."""
    modes = list(dict.fromkeys(row.graphs for row in rows))
    if len(modes) < 2:
        return ""
    cells = {(row.draft, row.graphs): row.seconds_per_image for row in rows}
    head = ["method", "tree", "batch", *(f"{mode}, s an image" for mode in modes)]
    head += [f"{mode} x {modes[0]}" for mode in modes[1:]]
    lines = []
    for key in dict.fromkeys(row.draft for row in rows):
        first, *others = costs = [cells.get((key, mode)) for mode in modes]
        gains = [ratio(first / other if first and other else None) for other in others]
        lines.append([*map(str, key), *map(figure, costs), *gains])
    return Table(head, lines).markdown()


def split_table(rows: Sequence[SpeedRow]) -> str:
    """The parts of an eager step; each row once, as they do not depend on its graphs."""

    def share(part: str) -> Callable[[SpeedRow], str]:
        return lambda row: percent(row.eager_step_ms[part] / sum(row.eager_step_ms.values()))

    columns: Columns = {
        **{name: NAMES[name] for name in ("method", "tree", "batch")},
        "eager step, ms": lambda row: figure(sum(row.eager_step_ms.values())),
        **{part: share(part) for part in PARTS},
        "verify floor, ms": lambda row: figure(row.verify_floor_ms),
        "of floor": lambda row: percent(row.verify_floor_ratio),
    }
    return Table.of(columns, {row.draft: row for row in rows}.values()).markdown()


def reference_line(report: Mapping[str, Any]) -> str:
    """The model, and the device's measured rates."""
    rates, dtype = report["rates"], report["dtype"]
    said = [f"copies {rates['copy_bytes_per_s'] / 1e9:.3g} GB/s (read and written)"]
    matrices = {"bfloat16": rates["bf16_operations_per_s"], dtype: rates["operations_per_s"]}
    said += [f"{name} matrices {v / 1e12:.3g} TFLOP/s" for name, v in matrices.items() if v]
    return f"{report['model']}, {dtype}, {report['device_title']}: {'; '.join(said)}"


def tables(report: Mapping[str, Any]) -> str:
    rows = [SpeedRow.from_json(row) for row in report["rows"]]
    notes = "\n".join(f"note: {note}" for note in report["notes"])
    shown = Table.of({**NAMES, **FIGURES}, rows).markdown()
    legend = "\n".join(wrap(LEGEND, WIDTH, break_on_hyphens=False))
    parts = [reference_line(report), shown, legend, square_table(rows), split_table(rows), notes]
    return "\n\n".join(part for part in parts if part)
