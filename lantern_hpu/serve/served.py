"""What a server offers: methods as they are recorded, and what requests may ask of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lantern_hpu.core import Request, Sampling
from lantern_hpu.decode.spec import Spec
from lantern_hpu.errors import Arg, OptionError, words
from lantern_hpu.methods.relaxation import PRESETS, Relaxation
from lantern_hpu.methods.setting import AUTO, METHODS, Resolved, verified
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.models.text.frames import reads_pictures, takes_negative
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.serve.options import SGLANG, ServeOptions
from lantern_hpu.tree import Tree

Shape = tuple[tuple[int, int] | None, int | None]  # grid and prefix of a spec
ONE_SHAPE: Shape = (None, None)  # of a model that has one size and one length


@dataclass(frozen=True)
class ServedMethod:
    """One method as it is served."""

    setting: Resolved
    spec: Spec  # of its step, which no request may go past
    shapes: tuple[Shape, ...] = (ONE_SHAPE,)  # captured: each size, for each length of prefix
    relaxations: tuple[str, ...] = ()  # published settings that a request may ask for


@dataclass(frozen=True)
class ServedModel:
    """A model as it is served."""

    names: tuple[str, ...]  # of the model
    takes_negative: bool  # whether a request may have a negative prompt
    sizes: tuple[tuple[int, int], ...]  # height, width; the first is the default
    by_request: bool  # whether a request has its size, or the model has one
    sources: int  # pictures that a request may be drawn from; 0: none
    rows: int  # of image tokens; 1 where there are no partial pictures
    vocabulary: int
    codes: int
    sampling: Sampling  # the model's own
    methods: dict[str, ServedMethod]  # the first is the default
    spec_of: Callable[[Request, Tree], Spec]  # what a request needs

    @property
    def name(self) -> str:
        return self.names[0]


def make_served_model(pipeline: LanternPipeline, options: ServeOptions) -> ServedModel:
    """What this model can serve, with what the options allow."""
    model, config = pipeline.model, pipeline.model.target.config
    if model.vq is None and pipeline.diffusion is None and not options.sglang:
        what, why = f"{model.name} cannot be served", "nothing decodes its tokens"
        raise OptionError(what, why, Arg("vq"))
    served: dict[str, ServedMethod] = {}
    asked_as: dict[str, str] = {}
    for asked in options.settings:
        setting = pipeline.resolve(asked, options.slots)
        if setting.method in served:
            if AUTO in (asked.method, asked_as[setting.method]):
                continue  # `auto` may be one that is named as well
            what = words(Arg("method"), f"has {setting.method} twice")
            raise OptionError(what, "a request names the method alone", "one setting of each")
        asked_as[setting.method] = asked.method
        served[setting.method] = serve_method(pipeline, setting, options)
    for name in PRESETS.keys() & set(options.allow):
        if not any(METHODS[method].takes_relaxation(PRESETS[name]) for method in served):
            what, why = f"{name} cannot be allowed", f"none of {', '.join(served)} takes it"
            raise OptionError(what, why, Arg("method", "scd,ar"))

    return ServedModel(
        names=options.served_model_name or (model.name,),
        takes_negative=takes_negative(model.config.condition),
        sizes=options.sizes or (model.config.image_size,),
        by_request=config.code_pixels > 0,
        sources=min(options.sources, reads_pictures(model.config)),
        rows=config.grid[0] if pipeline.diffusion is None else 1,
        vocabulary=config.vocab_size,
        codes=model.codes,
        sampling=usual_sampling(pipeline, options),
        methods=served,
        spec_of=lambda asked, tree: pipeline.spec([asked], tree, 1),
    )


def usual_sampling(pipeline: LanternPipeline, options: ServeOptions) -> Sampling:
    """Of requests that do not say another: the model's own, or what SGLang asks for."""
    if options.sglang and not options.model_sampling:
        return SGLANG
    usual = pipeline.model.sampling
    return replace(usual, top_k=min(usual.top_k, pipeline.model.vocabulary))


def source_prefixes(config: ModelConfig, sources: int) -> tuple[int, ...]:
    """One for each picture that a request may have, and at least up to one for the largest picture."""
    prefixes, vision = config.target.source_prefixes, config.vision
    largest = (vision.most // vision.step) ** 2 if vision else 0  # in codes
    holding = 1 + sum(prefix < largest for prefix in prefixes)
    return prefixes[: max(sources, holding)] if sources else ()


def serve_method(
    pipeline: LanternPipeline, setting: Resolved, options: ServeOptions
) -> ServedMethod:
    """A setting whose step does all that the options allow."""
    model, config = pipeline.model, pipeline.model.target.config
    usual = usual_sampling(pipeline, options)
    rules = {
        name: verified(preset.fit(model.codes), setting.tree, setting.relaxation.verify)
        for name, preset in PRESETS.items()
        if METHODS[setting.method].takes_relaxation(preset)
    }
    filters = {
        "greedy": replace(usual, temperature=0.0),
        "top_k": replace(usual, top_k=config.vocab_size - 1),
        "top_p": replace(usual, top_p=0.9),
    }
    allowed = [filters[name] for name in options.allow if name in filters]
    requests = [Request("any", 0, each, setting.relaxation) for each in (usual, *allowed)]
    requests += [Request("any", 0, usual, rules[name]) for name in options.allow if name in rules]
    specs = [
        pipeline.spec([replace(r, size=size) for r in requests], setting.tree, options.slots)
        for size in options.sizes or (None,)
    ]
    words = (*config.prefixes, config.prefix) if config.prefixes else (None,)
    prefixes = (*words, *source_prefixes(model.config, options.sources))
    shapes = tuple((spec.grid, prefix) for spec in specs for prefix in prefixes)

    def served(rule: Relaxation) -> bool:
        need = pipeline.spec([Request("any", 0, usual, rule)], setting.tree, 1)
        return not specs[0].first_missing(need)

    relaxations = () if setting.commit else tuple(n for n, rule in rules.items() if served(rule))
    return ServedMethod(setting, specs[0], shapes, relaxations)
