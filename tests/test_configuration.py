"""Defaults of options from a TOML file and from variables: who wins, what is refused, and by which words."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lantern_hpu.commands import generate, serve
from lantern_hpu.commands.serve import KEYS, make_parser, serve_request
from lantern_hpu.serve.options import ServeOptions

# The file, the variables, the command line, and what comes of it
GIVEN: dict[str, tuple[str, dict[str, str], list[str], dict[str, Any]]] = {
    "nothing": ("", {}, [], {"slots": 8, "sglang": False, "allow_host": ("127.0.0.1",)}),
    "the file": ("slots = 4\nsglang = true", {}, [], {"slots": 4, "sglang": True}),
    "variables win over the file": ("slots = 4", {"SLOTS": "5"}, [], {"slots": 5}),
    "the command line over both": ("slots = 4", {"SLOTS": "5"}, ["--slots", "6"], {"slots": 6}),
    "an empty variable": ("", {"SLOTS": "", "SGLANG": "false"}, [], {"slots": 8, "sglang": False}),
    "lists": (
        'allow_host = ["a", "b"]\nsizes = "64x96"\nserved_model_name = ["x y", "z"]',
        {"METHOD": "scd,ar"},
        [],
        {
            "allow_host": ("127.0.0.1", "a", "b"),
            "sizes": ((96, 64),),
            "served_model_name": ("x y", "z"),
            "methods": ("scd", "ar"),
        },
    ),
    "keys": (
        'keep_alive = 9.5\nroot_path = "/l"',
        {"API_KEY": "k", "SERVED_MODEL_NAME": "a b"},
        [],
        {"keep_alive": 9.5, "root_path": "/l", "api_key": "k", "served_model_name": ("a", "b")},
    ),
}


@pytest.mark.parametrize("case", GIVEN)
def test_the_nearest_to_the_user_wins(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, variables, words, wanted = GIVEN[case]
    (tmp_path / "serve.toml").write_text(text)
    for name, value in variables.items():
        monkeypatch.setenv(f"LANTERN_HPU_{name}", value)
    words = ["--config", str(tmp_path / "serve.toml"), *words]
    options = serve_request(make_parser().parse_args(words))
    assert {name: getattr(options, name) for name in wanted} == wanted


def sample_of(action: argparse.Action) -> Any:
    """A value of an option of `serve`, as a file has it."""
    if action.nargs == 0:
        return True
    samples: dict[Any, Any] = {int: 3, float: 2.5}
    value = samples.get(action.type, "some")
    return [value, value] if action.nargs in ("*", "+") else value


SERVE = {
    action.option_strings[-1][2:].replace("-", "_"): action
    for action in make_parser()._actions
    if action.option_strings[-1] not in ("--help", "--version", "--config")
}


@pytest.mark.parametrize("key", SERVE)
def test_every_option_of_serve_is_a_key_of_a_file_and_a_variable(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the device, whose variable is what `auto` takes."""
    value, dest = sample_of(SERVE[key]), SERVE[key].dest
    (tmp_path / "serve.toml").write_text(f"{key} = {json.dumps(value)}")
    monkeypatch.delenv("LANTERN_HPU_DEVICE")
    of_file = make_parser().parse_args(["--config", str(tmp_path / "serve.toml")])
    assert getattr(of_file, dest) == value
    words = value if isinstance(value, list) else [value]
    monkeypatch.setenv(f"LANTERN_HPU_{key.upper()}", " ".join(map(str, words)))
    of_variable = vars(make_parser().parse_args([]))[dest]
    assert of_variable == (None if key == "device" else value)


REFUSED = {
    "slot = 4": ("serve.toml has an unknown key slot", "try: slots"),
    "keep-alive = 4": ("unknown key keep-alive", "try: keep_alive"),
    "slots = 'many'": ("argument --slots: invalid int value: 'many'", "--help"),
    "slots = true": ("slots is True", "text, a number, or a list"),
    "sglang = 7": ("sglang is 7", "try: true or false"),
    "[serve]\nslots = 4": ("unknown key serve", "try:"),
    "slots =": ("serve.toml cannot be read", "Invalid value"),
    "timeout = 0": ("timeout is 0", "above 0 seconds"),
    "shutdown_timeout = -1": ("shutdown_timeout is -1", "0 or more"),
    "keep_text = 'free'": ("cannot be served", "auto, host or device"),
    "keep_alive = 0": ("keep_alive is 0", "1 to 3600"),
    "upload_mib = 1": ("upload_mib has no effect without", "sources"),
    "upload_timeout = 9.0": ("upload_timeout has no effect without", "sources"),
    "model_sampling = true": ("model_sampling has no effect without", "sglang"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_a_file_cannot_say_is_refused_in_its_words(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    try:
        code: Any = serve.main(["--port", "0", "--config", str(file)])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert code == 2 and all(part in said for part in REFUSED[text]), said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("command", "key"),
    [(command, key) for command in (generate, serve) for key in command.KEYS],
)
def test_a_key_that_is_typed_as_an_option_is_refused_with_the_key(
    command: ModuleType, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option = "--" + key.replace("_", "-")
    with pytest.raises(SystemExit):
        command.make_parser().parse_args([f"{option}=1"])
    said = capsys.readouterr().err
    assert f"{option} is no option" in said and f"{key} in the file of --config" in said
    assert f"LANTERN_HPU_{key.upper()}" in said
    assert option not in command.make_parser().format_help()


def test_other_commands_and_the_page_have_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('prompt = ["red cat", "dog"]\nseed = 3\nresume = true\n')
    monkeypatch.setenv("LANTERN_HPU_TOP_K", "7")
    args = generate.make_parser().parse_args(["--config", str(file), "--seed", "4"])
    assert (args.prompt, args.seed, args.resume, args.top_k) == (["red cat", "dog"], 4, True, 7)
    with pytest.raises(SystemExit):
        generate.make_parser().parse_args(["--config", str(tmp_path / "none.toml")])
    assert "No such file" in capsys.readouterr().err
    docs = Path(__file__).parent.parent / "docs"
    assert all(
        f"`{key}`" in (docs / "reference/environment.md").read_text() for key in generate.KEYS
    )
    page = (docs / "serving.md").read_text()
    assert all(f"`{key}`" in page for key in KEYS)
    file.write_text(page.partition("```toml\n")[2].partition("```")[0])
    options = serve_request(make_parser().parse_args(["--config", str(file)]))
    assert options.shutdown == 20.0 != ServeOptions.shutdown
