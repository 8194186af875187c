"""Train a drafter for a target: draw, learn, measure, keep the best.

What a run leaves in its folder:

    samples/*.npz         what the target drew
    held-out/*.npz        what it drew of prompts that nothing is learned from
    state.pt              everything that a resumed run needs
    drafter.safetensors   the weights that had the most drafts accepted on held-out images; the drafter that others load
    drafter.json          which target they belong to
    report.json, curve.png
    README.md             a model card with the figures of the report

Which images a step learns from depends on the seed and the step alone, so that a resumed run
continues as if it had not been interrupted.
"""

from __future__ import annotations

import copy
import io
import json
import math
import operator
import pickle
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save
from torch import Tensor, nn
from tqdm import tqdm

from lantern_hpu.core import Request
from lantern_hpu.decode.batch import Encode
from lantern_hpu.decode.engine import Engine
from lantern_hpu.decode.state import DecodeState
from lantern_hpu.errors import Arg, OptionError, TrainingError, WeightsError, words
from lantern_hpu.files import check_regular, write_file
from lantern_hpu.methods.relaxation import EXACT
from lantern_hpu.methods.request import in_turn
from lantern_hpu.methods.setting import DEFAULT_TREE, METHODS
from lantern_hpu.models.config import DrafterConfig
from lantern_hpu.models.files.names import DRAFTER, DRAFTER_WEIGHTS
from lantern_hpu.models.model import ImageModel
from lantern_hpu.models.transformer import Drafter, RMSNorm, Target
from lantern_hpu.ops.buffers import additive_mask
from lantern_hpu.ops.kv_cache import GrowingCache, LayerCache
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.prompts import read_prompts
from lantern_hpu.tree import DraftTree, load_static
from lantern_hpu.zoo.cards import MEASURED, card
from lantern_lab.train.options import TrainRequest
from lantern_lab.train.unroll import Lesson, Samples, Unrolled, draw_samples, read_encoded, split

DEPTH = 3  # of the chain with which the target drafts for itself

# ------------------------------------------------------------------------------------ checks
# Before hours of training, that the target as its own drafter has every draft accepted: a wrong shift of tokens, wrong
# positions or masks, or guidance in one place only fail it. Features that a drafter reads are not checked, since the
# target needs none; tests compare those with a slow twin.


class Echo(Drafter):
    """A drafter that asks the target: its entry i is the target's position i + 1, in the target's own cache.

    What it writes there is behind the committed positions, or equal to what was there.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target.config)
        self.asked = target
        self.state: DecodeState | None = None  # of the engine that it drafts for

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        rope: Tensor,
        mask: Tensor,
        cache: LayerCache | GrowingCache | None = None,
        index: Tensor | None = None,
    ) -> Tensor:
        """See `Drafter`. The condition's entries, 0 .. P - 2, are left alone: the target knows the condition."""
        assert self.state is not None and index is not None
        prefix = self.config.prefix
        if prefix > 1 and int(index[0]) == 0:
            return features
        words = additive_mask(self.state.valid[:, None, :prefix], mask.dtype)  # [R, 1, 1, P]
        words = words.expand(-1, -1, mask.shape[2], -1)
        shifted = torch.cat([words, mask[..., prefix - 1 : -1]], -1)
        x = self.asked.embed(tokens)
        return self.asked(x, rope, shifted, self.state.kv_cache, index + 1)


@torch.no_grad()
def check_wiring(pipeline: LanternPipeline, prompt: str, seed: int = 0) -> str:
    """Raise a WeightsError if the target, drafting a chain for itself, wastes steps. -> how many it did

    There are none, unless rounding makes a draft fail.
    """
    chain = DraftTree.from_paths("chain", [[0] * length for length in range(1, DEPTH + 1)])
    requests = [Request(prompt, seed, pipeline.model.sampling)]
    echo = Echo(pipeline.model.target)
    tokens = pipeline.model.target.config.tokens
    engine = pipeline.engines.make(pipeline.spec(requests, chain, 1, echo), "eager", echo)
    echo.state = engine.state
    pipeline.warm_up(engine, requests[0])
    steps = pipeline.draw_batch(engine, requests)[0].steps
    more = steps - math.ceil((tokens - 1) / (DEPTH + 1))
    if more > max(1, tokens // 100):
        why = f"drafting for itself it needs {more} steps more than it should"
        raise WeightsError("the target and the decoder do not fit", why, "check the model folder")
    return f"{more} steps more than the fewest" if more else "all of its drafts accepted"


@torch.no_grad()
def profile(engine: Engine, encode: Encode, requests: Sequence[Request]) -> dict[str, Any]:
    """Draw these images uncaptured, with the static tree of the engine's spec, and count which drafts are accepted.

    Returns `tried` [D], walks that reached a node with children at each depth; `accepted` [D][C], how often the child
    of each rank was accepted there; `by_depth` [D], the share accepted.
    """
    tree = engine.spec.tree
    size = engine.spec.images
    total = engine.target.config.tokens
    assert isinstance(tree, DraftTree)
    tried = np.zeros(tree.depth, np.int64)
    accepted = np.zeros((tree.depth, tree.max_children), np.int64)
    steps = 0
    for start in range(0, len(requests), size):
        batch = list(requests[start : start + size])
        padded = batch + batch[-1:] * (size - len(batch))
        for step in engine.trace(encode(padded), padded):
            ends = list(zip(step.accepted.node.tolist(), step.before, strict=True))
            for node, known in ends[: len(batch)]:
                steps += known < total
                path = tree.paths[node]
                # An image that lacks fewer tokens than the tree is deep counts no more than these
                for depth in range(min(len(path) + 1, total - known, tree.depth)):
                    tried[depth] += bool(tree.children[tree.ids[path[:depth]]])
                    if depth < len(path):
                        accepted[depth, path[depth]] += 1
    return {
        "tree": tree.name,
        "tokens_per_step": len(requests) * (total - 1) / steps,
        "tried": tried.tolist(),
        "accepted": accepted.tolist(),
        "by_depth": (accepted.sum(1) / tried.clip(min=1)).tolist(),
    }


# ------------------------------------------------------------------------------------ training

SAVE_EVERY = 50  # steps between two checkpoints
AVERAGE = 0.99  # decay of the weights' moving average, which is what is measured and kept
CLIP = 0.5  # norm of the gradients


@dataclass
class Progress:
    step: int = 0
    best: float = 0.0  # most tokens a step of a chain
    curve: list[dict[str, float]] = field(default_factory=list)  # a point a measurement
    losses: list[float] = field(default_factory=list)  # of every step


def like_the_target(target: Target, config: DrafterConfig) -> Drafter:
    """A drafter to begin with: it passes the feature on, with the target's embedding and last block at hand.

    The block adds nothing at first: what it adds in the target is meant for the stream before the final norm,
    and features come after it. Where norms scale what it adds, they are zero, else the last matrices: a norm of zeros
    has gradients without bound.
    """
    drafter = Drafter(target.config, config, target.kernels)
    dim = target.config.dim
    with torch.no_grad():
        rows = torch.arange(drafter.embed.num_embeddings, device=target.device)
        drafter.embed.weight.copy_(target.embed(rows))
        known = target.layers[-1].state_dict()
        wanted = drafter.block.state_dict()
        drafter.block.load_state_dict({name: known[name] for name in wanted})
        block = drafter.block
        norms = block.attention_post_norm, block.ffn_post_norm
        last = norms if isinstance(norms[0], RMSNorm) else (block.attention.out, block.ffn.down)
        for part in last:
            part.weight.zero_()
        drafter.fc.weight.normal_(std=0.02)
        drafter.fc.weight[:, dim:] += torch.eye(dim, device=drafter.fc.weight.device)
        drafter.fc.bias.zero_()
        for name, weight in drafter.aux.named_parameters():
            if name.endswith("linear.weight"):
                weight.zero_()
    return drafter.to(target.device)


def drafter_config(model: ImageModel, aux_layers: Sequence[int] = ()) -> DrafterConfig:
    """That of the model's own drafter, with `aux_layers` in place of its own if there are any; but a new one is trained
    on shifted tokens, which that one may not be."""
    last = model.target.config.layers - 1
    if any(layer > last for layer in aux_layers):
        what = words(Arg("aux_layers"), f"is {','.join(map(str, aux_layers))}")
        raise OptionError(what, f"{model.name} has layers 0 to {last}")
    own = replace(model.config.drafter or DrafterConfig(), shift=1)
    return replace(own, aux_layers=tuple(aux_layers)) if aux_layers else own


def begin(model: ImageModel, finetune: bool, seed: int, aux_layers: Sequence[int] = ()) -> Drafter:
    """What a run begins with: a drafter made from the target, or the one that the model has.

    The seed is that of the weights that the target has nothing for.
    """
    if model.quantize:
        why = f"its matrices are {model.quantize}"
        raise OptionError(f"{model.name} cannot teach a drafter", why, "the model as published")
    torch.manual_seed(seed)
    drafter = like_the_target(model.target, drafter_config(model, aux_layers))
    if finetune:
        if model.drafter is None:
            hint = words(Arg("drafter", "FILE"), ", or without", Arg("finetune"))
            raise OptionError("there is nothing to fine-tune", f"{model.name} has no drafter", hint)
        known = model.drafter.state_dict()
        if model.drafter.aux_layers != drafter.aux_layers:  # what reads other layers is new
            known = {name: value for name, value in known.items() if not name.startswith("aux.")}
        drafter.load_state_dict(drafter.state_dict() | known)
    return drafter


class DrafterTraining:
    def __init__(
        self,
        pipeline: LanternPipeline,
        drafter: Drafter,
        samples: Samples,
        held_out: Samples,
        wanted: TrainRequest,
        accelerator: Accelerator,
    ) -> None:
        options = wanted.options
        self.pipeline, self.samples, self.held_out = pipeline, samples, held_out
        self.folder, self.options, self.accelerator = wanted.output, options, accelerator
        self.drafter = drafter
        self.average = [w.detach().clone() for w in drafter.parameters()]
        unrolled = Unrolled(drafter, pipeline.model.target, options.unroll)
        optimiser = torch.optim.AdamW(
            drafter.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.model: nn.Module
        self.model, self.optimiser = accelerator.prepare(unrolled, optimiser)
        self.progress = Progress()

    # -- one step

    def lesson(self) -> Lesson:
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        number = self.progress.step * processes + rank  # of all lessons of all processes
        generator = torch.Generator().manual_seed(self.options.seed + (number << 20))
        index = torch.randint(len(self.samples.prompts), (self.options.batch,), generator=generator)
        prompts = [self.samples.prompts[i] for i in index]
        return self.read(prompts, self.samples.tokens[index])

    def read(self, prompts: Sequence[str], tokens: Tensor) -> Lesson:
        """These images [b, N] as the target has them."""
        with self.accelerator.autocast(), torch.no_grad():
            tokens = tokens.to(self.accelerator.device)
            return Lesson(self.pipeline.model, prompts, tokens, self.drafter.aux_layers)

    def learn(self) -> tuple[float, float]:
        """One step. -> its loss, and the overlap of its first pass."""
        options, progress = self.options, self.progress
        loss, overlaps = self.model(self.lesson())
        value = float(self.accelerator.gather(loss.detach()[None]).mean())
        if not math.isfinite(value):
            self.stop("the loss")
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.drafter.parameters(), CLIP)
        # float16's own scaling leaves out such a step and continues with a smaller scale.
        if self.accelerator.mixed_precision != "fp16" and not bool(torch.isfinite(norm)):
            self.stop("a gradient")
        for group in self.optimiser.param_groups:
            group["lr"] = options.rate(progress.step)
        self.optimiser.step()
        self.optimiser.zero_grad()
        progress.step += 1
        progress.losses.append(value)
        # Early on the average follows closely, so that it forgets the start.
        decay = min(AVERAGE, (1 + progress.step) / (10 + progress.step))
        weights = [w.detach() for w in self.drafter.parameters()]
        torch._foreach_lerp_(self.average, weights, 1 - decay)
        return value, float(overlaps[0])

    def stop(self, what: str) -> NoReturn:
        why = f"in step {self.progress.step + 1}; the weights of the last checkpoint are kept"
        hint = words(Arg("resume"), "with a lower", Arg("lr"))
        raise TrainingError(f"{what} is not a number", why, hint)

    def run(self) -> dict[str, Any]:
        """All steps that are left. -> the report"""
        options, progress = self.options, self.progress
        shown = self.accelerator.is_main_process
        with tqdm(
            total=options.steps, initial=progress.step, unit="step", disable=not shown
        ) as bar:
            while progress.step < options.steps:
                loss, overlap = self.learn()
                bar.set_postfix_str(f"loss {loss:.3f}, accepted {overlap:.3f}", refresh=False)
                bar.update()
                ends = progress.step == options.steps
                if ends or progress.step % options.measure_every == 0:
                    self.milestone(bar)
                if ends or progress.step % SAVE_EVERY == 0:
                    self.save()
            if not progress.curve:  # resumed at its end, before any measurement
                self.milestone(bar)
        return self.finish()

    # -- measuring

    def averaged(self) -> Drafter:
        """A drafter with the averaged weights, in float32."""
        drafter = copy.deepcopy(self.drafter)
        with torch.no_grad():
            for weight, value in zip(drafter.parameters(), self.average, strict=True):
                weight.copy_(value)
        return drafter.eval()

    @torch.no_grad()
    def overlaps(self) -> list[float]:
        """The chances of the averaged weights' drafts to be accepted, pass by pass, over held-out images.

        They are the same images each time and nothing is drawn, so there is far less noise than in tokens a step.
        """
        held, size = self.held_out, self.options.batch
        unrolled = Unrolled(self.averaged(), self.pipeline.model.target, self.options.unroll)
        total = torch.zeros(self.options.unroll)
        for start in range(0, len(held.prompts), size):
            prompts = held.prompts[start : start + size]
            lesson = self.read(prompts, held.tokens[start : start + size])
            with self.accelerator.autocast():
                _, overlaps = unrolled(lesson)
            total += len(prompts) * overlaps.float().cpu()
        return (total / len(held.prompts)).tolist()

    def drawn(self, method: str) -> dict[str, Any]:
        """Held-out images drawn with the averaged weights, the default tree, and a method's own relaxation."""
        model, options, held = self.pipeline.model, self.options, self.held_out
        relaxation = (METHODS[method].relaxation or EXACT).fit(model.codes)
        index = range(options.measured)
        requests = in_turn(held.prompts, index, options.seed, model.sampling, relaxation)
        drafter = self.averaged().to(model.target.dtype)
        pipeline, tree = self.pipeline, load_static(DEFAULT_TREE)
        spec = pipeline.spec(requests, tree, len(requests), drafter)
        engine = pipeline.engines.make(spec, "eager", drafter)
        return profile(engine, partial(pipeline.prefix, engine), requests)

    def milestone(self, bar: tqdm[Any]) -> None:
        """Measure, keep the weights if more drafts than ever were accepted, and say so."""
        progress, recent = self.progress, self.progress.losses[-self.options.measure_every :]
        point = {"step": float(progress.step), "loss": statistics.fmean(recent)}
        if self.accelerator.is_main_process:
            point["chain"] = chain(self.overlaps())
            if point["chain"] > progress.best:
                progress.best = point["chain"]
                self.keep()
        self.accelerator.wait_for_everyone()
        progress.curve.append(point)
        said = ", ".join(f"{name} {value:.3f}" for name, value in point.items() if name != "step")
        if self.accelerator.is_main_process:
            bar.write(f"step {progress.step}: {said}", file=sys.stderr)

    # -- files

    def write(self, name: str, data: bytes) -> None:
        write_file(self.folder / name, data, force=True)

    def keep(self) -> None:
        """Write the averaged weights and what they are."""
        names = [name for name, _ in self.drafter.named_parameters()]
        tensors = dict(zip(names, self.average, strict=True))
        self.write(DRAFTER_WEIGHTS, save({n: t.contiguous() for n, t in tensors.items()}))
        about = {
            "target": self.pipeline.model.fingerprint,
            "options": self.drafter.drafter_config.as_json(),
            "step": self.progress.step,
        }
        self.write(DRAFTER, json.dumps(about, indent=1).encode())

    def save(self) -> None:
        if not self.accelerator.is_main_process:
            return
        state = {
            "target": self.pipeline.model.fingerprint,
            "drafter": self.drafter.state_dict(),
            "average": self.average,
            "optimiser": self.optimiser.state_dict(),
            "progress": vars(self.progress),
            "options": asdict(self.options),
            "tokens": self.samples.file,
        }
        content = io.BytesIO()
        torch.save(state, content)
        self.write("state.pt", content.getvalue())

    def resume(self) -> None:
        file = self.folder / "state.pt"
        check_regular(file)
        try:
            state = torch.load(file, weights_only=True, map_location=self.accelerator.device)
            if state["target"] != self.pipeline.model.fingerprint:
                why = "it was made with another target"
                raise WeightsError(f"{file} cannot be used", why, words("another", Arg("output")))
            self.options.check_resumed(state["options"])
            if state["tokens"] != self.samples.file:
                why = "the run was begun with another file, or none"
                raise OptionError(words(Arg("tokens"), "cannot change"), why, "that one again")
            self.drafter.load_state_dict(state["drafter"])
            self.average = list(state["average"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.progress = Progress(**state["progress"])
        except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"cannot read {file}", repr(error)) from error
        except pickle.UnpicklingError as error:
            raise WeightsError(f"cannot read {file}", "it is damaged") from error

    def finish(self) -> dict[str, Any]:
        """The report of the kept weights, and the curve."""
        if not self.accelerator.is_main_process:
            return {}
        about = json.loads((self.folder / DRAFTER).read_text())
        kept = load_file(self.folder / DRAFTER_WEIGHTS)
        self.average = [kept[name] for name, _ in self.drafter.named_parameters()]
        methods = MEASURED if self.pipeline.model.knows_neighbours else MEASURED[:1]
        report = {
            "kind": "lantern_hpu.train drafter",
            "target": about["target"],
            "steps": self.progress.step,
            "kept_step": about["step"],
            "samples": len(self.samples.prompts),
            "held_out_prompts": len(set(self.held_out.prompts)),
            "overlaps": self.overlaps(),
            **{method: self.drawn(method) for method in methods},
            "curve": self.progress.curve,
        }
        self.write("report.json", json.dumps(report, indent=1).encode())
        self.write("curve.png", curve(self.progress))
        model = self.pipeline.model
        about_model = (model.name, model.config, model.fingerprint)
        self.write("README.md", card(*about_model, self.folder.name, report))
        return report


def chain(overlaps: Sequence[float]) -> float:
    """Expected tokens a step of a chain whose drafts are accepted with these chances, each after the one before."""
    return 1 + sum(accumulate(overlaps, operator.mul))


def curve(progress: Progress) -> bytes:
    """Loss of every step and the chain of each measurement, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    left = figure.add_subplot()
    width = max(1, len(progress.losses) // 200)
    parts = [progress.losses[i : i + width] for i in range(0, len(progress.losses), width)]
    smooth = [statistics.fmean(part) for part in parts]
    left.plot([width * (i + 0.5) for i in range(len(smooth))], smooth, color="#999", label="loss")
    left.set(xlabel="step", ylabel="loss")
    right = left.twinx()
    points = [(p["step"], p["chain"]) for p in progress.curve if "chain" in p]
    right.plot(*zip(*points, strict=True), "o-", color="#1b6ca8")
    right.set_ylabel("tokens a step of a chain, held out", color="#1b6ca8")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


# ------------------------------------------------------------------------------------ a run


def train(wanted: TrainRequest) -> dict[str, Any]:
    """Draw, train, measure; only the main process has a report, the others an empty one."""
    options, prompts = wanted.options, read_prompts(wanted.data)
    learned, held_out = split(prompts)
    loaded = LanternPipeline.from_pretrained(
        wanted.model, given=wanted.given, **vars(wanted.device)
    )
    with closing(loaded) as pipeline:
        target, precision = pipeline.model.target.config, wanted.mixed_precision
        known = wanted.tokens and read_encoded(wanted.tokens, target, held_out)
        start = begin(pipeline.model, wanted.finetune, options.seed, options.read_layers())
        accelerator = Accelerator(cpu=pipeline.backend.is_host, mixed_precision=precision)
        result = check_wiring(pipeline, prompts[0])
        if accelerator.is_main_process:
            print(f"wiring: the target as its own drafter, {result}", file=sys.stderr)
        draw = partial(draw_samples, pipeline, accelerator=accelerator, seed=options.seed)
        lessons = draw(learned, wanted.samples, wanted.output / "samples")
        if known:
            lessons += known
        measured = draw(held_out, options.measured, wanted.output / "held-out")
        run = DrafterTraining(pipeline, start, lessons, measured, wanted, accelerator)
        if wanted.resume:
            run.resume()
        return run.run()
