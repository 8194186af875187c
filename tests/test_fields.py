"""An argument of an image is declared once: each surface has it, and refuses it in its own words."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from lantern_hpu import LanternPipeline, Sampling
from lantern_hpu.cli import COMMANDS, OF_MODELS, module_of
from lantern_hpu.commands import generate
from lantern_hpu.errors import Arg, LanternError, OptionError, as_option, words
from lantern_hpu.fields import IMAGE_PARAMS, MAX_SEED, MOST, given_params
from lantern_hpu.methods.relaxation import Multiplicative
from lantern_hpu.serve.decoder import make_served_model
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.serve.protocol import ApiError, ImagesRequest, ServedModel, invalid, read_call
from scripts.docs.reference_pages import image_parameters

# Values that each argument refuses
BAD: list[tuple[str, Any]] = [
    ("negative_prompt", "dog"),
    ("num_images", 0),
    ("height", 0),
    ("height", 41),
    ("width", 7),
    ("seed", -2),
    ("seed", 2**63),
    *(("method", text) for text in ("egle", "lantern++@oak", "ar@chain_2", "lantern++@dynamic")),
    *(("method", text) for text in ("scd@0", "scd@9:3x", "ar:lambda-5", "lantern++:lamda-5")),
    *(("method", f"lantern++:{text}") for text in ("lambda=0.5", "tv=9", "lambda=2:delta=0.1")),
    *(("method", f"lantern++:{text}") for text in ("gap=0.1", "k=99999", "verify=both")),
    *(("method", f"{name}:verify=block") for name in ("ar", "scd", "lantern++")),
    ("cfg_scale", 0.5),
    ("cfg_scale", 101.0),
    ("temperature", 0.001),
    ("temperature", 50.0),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("batch_size", 0),
    ("logprobs", "yes"),
]
ROOT = Path(__file__).parent.parent
PARTS = ("lantern_hpu", "backends", "graphs", "gaudi_emulator", "lantern_lab")
OPTION = re.compile(r"--[a-z][a-z-]*")
each_bad_value = pytest.mark.parametrize(("name", "value"), BAD, ids=str)


def test_every_argument_has_a_bad_value() -> None:
    assert {name for name, _ in BAD} == set(IMAGE_PARAMS)


@each_bad_value
def test_a_command_refuses_in_its_options(
    name: str,
    value: Any,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name in generate.KEYS:
        pytest.skip("a key of --config, read as the words of a file are")
    given = {"model": model, "prompt": "cat", "output": tmp_path / "x.png", name: value}
    line = [text for key, one in given.items() for text in (as_option(Arg(key)), str(one))]
    assert generate.main(line) == 2
    shown = capsys.readouterr().err
    known = generate.make_parser()._option_string_actions
    assert set(OPTION.findall(shown)) <= set(known), shown
    assert not re.search(r"\bguidance_scale|num_images_per_prompt|\b\w+=\"", shown), shown


@each_bad_value
def test_a_call_refuses_in_its_arguments(name: str, value: Any, pipeline: LanternPipeline) -> None:
    python = IMAGE_PARAMS[name].name_for("python")
    with pytest.raises(LanternError) as caught:
        pipeline("cat", **{python: value})
    shown = str(caught.value)
    assert caught.value.field in (python, "height" if name == "width" else ""), shown
    assert "--" not in shown and not re.search(r"\bcfg_scale|\bnum_images\b", shown), shown


@pytest.fixture(scope="module")
def served(pipeline: LanternPipeline) -> ServedModel:
    return make_served_model(pipeline, ServeOptions("tiny", methods=("lantern++", "scd@8", "ar")))


def refusal(body: dict[str, Any], served: ServedModel) -> ApiError | None:
    """What a server answers to a body that it refuses."""
    try:
        read_call(ImagesRequest.model_validate(body), served)
    except ValidationError as error:
        return invalid([{**one, "loc": ("body", *one["loc"])} for one in error.errors()])
    except ApiError as error:
        return error
    return None


@each_bad_value
def test_a_request_refuses_in_its_fields(name: str, value: Any, served: ServedModel) -> None:
    field = IMAGE_PARAMS[name].name_for("http")
    if not field:
        pytest.skip("no field of a request")
    refused = refusal({"prompt": "cat", field: value}, served)
    assert refused is not None and refused.param == field
    assert not OPTION.search(refused.message.partition("where the server has")[0])


# What Python alone can be given
CALLS = [
    ({"prompt": " "}, 'prompt="a red apple"'),
    ({"prompt": None}, "prompt is None: allowed: a string, or a list of strings"),
    ({"prompt": ["cat", 3]}, "prompt is 3"),
    ({"prompt": []}, "prompt is an empty list"),
    ({"seed": 1.5}, "seed is 1.5: allowed: a whole number, -1 (random) to 9223372036854775807"),
    ({"seed": "3"}, "seed is '3': allowed: a whole number"),
    ({"seed": [5, 9, 1]}, "seed has 3 values: allowed: 1, or a single one for all"),
    ({"seed": 0, "generator": torch.Generator()}, "one of seed and generator"),
    ({"num_images_per_prompt": 1.5}, "num_images_per_prompt is 1.5"),
    ({"num_images_per_prompt": [2]}, "num_images_per_prompt is [2]"),
    ({"height": [64]}, "height is [64]"),
    ({"batch_size": [1]}, "batch_size is [1]"),
    ({"negative_prompt": ["a", "b"]}, "negative_prompt has 2 values: allowed: 1"),
    ({"output_type": "jpeg"}, "output_type is jpeg"),
    ({"generator": [torch.Generator()] * 2}, "generator has 2 values"),
    *(({"negative_prompt": one}, "a string, or a list") for one in (5, 1.5, ["cat", 5], b"cat")),
    *(({"method": one}, "a setting as text") for one in (3.5, b"scd", ["scd"])),
    # The nearest name, and the form of a setting that has a part
    ({"num_image_per_prompt": 1}, "num_images_per_prompt"),
    ({"cfg_scale": 1}, "guidance_scale"),
    ({"num_inference_steps": 1}, "method="),
    ({"callback_on_step": 1}, "callback_on_step_end"),
    ({"scheduler": 1}, "method="),
    ({"window": 8}, 'method="scd@8"'),
    ({"method": "eagle", "tree": "chain"}, 'method="eagle@chain"'),
    ({"method": "scd", "relax": "tv=0.1", "window": "8"}, 'method="scd:tv=0.1@8"'),
    ({"relax": Multiplicative(4, lam=5.0)}, 'method="auto:lambda=5:k=4"'),
]


@pytest.mark.parametrize(("arguments", "said"), CALLS)
def test_a_call_refuses_what_python_alone_can_give(
    pipeline: LanternPipeline, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError) as caught:
        pipeline(**{"prompt": "cat"} | arguments)
    assert said in str(caught.value)


def test_numbers_of_numpy_are_pythons_in_a_request() -> None:
    given = {"seed": np.int64(3), "cfg_scale": np.float32(2), "top_k": np.int64(5), "height": 8}
    assert {type(value) for value in given_params(given, "command").values()} == {int, float}


def test_the_schema_of_a_request_has_the_ranges() -> None:
    fields = ImagesRequest.model_json_schema()["properties"]
    ranges = {name: {**fields[name]["anyOf"][0]} for name in ("seed", "top_k", "temperature")}
    assert ranges == {
        "seed": {"type": "integer", "minimum": -1, "maximum": MAX_SEED},
        "top_k": {"type": "integer", "minimum": 0, "maximum": MOST},
        "temperature": {"type": "number", "minimum": 0, "maximum": 10},
    }


# Arguments of Python alone, and of functions that no option reaches
NO_OPTION = {"output_type", "num_images_per_prompt", "torch_dtype", "emulate", "seeds"}


def test_every_argument_that_an_error_names_is_an_option() -> None:
    places = {"Arg": 0, "require": 1, "listed": 1, "naming": 0}
    named = set()
    for file in (file for part in PARTS for file in (ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            place = places.get(getattr(getattr(node, "func", None), "id", ""))
            if not isinstance(node, ast.Call) or place is None or len(node.args) <= place:
                continue
            argument = node.args[place]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                named.add(argument.value)
    assert named - known_options() == NO_OPTION


def known_options() -> set[str]:
    """The options and places of all commands, as arguments are named."""
    names = set()
    for command in (*COMMANDS, *OF_MODELS):
        actions = import_module(module_of(command)).make_parser()._actions
        for action in actions:
            names |= {action.dest, *(text.lstrip("-") for text in action.option_strings)}
            for parser in (action.choices or {}).values() if action.nargs == "A..." else ():
                actions += parser._actions
    return {name.replace("-", "_") for name in names}


def test_every_surface_has_every_argument() -> None:
    options = generate.make_parser()._option_string_actions
    signature = inspect.signature(LanternPipeline.__call__).parameters
    about = inspect.getdoc(LanternPipeline.__call__) or ""
    page = "\n".join(image_parameters())
    for param in IMAGE_PARAMS.values():
        assert param.option in options
        python, http = param.name_for("python"), param.name_for("http")
        assert signature[python].default == param.default
        assert re.search(rf"\b{python}[,:] ", about)
        assert not http or http in ImagesRequest.model_fields
        shown = param.name if param.name in generate.KEYS else param.option
        assert f"`{shown}`" in page and f"`{python}`" in page
    assert {part.name for part in fields(Sampling)} <= set(IMAGE_PARAMS)


def test_each_surface_spells_an_argument_in_its_own_way() -> None:
    hint = words(Arg("method", "eagle"), ", or", Arg("num_images", 2))
    error = OptionError(words(Arg("top_k"), "is 0"), "it is too small", hint)
    assert str(error) == 'top_k is 0: it is too small\n  try: method="eagle", or num_images=2'
    assert error.text(as_option) == (
        "--top-k is 0: it is too small\n  try: --method eagle, or --num-images 2"
    )
    assert error.text(as_option, {"method"}.__contains__) == "--top-k is 0: it is too small"
    assert error.field == "top_k"
