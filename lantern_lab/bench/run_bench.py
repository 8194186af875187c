"""A benchmark from its options to its report."""

from __future__ import annotations

import os
import platform
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

import torch

from lantern_hpu.backends.host import processor_name
from lantern_hpu.errors import Arg, DeviceError, as_option, spelled, words
from lantern_hpu.methods.request import in_turn
from lantern_hpu.methods.setting import AUTO
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.plan.floors import Rates, sizes
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.results.prompts import usual_prompts
from lantern_lab.bench.cases import BenchRequest, Case, cases_of, has_long_steps, measurable_modes
from lantern_lab.bench.columns import EAGER, SpeedRow, with_speeds
from lantern_lab.bench.measure import BRIEF_WARM_UP, WARM_UP, RunMeter, measure_rates
from lantern_lab.bench.report import KIND, VERSION, heading


def run_bench(
    pipeline: LanternPipeline, wanted: BenchRequest, argv: Sequence[str], import_s: float
) -> dict[str, Any]:
    """The report, with a pipeline of `open_pipeline`; imports took `import_s` seconds."""
    modes, notes = measurable_modes(pipeline.backend, wanted.modes, wanted.by_name)
    cases = cases_of(pipeline, wanted, modes)
    dtype = pipeline.model.target.dtype
    measured = measure_rates(pipeline.backend, dtype)
    speeds = measured["copy_bytes_per_s"], measured["operations_per_s"]
    rates = Rates(*speeds, dtype.itemsize, pipeline.fit.weight_bytes)
    startup = {"import_s": import_s, "load_s": pipeline.load_seconds}
    rows, missed = measure_all(pipeline, wanted, cases, rates, sum(startup.values()))
    if not rows:
        hint = words("a smaller", Arg("batch_sizes"))
        raise DeviceError("nothing could be measured", "; ".join(missed), hint)
    report = heading(KIND, pipeline, argv) | about(pipeline, wanted)
    peaks = [row.peak_memory_bytes for row in rows if row.peak_memory_bytes is not None]
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


def measure_all(
    pipeline: LanternPipeline,
    wanted: BenchRequest,
    cases: Sequence[Case],
    rates: Rates,
    startup_s: float,
) -> tuple[list[SpeedRow], list[str]]:
    """All rows, with a line of progress, and what to say about those that the device refused."""
    rows: list[SpeedRow] = []
    missed: list[str] = []
    total = sum(case.timed_batches(wanted.images) for case in cases)
    with ProgressBar(total, "batch") as bar:
        for mode, of_mode in groupby(cases, lambda case: case.mode):
            # Recorded graphs share memory, which must not go with the last of them while another is to come: so
            # the first engine stays until the mode is done, a small one as batch sizes grow.
            first: LanternPipeline | None = None
            # What is measured together: one by one, or those of a batch size in turns
            for _, group in groupby(of_mode, lambda c: c.batch if wanted.interleave else id(c)):
                pairs = [
                    (LanternPipeline(pipeline.model, replace(pipeline.fit, graphs=mode)), case)
                    for case in group
                ]
                rows += measure_group(pairs, wanted, rates, startup_s, bar, missed)
                for drawing, _ in pairs:
                    if first is None and mode != EAGER and drawing.engines.engines:
                        first = drawing
                    else:
                        drawing.engines.shrink(0)
            if first is not None:
                first.engines.shrink(0)
    return rows, missed


def measure_group(
    pairs: Sequence[tuple[LanternPipeline, Case]],
    wanted: BenchRequest,
    rates: Rates,
    startup_s: float,
    bar: ProgressBar,
    missed: list[str],
) -> list[SpeedRow]:
    """The rows of a group: all are warmed up, then each draws a batch in turn. Refused ones are added to `missed`.

    Each case has a pipeline of its own; all are of one graph mode and batch size.
    """
    rows: list[SpeedRow] = []
    waiting = deque[RunMeter]()
    count = pairs[0][1].timed_batches(wanted.images)
    until = bar.n + count * len(pairs)
    pairs[0][0].backend.memory(reset_peak=True)
    for pipeline, case in pairs:
        bar.set_description(str(case))
        with refusals(pipeline, case, missed):
            meter = open_meter(pipeline, wanted, case, rates, startup_s, bar.set_postfix_str)
            waiting.append(meter)
    for _ in range(count):
        for _ in range(len(waiting)):
            meter = waiting.popleft()  # so that one that is refused frees its engine
            bar.set_description(str(meter.case))
            with refusals(meter.pipeline, meter.case, missed):
                meter.draw()
                waiting.append(meter)
            bar.update()
    for meter in waiting:
        with refusals(meter.pipeline, meter.case, missed):
            rows.append(meter.row())
    bar.update(until - bar.n)
    return rows


@contextmanager
def refusals(pipeline: LanternPipeline, case: Case, missed: list[str]) -> Iterator[None]:
    """A device that refuses a row, for lack of memory, may do for others: note it, and give back its engines."""
    try:
        with pipeline.backend.errors(), torch.no_grad():
            yield
    except DeviceError as error:
        missed.append(f"not measured: {case}: {spelled(error.reason, as_option)}")
        pipeline.engines.shrink(0)


def open_meter(
    pipeline: LanternPipeline,
    wanted: BenchRequest,
    case: Case,
    rates: Rates,
    startup_s: float,
    show: Callable[[str], object] = str,
) -> RunMeter:
    """The meter of a row, warmed up, with whole batches of requests."""
    model, images = pipeline.model, case.timed_batches(wanted.images) * case.batch
    prompts = usual_prompts(model.condition.takes_classes)
    requests = in_turn(prompts, range(images), wanted.seed, model.sampling, case.setting.relaxation)
    return RunMeter(pipeline, case, requests, rates, startup_s, show)


# ------------------------------------------------------------------------------------ what else a report says


def about(pipeline: LanternPipeline, wanted: BenchRequest) -> dict[str, Any]:
    model, processor = pipeline.model, processor_name()
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
            "prompts": list(usual_prompts(model.condition.takes_classes)),
            "images": wanted.images,
            "kernels": wanted.options.kernels,
            "warm_up": BRIEF_WARM_UP if has_long_steps(pipeline) else WARM_UP,
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
