"""From a name to a model on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from lantern_hpu.backends import BACKENDS, DeviceOptions
from lantern_hpu.backends.base import DevicePlan, get_backend, own_defaults
from lantern_hpu.decode.memory import check_room
from lantern_hpu.errors import Arg, OptionError, OutputError, words
from lantern_hpu.models.files.load import OpenedModel, open_model, staged, write_model
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.model import ImageModel, Placement, of_size
from lantern_hpu.models.pictures import check_diffusers, check_diffusion_folder
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.zoo.cards import card
from lantern_hpu.zoo.find import find_parts

Check = Callable[[OpenedModel], None]  # raises a LanternError to refuse a model


def device_name(device: str | torch.device) -> str:
    """`cuda` of `cuda:0`; which of several cards is left to the environment.

    Raises:
        OptionError: another card than the first.
    """
    name, _, index = str(device).partition(":")
    if index not in ("", "0"):
        variable = BACKENDS[name].visible if name in BACKENDS else ""
        hint = f"{variable}={index}, and device={name!r}" if variable else f"device={name!r}"
        raise OptionError(f"device is {device}", "a process draws on the first card it sees", hint)
    return name


def load_model(
    name: str,
    options: DeviceOptions,
    given: PartOverrides = PartOverrides(),
    pictures: bool = True,
    size: tuple[int, int] | None = None,
    check: Check | None = None,
) -> tuple[ImageModel, DevicePlan]:
    """Load a model; what can be refused is refused before its weights are read.

    Args: see `LanternPipeline.from_pretrained`.
    """
    backend = get_backend(options.device, options.graphs)
    opened = open_model(find_parts(name, given, () if pictures else ("vq", "pixels")))
    if size is not None:
        of_size(opened.config, size, name)
    if check is not None:
        check(opened)
    if pictures and opened.pixels is not None:
        check_diffusers()
        check_diffusion_folder(opened.pixels)
    with backend.errors():
        fit = backend.fit(opened.config.target, options)
        options = replace(options, quantize=opened.matrix_format(options.quantize))
        check_room(name, opened.config, fit, options)
        return fill_model(opened, fit, options)


def fill_model(
    opened: OpenedModel, fit: DevicePlan, options: DeviceOptions, framed: bool = False
) -> tuple[ImageModel, DevicePlan]:
    """Read the weights of an opened model onto its device, in the layout that is chosen there.

    Args:
        framed: prompts come framed and split, so that no tokenizer is needed.
    """
    backend, quantize = fit.backend, options.quantize
    upload = backend.transfers.to_device
    place = Placement(fit.dtype, backend.device, fit.kernels, options.keep_text, upload, quantize)
    if backend.compiles_parts:  # with torch's compiler, which takes long to import
        from lantern_hpu.graphs.compiled import PartCompiler

        place = replace(place, compile_parts=PartCompiler(backend))
    with backend.loading(opened.config.target.parameters):
        model = opened.load(place, framed)
        if quantize is not None:
            note = fit.keep_quantized(model.stepping, quantize)
            model.notes += [note] if note else []
        fit = fit.lay_out([*model.stepping, *model.condition.parts().values()])
    return model, fit


@own_defaults()
def write_folder(
    source: str,
    output: Path,
    dtype: str,
    given: PartOverrides = PartOverrides(),
    quantize: str | None = None,
) -> ImageModel:
    """Write a model folder from a model's files, tensor by tensor; `dtype` auto: as they are stored.

    Args:
        quantize: `int8` or `int4` for the matrices of target and drafter.
    """
    if output.exists():
        raise OutputError(f"{output} exists", hint="another name, or remove it")
    opened = open_model(find_parts(source, given))
    if opened.quantize and dtype != "auto":
        why = f"matrices of {source} are {opened.quantize}"
        hint = "leave it out, or convert the model that it was made of"
        raise OptionError(words(Arg("dtype", dtype), "cannot be written"), why, hint)
    parts = 3 + (opened.config.drafter is not None)
    with ProgressBar(parts) as progress:
        progress.set_description_str("loading")
        number = None if dtype == "auto" else getattr(torch, dtype)
        model = opened.load(Placement(number, quantize=opened.matrix_format(quantize)))
        progress.update()
        with staged(output) as folder:
            write_model(model, folder, progress)
            text = card(model.name, model.config, model.fingerprint, output.name)
            (folder / "README.md").write_bytes(text)
    return model
