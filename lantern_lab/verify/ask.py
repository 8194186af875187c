"""In a process that holds the device: questions are answered one by one, and those of a graph mode share engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from lantern_hpu.backends import DeviceOptions
from lantern_hpu.backends.base import LACKING, Backend, difference, get_backend
from lantern_hpu.backends.hpu import errors as hpu_errors
from lantern_hpu.core import Request, RunStats
from lantern_hpu.decode.engine import Engine, GraphReport
from lantern_hpu.decode.memory import DeviceMemory
from lantern_hpu.decode.memory import peak as planned_peak
from lantern_hpu.decode.requirements import Counted, setup_of
from lantern_hpu.errors import LanternError, as_option, spelled
from lantern_hpu.methods.setting import Setting
from lantern_hpu.models.transformer import Target
from lantern_hpu.ops import sampling
from lantern_hpu.pipeline import LanternPipeline
from lantern_lab.measure.bench import open_pipeline, run_bench
from lantern_lab.measure.options import BenchRequest
from lantern_lab.verify.distribution import LEAST_CHANCE, measure
from lantern_lab.verify.gaudi_facts import ask_fact, stands_in
from lantern_lab.verify.items import (
    CUTS_REFUSED,
    DRAWS,
    GROUPED,
    RECAPTURED,
    Question,
    Result,
    Stage,
    State,
)

PROMPT = "a red apple"
SEED = 7
FEW_STEPS = 16  # whose tokens are compared where no card is: that is slow
CACHE_STEPS = 12  # after which the caches are compared
# Sums of several layers, in another order and on a card in lower precision inside
CACHE_TOLERANCE = 2e-2
SEEDS = 256  # whose first tokens are held to the distribution
JUDGED = ("float32", "bfloat16")  # formats in which kernels are asked
# Draws, and the tokens of Emu3 and Emu3.5, each one past a power of two
DRAWN, VOCABULARIES = 64, (32769, 131073)
DRAW_TOLERANCE = 1e-4  # of a sum of that many float32 numbers
FLOORS = ("ms_per_step", "floor_ms", "floor_ratio")  # columns of a benchmark
CUT_STEPS = 2  # the first compiles all that a step is made of
Answer = tuple[State, str, dict[str, Any]]


class Asked:
    """A device, opened when the first question needs it; `stage` is that of the question, and names the graph mode."""

    def __init__(self, stage: Stage, device: str, model: str) -> None:
        self.stage, self.device, self.model = stage, device, model
        self.no_card = stands_in(device)
        self.stack = ExitStack()
        self.counted: dict[str, int] = {}  # by the device itself, in the last steps
        self.pipelines: dict[str, LanternPipeline] = {}  # the one that is open, by its graph mode
        self.host_tokens: dict[str, list[int]] = {}  # by method

    @cached_property
    def backend(self) -> Backend:
        return get_backend(self.device, self.stage.graphs)

    @property
    def pipeline(self) -> LanternPipeline:
        """The model on the device, in the graph mode of the stage."""
        mode = self.stage.graphs
        if mode not in self.pipelines:
            while self.pipelines:
                self.pipelines.popitem()[1].close()
            self.pipelines[mode] = self.opened(DeviceOptions(self.device, "float32", graphs=mode))
        return self.pipelines[mode]

    @cached_property
    def host(self) -> LanternPipeline:
        """The model on the CPU, with the plain step."""
        plain = DeviceOptions(kernels="plain", layout="plain")
        return self.opened(plain.on_host("float32", "eager"))

    def opened(self, options: DeviceOptions) -> LanternPipeline:
        """The model in float32: only so are tokens to be compared."""
        made = LanternPipeline.from_pretrained(self.model, **vars(options))
        return self.stack.enter_context(closing(made))

    def drawn(self, pipeline: LanternPipeline, method: str) -> tuple[list[int], int, GraphReport]:
        """The tokens of one image, or of its beginning where no card is; steps; what the runners did."""
        engine, steps = self.steps(pipeline, method, FEW_STEPS if self.no_card else None)
        assert engine.known is not None
        known = engine.read(engine.known)[0]
        return engine.read_tokens()[0, :known].tolist(), steps, engine.report()

    def steps(self, pipeline: LanternPipeline, method: str, most: int | None) -> tuple[Engine, int]:
        """An engine after at most `most` steps of one image, and how many those were."""
        # Of the device asked, also on the CPU: default trees differ by device
        chosen, timing = self.pipeline.resolve(method), RunStats()
        request = Request(PROMPT, SEED, pipeline.model.sampling, chosen.relaxation)
        engine = pipeline.engines.get(pipeline.spec([request], chosen.tree, 1))
        pipeline.prepare(engine, [request], timing)
        before = pipeline.backend.transfers.counters()
        with pipeline.backend.errors(), torch.no_grad():
            list(pipeline.stream(engine, [request], timing, most=most))
        after = pipeline.backend.transfers.counters()
        self.counted = {name: after[name] - before.get(name, 0) for name in after}
        return engine, timing.steps

    def hardware(self) -> dict[str, Any] | None:
        """What was opened."""
        opened = [pipeline.backend for pipeline in self.pipelines.values()]
        backend = opened[0] if opened else vars(self).get("backend")
        return None if backend is None else dict(backend.describe())

    def answer(self, item: str) -> Answer:
        """What the method named as the stage's kind answers."""
        answer: Answer = getattr(self, self.stage.kind)(item)
        return answer

    def facts(self, item: str) -> Answer:
        self.backend.synchronize()  # its software is loaded then
        return *ask_fact(item), {}

    def kernels(self, item: str) -> Answer:
        """A device's own form itself, whether or not it is the one that serves, in the formats that models run in."""
        if item == DRAWS:
            return self.draws()
        backend, numbers, found = self.backend, dict[str, Any](), list[str]()
        for name in (name for name in JUDGED if name in backend.dtypes):
            dtype = getattr(torch, name)
            candidate = backend.candidates(dtype)[item]
            try:
                apart = candidate.apart()
            except LACKING as error:
                return "unanswered", f"{explained(error)}: the plain one serves", {}
            numbers[f"largest difference, {name}"] = apart
            numbers[f"tolerance, {name}"] = candidate.tolerance
            numbers["serves"] = backend.kernels("auto", dtype).names().get(item, "plain")
            said = f"{apart:.1e} apart in {name}, {candidate.tolerance:g} is allowed"
            if not apart <= candidate.tolerance:
                return "refuted", said, numbers
            found.append(said)
        return "confirmed", "; ".join(found), numbers

    def draws(self) -> Answer:
        """Tokens by inverse CDF, with what serves here: each has a probability, and is where its uniform says.

        Sums in parallel may fall, as a number says; draws must not suffer from it.
        """
        found = [self.drawn_from(vocabulary) for vocabulary in VOCABULARIES]
        return next((each for each in found if each[0] != "confirmed"), found[-1])

    def drawn_from(self, vocabulary: int) -> Answer:
        generator = torch.Generator().manual_seed(SEED)
        probs = (3 * torch.randn(DRAWN, vocabulary, generator=generator)).softmax(-1)
        probs = probs.masked_fill(torch.rand(probs.shape, generator=generator) < 0.5, 0.0)
        uniform = torch.rand(DRAWN, generator=generator)
        given = (probs.to(self.backend.device), uniform.to(self.backend.device))
        served = self.backend.kernels("auto", torch.float32)
        falls = int((given[0].cumsum(-1).diff(dim=-1) < 0).sum().item())
        numbers = {"sums that fall": falls, "of": probs.numel()}
        ends = probs.double().cumsum(-1)
        for draw in (served.sample, sampling.sample):
            token = draw(*given).cpu().long()[:, None]
            own, end = (x.gather(-1, token)[:, 0] for x in (probs.double(), ends))
            target = uniform * ends[:, -1]
            off = torch.maximum(target - end, end - own - target).clamp(min=0).max().item()
            if not bool((own > 0).all()):
                return "refuted", "a token of probability 0 was drawn", numbers
            if off > DRAW_TOLERANCE:
                return "refuted", f"a token is {off:.1e} from where its uniform is", numbers
        return "confirmed", f"{DRAWN} draws from {vocabulary} tokens; {falls} sums fall", numbers

    def caches(self, item: str) -> Answer:
        """Keys and values of all layers after a few steps, at the positions that both devices have final."""
        wanted, result = (self.kept(each, item) for each in (self.host, self.pipeline))
        apart = {}
        for name, want in wanted.items():
            both = min(want.shape[1], result[name].shape[1])
            apart[name] = difference(result[name][:, :both], want[:, :both])
        worst = max(apart, key=lambda name: apart[name])
        shapes = {name: (list(result[name].shape), list(wanted[name].shape)) for name in wanted}
        wrong = [
            name
            for name, (got, want) in shapes.items()
            if got != want or not apart[name] <= CACHE_TOLERANCE
        ]
        numbers = {"largest difference": apart[worst], "tolerance": CACHE_TOLERANCE}
        if wrong:
            what = f"{len(wrong)} of {len(apart)} differ, {worst} the most, by {apart[worst]:.1e}"
            here, there = shapes[worst]
            if here != there:
                what += f"; it is {here} after {CACHE_STEPS} steps, {there} on the CPU"
            return "refuted", what, numbers | {"wrong": wrong}
        return "confirmed", f"{len(apart)} tensors, {apart[worst]:.1e} apart at most", numbers

    def kept(self, pipeline: LanternPipeline, method: str) -> dict[str, torch.Tensor]:
        """Keys and values [R, positions, kv_heads, hd] of each layer's cache, by name, as far as they are final.

        They are 0 where the prefix is padding.
        """
        if method == GROUPED:
            with closing(grouped(pipeline)) as small:
                return self.kept(small, "ar")
        engine, _ = self.steps(pipeline, method, CACHE_STEPS)
        state = engine.state
        counts = state.count.cpu().repeat(engine.spec.rows // engine.spec.images)  # [R]
        pending = engine.spec.tree.depth + 1  # positions that the next step writes at last
        known = pipeline.model.target.config.prefix + counts.min() - pending
        padding = ~state.valid.cpu()[:, :known, None, None]  # [R, positions, 1, 1]
        caches = {"target": state.kv_cache, "drafter": getattr(state.drafting, "kv_cache", None)}
        return {
            f"{name}, layer {layer}, {part}": tensor.cpu()[:, :known].masked_fill(padding, 0)
            for name, cache in caches.items()
            if cache is not None
            for layer, one in enumerate(cache.layers)
            for part, tensor in zip(("keys", "values"), one.read(), strict=True)
        }

    def recaptured(self) -> Answer:
        """Whether engines can be closed and recorded again, in memory that others had."""
        try:
            first = self.drawn(self.pipeline, "ar")[0]
            self.pipeline.engines.close()
            same = first == self.drawn(self.pipeline, "ar")[0]
        except Exception as error:
            return "refuted", explained(error), {}
        return ("confirmed", "the same tokens", {}) if same else ("refuted", "other tokens", {})

    def methods(self, item: str) -> Answer:
        if item == RECAPTURED:
            return self.recaptured()
        if item not in self.host_tokens:
            self.host_tokens[item] = self.drawn(self.host, item)[0]
        want, pipeline = self.host_tokens[item], self.pipeline
        pipeline.backend.memory(reset_peak=True)
        got, steps, report = self.drawn(pipeline, item)
        other = [i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b]
        numbers: dict[str, Any] = {
            "steps": steps,
            "capture seconds": round(report.capture_seconds, 3),
            "captures after warm-up": report.recompiles_after_warmup,
            **{name.replace("_", " "): count for name, count in self.counted.items()},
            **self.memory(pipeline, item),
        }
        for name in ("captures after warm-up", "graph compilations", "cpu fallbacks"):
            if numbers.get(name):
                what = f"{numbers[name]} {name} while drawing, and 0 were expected"
                return "refuted", what, numbers
        if other:
            what = f"{len(other)} of {len(want)} tokens differ, the first is number {other[0]}"
            return "refuted", what, numbers
        part = "first " if len(want) < pipeline.model.target.config.tokens else ""
        return "confirmed", f"the CPU's {part}{len(want)} tokens", numbers

    def memory(self, pipeline: LanternPipeline, method: str) -> dict[str, Any]:
        """Bytes at the peak, and those that `models plan` counts."""
        peak, backend = pipeline.backend.memory().peak, pipeline.backend
        counted = DeviceMemory(None, "", "float32", (), backend.is_host)
        model = Counted(pipeline.model.config)
        planned = planned_peak(model.config, setup_of(model, counted, method=method))
        return {"peak bytes": peak, "planned bytes": planned}

    def cuts(self, item: str) -> Answer:
        """Whether steps are compiled whole: with the flag of the stage the compiler raises where it would run an
        operator eagerly, or on the CPU."""
        try:
            self.steps(self.pipeline, item, CUT_STEPS)
        except Exception as error:
            refusal = refusal_of_a_cut(error)
            if not refusal:
                raise
            return "refuted", refusal, {}
        return "confirmed", f"compiled whole with {CUTS_REFUSED}=0", {}

    def distribution(self, item: str) -> Answer:
        """First tokens of many seeds against the exact distribution of the plain model."""
        if self.no_card:
            return "unanswered", "no card is here, and hundreds of images are drawn", {}
        setting = self.pipeline.resolve(item)
        found = measure(self.pipeline, self.host, setting, PROMPT, SEEDS)
        state: State = "confirmed" if found.chance >= LEAST_CHANCE else "refuted"
        numbers = {"chance": found.chance, "seeds": SEEDS}
        return state, f"first tokens of {SEEDS} seeds: chance {found.chance:.2g}", numbers

    def bench(self, item: str) -> Answer:
        if self.no_card:
            return "unanswered", "no card is here, and its speed is asked", {}
        wanted = BenchRequest(
            model=self.model,
            options=DeviceOptions(device=self.device),
            settings=[Setting("ar"), Setting("lantern++")],
            modes=["auto"],
            batches=[1],
            images=1,
        )
        with closing(open_pipeline(wanted)) as pipeline:
            report = run_bench(pipeline, wanted, [], 0.0)
        names = ("method", "graphs", "seconds_per_image", "tokens_per_step", *FLOORS)
        rows = [{name: row[name] for name in names} for row in report["rows"]]
        said = [
            f"{row['method']}: {row['ms_per_step']:.3g} ms a step, and {row['floor_ms']:.3g} at least"
            for row in rows
        ]
        return "confirmed", "; ".join([*said, *report["notes"]]), {"rows": rows}


def grouped(pipeline: LanternPipeline) -> LanternPipeline:
    """A small random target in the place of the model's, in which two queries share a key head."""
    small = replace(pipeline.model.target.config, layers=2, word_layers=0)
    heads = small.heads if small.rope_sections else 4  # those are of the model's own width of heads
    config = replace(small, heads=heads, kv_heads=heads // 2)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(SEED)
        target = Target(config, pipeline.fit.kernels).requires_grad_(False).eval()
        for weight in target.parameters():
            weight.mul_(2)  # so that what is attended to matters
    target = target.to(pipeline.backend.device)
    model = replace(pipeline.model, target=target, drafter=None)
    return LanternPipeline(model, pipeline.fit.lay_out(model.stepping), pipeline.options)


def refusal_of_a_cut(error: BaseException | None) -> str:
    """The line by which a compiler refuses to cut, of an error or its deepest cause that has one; empty if none has."""
    found = ""
    while error is not None:
        lines = str(error).splitlines() or [""]
        named = [line.strip() for line in lines if "fallback" in line.lower()]
        if named or isinstance(error, AssertionError):
            found = f"{type(error).__name__}: {[*named, lines[0]][0]}"
        error = error.__cause__ or error.__context__
    return found


def explained(error: BaseException) -> str:
    """An error in one line, in plain words where it is a known one."""
    if isinstance(error, LanternError):
        return spelled(error.reason, as_option)
    known = hpu_errors.explain_gaudi(error) if isinstance(error, Exception) else None
    if known is not None:
        return f"{known.what} ({known.hint})"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


def answer_all(
    device: str,
    model: str,
    questions: Sequence[Question],
    send: Callable[[Question | Result | dict[str, Any]], None],
) -> None:
    """Answer questions: send each with its result, and last what the hardware is."""
    asked = Asked(questions[0].stage, device, model)
    with asked.stack:
        for question in questions:
            asked.stage = question.stage
            send(question)
            began = time.perf_counter()
            try:
                state, detail, numbers = asked.answer(question.item)
            except Exception as error:  # any error of a device's software is an answer
                state, detail, numbers = "unanswered", explained(error), {}
            seconds = round(time.perf_counter() - began, 2)
            item, source, stage = question
            send(Result(stage.name, item, state, detail, source, seconds, numbers))
        if (hardware := asked.hardware()) is not None:
            send(hardware)
