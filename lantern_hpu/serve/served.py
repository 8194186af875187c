"""What a server offers: methods as they are recorded, and what requests may ask of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lantern_hpu.core import Request, Sampling
from lantern_hpu.decode.spec import Spec
from lantern_hpu.errors import OptionError
from lantern_hpu.methods.relaxation import PRESETS
from lantern_hpu.methods.setting import AUTO, METHODS, Resolved, Setting
from lantern_hpu.models.text.frames import takes_negative
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.serve.options import ServeOptions
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
    if model.vq is None and pipeline.diffusion is None:
        raise OptionError(f"{model.name} cannot be served", "nothing decodes its tokens", "--vq")
    served: dict[str, ServedMethod] = {}
    settings = options.settings
    if not options.methods and pipeline.resolve(settings[0], options.slots).method == "ar":
        settings = [*settings, Setting("scd")]  # requests can ask for speculation all the same
    for asked in settings:
        setting = pipeline.resolve(asked, options.slots)
        if setting.method in served:
            if asked.method == AUTO or not options.methods:
                continue  # `auto` may be one that is named as well
            why = "requests choose by the name of the method"
            raise OptionError(f"--methods has {setting.method} twice", why, "one setting of each")
        requests = warm_up_requests(pipeline, setting, options)
        specs = [
            pipeline.spec([replace(r, size=s) for r in requests], setting.tree, options.slots)
            for s in options.sizes or (None,)
        ]
        prefixes = (*config.prefixes, config.prefix) if config.prefixes else (None,)
        shapes = tuple((spec.grid, prefix) for spec in specs for prefix in prefixes)
        names = tuple(name for name in PRESETS if serves(pipeline, setting, specs[0], name))
        served[setting.method] = ServedMethod(setting, specs[0], shapes, names)
    for name in PRESETS.keys() & set(options.allow):
        if not any(METHODS[method].takes_relaxation(PRESETS[name]) for method in served):
            why = f"none of {', '.join(served)} takes it"
            raise OptionError(f"{name} cannot be allowed", why, "--methods scd,ar")

    return ServedModel(
        names=options.served_model_name or (model.name,),
        takes_negative=takes_negative(model.config.condition),
        sizes=options.sizes or (model.config.image_size,),
        by_request=config.code_pixels > 0,
        rows=config.grid[0] if pipeline.diffusion is None else 1,
        vocabulary=config.vocab_size,
        codes=model.codes,
        sampling=replace(model.sampling, top_k=min(model.sampling.top_k, config.vocab_size)),
        methods=served,
        spec_of=lambda request, tree: pipeline.spec([request], tree, 1),
    )


def serves(pipeline: LanternPipeline, setting: Resolved, spec: Spec, name: str) -> bool:
    """Whether a recorded step does what a published relaxation needs."""
    rule = PRESETS[name].fit(pipeline.model.codes)
    if setting.commit or not METHODS[setting.method].takes_relaxation(rule):
        return False
    request = Request("any", 0, pipeline.model.sampling, rule)
    return not spec.first_missing(pipeline.spec([request], setting.tree, 1))


def warm_up_requests(
    pipeline: LanternPipeline, setting: Resolved, options: ServeOptions
) -> list[Request]:
    """Requests that between them need all that a step is to do."""
    usual = pipeline.model.sampling
    kinds = [usual]
    if "greedy" in options.allow:
        kinds.append(replace(usual, temperature=0.0))
    if "top_k" in options.allow:
        kinds.append(replace(usual, top_k=pipeline.model.target.config.vocab_size - 1))
    if "top_p" in options.allow:
        kinds.append(replace(usual, top_p=0.9))
    method = METHODS[setting.method]
    presets = [PRESETS[name] for name in options.allow if name in PRESETS]
    codes = pipeline.model.codes
    lent = [rule.fit(codes) for rule in presets if method.takes_relaxation(rule)]
    result = [Request("any", 0, kind, setting.relaxation) for kind in kinds]
    return result + [Request("any", 0, usual, relaxation) for relaxation in lent]
