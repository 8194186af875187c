"""A benchmark from its options to its report."""

from __future__ import annotations

import os
import platform
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from lantern_hpu.backends.host import processor_name
from lantern_hpu.decode.accelerators import Rates, accelerators, projected_ms
from lantern_hpu.errors import Arg, DeviceError, as_option, spelled, words
from lantern_hpu.methods.setting import AUTO
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import mean_tv, tokens_per_step
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.results.prompts import usual_prompts
from lantern_lab.measure import meter as metering
from lantern_lab.measure.floors import StepPasses, floor, sizes
from lantern_lab.measure.meter import Meter, split_step, step_alone, usual_requests
from lantern_lab.measure.options import BenchRequest, cases_of, has_long_steps, measurable_modes
from lantern_lab.measure.reports import KIND, VERSION, heading
from lantern_lab.measure.rows import EAGER, Case, Row, with_speeds


def run_bench(
    pipeline: LanternPipeline, wanted: BenchRequest, argv: Sequence[str], import_s: float
) -> dict[str, Any]:
    """The report, with a pipeline of `open_pipeline`; imports took `import_s` seconds."""
    modes, notes = measurable_modes(pipeline.backend, wanted.modes, wanted.by_name)
    cases = cases_of(pipeline, wanted, modes)
    dtype = pipeline.model.target.dtype
    measured = metering.measure_rates(pipeline.backend, dtype)
    speeds = measured["copy_bytes_per_s"], measured["operations_per_s"]
    rates = Rates(*speeds, dtype.itemsize, pipeline.fit.weight_bytes(pipeline.model.quantize))
    startup = {"import_s": import_s, "load_s": pipeline.load_seconds}
    rows, missed = measure_all(pipeline, wanted, cases, rates, sum(startup.values()))
    if not rows:
        hint = words("a smaller", Arg("batch_sizes"))
        raise DeviceError("nothing could be measured", "; ".join(missed), hint)
    report = heading(KIND, pipeline, argv) | about(pipeline, wanted)
    peaks = [peak for row in rows if (peak := row["peak_memory_bytes"]) is not None]
    report["environment"]["peak_memory_bytes"] = max(peaks, default=None)
    best = pipeline.backend.graph_mode(AUTO)
    return report | {
        "version": VERSION,
        "rates": measured,
        "startup": startup,
        "graphs": {"asked": wanted.modes, "measured": modes, "best": best},
        "notes": notes + missed + limits(pipeline, wanted),
        "rows": [row.as_json() for row in with_speeds(rows)],
    }


def open_pipeline(wanted: BenchRequest) -> LanternPipeline:
    """The model on its device, in a layout of its matrices that all graph modes can run."""
    options = replace(wanted.options, graphs=wanted.mode)
    if "compile" in wanted.modes:
        layout = "plain" if options.layout == AUTO else options.layout
        options = replace(options, layout=layout)
    return LanternPipeline.load(wanted.model, options)


# ------------------------------------------------------------------------------------ measuring


def measure_all(
    pipeline: LanternPipeline,
    wanted: BenchRequest,
    cases: Sequence[Case],
    rates: Rates,
    startup_s: float,
) -> tuple[list[Row], list[str]]:
    """All rows, with a line of progress, and what to say about those that the device refused."""
    rows: list[Row] = []
    missed: list[str] = []
    with ProgressBar(sum(-(-wanted.images // case.batch) for case in cases), "batch") as bar:
        for mode, of_mode in groupby(cases, lambda case: case.graphs):
            # Recorded graphs share memory, which must not go with the last of them while another is to come: so
            # the first engine stays until the mode is done, a small one as batch sizes grow.
            first: LanternPipeline | None = None
            # What is measured together: one by one, or those of a batch size in turns
            for _, group in groupby(of_mode, lambda c: c.batch if wanted.interleave else id(c)):
                pairs = [
                    (LanternPipeline(pipeline.model, replace(pipeline.fit, graphs=mode)), case)
                    for case in group
                ]
                for meter in drawn_meters(pairs, wanted, bar, missed):
                    with refusals(meter.pipeline, meter.case, missed):
                        rows.append(Row.of(meter.case, speed_of(meter, rates, startup_s)))
                for drawing, _ in pairs:
                    if first is None and mode != EAGER and drawing.engines.engines:
                        first = drawing
                    else:
                        drawing.engines.shrink(0)
            if first is not None:
                first.engines.shrink(0)
    return rows, missed


def drawn_meters(
    pairs: Sequence[tuple[LanternPipeline, Case]],
    wanted: BenchRequest,
    bar: ProgressBar,
    missed: list[str],
) -> list[Meter]:
    """Cases of one graph mode and batch size, each on a pipeline of its own: all are warmed up, then each draws a
    batch in turn. Those that the device refuses are added to `missed`."""
    waiting = deque[Meter]()
    count = -(-wanted.images // pairs[0][1].batch)
    until = bar.n + count * len(pairs)
    pairs[0][0].backend.memory(reset_peak=True)
    for pipeline, case in pairs:
        bar.set_description(str(case))
        with refusals(pipeline, case, missed):
            waiting.append(open_meter(pipeline, wanted, case, bar))
    for _ in range(count):
        for _ in range(len(waiting)):
            meter = waiting.popleft()  # so that one that is refused frees its engine
            with refusals(meter.pipeline, meter.case, missed):
                metering.take_turns([meter], 1, bar)
                waiting.append(meter)
    bar.update(until - bar.n)
    return list(waiting)


def open_meter(
    pipeline: LanternPipeline, wanted: BenchRequest, case: Case, bar: ProgressBar
) -> Meter:
    requests = usual_requests(pipeline, case, wanted.images, wanted.seed)
    return Meter(pipeline, case, requests, show=bar.set_postfix_str)


@contextmanager
def refusals(pipeline: LanternPipeline, case: Case, missed: list[str]) -> Iterator[None]:
    """A device that refuses a row, for lack of memory, may do for others: note it, and give back its engines."""
    try:
        with pipeline.backend.errors(), torch.no_grad():
            yield
    except DeviceError as error:
        missed.append(f"not measured: {case}: {spelled(error.reason, as_option)}")
        pipeline.engines.shrink(0)


# ------------------------------------------------------------------------------------ the figures of a row


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median and the 95th percentile of a figure, between neighbours in proportion."""
    return {f"p{p}_{name}": float(np.percentile(values, p)) for p in (50, 95)}


def speed_of(meter: Meter, rates: Rates, startup_s: float) -> dict[str, Any]:
    """Figures of `rows.SPEED` of the batches that a meter drew; importing and loading took `startup_s` seconds."""
    engine = meter.engine
    memory = meter.pipeline.backend.memory()
    counted = engine.report()  # without the steps that are taken for their parts
    reads = counted.host_reads - meter.before.host_reads
    images = len(records_of(meter))
    figures = image_figures(meter) | acceptance(meter) | step_figures(meter, rates)
    stats = engine.report()
    return figures | {
        "host_reads": reads,
        "host_reads_per_image": reads / images,
        "graph_replays": counted.replays - meter.before.replays,
        "recompiles_after_warmup": stats.recompiles_after_warmup,
        "warmup_s": meter.warmup_s,
        "capture_s": stats.capture_seconds,
        "startup_s": startup_s + meter.warmup_s,
        "state_bytes": sum(tensor.nbytes for tensor in engine.state.tensors().values()),
        "peak_memory_bytes": memory.peak,
    }


def records_of(meter: Meter) -> list[Any]:
    return [record for batch in meter.batches for record in batch.records]


def image_figures(meter: Meter) -> dict[str, Any]:
    batches = meter.batches
    images = len(records_of(meter))
    size = meter.case.batch
    seconds = [batch.seconds for batch in batches]
    return {
        "images": images,
        "batch_seconds": seconds,
        "seconds_per_image": sum(seconds) / images,
        **percentiles("seconds_per_image", [each / size for each in seconds]),
        **percentiles("batch_s", seconds),
        "images_per_second": images / sum(seconds),
        "prefill_s_per_image": sum(batch.stats.prefill_s for batch in batches) / images,
        "steps_s_per_image": sum(spent for batch in batches for spent, _ in batch.blocks) / images,
        "vq_decode_s_per_image": sum(batch.pixel_seconds for batch in batches) / images,
    }


def acceptance(meter: Meter) -> dict[str, Any]:
    records = records_of(meter)
    images = len(records)
    steps = sum(record.steps for record in records)
    by_depth = zip(*(record.accepted_by_depth for record in records), strict=True)
    accepted = [sum(counts) for counts in by_depth]
    return {
        "tokens_per_step": tokens_per_step(records),
        "accepted_per_step": sum(accepted) / steps,
        "accepted_by_depth": [count / steps for count in accepted],
        # Of the steps that accepted the depth before; None where there were none
        "accept_rate_by_depth": [
            now / last if last else None
            for now, last in zip(accepted, [steps, *accepted], strict=False)
        ],
        "relaxed_accepts_per_image": sum(record.relaxed_accepts for record in records) / images,
        "tv_per_token": mean_tv(records),
    }


def step_figures(meter: Meter, rates: Rates) -> dict[str, Any]:
    """Times of steps, their parts, and the least that they can take."""
    engine = meter.engine
    requests = meter.batch_of(0)
    pipeline = meter.pipeline
    blocks = [block for batch in meter.batches for block in batch.blocks]
    # Of each step; all of a block alike
    each = [1000 * seconds / steps for seconds, steps in blocks for _ in range(steps)]
    prefix = pipeline.prefix(engine, requests)
    mean = sum(each) / len(each)
    most = metering.BRIEF_STEPS if meter.is_long else metering.SPLIT_STEPS
    alone = step_alone(engine, prefix, requests, most)
    parts = split_step(engine, prefix, requests, most)
    passes = StepPasses.of(meter.case.setting.tree)
    least = floor(pipeline.model.config, passes, engine.spec.rows, rates)
    return {
        "steps": len(each),
        "ms_per_step": mean,
        **percentiles("ms_per_step", each),
        "step_alone_ms": alone,
        "host_share": max(0.0, 1 - alone / mean),
        "eager_step_ms": parts,
        "step_passes": passes._asdict(),
        "floor_ms": 1000 * least.step,
        "floor_ratio": 1000 * least.step / mean,
        "verify_floor_ms": 1000 * least.verify,
        "verify_floor_ratio": 1000 * least.verify / parts["verify"],
        "floor_bound": least.bound,
        "projected_ms": projected_step(meter),
    }


def projected_step(meter: Meter) -> tuple[float, float] | None:
    """Of recorded steps of one image on a card whose speed is projected; an emulated card has another name."""
    model = meter.pipeline.model
    case = meter.case
    card = accelerators().get(str(meter.pipeline.backend.describe().get("card")).lower())
    like_published = case.batch == 1 and model.target.dtype == torch.bfloat16
    if card is None or card.speeds is None or case.graphs == EAGER or not like_published:
        return None
    return projected_ms(card, model.config, case.setting.tree, meter.engine.spec.rows)


# ------------------------------------------------------------------------------------ what else a report says


def about(pipeline: LanternPipeline, wanted: BenchRequest) -> dict[str, Any]:
    model = pipeline.model
    processor = processor_name()
    digests = [digest for name, digest in model.files.items() if "drafter" in name]
    modules = [model.target, *([model.drafter] if model.drafter else [])]
    guidance = model.sampling.cfg_scale != 1
    return {
        "device_title": device_title(pipeline.environment(), processor),
        "host": {
            "processor": processor,
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "weights": {"target": model.fingerprint, "drafter": digests[0] if digests else None},
        # A packed matrix is a buffer
        "weights_bytes": sum(x.nbytes for m in modules for x in (*m.parameters(), *m.buffers())),
        "settings": {
            "sampling": asdict(model.sampling),
            "seed": wanted.seed,
            "prompts": list(usual_prompts(model.condition.classes)),
            "images": wanted.images,
            "kernels": wanted.options.kernels,
            "warm_up": metering.BRIEF_WARM_UP if has_long_steps(pipeline) else metering.WARM_UP,
        },
        "sizes": sizes(model.config, guidance, model.target.dtype.itemsize),
    }


def device_title(environment: Mapping[str, Any], processor: str) -> str:
    """What a reader calls the device: the card, or the processor and how many of its threads were used."""
    card = environment.get("card")
    if card:
        return str(card)
    plain = re.sub(r"\s+", " ", re.sub(r"\((R|TM)\)", "", processor)).strip()
    threads = environment.get("threads")
    name = plain or str(environment["device"])
    return f"{name}, {threads} thread{'s' * (threads != 1)}" if threads else name


INTERLEAVED = (
    "rows of a graph mode and batch size took turns, a batch of images each, so that a drift of the machine's speed "
    "affects all alike; the parts of a step and the host's share were taken afterwards, and peaks of memory are of all "
    "of them together"
)


def limits(pipeline: LanternPipeline, wanted: BenchRequest) -> list[str]:
    """What a reader of the figures has to know."""
    unknown = pipeline.backend.memory().peak is None
    peak = ["the device does not report its peak of memory"] if unknown else []
    decided = pipeline.fit.decided.items()
    products = [f"{name}: {why}" for name, why in decided if name.startswith("product")]
    notes = [*pipeline.model.notes, *([INTERLEAVED] if wanted.interleave else [])]
    return [*notes, *peak, *products]
